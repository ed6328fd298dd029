"""What the broker makes of a worker's self-check: refused like anything else, told apart on record only."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.vault.opened import Refused
from proxy.selfcheck import Failed, check_broker
from tests.support.benches import Bench
from tests.support.vaults import Rig, sealed, statement
from wire import handoff
from wire.control import LeafRefused, LeafRequest, Opened, OpenRefused
from wire.handoff import SELF_CHECK, SELF_CHECK_SEAL, SELF_CHECK_TENANT, Evidence


async def test_a_vault_that_opens_for_nobody_fails_the_check(bench: Bench) -> None:
    """Were the vault to open for the self-check's sandbox, the executor says so in no refusal, and sends nothing."""
    with pytest.raises(Failed, match="a hand-off of nobody"):
        await check_broker(bench.link, "digest")
    assert bench.origin.dialled == []
    assert [done.sent for done in bench.vault.dones] == [False]


async def test_an_executor_that_checks_no_seals_fails_the_check(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seal ignored the forged statement is taken for a good one, and the check names it."""
    monkeypatch.setattr("broker.executor.open_sealed", lambda raw, key: handoff._decode(raw[handoff.MAC_BYTES :]))
    bench.vault.answer = lambda number: (
        OpenRefused(id=number, reason="bad-token")
        if number == 1
        else Opened(id=number, rule="r", operation="o", policy_digest="d")
    )
    with pytest.raises(Failed, match="forged"):
        await check_broker(bench.link, "digest")


async def test_both_hand_offs_are_refused_and_known_on_record(bench: Bench) -> None:
    """The vault's own refusal is its own record; the forged one is the executor's, under the self-check's name."""
    bench.vault.answer = lambda number: OpenRefused(id=number, reason="bad-token")
    assert await check_broker(bench.link, "digest") == 2
    (event,) = [event for event, _ in bench.journal.events]
    assert (event.name, event.fields["sandbox"], event.fields["error"]) == (
        "selfcheck.refused",
        SELF_CHECK,
        "statement-forged",
    )


@pytest.fixture
async def rig(tmp_path: Path):
    made = await Rig(tmp_path).start()
    yield made
    await made.stop()


async def test_the_vault_refuses_the_self_check_whatever_it_presents(rig: Rig) -> None:
    """Nobody has that id. Under its name no evidence of a real sandbox can be tried unseen: it is on record as such."""
    worker = await rig.process("worker", "worker-1")
    other = await rig.sandbox()
    for evidence, event in (
        (Evidence(), "selfcheck.refused"),
        (Evidence(channel_key=b"k" * 32), "selfcheck.refused"),
        (Evidence(token=other.token), "broker.refused"),
    ):
        made = statement(rig, other, tenant=SELF_CHECK_TENANT, sandbox=SELF_CHECK, evidence=evidence)
        assert isinstance(await rig.vault.opener.open_handoff(sealed(worker, made), None), Refused)
        assert rig.journal.names()[-1] == event
    assert rig.journal.events[-1][0].fields["other_sandbox"] == other.record.sandbox.id
    assert isinstance(await rig.vault.opener.open_handoff(SELF_CHECK_SEAL + b"x", None), Refused)


async def test_a_leaf_for_the_self_check_is_for_its_own_name_alone(rig: Rig) -> None:
    """No sandbox's name can be had that way."""
    worker = b"spki"
    for host in ("orders.shop.example", "invalid.example", "invalid"):
        request = LeafRequest(id=1, host=host, tenant=SELF_CHECK_TENANT, sandbox=SELF_CHECK)
        assert isinstance(await rig.vault._leaves.mint(request, worker, "worker-1"), LeafRefused), host
    refusal = LeafRequest(id=1, host="x.invalid", tenant=SELF_CHECK_TENANT, sandbox=SELF_CHECK, refusal=True)
    assert isinstance(await rig.vault._leaves.mint(refusal, worker, "worker-1"), LeafRefused)
