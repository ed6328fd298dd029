"""Turns: how the sandboxes of one process share its event loop, so that one that floods costs the others little.

    turns = Turns()                     one per process
    share = turns.share((tenant, id))   one per sandbox; every stream that works for it holds it (`stream.share`)
    share.wake(waiter)                  instead of waiter.set_result(None): what the stream waited for is here
    await share.rest()                  between two slices of long work

While one sandbox alone is at work nothing is held back. From the moment that another one woke in the last
CONTEST_SECONDS, each sandbox gets one wake for each pass of the loop, first come first served inside it, and what the
woken task runs until it waits again is measured. What the loop does besides (the log's answers, new connections) is
laid on the sandboxes in proportion. One that does HOG of all work pauses after its steps, so that it gets no more of
the time than the others leave (`Turns.allowed`), as a whole, however many connections it has. Two that are equally
busy share, and neither pauses. While a stream waits for its turn its socket is not read.

Before a connection is identified its share is that of its source (`known=False`): it is held back while any sandbox
is at work, and never makes others wait.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from rules.names import Owner

CONTEST_SECONDS: Final = 1.0
"""How long after its last wake a sandbox counts as being at work."""
DEBT_SECONDS: Final = 0.01
"""Of pauses owed after which a sandbox pauses."""
HOG: Final = 0.6
"""The part of all work of late that makes a sandbox the one that the others wait for."""
NO_HOG: Final = 0.4
"""The part below which it no longer is, as long as more of it waits than gets its turn."""
NOTICED: Final = 0.02
"""The part of the time below which nobody is a burden."""
ROOM: Final = 0.75
"""The part of the time that all of them may fill before the hog among them pauses, in a worker."""
CALLS_ROOM: Final = 0.4
"""The same in an executor: what it does for a call costs vault and log about as much again."""
YIELDING: Final = 1.25
"""How many times what the others use it leaves to them."""
LEAST: Final = 0.25
"""The part of the time that it gets at least."""
MOST_BESIDES: Final = 2.0
"""A worker's whole work counts for at most so many times what was measured: nobody knows whose the rest is."""
CALLS_BESIDES: Final = 5.0
"""The same in an executor, whose calls are all of known sandboxes."""
LATE_SECONDS: Final = 1.0
"""Work counts less the longer ago it was, by a factor of e for each of these."""
PORTION_SECONDS: Final = 0.001
"""What one portion of a stream's bytes should take at most."""
LONGEST_PAUSE: Final = 0.25
"""One slow step (a descheduled process looks like one) costs no more than this."""
MAX_SHARES: Final = 4096
"""Beyond it, those that nobody would miss are forgotten."""


class Portion:
    """How many bytes to work on before others get a turn: learnt from how long the last ones took."""

    __slots__ = ("_least", "_most", "size")

    def __init__(self, *, least: int = 256, first: int = 4096, most: int = 64 * 1024) -> None:
        self._least = least
        self._most = most
        self.size = first

    def took(self, seconds: float) -> bool:
        """The last portion took `seconds`. True: that was long, and others should have a turn before the next one."""
        if seconds > PORTION_SECONDS:
            self.size = max(self._least, self.size // 4)
            return True
        if seconds < PORTION_SECONDS / 4:
            self.size = min(self._most, self.size * 2)
        return seconds > PORTION_SECONDS / 2


class _Late:
    """Seconds of work, each counting less the longer ago it was: of one who works half of the time, half a second."""

    __slots__ = ("_at", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        self._seconds = self.at(now) + seconds
        self._at = now

    def at(self, now: float) -> float:
        return self._seconds * math.exp((self._at - now) / LATE_SECONDS)


class Turns:
    """All shares of one process. Used from one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] | None = None,
        *,
        room: float = ROOM,
        besides: float = MOST_BESIDES,
    ) -> None:
        """`clock` gives seconds of a clock that only moves forward.

        `processor` gives seconds that this thread worked: a step that was kept waiting for a processor or for the
        interpreter is not its sandbox's work. It is `clock` where only that one is given. `room` and `besides`: as
        ROOM and MOST_BESIDES.
        """
        self._room = room
        self._besides = besides
        self.clock = clock
        self.processor = processor or (time.thread_time if clock is time.perf_counter else clock)
        self._shares: dict[tuple[Owner, bool], Share] = {}
        self._latest: Owner | None = None
        self._latest_at = self._other_at = float("-inf")
        self._measured = _Late()
        self._all = _Late()
        """The same and whatever else this thread did between two steps."""
        self._looked = (float("-inf"), 0.0)
        """When that was noted last, and what `processor` said."""

    def share(self, owner: Owner, *, known: bool = True) -> Share:
        """The share of `owner`; the same one every time, while it matters. `("", source)` where not `known`."""
        share = self._shares.get((owner, known))
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                now = self.clock()
                self._shares = {key: kept for key, kept in self._shares.items() if not kept.idle(now)}
            share = self._shares[owner, known] = Share(self, owner, known=known)
        return share

    @property
    def remembered(self) -> int:
        """Shares that are kept."""
        return len(self._shares)

    def contested(self, share: Share) -> bool:
        """Note that `share` wakes now; True if somebody else is at work too."""
        now = self.clock()
        if not share.known:
            return now - self._latest_at < CONTEST_SECONDS
        if share.owner != self._latest:
            self._latest, self._other_at = share.owner, self._latest_at
        self._latest_at = now
        return now - self._other_at < CONTEST_SECONDS

    def beside(self, owner: Owner) -> bool:
        """True if a sandbox other than `owner` is at work."""
        now = self.clock()
        other_at = self._other_at if owner == self._latest else self._latest_at
        return now - other_at < CONTEST_SECONDS

    def price(self, share: Share, spent: float, now: float, *, more: bool) -> float:
        """Count `spent` seconds of work of `share`; how many seconds have to pass for them. 0: it owes nothing.

        `more` of it waits already.
        """
        at, before = self._looked
        self._looked = now, self.processor()
        between = max(self._looked[1] - before, spent) if now - at < CONTEST_SECONDS / 10 else spent
        self._all.add(between, now)
        self._measured.add(spent, now)
        share.late.add(spent, now)
        besides = min(self._all.at(now) / (self._measured.at(now) or 1.0), self._besides)
        mine = share.late.at(now) * besides / LATE_SECONDS
        others = self._measured.at(now) * besides / LATE_SECONDS - mine
        part = mine / ((mine + others) or 1.0)
        # Two limits: one that is held back does less, and is no neighbour like any other while more of it waits.
        share.hog = mine > NOTICED and part > (NO_HOG if share.hog and more else HOG)
        return spent * besides / self.allowed(others) if share.hog else 0.0

    def allowed(self, others: float) -> float:
        """The part of the time that a hog may work while the others use the part `others`."""
        return max(LEAST, self._room - YIELDING * others)


async def rest(share: Share | None) -> None:
    """Let others run between two portions of work for a stream; in its sandbox's turn where it has one."""
    if share is None:
        await asyncio.sleep(0)
    else:
        await share.rest()


class Share:
    """One sandbox's turns."""

    __slots__ = ("_free_at", "_started", "_turns", "_under_way", "_waiting", "hog", "known", "late", "owner")

    def __init__(self, turns: Turns, owner: Owner, *, known: bool) -> None:
        self.owner = owner
        self.known = known
        self._turns = turns
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._under_way = False
        """A turn is scheduled, runs, or is being paid for."""
        self._free_at = float("-inf")
        """When what was worked is paid for: each step costs its time and a pause, and idle time pays."""
        self._started = 0.0
        self.late = _Late()
        self.hog = False
        """Nearly all work is its own: it pauses."""

    def idle(self, now: float) -> bool:
        """Nothing waits and nothing is owed: a new share would do as well."""
        return not self._under_way and not self._waiting and self._free_at <= now

    def wake(self, waiter: asyncio.Future[None]) -> bool:
        """Resolve `waiter`: now (True), or when its turn comes."""
        if not self._turns.contested(self) and not self._waiting:
            if not waiter.done():
                waiter.set_result(None)
            return True
        self._waiting.append(waiter)
        if not self._under_way:
            self._under_way = True
            asyncio.get_running_loop().call_soon(self._turn)
        return False

    async def rest(self) -> None:
        """Let others run, then go on when this sandbox's turn comes."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wake(waiter)
        if waiter.done():
            await asyncio.sleep(0)
        else:
            await waiter

    def _turn(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                # The loop runs in order what is scheduled: what lies between these two is the woken task alone.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._begun)
                waiter.set_result(None)
                loop.call_soon(self._ended)
                return
        self._under_way = False

    def _begun(self) -> None:
        self._started = self._turns.processor()

    def _ended(self) -> None:
        now = self._turns.clock()
        spent = self._turns.processor() - self._started
        price = self._turns.price(self, spent, now, more=bool(self._waiting))
        self._free_at = max(self._free_at, now - spent) + price if price else now
        debt = min(self._free_at - now, LONGEST_PAUSE)
        loop = asyncio.get_running_loop()
        if debt >= DEBT_SECONDS:
            loop.call_later(debt, self._turn)
        else:
            loop.call_soon(self._turn)
