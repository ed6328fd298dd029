"""The vault's part of redirects: what it grants, to whom it tells it, and how often it is used (decision 14)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.vault.opened import Opened, Refused
from broker.vault.sandboxes import Created
from rules.grants import LIFE_SECONDS, USES, address_digest
from tests.support.vaults import CREDENTIALS, FakeProcess, Rig, sealed, statement
from wire.control import Done, GrantAsk, Granted, Grants, Open, OpenRefused
from wire.control import Opened as OpenedMessage

SERVICE = """\
version: 1
service: files
title: Files
hosts:
  api: {host: orders.shop.example}
operations:
  file.read:
    effect: read
    why: A file, which lies elsewhere.
    redirects: {to: [cdn.test], path: /bucket/**, query_keys: [X-Amz-Signature]}
    requests: [{at: api, methods: [GET], paths: ["/file/{name}"]}]
tests:
  - {allow: "GET https://orders.shop.example/file/a", operation: file.read, why: a file}
  - {deny: "POST https://orders.shop.example/file/a", why: a write}
"""
POLICY = """\
version: 1
roles:
  agent:
    boundary: {external: tests, reason: the tests confine nothing}
    allow:
      - {service: files, operations: [read], credential: shop-orders}
      - {name: docs, host: docs.shop.example, methods: [GET], paths: ["/**"]}
"""
PLACE = "https://cdn.test/bucket/a?X-Amz-Signature=1"


@dataclass
class Scene:
    rig: Rig
    box: Created
    worker: FakeProcess
    executor: FakeProcess
    calls: int = 0

    async def call(self, **changes: object) -> OpenedMessage:
        """A call in flight on the executor's stream, to the operation that declares a redirect."""
        key = self.box.environment["SHOP_API_KEY"]
        made = statement(
            self.rig,
            self.box,
            **{
                "target": "/file/a",
                "headers": (("Host", "orders.shop.example"), ("X-Api-Key", key)),
                "rule": "agent/files",
                "operation": "files/file.read",
                "arguments": (),
                **changes,
            },
        )
        self.calls += 1
        number = self.calls
        self.executor.say(Open(id=number, sealed=sealed(self.worker, made)))
        answer = await self.executor.seen(
            lambda message: isinstance(message, OpenedMessage | OpenRefused) and message.id == number
        )
        assert isinstance(answer, OpenedMessage), answer
        return answer

    async def ask(self, call: int, *addresses: str, number: int = 900) -> tuple[bool, ...]:
        self.executor.say(GrantAsk(id=number, call=call, addresses=addresses))
        answer = await self.executor.seen(lambda message: isinstance(message, Granted) and message.id == number)
        assert isinstance(answer, Granted)
        return answer.made

    async def use(self, **changes: object) -> Opened | Refused:
        """A hand-off of the granted address as a worker makes it."""
        made = statement(
            self.rig,
            self.box,
            **{
                "host": "cdn.test",
                "target": "/bucket/a?X-Amz-Signature=1",
                "headers": (("Host", "cdn.test"),),
                "rule": "agent/files",
                "operation": "files/file.read",
                "arguments": (),
                "credential": "",
                **changes,
            },
        )
        return await self.rig.vault.opener.open_handoff(sealed(self.worker, made), None)

    def events(self, name: str) -> int:
        return self.rig.journal.names().count(name)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/files.yaml").write_text(SERVICE)
    rig = await Rig(tmp_path, policy=POLICY, credentials=CREDENTIALS).start()
    worker = await rig.process("worker", "worker-1")
    executor = await rig.process("executor", "executor-1")
    yield Scene(rig, await rig.sandbox(), worker, executor)
    await rig.stop()


def reason(answer: Opened | Refused) -> str:
    assert isinstance(answer, Refused), answer
    return answer.reason


async def test_what_a_call_does_not_declare_is_not_granted(scene: Scene) -> None:
    """Each address is checked by the vault's own policy; one among several does not carry the others."""
    opened = await scene.call()
    places = (
        "https://evil.test/bucket/a?X-Amz-Signature=1",
        "https://cdn.test/other/a?X-Amz-Signature=1",
        "http://cdn.test/bucket/a?X-Amz-Signature=1",
        PLACE + "&x=1",
        PLACE,
        "",
    )
    assert await scene.ask(opened.id, *places) == (False, False, False, False, True, False)
    assert scene.events("redirect.granted") == 1


async def test_only_a_call_in_flight_of_that_executor_is_granted_anything(scene: Scene) -> None:
    """Not one that is over, not one that never was, not another executor's."""
    opened = await scene.call()
    assert await scene.ask(77, PLACE, number=901) == (False,)
    other = await scene.rig.process("executor", "executor-2")
    other.say(GrantAsk(id=902, call=opened.id, addresses=(PLACE,)))
    answer = await other.seen(lambda message: isinstance(message, Granted))
    assert answer == Granted(id=902, made=(False,))
    scene.executor.say(Done(id=opened.id, sent=True))
    assert await scene.ask(opened.id, PLACE, number=903) == (False,)
    assert scene.events("redirect.granted") == 0


async def test_a_worker_that_asks_is_cut_off(scene: Scene) -> None:
    """Only executors see answers: a worker that asks breaks the protocol."""
    scene.worker.say(GrantAsk(id=1, call=1, addresses=(PLACE,)))
    await asyncio.wait_for(scene.worker.closed.wait(), 5)


async def test_without_a_record_there_is_no_grant(scene: Scene) -> None:
    """The log fails: the answer is no, nobody is told of anything, and no use is opened."""
    opened = await scene.call()
    scene.rig.journal.failing = True
    assert await scene.ask(opened.id, PLACE) == (False,)
    scene.rig.journal.failing = False
    assert scene.worker.named(Grants) == []
    assert reason(await scene.use()) == "no-rule"


async def test_a_policy_that_changed_since_the_call_grants_nothing(scene: Scene) -> None:
    """The call was opened under another policy: what it declares no longer counts."""
    opened = await scene.call()
    scene.rig.policy_path.write_text(POLICY.replace("name: docs", "name: papers"))
    await scene.rig.vault.desk.reload("test")
    assert await scene.ask(opened.id, PLACE) == (False,)


async def test_a_grant_is_told_to_everybody_before_the_answer(scene: Scene) -> None:
    """Worker and executor hold its hash before the executor hears yes; neither is sent the address."""
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    box = scene.box.record.sandbox
    for process in (scene.worker, scene.executor):
        [told] = process.named(Grants)
        [grant] = told.grants
        digest = address_digest(told.key, (box.tenant, box.id), "cdn.test", "/bucket/a?X-Amz-Signature=1")
        assert (told.sandbox, grant.host, grant.digest) == (box.id, "cdn.test", digest)
    messages = scene.executor.messages
    assert [type(message) for message in messages].index(Grants) < [type(message) for message in messages].index(
        Granted
    )
    late = await scene.rig.process("worker", "worker-2")
    await late.seen(lambda message: isinstance(message, Grants))


async def test_a_process_that_does_not_take_it_up_delays_the_answer_and_no_more(scene: Scene) -> None:
    """It has not got the grant, and so refuses; nobody is killed for it."""
    mute = await scene.rig.process("worker", "worker-3", answers=False)
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    assert not mute.closed.is_set()


async def test_eight_uses_are_counted_whoever_comes_first(scene: Scene) -> None:
    """Twenty hand-offs at once: exactly eight are opened, each with a durable intent that names the grant."""
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    answers = await asyncio.gather(*(scene.use() for _ in range(20)))
    yes = [answer for answer in answers if isinstance(answer, Opened)]
    assert len(yes) == USES
    assert all(answer.material is None and answer.permit.credential is None for answer in yes)
    assert {reason(answer) for answer in answers if isinstance(answer, Refused)} == {"redirect-ended"}
    intents = [event for event, durable in scene.rig.journal.events if event.name == "broker.intent" and durable]
    assert len([event for event in intents if event.fields.get("grant") == yes[0].permit.grant.id]) == USES  # type: ignore[union-attr]


async def test_five_minutes_are_counted_on_the_boot_clock(scene: Scene) -> None:
    """One second before the end it opens, at the end it does not, whatever the wall clock says."""
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    scene.rig.clock.advance(LIFE_SECONDS - 1)
    assert isinstance(await scene.use(), Opened)
    scene.rig.clock.since_boot += 1
    assert reason(await scene.use()) == "redirect-ended"


async def test_another_sandbox_with_its_own_evidence_is_refused(scene: Scene) -> None:
    """A broken worker that knows the address cannot use it for another."""
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    mine, scene.box = scene.box, await scene.rig.sandbox()
    assert reason(await scene.use()) == "no-rule"
    scene.box = mine
    assert isinstance(await scene.use(), Opened)


async def test_what_a_worker_says_of_a_use_is_compared(scene: Scene) -> None:
    """Another rule, a credential: refused although the grant exists."""
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    assert reason(await scene.use(rule="agent/docs")) == "policy-changing"
    assert reason(await scene.use(credential="shop-orders")) == "policy-changing"


async def test_a_disarmed_or_rotated_credential_ends_what_it_opened(scene: Scene) -> None:
    """The echo limit and a rotation both end grants that calls with the credential made."""
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    await scene.rig.vault.desk.rotate_secret("shop/orders", b"another-secret-0123456789", scrub=None, actor="test")
    assert reason(await scene.use()) == "redirect-ended"
    again = await scene.call()
    assert await scene.ask(again.id, PLACE, number=904) == (True,)
    box = scene.box.record.sandbox
    for _ in range(3):
        scene.rig.vault.ledger.note_echo((box.tenant, box.id), "shop-orders", scene.rig.clock.boot())
    assert reason(await scene.use()) == "redirect-ended"


async def test_the_end_of_a_sandbox_ends_its_grants(scene: Scene) -> None:
    """Nothing of it is left in the vault."""
    opened = await scene.call()
    assert await scene.ask(opened.id, PLACE) == (True,)
    box = scene.box.record.sandbox
    await scene.rig.vault.desk.end(box.id, "test")
    assert scene.rig.vault.grants.book.of((box.tenant, box.id)) == ()
    assert reason(await scene.use()) in ("sandbox-ended", "bad-token")
