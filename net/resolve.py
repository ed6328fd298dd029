"""Names to addresses, absolute and bounded. Nothing here decides; net/addresses.py vets every answer.

Rules (RULINGS 5.2): names are asked as absolute (`api.test.`), so that no search list adds a second meaning; at most
16 answers, more is a failure and not a truncation; 8 lookups in flight per sandbox; 3 seconds; answers are kept for
min(ttl, 60 s) per sandbox, and vetted again at each use. An IP literal never reaches a resolver.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from net.stream import NetError
from rules.names import OWN_NAME, Host, Owner

MAX_ANSWERS = 16
LOOKUP_SECONDS = 3.0
LOOKUPS_PER_SANDBOX = 8
CACHE_SECONDS = 60.0
"""The longest that any answer is kept (RULINGS 5.2), whatever its time to live says."""
UNKNOWN_TTL_SECONDS = 5.0
"""getaddrinfo tells no time to live. Five seconds spare a burst of dials the lookups and stay below common ttls."""


class ResolveFailed(NetError):
    """The name gave no usable answer. str() is for the log: no answer, too many, too late, or not a name."""


class Resolver(Protocol):
    """Port: one lookup. Returns numeric addresses in the resolver's order of preference, unvetted."""

    async def resolve(self, host: Host, port: int) -> tuple[str, ...]:
        """Raises ResolveFailed. May take long: the caller sets the deadline."""
        ...


class SystemResolver:
    """The machine's resolver (getaddrinfo) in daemon threads of its own.

    Not the loop's executor: uvloop has four threads there, which four slow names would fill. Not ThreadPoolExecutor:
    its threads are joined at exit, so a hanging name server would hold up the end of the process.
    """

    def __init__(self, *, max_threads: int = 64) -> None:
        self._free = max_threads

    async def resolve(self, host: Host, port: int) -> tuple[str, ...]:
        """Look `host` up. Raises ResolveFailed; also at once when `max_threads` lookups are still running."""
        if host.is_literal or host.text == OWN_NAME:
            raise ResolveFailed("not a name that is looked up")
        if self._free <= 0:
            raise ResolveFailed("too many lookups are still running")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, ...]] = loop.create_future()
        self._free -= 1

        def deliver(found: tuple[str, ...] | None, fault: str) -> None:
            self._free += 1
            if answer.done():
                return
            if found is None:
                answer.set_exception(ResolveFailed(fault))
            else:
                answer.set_result(found)

        def look_up() -> None:
            found, fault = _getaddrinfo(host.text + ".", port)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody is waiting
                loop.call_soon_threadsafe(deliver, found, fault)

        threading.Thread(target=look_up, name="resolve", daemon=True).start()
        return await answer


def _getaddrinfo(name: str, port: int) -> tuple[tuple[str, ...] | None, str]:
    """(addresses without duplicates, "") or (None, why). A fault of any kind is "no answer", never an escape."""
    try:
        rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except socket.gaierror as error:
        return None, f"no answer ({error.errno})"
    except (OSError, UnicodeError, ValueError):
        return None, "the resolver refused the name"
    found = tuple(dict.fromkeys(str(row[4][0]) for row in rows))
    return (found, "") if found else (None, "no answer")


@dataclass(slots=True)
class _Kept:
    addresses: tuple[str, ...]
    until: float


class Lookups:
    """Lookups of many sandboxes over one resolver: per-sandbox bound, deadline, answer cache.

    Keys start with (tenant, sandbox): no sandbox sees what another's lookups left behind (I19). A lookup that passed
    its deadline still counts against its sandbox until the resolver really ends.
    """

    def __init__(
        self,
        resolver: Resolver,
        *,
        clock: Callable[[], float],
        seconds: float = LOOKUP_SECONDS,
        keep_seconds: float = UNKNOWN_TTL_SECONDS,
        max_kept: int = 4096,
    ) -> None:
        """`clock` gives seconds of a clock that only moves forward. `keep_seconds` is capped at 60."""
        self._resolver = resolver
        self._clock = clock
        self._seconds = seconds
        self._keep_seconds = min(keep_seconds, CACHE_SECONDS)
        self._max_kept = max_kept
        self._kept: OrderedDict[tuple[str, str, Host], _Kept] = OrderedDict()
        self._in_flight: dict[Owner, int] = {}

    async def addresses(self, tenant: str, sandbox: str, host: Host, port: int) -> tuple[str, ...]:
        """Unvetted answers for `host`, from the cache or the resolver. Raises ResolveFailed."""
        key = (tenant, sandbox, host)
        kept = self._kept.get(key)
        if kept is not None:
            if self._clock() < kept.until:
                return kept.addresses
            del self._kept[key]
        owner = (tenant, sandbox)
        running = self._in_flight.get(owner, 0)
        if running >= LOOKUPS_PER_SANDBOX:
            raise ResolveFailed("too many lookups of this sandbox are in flight")
        self._in_flight[owner] = running + 1
        task = asyncio.ensure_future(self._resolver.resolve(host, port))
        task.add_done_callback(lambda done: self._ended(owner, done))
        try:
            async with asyncio.timeout(self._seconds):
                found = await asyncio.shield(task)
        except TimeoutError:
            raise ResolveFailed(f"no answer within {self._seconds:g} s") from None
        if not found:
            raise ResolveFailed("no answer")
        if len(found) > MAX_ANSWERS:
            raise ResolveFailed(f"more than {MAX_ANSWERS} answers")
        return found

    def keep(self, tenant: str, sandbox: str, host: Host, addresses: tuple[str, ...]) -> None:
        """Remember answers that have been vetted. Called by the dialer only after net/addresses.py passed them all."""
        key = (tenant, sandbox, host)
        self._kept[key] = _Kept(addresses, self._clock() + self._keep_seconds)
        self._kept.move_to_end(key)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)

    def forget(self, tenant: str, sandbox: str) -> None:
        """Drop everything kept for one sandbox: it has ended."""
        for key in [key for key in self._kept if key[:2] == (tenant, sandbox)]:
            del self._kept[key]

    def _ended(self, owner: Owner, task: asyncio.Future[tuple[str, ...]]) -> None:
        left = self._in_flight[owner] - 1
        if left:
            self._in_flight[owner] = left
        else:
            del self._in_flight[owner]
        if not task.cancelled():
            task.exception()  # taken, so that a lookup nobody waits for any more is not reported as forgotten
