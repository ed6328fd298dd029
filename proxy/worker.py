"""One worker process: `python -I -m proxy.worker <boot fd>`. Puts the room together and runs it until told to end.

    boot JSON -> harden -> log, vault, executors -> listeners -> front door per connection
    vault: snapshot in force -> rejudge what is live -> acknowledge; cut -> abort -> report; silence -> cut everything
    SIGTERM or Drain: stop accepting, let exchanges end, cut the rest, write every outcome, say goodbye to the log

Rules: it binds nothing it was not told to (RULINGS 9.4); it holds no stored secret (1.1); it dies with no request
whose outcome was not written or could not be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import uvloop
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from audit.events import Event, Value
from audit.journal import AuditUnavailable, Journal
from audit.link import AuditorLink
from net.addresses import AddressTable
from net.answering import StreamAnswers, answer_datagrams
from net.aside import Aside, share_the_interpreter
from net.capture import mark_of, original_destination
from net.contexts import ClientContexts, ServerContexts, client_context
from net.dial import Dialer, SocketDialer
from net.fdchannel import ChannelBroken, FdChannel
from net.framing import FrameStream
from net.pool import Pool, PoolKey
from net.process import BootError, complain, harden, quiet_hooks, read_boot
from net.resolve import Lookups, Resolver, SystemResolver
from net.stream import DEFAULT_LIMITS, SocketStream, open_socket_stream, serve_streams
from net.trust import TrustKey, TrustUnusable, system_bundle_pem
from net.turns import Turns
from net.upstream import UpstreamProxy
from proxy.brokerlink import BrokerLink, SocketBrokerLink
from proxy.clock import SystemClock
from proxy.directory import SnapshotDirectory, SnapshotInvalid, read_snapshot
from proxy.front import FrontDoor, LeafContexts
from proxy.gate import Gate
from proxy.help import HelpHost, HelpTexts
from proxy.lanes.handoff import BrokerLane
from proxy.lanes.http1 import Http1Lane
from proxy.lanes.mitm import MitmLane
from proxy.lanes.tunnel import TunnelLane
from proxy.limits import Budgets, Connections, LimitTable, OnFrozen, RefusalLeaves, RefusalPace
from proxy.liveset import Live
from proxy.ports import Channel, Clock, DirectoryUnavailable, LiveKey, RandomBytes, Snapshot
from proxy.probed import answer_probe
from proxy.recent import RecentRefusals
from proxy.selfcheck import (
    CHECK_SECONDS,
    Bench,
    Failed,
    MakeFront,
    OwnTls,
    Unfinished,
    check_broker,
    self_check,
)
from proxy.stubdns import StubNames, answerer
from proxy.stubs import StubHost
from proxy.vaultchannel import VaultChannel
from rules.decide import decide_tunnel
from rules.decision import TunnelPermit
from rules.facts import TunnelFacts
from rules.lookup import name_exists
from rules.names import OWN_NAME, Host, Owner, SandboxId
from rules.stubs import has_stub
from wire.control import MAX_FROM_VAULT, Claim, Cut, Grants
from wire.dns import Unknown
from wire.probe import MARK

PROCESS: Final = "worker"
REFUSAL_CONTEXTS: Final = 100
"""Contexts of refusal leaves: a small cache of their own (RULINGS 5.6)."""
WATCH_SECONDS: Final = 0.25
PROBE_CONTEXTS: Final = 4
SETTLE_SECONDS: Final = 1.0
EXIT_UNSOUND: Final = 3
"""Exit code of a worker whose self-check failed."""
"""For lanes whose exchange was cut to write its outcome with what they counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One inherited listening socket and what it says about who reaches it."""

    fd: int
    kind: Literal["shared", "sandbox"]
    sandbox: str = ""
    channel_key: str = field(default="", repr=False)
    """Hex."""
    name: str = ""
    use: Literal["proxy", "captured", "dns-tcp", "dns-udp"] = "proxy"
    """`captured`: connections that a redirect inside the sandbox's namespace caught; `dns-*`: its stub resolver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What the supervisor tells a worker. Of each `_fd` and `_path` pair one is set; paths are for containers."""

    name: str
    ca_pem: str
    """The installation's root certificate, for the help host."""
    digest_key: bytes = field(repr=False)
    """Key of keyed digests in records (hex in JSON)."""
    vault_fd: int | None = None
    vault_path: str | None = None
    auditor_fd: int | None = None
    auditor_path: str | None = None
    executor_fds: tuple[int, ...] = ()
    """SEQPACKET sockets to executors."""
    executor_path: str | None = None
    listeners: tuple[Listener, ...] = ()
    listeners_fd: int | None = None
    """SEQPACKET socket on which the supervisor passes more sockets, each with JSON: a listener of a sandbox as {kind:
    "sandbox", sandbox, channel_key}, a channel to the HTTP/2 adapter as {kind: "adapter"}."""
    listen: str | None = None
    """`host:port` to bind a shared listener on, where nobody passes one (containers)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For /env.sh: values with `{ca}`, `{bundle}` and `{proxy}` where the files and the proxy URL go."""
    upstream: UpstreamProxy | None = None
    """The operator's proxy that plain requests and tunnels leave through, with its password."""
    check_seconds: float = CHECK_SECONDS
    """Between two self-checks."""
    workers: int = 1
    """How many there are: budgets are divided by it."""
    drain_seconds: float = 8.0
    ready_fd: int | None = None
    """Written `ready\\n` once a snapshot is in force and the listeners accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What a worker is made of; tests pass their own."""

    clock: Clock
    random: RandomBytes
    journal: Journal
    broker: BrokerLink
    dialer: Dialer
    leaves: LeafContexts
    refusal_leaves: LeafContexts
    claim: Callable[[Claim], None] = lambda _: None
    """Tells the vault what a sandbox says of itself."""
    turns: Turns = field(default_factory=Turns)
    stub_key: bytes = field(default=b"", repr=False)
    """What derived placeholders are made with (rules/stubs.py); empty: there are no stubs."""


class Room:
    """The proxy without its process: everything between an accepted stream and the ports. One event loop."""

    def __init__(
        self,
        ports: Ports,
        directory: SnapshotDirectory,
        texts: HelpTexts,
        *,
        table: LimitTable | None = None,
        workers: int = 1,
        on_frozen: OnFrozen = lambda owner, operation, budget, seconds: None,
        on_fault: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`workers` share the budgets of `table`; `on_frozen` hears what a used-up one froze."""
        table = (table or LimitTable()).part(workers)
        self.directory = directory
        self.clock = ports.clock
        self.live = Live()
        self.recent = RecentRefusals()
        self.budgets = Budgets(table, ports.clock, workers=workers, on_frozen=on_frozen)
        self.leaf_budget = RefusalLeaves(table, ports.clock)
        self.pool = Pool(ports.dialer, clock=ports.clock.boot)
        pace = self.pace = RefusalPace(table, ports.clock, on_frozen=on_frozen)
        self.gate = Gate(
            directory=directory,
            journal=ports.journal,
            clock=ports.clock,
            random=ports.random,
            budgets=self.budgets,
            recent=self.recent,
            table=table,
            pace=pace,
            judging=Aside("judging", turns=ports.turns),
        )
        help_host = HelpHost(texts=texts, directory=directory, recent=self.recent, clock=ports.clock, claim=ports.claim)
        stubs = StubHost(directory=directory, clock=ports.clock, key=ports.stub_key) if ports.stub_key else None
        broker = BrokerLane(gate=self.gate, link=ports.broker, live=self.live)
        self.lane = Http1Lane(
            gate=self.gate,
            pool=self.pool,
            broker=broker,
            live=self.live,
            help_host=help_host,
            pace=pace,
            stubs=stubs,
        )
        self.mitm_lane = MitmLane(
            lane=self.lane,
            random=ports.random,
            table=table,
            turns=ports.turns,
            http_limits=DEFAULT_LIMITS,
            on_fault=on_fault,
        )
        self.names = StubNames()
        self.front = FrontDoor(
            names=self.names,
            turns=ports.turns,
            stubs=stubs,
            gate=self.gate,
            directory=directory,
            clock=ports.clock,
            lane=self.lane,
            tunnel_lane=TunnelLane(gate=self.gate, dialer=ports.dialer, live=self.live, table=table),
            mitm_lane=self.mitm_lane,
            leaves=ports.leaves,
            refusal_leaves=ports.refusal_leaves,
            leaf_budget=self.leaf_budget,
            connections=Connections(table),
            pace=pace,
            live=self.live,
            table=table,
            on_fault=on_fault,
        )

    def enforce(self, snapshot: Snapshot) -> int:
        """Cut what `snapshot`, now in force, no longer allows; return how many."""
        closed = self.live.rejudge(snapshot)
        closed += self.pool.cut(lambda key, address: not self._pooled_allowed(snapshot, key))
        return closed

    def cut(self, message: Cut) -> int:
        """Carry out a cut of the vault."""
        match message.kind:
            case "all":
                return self.cut_all("policy-changing")
            case "sandbox":
                mine = (message.tenant, message.subject)
                self.directory.grants.drop(mine)
                self.budgets.forget(*mine)
                self.leaf_budget.forget(*mine)
                self.pace.forget(*mine)
                self.recent.forget(*mine)
                closed = self.live.cut(lambda key: (key.tenant, key.sandbox) == mine, "sandbox-ended")
                return closed + self.pool.cut(lambda key, _: (key.target.tenant, key.target.sandbox) == mine)
            case "thaw":
                self.budgets.forget(message.tenant, message.subject)
                self.pace.forget(message.tenant, message.subject)
                return 0
            case "credential":
                return self.live.cut(lambda key: key.credential == message.subject, "policy")
            case "policy":
                return self.enforce(self.directory.snapshot())

    def cut_all(self, reason: str) -> int:
        """Cut everything."""
        closed = self.live.cut(lambda key: True, reason)
        return closed + self.pool.cut(lambda key, address: True)

    async def drain(self, seconds: float) -> None:
        """Let exchanges and tunnels end for `seconds`, cut the rest, and write every outcome that is owed."""
        self.lane.draining = self.front.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.live.wait_for(lambda: self.live.count(_is_work) == 0)
        self.cut_all("shutting-down")
        await self.mitm_lane.close()
        await self.gate.settled(SETTLE_SECONDS)
        await self.gate.abandon("shutting-down")
        await self.pool.close()

    def name_exists(self, sandbox: str, host: Host) -> bool:
        """Whether the stub resolver of `sandbox` has an address for `host`. Raises wire.dns.Unknown.

        Our own name has one whatever is in force: by it a probe of ours knows that lookups end here (exeat/proving.py).
        """
        if host.text == OWN_NAME:
            return True
        try:
            snapshot = self.directory.snapshot()
        except DirectoryUnavailable:
            raise Unknown from None
        registered = snapshot.sandboxes.get(SandboxId(sandbox))
        if registered is None:
            raise Unknown
        now, box = self.clock.wall(), registered.sandbox
        granted = snapshot.grants.at((box.tenant, box.id), host, 443, now) is not None
        if granted or has_stub(snapshot.policy, registered.placeholders, host):
            return True
        return name_exists(snapshot.policy, box, host, now)

    def _pooled_allowed(self, snapshot: Snapshot, key: PoolKey) -> bool:
        registered = snapshot.sandboxes.get(SandboxId(key.target.sandbox))
        if registered is None or registered.sandbox.tenant != key.target.tenant:
            return False
        destination = key.target.destination
        facts = TunnelFacts(host=destination.host, port=destination.port)
        answer = decide_tunnel(snapshot.policy, registered.sandbox, facts, self.clock.wall())
        return isinstance(answer, TunnelPermit)


class Worker:
    """The process around a Room: a VaultHandler, the listeners, and the end."""

    def __init__(self, boot: Boot, *, resolver: Resolver | None = None, probed: MakeFront | None = None) -> None:
        """`probed` makes the room that the self-check tries; tests give an unsound one."""
        self._boot = boot
        self._probed = probed or self._probed_front
        self._current = asyncio.Event()
        """Set while a snapshot was ever in force."""
        self._unsound = False
        self._clock = SystemClock()
        self._table = AddressTable()
        self._stop = asyncio.Event()
        self._drain_seconds = boot.drain_seconds
        self._servers: dict[asyncio.Server | asyncio.DatagramTransport, str] = {}
        self._resolver: Resolver = resolver or SystemResolver()
        self._ready = False
        self._notes: set[asyncio.Task[None]] = set()
        self._seen_live: set[str] = set()
        """Sandboxes that the last snapshot held: a listener may come before its sandbox's first snapshot."""

    async def run(self) -> int:
        """Run to the end; return the exit code."""
        boot = self._boot
        directory = self._directory = SnapshotDirectory(self._clock)
        journal = self._journal = _journal(boot)
        turns = Turns()
        link = self._link = SocketBrokerLink(_executors(boot), clock=self._clock, random=os.urandom, turns=turns)
        leaf_key = ec.generate_private_key(ec.SECP256R1())
        spki = leaf_key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        stream = await open_socket_stream(_socket(boot.vault_fd, boot.vault_path))
        vault = VaultChannel(FrameStream(stream, MAX_FROM_VAULT), name=boot.name, spki=spki, handler=self)
        self._vault = vault
        lookups = Lookups(self._resolver, clock=self._clock.boot)
        share_the_interpreter()
        ports = Ports(
            clock=self._clock,
            random=os.urandom,
            journal=journal,
            broker=link,
            dialer=SocketDialer(lookups, ClientContexts(), lambda: self._table, upstream=boot.upstream, turns=turns),
            claim=vault.claimed,
            leaves=ServerContexts(leaf_key, vault.chain, now=self._clock.wall),
            refusal_leaves=ServerContexts(
                leaf_key, vault.refusal_chain, now=self._clock.wall, capacity=REFUSAL_CONTEXTS
            ),
            turns=turns,
            stub_key=boot.digest_key,
        )
        # Leaves of its own: a name of the self-check takes no place among those in use.
        leaves = ServerContexts(leaf_key, vault.chain, now=self._clock.wall, capacity=PROBE_CONTEXTS)
        self._own_tls = OwnTls(leaves=leaves, trust=client_context(TrustKey(ca_pem=boot.ca_pem)))
        texts = HelpTexts(ca_pem=boot.ca_pem, bundle_pem=_bundle(boot.ca_pem), environment=boot.environment)
        self._room = Room(ports, directory, texts, workers=boot.workers, on_frozen=self._tell_frozen, on_fault=_fault)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        tasks = [asyncio.ensure_future(vault.run()), asyncio.ensure_future(self._watch())]
        if boot.listeners_fd is not None:
            tasks.append(asyncio.ensure_future(self._take_listeners(boot.listeners_fd)))
        try:
            await self._say("process.started")
            await self._check(None)
            if self._unsound:
                return EXIT_UNSOUND
            tasks.append(asyncio.ensure_future(self._check_again()))
            for listener in boot.listeners:
                await self._listen(_inherited(listener.fd), listener)
            if boot.listen is not None:
                await self._listen(_bound(boot.listen), Listener(fd=-1, kind="shared", name=boot.listen))
            await self._stop.wait()
            for server in self._servers:
                server.close()
            await self._room.drain(0.0 if self._unsound else self._drain_seconds)
            await self._say("process.stopped")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await journal.close()
        return EXIT_UNSOUND if self._unsound else 0

    # --- the self-check (I28) ---

    async def _check_again(self) -> None:
        """Once the first policy is in force, and every few minutes from then on."""
        await self._current.wait()
        while not self._unsound:
            with contextlib.suppress(DirectoryUnavailable):
                await self._check(self._directory.snapshot())
            await asyncio.sleep(self._boot.check_seconds)

    async def _check(self, in_force: Snapshot | None) -> None:
        try:
            count = await self_check(self._probed, self._clock, in_force, self._own_tls if in_force else None)
            if in_force is not None and (self._boot.executor_fds or self._boot.executor_path):
                count += await check_broker(self._link, in_force.policy.digest)
        except Unfinished as error:
            complain(PROCESS, f"the self-check did not finish ({error}); it will be tried again")
            return
        except Exception as error:  # also one that it did not foresee: what cannot be shown to hold does not
            await self._disarm(error)
            return
        self._vault.checked(True)
        await self._say("selfcheck.passed", count=count)

    async def _disarm(self, error: Exception) -> None:
        """Refuse everything from now on, say so, and end."""
        self._unsound = True
        self._directory.lose()
        self._link.disarm()
        self._room.cut_all("policy-changing")
        why = str(error) if isinstance(error, Failed) else type(error).__name__
        complain(PROCESS, f"the self-check failed, everything is refused: {why}")
        self._vault.checked(False)
        await self._say("selfcheck.failed", detail=why)
        self._stop.set()

    def _probed_front(self, bench: Bench, directory: SnapshotDirectory) -> FrontDoor:
        ports = Ports(
            clock=self._clock,
            random=os.urandom,
            journal=bench,
            broker=bench,
            dialer=bench,
            leaves=bench,
            refusal_leaves=Bench(),
        )
        return Room(ports, directory, HelpTexts(ca_pem="", bundle_pem="", environment={})).front

    # --- the vault's words (proxy.vaultchannel.VaultHandler) ---

    def heard(self) -> None:
        self._directory.beat()

    def welcome(self, name: str, key: bytes) -> None:
        self._link.arm(name, key)

    def floor(self, now_floor: float) -> None:
        self._clock.follow(now_floor)

    async def snapshot(self, generation: int, document: bytes) -> bool:
        try:
            fresh = await asyncio.to_thread(read_snapshot, generation, document, self._directory.policy)
        except SnapshotInvalid as error:
            complain(PROCESS, "a snapshot cannot be read; everything is refused", error)
            self._directory.withdraw()
            self._room.cut_all("policy-changing")
            return False
        in_force = self._directory.install(fresh)
        self._table = fresh.addresses
        self._room.enforce(in_force)
        for server, sandbox in tuple(self._servers.items()):
            if sandbox and SandboxId(sandbox) not in in_force.sandboxes and sandbox in self._seen_live:
                server.close()
                del self._servers[server]
                self._room.names.forget(sandbox)
        self._seen_live = {str(name) for name in in_force.sandboxes}
        self._current.set()
        self._tell_ready()
        return True

    def grants(self, message: Grants) -> None:
        self._directory.grants.key = message.key
        self._directory.grants.put((message.tenant, message.sandbox), message.grants, self._clock.wall())

    async def cut(self, message: Cut) -> int:
        return self._room.cut(message)

    def drain(self, seconds: float) -> None:
        self._drain_seconds = min(seconds, self._drain_seconds)
        self._stop.set()

    def lost(self) -> None:
        self._directory.lose()
        self._link.disarm()
        self._room.cut_all("policy-changing")

    async def _watch(self) -> None:
        """Silence of the vault cuts everything, once per silence (RULINGS 9.5)."""
        cut = True
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if not self._directory.silent:
                cut = False
            elif not cut:
                self._room.cut_all("policy-changing")
                cut = True

    # --- listeners ---

    async def _listen(self, sock: socket.socket, listener: Listener) -> None:
        channel = Channel(
            listener=listener.name or listener.sandbox or "shared",
            kind=listener.kind,
            sandbox=SandboxId(listener.sandbox) if listener.sandbox else None,
            key=bytes.fromhex(listener.channel_key),
        )

        if listener.use.startswith("dns-") and not self._room.names.admit(listener.sandbox):
            complain(PROCESS, "too many sandboxes have a stub resolver; this one looks up nothing")
        exists = partial(self._room.name_exists, listener.sandbox)
        stub = answerer(self._room.names, listener.sandbox, self._room.clock.boot, exists)
        stub_streams = StreamAnswers(stub)

        async def accepted(stream: SocketStream) -> None:
            if channel.key and mark_of(stream) == MARK:
                await answer_probe(stream, channel.key)
                return
            arrived = replace(channel, peer=peer_address(stream.peer))
            match listener.use:
                case "proxy":
                    await self._room.front.serve(stream, arrived)
                case "captured":
                    await self._room.front.serve_captured(stream, arrived, original_destination(stream))
                case "dns-tcp":
                    await stub_streams.serve(stream)
                case "dns-udp":
                    raise ValueError("a datagram socket accepts nothing")

        if listener.use == "dns-udp":
            self._servers[await answer_datagrams(sock, stub)] = listener.sandbox
        else:
            self._servers[await serve_streams(sock, accepted, on_fault=_fault)] = listener.sandbox

    async def _take_listeners(self, fd: int) -> None:
        """Listeners out of sandboxes' own namespaces, passed by the supervisor (RULINGS 11.9), and the adapter."""
        passed = FdChannel(_inherited(fd), channels_too=True)
        with contextlib.suppress(ChannelBroken):
            while (taken := await passed.receive()) is not None:
                message, sock = taken
                try:
                    said = json.loads(message)
                    if (sock.type == socket.SOCK_SEQPACKET) != (said["kind"] == "adapter"):
                        raise ValueError("a socket of another kind than said")
                    if said["kind"] == "adapter":
                        self._room.mitm_lane.attach(sock)
                        continue
                    listener = Listener(
                        fd=-1,
                        kind="sandbox",
                        sandbox=str(said["sandbox"]),
                        channel_key=str(said["channel_key"]),
                        name=str(said["sandbox"]),
                        use=_use(said.get("use", "proxy"), sock),
                    )
                    sock.setblocking(False)
                    await self._listen(sock, listener)
                except Exception as error:
                    complain(PROCESS, "a passed socket was not usable", error)
                    sock.close()

    def _tell_ready(self) -> None:
        if self._boot.ready_fd is not None and not self._ready:
            self._ready = True
            with contextlib.suppress(OSError):
                os.write(self._boot.ready_fd, b"ready\n")
                os.close(self._boot.ready_fd)

    def _tell_frozen(self, owner: Owner, operation: str, budget: str, seconds: int) -> None:
        """A used-up budget froze something: on record, and in `exeat sandbox show`."""
        self._vault.frozen(owner, operation, budget, seconds)
        tenant, sandbox = owner
        fields: dict[str, Value | list[str] | None] = {"tenant": tenant, "sandbox": sandbox, "reason": "limit-reached"}
        fields |= {"operation": operation or None, "detail": budget, "ttl_s": seconds}
        task = asyncio.ensure_future(self._note(Event("sandbox.frozen", fields)))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def _note(self, event: Event) -> None:
        with contextlib.suppress(AuditUnavailable):  # what is refused for it is recorded all the same
            await self._journal.append(event)

    async def _say(self, name: str, **more: str | int) -> None:
        mine: dict[str, str | int] = {"program": PROCESS, "instance": self._boot.name, **more}
        mine |= {"pid": os.getpid(), "uid": os.getuid()}
        try:
            await self._journal.append(Event(name, {**mine}))
        except AuditUnavailable:
            complain(PROCESS, f"{name} could not be written to the log")


def peer_address(peer: str) -> str:
    """The address of `address:port`; empty for Unix sockets."""
    return peer.rpartition(":")[0].strip("[]")


def main(argv: list[str] | None = None) -> int:
    """The process."""
    arguments = sys.argv if argv is None else argv
    quiet_hooks(PROCESS)
    try:
        harden()
        boot = read_boot(int(arguments[1]), Boot)
    except (BootError, IndexError, ValueError, OSError) as error:
        complain(PROCESS, f"cannot start: {error}" if isinstance(error, BootError) else "cannot start", error)
        return 2
    return uvloop.run(_main(boot))


async def _main(boot: Boot) -> int:
    try:
        return await Worker(boot).run()
    except (OSError, TrustUnusable) as error:
        complain(PROCESS, "stopped", error)
        return 1


def _is_work(key: LiveKey) -> bool:
    return key.kind != "connection" and bool(key.rule)


def _fault(error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        return  # the worker is stopping; the lane has recorded the outcome
    complain(PROCESS, "a connection ended by an unexpected error", error)


def _journal(boot: Boot) -> AuditorLink:
    if boot.auditor_path is not None:
        return AuditorLink.open_path(boot.auditor_path, boot.name, boot.digest_key)
    return AuditorLink(_socket(boot.auditor_fd, None), boot.name, boot.digest_key)


def _executors(boot: Boot) -> list[FdChannel]:
    channels = [FdChannel(_inherited(fd)) for fd in boot.executor_fds]
    if boot.executor_path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(boot.executor_path)
        channels.append(FdChannel(sock))
    return channels


def _socket(fd: int | None, path: str | None) -> socket.socket:
    if fd is not None:
        return _inherited(fd)
    if path is None:
        raise OSError("neither descriptor nor path was given")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    sock.setblocking(False)
    return sock


def _inherited(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def _use(said: object, sock: socket.socket) -> Literal["proxy", "captured", "dns-tcp", "dns-udp"]:
    """What a passed socket is for. Raises ValueError where the socket is of another type than its use wants."""
    if said not in ("proxy", "captured", "dns-tcp", "dns-udp"):
        raise ValueError("a socket for an unknown use")
    if (sock.type == socket.SOCK_DGRAM) != (said == "dns-udp"):
        raise ValueError("a socket of another type than its use")
    return said


def _bound(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP by name: asyncio sets TCP_NODELAY only then (RULINGS 11.8).
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, int(port)))
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def _bundle(ca_pem: str) -> str:
    try:
        return system_bundle_pem().rstrip() + "\n" + ca_pem
    except TrustUnusable:
        return ca_pem


if __name__ == "__main__":
    sys.exit(main())
