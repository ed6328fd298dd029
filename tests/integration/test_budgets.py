"""A used-up budget freezes its operation; people see it, thaw it on record, and a neighbour is not touched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.limits import LimitTable
from rules.paths import MAX_QUERY
from tests.support.entries import read_answer
from tests.support.gateway import Box, TestGateway
from tests.support.origins import Origin
from tests.support.scripts import READ, script, text

pytestmark = [pytest.mark.xdist_group("budgets"), pytest.mark.slow]

POLICY = """
roles:
  agent:
    allow:
      - {name: find, host: plain.test, scheme: http, methods: [GET], paths: [/find], query: {q: any}}
"""
FULL = LimitTable().query_bytes_per_host // MAX_QUERY
"""Requests with the longest query that the budget allows."""


class Scene:
    """A gateway and the origin behind it."""

    def __init__(self, gateway: TestGateway, origin: Origin) -> None:
        self.gateway = gateway
        self.authority = f"plain.test:{origin.port}"

    def ask(self, box: Box, size: int) -> bytes:
        """The status of a request with `size` bytes of query."""
        with box.connect() as connection:
            token = f"Proxy-Authorization: Bearer {box.token}"
            target = f"http://{self.authority}/find?q={'a' * (size - 2)}"
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {self.authority}\r\n{token}\r\n\r\n".encode())
            return read_answer(connection)[0].split(b" ")[1]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with (
        Origin(
            "plain.test", address="127.0.0.47", tls=False, handler=script(READ, text("ok"))
        ).run_in_thread() as origin,
        TestGateway(tmp_path_factory.mktemp("budgets"), policy=POLICY, origins=[origin]) as gateway,
    ):
        yield Scene(gateway, origin)


def test_a_budget_freezes_and_thaws(scene: Scene) -> None:
    """The byte beyond the budget is refused and so is every one after it, until `exeat sandbox thaw`."""
    gateway = scene.gateway
    box, neighbour = gateway.sandbox(), gateway.sandbox()
    assert {scene.ask(box, MAX_QUERY) for _ in range(FULL)} == {b"200"}
    assert gateway.exeat("sandbox", "thaw", "sb_nobody").code != 0
    assert scene.ask(box, MAX_QUERY) == b"429"
    assert scene.ask(box, 3) == b"429"
    assert scene.ask(neighbour, 3) == b"200"
    assert "query bytes" in gateway.exeat("sandbox", "show", box.id).out
    assert "query bytes" not in gateway.exeat("sandbox", "show", neighbour.id).out
    assert "1 sandbox(es) used up a budget" in gateway.exeat("status").out
    [frozen] = gateway.awaited(event="sandbox.frozen")
    assert (frozen["sandbox"], frozen["reason"], frozen["detail"]) == (box.id, "limit-reached", "query bytes")
    assert gateway.exeat("sandbox", "thaw", box.id).out == f"thawed {box.id}: 1 operation(s) were frozen\n"
    assert scene.ask(box, MAX_QUERY) == b"200"
    assert "used up a budget" not in gateway.exeat("status").out
    assert gateway.awaited(event="admin.action", action="sandbox.thawed")
