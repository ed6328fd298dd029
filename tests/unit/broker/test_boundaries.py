"""What is proven, what is broken, what lapses, and what a sandbox claims: the vault's side of the self-check (I28)."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.journal import AuditUnavailable
from broker.errors import BrokerError
from broker.vault.opened import Opened, Refused
from broker.vault.sandboxes import Created
from tests.support.vaults import FakeProcess, Rig, sealed, statement
from wire.control import Claim, Cut, encode
from wire.handoff import Evidence


@pytest.fixture
async def rig(tmp_path: Path):
    made = await Rig(tmp_path, proof_seconds=600.0).start()
    yield made
    await made.stop()


@pytest.fixture
async def worker(rig: Rig) -> FakeProcess:
    return await rig.process("worker", "worker-1")


def asked(rig: Rig, created: Created):
    evidence = Evidence(channel_key=created.channel_key)
    return statement(rig, created, evidence=evidence, rule="launched/orders.read", operation="launched/orders.read")


async def answer(rig: Rig, worker: FakeProcess, created: Created):
    return await rig.vault.opener.open_handoff(sealed(worker, asked(rig, created)), None)


async def proven(rig: Rig) -> Created:
    created = await rig.sandbox(role="launched", channel={"kind": "namespace"})
    await rig.vault.desk.prove_boundary(created.record.sandbox.id, "namespaces", "test")
    return created


# --- broken --------------------------------------------------------------------------------------------------


async def test_what_a_probe_got_out_of_is_disarmed_for_good(rig: Rig, worker: FakeProcess) -> None:
    """The next hand-off is refused, what runs is cut, the log names the ways, and no later proof arms it again."""
    created = await proven(rig)
    box = created.record.sandbox.id
    assert isinstance(await answer(rig, worker, created), Opened)
    await rig.vault.desk.break_boundary(box, ("direct", "quic"), "test")
    refused = await answer(rig, worker, created)
    assert isinstance(refused, Refused)
    assert refused.reason == "boundary-unproven"
    assert [cut.subject for cut in worker.named(Cut) if cut.kind == "sandbox"] == [box]
    (event,) = rig.journal.named("boundary.broken")
    assert (event.fields["ways"], event.fields["boundary"]) == (("direct", "quic"), "namespaces")
    with pytest.raises(BrokerError) as again:
        await rig.vault.desk.prove_boundary(box, "namespaces", "test")
    assert again.value.code == "boundary-broken"


async def test_a_break_is_remembered_over_a_restart(rig: Rig, tmp_path: Path) -> None:
    """The state knows it too: a vault that starts again arms nothing there."""
    created = await proven(rig)
    await rig.vault.desk.break_boundary(created.record.sandbox.id, ("direct",), "test")
    await rig.stop()
    await rig.start(secrets=False)
    assert rig.vault.table.get(created.record.sandbox.id).boundary == "broken"


async def test_a_break_holds_though_it_is_not_on_record(rig: Rig, worker: FakeProcess) -> None:
    """Unlike a proof: a log that takes nothing does not keep credentials armed."""
    created = await proven(rig)
    rig.journal.failing = True
    with pytest.raises(AuditUnavailable):
        await rig.vault.desk.break_boundary(created.record.sandbox.id, ("direct",), "test")
    rig.journal.failing = False
    assert isinstance(await answer(rig, worker, created), Refused)


async def test_a_role_with_a_stated_boundary_is_disarmed_as_well(rig: Rig, worker: FakeProcess) -> None:
    """What we have seen counts more than what the policy says."""
    created = await rig.sandbox()
    await rig.vault.desk.break_boundary(created.record.sandbox.id, ("direct",), "test")
    refused = await rig.vault.opener.open_handoff(sealed(worker, statement(rig, created)), None)
    assert isinstance(refused, Refused)


# --- old -----------------------------------------------------------------------------------------------------


async def test_a_proof_that_is_not_repeated_lapses(rig: Rig, worker: FakeProcess) -> None:
    """Past its time credentials are refused and the log says so; the next proof arms again."""
    created = await proven(rig)
    rig.clock.advance(599)
    await rig.vault.desk.prove_boundary(created.record.sandbox.id, "namespaces", "test")
    rig.clock.advance(599)
    await rig.vault.desk.lapse()
    assert rig.journal.named("boundary.lapsed") == []
    rig.clock.advance(2)
    created_again = rig.vault.table.get(created.record.sandbox.id)
    assert created_again is not None, "it must not have expired meanwhile"
    await rig.vault.desk.lapse()
    assert isinstance(await answer(rig, worker, created), Refused)
    assert len(rig.journal.named("boundary.lapsed")) == 1
    await rig.vault.desk.prove_boundary(created.record.sandbox.id, "namespaces", "test")
    assert rig.vault.table.get(created.record.sandbox.id).boundary == "namespaces"


async def test_a_stated_boundary_does_not_lapse(rig: Rig) -> None:
    """Nobody proves it, so nobody has to repeat it."""
    created = await rig.sandbox()
    rig.clock.advance(590)
    await rig.vault.desk.lapse()
    assert rig.vault.table.get(created.record.sandbox.id).boundary == "external"


async def test_a_captured_interface_is_proven_by_its_own_word(rig: Rig) -> None:
    """`probed` is said of a channel of its own, never of namespaces, and the other way round."""
    captured = await rig.sandbox(role="launched", channel={"kind": "port"})
    with pytest.raises(BrokerError):
        await rig.vault.desk.prove_boundary(captured.record.sandbox.id, "namespaces", "test")
    await rig.vault.desk.prove_boundary(captured.record.sandbox.id, "probed", "test")
    own = await rig.sandbox(role="launched", channel={"kind": "namespace"})
    with pytest.raises(BrokerError):
        await rig.vault.desk.prove_boundary(own.record.sandbox.id, "probed", "test")


# --- claimed -------------------------------------------------------------------------------------------------


def claim(created: Created, **changes: object) -> Claim:
    box = created.record.sandbox
    values: dict[str, object] = {
        "tenant": box.tenant,
        "sandbox": box.id,
        "epoch": box.epoch,
        "token": created.token,
        "channel_key": b"",
        "peer": "",
        "holds": ("direct",),
        "fails": ("client-git", "client-git:GIT_SSL_CAINFO"),
        "unknown": (),
        **changes,
    }
    return Claim(**values)  # type: ignore[arg-type]  # a table of keyword arguments


@pytest.mark.parametrize(
    ("sentence", "changes"),
    [
        ("another's token", {"token": "xt_other"}),
        ("no evidence", {"token": ""}),
        ("a word that is not ours", {"holds": ("direct", "everything")}),
        ("text", {"unknown": ('x"\n',)}),
        ("nothing at all", {"holds": (), "fails": ()}),
    ],
)
async def test_a_claim_of_nobody_or_of_other_words_is_not_kept(rig: Rig, sentence: str, changes: dict) -> None:
    """A worker that is not ours any more writes no text of a sandbox into the log, and speaks for nobody."""
    created = await rig.sandbox()
    await rig.vault.desk.claim(claim(created, **changes))
    assert rig.journal.named("boundary.claimed") == [], sentence
    assert rig.vault.desk.claim_of(*created.record.key) is None


async def test_a_claim_is_on_record_and_arms_nothing(rig: Rig, worker: FakeProcess) -> None:
    """However good it sounds; the next one within ten seconds is not kept; it ends with the sandbox."""
    created = await rig.sandbox(role="launched", channel={"kind": "namespace"})
    said = claim(created, token="", channel_key=created.channel_key, fails=())
    worker.say(said)
    await rig.vault.desk.claim(said)
    (event,) = rig.journal.named("boundary.claimed")
    assert (event.fields["claimed"], event.fields["holds"]) == (True, ("direct",))
    assert isinstance(await answer(rig, worker, created), Refused)
    rig.clock.advance(11)
    await rig.vault.desk.claim(said)
    assert len(rig.journal.named("boundary.claimed")) == 2
    await rig.vault.desk.end(created.record.sandbox.id, "test")
    assert rig.vault.desk.claim_of(*created.record.key) is None


def test_a_claim_shows_no_evidence_of_itself() -> None:
    """Its text form, as a traceback would show it, has neither token nor key."""
    said = Claim(
        tenant="t", sandbox="s", epoch=1, token="xt_canary", channel_key=b"k", peer="", holds=(), fails=(), unknown=()
    )
    assert "xt_canary" not in repr(said)
    assert b"xt_canary" in encode(said)
