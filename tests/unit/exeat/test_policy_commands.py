"""`exeat policy` for scripts: problems are JSON too where JSON was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exeat.cli import main


def test_problems_are_json_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`policy check --output json` prints one document with every problem, and exits 1."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nroles:\n  agent:\n    alow: []\n")
    with pytest.raises(SystemExit) as ended:
        main(["policy", "check", "--file", str(policy), "--output", "json"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert any(line.startswith("policy.yaml:4:5: ") for line in json.loads(shown.out)["problems"])
    assert shown.err == ""


def test_a_policy_whose_tests_fail_can_be_asked_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`policy check` refuses it and points at `policy explain`, which answers from that very policy, and says so."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "version: 1\n"
        "destinations: {shop.example: {port: 8443}}\n"
        "roles:\n"
        "  agent:\n"
        "    allow:\n"
        "      - {name: read, host: shop.example, methods: [GET], paths: [/a]}\n"
        "tests:\n"
        "  - {role: agent, allow: 'GET https://shop.example/a'}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["policy", "check", "--file", str(policy)])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "policy.yaml:8:5: allow GET https://shop.example/a: denied: no-rule (Nearest is agent/read: " in shown.err
    assert "policy explain" in shown.err
    with pytest.raises(SystemExit) as ended:
        main(["policy", "explain", "GET", "https://shop.example/a", "--file", str(policy)])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "the port is 443, not 8443" in shown.out
    assert "1 test(s) of this policy fail" in shown.err


def test_the_credentials_of_a_folder_may_lie_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`policy check --file FOLDER` finds credentials.yaml in the folder or beside it."""
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "policy.yaml").write_text(
        "version: 1\n"
        "roles:\n"
        "  agent:\n"
        "    allow:\n"
        "      - {name: read, host: shop.example, methods: [GET], paths: [/a], credential: shop}\n"
    )
    with pytest.raises(SystemExit):
        main(["policy", "check", "--file", str(folder)])
    assert "has no credential shop" in capsys.readouterr().err
    text = (
        "version: 1\ncredentials: {shop: {kind: bearer, secret: 'store:shop', hosts: [shop.example], owner: team,"
        " placeholder: {env: SHOP_KEY, shape: 'k_{24}'}}}\n"
    )
    for place in (tmp_path, folder):
        (place / "credentials.yaml").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["policy", "check", "--file", str(folder)])
        assert ended.value.code in (None, 0)
        assert "policy is valid: 1 role(s)" in capsys.readouterr().out
        (place / "credentials.yaml").unlink()


def test_a_host_that_no_rule_names_is_told_with_the_one_that_is_near(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`policy explain` says so for a mistyped host."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "version: 1\nroles: {agent: {allow: [{name: read, host: orders.shop.example, methods: [GET], paths: [/a]}]}}\n"
    )
    for url, said in (
        ("https://ordrs.shop.example/a", "no rule of agent is for ordrs.shop.example; did you mean orders.shop."),
        ("https://elsewhere.test/a", "no rule of agent is for elsewhere.test\n"),
    ):
        with pytest.raises(SystemExit):
            main(["policy", "explain", "GET", url, "--file", str(policy)])
        assert said in capsys.readouterr().out
