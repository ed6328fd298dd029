"""`tests:` of a policy: each is one request and the verdict that its author expects. Run at every load.

    - {role: coding-agent, allow: "GET https://orders.shop.example/v1/orders/7", rule: orders.read}
    - {role: coding-agent, deny: "POST https://orders.shop.example/v1/orders", reason: no-rule}
    - {role: coding-agent, hold: "POST https://deploy.shop.example/release", body: {service: shop, version: "1.4"}}
    - {role: coding-agent, deny: "CONNECT evil.example:443"}

A test passes through the same steps as a request: facts, tunnel decision, request decision, body on demand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from rules.decide import decide_request, decide_tunnel
from rules.decision import Decision, Denied, Held, NeedsBody, Permit, TunnelDecision, TunnelPermit
from rules.facts import FactsRefused, RequestFacts, Sandbox, TunnelFacts
from rules.names import CredentialRef
from rules.narrowing import narrowed
from rules.placeholders import make
from rules.policy import Policy
from rules.yaml12 import Problem

Expect = Literal["deny", "hold", "allow"]

_PLACEHOLDER = re.compile(r"\$\{placeholder\.([A-Za-z0-9._-]+)(?:#([a-z0-9_]+))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTest:
    """One row. `place` is where it stands; `body` None means that the request has none."""

    role: str
    expect: Expect
    request: str
    """`METHOD URL` or `CONNECT host:port`; `${placeholder.NAME}` stands for that credential's placeholder."""
    reason: str | None = None
    rule: str | None = None
    """The rule that must have decided: its name, or `role/name`."""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    place: Problem | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """What came of a test: `got` is one sentence that names the verdict."""

    __test__ = False  # not a pytest class

    test: PolicyTest
    passed: bool
    got: str
    decision: Decision | TunnelDecision | None


def run_tests(policy: Policy, tests: Iterable[PolicyTest]) -> tuple[TestResult, ...]:
    """Return one result for each test, in order. Never raises."""
    return tuple(_run(policy, test) for test in tests)


def json_body(value: object) -> bytes:
    """The body that a mapping in a test stands for."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def evaluate(policy: Policy, test: PolicyTest) -> Decision | TunnelDecision:
    """Return the verdict on the request of `test`; what cannot be stated as facts is Denied with that reason."""
    sandbox = Sandbox(
        tenant="test",
        id="sb_aaaaaaaaaaaaaaaa",
        epoch=1,
        role=test.role,
        owner=test.attributes.get("owner", "test"),
        agent="test",
        task="test",
        attributes=test.attributes,
        expires_at=1.0,
    )
    method, _, target = _filled(policy, test.request).partition(" ")
    try:
        if method == "CONNECT":
            return decide_tunnel(policy, sandbox, TunnelFacts.build(target), 0.0)
        return _request(policy, sandbox, method, target, test)
    except FactsRefused as refused:
        return Denied(reason=refused.reason)


def _request(policy: Policy, sandbox: Sandbox, method: str, url: str, test: PolicyTest) -> Decision:
    scheme, separator, rest = url.partition("://")
    cut = min((index for index in (rest.find("/"), rest.find("?")) if index >= 0), default=len(rest))
    authority, target = rest[:cut], rest[cut:] or "/"
    if scheme not in ("https", "http") or not separator:
        raise FactsRefused("bad-target", "a test names an https or http URL")
    headers = [(name.lower(), _filled(policy, value)) for name, value in test.headers]
    if not any(name == "host" for name, _ in headers):
        headers.insert(0, ("host", authority))
    tunnel = TunnelFacts.build(authority if re.search(r":[0-9]+\Z", authority) else f"{authority}:443")
    facts = RequestFacts.build(
        method=method,
        scheme="https" if scheme == "https" else "http",
        tunnel=tunnel if scheme == "https" else None,
        target=target if scheme == "https" else url,
        headers=tuple(headers),
        has_body=test.body is not None,
        upgrade=next((value for name, value in headers if name == "upgrade"), None),
    )
    facts = narrowed(policy, sandbox, facts, 0.0)
    decision = decide_request(policy, sandbox, facts, 0.0)
    if isinstance(decision, NeedsBody):
        body = test.body or b""
        if len(body) > decision.bound:
            return Denied(reason="body-not-judged")
        decision = decide_request(policy, sandbox, replace(facts, body=body), 0.0)
    if scheme == "https" and not isinstance(decision, Denied):
        # The tunnel comes first in life; a request that it would never carry is not permitted.
        carrier = decide_tunnel(policy, sandbox, tunnel, 0.0)
        if isinstance(carrier, Denied):
            return carrier
    return decision


def _filled(policy: Policy, text: str) -> str:
    def placeholder(match: re.Match[str]) -> str:
        credential = policy.credentials.get(CredentialRef(match[1]))
        spec = None if credential is None else credential.placeholder_of(match[2])
        return match[0] if spec is None else make(spec.shape, bytes(32))

    return _PLACEHOLDER.sub(placeholder, text)


def _run(policy: Policy, test: PolicyTest) -> TestResult:
    decision = evaluate(policy, test)
    verdict: Expect
    rules: tuple[str, ...] = ()
    match decision:
        case Denied(reason=reason, rule=rule, remedy=remedy):
            verdict, got, rules = "deny", f"denied: {reason}" + (f" by {rule}" if rule else ""), (rule,) if rule else ()
            got += f" ({remedy.rstrip('.')})" if remedy else ""
        case Held(rule=rule, approval=approval):
            verdict, got, rules = "hold", f"held for {approval} by {rule}", (rule,)
        case NeedsBody():
            verdict, got = "deny", "denied: the body was never enough"
        case Permit(rules=all_rules, operation=operation):
            verdict, got, rules = "allow", f"allowed as {operation} by {', '.join(all_rules)}", all_rules
        case TunnelPermit(rule=rule, inspected=inspected):
            verdict, got = "allow", "allowed, inspected" if inspected else f"allowed uninspected by {rule}"
            rules = (rule,) if rule else ()
        case _:
            assert_never(decision)
    passed = verdict == test.expect
    if test.reason is not None:
        passed = passed and isinstance(decision, Denied) and decision.reason == test.reason
    if test.rule is not None:
        passed = passed and any(test.rule in (rule, rule.partition("/")[2]) for rule in rules)
    return TestResult(test=test, passed=passed, got=got, decision=decision)
