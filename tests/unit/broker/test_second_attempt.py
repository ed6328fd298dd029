"""A read that the upstream refused with 401 is sent once more with material that its source may have replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.sources.base import Document, SourceError
from broker.vault.open import _repeatable
from broker.vault.opened import Opened as VaultOpened
from broker.vault.opened import Refused
from rules.secret_references import WHOLE
from tests.support.benches import Bench, Origin, body_of, drain, head_of, whole
from tests.support.streams import MemoryStream
from tests.support.vaults import sealed, statement
from tests.unit.broker.test_supply import NEW, OLD
from tests.unit.broker.test_supply import Bench as VaultBench
from tests.unit.broker.test_supply import bench as vault_bench
from wire.control import Open, Opened, OpenRefused
from wire.handoff import AnswerEnd, BodyPlan, Continue, Refusal

REFUSAL = b'{"error": "of the first attempt"}'
FIRST, SECOND = b"first-material-0123456789", b"second-material-0123456789"


class Upstream:
    """Refuses `refused`, serves the rest; whatever it saw, in order."""

    def __init__(self, *refused: bytes, status: bytes = b"401 Unauthorized") -> None:
        self.refused, self.status = refused, status
        self.heads: list[bytes] = []

    async def __call__(self, origin: Origin, stream: MemoryStream) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            data = await stream.receive()
            if not data:
                return
            head += data
        self.heads.append(head)
        no = any(value in head for value in self.refused)
        stream.write(whole(REFUSAL, status=self.status) if no else whole(b"served"))
        await stream.receive()


def opened(bench: Bench, number: int, value: bytes, *, renewable: bool) -> Opened:
    return Opened(
        id=number,
        rule="dev/orders",
        operation="dev/orders",
        policy_digest=bench.policy.digest,
        credential="shop",
        version=str(number),
        parts=(("value", value),),
        renewable=renewable,
    )


def asked(bench: Bench) -> list[int]:
    """What each Open said in `again`, once the bench's vault is told to remember."""
    again: list[int] = []
    open_before = bench.vault.open

    async def open_(raw: bytes, attested: object, number: int = 0) -> Opened | OpenRefused:
        again.append(number)
        return await open_before(raw, attested, number)  # type: ignore[arg-type]

    bench.vault.open = open_  # type: ignore[method-assign]
    return again


@pytest.mark.parametrize(
    ("sentence", "renewable", "status"),
    [
        ("the vault has no other material", False, b"401 Unauthorized"),
        ("what was refused is not the material", True, b"403 Forbidden"),
        ("a fault of the upstream", True, b"500 Internal Server Error"),
    ],
)
async def test_what_is_sent_once_only(bench: Bench, sentence: str, renewable: bool, status: bytes) -> None:
    """The upstream's answer is the answer; the vault is asked once."""
    upstream = Upstream(FIRST, status=status)
    bench.origin.script = upstream
    bench.vault.answer = lambda number: opened(bench, number, FIRST, renewable=renewable)
    again = asked(bench)
    answers = await bench.ask(bench.request())
    assert head_of(answers).status == int(status[:3])
    assert body_of(answers) == REFUSAL
    assert again == [0]
    assert len(upstream.heads) == 1


async def test_the_second_attempt_has_what_its_source_has_now(bench: Bench) -> None:
    """The client gets one answer, the second one, and nothing of the first; each attempt has its own outcome."""
    upstream = Upstream(FIRST)
    bench.origin.script = upstream
    bench.vault.answer = lambda number: opened(bench, number, (FIRST, SECOND)[number - 1], renewable=number == 1)
    again = asked(bench)
    answers = await bench.ask(bench.request())
    assert head_of(answers).status == 200
    assert body_of(answers) == b"served"
    assert len([item for item in answers if isinstance(item, Continue)]) == 1
    assert isinstance(answers[-1], AnswerEnd)
    assert again == [0, 1]
    assert [FIRST in upstream.heads[0], SECOND in upstream.heads[1]] == [True, True]
    await bench.settled()
    first, second = bench.journal.named("broker.outcome")
    assert (first.fields["error"], first.fields["upstream_status"]) == ("credential-refused", 401)
    assert "status" not in first.fields
    assert [one.fields["attempt"] for one in (first, second)] == [1, 2]
    assert (second.fields["status"], second.fields["credential_version"]) == (200, "2")
    assert [done.id for done in bench.vault.dones] == [1, 2]


async def test_a_second_refusal_is_the_answer(bench: Bench) -> None:
    """At most twice, whatever the vault says of the second one."""
    upstream = Upstream(FIRST, SECOND)
    bench.origin.script = upstream
    bench.vault.answer = lambda number: opened(bench, number, (FIRST, SECOND)[number - 1], renewable=True)
    answers = await bench.ask(bench.request())
    assert head_of(answers).status == 401
    assert body_of(answers) == REFUSAL
    assert len(upstream.heads) == 2


async def test_a_source_that_is_gone_by_then_refuses(bench: Bench) -> None:
    """The vault's no to the second attempt is the answer; the first one's outcome is on record."""
    bench.origin.script = Upstream(FIRST)
    bench.vault.answer = lambda number: (
        opened(bench, 1, FIRST, renewable=True) if number == 1 else OpenRefused(id=2, reason="credential-unavailable")
    )
    answers = await drain(await bench.link.open(bench.request(), None))
    assert answers == [Continue(), Refusal(reason="credential-unavailable")]
    await bench.settled()
    (outcome,) = bench.journal.named("broker.outcome")
    assert outcome.fields["error"] == "credential-refused"


# --- the vault's part


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[VaultBench]:
    made = await vault_bench(tmp_path)
    yield made
    await made.rig.stop()


async def test_only_a_read_with_old_material_is_renewable(shop: VaultBench) -> None:
    """Not what came a moment ago, and not what is read at each use."""
    box = await shop.rig.sandbox()
    shop.source.gives = Document(fields={WHOLE: OLD})
    fresh = await shop.call(box)
    assert isinstance(fresh, VaultOpened)
    assert not fresh.renewable
    shop.rig.clock.advance(6)
    old = await shop.call(box)
    assert isinstance(old, VaultOpened)
    assert old.renewable
    stock = statement(
        shop.rig,
        box,
        rule="agent/stock.read",
        operation="agent/stock.read",
        credential="shop-stock",
        target="/v1/stock/7",
        headers=(("Host", "orders.shop.example"),),
    )
    at_hand = await shop.rig.vault.opener.open_handoff(sealed(shop.worker, stock), None)
    assert isinstance(at_hand, VaultOpened), at_hand
    assert not at_hand.renewable


async def test_the_second_time_asks_the_source_again(shop: VaultBench) -> None:
    """The same statement, its own intent as attempt 2, and the newest value."""
    box = await shop.rig.sandbox()
    await shop.value(box)
    shop.rig.clock.advance(6)
    raw = sealed(shop.worker, statement(shop.rig, box))
    opener = shop.rig.vault.opener
    first = await opener.open_handoff(raw, None)
    assert isinstance(first, VaultOpened)
    shop.source.gives = Document(fields={WHOLE: NEW})
    second = await opener.open_handoff(raw, None, again=True)
    assert isinstance(second, VaultOpened), second
    assert second.material is not None
    assert second.material.parts["value"].reveal() == NEW
    assert not second.renewable
    assert shop.rig.journal.named("broker.intent")[-1].fields["attempt"] == 2
    shop.rig.clock.advance(61)
    late = await opener.open_handoff(raw, None, again=True)
    assert isinstance(late, Refused)
    replayed = await opener.open_handoff(raw, None)
    assert isinstance(replayed, Refused)


async def test_a_source_that_is_gone_refuses_the_second_time(shop: VaultBench) -> None:
    """What the upstream refused is not used once more."""
    box = await shop.rig.sandbox()
    await shop.value(box)
    shop.rig.clock.advance(6)
    raw = sealed(shop.worker, statement(shop.rig, box))
    assert isinstance(await shop.rig.vault.opener.open_handoff(raw, None), VaultOpened)
    shop.source.gives = SourceError("source-missing", "gone")
    answer = await shop.rig.vault.opener.open_handoff(raw, None, again=True)
    assert isinstance(answer, Refused)
    assert answer.reason == "credential-unavailable"


async def test_an_executor_opens_again_only_what_was_renewable(shop: VaultBench) -> None:
    """Once, with the very statement; anything else ends its stream, as every message out of turn does."""
    executor = await shop.rig.process("executor", "executor-0")
    box = await shop.rig.sandbox()
    await shop.value(box)
    shop.rig.clock.advance(6)
    raw = sealed(shop.worker, statement(shop.rig, box))
    executor.say(Open(id=1, sealed=raw))
    found = await executor.seen(lambda message: isinstance(message, Opened) and message.id == 1)
    assert isinstance(found, Opened)
    assert found.renewable
    executor.say(Open(id=2, sealed=raw, again=1))
    await executor.seen(lambda message: isinstance(message, Opened) and message.id == 2)
    executor.say(Open(id=3, sealed=raw, again=1))
    async with asyncio.timeout(60):
        await executor.closed.wait()
    other = await shop.rig.process("executor", "executor-1")
    other.say(Open(id=1, sealed=raw, again=7))
    async with asyncio.timeout(60):
        await other.closed.wait()


async def test_what_may_be_repeated(shop: VaultBench) -> None:
    """Reads whose whole is known (RULINGS 9.7): no write, no body that streams or was judged by its beginning."""
    box = await shop.rig.sandbox()
    answer = await shop.call(box)
    assert isinstance(answer, VaultOpened)
    permit = answer.permit
    get, post = statement(shop.rig, box), statement(shop.rig, box, method="POST", body=BodyPlan.judged(b"{}"))
    assert _repeatable(get, permit)
    assert _repeatable(post, permit)
    for effect in ("write", "mint", "execute", "disclose"):
        assert not _repeatable(get, replace(permit, effect=effect)), effect  # type: ignore[arg-type]
    for plan in (BodyPlan(), BodyPlan.begun(b"{}", None), BodyPlan(kind="chunked"), BodyPlan(kind="length", length=3)):
        assert not _repeatable(replace(post, body=plan), permit), plan
    socket = replace(permit, restrictions=replace(permit.restrictions, websocket=True))
    assert not _repeatable(get, socket)
