"""Leaves for workers: rate-limited per sandbox, recorded (RULINGS 5.5, 5.6)."""

from __future__ import annotations

from collections import deque

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.vault.ca import AuthorityError, CertificateAuthority
from broker.vault.clock import Clock
from broker.vault.records import Fields, who
from broker.vault.sandboxes import SandboxTable
from rules.names import Host, InvalidName, Owner
from wire.control import Leaf, LeafRefused, LeafRequest
from wire.handoff import SELF_CHECK, SELF_CHECK_TENANT

MINUTE = 60.0
LEAVES_PER_MINUTE = 120
"""For hosts that a rule inspects; a worker asks once per host and caches."""
HOUR = 3600.0
LEAVES_PER_HOUR = 600
"""The same, in an hour; refusal leaves have their own bound."""
REFUSAL_LEAVES_PER_MINUTE = 20
REFUSAL_LEAVES = 200
"""In all, per sandbox (RULINGS 5.6)."""


class LeafOffice:
    """Mints what workers ask for, within the budgets."""

    def __init__(self, authority: CertificateAuthority, clock: Clock, table: SandboxTable, journal: Journal) -> None:
        self._authority = authority
        self._clock = clock
        self._table = table
        self._journal = journal
        self._recent: dict[tuple[str, str, bool], deque[float]] = {}
        self._refusals: dict[Owner, int] = {}

    async def mint(self, request: LeafRequest, spki: bytes, worker: str) -> Leaf | LeafRefused:
        """The chain for `request`, or why not. Never raises."""
        record = self._table.get(request.sandbox, request.tenant)
        fields: Fields = {} if record is None else who(record.sandbox)
        if (request.tenant, request.sandbox, request.refusal) == (SELF_CHECK_TENANT, SELF_CHECK, False):
            # A worker's own, for a name that nobody can have (RFC 6761).
            fields = {"tenant": SELF_CHECK_TENANT, "sandbox": SELF_CHECK} if request.host.endswith(".invalid") else {}
        if not fields:
            return LeafRefused(id=request.id, reason="sandbox-ended")
        if not self.charge((request.tenant, request.sandbox), refusal=request.refusal):
            return LeafRefused(id=request.id, reason="limit-reached")
        try:
            host = Host.of(request.host)
            # By the clock of those who verify it: where ours was ahead and was put right, the floor lies in the future.
            chain = self._authority.mint(host, spki, self._clock.machine())
        except (InvalidName, AuthorityError):
            return LeafRefused(id=request.id, reason="bad-target")
        fields |= {"host": host.text, "channel": worker}
        if request.refusal:
            fields["reason"] = "refusal"
        try:
            await self._journal.append(Event("certificate.minted", fields))
        except AuditUnavailable:
            return LeafRefused(id=request.id, reason="audit-unavailable")
        return Leaf(id=request.id, chain_pem=chain.encode("ascii"))

    def forget(self, owner: Owner) -> None:
        """The sandbox ended."""
        self._refusals.pop(owner, None)
        for refusal in (False, True):
            self._recent.pop((*owner, refusal), None)

    def charge(self, owner: Owner, *, refusal: bool) -> bool:
        """Count one leaf of `owner`; False, and nothing counted, where a budget is used up."""
        now = self._clock.boot()
        window = self._recent.setdefault((*owner, refusal), deque())
        while window and window[0] <= now - HOUR:
            window.popleft()
        a_minute = REFUSAL_LEAVES_PER_MINUTE if refusal else LEAVES_PER_MINUTE
        if len(window) >= LEAVES_PER_HOUR or (len(window) >= a_minute and window[-a_minute] > now - MINUTE):
            return False
        if refusal:
            if self._refusals.get(owner, 0) >= REFUSAL_LEAVES:
                return False
            self._refusals[owner] = self._refusals.get(owner, 0) + 1
        window.append(now)
        return True
