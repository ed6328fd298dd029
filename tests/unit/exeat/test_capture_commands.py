"""`exeat capture` without a kernel behind it: what it prints, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from capture.gateway import ruleset
from capture.plan import Plan, parse_interface
from exeat.cli import app


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["capture", *arguments], input=stdin)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["apply", "check"])
def test_the_kernels_rules_are_roots(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else is told so before anything is started."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, _, said = run(command, "--interface", "tap0=198.19.0.1/30")
    assert (code, "as root" in said) == (1, True), said


@pytest.mark.parametrize(("tool", "package"), [("nft", "nftables"), ("ip", "iproute2")])
def test_a_missing_tool_names_its_package(tool: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing was changed."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == tool else f"/sbin/{name}")
    code, _, said = run("apply", "--interface", "tap0=198.19.0.1/30")
    assert (code, f"install the package {package}" in said) == (1, True), said


@pytest.mark.parametrize(
    "arguments",
    [
        ("print",),
        ("apply",),
        ("print", "--interface", "tap0"),
        ("print", "--interface", "a=198.19.0.1/30", "--interface", "b=198.19.0.2/30"),
        ("tap", "tap0", "--number", "16384"),
    ],
)
def test_a_wrong_plan_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    """Exit code 2 and a sentence, before the kernel is asked anything."""
    code, _, said = run(*arguments)
    assert (code, bool(said)) == (2, True)


def test_no_docker_client_says_how_it_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network may be described elsewhere and read here."""
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    code, _, said = run("docker", "exeat-a")
    assert (code, "docker network inspect NETWORK | exeat capture docker -" in said) == (1, True), said


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '[{"Driver": "overlay", "Name": "x", "Id": "y", "IPAM": {}}]'])
def test_what_is_no_captured_network_prints_no_rules(text: str) -> None:
    """One sentence on standard error, nothing that could be piped into nft."""
    code, out, said = run("docker", "-", stdin=text)
    assert (code, out, said.startswith("exeat: ")) == (1, "", True)


def test_a_docker_network_prints_the_plan_and_its_rules() -> None:
    """The commands stand in comments, so that the whole is still text for nft."""
    network = {"Name": "a", "Id": "0" * 64, "Driver": "bridge", "IPAM": {}, "Options": {}}
    network["IPAM"] = {"Config": [{"Subnet": "198.19.0.0/30", "Gateway": "198.19.0.1"}]}
    code, out, said = run("docker", "-", stdin=json.dumps([network]))
    assert (code, said) == (0, "")
    comments, rules = out.split("table inet", 1)
    assert all(line.startswith("# ") for line in comments.splitlines())
    assert "exeat capture apply --bridge br-000000000000=198.19.0.1/30" in comments
    assert "table inet" + rules == ruleset(Plan.of([parse_interface("br-000000000000=198.19.0.1/30", "bridge")]))


def test_printed_rules_are_the_rules() -> None:
    """Nothing beside them goes to standard output."""
    code, out, said = run("print", "-i", "tap0=198.19.0.1/30", "-b", "br0=198.19.0.5/30")
    plan = Plan.of([parse_interface("tap0=198.19.0.1/30"), parse_interface("br0=198.19.0.5/30", "bridge")])
    assert (code, out, said) == (0, ruleset(plan), "")


def test_every_number_of_a_tap_has_a_subnet_of_its_own() -> None:
    """First, last and those at the edge of an octet are a valid plan together."""
    options = []
    for number in (0, 1, 63, 64, 16383):
        code, out, _ = run("tap", f"tap{number}", "--number", str(number), "--user", "vm")
        assert code == 0
        assert f"ip tuntap add dev tap{number} mode tap user vm\n" in out
        options.append(out.splitlines()[1].removeprefix("exeat capture apply --interface "))
    assert len(Plan.of(parse_interface(option) for option in options).interfaces) == 5
    assert options[-1] == "tap16383=198.19.255.253/30,fd65:7865:6174:4000::1/126"
