"""Rules about MCP servers: what one binds holds for what it names, and grants nothing beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rules.compile import compile_policy
from rules.decide import decide_request
from rules.decision import Decision, Denied, Permit
from rules.parse import Sources, parse_sources
from tests.support.policies import NOW, request, sandbox

POLICY = """\
version: 1
services:
  tracker: {like: mcp, base: "https://tracker.corp.example/mcp"}
roles:
  dev:
    allow:
      - {name: tools, service: tracker, operations: [read, tools.call], with: {tool: [get_issue]}}
  reader:
    allow:
      - {name: documents, service: tracker, operations: [read, tools.call], with: {uri: ["docs://*"]}}
"""
MADE = compile_policy(parse_sources(Sources(policy={"policy.yaml": POLICY})).document)


def asked(role: str, method: str, params: dict[str, Any]) -> Decision:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    facts = request("POST https://tracker.corp.example/mcp", ("content-type", "application/json"), has_body=True)
    facts = replace(facts, body=json.dumps(message).encode())
    return decide_request(MADE, replace(sandbox(), role=role), facts, NOW)


@pytest.mark.parametrize(
    ("role", "method", "params"),
    [
        ("dev", "tools/call", {"name": "delete"}),
        ("dev", "resources/read", {"uri": "file:///etc/passwd"}),
        ("dev", "resources/subscribe", {"uri": "docs://a"}),
        ("dev", "prompts/get", {"name": "any"}),
        ("dev", "completion/complete", {"ref": {"type": "ref/resource", "uri": "x://{a}"}}),
        ("reader", "tools/call", {"name": "get_issue"}),
        ("reader", "prompts/get", {"name": "any"}),
    ],
)
def test_a_rule_that_binds_one_kind_of_name_grants_no_other_kind(
    role: str, method: str, params: dict[str, Any]
) -> None:
    """A rule that binds tools grants no resources, prompts or completions, whatever effects it names; and so back."""
    assert isinstance(asked(role, method, params), Denied)


@pytest.mark.parametrize("role", ["dev", "reader"])
@pytest.mark.parametrize("method", ["initialize", "ping", "tools/list", "resources/list", "prompts/list"])
def test_sessions_and_lists_fit_a_rule_that_binds(role: str, method: str) -> None:
    """One rule is enough: the handshake and the lists, which are cut to what is granted, come with it."""
    assert isinstance(asked(role, method, {}), Permit)


def test_what_is_bound_is_granted() -> None:
    """The tool, and the resource, that a rule names."""
    assert isinstance(asked("dev", "tools/call", {"name": "get_issue"}), Permit)
    assert isinstance(asked("reader", "resources/read", {"uri": "docs://a"}), Permit)
