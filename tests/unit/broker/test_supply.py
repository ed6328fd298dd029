"""What a credential is made of (broker/vault/supply.py): refusals and recovery, one document for all parts, leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.sources.base import Document, SourceError, unreachable
from broker.vault.opened import Opened, Refused
from broker.vault.records import who
from broker.vault.supply import RETURNS
from rules.secret_references import WHOLE
from tests.support.secretsources import CANARY, program
from tests.support.vaults import CREDENTIALS, FakeProcess, Rig, sealed, statement

OLD, NEW = b"old-value-0123456789", b"new-value-0123456789"


def credentials(helper: Path, more: str = "") -> str:
    """CREDENTIALS with shop-orders from a helper."""
    reference = "secret: store:shop/orders"
    assert CREDENTIALS.count(reference) == 1
    text = CREDENTIALS.replace(reference, f'secret: "{more or "helper:orders"}"')
    return text + f"sources:\n  helper: {{kind: exec, program: {helper}, ttl: 100s, failure_ttl: 5s}}\n"


class Asked:
    """Stands in for a source of the operator's: what it gives, how often it was asked, what came back."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = own
        self.gives: Document | SourceError = Document(fields={WHOLE: OLD})
        self.asked: list[str] = []
        self.before: list[Document | None] = []
        self.revoked: list[str] = []
        self.revoke_error: SourceError | None = None

    async def read(self, document: str, before: Document | None) -> Document:
        self.asked.append(document)
        self.before.append(before)
        if isinstance(self.gives, SourceError):
            raise SourceError(self.gives.code, self.gives.detail, transient=self.gives.transient)
        return self.gives

    async def revoke(self, document: Document) -> None:
        if self.revoke_error is not None:
            raise self.revoke_error
        self.revoked.append(document.lease)

    async def close(self) -> None:
        return None


class Bench:
    """A vault whose source `helper` is an Asked."""

    def __init__(self, rig: Rig, worker: FakeProcess, source: Asked) -> None:
        self.rig, self.worker, self.source = rig, worker, source

    async def call(self, created: object, **changes: object) -> Opened | Refused:
        made = statement(self.rig, created, **changes)  # type: ignore[arg-type]
        return await self.rig.vault.opener.open_handoff(sealed(self.worker, made), None)

    async def value(self, created: object) -> bytes:
        answer = await self.call(created)
        assert isinstance(answer, Opened), answer
        assert answer.material is not None
        return answer.material.parts["value"].reveal()

    async def refused(self, created: object) -> str:
        answer = await self.call(created)
        assert isinstance(answer, Refused), answer
        return str(self.rig.journal.named("broker.refused")[-1].fields["error"])


async def bench(tmp_path: Path, *, own: bool = False) -> Bench:
    helper = program(tmp_path, "helper", "exit 1")
    rig = await Rig(tmp_path, credentials=credentials(helper)).start()
    source = Asked(own=own)
    opened = rig.vault.supply._sources._opened["helper"]
    object.__setattr__(opened, "source", source)
    return Bench(rig, await rig.process("worker", "worker-1"), source)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Bench]:
    made = await bench(tmp_path)
    yield made
    await made.rig.stop()


@pytest.fixture
async def leased(tmp_path: Path) -> AsyncIterator[Bench]:
    made = await bench(tmp_path, own=True)
    yield made
    await made.rig.stop()


async def test_a_source_that_is_gone_refuses_and_comes_back_without_a_restart(shop: Bench) -> None:
    """T17: refused with a code while it is gone, on record once; served as soon as it gives again."""
    box = await shop.rig.sandbox()
    shop.source.gives = unreachable("helper does not answer")
    for _ in range(2):
        assert await shop.refused(box) == "source-unreachable"
    assert len(shop.source.asked) == 1
    shop.rig.clock.advance(5)
    assert await shop.refused(box) == "source-unreachable"
    assert len(shop.source.asked) == 2
    (said,) = shop.rig.journal.named("secret.unavailable")
    assert said.fields["reason"] == "source-unreachable"
    shop.source.gives = Document(fields={WHOLE: NEW})
    shop.rig.clock.advance(60)  # the rule permits three requests a minute
    assert await shop.value(box) == NEW
    assert "broker.intent" in shop.rig.journal.names()


async def test_versions_and_fingerprints_are_on_record_and_values_are_not(shop: Bench) -> None:
    """What came and what was used are told apart by a keyed digest, equal for equal values."""
    box = await shop.rig.sandbox()
    shop.source.gives = Document(fields={WHOLE: OLD}, version="7")
    await shop.value(box)
    shop.rig.clock.advance(100)
    shop.source.gives = Document(fields={WHOLE: NEW})
    await shop.value(box)
    first, second = shop.rig.journal.named("secret.fetched")
    assert first.fields["credential_version"] == "7"
    assert first.fields["fingerprint"] != second.fields["fingerprint"]
    intents = shop.rig.journal.named("broker.intent")
    assert intents[0].fields["credential_version"] == "7"
    assert len({event.fields["fingerprint"] for event in intents}) == 2
    shown = str([event.fields for event, _ in shop.rig.journal.events])
    assert OLD.decode() not in shown
    assert NEW.decode() not in shown


async def test_an_unwritable_log_gives_nothing(shop: Bench) -> None:
    """What a source gave and nobody could write down is not taken up."""
    box = await shop.rig.sandbox()
    shop.rig.journal.failing = True
    answer = await shop.call(box)
    assert isinstance(answer, Refused)
    assert answer.reason == "audit-unavailable"
    shop.rig.journal.failing = False
    assert await shop.refused(box) == "source-refused"


async def test_a_reload_that_moves_a_source_drops_what_came_from_it(shop: Bench) -> None:
    """A changed entry under `sources:` counts at once; calls of the credential are cut as for a rotated secret."""
    box = await shop.rig.sandbox()
    assert await shop.value(box) == OLD
    text = shop.rig.credentials_path.read_text()
    helper = program(shop.rig.directory, "other", f"printf %s {CANARY.decode()}")
    shop.rig.credentials_path.write_text(text.replace(f"{shop.rig.directory}/helper", str(helper)))
    _, changed, _ = await shop.rig.vault.desk.reload("test")
    assert changed
    assert await shop.value(box) == CANARY


async def test_a_lease_is_one_sandboxs_own_and_goes_back_with_it(leased: Bench) -> None:
    """Two sandboxes get two leases; ending one returns its own, on record, and nothing more is obtained for it."""
    one, two = await leased.rig.sandbox(), await leased.rig.sandbox()
    for box, lease in ((one, "lease-1"), (two, "lease-2")):
        leased.source.gives = Document(fields={WHOLE: OLD}, lasts=600.0, lease=lease)
        await leased.value(box)
        await leased.value(box)
    assert len(leased.source.asked) == 2
    await leased.rig.vault.desk.end(one.record.sandbox.id, "test")
    await settled(leased)
    assert leased.source.revoked == ["lease-1"]
    (said,) = leased.rig.journal.named("lease.returned")
    assert said.fields["outcome"] == "done"
    assert said.fields["sandbox"] == one.record.sandbox.id
    active = leased.rig.vault.desk.active()
    assert active is not None
    with pytest.raises(SourceError, match="source-refused"):
        await leased.rig.vault.supply.parts(active, "shop-orders", one.record.sandbox)
    assert len(leased.source.asked) == 2


async def settled(bench: Bench) -> None:
    async with asyncio.timeout(10):
        while bench.rig.vault.supply._returning:
            await asyncio.wait(set(bench.rig.vault.supply._returning))


async def test_a_lease_is_renewed_while_it_is_used(leased: Bench) -> None:
    """The source is offered the one before; what it renewed is not given back."""
    box = await leased.rig.sandbox()
    leased.source.gives = Document(fields={WHOLE: OLD}, lasts=600.0, lease="lease-1")
    await leased.value(box)
    leased.rig.clock.since_boot += 590
    await leased.value(box)
    async with asyncio.timeout(10):
        while len(leased.source.asked) < 2:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    before = leased.source.before[1]
    assert before is not None
    assert before.lease == "lease-1"
    assert leased.source.revoked == []
    actions = [event.fields.get("action") for event in leased.rig.journal.named("secret.fetched")]
    assert actions == [None, "lease.renewed"]


async def test_a_lease_that_cannot_be_given_back_is_on_record(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last try the lease's own end must do, and the log says so."""
    monkeypatch.setattr("broker.vault.supply.RETURNS", (0.0,) * len(RETURNS))
    box = await leased.rig.sandbox()
    leased.source.gives = Document(fields={WHOLE: OLD}, lasts=600.0, lease="lease-1")
    await leased.value(box)
    leased.source.revoke_error = unreachable("gone")
    await leased.rig.vault.desk.end(box.record.sandbox.id, "test")
    await settled(leased)
    (said,) = leased.rig.journal.named("lease.returned")
    assert (said.fields["outcome"], said.fields["reason"]) == ("failed", "source-unreachable")


async def test_stopping_gives_every_lease_back(tmp_path: Path) -> None:
    """They are in memory alone: what is not returned at the stop would live on unknown."""
    made = await bench(tmp_path, own=True)
    box = await made.rig.sandbox()
    made.source.gives = Document(fields={WHOLE: OLD}, lasts=600.0, lease="lease-1")
    await made.value(box)
    await made.rig.stop()
    assert made.source.revoked == ["lease-1"]


# --- for an administrator


async def test_check_asks_now_and_changes_nothing(shop: Bench) -> None:
    """Past the cache: a source that is gone shows, while uses go on with the copy that they have."""
    box = await shop.rig.sandbox()
    assert await shop.value(box) == OLD
    shop.rig.clock.advance(30)
    active = shop.rig.vault.desk.active()
    assert active is not None
    rows = {row.credential: row for row in await shop.rig.vault.supply.check(active, None, None)}
    assert rows["shop-orders"].error == ""
    assert rows["shop-orders"].age == 30
    assert rows["shop-stock"].error == ""
    assert rows["shop-stock"].age is None
    assert rows["shop-orders"].fingerprint != rows["shop-stock"].fingerprint
    shop.source.gives = SourceError("source-missing", "helper:orders")
    (row,) = await shop.rig.vault.supply.check(active, "shop-orders", None)
    assert (row.error, row.source, row.fingerprint) == ("source-missing", "helper", "")
    assert await shop.value(box) == OLD
    with pytest.raises(SourceError, match="no-such-credential"):
        await shop.rig.vault.supply.check(active, "none", None)


async def test_check_returns_the_leases_that_it_made(leased: Bench) -> None:
    """For a sandbox it is asked for and given back; without one nothing is asked."""
    leased.source.gives = Document(fields={WHOLE: OLD}, lasts=600.0, lease="lease-1")
    active = leased.rig.vault.desk.active()
    assert active is not None
    (row,) = await leased.rig.vault.supply.check(active, "shop-orders", None)
    assert row.needs_sandbox
    assert leased.source.asked == []
    box = await leased.rig.sandbox()
    (row,) = await leased.rig.vault.supply.check(active, "shop-orders", box.record.sandbox)
    assert row.error == ""
    await settled(leased)
    assert leased.source.revoked == ["lease-1"]


async def test_sync_takes_up_what_is_new(shop: Bench) -> None:
    """The next use has the newest value, before its time."""
    box = await shop.rig.sandbox()
    assert await shop.value(box) == OLD
    shop.source.gives = Document(fields={WHOLE: NEW})
    active = shop.rig.vault.desk.active()
    assert active is not None
    (row,) = await shop.rig.vault.supply.sync(active, "shop-orders", None)
    assert row.age == 0
    assert len(shop.source.asked) == 2
    assert await shop.value(box) == NEW
    assert len(shop.source.asked) == 2


async def test_who_ended_is_who_leased(leased: Bench) -> None:
    """The record of a lease names its sandbox as every other record does."""
    box = await leased.rig.sandbox()
    leased.source.gives = Document(fields={WHOLE: OLD}, lasts=600.0, lease="lease-1")
    await leased.value(box)
    (said,) = leased.rig.journal.named("secret.fetched")
    named = who(box.record.sandbox)
    assert (said.fields["tenant"], said.fields["sandbox"]) == (named["tenant"], named["sandbox"])


async def test_a_replaced_key_of_a_source_drops_what_it_opened(tmp_path: Path) -> None:
    """A login takes its leases with it, so copies that came by it are not used any more."""
    helper = program(tmp_path, "op", 'printf "%s" "value-of-$OP_SERVICE_ACCOUNT_TOKEN"')
    text = CREDENTIALS.replace("secret: store:shop/orders", "secret: op://a/b/c")
    text += f"sources:\n  op: {{kind: onepassword, program: {helper}, auth: {{token: 'store:op'}}}}\n"
    rig = await Rig(tmp_path, credentials=text).start()
    try:
        made = Bench(rig, await rig.process("worker", "worker-1"), Asked())
        box = await rig.sandbox()
        assert await made.refused(box) == "source-missing"
        await rig.vault.desk.add_secret("op", b"first-token-0123", owner="o", scrub=True, actor="test")
        rig.clock.advance(60)
        assert await made.value(box) == b"value-of-first-token-0123"
        await rig.vault.desk.rotate_secret("op", b"second-token-0123", scrub=None, actor="test")
        assert await made.value(box) == b"value-of-second-token-0123"
    finally:
        await rig.stop()


async def test_a_fault_with_a_value_in_a_local_shows_nothing(
    shop: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """RULINGS 1.6: whatever is raised inside a source, with the value at hand, is a fixed code and a bare complaint."""

    async def read(document: str, before: Document | None) -> Document:
        value = CANARY
        raise ValueError(f"{document}: {value!r}")

    monkeypatch.setattr(shop.source, "read", read)
    assert await shop.refused(await shop.rig.sandbox()) == "source-unreadable"
    shown = capfd.readouterr().err + str([event.fields for event, _ in shop.rig.journal.events])
    assert "ValueError" in shown
    assert "canary" not in shown


async def test_a_lease_is_not_made_to_be_scrubbed(leased: Bench) -> None:
    """A call with another credential to the same host makes none; one that is in use is in its scrub set."""
    box = await leased.rig.sandbox()
    stock: dict[str, object] = {
        "rule": "agent/stock.read",
        "operation": "agent/stock.read",
        "credential": "shop-stock",
        "target": "/v1/stock/7",
        "headers": (("Host", "orders.shop.example"),),
    }
    answer = await leased.call(box, **stock)
    assert isinstance(answer, Opened), answer
    assert answer.scrub == ()
    assert leased.source.asked == []
    leased.source.gives = Document(fields={WHOLE: OLD}, lasts=600.0, lease="lease-1")
    await leased.value(box)
    again = await leased.call(box, **stock)
    assert isinstance(again, Opened), again
    assert [secret.reveal() for secret in again.scrub] == [OLD]
