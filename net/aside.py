"""Aside: work that would hold the event loop too long, in threads of its own, shared out by sandbox.

    aside = Aside("judging", threads=4, at_once=1)
    await aside.run((tenant, sandbox), work, seconds=5.0)

A sandbox has at most `at_once` pieces of work in the threads; what more it asks for waits in order, and a piece that
passed its deadline counts until it really ends: however much one sandbox asks for, and however long it takes, it
holds no more than its part of the threads. Each purpose has threads of its own (judging, certificates), so that none
waits for another, and none of them are those of asyncio.to_thread, where policy snapshots are read.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

SWITCH_SECONDS: Final = 0.0005
"""How long a working thread keeps the interpreter while the event loop wants it (Python's own default: 5 ms)."""

type Owner = tuple[str, str]
"""(tenant, sandbox)."""


class Busy(Exception):
    """Too much of this sandbox's work waits already."""


class Aside:
    """One per purpose and process. Used from one event loop."""

    def __init__(self, name: str, *, threads: int = 4, at_once: int = 1, waiting: int = 256) -> None:
        """`waiting` pieces of one sandbox may wait for a thread; beyond it `run` raises Busy."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._at_once = at_once
        self._bound = waiting
        self._running: dict[Owner, int] = {}
        self._queues: dict[Owner, deque[asyncio.Future[None]]] = {}

    async def run[T](self, owner: Owner, work: Callable[[], T], seconds: float) -> T:
        """What `work` returns or raises. Raises TimeoutError where that takes, with waiting, over `seconds`; Busy."""
        async with asyncio.timeout(seconds):
            await self._enter(owner)
            task = asyncio.get_running_loop().run_in_executor(self._threads, work)
            task.add_done_callback(lambda done: self._left(owner, done))
            return await asyncio.shield(task)

    @property
    def busy(self) -> int:
        """Sandboxes that have work in the threads."""
        return len(self._running)

    async def _enter(self, owner: Owner) -> None:
        running = self._running.get(owner, 0)
        if running < self._at_once:
            self._running[owner] = running + 1
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
                self._next(owner)  # it was our turn, and we are gone
            elif place in queue:
                queue.remove(place)
            raise

    def _left[T](self, owner: Owner, done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # taken: whoever asked may have given up
        self._next(owner)

    def _next(self, owner: Owner) -> None:
        """Pass the place on to who waits, or give it up."""
        queue = self._queues.get(owner)
        while queue:
            place = queue.popleft()
            if not place.done():
                place.set_result(None)
                break
        else:
            left = self._running.get(owner, 0) - 1
            if left > 0:
                self._running[owner] = left
            else:
                self._running.pop(owner, None)
        if not queue:
            self._queues.pop(owner, None)


def share_the_interpreter() -> None:
    """At the start of a process that works aside: let the event loop have the interpreter soon when it wants it."""
    sys.setswitchinterval(SWITCH_SECONDS)
