"""How much one sandbox may write."""

from __future__ import annotations

from typing import Any

from audit.budget import MAX_SANDBOXES, Budget, Room
from tests.support.events import WHO

OTHER: dict[str, Any] = {**WHO, "sandbox": "sb_other"}


def budget(**limits: int) -> Budget:
    return Budget(lambda text: "hmac:" + text, **limits)


def test_refusals_beyond_the_second_s_budget_are_counted() -> None:
    """The first n of a second singly, the rest in one summary; the next second begins anew."""
    subject = budget(refusals_a_second=2)
    fields = {**WHO, "reason": "no-rule", "host": "x.example", "port": 443}
    rooms = [subject.admit("worker-1", "request.refused", fields, 100, 10.5) for _ in range(5)]
    assert rooms == [Room.WRITE] * 2 + [Room.COUNT] * 3
    assert subject.admit("worker-1", "request.refused", fields, 100, 11.0) is Room.WRITE
    (summary,) = subject.summaries()
    assert summary.fields() == {**WHO, "count": 3, "reasons": ["no-rule=3"], "targets": ["hmac:x.example:443"]}
    assert subject.summaries() == []


def test_one_sandbox_does_not_use_up_another_s_budget() -> None:
    """Counters are per tenant and sandbox."""
    subject = budget(refusals_a_second=1)
    assert subject.admit("w", "request.refused", WHO, 1, 1) is Room.WRITE
    assert subject.admit("w", "request.refused", WHO, 1, 1) is Room.COUNT
    assert subject.admit("w", "request.refused", OTHER, 1, 1) is Room.WRITE
    assert subject.admit("w", "request.refused", {**WHO, "tenant": "second"}, 1, 1) is Room.WRITE


def test_refusals_without_a_sandbox_are_budgeted_by_channel() -> None:
    """Connections that nobody is known for count against the listener's process."""
    subject = budget(refusals_a_second=1)
    assert subject.admit("worker-1", "connection.refused", {}, 1, 1) is Room.WRITE
    assert subject.admit("worker-1", "connection.refused", {}, 1, 1) is Room.COUNT
    assert subject.admit("worker-2", "connection.refused", {}, 1, 1) is Room.WRITE
    assert subject.summaries()[0].who == {}


def test_allowed_requests_are_never_only_counted() -> None:
    """An intent is written or refused, at any rate."""
    subject = budget(refusals_a_second=0)
    assert subject.admit("w", "request.intent", WHO, 1, 1) is Room.WRITE


def test_beyond_its_quota_a_sandbox_may_end_but_not_begin() -> None:
    """Intents are refused, refusals counted, outcomes and the broker's records written up to twice the quota."""
    subject = budget(quota_bytes=100)
    assert subject.admit("w", "request.intent", WHO, 90, 1) is Room.WRITE
    assert subject.admit("w", "request.intent", WHO, 20, 1) is Room.NONE
    assert subject.admit("w", "request.refused", WHO, 20, 1) is Room.COUNT
    assert subject.admit("w", "request.outcome", WHO, 20, 1) is Room.WRITE
    assert subject.admit("w", "broker.intent", WHO, 80, 1) is Room.WRITE
    assert subject.admit("w", "request.outcome", WHO, 20, 1) is Room.NONE
    assert subject.admit("w", "request.intent", OTHER, 20, 1) is Room.WRITE
    assert [subject.reached(WHO, 1), subject.reached(WHO, 1)] == [True, False]
    assert subject.admit("w", "request.intent", WHO, 20, 3_601) is Room.WRITE


def test_the_disk_reserve_is_kept_for_what_must_be_written() -> None:
    """Below the reserve nothing new begins, for anyone."""
    subject = budget()
    subject.short = True
    assert subject.admit("w", "request.intent", WHO, 1, 1) is Room.NONE
    assert subject.admit("w", "request.refused", {}, 1, 1) is Room.COUNT
    assert subject.admit("v", "broker.intent", WHO, 1, 1) is Room.WRITE
    assert subject.admit("v", "admin.action", {"action": "x"}, 1, 1) is Room.WRITE


def test_invented_sandboxes_do_not_grow_the_tables_without_end() -> None:
    """A broken worker that names a new sandbox each time ends in one shared budget."""
    subject = budget(refusals_a_second=1)
    for number in range(MAX_SANDBOXES + 200):
        subject.admit("w", "request.refused", {**WHO, "sandbox": f"sb_{number}"}, 1, 1)
    assert len(subject._uses) <= MAX_SANDBOXES + 1
    assert subject.admit("w", "request.refused", {**WHO, "sandbox": "sb_new"}, 1, 1) is Room.COUNT
