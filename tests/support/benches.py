"""An executor between a worker's link and a scripted origin, in one process, under a vault that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

from broker.executor import Executor
from broker.vaultlink import ExecutorSnapshot, VaultUnavailable
from net.addresses import AddressTable
from net.dial import Connected, DialError, DialTarget
from net.fdchannel import FdChannel, channel_pair
from net.framing import FrameStream
from net.pool import Pool
from net.stream import StreamBroken, open_socket_stream
from proxy.brokerlink import HandoffBroken, HandoffExchange, HandoffRequest, SocketBrokerLink
from rules.facts import BodyAttested, Sandbox
from rules.policy import Policy
from tests.support.calls import CANARY, KEY
from tests.support.calls import request as handoff_request
from tests.support.fakes import CountingRandom, ManualClock, sandbox
from tests.support.journal import MemoryJournal
from tests.support.streams import MemoryStream
from wire.control import Cut, Done, Echo, Opened, OpenRefused
from wire.handoff import Answer, AnswerAbort, AnswerData, AnswerEnd, AnswerHead, Refusal, open_sealed


class Origin:
    """A Dialer whose far end is a function over the raw stream. `seen` is every byte that came."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.dialled: list[DialTarget] = []
        self.script: Callable[[Origin, MemoryStream], Awaitable[None]] = answer(b"HTTP/1.1 204 No Content\r\n\r\n")
        self.fail: DialError | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.gone = asyncio.Event()

    def via(self, target: DialTarget) -> str:
        return ""

    async def dial(self, target: DialTarget) -> Connected:
        self.dialled.append(target)
        if self.fail is not None:
            raise self.fail
        ours, theirs = MemoryStream.pair()
        task = asyncio.get_running_loop().create_task(self._run(theirs))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return Connected(stream=ours, address="203.0.113.7", tls_version="TLSv1.3")

    async def _run(self, stream: MemoryStream) -> None:
        try:
            await self.script(self, stream)
        except StreamBroken:
            self.gone.set()

    async def until(self, stream: MemoryStream, end: bytes) -> None:
        """Read until `end` was seen."""
        while end not in self.seen:
            data = await stream.receive()
            if not data:
                self.gone.set()
                raise StreamBroken("closed")
            self.seen += data


def answer(raw: bytes) -> Callable[[Origin, MemoryStream], Awaitable[None]]:
    """A script that reads one head and writes `raw`."""

    async def script(origin: Origin, stream: MemoryStream) -> None:
        await origin.until(stream, b"\r\n\r\n")
        stream.write(raw)
        await stream.receive()

    return script


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer with a length."""
    lines = [b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


@dataclass
class FakeVault:
    """Opens what the policy permits, as the vault would, or says what it is told to."""

    current: ExecutorSnapshot | None
    opened: list[tuple[bytes, BodyAttested | None]] = field(default_factory=list)
    answer: Callable[[int], Opened | OpenRefused] | None = None
    dones: list[Done] = field(default_factory=list)
    echoes: list[Echo] = field(default_factory=list)
    secret: bytes = CANARY
    key: bytes | None = KEY
    silent: bool = False
    journal: MemoryJournal | None = None

    def snapshot(self) -> ExecutorSnapshot:
        if self.current is None:
            raise VaultUnavailable
        return self.current

    def worker_key(self, worker: str) -> bytes | None:
        return self.key if worker == "worker-1" else None

    async def open(self, sealed: bytes, attested: BodyAttested | None, again: int = 0) -> Opened | OpenRefused:
        self.opened.append((sealed, attested))
        if self.silent:
            raise VaultUnavailable
        if self.answer is not None:
            return self.answer(len(self.opened))
        statement = open_sealed(sealed, KEY)
        assert self.current is not None
        return Opened(
            id=len(self.opened),
            rule=statement.rule,
            operation=statement.operation,
            policy_digest=self.current.policy.digest,
            credential=statement.credential,
            version="3",
            owner="team",
            parts=(("value", self.secret),),
        )

    def done(self, message: Done) -> None:
        self.dones.append(message)

    def echoed(self, message: Echo) -> None:
        self.echoes.append(message)


@dataclass
class Bench:
    """Worker link, executor, origin, vault and journal, joined as processes would be."""

    link: SocketBrokerLink
    executor: Executor
    origin: Origin
    vault: FakeVault
    journal: MemoryJournal
    clock: ManualClock
    box: Sandbox
    policy: Policy
    served: set[asyncio.Task[None]]

    def request(self, path: str = "/orders/7", **changes: object) -> HandoffRequest:
        """A hand-off as the gate makes it."""
        base = handoff_request(self.box, self.policy.digest, path)
        return replace(base, **changes)  # type: ignore[arg-type]

    async def ask(self, request: HandoffRequest, judged: bytes | None = None) -> list[Answer]:
        """Everything that the executor answers."""
        exchange = await self.link.open(request, judged)
        return await drain(exchange)

    async def settled(self) -> None:
        """Wait until nothing runs and outcomes are written."""
        while self.served:
            await asyncio.wait(set(self.served))
        await self.executor.settle()


async def drain(exchange: HandoffExchange) -> list[Answer]:
    """All answers to the end, or up to where the hand-off breaks."""
    answers: list[Answer] = []
    try:
        while True:
            answers.append(await exchange.receive())
            if isinstance(answers[-1], AnswerEnd | AnswerAbort | Refusal):
                return answers
    except HandoffBroken:
        return answers
    finally:
        await exchange.close()


def body_of(answers: list[Answer]) -> bytes:
    """The answer's body."""
    return b"".join(item.data for item in answers if isinstance(item, AnswerData))


def head_of(answers: list[Answer]) -> AnswerHead:
    """The answer's head."""
    (head,) = [item for item in answers if isinstance(item, AnswerHead)]
    return head


@contextlib.asynccontextmanager
async def running(compiled: Policy) -> AsyncIterator[Bench]:
    """One of everything under `compiled`, ended afterwards."""
    box = sandbox()
    journal = MemoryJournal()
    clock = ManualClock()
    origin = Origin()
    snapshot = ExecutorSnapshot(
        generation=1, policy=compiled, sandboxes={(box.tenant, box.id): box}, addresses=AddressTable()
    )
    vault = FakeVault(snapshot, journal=journal)
    pool = Pool(origin, clock=clock.boot)
    executor = Executor(vault=vault, pool=pool, journal=journal, clock=clock)  # type: ignore[arg-type]
    near, far = channel_pair()
    link = SocketBrokerLink([FdChannel(near)], clock=clock, random=CountingRandom())
    link.arm("worker-1", KEY)
    channel = FdChannel(far)
    served: set[asyncio.Task[None]] = set()

    async def accept() -> None:
        while (passed := await channel.receive()) is not None:
            stream = await open_socket_stream(passed[1])
            task = asyncio.get_running_loop().create_task(executor.serve(FrameStream(stream)))
            served.add(task)
            task.add_done_callback(served.discard)

    accepting = asyncio.get_running_loop().create_task(accept())
    made = Bench(link, executor, origin, vault, journal, clock, box, compiled, served)
    try:
        yield made
    finally:
        await executor.cut(Cut(id=0, kind="all"))
        await made.settled()
        await pool.close()
        accepting.cancel()
        await asyncio.gather(accepting, *origin.tasks, return_exceptions=True)
        channel.close()
        for held in link._channels:
            held.close()
