"""A broken worker, and all that it gets (RULINGS 2.2, I26): the operations of sandboxes that showed it their evidence.

The test plays the worker with everything that a worker holds: its control stream, its seal key, the snapshot, its
channel to the auditor. The vault and the auditor are real. The last part looks at a real worker process from outside.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from audit.events import EVENTS, SPECS, Event
from audit.journal import AuditUnavailable
from audit.verify import main as verify
from broker.vault.opened import Opened, Refused
from tests.support.auditors import RunningAuditor
from tests.support.gateway import TestGateway
from tests.support.leaks import command_line, descendants, leaks, windows
from tests.support.vaults import OTHER_SECRET, SECRET, FakeProcess, Rig, sealed, statement
from wire.control import Done, Echo, Hello, LeafRequest, Open, Snapshot, encode
from wire.handoff import BodyPlan, Evidence


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = await Rig(tmp_path).start()
    yield made
    await made.stop()


@pytest.fixture
async def worker(rig: Rig) -> FakeProcess:
    return await rig.process("worker", "worker-1")


# --- no secret ----------------------------------------------------------------------------------------------------


async def test_nothing_that_a_worker_is_ever_told_holds_a_secret_or_evidence(rig: Rig, worker: FakeProcess) -> None:
    """Every frame of the vault, through creations, a call, a rotation and an end: hashes only, and its own seal key."""
    first = await rig.sandbox()
    second = await rig.sandbox(role="agent")
    assert isinstance(await _ask(rig, worker, first), Opened)
    await rig.vault.desk.rotate_secret("shop/orders", b"rotated-secret-0123456789", scrub=None, actor="test")
    await rig.vault.desk.end(second.record.sandbox.id, "test")
    told = b"".join(encode(message) for message in worker.messages)
    assert len(worker.named(Snapshot)) >= 3
    secrets = {
        "secret": windows(SECRET.decode()),
        "other secret": windows(OTHER_SECRET.decode()),
        "rotated": windows("rotated-secret-0123456789"),
        "token": windows(first.token, public="xt_"),
        "other token": windows(second.token, public="xt_"),
        "digest key": frozenset({b"d" * 16}),
        "store key": frozenset({b"1" * 16, b"\x11" * 16}),
    }
    secrets |= {name: windows(value, public="sk_live_") for name, value in first.environment.items()}
    assert leaks(told, secrets) == []
    assert b"store:" not in told  # nor where secrets are kept


@pytest.mark.parametrize("message", [Done(id=1, sent=True), Echo(id=1, credential="shop-orders", hits=3)])
async def test_an_executors_words_from_a_worker_close_its_channel(
    rig: Rig, worker: FakeProcess, message: Done | Echo
) -> None:
    """Reporting calls and echoes is the executors': a worker that tries is cut off, and its seal counts no more."""
    created = await rig.sandbox()
    worker.say(message)
    await worker.closed.wait()
    assert isinstance(await _ask(rig, worker, created), Refused)


async def test_a_worker_cannot_have_a_credential_opened_for_itself(rig: Rig, worker: FakeProcess) -> None:
    """Open, with a perfectly good statement, from a worker's channel: nothing is answered, the stream is closed."""
    created = await rig.sandbox()
    before = len(worker.messages)
    worker.say(Open(id=1, sealed=sealed(worker, statement(rig, created))))
    await worker.closed.wait()
    said = b"".join(encode(message) for message in worker.messages[before:])
    assert SECRET not in said
    assert "broker.intent" not in rig.journal.names()


async def test_a_worker_cannot_become_an_executor(rig: Rig, worker: FakeProcess) -> None:
    """A second hello, with another kind and name, ends the stream."""
    worker.say(Hello(kind="executor", name="executor-1", spki=b""))
    await worker.closed.wait()
    assert worker.key  # what it had, and nothing since
    assert not rig.vault.fleet.members("executor")


async def test_a_leaf_for_a_worker_signs_nothing_further(rig: Rig, worker: FakeProcess) -> None:
    """Certificates that a worker can ask for are leaves of its own key: none of them is an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from wire.control import Leaf

    created = await rig.sandbox()
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    other = await _joined(rig, "worker-2", spki)
    box = created.record.sandbox
    other.say(LeafRequest(id=7, host="orders.shop.example", tenant=box.tenant, sandbox=box.id))
    leaf = await other.seen(lambda message: isinstance(message, Leaf))
    assert isinstance(leaf, Leaf)
    [first, *_rest] = x509.load_pem_x509_certificates(leaf.chain_pem)
    constraints = first.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert constraints.ca is False
    assert first.public_key() == key
    assert b"PRIVATE" not in leaf.chain_pem


async def _joined(rig: Rig, name: str, spki: bytes) -> FakeProcess:
    """A worker with a leaf key of its own."""
    import asyncio
    import socket

    from wire.control import Welcome

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    await rig.vault.adopt(theirs, name, "worker")
    made = FakeProcess("worker", name, answers=True)
    ours.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: made, ours)
    made.say(Hello(kind="worker", name=name, spki=spki))
    await made.seen(lambda message: isinstance(message, Welcome))
    return made


# --- no other sandbox, no approval, no budget beyond theirs ---------------------------------------------------------


async def test_the_snapshot_gives_no_evidence_for_a_sandbox_that_showed_none(rig: Rig, worker: FakeProcess) -> None:
    """Every hash and id of the snapshot, tried as token and as channel key, opens nothing for anybody."""
    mine, theirs = await rig.sandbox(), await rig.sandbox()
    document = json.loads(worker.named(Snapshot)[-1].document)
    words = {word for word in _texts(document) if word}
    guesses = [Evidence(token=word) for word in words if len(word) <= 200]
    guesses += [Evidence(channel_key=bytes.fromhex(word)) for word in words if _is_hash(word)]
    guesses += [Evidence(token=mine.token), Evidence()]
    assert len(guesses) > 20
    for evidence in guesses:
        made = statement(rig, theirs, evidence=evidence)
        answer = await rig.vault.opener.open_handoff(sealed(worker, made), None)
        assert isinstance(answer, Refused), evidence
        assert answer.reason in ("bad-token", "auth-required", "sandbox-ended")
    assert "broker.intent" not in rig.journal.names()


async def test_presented_evidence_opens_the_permitted_operations_until_the_sandbox_ends(
    rig: Rig, worker: FakeProcess
) -> None:
    """What it does get: that sandbox's own operations, within its limits; not a denied one, and nothing afterwards."""
    mine = await rig.sandbox()
    assert isinstance(await _ask(rig, worker, mine), Opened)
    assert isinstance(await _ask(rig, worker, mine, target="/v1/keys"), Refused)
    assert isinstance(await _ask(rig, worker, mine), Opened)
    assert isinstance(await _ask(rig, worker, mine), Opened)
    over = await _ask(rig, worker, mine)  # 3/minute, counted where the worker cannot reach
    assert isinstance(over, Refused)
    assert over.reason == "limit-reached"
    await rig.vault.desk.end(mine.record.sandbox.id, "test")
    ended = await _ask(rig, worker, mine)
    assert isinstance(ended, Refused)
    assert ended.reason == "sandbox-ended"


async def test_no_statement_answers_an_approval(rig: Rig, worker: FakeProcess) -> None:
    """A held operation stays held, however often and however it is stated."""
    mine = await rig.sandbox()
    release = {
        "method": "POST",
        "target": "/release",
        "rule": "agent/release",
        "operation": "agent/release",
        "arguments": (),
        "body": BodyPlan(kind="length", length=2),
    }
    for change in ({}, {"headers": (("Host", "orders.shop.example"), ("Exeat-Approved", "yes"))}):
        answer = await _ask(rig, worker, mine, **(release | change))
        assert isinstance(answer, Refused)
        assert answer.reason in ("approval-required", "policy-changing", "body-not-judged")
    assert "broker.intent" not in rig.journal.names()


# --- no past record, and no record in another's name ------------------------------------------------------------------


FOREIGN = sorted(name for name, spec in EVENTS.items() if "worker" not in spec.writers)


async def test_a_worker_writes_only_a_workers_records(tmp_path: Path) -> None:
    """The auditor refuses every event that belongs to another kind of process; none of them reaches the log."""
    async with RunningAuditor(tmp_path) as auditor:
        assert len(FOREIGN) > 10
        for name in FOREIGN:
            fields = {field: _value(field) for field in EVENTS[name].required}
            with pytest.raises(AuditUnavailable):
                await auditor.links[0].append(Event(name, fields))
        await auditor.stop()
        written = [record["event"] for record in auditor.records() if record["process"] == "worker-1"]
        assert written == []


async def test_a_worker_cannot_change_or_read_what_is_written(tmp_path: Path) -> None:
    """Whatever it sends down its channel, records stay as they were, nothing comes back but numbers, verify passes."""
    async with RunningAuditor(tmp_path, channels=(("worker-1", "worker"), ("worker-2", "worker"))) as auditor:
        await auditor.links[0].append(Event("connection.refused", {"reason": "bad-token"}), durable=True)
        before = auditor.lines()
        raw = auditor.sockets[1]
        raw.settimeout(60)
        for kind in range(256):
            try:
                raw.sendall(struct.pack(">IB", 10, kind) + b'{"seq": 1}'[:9])  # audit/frames.py: length, type
            except OSError:
                break
        answers = b""
        try:
            while piece := raw.recv(65536):
                answers += piece
        except OSError:
            pass
        assert b"bad-token" not in answers
        assert auditor.lines()[: len(before)] == before
        await auditor.stop()
        assert verify([str(tmp_path)]) == 0


# --- a real worker, seen from outside -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestGateway]:
    policy = 'roles:\n  agent:\n    allow:\n      - {name: x, host: x.test, methods: [GET], paths: ["/**"]}\n'
    with TestGateway(tmp_path_factory.mktemp("blast"), policy=policy) as gateway:
        yield gateway


def _pids(gateway: TestGateway, module: str) -> list[int]:
    assert gateway.process is not None
    return [pid for pid in descendants(gateway.process.pid) if f"-m {module} ".encode() in command_line(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["proxy.worker", "broker.executor_process"])
def test_a_process_that_parses_hostile_bytes_sees_nothing_of_the_state(running: TestGateway, module: str) -> None:
    """In its view of the file system there is no state, key, configuration, log or admin socket (RULINGS 1.2)."""
    for pid in _pids(running, module):
        root = Path(f"/proc/{pid}/root")
        for path in (running.state, running.config, running.run_folder / "admin.sock", running.log):
            assert not Path(str(root) + str(path)).exists(), path
        # Nothing of the machine's /tmp but what the program itself runs from, where this project lies there.
        code = {Path(__file__).parents[2], Path(sys.base_prefix).resolve(), Path(sys.prefix)}
        roots = {path.parts[2] for path in code if path.parts[:2] == ("/", "tmp")}
        assert {entry.name for entry in Path(str(root) + "/tmp").iterdir()} <= roots


@pytest.mark.slow
@pytest.mark.parametrize("module", ["proxy.worker", "broker.executor_process"])
def test_a_process_that_parses_hostile_bytes_has_no_power(running: TestGateway, module: str) -> None:
    """A uid of its own, no capability, no new privileges, no core, and no open file outside the system's own."""
    vault = {line.split()[1] for pid in _pids(running, "broker.vault") for line in _status(pid, "Uid")}
    for pid in _pids(running, module):
        [uid] = {line.split()[1] for line in _status(pid, "Uid")}
        assert uid != "0"
        if os.geteuid() == 0:
            assert uid not in vault
        assert [line.split()[1] for line in _status(pid, "CapEff")] == ["0" * 16]
        assert [line.split()[1] for line in _status(pid, "NoNewPrivs")] == ["1"]
        [core] = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line]
        assert core.split()[4:6] == ["0", "0"]
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("/") and not target.startswith(("/dev/", "/memfd:")):
                assert not target.startswith(str(running.folder)) or target.endswith("up.err"), target
                assert not stat.S_ISDIR(entry.stat().st_mode), target


def _status(pid: int, name: str) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name + ":")]


async def _ask(rig: Rig, worker: FakeProcess, created: Any, **changes: object) -> Opened | Refused:
    return await rig.vault.opener.open_handoff(sealed(worker, statement(rig, created, **changes)), None)


def _texts(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys too."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _is_hash(word: str) -> bool:
    return len(word) == 64 and all(letter in "0123456789abcdef" for letter in word)


def _value(field: str) -> Any:
    return {str: "x", int: 1, bool: True, tuple: ["x"]}[SPECS[field].type]
