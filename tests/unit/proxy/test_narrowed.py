"""A token call that is narrowed (decision 13), at the gate: what leaves, what the broker is asked, what is recorded."""

from __future__ import annotations

import json

import pytest

from proxy.gate import Forward, Gate, Handoff, Refuse
from proxy.identity import Identified
from proxy.lanes.handoff import request_of
from proxy.limits import Budgets, LimitTable
from proxy.recent import RecentRefusals
from proxy.records import Seen
from rules.decide import decide_request
from rules.decision import Denied, Permit
from rules.facts import RequestFacts, TunnelFacts
from rules.names import Host
from tests.support.fakes import (
    SHARED,
    TOKEN,
    CountingRandom,
    ManualClock,
    MemoryDirectory,
    registered,
    sandbox,
    snapshot,
)
from tests.support.journal import MemoryJournal
from tests.support.operationcases import policy_of
from wire.heads import parse_request_head

HOST = "auth.docker.io"
ASKED = "/token?account=a%2Bb&scope=repository:acme/a:pull,push&service=registry.docker.io&scope=repository:evil/x:pull"
SENT = "/token?account=a%2Bb&scope=repository:acme/a:pull&service=registry.docker.io"
RULE = {"service": "dockerhub", "operations": ["token.pull"], "with": {"repository": "acme/*"}}


def gate_of(rule: dict[str, object]) -> tuple[Gate, MemoryJournal, Identified]:
    policy = policy_of(json.dumps({"version": 1, "roles": {"dev": {"allow": [rule]}}}))
    box, journal, clock, table = sandbox(), MemoryJournal(), ManualClock(), LimitTable()
    gate = Gate(
        directory=MemoryDirectory(snapshot(policy, [registered(box, TOKEN)])),
        journal=journal,
        clock=clock,
        random=CountingRandom(),
        budgets=Budgets(table, clock),
        recent=RecentRefusals(),
        table=table,
    )
    return gate, journal, Identified(sandbox=box, channel=SHARED, token=TOKEN)


def facts(target: str) -> RequestFacts:
    return RequestFacts.build(
        method="GET",
        scheme="https",
        tunnel=TunnelFacts(host=Host(HOST), port=443),
        target=target,
        headers=(("host", HOST),),
    )


async def test_what_is_not_granted_at_all_is_refused_and_its_scopes_are_not_recorded() -> None:
    """Expect the refusal of the request as it came."""
    gate, journal, who = gate_of(RULE)
    verdict = await gate.head(who, facts(ASKED.replace("acme/a:pull,push", "acme/a:push")), Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason == "no-rule"
    (refused,) = journal.named("request.refused")
    assert "asked" not in refused.fields
    assert "granted" not in refused.fields


async def test_a_refusal_for_another_reason_says_what_was_asked() -> None:
    """Expect the client's own key to be refused with the smaller request, and both to be on record."""
    gate, journal, who = gate_of(RULE)
    asked = RequestFacts.build(
        method="GET",
        scheme="https",
        tunnel=TunnelFacts(host=Host(HOST), port=443),
        target=ASKED,
        headers=(("host", HOST), ("authorization", "Basic bWU6bWluZQ==")),
    )
    verdict = await gate.head(who, asked, Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason not in ("no-rule", "internal-error")
    (refused,) = journal.named("request.refused")
    assert list(refused.fields["granted"]) == ["repository:acme/a:pull"]  # type: ignore[arg-type]


@pytest.mark.parametrize("counted", [False, True], ids=["forwarded", "handed off"])
async def test_the_smaller_request_is_what_leaves_and_both_are_recorded(counted: bool) -> None:
    """Expect the judged target in the passage and in what the broker is asked, and a broker that judges it alone."""
    gate, journal, who = gate_of({**RULE, "limits": {"requests": "100/hour"}} if counted else RULE)
    passage = await gate.head(who, facts(ASKED), Seen())
    assert isinstance(passage, Handoff if counted else Forward), passage
    assert passage.facts.target == SENT
    (intent,) = journal.named("request.handoff" if counted else "request.intent")
    assert list(intent.fields["asked"]) == ["repository:acme/a:pull,push", "repository:evil/x:pull"]  # type: ignore[arg-type]
    assert list(intent.fields["granted"]) == ["repository:acme/a:pull"]  # type: ignore[arg-type]
    assert gate.still_allowed(passage, gate._directory.snapshot())
    if isinstance(passage, Handoff):
        head = parse_request_head(f"GET {ASKED} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        assert request_of(head, passage, None).target == SENT
    policy = gate._directory.snapshot().policy
    assert isinstance(decide_request(policy, who.sandbox, facts(SENT), 1.0), Permit)
    assert isinstance(decide_request(policy, who.sandbox, facts(ASKED), 1.0), Denied)
