"""JSON-RPC and MCP: one message, one method, one tool, and headers that say the same."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import RequestFacts
from rules.operations import jsonrpc, mcp
from tests.support.judged import judged
from tests.support.properties import tried
from tests.support.rows import every_row

EXAMPLES = tried()
JSON = judged(content_type="application/json")

CHAIN: dict[str, Any] = {"methods": ["eth_call", "eth_chainId"], "arguments": {"contract": "0.to"}}
CALL: dict[str, Any] = {"methods": ["tools/call"], "arguments": {"repository": "target.repo", "count": "n"}}
ANY: dict[str, Any] = {}


def rpc(value: Any, params: dict[str, Any] = ANY, facts: RequestFacts = JSON) -> Any:
    return jsonrpc.evaluate(params, json.dumps(value).encode(), facts)


def tool(value: Any, params: dict[str, Any] = CALL, facts: RequestFacts = JSON) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": value}
    return mcp.evaluate(params, json.dumps(message).encode(), facts)


ONE = {"jsonrpc": "2.0", "id": 1, "method": "m"}


@every_row(
    ("value", "why"),
    [
        ([ONE], "a batch of one"),
        ([ONE, {**ONE, "id": 2}], "a batch"),
        ([], "an empty batch"),
        ("m", "text"),
        ({**ONE, "jsonrpc": "1.0"}, "version 1"),
        ({**ONE, "jsonrpc": 2.0}, "a number as version"),
        ({"id": 1, "method": "m"}, "no version"),
        ({**ONE, "id": None}, "a null id"),
        ({**ONE, "id": 1.5}, "a fractional id"),
        ({**ONE, "id": True}, "a boolean id"),
        ({**ONE, "id": [1]}, "a list as id"),
        ({**ONE, "id": "x" * 257}, "a long id"),
        ({**ONE, "Method": "n"}, "a second method for servers that ignore case"),
        ({**ONE, "result": 1}, "a method and a result"),
        ({**ONE, "params": "x"}, "text as params"),
        ({**ONE, "params": None}, "null as params"),
        ({**ONE, "method": ""}, "an empty method"),
        ({**ONE, "method": 1}, "a number as method"),
        ({**ONE, "method": "m\x00"}, "a zero byte behind it"),
        ({**ONE, "method": "m\n"}, "a line break behind it"),
        ({**ONE, "method": " m"}, "a space before it"),
        ({**ONE, "method": "m\u200b"}, "a character of no width"),
        ({**ONE, "method": "e\u0301"}, "a name not in its normal form"),
        ({**ONE, "method": "m" * 257}, "a long name"),
        ({"jsonrpc": "2.0", "id": 1, "result": 1}, "an answer"),
        ({"jsonrpc": "2.0", "id": 1, "error": {}}, "an error"),
        ({"jsonrpc": "2.0", "id": 1}, "nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_one_plain_request_is_refused(value: Any, why: str) -> None:
    """Expect None for batches, answers, other versions, disputed keys and names that look like others."""
    assert rpc(value) is None


def test_a_body_that_is_not_strict_json_is_refused() -> None:
    """Expect None for a repeated key, a coding, and another media type."""
    assert jsonrpc.evaluate(ANY, b'{"jsonrpc":"2.0","id":1,"method":"m","method":"n"}', JSON) is None
    assert rpc(ONE, facts=judged(content_type="text/plain")) is None
    assert rpc(ONE, facts=judged("POST", "/", ("content-encoding", "gzip"), content_type="application/json")) is None
    assert rpc(ONE) == {"method": "m"}


def test_a_method_that_is_not_listed_is_another_operation() -> None:
    """`eth_sendRawTransaction` among reads is no read."""
    assert rpc({**ONE, "method": "eth_sendRawTransaction", "params": ["0x"]}, CHAIN) is None
    assert rpc({**ONE, "method": "ETH_call"}, CHAIN) is None
    assert rpc({**ONE, "method": "eth_chainId"}, CHAIN) == {"method": "eth_chainId"}


@pytest.mark.parametrize(
    "params",
    [[], [{}], [{"to": ["0xa"]}], [{"to": None}], [{"to": 1.5}], [{"to": "0xa", "TO": "0xb"}], {"to": "0xa"}, ["0xa"]],
    ids=str,
)
def test_a_bound_value_that_is_missing_or_unsure_stays_unstated(params: Any) -> None:
    """Expect no `contract`: nothing there, no scalar, or two keys that some server takes for one."""
    assert rpc({**ONE, "method": "eth_call", "params": params}, CHAIN) == {"method": "eth_call"}


def test_a_call_states_what_its_parameters_bind() -> None:
    """A path leads through lists and objects to a scalar."""
    found = rpc({**ONE, "method": "eth_call", "params": [{"to": "0xa", "data": "0x"}, "latest"]}, CHAIN)
    assert found == {"method": "eth_call", "contract": "0xa"}
    assert rpc({"jsonrpc": "2.0", "method": "n"}) == {"method": "n"}


@every_row(
    ("params", "why"),
    [
        ({"name": "get_issue\x00"}, "a trailing zero byte"),
        ({"name": "get_issue\u0000"}, "the same as an escape"),
        ({"name": "caf\u0065\u0301"}, "another Unicode form"),
        ({"name": "get\u00adissue"}, "a soft hyphen"),
        ({"name": "\u202eeussi_teg"}, "a turned direction"),
        ({"name": "get issue"}, "a space inside"),
        ({"name": " get_issue"}, "a space before it"),
        ({"name": ""}, "an empty name"),
        ({"name": ["get_issue"]}, "a list"),
        ({"name": None}, "null"),
        ({}, "no name"),
        ({"name": "get_issue", "Name": "drop"}, "a second name for servers that ignore case"),
        ({"name": "get_issue", "arguments": []}, "a list of arguments"),
        ({"name": "get_issue", "arguments": None}, "null as arguments"),
        ({"name": "get_issue", "task": {"ttl": 1}}, "a task, whose result comes by another method"),
        ([1], "parameters by position"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tool_call_that_could_be_read_in_two_ways_is_refused(params: Any, why: str) -> None:
    """Expect None unless the tool's name is plain and stands beside nothing unknown."""
    assert tool(params) is None


def test_other_methods_are_not_tool_calls() -> None:
    """An operation takes the methods that it lists and no other, answers only where it says so."""
    for method in ("tools/list", "Tools/Call", "tasks/result", "sampling/createMessage"):
        body = json.dumps({**ONE, "method": method}).encode()
        assert mcp.evaluate(CALL, body, JSON) is None
    answer = json.dumps({"jsonrpc": "2.0", "id": 0, "result": {"roots": []}}).encode()
    assert mcp.evaluate(CALL, answer, JSON) is None
    assert mcp.evaluate({"answers": True}, answer, JSON) == {}
    assert mcp.evaluate({"answers": True}, json.dumps([json.loads(answer)]).encode(), JSON) is None


@pytest.mark.parametrize(
    "headers",
    [
        (("mcp-method", "tools/list"),),
        (("mcp-method", "tools/call"), ("mcp-method", "tools/call")),
        (("mcp-name", "drop"),),
        (("mcp-name", "get_issue"), ("mcp-name", "get_issue")),
        (("mcp-name", "=?base64?" + base64.b64encode(b"drop").decode() + "?="),),
        (("mcp-name", "=?base64?!?="),),
        (("mcp-param-repo", "evil/x"),),
        (("mcp-param-repo", "acme/shop"), ("mcp-param-repo", "acme/shop")),
    ],
    ids=str,
)
def test_a_header_that_disagrees_with_the_body_is_refused(headers: tuple[tuple[str, str], ...]) -> None:
    """What routes by header must not see another call than what is judged."""
    facts = judged("POST", "/", *headers, content_type="application/json")
    assert tool({"name": "get_issue", "arguments": {"target": {"repo": "acme/shop"}}}, facts=facts) is None


def test_headers_that_repeat_the_body_pass() -> None:
    """The headers of 2026-07-28 with the body's own values, plain and encoded."""
    coded = "=?base64?" + base64.b64encode(b"acme/shop").decode() + "?="
    headers = (("mcp-method", "tools/call"), ("mcp-name", "get_issue"), ("mcp-param-repo", coded), ("mcp-param-n", "3"))
    facts = judged("POST", "/", *headers, content_type="application/json")
    found = tool({"name": "get_issue", "arguments": {"target": {"repo": "acme/shop"}, "n": 3}}, facts=facts)
    assert found == {"method": "tools/call", "tool": "get_issue", "repository": "acme/shop", "count": "3"}


def test_a_tool_call_states_tool_and_bound_arguments() -> None:
    """`tool` always, and those arguments that are there as scalars."""
    assert tool({"name": "get_issue"}) == {"method": "tools/call", "tool": "get_issue"}
    assert tool({"name": "a", "arguments": {"target": {"repo": "acme/shop", "REPO": "b/c"}}}) == {
        "method": "tools/call",
        "tool": "a",
    }
    assert tool({"name": "a", "arguments": {"n": True}, "_meta": {"progressToken": 1}}) == {
        "method": "tools/call",
        "tool": "a",
        "count": "true",
    }


@pytest.mark.parametrize(
    ("method", "params", "found"),
    [
        ("resources/read", {"uri": "file:///a"}, {"uri": "file:///a"}),
        ("resources/read", {"uri": "file:///a b"}, None),
        ("resources/read", {"uri": "a\n"}, None),
        ("resources/read", {}, None),
        ("resources/read", {"uri": "a", "URI": "b"}, None),
        ("prompts/get", {"name": "review"}, {"prompt": "review"}),
        ("tools/list", {"cursor": "x"}, {}),
        ("tools/list", None, {}),
        ("notifications/initialized", {}, {}),
    ],
)
def test_other_methods_state_what_they_name(method: str, params: Any, found: Any) -> None:
    """A resource by its URI, a prompt by its name, the rest by the method alone."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, **({} if params is None else {"params": params})}
    spec = {"methods": ["resources/read", "prompts/get", "tools/list", "notifications/initialized"]}
    got = mcp.evaluate(spec, json.dumps(message).encode(), JSON)
    assert got == (None if found is None else {"method": method, **found})


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"methods": []},
        {"methods": ["a\n"]},
        {"methods": ["tools/call"], "arguments": {"tool": "x"}},
        {"methods": ["tools/call"], "arguments": {"a": "x..y"}},
        {"methods": ["tools/call"], "arguments": ["a"]},
        {"answers": 1},
        {"answers": True, "x": 1},
    ],
    ids=str,
)
def test_parameters_that_say_nothing_clear_are_refused_at_load(params: dict[str, Any]) -> None:
    """Expect ValueError when the policy is loaded."""
    with pytest.raises(ValueError):
        mcp.check(params)


def test_the_parameters_of_these_tests_are_well_formed() -> None:
    """What the tests judge by passes the check of the loader, and names what may be stated."""
    mcp.check(CALL)
    mcp.check({"answers": True})
    jsonrpc.check(CHAIN)
    assert mcp.arguments(CALL) == {"method", "tool", "repository", "count"}
    assert mcp.arguments({"answers": True}) == frozenset()
    assert jsonrpc.arguments(CHAIN) == {"method", "contract"}
    with pytest.raises(ValueError):
        jsonrpc.check({"arguments": {"method": "x"}})


@EXAMPLES
@given(st.text(max_size=20))
def test_a_stated_tool_is_what_was_sent(name: str) -> None:
    """Whatever the name, it is stated as it was sent or not at all."""
    found = tool({"name": name})
    assert found is None or (found["tool"] == name and name.isprintable())


@EXAMPLES
@given(st.binary(max_size=120))
def test_no_body_makes_it_raise(body: bytes) -> None:
    """Whatever comes, the answer is None or arguments."""
    for found in (jsonrpc.evaluate(ANY, body, JSON), mcp.evaluate(CALL, body, JSON)):
        assert found is None or "method" in found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"id":7,"method":1}', 7),
        (b'{"id":"a"}', "a"),
        (b'{"id":null}', None),
        (b'{"id":1.5}', None),
        (b'{"id":[1]}', None),
        (b'[{"id":1}]', None),
        (b'{"id":1,"id":2}', None),
        (b"x", None),
        (b'{"id":1,"x":"' + b"x" * 70_000 + b'"}', None),
    ],
)
def test_a_refusal_finds_the_id_that_it_answers(body: bytes, found: Any) -> None:
    """Whatever else is wrong with a message, its id is told where it is sure."""
    assert jsonrpc.request_id_of(body) == found
