"""`exeat audit` and `exeat why` on a log: one line a record, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exeat.cli import main
from exeat.commands.asking import print_decision
from tests.support.events import intent, outcome, refusal
from tests.support.logs import put, writer


@pytest.fixture
def log(tmp_path: Path) -> str:
    """One request that policy permitted and whose name led to a refused address."""
    made = writer(tmp_path / "log")
    more = {
        "host": "registry.example",
        "port": 443,
        "detail": "documentation",
        "address": "203.0.113.80",
        "status": 403,
        "bytes_up": 0,
        "bytes_down": 0,
    }
    put(made, intent("req_1"), outcome("req_1", error="address-refused", **more))
    made.close()
    return str(tmp_path / "log")


@pytest.fixture
def refused(tmp_path: Path) -> str:
    """Settings with a policy, and a log beside them that holds one refused request of its role."""
    log = tmp_path / "log"
    (tmp_path / "exeat.yaml").write_text(f"version: 1\npolicy: policy.yaml\nlog: {log}\n")
    (tmp_path / "credentials.yaml").write_text("version: 1\ncredentials: {}\n")
    (tmp_path / "policy.yaml").write_text(
        "version: 1\nroles: {agent: {allow: [{name: items, host: api.example, methods: [POST], paths: [/items],"
        " body: {json: {op: [read]}}}]}}\n"
    )
    made = writer(log)
    attempt: dict[str, Any] = {
        "method": "POST",
        "scheme": "https",
        "host": "api.example",
        "port": 443,
        "path": "/items",
    }
    put(made, refusal(request_id="req_2", decision="deny", **{**attempt, "role": "agent"}))
    made.close()
    return str(tmp_path / "exeat.yaml")


def code_of(*arguments: str) -> object:
    """The exit code of one command."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_a_line_of_the_log_says_why(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of an outcome stands in its line, and no line ends in blanks."""
    assert code_of("audit", "search", "--refused", "--log", log) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("address-refused  403")
    assert code_of("audit", "search", "--log", log) == 0
    assert all(line == line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_a_search_for_what_no_log_can_hold_says_so(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped reason or event is told, so that nobody takes it for "this never happened"."""
    assert code_of("audit", "search", "--reason", "no-rul", "--log", log) == 1
    assert "there is no reason code 'no-rul'; did you mean no-rule?" in capsys.readouterr().err
    assert code_of("audit", "search", "--event", "request.refuse", "--log", log) == 1
    assert "there is no event 'request.refuse'; did you mean request.refused?" in capsys.readouterr().err
    assert code_of("audit", "search", "--reason", "no-rule", "--log", log) == 1
    assert capsys.readouterr().err == ""


def test_why_says_what_helps_when_a_permitted_request_failed(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Address, reason and remedy, although the decision was to permit."""
    assert code_of("why", "req_1", "--log", log) == 0
    shown = capsys.readouterr().out
    assert "address: 203.0.113.80" in shown
    assert "error: address-refused (documentation)" in shown
    assert "What helps: " in shown
    assert "  destinations: {registry.example: {addresses: [203.0.113.80/32]}}" in shown


def test_why_says_what_the_policy_of_now_makes_of_a_refused_request(
    refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded request is judged anew; a body, which no log holds, may be given beside it."""
    assert code_of("why", "req_2", "--config", refused) == 0
    shown = capsys.readouterr().out
    assert "The policy files of now" in shown
    assert "near        agent/items, agent/items: the body" in shown
    assert code_of("why", "req_2", "--config", refused, "--body", '{"op": "read"}') == 0
    assert "decision    permit" in capsys.readouterr().out
    assert code_of("why", "https://api.example/items", "-X", "POST", "-c", refused, "--body", '{"op": "write"}') == 1
    assert "decision    deny" in capsys.readouterr().out


def test_why_tells_the_record_alone_where_the_policy_does_not_load(
    refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken policy file takes nothing away from what happened."""
    Path(refused).with_name("policy.yaml").write_text("version: 7\n")
    assert code_of("why", "req_2", "--config", refused) == 0
    shown = capsys.readouterr().out
    assert "reason: no-rule" in shown
    assert "policy files of now" not in shown


@pytest.mark.parametrize(
    "words", [("--body", "x", "--body-file", "-"), ("--header", "nonsense"), ("--body-file", "/nowhere/x")]
)
def test_a_would_be_request_that_cannot_be_read_is_wrong_usage(
    refused: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two bodies, a header without a colon, a file that is not there: exit 2 and a sentence."""
    url = "https://api.example/items"
    config = str(Path(refused).with_name("policy.yaml"))
    assert code_of("policy", "explain", "POST", url, "-f", config, *words) == 2
    assert capsys.readouterr().err.startswith("exeat: ")


@pytest.mark.parametrize(
    ("address", "detail"), [("127.0.0.1", "own-listener"), ("169.254.169.254", "link-local"), ("203.0.113.80", "other")]
)
def test_no_entry_is_offered_that_would_not_help(
    tmp_path: Path, address: str, detail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing opens our listeners or the metadata service, so nobody is told to try."""
    made = writer(tmp_path / "log")
    put(made, intent("req_1"), outcome("req_1", error="address-refused", address=address, detail=detail, status=403))
    made.close()
    assert code_of("why", "req_1", "--log", str(tmp_path / "log")) == 0
    assert "destinations: {" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("adress-refused", "did you mean address-refused?"),
        ("sb_abc", "docs/refusals.md lists the reason codes"),
    ],
)
def test_why_names_what_it_understands(log: str, subject: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A subject that is no request, URL or reason is wrong usage, not a request without records."""
    assert code_of("why", subject, "--log", log) == 2
    error = capsys.readouterr().err
    assert "neither a request id (req_...), nor a URL, nor a reason code" in error
    assert said in error


def test_a_denial_always_says_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """The decision's own remedy, or the one of its reason."""
    print_decision({"decision": "deny", "reason": "no-rule", "rule": None, "remedy": None})
    assert "remedy      Ask the operator" in capsys.readouterr().out
    print_decision({"decision": "deny", "reason": "no-rule", "remedy": "Nearest is a/b."})
    assert "remedy      Nearest is a/b." in capsys.readouterr().out
