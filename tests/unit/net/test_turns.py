"""Turns of the loop: a flood of one sandbox's wakes takes one step of each pass, and pauses while others work."""

from __future__ import annotations

import asyncio

import pytest

from net.stream import READ_SIZE
from net.turns import CALLS_BESIDES, CALLS_ROOM, CONTEST_SECONDS, LEAST, LONGEST_PAUSE, Portion, Share, Turns
from rules.names import Owner
from tests.support.streams import MemoryStream

A = ("default", "sb_a")
B = ("default", "sb_b")


class Hand:
    """A clock that moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def contested(turns: Turns, clock: Hand) -> Share:
    """A's share while B is at work too."""
    share = turns.share(A)
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    turns.share(B).wake(future)
    clock.now += CONTEST_SECONDS / 10
    return share


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def futures(count: int) -> list[asyncio.Future[None]]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


def woken(waiters: list[asyncio.Future[None]]) -> int:
    return sum(waiter.done() for waiter in waiters)


async def test_a_flood_is_woken_one_by_one_while_another_sandbox_is_at_work() -> None:
    """A hundred streams of one sandbox that get bytes at once do not run in one pass of the loop."""
    clock = Hand()
    share = contested(Turns(clock), clock)
    waiters = futures(100)
    for waiter in waiters:
        share.wake(waiter)
    assert woken(waiters) == 0
    await passes(4)
    assert 1 <= woken(waiters) <= 4
    while woken(waiters) < 100:
        await asyncio.sleep(0)
    assert [waiter.done() for waiter in waiters] == [True] * 100


def at_work(turns: Turns, clock: Hand, parts: dict[Owner, float], *, more: bool = True) -> dict[Owner, float]:
    """Each owner works its part of the time, in steps of a hundredth; what the last step of each one cost."""
    prices: dict[Owner, float] = {}
    for _ in range(500):
        for owner, part in parts.items():
            prices[owner] = turns.price(turns.share(owner), part / 100, clock.now, more=more) / (part / 100)
        clock.now += 0.01
    return prices


def quiet_turns() -> tuple[Turns, Hand]:
    """Turns of a thread that does nothing but what is measured."""
    clock = Hand()
    return Turns(clock, lambda: 0.0), clock


def test_who_does_nearly_all_of_the_work_gets_what_the_others_leave() -> None:
    """A hog owes more time for its steps the more the others work, and never so much that nothing is left to it."""
    owed = []
    for others in (0.01, 0.3, 0.45):
        turns, clock = quiet_turns()
        prices = at_work(turns, clock, {A: 0.9, B: others})
        assert prices[B] == 0.0
        owed.append(prices[A])
    assert 1.0 < owed[0] < 1.5 < owed[1] < owed[2]
    assert owed[2] == pytest.approx(1 / LEAST)


def test_where_a_step_costs_others_too_less_room_is_left_to_a_hog() -> None:
    """An executor's calls are paid by vault and log as well: beside the same neighbour a hog owes more there."""
    clock = Hand()
    there = Turns(clock, lambda: 0.0, room=CALLS_ROOM, besides=CALLS_BESIDES)
    here, same = quiet_turns()
    owed = at_work(there, clock, {A: 0.5, B: 0.1})[A]
    assert owed > 1.5 * at_work(here, same, {A: 0.5, B: 0.1})[A]
    assert owed <= 1 / LEAST


def test_two_that_are_equally_busy_owe_nothing() -> None:
    """Neither of them is the one that the other waits for."""
    turns, clock = quiet_turns()
    assert at_work(turns, clock, {A: 0.5, B: 0.45}) == {A: 0.0, B: 0.0}


def test_a_hog_that_is_held_back_stays_one_until_others_work_more() -> None:
    """That it pauses makes it no neighbour like any other: only work of others does."""
    turns, clock = quiet_turns()
    at_work(turns, clock, {A: 0.9, B: 0.3})
    assert at_work(turns, clock, {A: 0.4, B: 0.4})[A] > 0.0
    assert at_work(turns, clock, {A: 0.3, B: 0.5})[A] == 0.0


def test_who_asks_for_no_more_than_it_gets_is_no_hog_for_having_been_alone() -> None:
    """One that did all of the work while others did little is let go once another one does about as much."""
    turns, clock = quiet_turns()
    at_work(turns, clock, {A: 0.9, B: 0.1}, more=False)
    assert at_work(turns, clock, {A: 0.4, B: 0.4}, more=False)[A] == 0.0


def test_who_works_little_owes_nothing_though_nobody_works_more() -> None:
    """One that does nearly all of the work is no burden while it works a small part of the time."""
    turns, clock = quiet_turns()
    assert at_work(turns, clock, {A: 0.01, B: 0.0001}) == {A: 0.0, B: 0.0}


def test_what_the_loop_does_besides_counts_too() -> None:
    """Work that no step showed is laid on those that worked, up to a bound: a hog owes more than its steps took."""
    clock = Hand()
    worked = Hand()
    turns = Turns(clock, worked)
    prices: dict[Owner, float] = {}
    plain, plain_clock = quiet_turns()
    expected = at_work(plain, plain_clock, {A: 0.9, B: 0.01})
    for _ in range(500):
        for owner, part in {A: 0.9, B: 0.01}.items():
            worked.now += 10 * part / 100
            prices[owner] = turns.price(turns.share(owner), part / 100, clock.now, more=True) / (part / 100)
        clock.now += 0.01
    assert 1.9 < prices[A] / expected[A] < 2.2


def test_a_portion_shrinks_while_it_takes_long_and_grows_again() -> None:
    """Slow bytes are taken a few at a time, down to a bound; quick ones many, up to one."""
    portion = Portion(least=100, first=4000, most=8000)
    assert portion.took(0.05)
    assert portion.size == 1000
    assert [portion.took(0.05) for _ in range(5)] == [True] * 5
    assert portion.size == 100
    assert not any(portion.took(0.0) for _ in range(20))
    assert portion.size == 8000


async def test_work_beyond_what_others_leave_is_paid_by_a_pause() -> None:
    """A step that took a second is followed by no other of that sandbox for a while, and others go on."""
    clock = Hand()
    turns = Turns(clock)
    share = contested(turns, clock)
    first, second = futures(2)
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def work() -> None:
        await first
        clock.now += 1.0

    async def other() -> float:
        await second
        return loop.time()

    long, late = asyncio.ensure_future(work()), asyncio.ensure_future(other())
    await asyncio.sleep(0)
    share.wake(first)
    share.wake(second)
    await long
    mine = futures(1)
    turns.share(B).wake(mine[0])
    await passes(3)
    assert mine[0].done()
    assert not second.done()
    assert await late - begun >= 0.02


async def test_a_pause_has_an_end() -> None:
    """A step that seemed to take an hour (a machine that slept) costs at most the longest pause."""
    clock = Hand()
    share = contested(Turns(clock), clock)
    first, second = futures(2)

    async def work() -> None:
        await first
        clock.now += 3600.0

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    share.wake(first)
    share.wake(second)
    await task
    async with asyncio.timeout(LONGEST_PAUSE + 5):
        await second


async def test_a_sandbox_alone_is_not_held_back() -> None:
    """Where nobody else was at work lately, what is woken is woken at once; so it is again once the other is quiet."""
    clock = Hand()
    turns = Turns(clock)
    share = contested(turns, clock)
    clock.now += 2 * CONTEST_SECONDS
    waiters = futures(50)
    for waiter in waiters:
        share.wake(waiter)
    assert woken(waiters) == 50


async def test_unidentified_connections_hold_nobody_back() -> None:
    """A flood before identity waits while a sandbox is at work; that sandbox does not wait for the flood."""
    clock = Hand()
    turns = Turns(clock)
    sandbox, source = turns.share(A), turns.share(("", "192.0.2.7"), known=False)
    (mine,) = futures(1)
    sandbox.wake(mine)
    flood = futures(50)
    for waiter in flood:
        source.wake(waiter)
    assert woken(flood) == 0
    again = futures(10)
    for waiter in again:
        sandbox.wake(waiter)
    assert woken(again) == 10
    await passes(3)
    assert 1 <= woken(flood) < 10


async def test_a_waiter_that_gave_up_takes_no_turn() -> None:
    """Cancelled waiters are passed over in the same pass."""
    clock = Hand()
    share = contested(Turns(clock), clock)
    waiters = futures(20)
    for waiter in waiters:
        share.wake(waiter)
    for waiter in waiters[:19]:
        waiter.cancel()
    await passes(2)
    assert waiters[19].done()


async def test_a_stream_that_breaks_does_not_wait_for_its_turn() -> None:
    """A reader whose bytes came and whose stream was then cut goes on at once: a cut is finished soon."""
    clock = Hand()
    turns = Turns(clock)
    share = contested(turns, clock)
    near, far = MemoryStream.pair()
    near.share = share
    for waiter in futures(500):
        share.wake(waiter)
    reading = asyncio.ensure_future(near.receive(READ_SIZE))
    await asyncio.sleep(0)
    far.write(b"x")
    near.abort()
    await passes(2)
    assert reading.done()
    assert await reading == b"x"


async def test_a_stream_whose_turn_came_listens_again() -> None:
    """Once the woken reader runs, that the peer speaks or leaves is seen, also while nobody waits for bytes."""
    clock = Hand()
    near, far = MemoryStream.pair()
    near.share = contested(Turns(clock), clock)
    reading = asyncio.ensure_future(near.receive(READ_SIZE))
    await asyncio.sleep(0)
    far.write(b"answer")
    far.write(b"meanwhile")
    assert await reading == b"answermeanwhile"
    far.write(b"unasked")
    assert near.receive_nowait() == b"unasked"
    await far.close()
    assert near.receive_nowait() == b""


async def test_a_rest_lets_others_run() -> None:
    """Between two slices of work every other task gets a turn, whether or not anybody else is at work."""
    clock = Hand()
    turns = Turns(clock)
    seen: list[str] = []

    async def long() -> None:
        for number in range(3):
            seen.append(f"slice {number}")
            await turns.share(A).rest()

    async def short() -> None:
        seen.append("other")

    await asyncio.gather(long(), short())
    assert seen.index("other") == 1


async def test_shares_nobody_needs_are_forgotten() -> None:
    """However many owners come and go, what is remembered of them is bounded."""
    turns = Turns()
    for number in range(10_000):
        turns.share(("default", f"sb_{number}"))
    assert turns.remembered <= 4096
