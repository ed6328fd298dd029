"""The executor between a worker's link and a scripted origin: what goes up, what comes back, what is recorded."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import json
import os
from dataclasses import replace

import pytest

from broker import executor as executor_module
from broker.executor import OPENING_OF_ONE
from net.dial import DialError
from proxy.brokerlink import HandoffRequest
from rules.facts import BodyAttested
from rules.names import CredentialRef
from rules.placeholders import make
from tests.support.benches import Bench, Origin, answer, body_of, drain, head_of, whole
from tests.support.calls import CANARY, KEY, PLACEHOLDER, policy
from tests.support.fakes import ManualClock, sandbox
from tests.support.streams import MemoryStream
from wire.control import Cut, Done, Opened, OpenRefused
from wire.handoff import (
    Answer,
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    BodyPlan,
    Continue,
    Refusal,
    facts_of,
    open_sealed,
)


def refused(answers: list[Answer]) -> str:
    """The reason, where the only answer is a refusal."""
    assert len(answers) == 1, answers
    assert isinstance(answers[0], Refusal), answers
    return answers[0].reason


# --- denials: nothing was dialled, no secret asked for ---

DENIALS: list[tuple[str, dict[str, object], str]] = [
    ("a path that no rule names", {"target": "/other"}, "no-rule"),
    ("a method that no rule names", {"method": "DELETE"}, "no-rule"),
    ("a sandbox that does not exist", {"sandbox": "sb_none"}, "sandbox-ended"),
    ("an earlier life of the sandbox", {"epoch": 9}, "sandbox-ended"),
    ("another host than the Host header's", {"host": "git.test"}, "authority-mismatch"),
    ("a target that is not canonical", {"target": "/orders/%2e%2e"}, "bad-path"),
    ("another rule than ours under the same policy", {"rule": "dev/upload"}, "policy-changing"),
    ("another credential than ours", {"credential": "git"}, "policy-changing"),
    ("another policy under which we deny", {"target": "/other", "policy_digest": "0" * 64}, "policy-changing"),
    (
        "the client's own authority",
        {"headers": (("Host", "shop.test"), ("Authorization", "Bearer mine"))},
        "client-authority",
    ),
]


@pytest.mark.parametrize(("sentence", "changes", "reason"), DENIALS, ids=[row[0] for row in DENIALS])
async def test_what_the_worker_says_is_judged_again(
    bench: Bench, sentence: str, changes: dict[str, object], reason: str
) -> None:
    """A broken worker gets no further than policy: no dial, no opened secret, one record."""
    assert refused(await bench.ask(bench.request(**changes))) == reason
    assert not bench.origin.dialled
    assert not bench.vault.opened
    assert bench.journal.names() == ["broker.refused"]


async def test_a_forged_statement_is_refused(bench: Bench) -> None:
    """A seal under another key opens nothing."""
    bench.link.arm("worker-1", b"x" * 32)
    assert refused(await bench.ask(bench.request())) == "internal-error"
    assert not bench.vault.opened


async def test_an_unknown_worker_is_refused(bench: Bench) -> None:
    """A worker that the vault did not announce has no key."""
    bench.link.arm("worker-9", KEY)
    assert refused(await bench.ask(bench.request())) == "broker-unavailable"


async def test_a_stale_statement_is_refused(bench: Bench) -> None:
    """Five seconds after its issue time a statement is worth nothing."""
    bench.link._clock = ManualClock(wall=bench.clock.wall() - 6)
    assert refused(await bench.ask(bench.request())) == "internal-error"
    assert not bench.vault.opened


async def test_without_a_snapshot_everything_is_refused(bench: Bench) -> None:
    """No vault, no verdict."""
    bench.vault.current = None
    assert refused(await bench.ask(bench.request())) == "broker-unavailable"


async def test_the_vault_has_the_last_word(bench: Bench) -> None:
    """Its refusal reaches the worker as it is, and is not recorded twice."""
    bench.vault.answer = lambda number: OpenRefused(id=number, reason="credential-unavailable", rule="dev/orders")
    answers = await bench.ask(bench.request())
    assert answers == [Refusal(reason="credential-unavailable", rule="dev/orders")]
    assert not bench.origin.dialled
    assert bench.journal.names() == []


async def test_a_silent_vault_refuses(bench: Bench) -> None:
    """Nothing is dialled without the vault's yes."""
    bench.vault.silent = True
    assert refused(await bench.ask(bench.request())) == "broker-unavailable"
    assert not bench.origin.dialled


async def test_verdicts_that_differ_open_nothing(bench: Bench) -> None:
    """The vault opened for another rule than the one judged here: the material is given back unused."""
    bench.vault.answer = lambda number: Opened(
        id=number, rule="dev/upload", operation="dev/upload", policy_digest=bench.policy.digest, credential="shop"
    )
    assert refused(await bench.ask(bench.request())) == "policy-changing"
    assert not bench.origin.dialled
    assert bench.vault.dones == [Done(id=1, sent=False)]


async def test_a_journal_that_fails_changes_the_refusal_only(bench: Bench) -> None:
    """A refusal that cannot be recorded says so."""
    bench.journal.failing = True
    assert refused(await bench.ask(bench.request("/other"))) == "audit-unavailable"


async def test_a_judged_body_that_differs_is_refused_before_the_vault(bench: Bench) -> None:
    """The bytes that the executor would send are the bytes judged, or nothing is sent (2.3)."""
    judged = b'{"order":"7"}'
    request = refund(bench, judged)
    exchange = await bench.link.open(request, b'{"order":"8"}')
    assert refused(await drain(exchange)) == "body-not-judged"
    assert not bench.vault.opened


async def test_a_body_that_needs_judging_is_never_streamed(bench: Bench) -> None:
    """A statement that plans to stream what must be judged is refused."""
    request = replace(refund(bench, b""), body=BodyPlan(kind="chunked"))
    assert refused(await bench.ask(request)) == "body-not-judged"
    assert not bench.vault.opened


async def test_a_body_over_its_operations_bound_is_not_read(bench: Bench) -> None:
    """What no operation may judge is refused by its announced length."""
    body = b'{"order":"' + b"7" * (2 << 20) + b'"}'
    large = await bench.link.open(
        replace(refund(bench, b""), body=BodyPlan(kind="sha256", length=len(body), sha256=b"x" * 32)), b"{}"
    )
    assert refused(await drain(large)) == "body-not-judged"
    assert not bench.vault.opened
    assert bench.journal.names() == ["broker.refused"]


def refund(bench: Bench, body: bytes) -> HandoffRequest:
    """A hand-off whose operation lies in its body."""
    return bench.request(
        "/refund",
        method="POST",
        rule="dev/refund",
        operation="dev/refund",
        headers=(("Host", "shop.test"), ("Content-Type", "application/json"), ("X-Api-Key", PLACEHOLDER)),
        body=BodyPlan.judged(body),
        arguments=(("order", "7"),),
    )


# --- the call ---


async def test_the_secret_goes_into_its_slot_and_nothing_of_the_client_remains(bench: Bench) -> None:
    """Every auth slot is removed first, ours is set once, dropped headers are counted (T18, I11)."""
    request = bench.request(
        headers=(
            ("Host", "shop.test"),
            ("Accept", "application/json"),
            ("X-Api-Key", PLACEHOLDER),
            ("X-Data", "smuggled"),
            ("Accept-Encoding", "gzip, br"),
            ("Range", "bytes=0-3"),
            ("X-Forwarded-For", "10.0.0.1"),
        )
    )
    answers = await bench.ask(request)
    assert head_of(answers).status == 204
    head = bytes(bench.origin.seen).decode()
    assert head.startswith("GET /orders/7 HTTP/1.1\r\n")
    assert head.lower().count("x-api-key:") == 1
    assert CANARY.decode() in head
    assert PLACEHOLDER not in head
    assert "accept-encoding: identity" in head.lower()
    for name in ("x-data", "range", "x-forwarded-for"):
        assert f"{name}:" not in head.lower()
    await bench.settled()
    (outcome,) = bench.journal.named("broker.outcome")
    assert outcome.fields["upstream_status"] == 204
    assert outcome.fields["credential_version"] == "3"
    assert outcome.fields["completed"] is True
    assert "x-data" in outcome.fields["dropped_headers"]  # type: ignore[operator]
    assert [(done.sent, done.status) for done in bench.vault.dones] == [(True, 204)]


async def test_basic_keeps_the_users_name(bench: Bench) -> None:
    """The secret replaces the placeholder in the pair, other bytes stay (T19)."""
    placeholder = make("ghp_{36}", b"\x05" * 64)
    pair = base64.b64encode(f"x-access-token:{placeholder}".encode()).decode()
    request = bench.request(
        "/repo/one",
        host="git.test",
        headers=(("Host", "git.test"), ("Authorization", f"Basic {pair}")),
        rule="dev/clone",
        operation="dev/clone",
        credential="git",
    )
    await bench.ask(request)
    lines = bytes(bench.origin.seen).decode().split("\r\n")
    (line,) = [line for line in lines if line.lower().startswith("authorization:")]
    assert base64.b64decode(line.split(" ")[2]) == b"x-access-token:" + CANARY


async def test_a_redirect_comes_back_as_an_answer(bench: Bench) -> None:
    """The broker never follows; a target that could carry a token is not shown (I12, B088)."""
    bench.origin.script = answer(whole(b"", b"Location: https://evil.test/x?token=1", status=b"302 Found"))
    answers = await bench.ask(bench.request())
    assert head_of(answers).status == 302
    assert "location" not in dict(head_of(answers).headers)
    assert len(bench.origin.dialled) == 1


async def test_an_echo_is_masked_everywhere_and_reported(bench: Bench) -> None:
    """Head, reason phrase and body show no secret; the place is reported once to the vault."""
    body = b"you sent " + CANARY + b" and " + base64.b64encode(b"x:" + CANARY)
    bench.origin.script = answer(
        whole(body, b"ETag: " + CANARY, b"Set-Cookie: a=" + CANARY, b"X-Any: " + CANARY, status=b"200 " + CANARY)
    )
    answers = await bench.ask(bench.request())
    assert CANARY[8:20] not in repr(answers).encode()
    assert len(body_of(answers)) == len(body)
    assert head_of(answers).length == len(body)
    assert head_of(answers).reason == "OK"
    assert {name for name, _ in head_of(answers).headers} == {"ETag"}
    await bench.settled()
    assert [echo.credential for echo in bench.vault.echoes] == ["shop"]
    assert bench.journal.named("broker.outcome")[0].fields["redacted"] == bench.vault.echoes[0].hits
    assert bench.journal.names() == ["broker.outcome"]


async def test_a_compressed_echo_is_undone_and_masked(bench: Bench) -> None:
    """An encoded answer is decoded within caps and comes back without its coding (B106)."""
    raw = gzip.compress(b'{"key":"' + CANARY + b'"}')
    bench.origin.script = answer(whole(raw, b"Content-Encoding: gzip", b"Content-Type: application/json"))
    answers = await bench.ask(bench.request())
    assert body_of(answers) == b'{"key":"sk_live_' + b"*" * (len(CANARY) - 8) + b'"}'
    assert head_of(answers).length is None
    assert "Content-Encoding" not in dict(head_of(answers).headers)


@pytest.mark.parametrize(
    ("sentence", "raw"),
    [
        ("two codings", whole(gzip.compress(gzip.compress(b"x")), b"Content-Encoding: gzip, gzip")),
        ("an unknown coding", whole(b"x", b"Content-Encoding: compress")),
        ("both lengths", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("not HTTP", b"SSH-2.0-x\r\n\r\n"),
        ("a challenge in the gateway's name", b"HTTP/1.1 407 Proxy Authentication\r\nContent-Length: 0\r\n\r\n"),
        ("an unsolicited 101", b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_hostile_answer_becomes_a_fixed_refusal(bench: Bench, sentence: str, raw: bytes) -> None:
    """What breaks protocol or cannot be shown clean is a refusal of ours, with an outcome (I33)."""
    bench.origin.script = answer(raw)
    answers = await bench.ask(bench.request())
    assert isinstance(answers[0], Continue)
    assert isinstance(answers[-1], Refusal)
    assert answers[-1].reason in ("answer-withheld", "upstream-protocol")
    assert not body_of(answers)
    await bench.settled()
    assert bench.journal.named("broker.outcome")[0].fields["error"] == answers[-1].reason


async def test_a_mislabelled_answer_is_cut_not_ended(bench: Bench) -> None:
    """Once the head is out, what cannot be decoded is aborted, never ended well (2.4)."""
    bench.origin.script = answer(whole(b"plainly not gzip", b"Content-Encoding: gzip"))
    answers = await bench.ask(bench.request())
    assert isinstance(answers[-1], AnswerAbort)
    assert answers[-1].reason == "answer-withheld"
    assert not body_of(answers)


async def test_an_answer_cut_short_is_aborted(bench: Bench) -> None:
    """An upstream that leaves in mid-body gives an aborted message (2.4)."""

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await stream.close()

    bench.origin.script = script
    answers = await bench.ask(bench.request())
    assert isinstance(answers[-1], AnswerAbort)
    await bench.settled()
    assert bench.journal.named("broker.outcome")[0].fields["completed"] is False


async def test_only_kept_fields_come_back(bench: Bench) -> None:
    """`result: {keep}` drops everything else, also a secret in free text."""
    document = {"id": 7, "secret": CANARY.decode(), "items": [{"sku": "a", "price": 1.50}, {"sku": "b"}]}
    bench.origin.script = answer(whole(json.dumps(document).encode(), b"Content-Type: application/json"))
    answers = await bench.ask(bench.request("/kept", rule="dev/kept", operation="dev/kept"))
    assert json.loads(body_of(answers)) == {"id": 7, "items": [{"sku": "a"}, {"sku": "b"}]}
    assert head_of(answers).length == len(body_of(answers))


@pytest.mark.parametrize(
    "body", [b"not json", b'{"id":1}', b'{"id":{"x":1},"items":[]}', b'{"id":1,"id":2,"items":[]}']
)
async def test_an_answer_without_its_kept_fields_is_withheld(bench: Bench, body: bytes) -> None:
    """Not JSON, a missing field, an object where a scalar is promised: a fixed 502."""
    bench.origin.script = answer(whole(body))
    answers = await bench.ask(bench.request("/kept", rule="dev/kept", operation="dev/kept"))
    assert answers[-1] == Refusal(reason="answer-withheld")


async def test_events_reach_the_worker_as_they_are_sent(bench: Bench) -> None:
    """Each event arrives before the next one is sent: the origin waits for the worker (T14)."""
    taken = asyncio.Event()

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        stream.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(5):
            event = b"data: %d\n\n" % number
            stream.write(b"%x\r\n%b\r\n" % (len(event), event))
            await taken.wait()
            taken.clear()
        stream.write(b"0\r\n\r\n")
        await stream.receive()

    bench.origin.script = script
    exchange = await bench.link.open(bench.request())
    received: list[bytes] = []
    while not isinstance(item := await exchange.receive(), AnswerEnd):
        if isinstance(item, AnswerData):
            received.append(item.data)
            taken.set()
    await exchange.close()
    assert received == [b"data: %d\n\n" % number for number in range(5)]


async def test_a_streamed_body_goes_up_after_continue(bench: Bench) -> None:
    """Nothing of the body is needed before the verdict, and all of it arrives."""

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"0\r\n\r\n")
        stream.write(whole(b"ok"))
        await stream.receive()

    bench.origin.script = script
    request = bench.request(
        "/upload", method="POST", rule="dev/upload", operation="dev/upload", body=BodyPlan(kind="chunked")
    )
    exchange = await bench.link.open(request)
    assert isinstance(await exchange.receive(), Continue)
    for _ in range(4):
        await exchange.send_body(b"u" * 100_000)
    await exchange.finish_body()
    answers = await drain(exchange)
    assert body_of(answers) == b"ok"
    assert bench.origin.seen.count(b"u") >= 400_000
    await bench.settled()
    assert bench.journal.named("broker.outcome")[0].fields["bytes_up"] == 400_000


async def test_a_judged_body_is_attested_and_sent_as_it_is(bench: Bench) -> None:
    """The vault hears which operation the body states; the origin gets those very bytes."""
    body = b'{"order": "7"}'

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, body)
        stream.write(whole(b"ok"))
        await stream.receive()

    bench.origin.script = script
    answers = await bench.ask(refund(bench, body), body)
    assert body_of(answers) == b"ok", answers
    ((_, attested),) = bench.vault.opened
    assert attested is not None
    assert any(entry.partition("?")[0] == "dev/refund" for entry in attested.operations)


# --- endings ---


async def test_one_sandbox_does_not_take_every_place_of_an_executor(bench: Bench) -> None:
    """Expect its calls beyond the bound to be refused, another sandbox's to be made, and a place to come back."""

    async def never(origin: Origin, stream: MemoryStream) -> None:
        while await stream.receive():
            pass

    async def at_once(origin: Origin, stream: MemoryStream) -> None:
        await stream.receive()
        stream.write(whole(b"ok"))
        await stream.receive()

    other = sandbox("sb_two")
    assert bench.vault.current is not None
    everyone = {**bench.vault.current.sandboxes, (other.tenant, other.id): other}
    bench.vault.current = replace(bench.vault.current, sandboxes=everyone)
    bench.executor._running_of_one = 2
    bench.origin.script = never
    held = [await bench.link.open(bench.request()) for _ in range(2)]
    for exchange in held:
        assert isinstance(await exchange.receive(), Continue)
    assert refused(await bench.ask(bench.request())) == "too-many-requests"
    assert len(bench.vault.opened) == 2
    bench.origin.script = at_once
    assert body_of(await bench.ask(bench.request(sandbox="sb_two"))) == b"ok"
    await held[0].close()
    while bench.executor.running > 1:
        await asyncio.sleep(0)
    assert body_of(await bench.ask(bench.request())) == b"ok"
    await held[1].close()


async def test_the_vault_is_asked_about_few_calls_of_one_sandbox_at_a_time(bench: Bench) -> None:
    """While it is slow, a flood of one sandbox waits here; the neighbour's call does not wait behind all of it."""
    gate = asyncio.Event()
    open_at_once = bench.vault.open
    asked: list[str] = []

    async def slow(sealed: bytes, attested: BodyAttested | None, again: int = 0) -> Opened | OpenRefused:
        asked.append(open_sealed(sealed, KEY).sandbox)
        await gate.wait()
        return await open_at_once(sealed, attested, again)

    other = sandbox("sb_two")
    assert bench.vault.current is not None
    everyone = {**bench.vault.current.sandboxes, (other.tenant, other.id): other}
    bench.vault.current = replace(bench.vault.current, sandboxes=everyone)
    bench.vault.open = slow  # type: ignore[method-assign]
    flood = [asyncio.ensure_future(bench.ask(bench.request())) for _ in range(3 * OPENING_OF_ONE)]
    while len(asked) < OPENING_OF_ONE or bench.executor.running < len(flood):
        await asyncio.sleep(0)
    neighbour = asyncio.ensure_future(bench.ask(bench.request(sandbox="sb_two")))
    while "sb_two" not in asked:
        await asyncio.sleep(0)
    assert asked.count("sb_one") == OPENING_OF_ONE
    gate.set()
    answers = await asyncio.gather(neighbour, *flood)
    assert len(bench.vault.opened) == len(answers)
    assert "too-many-requests" not in [item.reason for got in answers for item in got if isinstance(item, Refusal)]


async def one_byte_and_no_end(origin: Origin, stream: MemoryStream) -> None:
    """An answer that has begun and stays open."""
    await origin.until(stream, b"\r\n\r\n")
    stream.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n!\r\n")
    await origin.until(stream, b"never")


async def test_a_worker_that_leaves_cancels_the_call(bench: Bench) -> None:
    """The upstream is not kept waiting for a client that is gone, and the outcome is recorded."""
    bench.origin.script = one_byte_and_no_end
    exchange = await bench.link.open(bench.request())
    while not isinstance(await exchange.receive(), AnswerData):
        pass
    await exchange.close()
    await bench.origin.gone.wait()
    await bench.settled()
    (outcome,) = bench.journal.named("broker.outcome")
    assert outcome.fields["error"] == "client-gone"
    assert len(bench.vault.dones) == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Cut(id=1, kind="sandbox", tenant="default", subject="sb_one"), "sandbox-ended"),
        (Cut(id=1, kind="credential", subject="shop"), "policy-changing"),
        (Cut(id=1, kind="policy", subject="another"), "policy-changing"),
        (Cut(id=1, kind="all"), "policy-changing"),
    ],
    ids=lambda value: value.kind if isinstance(value, Cut) else "",
)
async def test_a_cut_closes_running_calls_before_it_returns(bench: Bench, message: Cut, reason: str) -> None:
    """After a cut no matching call carries another byte; its answer is aborted, its outcome written."""
    bench.origin.script = one_byte_and_no_end
    exchange = await bench.link.open(bench.request())
    while not isinstance(await exchange.receive(), AnswerData):
        pass
    assert await bench.executor.cut(message) >= 1
    assert bench.executor.running == 0
    await bench.origin.gone.wait()
    assert await drain(exchange) == [AnswerAbort(reason=reason)]
    await bench.executor.settle()
    assert bench.journal.named("broker.outcome")[0].fields["error"] == reason


@pytest.mark.parametrize(
    "message",
    [
        Cut(id=1, kind="sandbox", tenant="default", subject="sb_two"),
        Cut(id=1, kind="sandbox", tenant="other", subject="sb_one"),
        Cut(id=1, kind="credential", subject="git"),
    ],
    ids=["another sandbox", "another tenant", "another credential"],
)
async def test_a_cut_leaves_other_calls_alone(bench: Bench, message: Cut) -> None:
    """What does not match goes on."""
    go_on = asyncio.Event()

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        await go_on.wait()
        stream.write(whole(b"done"))
        await stream.receive()

    bench.origin.script = script
    exchange = await bench.link.open(bench.request())
    assert isinstance(await exchange.receive(), Continue)
    assert await bench.executor.cut(message) == 0
    go_on.set()
    assert body_of(await drain(exchange)) == b"done"


@pytest.mark.parametrize(
    ("sentence", "edit", "goes_on"),
    [
        ("a rule beside it", {"digest": "n" * 64}, True),
        ("the rule is gone", {"digest": "n" * 64, "roles": {}}, False),
        ("its credential is another", {"digest": "n" * 64, "credentials": {}}, False),
        ("its destination is another", {"digest": "n" * 64, "destinations": {"shop.test": None}}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_new_policy_cuts_what_it_does_not_permit_as_before(
    bench: Bench, sentence: str, edit: dict[str, object], goes_on: bool
) -> None:
    """C078: an edit elsewhere cuts no call in progress; whatever the call was opened by or dialled by, does."""
    go_on = asyncio.Event()

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        await go_on.wait()
        stream.write(whole(b"done"))
        await stream.receive()

    bench.origin.script = script
    exchange = await bench.link.open(bench.request())
    assert isinstance(await exchange.receive(), Continue)
    assert bench.vault.current is not None
    bench.vault.current = replace(bench.vault.current, policy=replace(bench.policy, **edit))  # type: ignore[arg-type]
    cut = Cut(id=1, kind="policy", subject="n" * 64)
    await bench.executor.cut(cut)
    assert bench.executor.running == (1 if goes_on else 0), sentence
    go_on.set()
    rest = await drain(exchange)
    if goes_on:
        assert body_of(rest) == b"done"
    else:
        assert rest == [AnswerAbort(reason="policy-changing")]


async def test_a_policy_cut_without_the_snapshot_it_names_cuts_everything(bench: Bench) -> None:
    """What cannot be judged anew ends: no snapshot, or another one than the cut's."""
    for current in (None, bench.vault.current):
        bench.vault.current = bench.vault.current or current

        async def script(origin: Origin, stream: MemoryStream) -> None:
            await origin.until(stream, b"never")

        bench.origin.script = script
        exchange = await bench.link.open(bench.request())
        assert isinstance(await exchange.receive(), Continue)
        bench.vault.current, kept = current, bench.vault.current
        await bench.executor.cut(Cut(id=1, kind="policy", subject="n" * 64))
        assert await drain(exchange) == [AnswerAbort(reason="policy-changing")]
        bench.vault.current = kept


async def test_a_dial_that_fails_is_a_refusal_with_an_outcome(bench: Bench) -> None:
    """The intent was recorded, so the outcome is too."""
    bench.origin.fail = DialError("address-refused", "a special range", "10.0.0.1")
    answers = await bench.ask(bench.request())
    assert answers[-1] == Refusal(reason="address-refused")
    await bench.settled()
    (outcome,) = bench.journal.named("broker.outcome")
    assert outcome.fields["error"] == "address-refused"
    assert bench.vault.dones == [Done(id=1, sent=False)]


async def test_a_fault_in_a_kind_is_a_refusal_without_its_text(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception with the canary in a local and in its text reaches neither worker, log nor stderr (1.6)."""

    def broken(*args: object) -> object:
        canary = CANARY.decode()
        raise RuntimeError(canary)

    monkeypatch.setattr("broker.executor.apply", broken)
    answers = await bench.ask(bench.request())
    assert answers == [Refusal(reason="internal-error")]
    await bench.settled()
    assert not bench.origin.dialled
    shown = capsys.readouterr().err + repr(bench.journal.events) + repr(answers)
    assert CANARY.decode() not in shown
    assert "RuntimeError" in shown
    assert bench.journal.names() == ["broker.outcome"]
    assert bench.journal.named("broker.outcome")[0].fields["error"] == "internal-error"


async def test_a_call_is_not_made_over_another_sandboxs_connection(bench: Bench) -> None:
    """Kept connections belong to one sandbox and credential version."""

    async def script(origin: Origin, stream: MemoryStream) -> None:
        while await stream.receive():
            stream.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    bench.origin.script = script
    await bench.ask(bench.request())
    await bench.settled()
    await bench.ask(bench.request())
    assert len(bench.origin.dialled) == 1
    other = sandbox("sb_two")
    assert bench.vault.current is not None
    known = dict(bench.vault.current.sandboxes)
    known[other.tenant, other.id] = other
    bench.vault.current = replace(bench.vault.current, sandboxes=known)
    await bench.ask(bench.request(sandbox="sb_two"))
    assert [target.sandbox for target in bench.origin.dialled] == ["sb_one", "sb_two"]


async def test_no_answer_names_anything_of_the_statement(bench: Bench) -> None:
    """Refusals are constant per reason: they reflect no request bytes (I29)."""
    marker = os.urandom(8).hex()
    answers = await bench.ask(bench.request(f"/{marker}"))
    assert marker not in repr(answers)


def test_the_credential_names_here_exist() -> None:
    """The policy of these tests has both credentials."""
    assert {CredentialRef("shop"), CredentialRef("git")} <= policy().credentials.keys()
    assert facts_of.__doc__


async def test_scrub_sets_are_gone_with_the_calls_that_use_them(bench: Bench) -> None:
    """Calls in flight share what was compiled of the same material; after the last one nothing of it is kept."""
    release = asyncio.Event()

    async def waiting(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        await release.wait()
        stream.write(whole(b"{}", b"Content-Type: application/json"))
        await stream.receive()

    bench.origin.script = waiting
    calls = [asyncio.create_task(bench.ask(bench.request())) for _ in range(2)]
    async with asyncio.timeout(60):
        while len(bench.origin.dialled) < 2:
            await asyncio.sleep(0)
    assert len(executor_module._COMPILED) == 1
    release.set()
    await asyncio.gather(*calls)
    await bench.settled()
    gc.collect()
    assert not executor_module._COMPILED
