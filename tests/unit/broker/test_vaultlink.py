"""The executor's side of the control stream, and the executor process itself, against a vault that is played."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from broker.vault.clock import SystemClock
from broker.vault.snapshot import render_snapshot
from broker.vaultlink import VaultLink, VaultUnavailable, read_snapshot
from net.fdchannel import FdChannel, channel_pair
from net.framing import FrameStream
from net.stream import StreamBroken, open_socket_stream
from proxy.brokerlink import SocketBrokerLink
from rules.compile import DocumentFault
from state.records import SandboxRecord
from tests.support import calls
from tests.support.auditors import RunningAuditor
from tests.support.fakes import CountingRandom, ManualClock, sandbox
from tests.support.streams import MemoryStream
from wire.control import (
    MAX_TO_VAULT,
    Ack,
    Cut,
    CutDone,
    Done,
    Drain,
    FromVault,
    Heartbeat,
    Hello,
    Open,
    Opened,
    OpenRefused,
    Snapshot,
    ToVault,
    Welcome,
    WorkerGone,
    WorkerKey,
    decode_to_vault,
    encode,
)
from wire.handoff import Refusal

POLICY = calls.policy()
BOX = sandbox()


def snapshot(number: int = 1, /, **changes: object) -> Snapshot:
    """A snapshot as the vault renders it."""
    record = SandboxRecord(
        sandbox=BOX, token_sha256=b"t" * 32, channel={"kind": "shared"}, channel_key_sha256=None, created_at=0.0
    )
    raw = render_snapshot(
        generation=number,
        now_floor=1.0,
        policy=POLICY,
        sandboxes=(record,),
        ended_tokens=(),
        listener_ports=(3128,),
        addresses=("203.0.113.9", "10.0.0.0/8"),
        internal_ranges=("100.64.0.0/10",),
    )
    return Snapshot(generation=number, document=json.dumps({**json.loads(raw), **changes}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 2},
        {"digest": "0" * 64},
        {"document": {}},
        {"document": None},
        {"sandboxes": [{}]},
        {"self": {}},
        {"self": {"addresses": ["x"], "listener_ports": []}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_snapshot_that_is_not_exact_is_refused(changes: dict[str, object]) -> None:
    """Nothing is guessed: without a readable snapshot everything is denied."""
    with pytest.raises((DocumentFault, ValueError, KeyError, TypeError)):
        read_snapshot(snapshot(1, **changes))


def test_a_rendered_snapshot_is_read_back() -> None:
    """What the vault renders is what the executor decides from."""
    read = read_snapshot(snapshot())
    assert read.policy == POLICY
    assert read.sandboxes == {("default", "sb_one"): BOX}
    assert read.addresses.listener_ports == {3128}
    assert [str(network) for network in read.addresses.self_addresses] == ["203.0.113.9/32", "10.0.0.0/8"]


def test_a_policy_that_is_in_force_is_not_compiled_anew() -> None:
    """The next snapshot of the same policy takes the compiled one; another digest does not."""
    known = read_snapshot(snapshot()).policy
    assert read_snapshot(snapshot(), known).policy is known
    other = replace(known, digest="0" * 64)
    assert read_snapshot(snapshot(), other).policy is not other


@dataclass
class PlayedVault:
    """The other end of the control stream, driven by the test."""

    frames: FrameStream
    heard: list[ToVault] = field(default_factory=list)

    def say(self, *messages: FromVault) -> None:
        for message in messages:
            self.frames.send(encode(message))

    async def hear(self) -> ToVault:
        """The next message of the executor."""
        frame = await self.frames.receive()
        assert frame is not None
        message = decode_to_vault(frame)
        self.heard.append(message)
        return message

    async def welcome(self) -> None:
        """What the real one sends after Hello."""
        assert isinstance(await self.hear(), Hello)
        self.say(Welcome(name="executor-1"), WorkerKey(worker="worker-1", key=calls.KEY), snapshot())
        assert await self.hear() == Ack(generation=1)


@dataclass
class Joined:
    """A link in the middle of its run."""

    link: VaultLink
    vault: PlayedVault
    clock: ManualClock
    running: asyncio.Task[None]
    cuts: list[Cut]
    drains: list[float]


@pytest.fixture
async def joined() -> AsyncIterator[Joined]:
    """A link with a snapshot in force."""
    ours, theirs = MemoryStream.pair()
    clock = ManualClock()
    cuts: list[Cut] = []
    drains: list[float] = []

    async def on_cut(message: Cut) -> int:
        cuts.append(message)
        if message.subject == "broken":
            raise RuntimeError("canary")
        return 2

    link = VaultLink(FrameStream(ours, 64 << 20), name="executor-1", clock=clock, on_cut=on_cut, on_drain=drains.append)  # type: ignore[arg-type]
    running = asyncio.get_running_loop().create_task(link.run())
    vault = PlayedVault(FrameStream(theirs, MAX_TO_VAULT))
    await vault.welcome()
    yield Joined(link, vault, clock, running, cuts, drains)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_before_the_first_snapshot_nothing_is_decided() -> None:
    """No snapshot, no key, no open."""
    ours, _ = MemoryStream.pair()

    async def on_cut(message: Cut) -> int:
        return 0

    link = VaultLink(FrameStream(ours), name="e", clock=ManualClock(), on_cut=on_cut, on_drain=lambda seconds: None)  # type: ignore[arg-type]
    with pytest.raises(VaultUnavailable):
        link.snapshot()
    with pytest.raises(VaultUnavailable):
        await link.open(b"sealed", None)
    assert link.worker_key("worker-1") is None


async def test_a_silent_vault_is_no_vault(joined: Joined) -> None:
    """Two seconds without a word, and nothing is decided until it speaks again (9.5)."""
    joined.link.snapshot()
    joined.clock.advance(2.1)
    assert joined.link.silent
    with pytest.raises(VaultUnavailable):
        joined.link.snapshot()
    with pytest.raises(VaultUnavailable):
        await joined.link.open(b"sealed", None)
    joined.vault.say(Heartbeat(generation=1, now_floor=1.0), Cut(id=1, kind="all"))
    await joined.vault.hear()
    assert not joined.link.silent


async def test_a_snapshot_that_cannot_be_read_leaves_none_in_force(
    joined: Joined, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not acknowledged, and what came before is not used any more."""
    joined.vault.say(snapshot(2, digest="0" * 64), snapshot(3))
    assert await joined.vault.hear() == Ack(generation=3)
    assert joined.link.snapshot().generation == 3
    joined.vault.say(snapshot(4, sandboxes=[{}]), Cut(id=1, kind="all"))
    await joined.vault.hear()
    with pytest.raises(VaultUnavailable):
        joined.link.snapshot()
    assert "could not be used" in capsys.readouterr().err


async def test_a_vault_that_leaves_ends_everything(joined: Joined) -> None:
    """Waiting opens fail, keys and snapshot are forgotten."""
    opening = asyncio.ensure_future(joined.link.open(b"sealed", None))
    assert isinstance(await joined.vault.hear(), Open)
    await joined.vault.frames.close()
    with pytest.raises(StreamBroken):
        await joined.running
    with pytest.raises(VaultUnavailable):
        await opening
    assert joined.link.worker_key("worker-1") is None
    with pytest.raises(VaultUnavailable):
        joined.link.snapshot()


async def test_an_answer_that_nobody_waits_for_is_given_back(joined: Joined) -> None:
    """Material of a call that was cancelled meanwhile is dropped, and the vault told."""
    opening = asyncio.ensure_future(joined.link.open(b"sealed", None))
    asked = await joined.vault.hear()
    assert isinstance(asked, Open)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    joined.vault.say(Opened(id=asked.id, rule="r", operation="o", policy_digest="d", parts=(("value", b"x"),)))
    assert await joined.vault.hear() == Done(id=asked.id, sent=False)


async def test_a_cut_is_acknowledged_after_it_was_carried_out(joined: Joined) -> None:
    """With the number closed; one that fails is not acknowledged at all."""
    joined.vault.say(
        Cut(id=7, kind="credential", subject="broken"), Cut(id=8, kind="sandbox", tenant="default", subject="sb_one")
    )
    assert await joined.vault.hear() == CutDone(id=8, closed=2)
    assert [cut.id for cut in joined.cuts] == [7, 8]


async def test_answers_find_their_questions(joined: Joined) -> None:
    """Two opens at once, answered the other way round; a worker that left has no key; a drain is passed on."""
    first = asyncio.ensure_future(joined.link.open(b"one", None))
    second = asyncio.ensure_future(joined.link.open(b"two", None))
    one, two = await joined.vault.hear(), await joined.vault.hear()
    assert isinstance(one, Open)
    assert isinstance(two, Open)
    assert joined.link.worker_key("worker-1") == calls.KEY
    joined.vault.say(
        OpenRefused(id=two.id, reason="no-rule"),
        Opened(id=one.id, rule="r", operation="o", policy_digest="d"),
        WorkerGone(worker="worker-1"),
        Drain(seconds=3.0),
    )
    assert (await second).id == two.id
    assert (await first).id == one.id
    joined.vault.say(Cut(id=1, kind="all"))
    await joined.vault.hear()
    assert joined.link.worker_key("worker-1") is None
    assert joined.drains == [3.0]


# --- the process ---


class RunningExecutor:
    """One executor process with its pipes."""

    def __init__(self, auditor_fd: int, **boot: object) -> None:
        self.error: str | None = None
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.worker, channel = channel_pair()
        self.ready, ready = os.pipe()
        document = {
            "name": "executor-1",
            "vault_fd": control.fileno(),
            "auditor_fd": auditor_fd,
            "digest_key": "00" * 32,
            "channel_fds": [channel.fileno()],
            "ready_fd": ready,
            **boot,
        }
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-m", "broker.executor_process", str(read)],
            pass_fds=(read, control.fileno(), channel.fileno(), ready, auditor_fd),
            cwd="/",
            env={},
            stderr=subprocess.PIPE,
        )
        with os.fdopen(write, "wb") as stream:
            stream.write(json.dumps(document).encode())
        for number in (read, ready):
            os.close(number)
        control.close()
        channel.close()

    async def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        if self.error is None:
            _, error = await asyncio.to_thread(self.process.communicate, None, 20)
            self.error = error.decode()
            os.close(self.ready)
            self.worker.close()
        return self.process.returncode, self.error


@dataclass
class Running:
    """A process whose vault is played and whose auditor is real."""

    executor: RunningExecutor
    vault: PlayedVault
    auditor: RunningAuditor


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    """A process with a snapshot in force."""
    async with RunningAuditor(tmp_path / "log", channels=(("executor-1", "executor"),)) as auditor:
        executor = RunningExecutor(auditor.sockets[0].fileno())
        executor.control.setblocking(False)
        vault = PlayedVault(FrameStream(await open_socket_stream(executor.control), MAX_TO_VAULT))
        await vault.welcome()
        assert await asyncio.to_thread(os.read, executor.ready, 16) == b"ready\n"
        yield Running(executor, vault, auditor)
        if executor.process.poll() is None:
            executor.process.kill()
        await executor.end()
        vault.frames.abort()


async def beat(vault: PlayedVault) -> None:
    """Heartbeats as the vault sends them."""
    while True:
        vault.say(Heartbeat(generation=1, now_floor=1.0))
        await asyncio.sleep(0.5)


@pytest.mark.slow
async def test_a_lost_vault_ends_the_process(running: Running) -> None:
    """Without its vault an executor is nothing: exit code 1, for the supervisor to see."""
    await running.vault.frames.close()
    code, error = await running.executor.end()
    assert code == 1
    assert "the vault is gone" in error


@pytest.mark.slow
async def test_a_process_told_to_stop_says_so_in_the_log(running: Running) -> None:
    """SIGTERM drains, records the end and exits 0."""
    running.executor.process.send_signal(signal.SIGTERM)
    code, error = await running.executor.end()
    assert (code, error) == (0, "")
    names = [record["event"] for record in running.auditor.records()]
    assert "process.started" in names
    assert "process.stopped" in names


@pytest.mark.slow
async def test_a_process_judges_what_workers_pass_to_it(running: Running) -> None:
    """A hand-off over a passed socket: denied by its own policy, opened by its vault, recorded in the log."""
    beating = asyncio.ensure_future(beat(running.vault))
    running.executor.worker.setblocking(False)
    channel = FdChannel(running.executor.worker)
    clock = SystemClock(0.0)
    link = SocketBrokerLink([channel], clock=clock, random=CountingRandom())
    link.arm("worker-1", calls.KEY)
    refused = await link.open(calls.request(BOX, calls.policy().digest, "/other"))
    answer = await refused.receive()
    assert isinstance(answer, Refusal)
    assert answer.reason == "no-rule"
    await refused.close()
    asked = await link.open(calls.request(BOX, calls.policy().digest))
    message = await running.vault.hear()
    assert isinstance(message, Open)
    running.vault.say(OpenRefused(id=message.id, reason="credential-unavailable"))
    assert await asked.receive() == Refusal(reason="credential-unavailable")
    await asked.close()
    beating.cancel()
    channel.close()
    running.executor.process.send_signal(signal.SIGTERM)
    assert (await running.executor.end())[0] == 0
    reasons = [record.get("reason") for record in running.auditor.records() if record["event"] == "broker.refused"]
    assert reasons == ["no-rule"]


@pytest.mark.slow
@pytest.mark.parametrize("boot", [b"", b"{}", b'{"name":"e","other":1}', b'{"name":"e"}'])
def test_a_boot_document_that_is_not_exact_stops_the_process(boot: bytes) -> None:
    """Exit code 2 and one line."""
    read, write = os.pipe()
    os.write(write, boot)
    os.close(write)
    done = subprocess.run(
        [sys.executable, "-I", "-m", "broker.executor_process", str(read)],
        pass_fds=(read,),
        cwd="/",
        env={},
        capture_output=True,
        timeout=30,
        check=False,
    )
    os.close(read)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
