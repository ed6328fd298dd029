"""`Fleet`: the workers and executors on their control streams: snapshots, heartbeats, cuts, and who acknowledged.

A change counts as done only when every process acknowledged the new generation, and a tightening only when every
one also reported what it closed (RULINGS 9.5). Who does not within the bound is named, to be killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from wire.control import Ack, Cut, CutDone, CutKind, Drain, FromVault, Heartbeat, Snapshot, encode

MAX_UNSENT = 80 << 20
"""Bytes that may wait for a process that does not read: a whole snapshot and some; beyond, its stream is closed."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One connected process. `send` writes bytes to its stream without waiting; `close` drops the stream."""

    name: str
    kind: str
    send: Callable[[bytes], None]
    close: Callable[[], None]
    unsent: Callable[[], int]
    generation: int = 0
    cuts: set[int] = field(default_factory=set)
    """Cuts not yet reported done, and grants not yet taken up."""
    checked: tuple[bool, float] | None = None
    """A worker's last self-check: whether it passed, and when (wall time)."""


class Fleet:
    """All members. Used from the vault's loop only."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._changed = asyncio.Event()
        self._cut_id = 0

    def join(self, member: Member) -> None:
        """A process said hello. One of the same name that is still here is closed: a restart replaces it."""
        for old in [old for old in self._members if old.name == member.name]:
            self.leave(old)
            old.close()
        self._members.append(member)

    def leave(self, member: Member) -> None:
        if member in self._members:
            self._members.remove(member)
        self._wake()

    def members(self, kind: str | None = None) -> tuple[Member, ...]:
        return tuple(member for member in self._members if kind in (None, member.kind))

    def send(self, message: FromVault, to: Iterable[Member] | None = None) -> None:
        """Encode once, write to each. A member that does not read is closed: it will miss heartbeats and stop."""
        raw = encode(message)
        for member in tuple(self._members if to is None else to):
            if member.unsent() > MAX_UNSENT:
                self.leave(member)
                member.close()
            else:
                member.send(raw)

    async def push(self, snapshot: Snapshot, within: float) -> tuple[str, ...]:
        """Send a snapshot, executors first (RULINGS 9.5), and return the names that did not acknowledge in time.

        Workers get it after the executors acknowledged (or half the bound passed): new policy reaches the broker
        first.
        """
        ends = asyncio.get_running_loop().time() + within
        executors = self.members("executor")
        self.send(snapshot, executors)
        await self._until(lambda: self._behind(snapshot.generation, "executor") == (), within / 2)
        self.send(snapshot, self.members("worker"))
        await self._until(lambda: self._behind(snapshot.generation) == (), ends - asyncio.get_running_loop().time())
        return self._behind(snapshot.generation)

    async def cut(self, kind: CutKind, tenant: str, subject: str, within: float) -> tuple[str, ...]:
        """Have everything that matches closed, and return the names that did not report it in time."""
        return await self.tell(lambda number: Cut(id=number, kind=kind, tenant=tenant, subject=subject), within)

    async def tell(self, made: Callable[[int], FromVault], within: float) -> tuple[str, ...]:
        """Send what `made` makes of a number to everybody, and return who did not say in time that it is in force."""
        self._cut_id += 1
        number = self._cut_id
        members = self.members()
        for member in members:
            member.cuts.add(number)
        self.send(made(number), members)

        def late() -> tuple[str, ...]:
            return tuple(member.name for member in members if number in member.cuts and member in self._members)

        await self._until(lambda: late() == (), within)
        missing = late()
        for member in members:
            member.cuts.discard(number)
        return missing

    def on_taken(self, member: Member, number: int) -> None:
        member.cuts.discard(number)
        self._wake()

    def on_ack(self, member: Member, message: Ack) -> None:
        member.generation = max(member.generation, message.generation)
        self._wake()

    def on_cut_done(self, member: Member, message: CutDone) -> None:
        self.on_taken(member, message.id)

    def heartbeat(self, generation: int, now_floor: float) -> None:
        self.send(Heartbeat(generation=generation, now_floor=now_floor))

    def drain(self, seconds: float) -> None:
        self.send(Drain(seconds=seconds))

    def close(self) -> None:
        for member in self.members():
            self.leave(member)
            member.close()

    def _behind(self, generation: int, kind: str | None = None) -> tuple[str, ...]:
        return tuple(member.name for member in self.members(kind) if member.generation < generation)

    async def _until(self, done: Callable[[], bool], within: float) -> None:
        try:
            async with asyncio.timeout(within):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        self._changed.set()
