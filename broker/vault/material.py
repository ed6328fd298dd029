"""`MaterialCache`: what was fetched from a source or obtained from an exchange, for as long as it may be used.

    copy = await cache.get(key, times, obtain)     the value, and when it came
    cache.invalidate(credential)                   from now on it is asked for anew
    cache.forget(tenant, sandbox)                  that sandbox ended: nothing made for it stays

Rules:
- A copy counts for `ttl`, and never beyond what its giver said. From about 80 % of that on, with jitter so that many
  copies do not come due together, a use asks for the next one beside itself.
- One question at a time for one key: who comes meanwhile waits for the same answer.
- An answer that is a no holds for `failure_ttl`: a source that fails is not asked once per request.
- A copy outlives its time by `stale` only where nobody answered (`BrokerError.transient`). A no ends it at once.
- What was asked before an invalidation answers nobody that came after it.
- Whatever leaves is handed to `on_drop` exactly once, so that a lease can be given back.

Nothing keeps an exception: its frames would hold values. A failure is kept as code, detail and remedy.
Used from one event loop. `now` is the boot clock.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from broker.errors import BrokerError
from broker.sources.base import SourceError
from net.process import complain
from rules.names import Owner

FLIGHT_SECONDS: Final = 5.0
"""One question, however many wait for it. Shorter than a hand-off waits (open.py), so that a silence is remembered."""
MAX_KEPT: Final = 4096
"""Copies. The one that was used longest ago goes first."""
MAX_ENDED: Final = 4096
"""Sandboxes that ended, for whom a late question obtains nothing."""
EARLY: Final = (0.7, 0.85)
"""The part of a copy's life after which the next one is asked for: between these, by chance."""
SETTLED_SECONDS: Final = 5.0
"""A copy younger than this was not refused upstream for its age: asking again would give the same (`reject`)."""
TURNS: Final = 3
"""How often one use begins again because what it waited for was invalidated meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What makes two questions the same. References have their `${sandbox.x}` replaced."""

    credential: str
    references: tuple[str, ...]
    narrowing: str = ""
    """How an exchange is narrowed for this use (scopes, repositories, a session policy), "" for none."""
    owner: Owner | None = None
    """The sandbox that the material is made for, where it is one's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds."""

    ttl: float = 300.0
    failure_ttl: float = 5.0
    stale: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh[T]:
    """What `obtain` returns. `lasts`: seconds until it is void by its giver's own word; None: it said nothing."""

    value: T = field(repr=False)
    lasts: float | None = None
    renews: bool = False
    """It is the one that we had, with more time: nothing was replaced, so nothing is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy[T]:
    """A value as it may be used now."""

    value: T = field(repr=False)
    obtained_at: float
    """Boot clock."""
    stale: bool = False
    """It is past its time; nobody could be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A no, without the exception that said it."""

    code: str
    detail: str
    remedy: str
    transient: bool
    until: float

    def error(self) -> SourceError:
        return SourceError(self.code, self.detail, self.remedy, transient=self.transient)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held[T]:
    copy: Copy[T]
    refresh_at: float
    expires_at: float
    stale_until: float


@dataclass(eq=False, slots=True, kw_only=True)
class _Slot[T]:
    """Everything about one key. `dead`: out of the table; whatever its flight brings is dropped."""

    held: _Held[T] | None = None
    failure: _Failure | None = None
    flight: asyncio.Task[None] | None = None
    dead: bool = False


class MaterialCache[T]:
    """One per vault and kind of value."""

    def __init__(
        self, *, now: Callable[[], float], random: Callable[[], float], on_drop: Callable[[Key, T], None] | None = None
    ) -> None:
        """`random` gives numbers from 0 to 1. `on_drop` hears of each value that leaves; it must not raise."""
        self._now = now
        self._random = random
        self._on_drop = on_drop
        self._slots: OrderedDict[Key, _Slot[T]] = OrderedDict()
        self._flights: set[asyncio.Task[None]] = set()
        self._ended: OrderedDict[Owner, None] = OrderedDict()
        self._closed = False

    async def get(self, key: Key, times: Times, obtain: Callable[[T | None], Awaitable[Fresh[T]]]) -> Copy[T]:
        """The value for `key`; `obtain` is called where none may be used, with the one that we have, if any.

        Raises SourceError with the code of what `obtain` raised (BrokerError; a TimeoutError is `source-unreachable`).
        """
        for _ in range(TURNS):
            if self._closed or key.owner in self._ended:
                raise SourceError("source-refused", "the sandbox ended, or the gateway is stopping")
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            now = self._now()
            held, failure = slot.held, slot.failure
            if held is not None and now < held.expires_at:
                if now >= held.refresh_at and slot.flight is None and (failure is None or now >= failure.until):
                    self._start(key, slot, times, obtain)
                return held.copy
            if failure is not None and now < failure.until and slot.flight is None:
                return self._instead(slot, failure, now)
            if slot.flight is None:
                self._start(key, slot, times, obtain)
            if failure is not None and failure.transient and held is not None and now < held.stale_until:
                return self._instead(slot, failure, now)  # it did not answer last time: nobody waits for it again
            assert slot.flight is not None
            await asyncio.wait([slot.flight])
            if slot.dead:
                continue
            if slot.failure is not None:
                return self._instead(slot, slot.failure, self._now())
            if slot.held is not None:
                return slot.held.copy
        raise SourceError("source-unreachable", "it is being replaced again and again", transient=True)

    def peek(self, key: Key) -> Copy[T] | None:
        """What a use would get without asking anybody, or None."""
        slot = self._slots.get(key)
        if slot is None or slot.held is None or self._now() >= slot.held.expires_at:
            return None
        return slot.held.copy

    def invalidate(self, credential: str | None = None) -> int:
        """Drop the copies and failures of `credential` (None: of all); returns how many keys there were."""
        return self._drop(lambda key, slot: credential is None or key.credential == credential)

    def reject(self, credential: str, owner: Owner) -> int:
        """An upstream refused what `owner` used: drop what is old enough to have been replaced at its source."""
        before = self._now() - SETTLED_SECONDS
        return self._drop(
            lambda key, slot: (
                key.credential == credential
                and key.owner in (None, owner)
                and slot.held is not None
                and slot.held.copy.obtained_at <= before
            )
        )

    def could_reject(self, credential: str, owner: Owner) -> bool:
        """Whether `reject` would drop anything."""
        before = self._now() - SETTLED_SECONDS
        return any(
            key.credential == credential
            and key.owner in (None, owner)
            and slot.held is not None
            and slot.held.copy.obtained_at <= before
            for key, slot in self._slots.items()
        )

    def forget(self, owner: Owner) -> int:
        """The sandbox ended: drop what was made for it, and obtain nothing for it any more."""
        self._ended[owner] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return self._drop(lambda key, slot: key.owner == owner)

    async def close(self) -> None:
        """Obtain nothing any more and drop everything; returns when no question is open."""
        self._closed = True
        self._drop(lambda key, slot: True)
        for flight in tuple(self._flights):
            flight.cancel()
        await asyncio.gather(*self._flights, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._slots)

    def _instead(self, slot: _Slot[T], failure: _Failure, now: float) -> Copy[T]:
        """After a failure: the copy that is past its time where that is permitted, else the failure again."""
        held = slot.held
        if held is not None and failure.transient and now < held.stale_until:
            return Copy(value=held.copy.value, obtained_at=held.copy.obtained_at, stale=True)
        raise failure.error()

    def _start(self, key: Key, slot: _Slot[T], times: Times, obtain: Callable[[T | None], Awaitable[Fresh[T]]]) -> None:
        flight = asyncio.get_running_loop().create_task(self._fly(key, slot, times, obtain))
        slot.flight = flight
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)

    async def _fly(
        self, key: Key, slot: _Slot[T], times: Times, obtain: Callable[[T | None], Awaitable[Fresh[T]]]
    ) -> None:
        """One question. Never raises but CancelledError: what it brings stands in the slot."""
        before = None if slot.held is None else slot.held.copy.value
        try:
            async with asyncio.timeout(FLIGHT_SECONDS):
                fresh = await obtain(before)
        except BrokerError as error:
            self._failed(key, slot, times, (error.code, error.detail, error.remedy, error.transient))
        except TimeoutError:
            self._failed(key, slot, times, ("source-unreachable", "no answer in time", "", True))
        except Exception as error:
            complain("vault", "material could not be obtained", error)
            self._failed(key, slot, times, ("source-unreadable", "a fault of ours", "see the vault's messages", False))
        else:
            self._arrived(key, slot, times, fresh)
        finally:
            slot.flight = None
            self._trim()

    def _arrived(self, key: Key, slot: _Slot[T], times: Times, fresh: Fresh[T]) -> None:
        if slot.dead:
            self._dropped(key, fresh.value)
            return
        if fresh.lasts is not None and fresh.lasts <= 0:
            self._dropped(key, fresh.value)
            self._failed(key, slot, times, ("source-unreadable", "what came is over already", "see its clock", False))
            return
        before, now = slot.held, self._now()
        life = times.ttl if fresh.lasts is None else min(times.ttl, fresh.lasts)
        void = float("inf") if fresh.lasts is None else now + fresh.lasts
        early = EARLY[0] + (EARLY[1] - EARLY[0]) * self._random()
        slot.held = _Held(
            copy=Copy(value=fresh.value, obtained_at=now),
            refresh_at=now + life * early,
            expires_at=now + life,
            stale_until=min(now + life + times.stale, void),
        )
        slot.failure = None
        if before is not None and not fresh.renews:
            self._dropped(key, before.copy.value)

    def _failed(self, key: Key, slot: _Slot[T], times: Times, said: tuple[str, str, str, bool]) -> None:
        code, detail, remedy, transient = said
        slot.failure = _Failure(
            code=code, detail=detail, remedy=remedy, transient=transient, until=self._now() + times.failure_ttl
        )
        if not transient and slot.held is not None:
            # It was said that there is no such thing, or not for us: what we still hold of it was revoked.
            held, slot.held = slot.held, None
            self._dropped(key, held.copy.value)

    def _drop(self, wanted: Callable[[Key, _Slot[T]], bool]) -> int:
        gone = [(key, slot) for key, slot in self._slots.items() if wanted(key, slot)]
        for key, slot in gone:
            del self._slots[key]
            slot.dead = True
            if slot.held is not None:
                held, slot.held = slot.held, None
                self._dropped(key, held.copy.value)
        return len(gone)

    def _trim(self) -> None:
        while len(self._slots) > MAX_KEPT:
            oldest = next((key for key, slot in self._slots.items() if slot.flight is None), None)
            if oldest is None:
                return
            slot = self._slots.pop(oldest)
            slot.dead = True
            if slot.held is not None:
                self._dropped(oldest, slot.held.copy.value)

    def _dropped(self, key: Key, value: T) -> None:
        if self._on_drop is not None:
            self._on_drop(key, value)
