"""`Vault`: the process. Opens everything in order, answers control streams, beats, sweeps, and drains.

    open_vault(boot)   modes, key, store, rollback, state, log, policy, authority: the first that fails refuses
    Vault.adopt(...)   a worker's or executor's control stream: Hello, Welcome, Snapshot, then messages
    Vault.run()        heartbeat every 500 ms, expiry sweep, clock watch, until stop()

Everything runs in one loop; the database and the store run on one thread, sources on a few others.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.errors import BrokerError
from broker.sources.registry import Sources
from broker.vault.boot import Boot, BootRefused
from broker.vault.ca import AuthorityError, CertificateAuthority
from broker.vault.channel import ControlChannel
from broker.vault.clock import JUMP, SystemClock
from broker.vault.desk import Desk, Settings
from broker.vault.fleet import Fleet, Member
from broker.vault.keys import check_private_directory, key_from_passphrase, read_key_file, read_private
from broker.vault.leaves import LeafOffice
from broker.vault.ledger import ECHO_LIMIT, Ledger
from broker.vault.open import Opener
from broker.vault.opened import Opened, Refused
from broker.vault.records import Fields, who
from broker.vault.sandboxes import SandboxTable
from broker.vault.store import OWN_SECRETS, SecretStore, StoreError, check_rollback
from broker.vault.tickets import StateTickets
from net.process import complain
from rules.facts import Sandbox
from state.errors import StateError
from state.store import StateStore
from wire.control import (
    HEARTBEAT_SECONDS,
    Ack,
    CutDone,
    Done,
    Echo,
    Hello,
    LeafRequest,
    Open,
    OpenRefused,
    ToVault,
    Welcome,
    WorkerGone,
    WorkerKey,
    encode,
)
from wire.control import Opened as OpenedMessage
from wire.handoff import KEY_BYTES

AUTHORITY = OWN_SECRETS + "authority"
SWEEP_SECONDS = 1.0
FLOOR_SECONDS = 30.0
MAX_IN_FLIGHT = 4096
"""Calls of one executor whose end was not reported."""

Random = Callable[[int], bytes]


class Vault:
    """Made by open_vault. `journal`, `clock` and `random` are passed in, so that tests hold them."""

    def __init__(
        self,
        boot: Boot,
        *,
        state: StateStore,
        store: SecretStore,
        authority: CertificateAuthority,
        journal: Journal,
        clock: SystemClock,
        random: Random,
    ) -> None:
        self.boot = boot
        self.state = state
        self.store = store
        self.authority = authority
        self.journal = journal
        self.clock = clock
        self._random = random
        self.fleet = Fleet()
        self.table = SandboxTable(random)
        self.ledger = Ledger()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._source_threads = ThreadPoolExecutor(8, thread_name_prefix="sources")
        self._keys: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.lost: list[str] = []
        self.started_at = clock.wall()
        self._leaves = LeafOffice(authority, clock, self.table, journal)
        self.desk = Desk(
            settings=Settings(
                policy_path=Path(boot.policy_path),
                credentials_path=None if boot.credentials_path is None else Path(boot.credentials_path),
                listener_ports=boot.listener_ports,
                self_addresses=boot.self_addresses,
                internal_ranges=boot.internal_ranges,
                acknowledge_within=boot.acknowledge_within,
            ),
            state=state,
            store=store,
            table=self.table,
            ledger=self.ledger,
            leaves=self._leaves,
            fleet=self.fleet,
            journal=journal,
            clock=clock,
            thread=self._thread,
            on_lost=self._on_lost,
        )
        self.opener = Opener(
            clock=clock,
            keys=self._keys.get,
            table=self.table,
            ledger=self.ledger,
            active=self.desk.active,
            sources=Sources(store=store, environment=boot.environment, version_key=boot.digest_key),
            journal=journal,
            tickets=StateTickets(state, self._thread, random),
            threads=self._source_threads,
        )

    async def start(self) -> None:
        """Take up what the state remembers and put the policy in force. Raises BrokerError and AuditUnavailable."""
        for record in self.state.sandboxes(ended=True):
            if record.ended_at is None:
                self.table.put(record)
            else:
                self.table.remember_ended(record.token_sha256)
        self.ledger.restore_disarmed(self.state.disarmed())
        await self.journal.append(
            Event(
                "process.started",
                {
                    "program": "vault",
                    "pid": os.getpid(),
                    "uid": os.geteuid(),
                    "shared_uid": self.boot.danger_shared_uid,
                },
            ),
            durable=True,
        )
        generation, digest = self.store.generation, self.store.digest
        self.state.record_store_generation(generation, digest)
        await self.journal.append(
            Event(
                "admin.action",
                {"action": "store.opened", "actor": "vault", "generation": generation, "store_digest": digest},
            ),
            durable=True,
        )
        await self.desk.load_first()
        await self.desk.refresh()
        await self.desk.end_expired()

    async def adopt(self, sock: socket.socket, name: str, kind: str) -> None:
        """Serve a control stream. `name` and `kind` are the supervisor's (or the peer uid's), not the process's own."""
        session = _Session(self, name, kind)
        sock.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: session.channel, sock)

    async def run(self) -> None:
        """Until stop(). Each duty is guarded: one that fails ends the vault, which then denies by being silent."""
        try:
            async with asyncio.TaskGroup() as group:
                duties = [
                    group.create_task(self._every(HEARTBEAT_SECONDS, self._beat)),
                    group.create_task(self._every(SWEEP_SECONDS, self._sweep)),
                    group.create_task(self._every(FLOOR_SECONDS, self._raise_floor)),
                ]
                await self._stopping.wait()
                for duty in duties:
                    duty.cancel()
        finally:
            await self._close()

    def stop(self) -> None:
        self._stopping.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the loop; what it raises is reported, never lost."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                complain("vault", "a task failed", error)

        task.add_done_callback(done)

    # duties

    async def _every(self, seconds: float, duty: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await duty()
            await asyncio.sleep(seconds)

    async def _beat(self) -> None:
        self.fleet.heartbeat(self.desk.generation, self.clock.floor)

    async def _sweep(self) -> None:
        try:
            await self.desk.end_expired()
            jumped = self.clock.jump()
            if abs(jumped) > JUMP:
                await self.journal.append(Event("clock.jumped", {"jump_ms": int(jumped * 1000)}))
        except (AuditUnavailable, StateError) as error:
            # The sandbox is out of the table already; what is missing is its record. Tried again is the next sweep.
            complain("vault", "the sweep could not be completed", error)

    async def _raise_floor(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            now = self.clock.wall()
            self.clock.raise_floor(await loop.run_in_executor(self._thread, self.state.raise_clock_floor, now))
        except StateError as error:
            complain("vault", "the clock floor could not be recorded", error)

    def _on_lost(self, name: str) -> None:
        self.lost.append(name)
        report(self.boot, {"lost": name})
        self.spawn(self._record_lost(name))

    async def _record_lost(self, name: str) -> None:
        await self.journal.append(Event("process.lost", {"instance": name, "reason": "unacknowledged"}))

    async def _close(self) -> None:
        self.fleet.drain(5.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fleet.close()
        try:
            await self.journal.append(Event("process.stopped", {"program": "vault", "pid": os.getpid()}), durable=True)
        except AuditUnavailable as error:
            complain("vault", "the stop could not be recorded", error)
        self._thread.shutdown(wait=True)
        self._source_threads.shutdown(wait=False, cancel_futures=True)
        self.state.close()

    # what sessions use

    def welcome(self, session: _Session) -> None:
        """After Hello: name and key, the keys that an executor verifies by, and the snapshot in force."""
        assert session.member is not None
        key = b""
        if session.kind == "worker":
            key = self._keys[session.name] = self._random(KEY_BYTES)
            self.fleet.send(WorkerKey(worker=session.name, key=key), self.fleet.members("executor"))
        session.channel.send(encode(Welcome(name=session.name, key=key)))
        if session.kind == "executor":
            for worker, worker_key in self._keys.items():
                session.channel.send(encode(WorkerKey(worker=worker, key=worker_key)))
        if self.desk.snapshot is not None:
            session.channel.send(encode(self.desk.snapshot))

    def goodbye(self, session: _Session) -> None:
        """The stream is gone: what that worker sealed counts no more."""
        if session.member is not None:
            self.fleet.leave(session.member)
        if session.kind == "worker" and not any(m.name == session.name for m in self.fleet.members("worker")):
            self._keys.pop(session.name, None)
            self.fleet.send(WorkerGone(worker=session.name), self.fleet.members("executor"))

    async def echoed(self, call: _Call) -> None:
        """An answer held the secret (the executor recorded it): counted, and the third in an hour shuts the credential.

        RULINGS 7.1. Shut for this sandbox until it ends, also over a restart.
        """
        box, credential = call.sandbox, call.credential
        if not self.ledger.note_echo((box.tenant, box.id), credential, self.clock.boot()):
            return
        now = self.clock.wall()
        await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self.state.disarm(box.tenant, box.id, credential, now)
        )
        await self.journal.append(
            Event("credential.disarmed", {**call.record, "reason": "secret-echoed", "count": ECHO_LIMIT}), durable=True
        )

    async def orphaned(self, call: _Call) -> None:
        """The executor of a recorded intent is gone: the outcome is that nobody knows."""
        await self.journal.append(
            Event("broker.outcome", {**call.record, "error": "executor-lost", "completed": False}), durable=True
        )

    async def leaf(self, request: LeafRequest, spki: bytes, worker: str) -> bytes:
        return encode(await self._leaves.mint(request, spki, worker))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the vault remembers of a call whose material it released."""

    sandbox: Sandbox
    credential: str
    record: Fields


class _Session:
    """One control stream and what belongs to it."""

    def __init__(self, vault: Vault, name: str, kind: str) -> None:
        self._vault = vault
        self.name = name
        self.kind = kind
        self.member: Member | None = None
        self._spki = b""
        self._open: dict[int, _Call] = {}
        """By Open id: calls in flight."""
        self._done: OrderedDict[int, _Call] = OrderedDict()
        """Calls that just ended: the report of an echo comes after the end."""
        self.channel = ControlChannel(self._on_message, self._on_lost)

    def _on_message(self, message: ToVault) -> None:
        if self.member is None and not isinstance(message, Hello):
            raise BrokerError("hello-first")
        match message:
            case Hello():
                self._hello(message)
            case Ack():
                assert self.member is not None
                self._vault.fleet.on_ack(self.member, message)
            case CutDone():
                assert self.member is not None
                self._vault.fleet.on_cut_done(self.member, message)
            case LeafRequest():
                self._only("worker")
                self._work(self._leaf(message))
            case Open():
                self._only("executor")
                self._work(self._answer(message))
            case Done():
                self._only("executor")
                call = self._open.pop(message.id, None)
                if call is not None:
                    self._done[message.id] = call
                if len(self._done) > MAX_IN_FLIGHT:
                    self._done.popitem(last=False)
            case Echo():
                self._only("executor")
                call = self._open.get(message.id) or self._done.get(message.id)
                if call is not None and call.credential == message.credential:
                    self._work(self._vault.echoed(call))
            case _:
                assert_never(message)

    def _hello(self, message: Hello) -> None:
        # The name is ours to give: a process that claims another's would be sent that one's key.
        if self.member is not None or message.kind != self.kind:
            raise BrokerError("hello-mismatch")
        self._spki = message.spki
        channel = self.channel
        self.member = Member(
            name=self.name, kind=self.kind, send=channel.send, close=channel.close, unsent=channel.unsent
        )
        self._vault.fleet.join(self.member)
        self._vault.welcome(self)

    def _only(self, kind: str) -> None:
        if self.kind != kind:
            raise BrokerError("message-of-another-kind")

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        self.channel.hold()

        async def held() -> None:
            try:
                await work
            finally:
                self.channel.release()

        self._vault.spawn(held())

    async def _leaf(self, message: LeafRequest) -> None:
        self.channel.send(await self._vault.leaf(message, self._spki, self.name))

    async def _answer(self, message: Open) -> None:
        if len(self._open) >= MAX_IN_FLIGHT:
            self.channel.send(encode(OpenRefused(id=message.id, reason="broker-unavailable")))
            return
        answer = await self._vault.opener.open_handoff(message.sealed, message.attested)
        match answer:
            case Refused():
                self.channel.send(
                    encode(
                        OpenRefused(
                            id=message.id,
                            reason=answer.reason,
                            rule=answer.rule,
                            remedy=answer.remedy,
                            message=answer.message,
                            ticket=answer.ticket,
                            retry_after=answer.retry_after,
                        )
                    )
                )
            case Opened():
                permit, material = answer.permit, answer.material
                credential = "" if material is None else str(material.definition.name)
                self._open[message.id] = _Call(
                    sandbox=permit.sandbox, credential=credential, record=_record(answer, credential)
                )
                self.channel.send(
                    encode(
                        OpenedMessage(
                            id=message.id,
                            rule=permit.rule,
                            operation=permit.operation,
                            policy_digest=answer.policy_digest,
                            credential=credential,
                            version="" if material is None else material.version,
                            owner="" if material is None else material.owner,
                            secret=b"" if material is None else material.secret.reveal(),
                            scrub=tuple(secret.reveal() for secret in answer.scrub),
                        )
                    )
                )
            case _:
                assert_never(answer)

    def _on_lost(self) -> None:
        for call in self._open.values():
            self._vault.spawn(self._vault.orphaned(call))
        self._open.clear()
        self._done.clear()
        self._vault.goodbye(self)


def _record(answer: Opened, credential: str) -> Fields:
    permit = answer.permit
    return {
        **who(permit.sandbox),
        "request_id": answer.request_id,
        "policy": answer.policy_digest,
        "rule": permit.rule,
        "operation": permit.operation,
        "credential": credential or None,
    }


def open_vault(boot: Boot, journal: Journal, random: Random = os.urandom) -> Vault:
    """Open key, store, state and authority in that order. Blocks. Raises BrokerError naming what is wrong."""
    state_dir = Path(boot.state_dir)
    check_private_directory(state_dir)
    store = SecretStore(state_dir / "store.json", lambda salt: _key(boot, state_dir, salt), random)
    try:
        state = StateStore(state_dir / "state.sqlite")
    except StateError as error:
        raise _state_refused(error) from None
    try:
        check_rollback(store, state.store_generation())
        clock = SystemClock(state.raise_clock_floor(SystemClock(state.clock_floor()).wall()))
        authority = _authority(store, clock)
        return Vault(boot, state=state, store=store, authority=authority, journal=journal, clock=clock, random=random)
    except StateError as error:
        state.close()
        raise _state_refused(error) from None
    except BaseException:
        state.close()
        raise


def _state_refused(error: StateError) -> BootRefused:
    return BootRefused(error.code, error.detail, "see the messages above; restore the state from a backup")


def report(boot: Boot, line: dict[str, Any]) -> None:
    """One line to the supervisor. A supervisor that is gone is not the vault's fault."""
    if boot.report_fd is None:
        return
    try:
        os.write(boot.report_fd, json.dumps(line).encode() + b"\n")
    except OSError as error:
        complain("vault", "the supervisor does not listen", error)


def _key(boot: Boot, state_dir: Path, salt: bytes) -> bytes:
    if boot.key_file is not None:
        return read_key_file(Path(boot.key_file), state_dir=state_dir, danger_beside_store=boot.danger_key_beside_store)
    if boot.passphrase_file is not None:
        raw = read_private(Path(boot.passphrase_file), "key-missing", "key-modes")
        return key_from_passphrase(raw.removesuffix(b"\n").removesuffix(b"\r"), salt)
    if boot.passphrase is not None:
        return key_from_passphrase(boot.passphrase.encode(), salt)
    raise BootRefused("key-missing", "the store has no key", "run `exeat init`")


def _authority(store: SecretStore, clock: SystemClock) -> CertificateAuthority:
    """The installation's authority, kept in the store; made at the first start."""
    try:
        try:
            raw = store.read(AUTHORITY).reveal()
        except StoreError as error:
            if error.code != "secret-missing":
                raise
            label = os.urandom(4).hex()
            authority = CertificateAuthority.create(now=clock.wall(), installation=label, node=f"node-{label}")
            packed = base64.b64encode(json.dumps(authority.unsafe_export()).encode())
            store.add(AUTHORITY, packed, owner="exeat", now=clock.wall(), scrub=False)
            return authority
        return CertificateAuthority.load(json.loads(base64.b64decode(raw)))
    except (AuthorityError, ValueError):
        raise BootRefused("authority-invalid", "the certificate authority in the store cannot be read") from None
