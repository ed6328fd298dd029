"""The shape of a refusal follows the place that was asked for, and a refusal of JSON-RPC answers the same id."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.gate import native_shape, reply_to
from rules.catalogue import builtin_services, resolve_service
from rules.facts import Sandbox
from rules.names import RuleId
from rules.policy import Policy, Role, Rule
from tests.support.judged import judged

SERVICES = builtin_services()
MCP = resolve_service(SERVICES, "tracker", "mcp", "https://tracker.example/mcp")
MIRRORS = [
    operation
    for name in ("npm", "pypi", "go", "nuget", "huggingface")
    for operation in resolve_service(SERVICES, name, name, f"https://mirror.example/repository/{name}").operations
]
OPERATIONS = (*SERVICES["github"].operations, *MCP.operations, *MIRRORS)
RULE = Rule(id=RuleId("dev/all"), action="allow", operations=OPERATIONS)
POLICY = Policy(digest="", document={}, roles={"dev": Role(name="dev", rules=(RULE,))}, destinations={}, credentials={})
BOX = Sandbox(tenant="t", id="s", epoch=1, role="dev", owner="o", agent="a", task="k")


@pytest.mark.parametrize(
    ("host", "path", "shape"),
    [
        ("api.github.com", "/graphql", "graphql"),
        ("api.github.com", "/repos/a/b", "forge"),
        ("api.github.com", "/nothing", "forge"),
        ("github.com", "/a/b/info/refs", "git"),
        ("github.com", "/nothing", "forge"),
        ("tracker.example", "/mcp", "jsonrpc"),
        ("tracker.example", "/other", "jsonrpc"),
        ("elsewhere.example", "/graphql", "problem"),
    ],
)
def test_one_url_among_others_has_a_shape_of_its_own(host: str, path: str, shape: str) -> None:
    """GraphQL's shape is for its URL alone; where a host is one protocol, all of it gets that shape."""
    assert native_shape(POLICY, BOX, judged("POST", path, host=host)) == shape


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/repository/npm/nothing/of/npm", "npm"),
        ("/repository/pypi/nothing/of/pypi", "pypi"),
        ("/repository/go/nothing", "go"),
        ("/repository/nuget/nothing/of/nuget", "registry"),
        ("/repository/huggingface/nothing/of/the/hub", "huggingface"),
        ("/repository/elsewhere", "problem"),
        ("/", "problem"),
    ],
)
def test_of_several_registries_below_one_host_the_nearest_is_meant(path: str, shape: str) -> None:
    """What none of them describes is told as the clients of that prefix show it; near none, as the client reads."""
    assert native_shape(POLICY, BOX, judged("POST", path, host="mirror.example")) == shape


def test_only_a_body_that_was_read_gives_an_id() -> None:
    """Before the body came, in another shape, and without a request there is none."""
    facts = judged("POST", "/mcp", host="tracker.example")
    read = replace(facts, body=b'{"jsonrpc":"2.0","id":"a-1","method":"x"}')
    assert reply_to("jsonrpc", facts) is None
    assert reply_to("problem", read) is None
    assert reply_to("jsonrpc", None) is None
    assert reply_to("jsonrpc", read) == "a-1"
