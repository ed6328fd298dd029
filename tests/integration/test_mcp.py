"""MCP end to end: a real client and a real server with the gateway between, with and without a credential."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.authority import Authority
from tests.support.gateway import Box, TestGateway
from tests.support.mcpserver import CLIENT, McpServer

pytestmark = pytest.mark.xdist_group("mcp")

SECRET = "kq8-Mcp-Real-0d7f1c52aa93c1b4"

POLICY = """
services:
  json: {{like: mcp, base: "{json}"}}
  events: {{like: mcp, base: "{events}"}}
roles:
  agent:
    allow:
      - {{name: json, service: json, operations: [read, tools.call], with: {{tool: ["get_*"]}}}}
      - {{name: events, service: events, operations: [read, tools.call], with: {{tool: [get_issue]}}}}
  keyed:
    allow:
      - name: events
        service: events
        operations: [read, tools.call]
        with: {{tool: [get_comments, get_issue]}}
        credential: tracker
"""

CREDENTIALS = """
version: 1
credentials:
  tracker: {{kind: bearer, secret: "store:tracker", hosts: ["{host}"], owner: tests,
             placeholder: {{env: MCP_TOKEN, shape: "mcp_{{40}}"}}}}
"""


class Scene:
    def __init__(self, gateway: TestGateway, plain: McpServer, events: McpServer) -> None:
        self.gateway = gateway
        self.json = plain
        self.events = events
        self.box = gateway.sandbox()
        self.keyed = gateway.sandbox("keyed")

    def ask(self, server: McpServer, *tools: str, mode: str = "auto", box: Box | None = None) -> Any:
        """What the client program tells: the names of the list, and of each call text or refusal."""
        box = box or self.box
        key = box.placeholders.get("MCP_TOKEN")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        done = box.command(sys.executable, "-c", CLIENT, server.url, mode, json.dumps(headers), *tools)
        assert done.code == 0, done.err[-3000:] + self.gateway.errors()[-2000:]
        return done.json()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    authority = Authority()
    with (
        McpServer("json.test", address="127.0.0.71", answers="json", authority=authority) as plain,
        McpServer("events.test", address="127.0.0.72", answers="events", authority=authority) as events,
        TestGateway(
            tmp_path_factory.mktemp("mcp"),
            policy=POLICY.format(json=plain.url, events=events.url),
            credentials=CREDENTIALS.format(host=f"events.test:{events.port}"),
            secrets={"tracker": SECRET},
            origins=[plain, events],  # type: ignore[list-item]
        ) as gateway,
    ):
        yield Scene(gateway, plain, events)


MODES = ["auto", "legacy"]
"""The versions of 2026 without a session, and those before with one."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["json", "events"])
def test_a_tool_that_is_not_granted_is_refused_readably(scene: Scene, which: str, mode: str) -> None:
    """Expect an error of JSON-RPC that says who refused and why, and nothing at the server; others go on."""
    server = getattr(scene, which)
    told = scene.ask(server, "delete_issue", "get_issue", mode=mode)
    refused = told["delete_issue"]
    assert "Refused by Exeat policy" in refused["refused"]
    assert refused["data"]["reason"] == "no-rule"
    assert not any("delete_issue" in line for line in server.requests)
    assert told["get_issue"] == {"text": "issue 7", "error": False}


@pytest.mark.parametrize("mode", MODES)
def test_the_list_shows_what_is_granted(scene: Scene, mode: str) -> None:
    """Expect the granted tools alone, in one message and as a stream of events."""
    assert scene.ask(scene.json, mode=mode)["tools"] == ["get_issue", "get_comments"]
    assert scene.ask(scene.events, mode=mode)["tools"] == ["get_issue"]


@pytest.mark.parametrize("mode", MODES)
def test_a_credential_goes_along_and_the_list_is_cut_for_its_role(scene: Scene, mode: str) -> None:
    """Expect the server to see the secret, never the placeholder, and the client what its own role grants."""
    told = scene.ask(scene.events, "get_comments", "delete_issue", mode=mode, box=scene.keyed)
    assert told["tools"] == ["get_issue", "get_comments"]
    assert told["get_comments"] == {"text": "comments of 7", "error": False}
    assert "Refused by Exeat policy" in told["delete_issue"]["refused"]
    seen = [json.loads(line)["headers"].get("authorization") for line in scene.events.requests]
    assert f"Bearer {SECRET}" in seen
    assert not any(value and scene.keyed.placeholders["MCP_TOKEN"] in value for value in seen)


def test_the_records_name_method_and_tool(scene: Scene) -> None:
    """Expect the operation and its arguments in the log, for what passed and what was cut."""
    box, keyed = scene.gateway.sandbox(), scene.gateway.sandbox("keyed")
    scene.ask(scene.events, "get_issue", box=box)
    scene.gateway.awaited(
        where=lambda record: "tool=get_issue" in record["arguments"], event="request.intent", sandbox=box.id
    )
    scene.ask(scene.events, box=keyed)
    scene.gateway.awaited(event="broker.outcome", sandbox=keyed.id, operation="events/tools.list", kept=True)
