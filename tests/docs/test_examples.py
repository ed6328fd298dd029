"""The example policy: what a platform team starts from loads, its tests pass, and it takes what it says and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rules.compile import compile_policy
from rules.parse import Parsed, Sources, parse_sources
from rules.policy import Policy
from rules.policytests import run_tests

FOLDER = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    return parse_sources(
        Sources(
            policy={"policy.yaml": (FOLDER / "policy.yaml").read_text("utf-8")},
            credentials=("credentials.yaml", (FOLDER / "credentials.yaml").read_text("utf-8")),
            services={},
        )
    )


@pytest.fixture(scope="module")
def policy(parsed: Parsed) -> Policy:
    return compile_policy(parsed.document)


def test_its_tests_pass(parsed: Parsed, policy: Policy) -> None:
    """What the example says of itself is so, denials included."""
    results = run_tests(policy, parsed.tests)
    assert [str(result) for result in results if not result.passed] == []
    assert len(results) >= 15


def test_reads_of_registries_bring_nothing_else(policy: Policy) -> None:
    """`operations: [read]` over every registry gives operations of effect read alone."""
    rules = [
        rule for rule in policy.roles["packages"].rules if rule.id.partition("/")[2] not in ("advisories", "models")
    ]
    effects = {operation.effect for rule in rules for operation in rule.operations}
    assert effects == {"read"}
    services = {operation.id.partition("/")[0] for rule in rules for operation in rule.operations}
    assert len(services) >= 12


def test_no_rule_of_it_mints_authority(policy: Policy) -> None:
    """Nothing in the example answers with a token or a key."""
    for role in policy.roles.values():
        assert all(operation.effect != "mint" for rule in role.rules for operation in rule.operations)
