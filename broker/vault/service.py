"""`Vault`: the process's heart. Holds everything together, beats, sweeps, and drains; start.py makes it.

    Vault.adopt(...)   a worker's or executor's control stream: session.py answers it
    Vault.run()        heartbeat every 500 ms, expiry sweep, clock watch, until stop()

Everything runs in one loop; the database and the store run on one thread, sources on a few others.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.sources.registry import Sources
from broker.vault.boot import Boot
from broker.vault.brought import Brought
from broker.vault.ca import CertificateAuthority
from broker.vault.clock import JUMP, SystemClock
from broker.vault.desk import Desk, Settings
from broker.vault.exchanging import Exchanger
from broker.vault.fleet import Fleet
from broker.vault.frozen import FrozenNote, FrozenTable
from broker.vault.grants import GrantOffice
from broker.vault.leaves import LeafOffice
from broker.vault.ledger import ECHO_LIMIT, Ledger
from broker.vault.open import Opener
from broker.vault.policies import ActivePolicy
from broker.vault.report import report
from broker.vault.sandboxes import SandboxTable
from broker.vault.session import Call, Session
from broker.vault.store import SecretStore
from broker.vault.store_key import StoreKey
from broker.vault.supply import Supply
from broker.vault.tickets import StateTickets
from broker.vault.tokens import TokenBox
from net.addresses import AddressTable
from net.client import HttpClient
from net.contexts import ClientContexts
from net.process import complain
from net.resolve import Lookups, SystemResolver
from state.errors import StateError
from state.store import StateStore
from wire.control import (
    HEARTBEAT_SECONDS,
    Frozen,
    LeafRequest,
    Welcome,
    WorkerGone,
    WorkerKey,
    encode,
)
from wire.handoff import KEY_BYTES

ASK_SECONDS = 4.0
"""One question to a secret manager or a token endpoint."""
SWEEP_SECONDS = 1.0
FLOOR_SECONDS = 30.0

Random = Callable[[int], bytes]


class Vault:
    """Made by open_vault. `journal`, `clock` and `random` are passed in, so that tests hold them."""

    def __init__(
        self,
        boot: Boot,
        *,
        state: StateStore,
        store: SecretStore,
        key: StoreKey,
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
        self.table = SandboxTable(random, boot.digest_key)
        self.ledger = Ledger()
        self.frozen = FrozenTable()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._source_threads = ThreadPoolExecutor(8, thread_name_prefix="sources")
        self._keys: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.lost: list[str] = []
        self.memory_locked = False
        """Whether this process is kept out of swap (net.process.keep_in_memory)."""
        self.started_at = clock.wall()
        self.grants = GrantOffice(
            clock=clock, fleet=self.fleet, journal=journal, random=random, within=boot.acknowledge_within
        )
        self.tokens = TokenBox(clock=clock, random=random)
        self._leaves = LeafOffice(authority, clock, self.table, journal)
        # Shorter than a flight of the cache: a silence ends by itself and is told as what it is.
        self.http = HttpClient(
            Lookups(SystemResolver(), clock=clock.boot),
            ClientContexts(),
            self._addresses,
            upstream=boot.upstream,
            seconds=ASK_SECONDS,
        )
        self.exchanger = Exchanger(
            ask=self.http.ask,
            store=store,
            write_back=lambda name, value, credential: self.desk.write_back(name, value, credential),
            journal=journal,
            clock=clock,
            random=lambda: int.from_bytes(random(4)) / 2**32,
            version_key=boot.digest_key,
        )
        self.supply = Supply(
            sources=Sources(
                store=store,
                environment=boot.environment,
                systemd=boot.systemd,
                version_key=boot.digest_key,
                threads=self._source_threads,
                ask=self.http.ask,
                now=clock.wall,
                boot=clock.boot,
            ),
            journal=journal,
            clock=clock,
            random=lambda: int.from_bytes(random(4)) / 2**32,
            version_key=boot.digest_key,
            exchanger=self.exchanger,
        )
        self.desk = Desk(
            settings=Settings(
                store_path=Path(boot.state_dir) / "store.json",
                policy_path=Path(boot.policy_path),
                credentials_path=None if boot.credentials_path is None else Path(boot.credentials_path),
                listener_ports=boot.listener_ports,
                self_addresses=boot.self_addresses,
                internal_ranges=boot.internal_ranges,
                acknowledge_within=boot.acknowledge_within,
                proof_seconds=boot.proof_seconds,
            ),
            state=state,
            store=store,
            key=key,
            table=self.table,
            ledger=self.ledger,
            leaves=self._leaves,
            supply=self.supply,
            frozen=self.frozen,
            brought=Brought(grants=self.grants, tokens=self.tokens),
            fleet=self.fleet,
            journal=journal,
            clock=clock,
            thread=self._thread,
            on_lost=self._on_lost,
            on_policy=self._on_policy,
        )
        self.opener = Opener(
            clock=clock,
            keys=self._keys.get,
            table=self.table,
            ledger=self.ledger,
            grants=self.grants,
            tokens=self.tokens,
            active=self.desk.active,
            supply=self.supply,
            journal=journal,
            tickets=StateTickets(state, self._thread, random),
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
        if (note := self.state.restored_note()) is not None:
            fields = {"action": "store.restored", **note, "subject": f"generation {note.pop('generation')}"}
            await self.journal.append(Event("admin.action", {**fields, "generation": generation}), durable=True)
            self.state.restored_told()
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
        session = Session(self, name, kind)
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
            await self.desk.lapse()
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

    def _on_policy(self, active: ActivePolicy) -> None:
        """A rule that needs the HTTP/2 adapter: the supervisor starts it where it does not run (RULINGS 4.5)."""
        if any(rule.protocol == "h2" for role in active.policy.roles.values() for rule in role.rules):
            report(self.boot, {"adapter": True})

    async def _record_lost(self, name: str) -> None:
        await self.journal.append(Event("process.lost", {"instance": name, "reason": "unacknowledged"}))

    async def _close(self) -> None:
        self.fleet.drain(5.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fleet.close()
        await self.supply.close()
        try:
            await self.journal.append(Event("process.stopped", {"program": "vault", "pid": os.getpid()}), durable=True)
        except AuditUnavailable as error:
            complain("vault", "the stop could not be recorded", error)
        self._thread.shutdown(wait=True)
        self._source_threads.shutdown(wait=False, cancel_futures=True)
        self.state.close()

    def _addresses(self) -> AddressTable:
        """What counts as inside on this node, for questions of our own."""
        return AddressTable(
            internal_ranges=tuple(ip_network(text) for text in self.boot.internal_ranges),
            self_addresses=tuple(ip_network(text) for text in self.boot.self_addresses),
            listener_ports=frozenset(self.boot.listener_ports),
        )

    # what sessions use

    def welcome(self, session: Session) -> None:
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
        for grants in self.grants.known():
            session.channel.send(encode(grants))

    def goodbye(self, session: Session) -> None:
        """The stream is gone: what that worker sealed counts no more."""
        if session.member is not None:
            self.fleet.leave(session.member)
        if session.kind == "worker" and not any(m.name == session.name for m in self.fleet.members("worker")):
            self._keys.pop(session.name, None)
            self.fleet.send(WorkerGone(worker=session.name), self.fleet.members("executor"))

    async def echoed(self, call: Call, hits: int) -> None:
        """An answer held the secret: recorded, counted, and the third in an hour shuts the credential.

        RULINGS 7.1. Shut for this sandbox until it ends, also over a restart.
        """
        box, credential = call.sandbox, call.credential
        await self.journal.append(Event("secret.echoed", {**call.record, "redacted": hits}))
        if not self.ledger.note_echo((box.tenant, box.id), credential, self.clock.boot()):
            return
        now = self.clock.wall()
        await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self.state.disarm(box.tenant, box.id, credential, now)
        )
        await self.journal.append(
            Event("credential.disarmed", {**call.record, "reason": "secret-echoed", "count": ECHO_LIMIT}), durable=True
        )

    async def grant(self, call: Call, addresses: Sequence[str], in_flight: Callable[[], bool]) -> tuple[bool, ...]:
        """Where the answer to `call` leads: what of it the sandbox may fetch from now on, by the policy of the call."""
        active = self.desk.active()
        box = call.permit.sandbox
        known = self.table.get(box.id, box.tenant)
        if active is None or known is None or active.digest != call.record["policy"]:
            return (False,) * len(addresses)
        policy = active.policy

        def still() -> bool:
            return in_flight() and self.desk.active() is active and self.table.get(box.id, box.tenant) is known

        return await self.grants.ask(call.permit, policy, call.record, addresses, still)

    async def keep(self, call: Call, tokens: Sequence[bytes], seconds: int) -> tuple[str, ...]:
        """What the answer to `call` brought: a placeholder for each token; () where none is kept. On record."""
        active = self.desk.active()
        box = call.permit.sandbox
        known = self.table.get(box.id, box.tenant)
        if active is None or known is None or active.digest != call.record["policy"]:
            return ()
        made = self.tokens.keep(call.permit, active.policy, tokens, seconds)
        if made:
            try:
                await self.journal.append(Event("token.kept", {**call.record, "count": len(set(made))}), durable=True)
            except AuditUnavailable:
                return ()  # what nobody was given nobody can use
        return made

    async def orphaned(self, call: Call) -> None:
        """The executor of a recorded intent is gone: the outcome is that nobody knows."""
        await self.journal.append(
            Event("broker.outcome", {**call.record, "error": "executor-lost", "completed": False}), durable=True
        )

    def frozen_by(self, message: Frozen) -> None:
        """A worker froze something of a sandbox; one that is not live is nobody's business any more."""
        owner = (message.tenant, message.sandbox)
        if self.table.get(message.sandbox, message.tenant) is None:
            return
        now = self.clock.boot()
        note = FrozenNote(operation=message.operation, budget=message.budget, until=now + message.seconds)
        self.frozen.note(owner, note, now)

    async def leaf(self, request: LeafRequest, spki: bytes, worker: str) -> bytes:
        return encode(await self._leaves.mint(request, spki, worker))
