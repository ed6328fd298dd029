"""The help host's MCP server as values: what is no message, what is no tool, and what becomes a call."""

import json
from typing import Any

from proxy.mcp import (
    MAX_RESULT,
    VERSIONS,
    Ask,
    Call,
    Reply,
    Said,
    Why,
    failed,
    finished,
    message,
    told,
    too_large,
    tool_name,
)
from proxy.mcp import asked as told_of_access
from rules.compile import compile_policy
from rules.explicit import offers
from rules.parse import Sources, parse_sources
from tests.support.policies import sandbox
from tests.support.rows import every_row

POLICY = """
version: 1
roles:
  dev:
    allow:
      - {name: orders.read, host: orders.shop.example, methods: [GET], paths: ["/v1/orders/{id}"]}
      - {name: why_refused, host: trap.shop.example, methods: [GET], paths: [/x]}
"""
OFFERED = offers(compile_policy(parse_sources(Sources(policy={"policy.yaml": POLICY})).document), sandbox())


def sent(value: Any, version: str = "") -> Said:
    return message(value if isinstance(value, bytes) else json.dumps(value).encode(), OFFERED, version)


def asked(method: str, params: Any = None, ident: Any = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": ident, "method": method} | ({} if params is None else {"params": params})


def error_of(answer: Said) -> tuple[Any, int]:
    assert isinstance(answer, Reply)
    assert answer.document is not None
    return answer.document["id"], answer.document["error"]["code"]


NO_MESSAGE = [
    ("bytes that are no JSON", b"{", (None, -32700)),
    ("a key twice", b'{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/list"}', (None, -32700)),
    ("a batch", [asked("ping"), asked("ping")], (None, -32600)),
    ("another version of JSON-RPC", {"id": 1, "method": "ping"}, (None, -32600)),
    ("an id that is a truth value", asked("ping", ident=True), (None, -32600)),
    ("an id that is a list", asked("ping", ident=[1]), (None, -32600)),
    ("parameters that are a list", asked("ping", [1]), (1, -32602)),
    ("a method that no server of tools has", asked("sampling/createMessage"), (1, -32601)),
    ("resources, which are not offered", asked("resources/list"), (1, -32601)),
    ("a tool that is not granted", asked("tools/call", {"name": "orders_write", "arguments": {}}), (1, -32602)),
    ("a tool by the operation's own name", asked("tools/call", {"name": "orders.read"}), (1, -32602)),
    ("a tool in another spelling", asked("tools/call", {"name": "orders_read\x00"}), (1, -32602)),
    ("arguments that are no object", asked("tools/call", {"name": "orders_read", "arguments": []}), (1, -32602)),
    ("a question beyond an id", asked("tools/call", {"name": "why_refused", "arguments": {"x": 1}}), (1, -32602)),
]  # fmt: skip


@every_row(("value", "expected"), [row[1:] for row in NO_MESSAGE], ids=[row[0] for row in NO_MESSAGE])
def test_what_is_no_message_is_an_error_and_no_call(value: Any, expected: tuple[Any, int]) -> None:
    """Each gets a JSON-RPC error with its own id where it had one; nothing runs."""
    assert error_of(sent(value)) == expected


def test_a_revision_that_is_not_spoken_is_refused() -> None:
    """An unknown MCP-Protocol-Version is an error that lists those that are spoken."""
    answer = sent(asked("ping"), "1999-01-01")
    assert error_of(answer) == (1, -32600)
    assert isinstance(answer, Reply)
    assert answer.document is not None
    assert answer.document["error"]["data"] == {"supported": list(VERSIONS)}


def test_a_rule_cannot_take_the_place_of_our_own_tool() -> None:
    """A hand-written operation named why_refused is no tool; the name means ours."""
    assert sent(asked("tools/call", {"name": "why_refused", "arguments": {}})) == Why(id=1, request_id="")


def test_a_notification_gets_no_answer() -> None:
    """Without an id nothing is said."""
    assert sent({"jsonrpc": "2.0", "method": "notifications/initialized"}) == Reply(document=None)


def test_initialisation_agrees_on_the_revision_that_was_asked_for() -> None:
    """A spoken revision is kept; for others the newest is offered. Only tools are there."""
    for wanted, agreed in (("2025-03-26", "2025-03-26"), ("3000-01-01", VERSIONS[0])):
        answer = sent(asked("initialize", {"protocolVersion": wanted}))
        assert isinstance(answer, Reply)
        assert answer.document is not None
        assert answer.document["result"]["protocolVersion"] == agreed
        assert list(answer.document["result"]["capabilities"]) == ["tools"]


def test_granted_operations_are_the_tools() -> None:
    """One tool for each operation, with the schema of its input, and why_refused; nothing that grants."""
    answer = sent(asked("tools/list"))
    assert isinstance(answer, Reply)
    assert answer.document is not None
    tools = {tool["name"]: tool for tool in answer.document["result"]["tools"]}
    assert list(tools) == ["orders_read", "why_refused", "request_access"]
    assert tools["orders_read"]["inputSchema"]["properties"]["path"]["required"] == ["id"]
    assert tools["orders_read"]["annotations"] == {"readOnlyHint": True}


def test_a_call_names_the_operation_and_its_input() -> None:
    """What runs is the operation's own name, with the arguments as its JSON input."""
    answer = sent(asked("tools/call", {"name": "orders_read", "arguments": {"path": {"id": "7"}}}, "a"))
    assert answer == Call(id="a", name="orders.read", input=b'{"path": {"id": "7"}}')


def test_results_say_whether_they_are_errors() -> None:
    """Statuses from 400 on, broken and over-long answers are errors of the tool; binary answers are a blob."""
    call = Call(id=1, name="orders.read", input=b"{}")
    good = finished(call, 200, "application/json", b'{"id":7}')["result"]
    assert good == {"content": [{"type": "text", "text": '{"id":7}'}], "isError": False}
    assert finished(call, 403, "application/problem+json", b"{}")["result"]["isError"] is True
    blob = finished(call, 200, "image/png; x=y", b"\x89PNG\xff")["result"]["content"][0]
    assert blob["resource"]["mimeType"] == "image/png"
    assert failed(call)["result"]["isError"] is True
    assert str(MAX_RESULT) in too_large(call)["result"]["content"][0]["text"]
    assert told(Why(id=1, request_id="req_x"), None)["result"]["isError"] is True


def test_tool_names_are_what_clients_take() -> None:
    """Letters, digits, underscores and hyphens, at most 64."""
    assert [tool_name(offer) for offer in OFFERED] == ["orders_read", "why_refused"]


def test_asking_for_access_is_passed_on_and_grants_nothing() -> None:
    """The input goes to the page that puts it on record; where it did not, the tool says so."""
    ask = sent(asked("tools/call", {"name": "request_access", "arguments": {"request_id": "req_x"}}))
    assert isinstance(ask, Ask)
    assert ask == Ask(id=1, input=b'{"request_id": "req_x"}')
    assert told_of_access(ask, None)["result"]["isError"] is True
    assert told_of_access(ask, b'{"granted": false}')["result"]["isError"] is False
