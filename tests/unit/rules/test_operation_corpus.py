"""tests/cases/operations/*.yaml through the pure decision (format: support/operationcases.py).

The same vectors go through live lanes in tests/integration/test_operation_corpus.py.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import pytest

from rules.arguments import grouped
from rules.catalogue import services_with_tests
from rules.decide import decide_tunnel
from rules.decision import Denied, Held, Permit
from rules.facts import FactsRefused, TunnelFacts
from rules.matching import Matched, match_operation
from rules.policy import HostRules, Policy
from rules.reasons import reason
from tests.support.operationcases import NOTHING, Vector, corpus, decide, facts_of, policy_of, policy_text
from tests.support.policies import NOW, sandbox
from tests.support.rows import every

VECTORS = corpus().vectors
SERVICES = services_with_tests()
ROLES = tuple(corpus().roles)


@cache
def policy() -> Policy:
    return policy_of(policy_text(corpus().roles))


DENIED, GRANTED = (
    {role: [one for one in VECTORS if one.role == role and (one.verdict == "deny") == denied] for role in ROLES}
    for denied in (True, False)
)


@pytest.mark.parametrize("role", [role for role in ROLES if DENIED[role]])
def test_a_role_refuses_what_it_does_not_grant(role: str) -> None:
    """Expect the stated reasons, and that each request is what its row says it would be."""
    every((vector.name, partial(refused, vector)) for vector in DENIED[role])


def refused(vector: Vector) -> None:
    """Check a row that is denied."""
    decision = decide(policy(), sandbox(vector.role), vector)
    assert isinstance(decision, Denied), (vector.why, decision)
    assert decision.reason == vector.reason, (vector.why, decision)
    if vector.operation:
        assert recognised(vector) == (set() if vector.operation == NOTHING else {(vector.operation, vector.effect)})


@pytest.mark.parametrize("role", [role for role in ROLES if GRANTED[role]])
def test_a_role_grants_what_it_names(role: str) -> None:
    """Expect operation, effect and exactly the stated arguments; a held one waits for a person instead."""
    every((vector.name, partial(granted, vector)) for vector in GRANTED[role])


def granted(vector: Vector) -> None:
    """Check a row that is permitted or held."""
    decision = decide(policy(), sandbox(vector.role), vector)
    if vector.verdict == "hold":
        assert isinstance(decision, Held), (vector.why, decision)
        assert recognised(vector) == {(vector.operation, vector.effect)}
    else:
        assert isinstance(decision, Permit), (vector.why, decision)
        assert decision.effect == vector.effect, vector.why
    assert decision.operation == vector.operation, vector.why
    assert grouped(decision.arguments) == vector.arguments, vector.why


def test_the_corpus_is_large_and_says_why() -> None:
    """Expect more than 600 vectors, a name and sentence for each, known reasons, and every service on both sides."""
    assert len(VECTORS) >= 600
    assert len({one.name for one in VECTORS}) == len(VECTORS)
    assert all(reason(one.reason) for one in VECTORS if one.verdict == "deny")
    assert {one.role for one in VECTORS} == corpus().roles.keys()
    seen: dict[str, set[str]] = {name: set() for name in SERVICES}
    for one in VECTORS:
        for service in {one.operation.partition("/")[0]} & seen.keys() or set(corpus().services_of(one.role)):
            seen[service].add("deny" if one.verdict == "deny" else "grant")
    assert {name for name, both in seen.items() if "deny" not in both} == set()
    assert {name for name, both in seen.items() if "grant" not in both} == set()


@pytest.mark.parametrize("role", ROLES)
def test_looking_rules_up_changes_no_decision(role: str) -> None:
    """Expect the very decision, remedy and all, that comes of asking every rule of the role."""
    found = policy().roles[role]
    every = HostRules.of(found.rules)
    slow = replace(found, index={}, index_wild=replace(every, under={(): every.allowing}))
    asked = replace(policy(), roles={role: slow})
    box = sandbox(role)
    for number, vector in enumerate(VECTORS):
        if vector.role == role or number % 29 == 0:
            assert decide(asked, box, vector) == decide(policy(), box, vector), vector.name
    for host, port in itertools.product(sorted({vector.authority.partition(":")[0] for vector in VECTORS}), (80, 443)):
        with suppress(FactsRefused):
            place = TunnelFacts.build(f"{host}:{port}")
            assert decide_tunnel(asked, box, place, NOW) == decide_tunnel(policy(), box, place, NOW), place


def recognised(vector: Vector) -> set[tuple[str, str]]:
    """(operation, effect) that the service which the row names sees in it, or else the services of its role."""
    try:
        facts = facts_of(vector)
    except FactsRefused:
        return set()
    named = vector.operation.partition("/")[0]
    services = [named] if named in SERVICES else corpus().services_of(vector.role)
    facts = replace(facts, body=vector.body or b"")
    operations = (op for name in services for op in SERVICES[name].operations)
    return {
        (op.id.partition("#")[0], op.effect) for op in operations if isinstance(match_operation(op, facts), Matched)
    }
