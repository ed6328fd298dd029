"""An executor's side of the vault's control stream: the snapshot in force, worker keys, and `open`.

Rules (RULINGS 9.3, 9.5): without a snapshot, or after SILENCE_SECONDS without a word of the vault, nothing is
answered but VaultUnavailable. A snapshot is acknowledged when it is in force here, a cut when it was carried out. A
snapshot that does not compile leaves none in force.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Any, Protocol, assert_never

from broker.errors import BrokerError
from broker.vault.clock import Clock
from net.addresses import AddressTable
from net.framing import FrameStream
from net.process import complain
from net.stream import StreamBroken
from rules.compile import DocumentFault, compile_policy
from rules.facts import BodyAttested, Sandbox
from rules.grants import GrantBook
from rules.names import Owner
from rules.policy import Policy
from wire.control import (
    SILENCE_SECONDS,
    Ack,
    Cut,
    CutDone,
    Done,
    Drain,
    Echo,
    FromVault,
    GrantAsk,
    Granted,
    Grants,
    GrantsTaken,
    Heartbeat,
    Hello,
    Keep,
    Kept,
    Leaf,
    LeafRefused,
    Open,
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

GRANT_SECONDS = 6.0
"""Longest wait for a grant: a durable record, and every process taking it up. Then there is none."""
OPEN_SECONDS = 10.0
"""Longest wait for the vault's word on one hand-off; its own deadline is shorter."""


class VaultUnavailable(BrokerError):
    """The vault does not answer, or there is no snapshot to decide from: refuse."""

    def __init__(self) -> None:
        super().__init__("broker-unavailable", "the vault does not answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSnapshot:
    """What one hand-off is judged by: one policy version, the live sandboxes, our own addresses."""

    generation: int
    policy: Policy
    sandboxes: Mapping[Owner, Sandbox]
    """By (tenant, sandbox id)."""
    addresses: AddressTable
    grants: GrantBook = field(default_factory=GrantBook)
    """What redirects opened; the same book in every snapshot."""


class Vault(Protocol):
    """What the executor asks of the vault. VaultLink is the real one; the fake is in the executor's tests."""

    def snapshot(self) -> ExecutorSnapshot:
        """The snapshot in force. Raises VaultUnavailable."""
        ...

    def worker_key(self, worker: str) -> bytes | None:
        """The key of this boot that verifies statements of `worker`, or None for an unknown one."""
        ...

    async def open(self, sealed: bytes, attested: BodyAttested | None, again: int = 0) -> Opened | OpenRefused:
        """The vault's last word on one statement. Raises VaultUnavailable.

        `again`: the id of an Opened that was `renewable` and that the upstream refused.
        """
        ...

    async def grant(self, call: int, addresses: tuple[str, ...]) -> tuple[bool, ...]:
        """Which of the addresses that the answer to Open `call` leads to are granted, in order. Never raises."""
        ...

    async def keep(self, call: int, tokens: tuple[bytes, ...], seconds: int) -> tuple[str, ...]:
        """A placeholder for each token that the answer to Open `call` brought; () where none is kept."""
        ...

    def done(self, message: Done) -> None:
        """The call is over and its material dropped."""
        ...

    def echoed(self, message: Echo) -> None:
        """The answer held the secret."""
        ...


class VaultLink:
    """The Vault over an inherited stream. `run` reads it until it ends; everything else works while it runs."""

    def __init__(
        self,
        frames: FrameStream,
        *,
        name: str,
        clock: Clock,
        on_cut: Callable[[Cut], Awaitable[int]],
        on_drain: Callable[[float], None],
        on_floor: Callable[[float], None] = lambda floor: None,
    ) -> None:
        """`on_cut` closes what matches and returns how many; `on_drain` starts the end within that many seconds;
        `on_floor` hears the highest wall time that the vault recorded."""
        self._frames = frames
        self._name = name
        self._clock = clock
        self._on_cut = on_cut
        self._on_drain = on_drain
        self._on_floor = on_floor
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Opened | OpenRefused]] = {}
        self._asking: dict[int, asyncio.Future[Granted | Kept]] = {}
        self._grants = GrantBook()
        self._keys: dict[str, bytes] = {}
        self._snapshot: ExecutorSnapshot | None = None
        self._heard = clock.boot()
        self._cuts: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Say hello and follow the vault until the stream ends. Raises StreamBroken or WireError; never returns."""
        self._send(Hello(kind="executor", name=self._name))
        try:
            while True:
                frame = await self._frames.receive()
                if frame is None:
                    raise StreamBroken("closed", "the vault ended the control stream")
                self._heard = self._clock.boot()
                await self._take(decode_from_vault(frame))
        finally:
            self._snapshot = None
            self._keys.clear()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(VaultUnavailable())
                    waiting.exception()  # nobody may be left to look at it
            self._waiting.clear()
            for asking in self._asking.values():
                asking.cancel()
            self._asking.clear()
            for cut in self._cuts:
                cut.cancel()

    @property
    def silent(self) -> bool:
        """True when the vault was not heard for SILENCE_SECONDS: everything must be cut."""
        return self._clock.boot() - self._heard > SILENCE_SECONDS

    def snapshot(self) -> ExecutorSnapshot:
        if self._snapshot is None or self.silent:
            raise VaultUnavailable
        return self._snapshot

    def worker_key(self, worker: str) -> bytes | None:
        return self._keys.get(worker)

    async def open(self, sealed: bytes, attested: BodyAttested | None, again: int = 0) -> Opened | OpenRefused:
        if self._snapshot is None or self.silent:
            raise VaultUnavailable
        number = next(self._ids)
        answer: asyncio.Future[Opened | OpenRefused] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(Open(id=number, sealed=sealed, attested=attested, again=again))
            async with asyncio.timeout(OPEN_SECONDS):
                await self._frames.drain()
                return await answer
        except (TimeoutError, StreamBroken):
            raise VaultUnavailable from None
        finally:
            self._waiting.pop(number, None)

    async def grant(self, call: int, addresses: tuple[str, ...]) -> tuple[bool, ...]:
        answer = await self._ask(lambda number: GrantAsk(id=number, call=call, addresses=addresses))
        if isinstance(answer, Granted) and len(answer.made) == len(addresses):
            return answer.made
        return (False,) * len(addresses)

    async def keep(self, call: int, tokens: tuple[bytes, ...], seconds: int) -> tuple[str, ...]:
        answer = await self._ask(lambda number: Keep(id=number, call=call, tokens=tokens, seconds=seconds))
        if isinstance(answer, Kept) and len(answer.placeholders) == len(tokens):
            return answer.placeholders
        return ()

    async def _ask(self, made: Callable[[int], GrantAsk | Keep]) -> Granted | Kept | None:
        """What the vault answers about a call in flight; None where it does not, in time."""
        if self._snapshot is None or self.silent:
            return None
        number = next(self._ids)
        answer: asyncio.Future[Granted | Kept] = asyncio.get_running_loop().create_future()
        self._asking[number] = answer
        try:
            self._send(made(number))
            async with asyncio.timeout(GRANT_SECONDS):
                await self._frames.drain()
                return await answer
        except (TimeoutError, StreamBroken):
            return None
        finally:
            self._asking.pop(number, None)

    def done(self, message: Done) -> None:
        self._send(message)

    def echoed(self, message: Echo) -> None:
        self._send(message)

    def _send(self, message: ToVault) -> None:
        self._frames.send(encode(message))

    async def _take(self, message: FromVault) -> None:
        match message:
            case Snapshot():
                await self._install(message)
            case Heartbeat():
                self._on_floor(message.now_floor)
            case Welcome() | Leaf() | LeafRefused():
                pass
            case WorkerKey():
                self._keys[message.worker] = message.key
            case WorkerGone():
                self._keys.pop(message.worker, None)
            case Opened() | OpenRefused():
                waiting = self._waiting.get(message.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
                elif isinstance(message, Opened):
                    # Whoever asked has left: the vault must not believe that this call was made.
                    self._send(Done(id=message.id, sent=False))
            case Granted() | Kept():
                asking = self._asking.get(message.id)
                if asking is not None and not asking.done():
                    asking.set_result(message)
            case Grants():
                self._grants.key = message.key
                self._grants.put((message.tenant, message.sandbox), message.grants, self._clock.wall())
                self._send(GrantsTaken(id=message.id))
            case Cut():
                if message.kind == "sandbox":
                    self._grants.drop((message.tenant, message.subject))
                task = asyncio.get_running_loop().create_task(self._cut(message))
                self._cuts.add(task)
                task.add_done_callback(self._cuts.discard)
            case Drain():
                self._on_drain(message.seconds)
            case _:
                assert_never(message)

    async def _install(self, message: Snapshot) -> None:
        try:
            known = None if self._snapshot is None else self._snapshot.policy
            fresh = await asyncio.to_thread(read_snapshot, message, known)
        except (DocumentFault, ValueError, KeyError, TypeError) as error:
            complain("executor", "a snapshot could not be used; everything is refused", error)
            self._snapshot = None
            return
        finally:
            self._heard = self._clock.boot()
        self._snapshot = replace(fresh, grants=self._grants)
        self._send(Ack(generation=message.generation))

    async def _cut(self, message: Cut) -> None:
        try:
            closed = await self._on_cut(message)
        except (
            Exception
        ) as error:  # without CutDone the vault kills this process, which is what an unclosed call asks for
            complain("executor", "a cut failed", error)
            return
        self._send(CutDone(id=message.id, closed=closed))


def read_snapshot(message: Snapshot, known: Policy | None = None) -> ExecutorSnapshot:
    """Return the executor's view of a snapshot document (broker/vault/snapshot.py).

    `known` is reused where its digest is the document's: a new sandbox compiles no policy anew.
    Raises DocumentFault, ValueError, KeyError or TypeError for anything that is not exactly that.
    """
    document: dict[str, Any] = json.loads(message.document)
    if document["generation"] != message.generation:
        raise ValueError("the snapshot names another generation")
    policy = known if known is not None and known.digest == document["digest"] else compile_policy(document["document"])
    if policy.digest != document["digest"]:
        raise ValueError("the snapshot names another policy digest")
    own = document["self"]
    sandboxes = {}
    for item in document["sandboxes"]:
        sandbox = Sandbox(
            tenant=item["tenant"],
            id=item["id"],
            epoch=item["epoch"],
            role=item["role"],
            owner=item["owner"],
            agent=item["agent"],
            task=item["task"],
            attributes=item["attributes"],
            expires_at=float(item["expires_at"]),
        )
        sandboxes[sandbox.tenant, sandbox.id] = sandbox
    return ExecutorSnapshot(
        generation=message.generation,
        policy=policy,
        sandboxes=sandboxes,
        addresses=AddressTable(
            own=frozenset(),
            internal_ranges=tuple(ip_network(text) for text in own.get("internal_ranges", ())),
            self_addresses=tuple(ip_network(text) for text in own["addresses"]),
            listener_ports=frozenset(own["listener_ports"]),
        ),
    )
