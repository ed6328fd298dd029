"""Events that cross threads and loops, so that no test sleeps or polls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Notice:
    """ "Something changed": both kinds of waiter look at their condition again. All methods from any thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def tell(self) -> None:
        with self._condition:
            self._condition.notify_all()
            for loop, event in self._waiters:
                with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
                    loop.call_soon_threadsafe(event.set)

    def wait_until(self, predicate: Callable[[], bool], timeout: float = 60.0) -> None:
        """Block this thread until `predicate()` holds. Raises TimeoutError."""
        with self._condition:
            if not self._condition.wait_for(predicate, timeout):
                raise TimeoutError("the expected event did not come")

    async def until(self, predicate: Callable[[], bool], timeout: float = 60.0) -> None:
        """Wait in this loop until `predicate()` holds. Raises TimeoutError."""
        event = asyncio.Event()
        entry = (asyncio.get_running_loop(), event)
        with self._condition:
            self._waiters.add(entry)
        try:
            async with asyncio.timeout(timeout):
                while not predicate():
                    await event.wait()
                    event.clear()
        finally:
            with self._condition:
                self._waiters.discard(entry)


class Gate:
    """A pause in a script. The script stops at it (`arrived`) until the test opens it."""

    def __init__(self) -> None:
        self._notice = Notice()
        self.arrivals = 0
        self.is_open = False

    def open(self) -> None:
        """Let everyone through, now and later. Any thread."""
        self.is_open = True
        self._notice.tell()

    async def passage(self) -> None:
        """What the script awaits."""
        self.arrivals += 1
        self._notice.tell()
        await self._notice.until(lambda: self.is_open, timeout=120)

    def wait_arrived(self, arrivals: int = 1, timeout: float = 60.0) -> None:
        """Block until the script stands at the gate (or has passed it)."""
        self._notice.wait_until(lambda: self.arrivals >= arrivals, timeout)

    async def arrived(self, arrivals: int = 1, timeout: float = 60.0) -> None:
        await self._notice.until(lambda: self.arrivals >= arrivals, timeout)
