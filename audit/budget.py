"""How much of the log one sandbox may use (RULINGS 9.2).

Rules: the first REFUSALS_A_SECOND refusals of a sandbox in a second are written singly, the rest counted into one
`refusals.summarised` a second. A sandbox has a quota of log bytes an hour; beyond it new ordinary requests are
refused (UNAVAILABLE), while outcomes, credentialed, administrative and sealing records still get in, up to twice
the quota. Below the disk reserve only those are written, for everyone. Allowed requests are never only counted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from audit.events import Value

REFUSALS_A_SECOND: Final = 50
QUOTA_BYTES: Final = 256 << 20
RESERVE_BYTES: Final = 64 << 20
WINDOW_S: Final = 3_600
MAX_SANDBOXES: Final = 4_096
"""Sandboxes with counters of their own; later ones share one set until the window ends."""
MAX_TARGETS: Final = 32

REFUSALS: Final = frozenset(
    {"request.refused", "connection.refused", "broker.refused", "placeholder.misused", "client.distrusts-ca"}
)
ORDINARY: Final = REFUSALS | {"request.intent", "request.handoff", "tunnel.intent", "approval.requested"}
"""Records that begin something: these stop when room runs out."""


class Room(enum.Enum):
    """The answer to one record."""

    NONE = "none"
    COUNT = "count"
    WRITE = "write"


type Owner = tuple[str, str]
"""(tenant, sandbox); without a sandbox ("", name of the channel)."""


@dataclass(slots=True)
class _Use:
    window: int = -1
    used: int = 0
    second: int = -1
    refusals: int = 0
    told: bool = False


@dataclass(slots=True)
class Summary:
    """Refusals of one sandbox that were only counted since the last summary. Targets are digests already."""

    who: dict[str, Value]
    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, object]:
        """As fields of `refusals.summarised`, as written."""
        reasons = [f"{reason}={count}" for reason, count in sorted(self.reasons.items())[:MAX_TARGETS]]
        return {**self.who, "count": self.count, "reasons": reasons, "targets": self.targets}


class Budget:
    """Counters of all sandboxes. `now_s` is the boot clock in seconds; `digest` makes keyed digests of targets."""

    def __init__(
        self,
        digest: Callable[[str], str],
        *,
        refusals_a_second: int = REFUSALS_A_SECOND,
        quota_bytes: int = QUOTA_BYTES,
    ) -> None:
        self._digest = digest
        self._refusals = refusals_a_second
        self._quota = quota_bytes
        self._uses: dict[Owner, _Use] = {}
        self._summaries: dict[Owner, Summary] = {}
        self.short = False
        """The disk is below its reserve."""

    def admit(self, channel: str, name: str, fields: Mapping[str, Value], size: int, now_s: float) -> Room:
        """Is there room for this record of about `size` bytes? Charges it if so, counts it if it is to be counted."""
        sandbox = fields.get("sandbox")
        owner = (str(fields.get("tenant", "")), str(sandbox)) if sandbox else ("", channel)
        use = self._use(owner, now_s)
        if name in REFUSALS:
            if use.second != int(now_s):
                use.second, use.refusals = int(now_s), 0
            use.refusals += 1
            over = sandbox is not None and use.used + size > self._quota
            if use.refusals > self._refusals or over or self.short:
                self._count(owner, fields)
                return Room.COUNT
        elif name in ORDINARY:
            if self.short or use.used + size > self._quota:
                return Room.NONE
        elif sandbox is not None and use.used + size > 2 * self._quota:
            return Room.NONE
        if sandbox is not None:
            use.used += size
        return Room.WRITE

    def reached(self, fields: Mapping[str, Value], now_s: float) -> bool:
        """True once per window for a sandbox without room: `log.quota-reached` is due."""
        if self.short or "sandbox" not in fields or "tenant" not in fields:
            return False
        use = self._use((str(fields["tenant"]), str(fields["sandbox"])), now_s)
        if use.told:
            return False
        use.told = True
        return True

    def summaries(self) -> list[Summary]:
        """What was counted since the last call."""
        taken, self._summaries = list(self._summaries.values()), {}
        return taken

    def _use(self, owner: Owner, now_s: float) -> _Use:
        window = int(now_s) // WINDOW_S
        use = self._uses.get(owner)
        if use is None:
            if len(self._uses) >= MAX_SANDBOXES:
                self._uses = {key: kept for key, kept in self._uses.items() if kept.window == window}
            if len(self._uses) >= MAX_SANDBOXES:
                owner = ("", "")
            use = self._uses.setdefault(owner, _Use())
        if use.window != window:
            use.window, use.used, use.told = window, 0, False
        return use

    def _count(self, owner: Owner, fields: Mapping[str, Value]) -> None:
        if owner not in self._summaries and len(self._summaries) >= MAX_SANDBOXES:
            owner = ("", "")
        summary = self._summaries.get(owner)
        if summary is None:
            who: dict[str, Value] = {}
            if owner[1]:
                who = {
                    key: fields[key] for key in ("tenant", "sandbox", "owner", "agent", "task", "role") if key in fields
                }
            summary = self._summaries[owner] = Summary(who=who)
        summary.count += 1
        reason = str(fields.get("reason", ""))
        if reason in summary.reasons or len(summary.reasons) < MAX_TARGETS:
            summary.reasons[reason] = summary.reasons.get(reason, 0) + 1
        if len(summary.targets) < MAX_TARGETS:
            target = self._digest(f"{fields.get('host', fields.get('connect_host', ''))}:{fields.get('port', '')}")
            if target not in summary.targets:
                summary.targets.append(target)
