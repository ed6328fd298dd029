"""The worker as the process it is: inherited descriptors, the vault's words, its silence, and the end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.vault.ca import CertificateAuthority
from net.framing import FrameStream
from net.stream import StreamBroken, open_socket_stream
from proxy.directory import SnapshotDirectory
from proxy.ports import DirectoryUnavailable
from proxy.selfcheck import Bench
from proxy.worker import Boot, Listener, Worker, _fault
from rules.compile import compile_policy
from rules.names import Host
from rules.parse import Sources, parse_sources
from tests.support.auditors import DIGEST_KEY, RunningAuditor
from tests.support.rooms import TOKEN, Client, get
from wire.control import (
    Ack,
    Checked,
    Cut,
    CutDone,
    Heartbeat,
    Hello,
    Leaf,
    LeafRequest,
    Snapshot,
    Welcome,
    decode_to_vault,
    encode,
)

pytestmark = pytest.mark.slow  # starts real processes: part of make test

POLICY = """
version: 1
roles:
  dev:
    allow:
      - {name: read, host: api.example.com, methods: [GET], paths: [/v1/**]}
"""
ROOT = CertificateAuthority.create(now=time.time(), installation="test", node="node")


class ScriptedVault:
    """The vault's end of the control stream: says what tests tell it to, mints leaves, keeps what it heard."""

    def __init__(self, frames: FrameStream, boxes: list[dict[str, Any]]) -> None:
        self.frames = frames
        self.boxes = boxes
        self.heard: list[object] = []
        self.changed = asyncio.Event()
        self.beating = True
        self._spki = b""
        document = parse_sources(Sources(policy={"policy.yaml": POLICY}, credentials=None, services={}, ca_files=None))
        self.document = document.document
        self.digest = compile_policy(document.document).digest

    def push(self, generation: int) -> None:
        """Send a snapshot of the boxes as they are now."""
        whole = {
            "generation": generation,
            "now_floor": 0.0,
            "digest": self.digest,
            "document": self.document,
            "sandboxes": self.boxes,
            "ended_tokens": [],
            "self": {"listener_ports": [], "addresses": [], "internal_ranges": []},
        }
        self.frames.send(encode(Snapshot(generation=generation, document=json.dumps(whole).encode())))

    async def run(self) -> None:
        """Answer the worker until it leaves."""
        while (frame := await self.frames.receive()) is not None:
            message = decode_to_vault(frame)
            self.heard.append(message)
            self.changed.set()
            if isinstance(message, Hello):
                self._spki = message.spki
                self.frames.send(encode(Welcome(name=message.name, key=bytes(32))))
                self.push(1)
            elif isinstance(message, LeafRequest):
                chain = ROOT.mint(Host(message.host), self._spki, time.time())
                self.frames.send(encode(Leaf(id=message.id, chain_pem=chain.encode())))

    async def beat(self) -> None:
        """A heartbeat every 200 ms while `beating`."""
        while True:
            if self.beating:
                self.frames.send(encode(Heartbeat(generation=1, now_floor=0.0)))
            await asyncio.sleep(0.2)

    async def until(self, kind: type) -> Any:
        """The next message of that kind, heard or to come."""
        while True:
            found = next((message for message in self.heard if isinstance(message, kind)), None)
            if found is not None:
                self.heard.remove(found)
                return found
            self.changed.clear()
            await self.changed.wait()


def box(name: str, token: str, **channel: str) -> dict[str, Any]:
    """One sandbox as the vault's document has it."""
    return {
        "tenant": "default",
        "id": name,
        "epoch": 1,
        "role": "dev",
        "owner": "o",
        "agent": "a",
        "task": "t",
        "attributes": {},
        "expires_at": time.time() + 600,
        "token_sha256": hashlib.sha256(token.encode()).hexdigest(),
        "channel": channel or {"kind": "shared"},
        "placeholders": {},
    }


def listening() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen(16)
    return sock


class Running:
    """One worker process with everything it was given."""

    process: subprocess.Popen[bytes]
    vault: ScriptedVault
    address: tuple[str, int]
    listeners: socket.socket
    auditor: RunningAuditor

    async def client(self, address: tuple[str, int] | None = None) -> Client:
        sock = socket.create_connection(address or self.address)
        sock.setblocking(False)
        stream = await open_socket_stream(sock)
        stream.read_timeout = 20.0
        done: asyncio.Task[None] = asyncio.ensure_future(asyncio.sleep(0))
        return Client(stream, done)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 20)


@asynccontextmanager
async def worker(directory: Path) -> AsyncIterator[Running]:
    """A ready worker."""
    running = Running()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    running.listeners, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ready_read, ready_write = os.pipe()
    listener = listening()
    running.address = listener.getsockname()
    async with RunningAuditor(directory, channels=(("worker-0", "worker"),)) as auditor:
        running.auditor = auditor
        log = auditor.sockets[0]
        boot = {
            "name": "worker-0",
            "ca_pem": ROOT.root_pem,
            "digest_key": DIGEST_KEY.hex(),
            "vault_fd": theirs.fileno(),
            "auditor_fd": log.fileno(),
            "listeners": [{"fd": listener.fileno(), "kind": "shared", "name": "proxy"}],
            "listeners_fd": passed.fileno(),
            "ready_fd": ready_write,
            "drain_seconds": 1.0,
        }
        descriptor = os.memfd_create("boot")
        os.write(descriptor, json.dumps(boot).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        fds = (theirs.fileno(), log.fileno(), listener.fileno(), passed.fileno(), ready_write, descriptor)
        running.process = subprocess.Popen(
            [sys.executable, "-I", "-m", "proxy.worker", str(descriptor)], pass_fds=fds, cwd="/", env={}
        )
        for one in (theirs, listener, passed):
            one.close()
        os.close(ready_write)
        os.close(descriptor)
        ours.setblocking(False)
        frames = FrameStream(await open_socket_stream(ours))
        running.vault = ScriptedVault(frames, [box("sb_one", TOKEN)])
        tasks = [asyncio.ensure_future(running.vault.run()), asyncio.ensure_future(running.vault.beat())]
        try:
            assert await asyncio.to_thread(os.read, ready_read, 16) == b"ready\n"
            yield running
        finally:
            os.close(ready_read)
            running.listeners.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            frames.abort()
            if running.process.poll() is None:
                running.process.kill()
            await asyncio.to_thread(running.process.wait)


def written(directory: Path) -> list[dict[str, Any]]:
    """Every record of the log."""
    lines = [line for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


async def test_a_worker_refuses_answers_help_and_drains_with_its_records_written(tmp_path: Path) -> None:
    """One life: ready, a refusal, a help page, SIGTERM, exit 0, and the log has all of it."""
    async with worker(tmp_path) as running:
        assert (await running.vault.until(Ack)).generation == 1
        client = await running.client()
        client.send(get("http://evil.example.com/", "evil.example.com"))
        refused = await client.answer()
        assert (refused.status, refused.reason) == (403, "no-rule")
        client.send(get("http://exeat.internal/ca.pem", "exeat.internal"))
        assert (await client.answer()).body.decode() == ROOT.root_pem
        client.stream.abort()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    names = [record["event"] for record in written(tmp_path)]
    assert "process.started" in names
    assert "process.stopped" in names
    (record,) = [record for record in written(tmp_path) if record["event"] == "request.refused"]
    assert (record["sandbox"], record["reason"], record["peer"]) == ("sb_one", "no-rule", "127.0.0.1")


async def test_a_vault_that_goes_silent_or_away_denies_everything(tmp_path: Path) -> None:
    """RULINGS 9.5: within two seconds of silence, and at once when the channel ends."""
    async with worker(tmp_path) as running:
        running.vault.frames.abort()
        answer = None
        while answer is None or answer.status != 503:
            client = await running.client()
            client.send(get("http://exeat.internal/ca.pem", "exeat.internal"))
            try:
                answer = await client.answer()
            except StreamBroken:
                continue  # cut: it was open when the channel ended
            finally:
                client.stream.abort()
        assert (answer.status, answer.reason) == (503, "policy-unavailable")


async def test_a_passed_listener_identifies_its_sandbox_and_ends_with_it(tmp_path: Path) -> None:
    """`exeat run`: the listener of a sandbox's own namespace needs no token; the end of the sandbox cuts it."""
    async with worker(tmp_path) as running:
        key = bytes(range(32))
        own = box("sb_own", "t2", kind="namespace", key_sha256=hashlib.sha256(key).hexdigest())
        running.vault.boxes.append(own)
        running.vault.push(2)
        await running.vault.until(Ack)
        await running.vault.until(Ack)
        listener = listening()
        message = json.dumps({"kind": "sandbox", "sandbox": "sb_own", "channel_key": key.hex()}).encode()
        socket.send_fds(running.listeners, [message], [listener.fileno()])
        client = await running.client(listener.getsockname())
        listener.close()
        client.send(get("http://exeat.internal/allowed", "exeat.internal", "Accept: application/json", token=None))
        assert (await client.answer()).json["sandbox"] == "sb_own"
        running.vault.boxes.remove(own)
        running.vault.push(3)
        running.vault.frames.send(encode(Cut(id=5, kind="sandbox", tenant="default", subject="sb_own")))
        assert (await running.vault.until(CutDone)).id == 5
        with pytest.raises((StreamBroken, AssertionError)):  # reset, or ended where an answer was due
            await client.answer()
        client.stream.abort()


def test_a_boot_document_with_an_unknown_field_is_refused() -> None:
    """The process ends with code 2 and a sentence that names the field."""
    descriptor = os.memfd_create("boot")
    os.write(descriptor, b'{"name": "w", "ca_pem": "", "digest_key": "00", "extra": 1}')
    os.lseek(descriptor, 0, os.SEEK_SET)
    ended = subprocess.run(
        [sys.executable, "-I", "-m", "proxy.worker", str(descriptor)],
        pass_fds=(descriptor,),
        cwd="/",
        env={},
        capture_output=True,
        timeout=20,
        check=False,
    )
    os.close(descriptor)
    assert ended.returncode == 2
    assert b"extra" in ended.stderr


def test_only_faults_are_complained_of(capsys: pytest.CaptureFixture[str]) -> None:
    """A connection that is cut because the worker stops is no fault; whatever else ends one is said."""
    _fault(asyncio.CancelledError())
    assert capsys.readouterr().err == ""
    _fault(KeyError("x"))
    assert "unexpected error" in (shown := capsys.readouterr().err)
    assert "error=KeyError" in shown


# --- the self-check (I28) -------------------------------------------------------------------------------------------


def lets_everything_through(bench: Bench, directory: SnapshotDirectory) -> Any:
    """A room that an unsound worker would have."""

    class Open:
        async def serve(self, stream: Any, channel: Any) -> None:
            bench.left += 1
            stream.abort()

    return Open()


class Sounding:
    """A room whose makers tests can exchange while the worker runs."""

    def __init__(self, worker: Worker) -> None:
        self.sound = worker._probed_front
        self.broken = False

    def __call__(self, bench: Bench, directory: SnapshotDirectory) -> Any:
        return lets_everything_through(bench, directory) if self.broken else self.sound(bench, directory)


@asynccontextmanager
async def within(directory: Path, sounding: bool) -> AsyncIterator[tuple[Worker, ScriptedVault, RunningAuditor, Any]]:
    """A Worker in this process, with a listener; `sounding`: as if it were sound at first."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    listener = listening()
    async with RunningAuditor(directory, channels=(("worker-0", "worker"),)) as auditor:
        boot = Boot(
            name="worker-0",
            ca_pem=ROOT.root_pem,
            digest_key=DIGEST_KEY,
            vault_fd=theirs.detach(),
            auditor_fd=os.dup(auditor.sockets[0].fileno()),
            listeners=(Listener(fd=listener.detach(), kind="shared", name="proxy"),),
            drain_seconds=1.0,
            check_seconds=0.01,
        )
        made = Worker(boot)
        made._probed = rooms = Sounding(made)
        rooms.broken = not sounding
        ours.setblocking(False)
        vault = ScriptedVault(FrameStream(await open_socket_stream(ours)), [box("sb_one", TOKEN)])
        tasks = [asyncio.ensure_future(vault.run()), asyncio.ensure_future(vault.beat())]
        try:
            yield made, vault, auditor, rooms
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            vault.frames.abort()


def named(auditor: RunningAuditor, event: str) -> list[dict[str, Any]]:
    return [record for record in auditor.records() if record["event"] == event]


async def test_an_unsound_worker_never_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At start: the failed check is on record and told to the vault; the process ends with 3 before it accepts."""
    async with within(tmp_path, sounding=False) as (made, vault, auditor, _), asyncio.timeout(60):
        assert await made.run() == 3
        assert made._servers == {}
        assert (await vault.until(Checked)).passed is False
        (record,) = named(auditor, "selfcheck.failed")
        assert "a denied host" in record["detail"]
    assert "everything is refused" in capsys.readouterr().err


async def test_a_worker_that_turns_unsound_refuses_everything_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later: the next check finds it; directory and broker are shut, live connections cut, exit code 3."""
    async with within(tmp_path, sounding=True) as (made, vault, auditor, rooms), asyncio.timeout(60):
        running = asyncio.ensure_future(made.run())
        assert (await vault.until(Checked)).passed
        await vault.until(Ack)
        rooms.broken = True
        assert await running == 3
        with pytest.raises(DirectoryUnavailable):
            made._directory.snapshot()
        assert named(auditor, "selfcheck.passed")
        assert named(auditor, "selfcheck.failed")
    assert "the self-check failed" in capsys.readouterr().err


async def test_a_sound_worker_says_so(tmp_path: Path) -> None:
    """The process itself: one check at start and one with the policy in force, told and recorded."""
    async with worker(tmp_path) as running, asyncio.timeout(60):
        for _ in range(2):
            assert (await running.vault.until(Checked)).passed
