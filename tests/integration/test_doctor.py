"""The doctor inside `exeat run`: in shell and in Python, with everything in place and with something taken away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from exeat import doctor
from tests.support.gateway import TestGateway

pytestmark = pytest.mark.xdist_group("arming")

POLICY = 'roles:\n  agent:\n    allow:\n      - {name: x, host: x.test, methods: [GET], paths: ["/**"]}\n'
SCRIPT = "curl -fsS http://exeat.internal/doctor.sh | sh"
PYTHON = "/usr/bin/python3"


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
    done = gateway.run("sh", "-c", SCRIPT)
    assert done.code == 0, done.out
    assert "fails" not in done.out
    assert "unknown" not in done.out
    assert done.out.count("holds") >= 8
    assert done.out.splitlines()[-1].startswith("claimed")


@pytest.mark.skipif(not Path(PYTHON).exists(), reason="the system has no Python of its own")
def test_the_file_alone_holds_in_a_whole_sandbox(gateway: TestGateway) -> None:
    """exeat/doctor.py handed to a sandbox says the same with the system's own Python."""
    done = gateway.run(PYTHON, "-c", Path(doctor.__file__).read_text())
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
