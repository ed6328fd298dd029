"""A would-be request against a policy, offline: what `exeat policy explain` and `exeat why --body` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from rules.catalogue import builtin_services
from rules.decide import decide_request
from rules.decision import NeedsBody
from rules.explaining import canonical, misses, recognised, verdict
from rules.facts import FactsRefused, RequestFacts, Sandbox
from rules.names import DEFAULT_PORTS, InvalidName, parse_authority
from rules.narrowing import narrowed
from rules.policy import HostPattern, Operation, Policy, Rule
from rules.reasons import reason


class NotExplained(ValueError):
    """The question cannot be put. str() says what is wrong with it."""


def explain_request(
    policy: Policy,
    role: str,
    method: str,
    url: str,
    body: bytes | None,
    now: float,
    headers: Iterable[tuple[str, str]] = (),
    attributes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the decision for `method` `url` by a fresh sandbox of `role`, as plain values for printing.

    Besides the verdict: `canonical` (the request as it is judged), `recognised` (which operations of the policy and
    of the catalogue it states) and, unless it is permitted, `misses` (what nearly permits it, and why not).
    Raises NotExplained for a URL that is not http(s) or a role that the policy does not have.
    """
    if role not in policy.roles:
        raise NotExplained(f"the policy has no role {role!r}; known: {', '.join(sorted(policy.roles))}")
    try:
        facts = asked(method, url, body, headers)
    except FactsRefused as error:
        return {
            "decision": "deny",
            "reason": error.reason,
            "detail": error.detail,
            "remedy": reason(error.reason).remedy,
        }
    sandbox = Sandbox(
        tenant="default",
        id="sb_explained",
        epoch=0,
        role=role,
        owner="",
        agent="",
        task="",
        attributes=dict(attributes or {}),
        expires_at=now + 3600,
    )
    facts = narrowed(policy, sandbox, facts, now)
    decision = decide_request(policy, sandbox, facts, now)
    if isinstance(decision, NeedsBody) and body is not None:
        facts = replace(facts, body=body)
        decision = decide_request(policy, sandbox, facts, now)
    shown = {
        "host": facts.destination.host.text,
        "port": facts.destination.port,
        **verdict(decision),
        "canonical": canonical(facts),
        "recognised": recognised(_known(policy, role, facts), facts if body is None else replace(facts, body=body)),
    }
    if isinstance(decision, NeedsBody):
        shown["remedy"] = f"the operation is in the body: give one with --body (at most {decision.bound} bytes)"
    if shown["decision"] != "permit":
        shown["misses"] = misses(policy, sandbox, facts)
    if shown.get("reason") == "no-rule" and not any(policy.roles[role].rules_for(facts.destination.host)):
        shown["detail"] = _no_such_host(policy, role, facts.destination.host.text)
    return shown


def asked(method: str, url: str, body: bytes | None, headers: Iterable[tuple[str, str]] = ()) -> RequestFacts:
    """The facts of a request as a client would send it; with a body and no Content-Type, JSON.

    Raises NotExplained for what is no http(s) URL, FactsRefused for what the front door would refuse.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise NotExplained(f"{url!r} is not an http or https URL")
    authority = rest.partition("/")[0].partition("?")[0]
    target = rest[len(authority) :] or "/"
    given = [(name.lower(), value) for name, value in headers if name.lower() != "host"]
    if body is not None and not any(name == "content-type" for name, _ in given):
        given.append(("content-type", "application/json"))
    try:
        parse_authority(authority, DEFAULT_PORTS[scheme.lower()])
    except InvalidName as error:
        raise NotExplained(f"{authority!r}: {error}") from None
    return RequestFacts.build(
        method=method,
        scheme="https" if scheme.lower() == "https" else "http",
        tunnel=None,
        target=f"{scheme.lower()}://{authority}{target}",
        headers=(("host", authority), *given),
        has_body=body is not None,
    )


def _no_such_host(policy: Policy, role: str, host: str) -> str:
    """That no rule of the role is for this host, and which one comes near as a word."""
    rules = policy.roles[role].rules
    patterns = {pattern.text for rule in rules for pattern in (*rule.hosts, *_patterns(rule))}
    near = get_close_matches(host, sorted(patterns), 1, 0.8)
    return f"no rule of {role} is for {host}" + (f"; did you mean {near[0]}?" if near else "")


def _patterns(rule: Rule) -> Iterator[HostPattern]:
    for op in rule.operations:
        yield from op.hosts


def _known(policy: Policy, role: str, facts: RequestFacts) -> Iterator[Operation]:
    """The operations that could speak about this host: the role's own, then the catalogue's."""
    host = facts.destination.host
    for rule in policy.roles[role].rules_for(host):
        yield from rule.operations
    for service in builtin_services().values():
        yield from (op for op in service.operations if any(pattern.matches(host) for pattern in op.hosts))
