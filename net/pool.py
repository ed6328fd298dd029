"""Upstream connections: kept for the next request of the same sandbox to the same place, and cut when it must not be.

Rules (RULINGS 5.3, 9.5; I19, I27):

- Two requests share a connection only if their PoolKeys are equal: tenant, sandbox, scheme, host, port, allowed and
  static addresses, trust set, credential, upstream proxy.
- Only a connection whose last exchange ended cleanly is kept, and only one on which nothing arrived while idle is
  handed out: bytes before a request are an answer to nobody's question.
- `cut` reaches every connection made here: idle, in use, and still being dialled.
- Bounded in number (oldest idle first out) and in time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from net.dial import Connected, Dialer, DialError, DialTarget
from net.http1 import ClientConnection
from net.stream import DEFAULT_LIMITS, Limits
from rules.names import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKey:
    """What two requests must have in common to share a connection. `credential` is its name and version, or None."""

    target: DialTarget
    credential: str | None = None
    via: str = ""
    """The upstream proxy that it is dialled through. Filled in by Pool.acquire from the dialer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Bounds of one pool: connections kept idle, and seconds that one is kept."""

    idle_per_key: int = 32
    """A client with this many connections of its own keeps as many busy; with fewer kept, it would pay for a new
    handshake again and again, because answers and next requests come in bursts."""
    idle_per_sandbox: int = 64
    idle_total: int = 256
    idle_seconds: float = 30.0
    uses: int = 1000
    """Exchanges on one connection before it is closed."""


@dataclass(eq=False, slots=True)
class Lease:
    """A connection in use by one exchange. Hand it back with Pool.release, or Pool.discard after any fault."""

    key: PoolKey
    connection: ClientConnection
    address: str
    tls_version: str | None
    uses: int = 0
    idle_since: float = 0.0

    @property
    def reused(self) -> bool:
        """True if an exchange went over this connection before: a failure before the answer may be a stale one."""
        return self.uses > 1


class Pool:
    """All upstream connections of one process. Not shared between processes, never persisted."""

    def __init__(
        self,
        dialer: Dialer,
        *,
        clock: Callable[[], float],
        limits: PoolLimits | None = None,
        http_limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`clock` gives seconds of a clock that only moves forward."""
        self._dialer = dialer
        self._clock = clock
        self._limits = limits or PoolLimits()
        self._http_limits = http_limits
        self._idle: OrderedDict[Lease, None] = OrderedDict()  # all, oldest first
        self._by_key: dict[PoolKey, list[Lease]] = {}  # the same ones, most recent last
        self._by_owner: Counter[Owner] = Counter()
        self._in_use: set[Lease] = set()
        self._dialling: dict[asyncio.Future[Connected], PoolKey] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def acquire(self, key: PoolKey, *, fresh: bool = False) -> Lease:
        """An idle connection for `key`, or a new one; `fresh` always dials. Raises DialError."""
        if self._closed:
            raise DialError("policy-changing", "the pool is closed")
        if via := self._dialer.via(key.target):
            key = replace(key, via=via)
        if not fresh:
            # One turn of the loop: what the kernel holds for an idle connection (an end, a stray answer) gets in.
            await asyncio.sleep(0)
            if (kept := self._take(key)) is not None:
                return kept
        dial = asyncio.ensure_future(self._dialer.dial(key.target))
        self._dialling[dial] = key
        try:
            connected = await dial
        except asyncio.CancelledError:
            if not dial.cancelled() and dial.done() and dial.exception() is None:
                dial.result().stream.abort()  # it had succeeded, but our caller was cancelled before it could know
            if dial in self._dialling:
                raise  # our caller was cancelled, and the dial with it
            raise DialError("policy-changing", "cut while it was dialled") from None
        finally:
            wanted = self._dialling.pop(dial, None) is not None
        if not wanted:
            connected.stream.abort()
            raise DialError("policy-changing", "cut while it was dialled", connected.address)
        try:
            lease = Lease(
                key=key,
                connection=ClientConnection(connected.stream, self._http_limits),
                address=connected.address,
                tls_version=connected.tls_version,
                uses=1,
            )
        except BaseException:
            connected.stream.abort()  # nobody else knows of it yet
            raise
        self._in_use.add(lease)
        return lease

    def release(self, lease: Lease) -> bool:
        """Give a connection back after its exchange. Kept (True) only if it can carry another; else dropped."""
        if lease not in self._in_use:
            return False  # cut meanwhile, or given back twice
        self._in_use.remove(lease)
        keep = (
            not self._closed
            and lease.uses < self._limits.uses
            and lease.connection.reusable
            and lease.connection.is_quiet()
        )
        if not keep:
            lease.connection.abort()
            return False
        lease.idle_since = self._clock()
        self._add(lease)
        self._schedule()
        return lease in self._idle

    def discard(self, lease: Lease) -> None:
        """Drop a connection at once: its exchange failed, was cut short or became something else."""
        self._in_use.discard(lease)
        lease.connection.abort()

    def detach(self, lease: Lease) -> None:
        """Forget a connection that became another protocol (101). Whoever took its stream must close it and cut it."""
        self._in_use.discard(lease)

    def cut(self, predicate: Callable[[PoolKey, str], bool], *, idle_only: bool = False) -> int:
        """Abort every connection for which `predicate(key, address)` holds; returns how many.

        `idle_only` spares those in use and being dialled, for a caller that ends or keeps their exchanges itself.

        The address of one still being dialled is unknown and given as "". When this returns, no matching connection
        carries another byte.
        """
        idle = [lease for lease in self._idle if predicate(lease.key, lease.address)]
        in_use = [] if idle_only else [lease for lease in self._in_use if predicate(lease.key, lease.address)]
        dialling = [] if idle_only else [dial for dial, key in self._dialling.items() if predicate(key, "")]
        for lease in idle:
            self._drop(lease)
        for lease in in_use:
            self.discard(lease)
        for dial in dialling:
            del self._dialling[dial]
            dial.cancel()
        return len(idle) + len(in_use) + len(dialling)

    async def close(self) -> None:
        """Abort everything; later calls of acquire are refused."""
        self._closed = True
        self.cut(lambda key, address: True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def in_use(self) -> int:
        return len(self._in_use)

    def _take(self, key: PoolKey) -> Lease | None:
        """The most recently used idle connection for `key` that is still quiet."""
        self._expire()
        while same := self._by_key.get(key):
            lease = same[-1]
            self._remove(lease)
            if lease.connection.is_silent():
                lease.uses += 1
                self._in_use.add(lease)
                return lease
            lease.connection.abort()
        return None

    def _add(self, lease: Lease) -> None:
        """Keep `lease` idle and drop the oldest ones beyond each bound."""
        owner = _owner(lease.key)
        same = self._by_key.setdefault(lease.key, [])
        same.append(lease)
        self._idle[lease] = None
        self._by_owner[owner] += 1
        if len(same) > self._limits.idle_per_key:
            self._drop(same[0])
        if self._by_owner[owner] > self._limits.idle_per_sandbox:
            self._drop(next(other for other in self._idle if _owner(other.key) == owner))
        if len(self._idle) > self._limits.idle_total:
            self._drop(next(iter(self._idle)))

    def _remove(self, lease: Lease) -> None:
        del self._idle[lease]
        same = self._by_key[lease.key]
        same.remove(lease)
        if not same:
            del self._by_key[lease.key]
        owner = _owner(lease.key)
        self._by_owner[owner] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def _drop(self, lease: Lease) -> None:
        self._remove(lease)
        lease.connection.abort()

    def _expire(self) -> None:
        limit = self._clock() - self._limits.idle_seconds
        while self._idle and (oldest := next(iter(self._idle))).idle_since <= limit:
            self._drop(oldest)

    def _schedule(self) -> None:
        if self._timer is None and self._idle:
            self._timer = asyncio.get_running_loop().call_later(self._limits.idle_seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._expire()
        self._schedule()


def _owner(key: PoolKey) -> Owner:
    return (key.target.tenant, key.target.sandbox)
