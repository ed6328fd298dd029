"""`dns: strict`: which names exist for a role, as values (RULINGS 5.7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rules.lookup import name_exists
from rules.names import Host
from rules.policy import Policy
from tests.support.fakes import sandbox
from tests.support.rooms import host_pattern, op, policy, rule, tunnel_rule
from tests.support.rows import every_row

NOW = 1_000_000.0
RULES = policy(
    rule("dev/read", op("dev/read", "ok.test")),
    rule("dev/clear", op("dev/clear", "plain.test", port=8080, scheme="http")),
    rule("dev/wild", op("dev/wild", "*.wild.test")),
    tunnel_rule("dev/raw", "raw.test", 22),
    rule("dev/never", action="deny", hosts=(host_pattern("**.bad.wild.test"), host_pattern("gone.wild.test"))),
    rule("dev/port", op("dev/port", "half.test"), op("dev/port2", "half.test", port=8443)),
    rule("dev/not-there", action="deny", hosts=(host_pattern("half.test"),), port=443),
    rule("dev/some", op("dev/some", "ok.test", ["/admin/**"]), action="deny"),
)
NAMES = [
    ("evil.test", False, "no rule speaks of it"),
    ("notok.test", False, "a suffix is no name"),
    ("a.ok.test", False, "nor is a name below"),
    ("wild.test", False, "the apex is not under the wildcard"),
    ("a.b.wild.test", False, "one star is one label"),
    ("gone.wild.test", False, "denied as a whole, permitted by the wildcard"),
    ("only-denied.test", False, "a deny rule permits nothing"),
    ("a.exeat.internal", False, "below our own name is nobody"),
    ("ok.test", True, "a rule for it; a denied operation there leaves others"),
    ("plain.test", True, "clear text on another port"),
    ("a.wild.test", True, "under the wildcard"),
    ("raw.test", True, "a tunnel"),
    ("half.test", True, "one of its two ports is not denied"),
    ("exeat.internal", True, "the help host is decided before policy"),
]


def strict() -> Policy:
    role = replace(RULES.roles["dev"], dns="strict")
    return replace(RULES, roles={"dev": role})


@every_row(("name", "exists", "why"), NAMES, ids=[row[0] for row in NAMES])
def test_a_strict_role_has_the_names_that_a_rule_could_permit(name: str, exists: bool, why: str) -> None:
    """Only those; without `strict` every name exists."""
    box = sandbox("sb_a", expires_at=NOW + 60)
    assert name_exists(strict(), box, Host.parse(name), NOW) is exists, why
    assert name_exists(RULES, box, Host.parse(name), NOW)


@pytest.mark.parametrize("rules", [RULES, strict()], ids=["synthetic", "strict"])
def test_nobody_has_names_whose_time_is_over_or_whose_role_is_gone(rules: Policy) -> None:
    """An ended sandbox and one with an unknown role look nothing up."""
    assert not name_exists(rules, sandbox("sb_a", expires_at=NOW), Host("ok.test"), NOW)
    assert not name_exists(rules, sandbox("sb_a", role="other", expires_at=NOW + 60), Host("ok.test"), NOW)
