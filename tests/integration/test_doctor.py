"""The doctor inside `exeat run`: in shell and in Python, with everything in place and with something taken away."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exeat import doctor
from tests.support.gateway import EXEAT, PATH, Box, Completed, TestGateway, completed
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("arming")

POLICY = 'roles:\n  agent:\n    allow:\n      - {name: x, host: x.test, methods: [GET], paths: ["/**"]}\n'
SCRIPT = "curl -fsS http://exeat.internal/doctor.sh | sh"
PYTHON = "/usr/bin/python3"
JAVA = ["--env", "JAVA_TOOL_OPTIONS=-Djavax.net.ssl.trustStore=/run/exeat/store"]
"""What a sandbox with Java has to have beside what `exeat run` sets."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestGateway]:
    with TestGateway(tmp_path_factory.mktemp("doctor"), policy=POLICY) as made:
        yield made


def test_a_missing_variable_is_named_for_its_client(gateway: TestGateway) -> None:
    """Without git's CA file and with a foreign one for curl, both are named, and the exit code says no."""
    broken = f"unset GIT_SSL_CAINFO; cat /etc/hostname > own.pem; export CURL_CA_BUNDLE=$PWD/own.pem; {SCRIPT}"
    done = gateway.run("sh", "-c", broken)
    assert done.code == 1
    assert "client git: GIT_SSL_CAINFO is missing" in done.out
    assert "client curl: CURL_CA_BUNDLE names a file without the gateway's CA" in done.out


def test_without_a_proxy_variable_the_way_through_is_missing(gateway: TestGateway) -> None:
    """A sandbox whose variables were lost is told so by a copy of the script that it kept."""
    lost = "curl -fsS -o kept.sh http://exeat.internal/doctor.sh; unset http_proxy https_proxy; sh kept.sh"
    done = gateway.run("sh", "-c", lost)
    assert done.code == 1
    assert "client curl: https_proxy is missing; http_proxy is missing" in done.out


def test_the_script_holds_in_a_whole_sandbox(gateway: TestGateway) -> None:
    """Every way round leads nowhere, the gateway is reached, every installed client has what it reads."""
    done = gateway.run("sh", "-c", SCRIPT, options=JAVA)
    assert done.code == 0, done.out
    assert "fails" not in done.out
    assert "unknown" not in done.out
    assert done.out.count("holds") >= 8
    assert done.out.splitlines()[-1].startswith("claimed")


@pytest.mark.skipif(not Path(PYTHON).exists(), reason="the system has no Python of its own")
def test_the_file_alone_holds_in_a_whole_sandbox(gateway: TestGateway) -> None:
    """exeat/doctor.py handed to a sandbox says the same with the system's own Python."""
    done = gateway.run(PYTHON, "-c", Path(doctor.__file__).read_text(), options=JAVA)
    assert (done.code, done.err.count("Traceback")) == (0, 0), done
    assert "a DNS server of its own" in done.out


def test_what_the_doctor_says_arms_nothing(gateway: TestGateway) -> None:
    """A sandbox on the shared listener may fetch and run it; its boundary stays unknown and nothing is on record."""
    box = gateway.sandbox()
    assert box.curl("-f", "http://exeat.internal/doctor.sh").out.startswith("#!/bin/sh")
    assert (gateway.admin.sandbox(box.id)["boundary"], gateway.admin.sandbox(box.id)["armed"]) == (None, False)
    assert gateway.records(event="boundary.proven", sandbox=box.id) == []
    shown = json.dumps(gateway.admin.status())
    assert '"self_check": {"passed": true' in shown


def test_a_claim_is_shown_and_on_record(gateway: TestGateway) -> None:
    """What the doctor found is in `sandbox show` and in the log, by words of ours; a second one at once is refused."""
    box = gateway.sandbox()
    done = box.command("sh", "-c", SCRIPT)
    assert done.out.splitlines()[-1].endswith("taken note of it"), done
    claimed = until(lambda: gateway.admin.sandbox(box.id)["claimed"])
    assert "gateway" in claimed["holds"]
    assert "interfaces" not in claimed["holds"]  # the script cannot see them
    (record,) = gateway.awaited(event="boundary.claimed", sandbox=box.id)
    assert (record["claimed"], record["holds"]) == (True, claimed["holds"])
    assert gateway.admin.sandbox(box.id)["armed"] is False
    assert "claimed" in gateway.exeat("sandbox", "show", box.id).out
    again = send(box, '{"version":1,"findings":[{"check":"direct","state":"holds"}]}')
    assert "limit-reached" in again.out


@pytest.mark.parametrize(
    ("sentence", "arguments", "body", "reason"),
    [
        ("a form", ["-H", "Content-Type: text/plain"], "{}", "claim-refused"),
        ("no type", ["-H", "Content-Type:"], "{}", "claim-refused"),
        ("a page elsewhere", ["-H", "Origin: http://evil.test"], "{}", "claim-refused"),
        ("no origin at all", ["-H", "Origin: null"], "{}", "claim-refused"),
        ("text for the log", [], '{"version":1,"findings":[{"check":"a\\nb","state":"holds"}]}', "claim-refused"),
        ("too long", [], '{"version":1,"findings":"' + "x" * 20_000 + '"}', "body-too-large"),
        ("a long one in pieces", ["-H", "Transfer-Encoding: chunked"], "x" * 20_000, "body-too-large"),
        ("another page", [], None, "method-refused"),
    ],
)
def test_a_hostile_claim_leaves_nothing(
    gateway: TestGateway, sentence: str, arguments: list[str], body: str | None, reason: str
) -> None:
    """Whatever is sent, it is refused by name, nothing of it is in the log, and nothing is kept or armed."""
    box = gateway.sandbox()
    done = send(box, body or "{}", *arguments, page="doctor" if body is not None else "allowed")
    assert reason in done.out, (sentence, done)
    shown = gateway.admin.sandbox(box.id)
    assert (shown["claimed"], shown["armed"]) == (None, False)
    (record,) = gateway.awaited(event="request.refused", sandbox=box.id)
    assert record["reason"] == reason
    assert gateway.records(event="boundary.claimed", sandbox=box.id) == []


def send(box: Box, body: str, *arguments: str, page: str = "doctor") -> Completed:
    words = ["-i", "-H", "Content-Type: application/json", *arguments, "-d", body]
    return box.curl(*words, f"http://exeat.internal/{page}")


# --- on the gateway's machine --------------------------------------------------------------------------------


def test_the_operators_doctor_says_what_a_running_gateway_is_like(gateway: TestGateway) -> None:
    """Outside a sandbox it looks at the machine and at what the gateway says of itself."""
    done = gateway.exeat("doctor", "--output", "json")
    found = {row["what"]: row for row in json.loads(done.out)["findings"]}
    assert found["the gateway"]["state"] == "holds"
    assert found["listen"]["why"].endswith("takes connections")
    assert found["self-check"]["state"] == "holds"
    assert found["CA"]["state"] == "holds"
    assert found["namespaces"]["state"] == "holds"
    assert done.code == 0, done.out


def test_the_operators_doctor_says_what_keeps_a_gateway_from_starting(gateway: TestGateway, tmp_path: Path) -> None:
    """Not running, its port taken, its key open to others: each with what to do."""
    config = tmp_path / "config"
    config.mkdir()
    (config / "key").write_text("11" * 32)
    (config / "key").chmod(0o644)
    settings = config / "exeat.yaml"
    settings.write_text(
        f'version: 1\nlisten: "127.0.0.1:{gateway.port}"\nstate: {tmp_path}/state\nrun: {tmp_path}/run\n'
        "policy: policy.yaml\nkey: {file: key}\n"
    )
    words = [EXEAT, "doctor", "--config", str(settings)]
    done = completed(subprocess.run(words, env={"PATH": PATH, "HOME": str(tmp_path)}, capture_output=True, check=False))
    assert done.code == 1
    assert "fails    the gateway: nothing answers" in done.out
    assert f"127.0.0.1:{gateway.port}: Address already in use" in done.out
    assert "fails    key:" in done.out
    assert "chmod 600" in done.out
    assert "'exeat init' writes the files" in done.out
