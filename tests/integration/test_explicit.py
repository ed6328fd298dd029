"""Explicit operations at the help host: what is offered, refused and run, by curl and by a real MCP client."""

from __future__ import annotations

import base64
import json
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.lanes.tools import CALLS
from proxy.mcp import MAX_RESULT
from tests.support.gateway import Box, TestGateway
from tests.support.origins import Origin
from tests.support.scripts import READ, script, text
from tests.support.signals import Gate

pytestmark = pytest.mark.xdist_group("explicit")

SECRET = "canary-4be1c0d29f7a83e6-canary"

POLICY = """
roles:
  agent:
    allow:
      - name: orders.read
        host: api.test
        methods: [GET]
        paths: ["/v1/orders/{id}"]
        query: {expand: [items]}
        credential: api
        result: {keep: [id, status]}
      - {name: note, host: site.test, methods: [POST], paths: [/note]}
      - name: release
        host: api.test
        methods: [POST]
        paths: [/release]
        body: {json: {service: [shop], version: string}}
      - name: orders.list
        host: api.test
        methods: [GET]
        paths: [/v1/orders]
        credential: api
      - name: site.read
        host: site.test
        methods: [GET]
        paths: ["/public/**"]
        query: any
    deny:
      - {name: closed, host: site.test, methods: [GET], paths: [/public/closed]}
  other:
    allow:
      - {name: nothing, host: nothing.test, methods: [GET], paths: [/]}
"""
CREDENTIALS = """
version: 1
credentials:
  api:
    {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests, placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
HELP = "http://exeat.internal"

CLIENT = """
import asyncio, json, sys
import mcp
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

async def main():
    url, mode, calls = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    told = []
    http = create_mcp_http_client()
    async with http, Client(streamable_http_client(url, http_client=http), mode=mode) as client:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        for name, arguments in calls:
            try:
                result = await client.call_tool(name, arguments)
                told.append([result.is_error, result.content[0].text])
            except mcp.MCPError as error:
                told.append(["refused", error.error.message])
    print(json.dumps({"tools": tools, "told": told}))

asyncio.run(main())
"""


class Scene:
    def __init__(self, gateway: TestGateway, api: Origin, site: Origin) -> None:
        self.gateway, self.api, self.site = gateway, api, site
        self.box = gateway.sandbox()

    def post(self, name: str, value: Any, *extra: str, box: Box | None = None) -> tuple[int, Any]:
        """Status and answer of one explicit operation."""
        sent = value if isinstance(value, str) else json.dumps(value)
        answer = (box or self.box).curl(
            "-w", "\n%{http_code}", "-H", "Content-Type: application/json", *extra, "-d", sent, f"{HELP}/{name}"
        )
        body, _, status = answer.out.rpartition("\n")
        try:
            return int(status), json.loads(body)
        except ValueError:
            return int(status), body

    @property
    def seen(self) -> int:
        """Requests that reached an origin."""
        return len(self.api.received) + len(self.site.received)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    order = text('{"id":7,"status":"paid","secret_note":"x"}', 200, ("Content-Type", "application/json"))
    with (
        Origin("api.test", address="127.0.0.81", handler=script(READ, order)).run_in_thread() as api,
        Origin("site.test", address="127.0.0.82").run_in_thread() as site,
        TestGateway(
            tmp_path_factory.mktemp("explicit"),
            policy=POLICY,
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=[api, site],
        ) as gateway,
    ):
        yield Scene(gateway, api, site)


@pytest.fixture(autouse=True)
def _own_sandbox(scene: Scene) -> None:
    """Each test has a sandbox of its own, so that its records are told from those of others."""
    scene.box = scene.gateway.sandbox()


REFUSED = [
    ("an operation of another role", "operations/nothing", {}, 404, "not-found"),
    ("an operation that nobody has", "operations/orders.write", {}, 404, "not-found"),
    ("no JSON", "operations/orders.read", "{", 400, "input-refused"),
    ("an input that fits no schema", "operations/orders.read", {"path": {"id": 7, "x": 1}}, 400, "input-refused"),
    ("a path that leaves its place", "operations/site.read", {"path": {"rest": "../v1"}}, 400, "input-refused"),
    ("a host of its own", "operations/site.read", {"host": "evil.test", "path": {"rest": "a"}}, 400, "input-refused"),
    ("what a deny rule closes", "operations/site.read", {"path": {"rest": "closed"}}, 403, "denied-by-rule"),
    ("a body beside it", "operations/release", {"body": {"service": "x", "version": "1"}}, 403, "body-not-judged"),
    ("a page that takes no POST", "operations", {}, 403, "method-refused"),
    ("a query that no request may have", "operations/site.read", {"path": {"rest": "a"}, "query": {"a": "x" * 9000}},
     400, "input-refused"),
    ("an input over its bound", "operations/orders.read", "{" + " " * 70_000 + "}", 413, "body-too-large"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "status", "reason"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_what_states_no_permitted_request_is_refused(
    scene: Scene, name: str, value: Any, status: int, reason: str
) -> None:
    """Expect a problem document with the reason, one refusal on record, and no origin asked."""
    before = scene.seen
    code, problem = scene.post(name, value)
    assert (code, problem["reason"]) == (status, reason)
    assert scene.seen == before
    (record,) = scene.gateway.awaited(event="request.refused", sandbox=scene.box.id)
    assert record["reason"] == reason


@pytest.mark.parametrize("extra", [("-H", "Content-Type: text/plain"), ("-H", "Origin: http://evil.test")])
@pytest.mark.parametrize("name", ["operations/site.read", "mcp"])
def test_a_page_elsewhere_cannot_ask(scene: Scene, name: str, extra: tuple[str, ...]) -> None:
    """Expect a form's media type and a foreign Origin to be refused before the input is read (B-numbers of CSRF)."""
    before = scene.seen
    code, problem = scene.post(name, {"path": {"rest": "a"}}, *extra)
    assert (code, problem["reason"]) == (400, "input-refused")
    assert scene.seen == before


def test_what_is_offered_is_what_the_role_permits(scene: Scene) -> None:
    """Expect names, effects, bindings and schemas of this sandbox's own role."""
    listed = scene.box.curl(f"{HELP}/operations").json()
    assert [entry["name"] for entry in listed["operations"]] == [
        "note",
        "orders.list",
        "orders.read",
        "release",
        "site.read",
    ]
    one = scene.box.curl(f"{HELP}/operations/orders.read").json()
    assert one == listed["operations"][2]
    assert one["effect"] == "read"
    assert one["input"]["properties"]["path"]["required"] == ["id"]


def test_only_the_result_of_a_credentialed_operation_comes_back(scene: Scene) -> None:
    """Expect the origin to see the secret, the sandbox the kept fields, and the broker's records the whole story."""
    code, result = scene.post("operations/orders.read", {"path": {"id": 7}, "query": {"expand": "items"}})
    assert (code, result) == (200, {"id": 7, "status": "paid"})
    seen = scene.api.received[-1]
    assert seen.target == "/v1/orders/7?expand=items"
    assert seen.values("authorization") == [f"Bearer {SECRET}"]
    (handed,) = scene.gateway.awaited(event="request.handoff", sandbox=scene.box.id)
    assert (handed["lane"], handed["operation"]) == ("explicit", "agent/orders.read")


def test_a_body_is_judged_and_sent(scene: Scene) -> None:
    """Expect a judged JSON body to arrive as it was stated."""
    code, _ = scene.post("operations/release", {"body": {"service": "shop", "version": "1.4"}})
    assert code == 200
    assert bytes(scene.api.received[-1].body) == b'{"service":"shop","version":"1.4"}'


def test_a_placeholder_in_a_body_that_nobody_judges_is_an_alarm(scene: Scene) -> None:
    """Expect it to be sent, as in a body that streams, and the alarm to name the request."""
    code, _ = scene.post("operations/note", {"body": {"text": next(iter(scene.box.placeholders.values()))}})
    assert code == 200
    (intent,) = scene.gateway.awaited(event="request.intent", sandbox=scene.box.id)
    (alarm,) = scene.gateway.awaited(event="placeholder.misused", sandbox=scene.box.id)
    assert alarm["request_id"] == intent["request_id"]


def test_a_plain_operation_streams_its_answer(scene: Scene) -> None:
    """Expect an operation without a credential to be forwarded, and the connection to go on."""
    url = f"{HELP}/operations/site.read"
    post = ("-H", "Content-Type: application/json", "-d", '{"path":{"rest":"a/b"}}')
    answer = scene.box.curl("-w", "%{num_connects} ", *post, url, "--next", "-s", "-w", "%{num_connects}", *post, url)
    assert answer.code == 0
    assert [request.target for request in scene.site.received[-2:]] == ["/public/a/b"] * 2
    intents = scene.gateway.awaited(2, event="request.intent", sandbox=scene.box.id)
    assert [intent["lane"] for intent in intents] == ["explicit"] * 2


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_an_mcp_client_finds_granted_operations_as_tools(scene: Scene, mode: str) -> None:
    """Expect its tools to be what the role permits, a call to run, refusals to be readable, and nothing that grants."""
    calls = [
        ["orders_read", {"path": {"id": 7}}],
        ["site_read", {"path": {"rest": "closed"}}],
        ["orders_write", {}],
        ["why_refused", {}],
    ]
    done = scene.box.command(sys.executable, "-c", CLIENT, f"{HELP}/mcp", mode, json.dumps(calls))
    assert done.code == 0, done.err[-3000:]
    told = done.json()
    assert told["tools"] == [
        "note",
        "orders_list",
        "orders_read",
        "release",
        "site_read",
        "why_refused",
        "request_access",
    ]
    (ok, order), (bad, closed), (no, unknown), (fine, why) = told["told"]
    assert (ok, json.loads(order)) == (False, {"id": 7, "status": "paid"})
    assert bad is True
    assert "denied-by-rule" in closed
    assert (no, unknown) == ("refused", "No such tool is granted to this sandbox.")
    assert fine is False
    assert json.loads(why)[0]["reason"] == "denied-by-rule"
    assert SECRET not in done.out


def call(box: Box, name: str, value: Any) -> socket.socket:
    """A connection over which a tool was called; its answer is still to be read."""
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": value}})
    connection = box.connect()
    authorization = base64.b64encode(f"session:{box.token}".encode()).decode()
    connection.sendall(
        f"POST {HELP}/mcp HTTP/1.1\r\nHost: exeat.internal\r\nProxy-Authorization: Basic {authorization}\r\n"
        f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


def answer(connection: socket.socket) -> tuple[bytes, dict[str, Any]]:
    """Status line and document of what comes until the end."""
    with connection, connection.makefile("rb") as stream:
        head, _, body = stream.read().partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)


def test_a_tool_call_that_states_nothing_answers_at_once(scene: Scene) -> None:
    """Expect the refusal as the tool's error: what is wrong with an input is never a call that hangs."""
    _, told = answer(call(scene.box, "site_read", {"path": {"rest": "a"}, "query": {"a": "x" * 9000}}))
    assert told["result"]["isError"] is True
    assert "input-refused" in told["result"]["content"][0]["text"]


def test_an_answer_over_its_bound_is_no_result_of_a_tool(scene: Scene) -> None:
    """Expect the tool to say where the whole answer is, and the origin's connection to be given up."""
    scene.site.on("/public/large", script(READ, text(b"\x01" * (MAX_RESULT + 1))))
    _, told = answer(call(scene.box, "site_read", {"path": {"rest": "large"}}))
    assert (told["result"]["isError"], "operations/site.read" in told["result"]["content"][0]["text"]) == (True, True)


def test_the_outcome_of_a_tool_call_is_the_one_of_its_request(scene: Scene) -> None:
    """Expect every credentialed call that a tool answered to be on record as completed: one intent, one outcome."""
    box = scene.gateway.sandbox()
    for _ in range(10):
        _, told = answer(call(box, "orders_list", {}))
        assert told["result"]["isError"] is False
    records = scene.gateway.settled(30, sandbox=box.id)
    handed, outcomes = (
        [record for record in records if record["event"] == event] for event in ("request.handoff", "broker.outcome")
    )
    assert len(handed) == 10
    assert sorted(record["request_id"] for record in outcomes) == sorted(record["request_id"] for record in handed)
    assert {(record.get("error", ""), record["completed"]) for record in outcomes} == {("", True)}


def test_a_sandbox_has_only_so_many_tool_calls_at_a_time(scene: Scene) -> None:
    """Expect the one beyond to be refused, another sandbox to be served, and room again once the clients are gone."""
    gate = Gate()
    scene.site.on("/public/slow", script(READ, gate, text("late")))
    box, other = scene.gateway.sandbox(), scene.gateway.sandbox()

    try:
        held = [call(box, "site_read", {"path": {"rest": "slow"}}) for _ in range(CALLS)]
        gate.wait_arrived(CALLS)
        status, told = answer(call(box, "site_read", {"path": {"rest": "a"}}))
        assert (status.split()[1], told["reason"]) == (b"429", "too-many-requests")
        assert answer(call(other, "site_read", {"path": {"rest": "a"}}))[1]["result"]["isError"] is False
        for connection in held:  # a reset: an origin is not kept for nobody
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        outcomes = scene.gateway.awaited(CALLS, event="request.outcome", sandbox=box.id)
        assert [record["error"] for record in outcomes] == ["client-gone"] * CALLS
        assert answer(call(box, "site_read", {"path": {"rest": "a"}}))[1]["result"]["isError"] is False
    finally:
        gate.open()


def test_a_wish_for_access_is_on_record_and_grants_nothing(scene: Scene) -> None:
    """Expect only an own refusal's id to be taken, not too often, in our own words; the same request stays refused."""
    for value, status in (({}, 400), ({"request_id": 7}, 400), ({"request_id": "req_x", "why": "please"}, 400)):
        assert scene.post("access", value)[0] == status
    code, refused = scene.post("operations/site.read", {"path": {"rest": "closed"}})
    assert code == 403
    wish = {"request_id": refused["request_id"]}
    stranger = scene.gateway.sandbox("other")
    assert scene.post("access", wish, box=stranger)[0] == 404
    assert scene.post("access", wish) == (
        200,
        {"asked": refused["request_id"], "granted": False, "next": "A person decides; ask again after that."},
    )
    assert scene.post("access", wish)[0] == 429
    (record,) = scene.gateway.awaited(event="access.requested")
    assert record["request_id"] == refused["request_id"]
    assert (record["sandbox"], record["host"], record["path"]) == (scene.box.id, "site.test", "/public/closed")
    assert scene.post("operations/site.read", {"path": {"rest": "closed"}})[0] == 403
