"""Deny rules that bind what stands in a body (decision 18): denials, then what such a rule leaves alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from broker.executor import _attest
from rules.catalogue import builtin_services
from rules.decide import decide_request
from rules.decision import Decision, Denied, NeedsBody, Permit
from rules.facts import BodyAttested, RequestFacts
from tests.support.operationcases import policy_of
from tests.support.policies import NOW, request, sandbox
from tests.support.pushes import NEW, OLD, TYPE, push

REPO = "https://github.com/acme/shop.git"
ROLES: dict[str, Any] = {
    "pushes": {
        "deny": [
            {"service": "github", "operations": ["git.push"], "with": {"ref": ["refs/heads/main", "refs/heads/r/*"]}}
        ],
        "allow": [{"service": "github", "operations": ["git.fetch", "git.push"], "with": {"repository": "acme/*"}}],
    },
    "streams": {
        "deny": [
            {
                "service": "github",
                "operations": ["git.push"],
                "with": {"repository": "acme/shop", "ref": "refs/heads/main"},
            }
        ],
        "allow": [{"name": "raw", "host": "github.com", "methods": ["GET", "POST"], "paths": ["/**"], "query": "any"}],
    },
    "graphql": {
        "deny": [
            {"service": "github", "operations": ["graphql.mutation"], "with": {"field": ["delete*", "mergeBranch"]}}
        ],
        "allow": [{"service": "github", "operations": ["graphql.query", "graphql.mutation"]}],
    },
    "queries": {
        "deny": [{"service": "github", "operations": ["graphql.mutation"], "with": {"field": "*"}}],
        "allow": [{"service": "github", "operations": ["graphql.query", "graphql.mutation"]}],
    },
    "raw-graphql": {
        "deny": [{"service": "github", "operations": ["graphql.mutation"], "with": {"field": "delete*"}}],
        "allow": [
            {
                "name": "raw",
                "host": "api.github.com",
                "methods": ["POST"],
                "paths": ["/graphql"],
                "body": {"json": {"query": "string"}},
            },
            {"name": "bare", "host": "api.github.com", "methods": ["POST"], "paths": ["/graphql"]},
        ],
    },
    "tools": {
        "deny": [{"service": "tracker", "operations": ["tools.call"], "with": {"tool": "delete_*"}}],
        "allow": [{"service": "tracker", "operations": ["read", "tools.call"]}],
    },
    "models": {
        "deny": [{"service": "openai", "operations": ["inference"], "with": {"model": "gpt-5*"}}],
        "allow": [{"service": "openai", "operations": ["inference"]}],
    },
    "head-only": {
        "deny": [{"service": "github", "operations": ["graphql.mutation"]}],
        "allow": [{"service": "github", "operations": ["graphql.query"]}],
    },
}
SERVICES = {"tracker": {"like": "mcp", "base": "https://tracker.test/mcp"}}


def roles_of(whole: dict[str, Any]) -> str:
    named = {
        name: {
            action: [{"name": f"{action}-{number}", **rule} for number, rule in enumerate(rules)]
            for action, rules in role.items()
        }
        for name, role in whole.items()
    }
    return json.dumps({"version": 1, "services": SERVICES, "roles": named})


_CHAT = next(
    op.name.partition("/")[2]
    for op in builtin_services()["openai"].operations
    if op.body and op.body.matcher == "llm_openai_chat"
)
for _rules in ROLES["models"].values():
    for _rule in _rules:
        _rule["operations"] = [_CHAT]
POLICY = policy_of(roles_of(ROLES))


def ask(role: str, line: str, body: bytes | None, kind: str = "application/json", *, partial: bool = False) -> Decision:
    facts = request(line, ("content-type", kind), has_body=body is not None)
    return decide_request(POLICY, sandbox(role), replace(facts, body=body, partial=partial), NOW)


def pushed(role: str, *refs: str, repository: str = REPO) -> Decision:
    body = push(*((OLD, NEW, ref) for ref in refs))
    return ask(role, f"POST {repository}/git-receive-pack", body, TYPE)


def graphql(role: str, document: str, **more: Any) -> Decision:
    return ask(role, "POST https://api.github.com/graphql", json.dumps({"query": document, **more}).encode())


def called(tool: str, method: str = "tools/call") -> Decision:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"name": tool} if tool else {}}
    return ask("tools", "POST https://tracker.test/mcp", json.dumps(message).encode())


def chat(model: str) -> Decision:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return ask("models", "POST https://api.openai.com/v1/chat/completions", json.dumps(body).encode())


def denying(decision: Decision) -> str | None:
    assert isinstance(decision, Denied), decision
    assert decision.reason == "denied-by-rule", decision
    return decision.rule


@pytest.mark.parametrize(
    "refs",
    [
        ("refs/heads/main",),
        ("refs/heads/r/1",),
        ("refs/heads/agent/x", "refs/heads/main"),
        ("refs/heads/r/1", "refs/tags/v1"),
    ],
)
def test_a_push_to_a_denied_branch_is_denied_whatever_else_it_pushes(refs: tuple[str, ...]) -> None:
    """Expect one ref that fits to deny the push."""
    assert denying(pushed("pushes", *refs)) == "pushes/deny-0"
    assert denying(pushed("streams", "refs/heads/main")) == "streams/deny-0"


def test_a_body_that_cannot_be_read_is_not_let_past_by_another_kind_of_rule() -> None:
    """Expect a rule that looks at no body, or at another form of it, to permit nothing that the deny could not read."""
    for body in (b"garbage", b"0000", b"", b"0032" + b"x" * 90_000, b"\x1f\x8b"):
        assert denying(ask("streams", f"POST {REPO}/git-receive-pack", body, TYPE)) == "streams/deny-0"
    deep = "{a" * 60 + "}" * 60
    for document in ("mutation {deleteRef(input: {refId: 1}) {clientMutationId}}", "query {", deep, "{viewer{login}}"):
        assert denying(graphql("raw-graphql", document)) == "raw-graphql/deny-0"
    two = b'{"query": "{viewer{login}}", "query": "mutation {deleteRef {a}}"}'
    assert denying(ask("raw-graphql", "POST https://api.github.com/graphql", two)) == "raw-graphql/deny-0"


def test_a_denied_field_is_denied_behind_every_alias_and_fragment() -> None:
    """Expect the field that is carried out to count, among others too."""
    for document in (
        "mutation {deleteRef(input: {refId: 1}) {clientMutationId}}",
        "mutation {ok: deleteRef(input: {refId: 1}) {clientMutationId}}",
        "mutation {addStar(input: {a: 1}) {clientMutationId} x: mergeBranch(input: {a: 1}) {clientMutationId}}",
        "mutation {...f} fragment f on Mutation {deleteRef(input: {refId: 1}) {clientMutationId}}",
    ):
        assert denying(graphql("graphql", document)) == "graphql/deny-0"
        assert denying(graphql("queries", document)) == "queries/deny-0"


def test_denied_tools_and_models() -> None:
    """Expect the named ones to be denied, and a batch with one of them refused."""
    assert denying(called("delete_issue")) == "tools/deny-0"
    batch = b'[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"delete_issue"}}]'
    assert isinstance(ask("tools", "POST https://tracker.test/mcp", batch), Denied)
    assert denying(chat("gpt-5-pro")) == "models/deny-0"


def test_a_deny_that_binds_nothing_of_a_body_denies_by_the_head() -> None:
    """Expect every document at that URL to be denied before a byte is read, as always."""
    assert denying(graphql("head-only", "{viewer{login}}")) == "head-only/deny-0"
    facts = request("POST https://api.github.com/graphql", ("content-type", "application/json"), has_body=True)
    assert denying(decide_request(POLICY, sandbox("head-only"), facts, NOW)) == "head-only/deny-0"


def test_nothing_is_permitted_before_the_body_was_seen() -> None:
    """Expect the body to be asked for where the denied operation lies in it, also by a rule that would stream."""
    for role in ("pushes", "streams"):
        needed = ask(role, f"POST {REPO}/git-receive-pack", None, TYPE)
        facts = request(f"POST {REPO}/git-receive-pack", ("content-type", TYPE), has_body=True)
        needed = decide_request(POLICY, sandbox(role), facts, NOW)
        assert isinstance(needed, NeedsBody), role
        assert needed.prefix, role
    other = request("POST https://github.com/acme/other.git/git-receive-pack", ("content-type", TYPE), has_body=True)
    assert isinstance(decide_request(POLICY, sandbox("streams"), other, NOW), Permit)
    facts = request("POST https://api.github.com/graphql", ("content-type", "application/json"), has_body=True)
    needed = decide_request(POLICY, sandbox("raw-graphql"), facts, NOW)
    assert isinstance(needed, NeedsBody)
    assert not needed.prefix


def test_what_is_not_permitted_anyway_asks_for_no_body() -> None:
    """Expect the refusal at the head where no rule could permit the request."""
    facts = request(f"POST {REPO}/git-receive-pack", ("content-type", TYPE), has_body=True)
    decision = decide_request(POLICY, sandbox("tools"), facts, NOW)
    assert isinstance(decision, Denied)
    assert decision.reason == "no-rule"


# --- what such a rule leaves alone ---


def test_other_branches_pass_and_so_does_what_prepares_a_push() -> None:
    """Expect discovery, the empty question and pushes of other branches to be permitted."""
    assert isinstance(pushed("pushes", "refs/heads/agent/x", "refs/tags/v1"), Permit)
    assert isinstance(pushed("streams", "refs/heads/agent/x"), Permit)
    assert isinstance(ask("pushes", f"POST {REPO}/git-receive-pack", b"0000", TYPE), Permit)
    for role in ("pushes", "streams"):
        line = f"GET {REPO}/info/refs?service=git-receive-pack"
        assert isinstance(ask(role, line, None), Permit), role
    assert isinstance(ask("pushes", f"GET {REPO}/info/refs?service=git-upload-pack", None), Permit)


def test_other_fields_tools_and_models_pass() -> None:
    """Expect what the rule does not name to be judged by the allow rules alone."""
    star = "mutation {addStar(input: {starrableId: 1}) {clientMutationId}}"
    assert isinstance(graphql("graphql", star), Permit)
    assert denying(graphql("queries", star)) == "queries/deny-0"
    for role in ("graphql", "queries"):
        assert isinstance(graphql(role, "{viewer{login}}"), Permit)
    assert isinstance(called("get_issue"), Permit)
    assert isinstance(called("", "tools/list"), Permit)
    assert isinstance(chat("gpt-4o-mini"), Permit)


# --- the vault, which reads no body ---


def attested(role: str, facts: RequestFacts) -> Decision:
    """The decision of the vault, from what the executor finds in the body."""
    assert isinstance(facts.body, bytes)
    found = _attest(POLICY, sandbox(role), facts)
    return decide_request(POLICY, sandbox(role), replace(facts, body=BodyAttested(operations=found, sha256=b"")), NOW)


@pytest.mark.parametrize(
    ("role", "line", "kind", "body", "permitted"),
    [
        ("pushes", f"POST {REPO}/git-receive-pack", TYPE, push((OLD, NEW, "refs/heads/main")), False),
        ("pushes", f"POST {REPO}/git-receive-pack", TYPE, push((OLD, NEW, "refs/heads/agent/x")), True),
        ("pushes", f"POST {REPO}/git-receive-pack", TYPE, b"0000", True),
        ("streams", f"POST {REPO}/git-receive-pack", TYPE, b"garbage", False),
        ("streams", f"POST {REPO}/git-receive-pack", "text/plain", push((OLD, NEW, "refs/heads/main")), False),
        (
            "graphql",
            "POST https://api.github.com/graphql",
            "application/json",
            b'{"query": "mutation {deleteRef {a}}"}',
            False,
        ),
        ("graphql", "POST https://api.github.com/graphql", "application/json", b'{"query": "{viewer{login}}"}', True),
    ],
)
def test_the_vault_decides_the_same_without_the_body(
    role: str, line: str, kind: str, body: bytes, permitted: bool
) -> None:
    """Expect one verdict from the bytes and from what is attested of them; nothing attested is denied."""
    facts = replace(request(line, ("content-type", kind), has_body=True), body=body)
    assert isinstance(attested(role, facts), Permit) is permitted
    assert isinstance(decide_request(POLICY, sandbox(role), facts, NOW), Permit) is permitted
    nothing = replace(facts, body=BodyAttested(operations=frozenset(), sha256=b""))
    assert isinstance(decide_request(POLICY, sandbox(role), nothing, NOW), Denied)
    assert not isinstance(decide_request(POLICY, sandbox(role), replace(facts, body=None), NOW), Permit)
