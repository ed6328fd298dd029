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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from net.few import Busy, Few
from net.turns import LONGEST_PAUSE, Turns
from rules.names import Owner

__all__ = ["Aside", "Busy", "share_the_interpreter"]

PAUSE: Final = 3.0
SWITCH_SECONDS: Final = 0.0005
"""How long a working thread keeps the interpreter while the event loop wants it (Python's own default: 5 ms)."""


class Aside:
    """One per purpose and process. Used from one event loop."""

    def __init__(
        self, name: str, *, threads: int = 4, at_once: int = 1, waiting: int = 256, turns: Turns | None = None
    ) -> None:
        """`waiting` pieces of one sandbox may wait for a thread; beyond it `run` raises Busy.

        `turns`: while another sandbox is at work, a piece is followed by a pause of PAUSE times its length.
        """
        self._turns = turns
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._few = Few(at_once, waiting=waiting)

    async def run[T](self, owner: Owner, work: Callable[[], T], seconds: float) -> T:
        """What `work` returns or raises. Raises TimeoutError where that takes, with waiting, over `seconds`; Busy."""
        async with asyncio.timeout(seconds):
            await self._few.enter(owner)
            task = asyncio.get_running_loop().run_in_executor(self._threads, work)
            begun = time.perf_counter()
            task.add_done_callback(lambda done: self._left(owner, done, time.perf_counter() - begun))
            return await asyncio.shield(task)

    @property
    def busy(self) -> int:
        """Sandboxes that have work in the threads."""
        return self._few.busy

    def _left[T](self, owner: Owner, done: asyncio.Future[T], spent: float) -> None:
        if not done.cancelled():
            done.exception()  # taken: whoever asked may have given up
        if self._turns is not None and self._turns.beside(owner):
            # The thread and the event loop take the interpreter from each other: every step of the loop is slower.
            asyncio.get_running_loop().call_later(min(PAUSE * spent, LONGEST_PAUSE), self._few.leave, owner)
        else:
            self._few.leave(owner)


def share_the_interpreter() -> None:
    """At the start of a process that works aside: let the event loop have the interpreter soon when it wants it."""
    sys.setswitchinterval(SWITCH_SECONDS)
