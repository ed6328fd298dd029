"""A clock that was ahead and was put right: no credential until an operator's word, all else as ever (RULINGS 9.6)."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from tests.support.gateway import Box, TestGateway
from tests.support.origins import Origin
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SECRET = "kq8-Clock-Real-1d7a93c04be2"
AHEAD = 500_000.0
"""Seconds that the clock once was ahead: longer than a leaf is dated back."""
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests,
        placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: keyed, host: api.test, methods: [GET], paths: [/keyed], credential: api}
      - {name: plain, host: api.test, methods: [GET], paths: [/plain]}
"""


def ask(box: Box, origin: Origin, path: str) -> str:
    """The status, by a client that verifies the gateway's certificate."""
    return box.curl("-o", "/dev/null", "-w", "%{http_code}", origin.url(path)).out


def test_a_clock_that_was_put_right_needs_an_operators_word_for_credentials_alone(tmp_path: Path) -> None:
    """Credentials are refused, everything else is served with valid certificates; the reset reaches every process."""
    with Origin("api.test").run_in_thread() as origin:
        gateway = TestGateway(
            tmp_path / "g", policy=POLICY, credentials=CREDENTIALS, secrets={"api": SECRET}, origins=[origin]
        )
        with gateway:
            gateway.stop()
            with sqlite3.connect(gateway.state / "vault" / "state.sqlite") as state:
                later = (repr(time.time() + AHEAD),)
                assert state.execute("update meta set value = ? where key = 'clock_floor'", later).rowcount == 1
            state.close()
            gateway.start()
            assert "clock reset" in gateway.exeat("status").out
            box = gateway.sandbox()
            assert ask(box, origin, "/keyed") == "503"
            assert origin.connections == []
            assert ask(box, origin, "/plain") == "200"
            (handed,) = gateway.awaited(event="request.handoff", sandbox=box.id)
            (refused,) = gateway.awaited(event="broker.refused", request_id=handed["request_id"])
            assert refused["error"] == "clock-behind"
            assert gateway.exeat("clock", "reset", "--why", "the battery was replaced").code == 0
            assert "clock reset" not in gateway.exeat("status").out
            until(lambda: ask(gateway.sandbox(), origin, "/keyed") == "200")
            (action,) = gateway.awaited(event="admin.action", action="clock.reset")
            assert action["why"] == "the battery was replaced"
