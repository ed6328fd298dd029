"""Runs what a service file says about itself: every `allow` is recognised as that operation, every `deny` by none."""

from __future__ import annotations

from dataclasses import replace

from rules.facts import FactsRefused, RequestFacts
from rules.matching import NEARNESS, Matched, NoMatch, WantsBody, match_operation
from rules.policy import Operation
from rules.service import ServiceDef, ServiceTest


def run_service_tests(service: ServiceDef) -> tuple[str, ...]:
    """Return one sentence for each test of `service` that fails; () where all pass."""
    return tuple(failure for test in service.tests if (failure := check_service_test(service, test)))


def check_service_test(service: ServiceDef, test: ServiceTest) -> str:
    """Return what is wrong with one test, or ""."""
    said = f"{service.name}: {test.expect} {test.method} {test.url} ({test.why})"
    try:
        facts = _facts(test)
    except FactsRefused as refused:
        if test.expect == "deny" and test.near in (None, "target"):
            return ""
        return f"{said}: the target is refused, {refused.detail}"
    found: list[tuple[Operation, Matched]] = []
    near = NEARNESS[0]
    for op in service.operations:
        match match_operation(op, facts):
            case Matched() as matched:
                found.append((op, matched))
            case NoMatch(near=miss):
                near = max(near, miss, key=NEARNESS.index)
            case WantsBody():
                near = max(near, "body", key=NEARNESS.index)
    if test.expect == "deny":
        if found:
            return f"{said}: recognised as {', '.join(op.id for op, _ in found)}"
        return f"{said}: fails at {near}" if test.near not in (None, near) else ""
    if not found:
        return f"{said}: not recognised, fails at {near}"
    if len(found) > 1:
        return f"{said}: recognised as several: {', '.join(op.id for op, _ in found)}"
    op, matched = found[0]
    name = op.name.partition("/")[2]
    if name != test.operation:
        return f"{said}: recognised as {name}"
    if test.effect is not None and op.effect != test.effect:
        return f"{said}: its effect is {op.effect}"
    if test.arguments is not None and matched.arguments != dict(test.arguments):
        return f"{said}: its arguments are {matched.arguments}"
    return ""


def _facts(test: ServiceTest) -> RequestFacts:
    scheme, _, rest = test.url.partition("://")
    authority = rest.partition("/")[0]
    facts = RequestFacts.build(
        method=test.method,
        scheme="https" if scheme == "https" else "http",
        tunnel=None,
        target=test.url,
        headers=(("host", authority), *test.headers),
        has_body=test.body is not None,
    )
    # Nothing to read is an empty body, as in rules/decide.py.
    return replace(facts, body=b"" if test.body is None else test.body)
