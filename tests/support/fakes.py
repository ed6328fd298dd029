"""In-memory doubles of the proxy's ports. Same contracts as the real ones; each can be told to fail or hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from hashlib import sha256

from proxy.brokerlink import BrokerUnavailable, HandoffBroken, HandoffRequest
from proxy.liveset import Live
from proxy.ports import Channel, DirectoryUnavailable, Registered, Snapshot
from rules.facts import Sandbox
from rules.names import SandboxId
from rules.policy import Policy
from wire.handoff import Answer, AnswerEnd, AnswerHead, Refusal

TOKEN = "token-of-box-one"
OTHER_TOKEN = "token-of-box-two"
SHARED = Channel(listener="shared", kind="shared", peer="192.0.2.7")


class ManualClock:
    """A clock that moves when told."""

    def __init__(self, wall: float = 1_800_000_000.0, boot: float = 1000.0) -> None:
        self.now = wall
        self.since_boot = boot

    def wall(self) -> float:
        return self.now

    def boot(self) -> float:
        return self.since_boot

    def advance(self, seconds: float) -> None:
        """Move both clocks."""
        self.now += seconds
        self.since_boot += seconds


class CountingRandom:
    """Random bytes that differ at each call and are the same at each run."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, count: int) -> bytes:
        self.calls += 1
        return sha256(self.calls.to_bytes(8, "big")).digest()[:count]


class MemoryDirectory:
    """A Directory whose snapshot is set by hand. `fail` raises it instead."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.current = snapshot
        self.fail: Exception | None = None

    def snapshot(self) -> Snapshot:
        if self.fail is not None:
            raise self.fail
        if self.current is None:
            raise DirectoryUnavailable("no snapshot was set")
        return self.current


MemoryLiveSet = Live
"""The live set has no outside: the real one is its own fake."""


def sandbox(name: str = "sb_one", *, role: str = "dev", expires_at: float = 4_000_000_000.0, epoch: int = 1) -> Sandbox:
    """One sandbox of the default tenant."""
    return Sandbox(
        tenant="default",
        id=name,
        epoch=epoch,
        role=role,
        owner="owner",
        agent="agent",
        task="task",
        attributes={},
        expires_at=expires_at,
    )


def registered(
    box: Sandbox,
    token: str | None = None,
    *,
    own_listener: bool = False,
    address: str | None = None,
    channel_key: bytes | None = None,
    placeholders: dict[str, str] | None = None,
) -> Registered:
    """How a snapshot knows `box`."""
    return Registered(
        sandbox=box,
        token_sha256=sha256(token.encode()).digest() if token else None,
        own_listener=own_listener,
        address=address,
        channel_key_sha256=sha256(channel_key).digest() if channel_key else None,
        placeholders={name: sha256(value.encode()).digest() for name, value in (placeholders or {}).items()},
    )


def snapshot(policy: Policy, entries: Iterable[Registered], generation: int = 1) -> Snapshot:
    """A snapshot of these sandboxes under `policy`."""
    listed = tuple(entries)
    return Snapshot(
        generation=generation,
        policy=policy,
        sandboxes={SandboxId(entry.sandbox.id): entry for entry in listed},
        by_token={
            entry.token_sha256: SandboxId(entry.sandbox.id) for entry in listed if entry.token_sha256 is not None
        },
    )


class MemoryExchange:
    """A hand-off whose answers were written down before. Records the body that the worker streamed."""

    def __init__(self, answers: Iterable[Answer], *, hang: bool = False, reads_body: bool = False) -> None:
        """`hang`: answers never come after the listed ones. `reads_body`: the head waits for the body's end."""
        self._answers = list(answers)
        self._hang = hang
        self._reads_body = reads_body
        self._whole = asyncio.Event()
        self._gone = asyncio.Event()
        self.body = b""
        self.body_finished = False
        self.cancelled = False
        self.closed = False

    async def send_body(self, data: bytes) -> None:
        if self.closed:
            raise HandoffBroken("closed")
        self.body += data

    async def finish_body(self) -> None:
        self.body_finished = True
        self._whole.set()

    async def receive(self) -> Answer:
        if not self._answers:
            if self._hang:
                await self._gone.wait()
            raise HandoffBroken("the exchange ended early")
        if self._reads_body and isinstance(self._answers[0], AnswerHead):
            await self._whole.wait()
        answer = self._answers.pop(0)
        if isinstance(answer, AnswerEnd | Refusal):
            self._answers.clear()
        return answer

    def cancel(self) -> None:
        self.cancelled = True
        self._gone.set()

    async def close(self) -> None:
        self.closed = True


class MemoryBroker:
    """A BrokerLink. `answer` makes the exchange for one request; `fail` raises instead."""

    def __init__(self, answer: Callable[[HandoffRequest], MemoryExchange] | None = None) -> None:
        self.answer = answer
        self.requests: list[tuple[HandoffRequest, bytes | None]] = []
        self.exchanges: list[MemoryExchange] = []
        self.fail: Exception | None = None
        self.hang = False

    async def open(self, request: HandoffRequest, judged_body: bytes | None = None) -> MemoryExchange:
        if self.hang:
            await asyncio.Event().wait()
        if self.fail is not None:
            raise self.fail
        if self.answer is None:
            raise BrokerUnavailable("no executor")
        self.requests.append((request, judged_body))
        exchange = self.answer(request)
        self.exchanges.append(exchange)
        return exchange
