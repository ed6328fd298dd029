"""tests/cases/operations/*.yaml through the pure decision (format: support/operationcases.py).

The same vectors go through live lanes in tests/integration/test_operation_corpus.py.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from functools import cache

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

VECTORS = corpus().vectors
SERVICES = services_with_tests()


@cache
def policy() -> Policy:
    return policy_of(policy_text(corpus().roles))


@pytest.mark.parametrize("vector", [one for one in VECTORS if one.verdict == "deny"], ids=lambda one: one.name)
def test_a_role_refuses_what_it_does_not_grant(vector: Vector) -> None:
    """Expect the stated reason, and that the request is what the row says it would be."""
    decision = decide(policy(), sandbox(vector.role), vector)
    assert isinstance(decision, Denied), (vector.why, decision)
    assert decision.reason == vector.reason, (vector.why, decision)
    if vector.operation:
        assert recognised(vector) == (set() if vector.operation == NOTHING else {(vector.operation, vector.effect)})


@pytest.mark.parametrize("vector", [one for one in VECTORS if one.verdict != "deny"], ids=lambda one: one.name)
def test_a_role_grants_what_it_names(vector: Vector) -> None:
    """Expect operation, effect and exactly the stated arguments; a held one waits for a person instead."""
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


@pytest.mark.parametrize("role", corpus().roles)
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
