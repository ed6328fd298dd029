"""What is counted in a worker: connections, refusals, refusal leaves, and the default budgets. All finite.

    Connections      per listener and source before identity is known, per sandbox after (RULINGS 2.6)
    Budgets          RULINGS 4.7: what an allowed request may still carry out in an hour
    HeldBodies       bytes of bodies that are judged whole, until their requests are over
    RefusalPace      50 refusals a second are answered at once; beyond, the connection is closed (RULINGS 9.2), and a
                     sandbox that goes on so for FLOOD_SECONDS is frozen: everything is refused it for a while
    Spaced           refused requests, and tunnels after unused ones, beyond 50 a second: they come late
    RefusalLeaves    20 a minute, 200 in all: certificates that only carry a refusal (RULINGS 5.6)

Counted per worker with finite defaults; every key starts with (tenant, sandbox). Where there are several workers each
has its part of the budgets (`LimitTable.part`), so that together they never allow more than is documented. The tables
themselves are bounded: a new key beyond the bound is refused, an old one is never forgotten to make room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

from proxy.ports import Clock
from rules.decision import Permit
from rules.facts import RequestFacts, Sandbox
from rules.names import Owner
from rules.policy import HostPattern, Policy

HOUR_SECONDS: Final = 3600.0


REGISTRIES: Final = frozenset({"pypi", "npm", "cargo", "go", "bundler", "apt", "oci", "huggingface", "registry"})
"""Refusal shapes of package registries: services where a 404 means that a name was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitTable:
    """The numbers, with units. Defaults are RULINGS 4.7, 5.6 and 9.2."""

    sandbox_connections: int = 256
    listener_unidentified: int = 512
    source_unidentified: int = 64
    first_head_seconds: float = 10.0
    """From accept to the end of the first head."""
    hello_seconds: float = 5.0
    """From the answer to CONNECT to the end of the ClientHello."""
    handshake_seconds: float = 10.0
    forwarded_header_bytes: int = 32 * 1024
    """Names and values that pass on a plain rule, after stripping (RULINGS 4.3)."""
    refusals_per_second: int = 50
    latest_seconds: float = 5.0
    """How late a refused request is answered at most, or a tunnel opened after unused ones, beyond as many a second."""
    flood_seconds: int = 10
    """Seconds in a row with more refusals than that, after which the sandbox is frozen."""
    frozen_seconds: int = 60
    refusal_leaves_per_minute: int = 20
    refusal_leaves_total: int = 200
    names_under_wildcard: int = 50
    paths_per_host: int = 5000
    query_bytes_per_host: int = 256 * 1024
    read_upload_bytes: int = 1024 * 1024
    missing_per_registry: int = 200
    held_bodies: int = 256 * 1024 * 1024
    sandbox_held_bodies: int = 64 * 1024 * 1024
    """Bytes of judged bodies in one worker, and of one sandbox there: many connections hold no more than a few."""
    tunnel_bytes: int = 1 << 30
    tunnel_seconds: float = 3600.0
    tunnel_idle_seconds: float = 300.0
    sandboxes: int = 4096
    """Sandboxes that one worker counts for."""
    hosts_per_sandbox: int = 1024

    def part(self, workers: int) -> LimitTable:
        """The table of one of `workers` workers: what bounds a channel is divided, and rounded down, never below one.

        A sandbox whose connections all reach one worker gets that worker's part alone: less than documented, never
        more. What protects a process (held bodies, times, sizes) holds for each.
        """
        if workers == 1:
            return self
        return replace(self, **{name: max(1, getattr(self, name) // workers) for name in DIVIDED})


DIVIDED: Final = (
    "sandbox_connections",
    "refusals_per_second",
    "refusal_leaves_per_minute",
    "refusal_leaves_total",
    "names_under_wildcard",
    "paths_per_host",
    "query_bytes_per_host",
    "read_upload_bytes",
    "missing_per_registry",
)
"""The figures that several workers share."""


READ_UPLOADS: Final[Mapping[str, int]] = {
    # A fetch negotiates with want and have lines: a big repository's first one is some hundred kilobytes.
    "git.fetch": 16 * 1024 * 1024,
}
"""Operations (without their service) that state their own upload budget, in bytes an hour."""


# --- connections -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slot:
    """One counted connection. `sandbox` is set once it is identified."""

    listener: str
    peer: str
    sandbox: Owner | None = None


class Connections:
    """Counts open connections. `arrive` and `identified` answer False or None when a bound is reached."""

    def __init__(self, table: LimitTable) -> None:
        self._table = table
        self._listeners: dict[str, int] = {}
        self._sources: dict[tuple[str, str], int] = {}
        self._sandboxes: dict[Owner, int] = {}

    def arrive(self, listener: str, peer: str) -> Slot | None:
        """Count an unidentified connection, or None where its listener or source has too many of them."""
        source = (listener, peer)
        if (
            self._listeners.get(listener, 0) >= self._table.listener_unidentified
            or self._sources.get(source, 0) >= self._table.source_unidentified
        ):
            return None
        self._listeners[listener] = self._listeners.get(listener, 0) + 1
        self._sources[source] = self._sources.get(source, 0) + 1
        return Slot(listener, peer)

    def identified(self, slot: Slot, sandbox: Sandbox) -> bool:
        """Move the connection to its sandbox's count; False where that is full (the connection is then closed)."""
        key = (sandbox.tenant, sandbox.id)
        if slot.sandbox is not None:
            return slot.sandbox == key
        if self._sandboxes.get(key, 0) >= self._table.sandbox_connections:
            return False
        self._release_unidentified(slot)
        slot.sandbox = key
        self._sandboxes[key] = self._sandboxes.get(key, 0) + 1
        return True

    def leave(self, slot: Slot) -> None:
        """The connection is closed."""
        if slot.sandbox is None:
            self._release_unidentified(slot)
        else:
            _less(self._sandboxes, slot.sandbox)

    def _release_unidentified(self, slot: Slot) -> None:
        _less(self._listeners, slot.listener)
        _less(self._sources, (slot.listener, slot.peer))


# --- judged bodies -----------------------------------------------------------------------------------------------


class HeldBodies:
    """What requests in progress hold of bodies that are judged whole: of one worker, and by (tenant, sandbox)."""

    def __init__(self, table: LimitTable) -> None:
        self._table = table
        self._total = 0
        self._sandboxes: dict[Owner, int] = {}

    def share(self, sandbox: Sandbox) -> BodyShare:
        """One request's part, empty at first. Whoever takes it closes it."""
        return BodyShare(self, (sandbox.tenant, sandbox.id))

    def change(self, owner: Owner, count: int) -> bool:
        """Hold `count` bytes more (less where negative); False, and nothing changed, where a bound is reached."""
        total, mine = self._total + count, self._sandboxes.get(owner, 0) + count
        if count > 0 and (total > self._table.held_bodies or mine > self._table.sandbox_held_bodies):
            return False
        self._total = total
        if mine > 0:
            self._sandboxes[owner] = mine
        else:
            self._sandboxes.pop(owner, None)
        return True


class BodyShare:
    """See HeldBodies.share."""

    def __init__(self, held: HeldBodies, owner: Owner) -> None:
        self._held = held
        self._owner = owner
        self._size = 0

    def take(self, count: int) -> bool:
        """`count` bytes came; False: they must not be kept (`too-many-requests`)."""
        if not self._held.change(self._owner, count):
            return False
        self._size += count
        return True

    def close(self) -> None:
        """The request is over, and its body dropped."""
        size, self._size = self._size, 0
        self._held.change(self._owner, -size)


type OnFrozen = Callable[[tuple[str, str], str, str, int], None]
"""((tenant, sandbox), operation or "" for all, which budget, seconds)."""


def _nobody(owner: Owner, operation: str, budget: str, seconds: int) -> None:
    """Nobody is told."""


# --- budgets -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Hour:
    """What one sandbox used in the running hour."""

    since: float
    paths: dict[str, set[bytes]] = field(default_factory=dict)
    query_bytes: dict[str, int] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    uploads: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)


class Budgets:
    """Charges permitted requests. `None` is yes; a reason code is no, and freezes that operation for the hour."""

    def __init__(self, table: LimitTable, clock: Clock, *, workers: int = 1, on_frozen: OnFrozen = _nobody) -> None:
        """`table` is this worker's part; operations that state their own budget are divided by `workers` here."""
        self._table = table
        self._clock = clock
        self._workers = workers
        self._on_frozen = on_frozen
        self._hours: dict[tuple[str, str], _Hour] = {}

    def charge(self, policy: Policy, permit: Permit, facts: RequestFacts) -> str | None:
        """Count path, query and name of one permitted request, all of them or none."""
        hour = self._hour(permit.sandbox)
        if hour is None or permit.operation in hour.frozen:
            return "limit-reached"
        host = facts.destination.host.text
        wildcard = _wildcard(policy, permit, facts)
        path = blake2b(facts.path.raw.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        paths = hour.paths.get(host, set())
        names = hour.names.get(wildcard, set()) if wildcard else set()
        query = hour.query_bytes.get(host, 0) + len(facts.query.raw or "")
        over = ""
        if host not in hour.paths and len(hour.paths) >= self._table.hosts_per_sandbox:
            over = "hosts"
        elif path not in paths and len(paths) >= self._table.paths_per_host:
            over = "paths"
        elif query > self._table.query_bytes_per_host:
            over = "query bytes"
        elif wildcard and host not in names and len(names) >= self._table.names_under_wildcard:
            over = "names under a wildcard"
        if over:
            self._freeze(hour, permit, over)
            return "limit-reached"
        hour.paths.setdefault(host, set()).add(path)
        hour.query_bytes[host] = query
        if wildcard:
            hour.names.setdefault(wildcard, set()).add(host)
        return None

    def upload(self, permit: Permit, count: int) -> bool:
        """Charge `count` bytes of request body; False where a read operation has used up its hour's upload."""
        if permit.effect != "read":
            return True
        hour = self._hour(permit.sandbox)
        if hour is None or permit.operation in hour.frozen:
            return False
        used = hour.uploads.get(permit.operation, 0) + count
        if used > self._upload_bound(permit):
            self._freeze(hour, permit, "upload bytes of a read")
            return False
        hour.uploads[permit.operation] = used
        return True

    def reserve_upload(self, permit: Permit) -> int | None:
        """Take at most a quarter of the hour's upload for one body of unknown length; None: not budgeted."""
        if permit.effect != "read":
            return None
        hour = self._hour(permit.sandbox)
        if hour is None or permit.operation in hour.frozen:
            return 0
        bound = self._upload_bound(permit)
        used = hour.uploads.get(permit.operation, 0)
        taken = max(0, min(bound - used, bound // 4))
        hour.uploads[permit.operation] = used + taken
        return taken

    def refund_upload(self, permit: Permit, count: int) -> None:
        """Give back what a reservation did not use."""
        hour = self._hours.get((permit.sandbox.tenant, permit.sandbox.id))
        if hour is not None and count > 0:
            hour.uploads[permit.operation] = max(0, hour.uploads.get(permit.operation, 0) - count)

    def _upload_bound(self, permit: Permit) -> int:
        stated = READ_UPLOADS.get(permit.operation.rpartition("/")[2])
        return self._table.read_upload_bytes if stated is None else stated // self._workers

    def missed(self, permit: Permit, native: str) -> None:
        """A registry answered 404: made-up package names are words said to whoever runs it (RULINGS 4.7)."""
        if native not in REGISTRIES:
            return
        hour = self._hour(permit.sandbox)
        if hour is None:
            return
        count = hour.missing[permit.operation] = hour.missing.get(permit.operation, 0) + 1
        if count >= self._table.missing_per_registry:
            self._freeze(hour, permit, "names that a registry does not have")

    def forget(self, tenant: str, sandbox: str) -> None:
        """The sandbox ended, or was thawed."""
        self._hours.pop((tenant, sandbox), None)

    def _freeze(self, hour: _Hour, permit: Permit, budget: str) -> None:
        if permit.operation in hour.frozen:
            return
        hour.frozen.add(permit.operation)
        left = int(hour.since + HOUR_SECONDS - self._clock.boot())
        self._on_frozen((permit.sandbox.tenant, permit.sandbox.id), permit.operation, budget, max(1, left))

    def _hour(self, sandbox: Sandbox) -> _Hour | None:
        key = (sandbox.tenant, sandbox.id)
        now = self._clock.boot()
        hour = self._hours.get(key)
        if hour is None and len(self._hours) >= self._table.sandboxes:
            return None
        if hour is None or now - hour.since >= HOUR_SECONDS:
            hour = self._hours[key] = _Hour(now)
        return hour


def _wildcard(policy: Policy, permit: Permit, facts: RequestFacts) -> str:
    """The wildcard under which the permitted rule names this host; "" where it names the host exactly."""
    role = policy.roles.get(permit.sandbox.role)
    rule = next((rule for rule in role.rules if rule.id == permit.rule), None) if role else None
    if rule is None:
        return ""
    host = facts.destination.host
    patterns: list[HostPattern] = [pattern for op in rule.operations for pattern in op.hosts]
    patterns = [pattern for pattern in (*patterns, *rule.hosts) if pattern.matches(host)]
    if any(pattern.kind == "exact" for pattern in patterns):
        return ""
    return f"{permit.rule} {patterns[0].suffix}" if patterns else ""


# --- refusals ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pace:
    """The refusals of one key in the running second, and the seconds in a row that had too many."""

    second: int
    count: int = 0
    flooded: int = 0
    frozen_until: float = 0.0


class RefusalPace:
    """How fast one sandbox (or, before identity, one source) is being refused, and whether it is frozen for it."""

    def __init__(self, table: LimitTable, clock: Clock, *, on_frozen: OnFrozen = _nobody) -> None:
        self._table = table
        self._clock = clock
        self._on_frozen = on_frozen
        self._paces: dict[tuple[str, str], _Pace] = {}

    def within(self, key: tuple[str, str]) -> bool:
        """Count one refusal of `key`; False beyond the pace: close the connection instead of keeping it alive."""
        now = self._clock.boot()
        second = int(now)
        pace = self._paces.get(key)
        if pace is None:
            if len(self._paces) >= self._table.sandboxes:
                self._paces = {k: v for k, v in self._paces.items() if v.second >= second - 1 or v.frozen_until > now}
                if len(self._paces) >= self._table.sandboxes:
                    return False
            pace = self._paces[key] = _Pace(second)
        if pace.second != second:
            in_a_row = pace.count > self._table.refusals_per_second and pace.second == second - 1
            pace.flooded = pace.flooded + 1 if in_a_row else 0
            pace.second, pace.count = second, 0
        pace.count += 1
        if key[0] and pace.flooded >= self._table.flood_seconds and now >= pace.frozen_until:
            pace.frozen_until, pace.flooded = now + self._table.frozen_seconds, 0
            self._on_frozen(key, "", "refusals", self._table.frozen_seconds)
        return pace.count <= self._table.refusals_per_second

    def frozen(self, key: tuple[str, str]) -> bool:
        """True while everything is refused to `key` because it flooded."""
        pace = self._paces.get(key)
        return pace is not None and pace.frozen_until > self._clock.boot()

    def forget(self, tenant: str, sandbox: str) -> None:
        """The sandbox ended, or was thawed."""
        self._paces.pop((tenant, sandbox), None)


class Spaced:
    """What one sandbox does too often is done late: as many at once as a second may have, then evenly spaced.

    So a connection that is refused again and again is neither worth its answers nor closed, which would only bring
    another handshake; and one that shook hands for nothing has the next ones wait.
    """

    def __init__(self, table: LimitTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._due: dict[tuple[str, str], float] = {}
        """Boot time at which the next one would be due, had they been spaced from the first."""

    def count(self, key: tuple[str, str]) -> float:
        """One more; returns how many seconds late it is."""
        now, latest = self._clock.boot(), self._table.latest_seconds
        if key not in self._due and len(self._due) >= self._table.sandboxes:
            self._due = {known: due for known, due in self._due.items() if due > now}
            if len(self._due) >= self._table.sandboxes:
                return latest
        due = max(self._due.get(key, now), now) + 1.0 / self._table.refusals_per_second
        self._due[key] = min(due, now + 1.0 + latest)
        return self.behind(key)

    def behind(self, key: tuple[str, str]) -> float:
        """How many seconds late one is that came now, 0 to `latest_seconds`; it is not counted."""
        return max(0.0, self._due.get(key, 0.0) - self._clock.boot() - 1.0)


class RefusalLeaves:
    """The budget of certificates whose only use is to carry a refusal."""

    def __init__(self, table: LimitTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._taken: dict[tuple[str, str], tuple[int, deque[float]]] = {}

    def take(self, sandbox: Sandbox) -> bool:
        """Use one up; False where the sandbox has none left."""
        key = (sandbox.tenant, sandbox.id)
        if key not in self._taken and len(self._taken) >= self._table.sandboxes:
            return False
        total, recent = self._taken.get(key, (0, deque[float]()))
        now = self._clock.boot()
        while recent and now - recent[0] >= 60.0:
            recent.popleft()
        if total >= self._table.refusal_leaves_total or len(recent) >= self._table.refusal_leaves_per_minute:
            return False
        recent.append(now)
        self._taken[key] = (total + 1, recent)
        return True

    def forget(self, tenant: str, sandbox: str) -> None:
        """The sandbox ended."""
        self._taken.pop((tenant, sandbox), None)


def _less[K](counts: dict[K, int], key: K) -> None:
    left = counts.get(key, 0) - 1
    if left > 0:
        counts[key] = left
    else:
        counts.pop(key, None)
