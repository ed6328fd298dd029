"""A worker's side of the vault's control stream: snapshots, heartbeats, cuts, leaves (RULINGS 9.5).

Rules: every frame proves that the vault lives, and is noted as soon as it is read, also while a snapshot is still
being compiled. What frames ask for is done in their order: a Cut that follows a Snapshot sees that snapshot. A cut is
reported done after everything that it matched was aborted. The stream's end denies everything from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Final, Protocol, assert_never

from net.framing import FrameStream
from net.stream import StreamBroken
from rules.names import Host, Owner
from wire.control import (
    Ack,
    Checked,
    Claim,
    Cut,
    CutDone,
    Drain,
    FromVault,
    Frozen,
    Granted,
    Grants,
    GrantsTaken,
    Heartbeat,
    Hello,
    Kept,
    Leaf,
    LeafRefused,
    LeafRequest,
    Opened,
    OpenRefused,
    Snapshot,
    ToVault,
    Welcome,
    WorkerGone,
    WorkerKey,
    decode_from_vault,
    encode,
)
from wire.frames import WireError

LEAF_SECONDS: Final = 4.0
MAX_QUEUED: Final = 64
"""Messages of the vault that wait while one is carried out; beyond, the vault is not read and will notice."""


class VaultHandler(Protocol):
    """What the channel tells the worker."""

    def heard(self) -> None:
        """The vault lives."""

    def welcome(self, name: str, key: bytes) -> None:
        """Our name, and the key that seals hand-offs."""

    def floor(self, now_floor: float) -> None:
        """The highest wall time ever recorded."""

    async def snapshot(self, generation: int, document: bytes) -> bool:
        """Put it in force; False where it cannot be read (it is then not acknowledged)."""

    def grants(self, message: Grants) -> None:
        """What redirects opened."""

    async def cut(self, message: Cut) -> int:
        """Close what matches; return how many."""

    def drain(self, seconds: float) -> None:
        """Accept nothing new and end within `seconds`."""

    def lost(self) -> None:
        """The channel ended: deny everything."""


class VaultChannel:
    """`run` until the stream ends; `chain` asks for leaves meanwhile."""

    def __init__(self, frames: FrameStream, *, name: str, spki: bytes, handler: VaultHandler) -> None:
        self._frames = frames
        self._name = name
        self._spki = spki
        self._handler = handler
        self._ids = itertools.count(1)
        self._leaves: dict[int, asyncio.Future[str]] = {}
        self._queue: asyncio.Queue[FromVault] = asyncio.Queue(MAX_QUEUED)

    async def run(self) -> None:
        """Say hello and serve the stream. Returns when it ended; the handler was told `lost` then."""
        self._send(Hello(kind="worker", name=self._name, spki=self._spki))
        carrying_out = asyncio.ensure_future(self._carry_out())
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait({carrying_out, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (carrying_out, reading):
                task.cancel()
            await asyncio.gather(carrying_out, reading, return_exceptions=True)
            for waiting in self._leaves.values():
                if not waiting.done():
                    waiting.set_exception(ValueError("the vault is gone"))
                    waiting.exception()
            self._frames.abort()
            self._handler.lost()

    async def chain(self, host: Host, owner: Owner | None) -> str:
        """The certificate chain of `host` for our leaf key. Raises ValueError, TimeoutError."""
        return await self._ask(host, owner, refusal=False)

    async def refusal_chain(self, host: Host, owner: Owner | None) -> str:
        """`chain` for a leaf that only carries a refusal: it draws on a small budget of its own."""
        return await self._ask(host, owner, refusal=True)

    def checked(self, passed: bool) -> None:
        """Tell what the self-check found, for status."""
        with contextlib.suppress(StreamBroken):  # a vault that is gone has denied everything already
            self._send(Checked(passed=passed))

    def claimed(self, claim: Claim) -> None:
        """Tell what a sandbox says of itself."""
        with contextlib.suppress(StreamBroken):
            self._send(claim)

    def frozen(self, owner: Owner, operation: str, budget: str, seconds: int) -> None:
        """Tell what a used-up budget froze, for people who ask."""
        tenant, sandbox = owner
        with contextlib.suppress(StreamBroken):
            self._send(
                Frozen(tenant=tenant, sandbox=sandbox, operation=operation[:256], budget=budget, seconds=seconds)
            )

    async def _ask(self, host: Host, owner: Owner | None, *, refusal: bool) -> str:
        number = next(self._ids)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._leaves[number] = answer
        tenant, sandbox = owner or ("", "")
        try:
            self._send(LeafRequest(id=number, host=host.text, tenant=tenant, sandbox=sandbox, refusal=refusal))
            async with asyncio.timeout(LEAF_SECONDS):
                return await answer
        finally:
            self._leaves.pop(number, None)

    async def _read(self) -> None:
        try:
            while (frame := await self._frames.receive()) is not None:
                self._handler.heard()
                message = decode_from_vault(frame)
                match message:
                    case Heartbeat():
                        self._handler.floor(message.now_floor)
                    case Leaf():
                        self._answer_leaf(message.id, message.chain_pem.decode("ascii"))
                    case LeafRefused():
                        self._answer_leaf(message.id, None)
                    case _:
                        await self._queue.put(message)
        except (StreamBroken, WireError, UnicodeDecodeError):
            return

    async def _carry_out(self) -> None:
        while True:
            message = await self._queue.get()
            match message:
                case Welcome():
                    self._handler.welcome(message.name, message.key)
                case Snapshot():
                    if await self._handler.snapshot(message.generation, message.document):
                        self._send(Ack(generation=message.generation))
                case Grants():
                    self._handler.grants(message)
                    self._send(GrantsTaken(id=message.id))
                case Cut():
                    closed = await self._handler.cut(message)
                    self._send(CutDone(id=message.id, closed=closed))
                case Drain():
                    self._handler.drain(message.seconds)
                case Heartbeat() | Leaf() | LeafRefused():
                    pass  # answered while reading
                case WorkerKey() | WorkerGone() | Opened() | OpenRefused() | Granted() | Kept():
                    return  # for executors: a vault that mistakes us for one is not followed
                case _:
                    assert_never(message)

    def _answer_leaf(self, number: int, chain: str | None) -> None:
        waiting = self._leaves.get(number)
        if waiting is None or waiting.done():
            return
        if chain is None:
            waiting.set_exception(ValueError("the vault refused a leaf"))
        else:
            waiting.set_result(chain)

    def _send(self, message: ToVault) -> None:
        self._frames.send(encode(message))
