"""`Live`: the LiveSet of a worker. What is open, for whom, and how to cut it at once.

Rules: `cut` callbacks abort and return; one that raises is still counted as cut and never keeps the others open. An
entry whose judgement raises under a new snapshot is cut (I09). Grouped by sandbox, so that ending one of thousands
touches only its own entries.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from proxy.gate import Admitted, Forward, Handoff
from proxy.identity import Identified
from proxy.ports import LiveKey, Registered, Snapshot
from rules.names import Owner, SandboxId


class _Entry:
    """A LiveHandle."""

    __slots__ = ("_owner", "cut", "key", "still_allowed")

    def __init__(
        self, owner: Live, key: LiveKey, cut: Callable[[str], None], still: Callable[[Snapshot], bool] | None
    ) -> None:
        self._owner = owner
        self.key = key
        self.cut = cut
        self.still_allowed = still

    def close(self) -> None:
        self._owner.remove(self)


class Live:
    """See proxy.ports.LiveSet."""

    def __init__(self) -> None:
        self._entries: dict[Owner, dict[_Entry, None]] = {}
        self._removed = asyncio.Event()

    def add(
        self, key: LiveKey, cut: Callable[[str], None], still_allowed: Callable[[Snapshot], bool] | None = None
    ) -> _Entry:
        entry = _Entry(self, key, cut, still_allowed)
        self._entries.setdefault((key.tenant, key.sandbox), {})[entry] = None
        return entry

    def remove(self, entry: _Entry) -> None:
        """Take an entry out; harmless when it is out already."""
        group = (entry.key.tenant, entry.key.sandbox)
        entries = self._entries.get(group)
        if entries is None:
            return
        entries.pop(entry, None)
        if not entries:
            del self._entries[group]
        self._removed.set()

    def cut(self, matches: Callable[[LiveKey], bool], reason: str) -> int:
        return self._cut([entry for entry in self._all() if matches(entry.key)], reason)

    def rejudge(self, snapshot: Snapshot) -> int:
        closed = 0
        for (_tenant, sandbox), entries in tuple(self._entries.items()):
            registered = snapshot.sandboxes.get(SandboxId(sandbox))
            gone = [entry for entry in entries if not _stays(entry, registered, snapshot)]
            closed += self._cut(gone, "policy" if registered is not None else "sandbox-ended")
        return closed

    def count(self, matches: Callable[[LiveKey], bool] | None = None) -> int:
        return sum(1 for entry in self._all() if matches is None or matches(entry.key))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; looked at after every removal."""
        while not condition():
            self._removed.clear()
            await self._removed.wait()

    def _all(self) -> Iterator[_Entry]:
        for entries in tuple(self._entries.values()):
            yield from tuple(entries)

    def _cut(self, entries: list[_Entry], reason: str) -> int:
        for entry in entries:
            self.remove(entry)
            with contextlib.suppress(Exception):  # one that cannot be cut must not keep the others open
                entry.cut(reason)
        return len(entries)


def _stays(entry: _Entry, registered: Registered | None, snapshot: Snapshot) -> bool:
    if registered is None or registered.sandbox.epoch != entry.key.epoch:
        return False
    if registered.sandbox.tenant != entry.key.tenant:
        return False
    if entry.still_allowed is None or entry.key.digest == snapshot.policy.digest:
        return True
    try:
        return entry.still_allowed(snapshot)
    except Exception:
        return False


# --- what an entry belongs to ---


def connection_key(who: Identified) -> LiveKey:
    """The live entry of a whole connection: it lives as long as its sandbox, each request is judged anew."""
    sandbox = who.sandbox
    return LiveKey(
        tenant=sandbox.tenant,
        sandbox=sandbox.id,
        epoch=sandbox.epoch,
        host="",
        port=0,
        rule="",
        digest="",
        kind="connection",
    )


def tunnel_key(admitted: Admitted) -> LiveKey:
    """The live entry of an open CONNECT."""
    return LiveKey(
        tenant=admitted.sandbox.tenant,
        sandbox=admitted.sandbox.id,
        epoch=admitted.sandbox.epoch,
        host=admitted.facts.host.text,
        port=admitted.facts.port,
        rule=admitted.permit.rule or "",
        digest=admitted.policy_digest,
        kind="tunnel",
    )


def live_key(passage: Forward | Handoff) -> LiveKey:
    """What this exchange belongs to."""
    return LiveKey(
        tenant=passage.sandbox.tenant,
        sandbox=passage.sandbox.id,
        epoch=passage.sandbox.epoch,
        host=passage.permit.destination.host.text,
        port=passage.permit.destination.port,
        rule=passage.permit.rule,
        digest=passage.policy_digest,
        kind="exchange",
        credential=passage.permit.credential or "",
    )
