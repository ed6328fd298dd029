"""The gate by itself: every dependency failing and hanging, records, outcomes, what may pass in a head."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from audit.events import Event
from audit.journal import AuditUnavailable
from proxy.gate import Forward, Gate, Handoff, NeedsBody, Refuse, dropped_headers, own_placeholder
from proxy.identity import Identified
from proxy.limits import Budgets, LimitTable
from proxy.ports import DirectoryUnavailable
from proxy.recent import RecentRefusals
from proxy.records import Outcome, Seen
from rules.decide import decide_request
from rules.decision import Permit
from rules.facts import RequestFacts, TunnelFacts
from rules.names import CredentialRef, Host
from rules.placeholders import make
from rules.policy import Policy
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
from tests.support.rooms import credential, json_body, op, policy, rule, tunnel_rule

PLACEHOLDER = make("sk_{24}", bytes(range(32)))
BOX = sandbox("sb_one")
WHO = Identified(sandbox=BOX, channel=SHARED, token=TOKEN)
RULES = policy(
    rule("dev/read", op("dev/read", "api.test", ["/v1/read/**"], query=None)),
    rule("dev/post", op("dev/post", "api.test", ["/post"], methods=["POST"], effect="write",
                        body=json_body({"a": ["b"]}))),
    rule("dev/fetch", op("dev/git.fetch-like", "api.test", ["/fetch"], methods=["POST"], effect="read")),
    rule("dev/held", op("dev/held", "api.test", ["/held"]), approval="managers"),
    rule("dev/key", op("dev/key", "shop.test", ["/k"]), credential=CredentialRef("shop")),
    tunnel_rule("dev/raw", "raw.test"),
    credentials=[credential("shop", "shop.test")],
)  # fmt: skip


class HangingJournal(MemoryJournal):
    """Never answers."""

    async def append(self, event: Event, *, durable: bool = False) -> int:
        await asyncio.Event().wait()
        return 0


class BrokenJournal(MemoryJournal):
    """Fails in a way that is not its contract."""

    async def append(self, event: Event, *, durable: bool = False) -> int:
        raise RuntimeError("unforeseen")


class Bench:
    """A gate with fakes around it."""

    def __init__(
        self, rules: Policy = RULES, *, journal: Any = None, table: LimitTable | None = None, **more: Any
    ) -> None:
        self.clock = ManualClock()
        self.journal = journal or MemoryJournal()
        entry = registered(BOX, TOKEN, placeholders={"shop": PLACEHOLDER})
        self.directory = MemoryDirectory(snapshot(rules, [entry]))
        self.recent = RecentRefusals()
        table = table or LimitTable()
        self.gate = Gate(
            directory=self.directory,
            journal=self.journal,
            clock=self.clock,
            random=CountingRandom(),
            budgets=Budgets(table, self.clock),
            recent=self.recent,
            table=table,
            journal_seconds=0.05,
            decide_seconds=0.05,
            **more,
        )


def facts(
    target: str = "/v1/read/x",
    host: str = "api.test",
    *headers: tuple[str, str],
    method: str = "GET",
    has_body: bool = False,
) -> RequestFacts:
    """One request inside a tunnel."""
    return RequestFacts.build(
        method=method,
        scheme="https",
        tunnel=TunnelFacts(host=Host(host), port=443),
        target=target,
        headers=(("host", host), *headers),
        has_body=has_body,
    )


# --- kill switches -----------------------------------------------------------------------------------------------


def raising(*_: Any) -> Any:
    """A policy that fails."""
    raise RuntimeError("unforeseen")


@pytest.mark.parametrize(
    ("sentence", "fail", "reason"),
    [
        ("no snapshot", DirectoryUnavailable("none"), "policy-unavailable"),
        ("a directory that raises anything else", RuntimeError("unforeseen"), "internal-error"),
    ],
)
async def test_a_failing_directory_refuses(sentence: str, fail: Exception, reason: str) -> None:
    """Without a current snapshot there is no yes, for requests and tunnels."""
    bench = Bench()
    bench.directory.fail = fail
    verdict = await bench.gate.head(WHO, facts(), Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason == reason, sentence
    tunnel = await bench.gate.tunnel(WHO, TunnelFacts(host=Host("api.test"), port=443), Seen())
    assert isinstance(tunnel, Refuse)
    assert tunnel.reason == reason, sentence
    assert bench.journal.names() == ["request.refused", "request.refused"]


async def test_a_raising_policy_refuses() -> None:
    """B182: an exception while judging is a denial with one record."""
    bench = Bench(decide=raising, decide_connect=raising)
    verdict = await bench.gate.head(WHO, facts(), Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason == "internal-error"
    tunnel = await bench.gate.tunnel(WHO, TunnelFacts(host=Host("raw.test"), port=443), Seen())
    assert isinstance(tunnel, Refuse)
    assert tunnel.reason == "internal-error"


async def test_a_policy_that_hangs_on_a_big_body_refuses_at_its_deadline() -> None:
    """Verdicts on big bodies are made in a thread with a deadline (RULINGS 3.5)."""
    release = threading.Event()

    def slow(rules: Policy, box: Any, asked: RequestFacts, now: float) -> Any:
        if asked.body is not None:
            release.wait(5)
        return decide_request(rules, box, asked, now)

    bench = Bench(decide=slow)
    waiting = await bench.gate.head(WHO, facts("/post", method="POST", has_body=True), Seen())
    assert isinstance(waiting, NeedsBody)
    verdict = await bench.gate.body(waiting, b"x" * 300_000)
    release.set()
    assert isinstance(verdict, Refuse)
    assert verdict.reason == "policy-unavailable"


@pytest.mark.parametrize("journal", [HangingJournal, BrokenJournal])
async def test_a_journal_that_hangs_or_breaks_refuses(journal: type[MemoryJournal]) -> None:
    """B158: the request is refused within the deadline and nothing is left open."""
    bench = Bench(journal=journal())
    verdict = await bench.gate.head(WHO, facts(), Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason == "audit-unavailable"
    admitted = await bench.gate.tunnel(WHO, TunnelFacts(host=Host("raw.test"), port=443), Seen())
    assert not isinstance(admitted, Refuse)
    entered = await bench.gate.enter(admitted, Seen())
    assert isinstance(entered, Refuse)
    assert entered.reason == "audit-unavailable"
    assert bench.gate.open_passages == 0


async def test_a_denial_that_cannot_be_recorded_is_still_a_denial() -> None:
    """The answer is then about the log, and never a yes."""
    bench = Bench()
    bench.journal.failing = True
    verdict = await bench.gate.head(WHO, facts(host="evil.test"), Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason == "audit-unavailable"


async def test_an_ended_sandbox_is_refused_whatever_it_proved_before() -> None:
    """Each verdict looks the sandbox up anew: gone, another epoch, another token, over its time."""
    for change in ([], [registered(sandbox("sb_one", epoch=2), TOKEN)], [registered(BOX, "another-token")]):
        bench = Bench()
        bench.directory.current = snapshot(RULES, change)
        verdict = await bench.gate.head(WHO, facts(), Seen())
        assert isinstance(verdict, Refuse)
        assert verdict.reason == "sandbox-ended"
    bench = Bench()
    bench.clock.now = BOX.expires_at
    verdict = await bench.gate.head(WHO, facts(), Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason == "sandbox-ended"


# --- refusals ----------------------------------------------------------------------------------------------------


async def test_a_held_request_is_refused_with_a_ticket_and_one_record() -> None:
    """Never 2xx: approval-required, its ticket, and when to ask again."""
    bench = Bench()
    verdict = await bench.gate.head(WHO, facts("/held"), Seen())
    assert isinstance(verdict, Refuse)
    assert (verdict.reason, verdict.ticket) == ("approval-required", verdict.request_id)
    assert verdict.retry_after > 0
    assert bench.journal.names() == ["approval.requested"]


@pytest.mark.parametrize(
    ("sentence", "asked", "reason"),
    [
        ("a header beyond the bound", facts("/v1/read/x", "api.test", ("x-a", "b" * 40_000)), "head-too-large"),
        ("query bytes beyond the hour's budget", facts("/v1/read/x?" + "q" * 100), "limit-reached"),
        ("an upload on a read operation", facts("/fetch", "api.test", ("content-length", "99"), method="POST",
                                                has_body=True), "limit-reached"),
    ],
)  # fmt: skip
async def test_bounds_refuse_what_policy_would_allow(sentence: str, asked: RequestFacts, reason: str) -> None:
    """RULINGS 4.7: allowed is not unlimited."""
    bench = Bench(table=LimitTable(query_bytes_per_host=50, read_upload_bytes=50))
    verdict = await bench.gate.head(WHO, asked, Seen())
    assert isinstance(verdict, Refuse)
    assert verdict.reason == reason, sentence


async def test_no_value_of_query_header_or_placeholder_enters_a_record() -> None:
    """Names of query parameters, never values; placeholders are masked wherever they stand."""
    bench = Bench()
    secret = "hunter2-secret-value"
    asked = facts(
        f"/v1/read/{PLACEHOLDER}?access_token={secret}",
        "api.test",
        ("authorization", f"Bearer {secret}"),
        ("cookie", f"s={secret}"),
    )
    assert isinstance(await bench.gate.head(WHO, asked, Seen()), Refuse)
    text = repr([event.fields for event, _ in bench.journal.events])
    assert secret not in text
    assert PLACEHOLDER not in text
    assert "access_token" in text


# --- passages ----------------------------------------------------------------------------------------------------


async def test_a_forward_has_one_intent_and_one_outcome_however_often_it_is_done() -> None:
    """`done` is idempotent."""
    bench = Bench()
    passage = await bench.gate.head(WHO, facts(), Seen(lane="http1", connect_host="api.test:443"))
    assert isinstance(passage, Forward)
    bench.clock.advance(1.5)
    for _ in range(2):
        await bench.gate.done(passage, Outcome(status=200, bytes_down=5, completed=True))
    assert bench.journal.names() == ["request.intent", "request.outcome"]
    intent, outcome = (event.fields for event, _ in bench.journal.events)
    assert intent["policy"] == "d1"
    assert outcome["duration_us"] == 1_500_000
    assert (outcome["tenant"], outcome["owner"], outcome["role"]) == ("default", "owner", "dev")


async def test_a_credentialed_operation_is_handed_off_and_its_outcome_is_the_brokers() -> None:
    """Only a failure before the broker took it is recorded here."""
    bench = Bench()
    passage = await bench.gate.head(WHO, facts("/k", "shop.test", ("x-api-key", PLACEHOLDER)), Seen())
    assert isinstance(passage, Handoff)
    await bench.gate.done(passage, Outcome(status=200, completed=True))
    assert bench.journal.names() == ["request.handoff"]
    failed = await bench.gate.head(WHO, facts("/k", "shop.test"), Seen())
    assert isinstance(failed, Handoff)
    await bench.gate.done(failed, Outcome(error="broker-unavailable"))
    assert bench.journal.names() == ["request.handoff", "request.handoff", "request.refused"]


NAMES = policy(
    rule("dev/pypi", replace(op("dev/pypi", "api.test", ["/simple/{name}"]), native="pypi")),
    rule("dev/own", replace(op("dev/own", "shop.test", ["/simple/{name}"]), native="pypi"),
         credential=CredentialRef("shop")),
    credentials=[credential("shop", "shop.test")],
)  # fmt: skip


@pytest.mark.parametrize("host", ["api.test", "shop.test"])
async def test_a_name_that_a_registry_does_not_have_counts_however_it_was_asked_for(host: str) -> None:
    """Told in another shape (an explicit operation) or answered through the broker, a 404 is one name more."""
    bench = Bench(NAMES, table=LimitTable(missing_per_registry=2))
    for name in ("a", "b"):
        passage = await bench.gate.head(WHO, facts(f"/simple/{name}", host), Seen(lane="explicit"))
        assert isinstance(passage, Forward | Handoff)
        passage = replace(passage, native="problem")
        if isinstance(passage, Handoff):
            bench.gate.missed(passage)
        await bench.gate.done(passage, Outcome(status=404 if isinstance(passage, Forward) else 0))
    third = await bench.gate.head(WHO, facts("/simple/c", host), Seen())
    assert isinstance(third, Refuse)
    assert third.reason == "limit-reached"


async def test_what_is_open_at_the_end_gets_an_outcome() -> None:
    """A drain leaves no intent alone."""
    bench = Bench()
    assert isinstance(await bench.gate.head(WHO, facts(), Seen()), Forward)
    assert await bench.gate.abandon("shutting-down") == 1
    assert bench.journal.named("request.outcome")[0].fields["error"] == "shutting-down"


async def test_a_cancelled_caller_still_leaves_an_outcome_for_an_intent_that_may_be_written() -> None:
    """The record may have reached the log although nobody waited for the answer."""

    class Slow(MemoryJournal):
        def __init__(self) -> None:
            super().__init__()
            self.first = True

        async def append(self, event: Event, *, durable: bool = False) -> int:
            number = await super().append(event, durable=durable)
            if self.first:
                self.first = False
                await asyncio.Event().wait()
            return number

    bench = Bench(journal=Slow())
    asking = asyncio.ensure_future(bench.gate.head(WHO, facts(), Seen()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await bench.gate.abandon("end")
    assert bench.journal.names() == ["request.intent", "request.outcome"]


async def test_done_survives_the_cancellation_of_its_caller() -> None:
    """A connection task that is cancelled while it reports still leaves the outcome."""
    bench = Bench()
    passage = await bench.gate.head(WHO, facts(), Seen())
    assert isinstance(passage, Forward)
    reporting = asyncio.ensure_future(bench.gate.done(passage, Outcome(error="cut")))
    await asyncio.sleep(0)
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)
    await bench.gate.abandon("end")
    assert bench.journal.names() == ["request.intent", "request.outcome"]


async def test_an_outcome_that_cannot_be_written_is_counted() -> None:
    """Status can then show it."""
    bench = Bench()
    passage = await bench.gate.head(WHO, facts(), Seen())
    assert isinstance(passage, Forward)
    bench.journal.failing = True
    await bench.gate.done(passage, Outcome(status=200))
    assert bench.gate.lost_outcomes == 1


async def test_a_tightened_policy_no_longer_allows_what_runs() -> None:
    """The exchange is judged anew under the new snapshot; a fault in judging is a no in the live set."""
    bench = Bench()
    passage = await bench.gate.head(WHO, facts(), Seen())
    assert isinstance(passage, Forward)
    entry = registered(BOX, TOKEN)
    assert bench.gate.still_allowed(passage, snapshot(RULES, [entry], 2))
    assert not bench.gate.still_allowed(passage, snapshot(policy(digest="d2"), [entry], 2))
    assert not bench.gate.still_allowed(passage, snapshot(RULES, [], 2))


async def test_request_ids_differ_and_have_their_form() -> None:
    """`req_` and twenty characters of [a-z2-7]."""
    bench = Bench()
    ids = {bench.gate.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(name.startswith("req_") and len(name) == 24 and name == name.lower() for name in ids)


# --- what may pass in a head -------------------------------------------------------------------------------------


async def test_headers_that_could_relax_a_verdict_never_pass() -> None:
    """RULINGS 4.1, and whatever Connection nominates."""
    bench = Bench()
    names = ("x-original-url", "x-forwarded-host", "forwarded", "x-real-ip", "via", "proxy-authorization",
             "exeat-anything", "te", "keep-alive", "x-nominated")  # fmt: skip
    asked = facts("/v1/read/x", "api.test", *((name, "1") for name in names), ("connection", "close, x-nominated"),
                  ("accept", "*/*"))  # fmt: skip
    passage = await bench.gate.head(WHO, asked, Seen())
    assert isinstance(passage, Forward)
    assert passage.dropped == {*names, "connection"}
    assert isinstance(passage.permit, Permit)
    assert "accept" not in dropped_headers(asked, passage.permit)


@pytest.mark.parametrize(
    ("sentence", "header", "fits"),
    [
        ("its own placeholder, whole", PLACEHOLDER, True),
        ("nothing claimed", "", True),
        ("another sandbox's", make("sk_{24}", bytes(range(1, 33))), False),
        ("its own core in another shape", PLACEHOLDER.replace("sk_", "tk_"), False),
        ("its own and another's", PLACEHOLDER + make("sk_{24}", bytes(range(2, 34))), False),
    ],
)
def test_a_placeholder_in_the_slot_must_be_this_sandboxs_own(sentence: str, header: str, fits: bool) -> None:
    """By hash: the gate knows no placeholder, only what fits."""
    entry = registered(BOX, TOKEN, placeholders={"shop": PLACEHOLDER})
    asked = facts("/k", "shop.test", ("x-api-key", header))
    assert own_placeholder(credential("shop", "shop.test"), entry, asked) is fits, sentence


async def test_audit_unavailable_is_what_the_real_journal_raises() -> None:
    """The fake and the gate agree on the exception."""
    journal = MemoryJournal()
    journal.failing = True
    with pytest.raises(AuditUnavailable):
        await journal.append(Event("process.started", {}))
