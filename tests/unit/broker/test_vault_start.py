"""Starting: what is wrong refuses with a code; what a restart must remember is remembered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket

import pytest

from audit.journal import AuditUnavailable
from broker.errors import BrokerError
from broker.vault.boot import Boot, BootRefused, check_boot
from broker.vault.opened import Opened
from broker.vault.policies import PolicyRejected
from net.process import BootError, read_boot
from tests.support.vaults import SECRET, Rig, sealed, statement
from wire.control import Cut, Done, Echo, Hello, LeafRefused, LeafRequest, Open, OpenRefused, encode
from wire.control import Opened as OpenedMessage
from wire.frames import encode_frame


def boot_of(document: dict) -> Boot:
    read, write = os.pipe()
    os.write(write, json.dumps(document).encode())
    os.close(write)
    boot = read_boot(read, Boot)
    check_boot(boot)
    return boot


SOUND = {
    "state_dir": "/s",
    "policy_path": "/p",
    "key_file": "/k",
    "digest_key": "00" * 32,
    "auditor_fd": 5,
    "admin_path": "/a",
    "channels": [{"name": "worker-1", "kind": "worker", "fd": 7}],
}


@pytest.mark.parametrize(
    ("sentence", "change"),
    [
        ("an unknown field", {"danger": True}),
        ("a relative path", {"policy_path": "policy.yaml"}),
        ("no key", {"key_file": None}),
        ("two keys", {"passphrase": "correct horse battery"}),
        ("no way to the auditor", {"auditor_fd": None}),
        ("two admin sockets", {"admin_fd": 6}),
        ("a short digest key", {"digest_key": "00"}),
        ("a channel of another kind", {"channels": [{"name": "x", "kind": "console", "fd": 7}]}),
    ],
)
def test_a_boot_document_that_is_not_sound(sentence, change) -> None:
    """Unknown fields, wrong forms and contradictions refuse the start."""
    with pytest.raises((BootError, BootRefused)):
        boot_of({**SOUND, **change})


def test_a_sound_boot_document() -> None:
    """The same document without the fault is taken."""
    assert boot_of(SOUND).channels[0].name == "worker-1"


@pytest.mark.parametrize(
    ("sentence", "text", "code"),
    [("an empty policy", "", "policy-empty"), ("no policy", None, "policy-missing")],
)
async def test_a_start_without_policy_refuses(tmp_path, sentence, text, code) -> None:
    """There is no last good policy at the first start: refuse, naming `exeat init`."""
    rig = Rig(tmp_path)
    if text is None:
        rig.policy_path.unlink()
    else:
        rig.policy_path.write_text(text)
    with pytest.raises(PolicyRejected) as caught:
        await rig.start()
    assert caught.value.code == code, sentence
    assert "exeat init" in caught.value.remedy
    await rig.stop()


def change_key(rig):
    rig.key_path.write_text("22" * 32)


def loosen_key(rig):
    rig.key_path.chmod(0o644)


def loosen_store(rig):
    (rig.state / "store.json").chmod(0o644)


def loosen_state(rig):
    (rig.state / "state.sqlite").chmod(0o644)


def loosen_directory(rig):
    rig.state.chmod(0o755)


def remove_key(rig):
    rig.key_path.unlink()


def roll_back(rig):
    (rig.state / "store.json").write_bytes((rig.directory / "old").read_bytes())


def remove_store(rig):
    (rig.state / "store.json").unlink()


def tear_store(rig):
    path = rig.state / "store.json"
    path.write_bytes(path.read_bytes()[:-200])


def ruin_state(rig):
    for name in ("state.sqlite-wal", "state.sqlite-shm"):
        (rig.state / name).unlink(missing_ok=True)
    (rig.state / "state.sqlite").write_bytes(b"no database" * 1000)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (change_key, "store-wrong-key"),
        (remove_key, "key-missing"),
        (loosen_key, "key-modes"),
        (loosen_store, "store-modes"),
        (loosen_state, "state-modes"),
        (loosen_directory, "dir-modes"),
        (roll_back, "store-rolled-back"),
        (remove_store, "store-rolled-back"),
        (tear_store, "store-corrupt"),
        (ruin_state, "state-unavailable"),
    ],
)
async def test_a_restart_on_damage_refuses(tmp_path, damage, code) -> None:
    """Wrong key, loose modes, rolled back, torn or vanished files: the vault stays down and says which."""
    rig = await Rig(tmp_path).start(secrets=False)
    (rig.directory / "old").write_bytes((rig.state / "store.json").read_bytes())
    await rig.vault.desk.add_secret("shop/orders", SECRET, owner="o", scrub=True, actor="test")
    await rig.stop()
    damage(rig)
    with pytest.raises(BrokerError) as caught:
        await Rig(tmp_path, write=False).start()
    assert caught.value.code == code
    assert "canary" not in str(caught.value)


async def test_without_a_log_the_vault_does_not_start(tmp_path) -> None:
    """Its start must be on record durably."""
    rig = Rig(tmp_path)
    rig.journal.failing = True
    with pytest.raises(AuditUnavailable):
        await rig.start()
    await rig.stop()


async def test_a_restart_remembers(tmp_path) -> None:
    """Live sandboxes stay live, ended ones stay ended, disarmed credentials stay shut, the authority is the same."""
    rig = await Rig(tmp_path).start()
    live, ended, shut = await rig.sandbox(), await rig.sandbox(), await rig.sandbox()
    await rig.vault.desk.end(ended.record.sandbox.id, "test")
    rig.vault.state.disarm("default", shut.record.sandbox.id, "shop-orders", 1.0)
    root = rig.vault.authority.fingerprint
    await rig.stop()
    again = await Rig(tmp_path).start()
    worker = await again.process("worker", "worker-1")
    reasons = []
    for created in (live, ended, shut):
        answer = await again.vault.opener.open_handoff(sealed(worker, statement(again, created)), None)
        reasons.append("opened" if isinstance(answer, Opened) else answer.reason)
    assert reasons == ["opened", "sandbox-ended", "secret-echoed"]
    assert again.vault.authority.fingerprint == root
    await again.stop()


# --- control streams --------------------------------------------------------------------------------------------------


@pytest.fixture
async def rig(tmp_path):
    made = await Rig(tmp_path).start()
    yield made
    await made.stop()


@pytest.mark.parametrize(
    ("sentence", "raw"),
    [
        ("a frame of an unknown type", encode_frame(99, b"")),
        ("a message from the vault's side", encode(OpenRefused(id=1, reason="x"))),
        ("a second hello", encode(Hello(kind="worker", name="worker-1"))),
        ("an open from a worker", encode(Open(id=1, sealed=b"x" * 100))),
        ("a done from a worker", encode(Done(id=1, sent=True))),
        ("an echo from a worker", encode(Echo(id=1, credential="shop-orders", hits=3))),
        ("a length over the bound", b"\xff\xff\xff\xff\x01"),
        ("bytes after the last field", encode_frame(66, b"\x00" * 9)),
    ],
)
async def test_a_worker_that_breaks_the_protocol_is_cut_off(rig, sentence, raw) -> None:
    """The vault reads fixed layouts only; anything else closes the stream."""
    worker = await rig.process("worker", "worker-1")
    worker.raw(raw)
    await asyncio.wait_for(worker.closed.wait(), 60)
    assert rig.vault.fleet.members() == (), sentence


async def test_a_hello_of_another_kind_is_cut_off(rig) -> None:
    """A worker's stream cannot become an executor's by saying so."""
    ours, theirs = socket.socketpair()
    await rig.vault.adopt(theirs, "worker-1", "worker")
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ours, encode(Hello(kind="executor", name="executor-1")))
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            assert await loop.sock_recv(ours, 1) == b""
    ours.close()
    assert rig.vault.fleet.members() == ()


async def test_a_name_is_the_supervisors_to_give(rig) -> None:
    """A worker that claims another's name still gets its own name and its own key."""
    first = await rig.process("worker", "worker-1")
    ours, theirs = socket.socketpair()
    await rig.vault.adopt(theirs, "worker-2", "worker")
    from tests.support.vaults import FakeProcess
    from wire.control import Welcome

    liar = FakeProcess("worker", "worker-2", answers=True)
    ours.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: liar, ours)
    liar.say(Hello(kind="worker", name="worker-1"))
    welcome = await liar.seen(lambda message: isinstance(message, Welcome))
    assert welcome.name == "worker-2"
    assert liar.key != first.key
    assert len(rig.vault.fleet.members("worker")) == 2


async def open_over(rig, executor, worker, created, number: int = 1):
    executor.say(Open(id=number, sealed=sealed(worker, statement(rig, created))))
    return await executor.seen(
        lambda message: isinstance(message, OpenedMessage | OpenRefused) and message.id == number
    )


async def test_an_executor_gets_the_material_of_exactly_its_call(rig) -> None:
    """Over the wire: rule, digest, version and value of one call; nothing in the representation."""
    worker, executor = await rig.process("worker", "worker-1"), await rig.process("executor", "executor-1")
    answer = await open_over(rig, executor, worker, await rig.sandbox())
    assert isinstance(answer, OpenedMessage)
    assert (answer.parts, answer.credential, answer.version) == ((("value", SECRET),), "shop-orders", "1")
    assert "canary" not in repr(answer)
    sent = [message for message in worker.messages if b"canary" in encode(message)]
    assert sent == []


async def test_three_echoes_shut_the_credential_for_that_sandbox(rig) -> None:
    """Reported by the executor, before or after the end of its call; the fourth hand-off is refused."""
    worker, executor = await rig.process("worker", "worker-1"), await rig.process("executor", "executor-1")
    created, other = await rig.sandbox(), await rig.sandbox()
    for number in (1, 2, 3):
        await open_over(rig, executor, worker, created, number)
        executor.say(Done(id=number, sent=True))
        executor.say(Echo(id=number, credential="shop-orders", hits=1))
        rig.clock.advance(30)
    executor.say(Echo(id=99, credential="shop-orders", hits=1))
    async with asyncio.timeout(60):
        while not rig.journal.named("credential.disarmed"):
            await asyncio.sleep(0)
    assert isinstance(answer := await open_over(rig, executor, worker, created, 4), OpenRefused)
    assert answer.reason == "secret-echoed"
    assert isinstance(await open_over(rig, executor, worker, other, 5), OpenedMessage)
    assert [event.fields["redacted"] for event in rig.journal.named("secret.echoed")] == [1, 1, 1]
    assert rig.vault.state.disarmed() == {("default", created.record.sandbox.id, "shop-orders")}


async def test_a_lost_executor_leaves_outcomes(rig) -> None:
    """An intent whose executor died gets an outcome that says so."""
    worker, executor = await rig.process("worker", "worker-1"), await rig.process("executor", "executor-1")
    await open_over(rig, executor, worker, await rig.sandbox())
    executor.close()
    async with asyncio.timeout(60):
        while not rig.journal.named("broker.outcome"):
            await asyncio.sleep(0)
    assert rig.journal.named("broker.outcome")[0].fields["error"] == "executor-lost"


async def test_leaves_are_for_live_sandboxes_within_budgets(rig) -> None:
    """No sandbox, no leaf; refusal leaves end at twenty a minute."""
    worker = await rig.process("worker", "worker-1")
    created = await rig.sandbox()
    box = created.record.sandbox
    worker.say(LeafRequest(id=1, host="a.example", tenant="default", sandbox="sb_none"))
    assert (await worker.seen(lambda m: isinstance(m, LeafRefused) and m.id == 1)).reason == "sandbox-ended"
    worker.say(LeafRequest(id=2, host="bad host", tenant=box.tenant, sandbox=box.id))
    assert (await worker.seen(lambda m: isinstance(m, LeafRefused) and m.id == 2)).reason == "bad-target"
    for number in range(10, 32):
        worker.say(LeafRequest(id=number, host="bad host", tenant=box.tenant, sandbox=box.id, refusal=True))
    last = await worker.seen(lambda m: isinstance(m, LeafRefused) and m.id == 31)
    assert last.reason == "limit-reached"


async def test_a_deaf_process_is_given_up_after_a_cut(rig) -> None:
    """A cut that is not reported done within the bound names and drops the process."""
    worker = await rig.process("worker", "worker-1", answers=False)
    from wire.control import Ack, Snapshot

    async def acknowledge() -> None:
        for _ in range(2):
            message = await worker.seen(
                lambda m: isinstance(m, Snapshot) and m.generation > acknowledge.last  # type: ignore[attr-defined]
            )
            acknowledge.last = message.generation  # type: ignore[attr-defined]
            worker.say(Ack(generation=message.generation))

    acknowledge.last = rig.vault.desk.generation  # type: ignore[attr-defined]
    task = asyncio.create_task(acknowledge())
    created = await rig.sandbox()
    ended = await rig.vault.desk.end(created.record.sandbox.id, "test")
    await task
    assert worker.named(Cut)
    assert ended.unacknowledged == ("worker-1",)
