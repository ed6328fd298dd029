"""Work in threads: one sandbox holds its part of them, however much it asks for and however long that takes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from net.aside import Aside, Busy
from net.turns import Turns

A = ("default", "sb_a")
B = ("default", "sb_b")
LONG = 30.0


class Slow:
    """Work that ends when told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started = 0

    def __call__(self) -> str:
        self.started += 1
        assert self.go.wait(LONG)
        return "done"


async def test_one_sandbox_does_not_fill_the_threads() -> None:
    """Ten pieces of one sandbox's endless work leave a thread for its neighbour."""
    aside = Aside("test", threads=2, at_once=1)
    slow = Slow()
    flood = [asyncio.ensure_future(aside.run(A, slow, LONG)) for _ in range(10)]
    assert await aside.run(B, lambda: "neighbour", LONG) == "neighbour"
    assert slow.started <= 1
    slow.go.set()
    assert await asyncio.gather(*flood) == ["done"] * 10


async def test_more_than_may_wait_is_refused_at_once() -> None:
    """What a sandbox may have waiting is bounded; nothing is remembered of it afterwards."""
    aside = Aside("test", threads=1, at_once=1, waiting=2)
    slow = Slow()
    flood = [asyncio.ensure_future(aside.run(A, slow, LONG)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await aside.run(A, lambda: None, LONG)
    slow.go.set()
    await asyncio.gather(*flood)
    assert aside.busy == 0


async def test_late_work_is_given_up_and_still_counts() -> None:
    """A deadline ends the waiting, not the thread: until that ends the sandbox starts nothing more."""
    aside = Aside("test", threads=2, at_once=1)
    slow = Slow()
    with pytest.raises(TimeoutError):
        await aside.run(A, slow, 0.01)
    with pytest.raises(TimeoutError):
        await aside.run(A, lambda: "too soon", 0.01)
    assert await aside.run(B, lambda: "neighbour", LONG) == "neighbour"
    slow.go.set()
    async with asyncio.timeout(LONG):
        while aside.busy:
            await asyncio.sleep(0)
    assert await aside.run(A, lambda: "again", LONG) == "again"


async def test_who_gives_up_while_waiting_loses_no_place() -> None:
    """A cancelled waiter neither starts nor keeps the next one from starting."""
    aside = Aside("test", threads=1, at_once=1)
    slow = Slow()
    first = asyncio.ensure_future(aside.run(A, slow, LONG))
    gone = asyncio.ensure_future(aside.run(A, slow, LONG))
    last = asyncio.ensure_future(aside.run(A, lambda: "last", LONG))
    await asyncio.sleep(0)
    gone.cancel()
    slow.go.set()
    assert await first == "done"
    assert await last == "last"
    assert slow.started == 1
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_what_the_work_raises_reaches_who_asked() -> None:
    """An exception in the thread is the caller's."""
    aside = Aside("test")

    def fails() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        await aside.run(A, fails, LONG)
    assert aside.busy == 0


async def test_beside_another_sandbox_a_piece_is_followed_by_a_pause() -> None:
    """While a neighbour is at work the next piece waits; alone it starts at once."""
    clock = [100.0]
    turns = Turns(lambda: clock[0])
    aside = Aside("test", threads=2, at_once=1, turns=turns)
    slow = Slow()
    first = asyncio.ensure_future(aside.run(A, slow, LONG))
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    turns.share(B).wake(waiter)
    await asyncio.sleep(0.02)
    slow.go.set()
    await first
    assert aside.busy == 1  # the place is not free yet
    assert await aside.run(A, lambda: "later", LONG) == "later"
    clock[0] += 10.0
    while aside.busy:
        await asyncio.sleep(0)
    assert await aside.run(A, lambda: "alone", LONG) == "alone"
    await asyncio.sleep(0)
    assert aside.busy == 0
