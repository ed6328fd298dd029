"""A request that asks for more than is granted, made smaller before it is decided (decision 13).

Only where the operation says so in its service file, and only by leaving out: what remains is judged by
`decide_request` as if the client had asked for it, and is what leaves. Whoever sends a request of a sandbox on asks
here first, once; the broker does not, and judges what it was handed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rules.decide import decide_request
from rules.decision import Denied
from rules.denials import deny_matches
from rules.facts import RequestFacts, Sandbox
from rules.matching import Matched, match_operation, misfit
from rules.operations import SCOPED, Scoped
from rules.paths import Query
from rules.placeholders import find_in_head
from rules.policy import Operation, Policy, Role, Rule

_PARAMETERS = frozenset(scoped.parameter for scoped in SCOPED.values())
_NARROWED = ("no-rule", "denied-by-rule")
"""Reasons that a smaller request may not have."""


def narrowed(policy: Policy, sandbox: Sandbox, facts: RequestFacts, now: float) -> RequestFacts:
    """Return the facts to decide: `facts`, or the same with the part of its query that one rule grants.

    The latter has `asked` set to the query as it came. `now` is seconds since the Unix epoch. Never raises.
    """
    if not any(name in _PARAMETERS for name, _ in facts.query.pairs):
        return facts
    decision = decide_request(policy, sandbox, facts, now)
    if not isinstance(decision, Denied) or decision.reason not in _NARROWED:
        return facts
    role = policy.roles.get(sandbox.role)
    if role is None or any(place.where == "query" for place in find_in_head(facts)):
        return facts
    found = list(_smaller(role, sandbox, facts))
    return min(found, key=lambda one: one[0])[1] if found else facts


def scopes(query: Query) -> tuple[str, ...]:
    """What a narrowed query, or the one that it was made of, asks for."""
    return tuple(scope for name, value in query.pairs if name in _PARAMETERS for scope in value.split(" "))


def _smaller(role: Role, sandbox: Sandbox, facts: RequestFacts) -> Iterator[tuple[tuple[int, str, str], RequestFacts]]:
    """Each request that some rule permits, with its rank: the one that leaves most comes first."""
    places = role.places(facts.destination.host)
    denying = [rule for place in places for rule in place.denying if deny_matches(rule, facts, sandbox)]
    denied: dict[str, frozenset[tuple[str, ...]]] = {}
    for rule in (rule for place in places for rule in place.near(facts.path.segments)):
        for op in rule.operations:
            scoped = None if op.head is None or not op.head.params.get("narrow") else SCOPED.get(op.head.matcher)
            if op.head is None or scoped is None:
                continue
            if op.head.matcher not in denied:
                denied[op.head.matcher] = _denied(scoped, denying, sandbox, facts)
            out = denied[op.head.matcher]

            def granted(
                *values: str, rule: Rule = rule, scoped: Scoped = scoped, out: frozenset[tuple[str, ...]] = out
            ) -> bool:
                arguments = dict(zip(scoped.arguments, values, strict=True))
                return values not in out and misfit(rule, sandbox, arguments) is None

            some = scoped.narrow(op.head.params, facts.query, granted)
            if some is None or some[0] == facts.query:
                continue
            query, left = some
            request = replace(facts, query=query, asked=facts.asked or facts.query)
            if _permits(rule, op, sandbox, request) and not any(deny_matches(one, request, sandbox) for one in denying):
                yield (-left, str(rule.id), op.id), request


def _denied(scoped: Scoped, denying: list[Rule], sandbox: Sandbox, facts: RequestFacts) -> frozenset[tuple[str, ...]]:
    """The values of the parts that some deny rule denies alone."""
    parts = scoped.parts(facts.query) if denying else iter(())
    return frozenset(
        tuple(arguments[name] for name in scoped.arguments)
        for arguments, query in parts
        if any(deny_matches(rule, replace(facts, query=query), sandbox) for rule in denying)
    )


def _permits(rule: Rule, op: Operation, sandbox: Sandbox, facts: RequestFacts) -> bool:
    body = b"" if facts.body is None and not facts.has_body else facts.body
    matched = match_operation(op, replace(facts, body=body))
    return isinstance(matched, Matched) and misfit(rule, sandbox, matched.arguments, unbound=op.unbound) is None
