"""Few: at most so many of one sandbox at a time; the others of that sandbox wait in order, and nobody else does.

few = Few(8)
async with few.place((tenant, sandbox)): ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from rules.names import Owner


class Busy(Exception):
    """Too many of this sandbox wait already."""


class Few:
    """Places by owner. Used from one event loop."""

    def __init__(self, at_once: int, *, waiting: int = 256) -> None:
        """`waiting` of one owner may wait for a place; beyond it `enter` raises Busy."""
        self._at_once = at_once
        self._bound = waiting
        self._taken: dict[Owner, int] = {}
        self._queues: dict[Owner, deque[asyncio.Future[None]]] = {}

    @property
    def busy(self) -> int:
        """Owners that have a place."""
        return len(self._taken)

    @contextlib.asynccontextmanager
    async def place(self, owner: Owner) -> AsyncIterator[None]:
        """A place for as long as the block runs. Raises Busy."""
        await self.enter(owner)
        try:
            yield
        finally:
            self.leave(owner)

    async def enter(self, owner: Owner) -> None:
        """Take a place, or wait for one. Whoever took it calls `leave`. Raises Busy."""
        taken = self._taken.get(owner, 0)
        if taken < self._at_once:
            self._taken[owner] = taken + 1
            return
        queue = self._queues.setdefault(owner, deque())
        if len(queue) >= self._bound:
            raise Busy
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(owner)  # it was our turn, and we are gone
            elif place in queue:
                queue.remove(place)
            raise

    def leave(self, owner: Owner) -> None:
        """Pass the place on to who waits, or give it up."""
        queue = self._queues.get(owner)
        while queue:
            place = queue.popleft()
            if not place.done():
                place.set_result(None)
                break
        else:
            left = self._taken.get(owner, 0) - 1
            if left > 0:
                self._taken[owner] = left
            else:
                self._taken.pop(owner, None)
        if not queue:
            self._queues.pop(owner, None)
