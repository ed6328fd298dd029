"""`RecentRefusals`: what `http://exeat.internal/why/<request id>` can tell. This worker's memory only, bounded.

Kept per (tenant, sandbox); another sandbox's ids are as unknown as ones that never existed (RULINGS 8.2).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

PER_SANDBOX = 200
SANDBOXES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalNote:
    """One refusal as its own sandbox may see it. `path` has no query and no placeholder."""

    request_id: str
    at: float
    """Wall time in seconds."""
    reason: str
    rule: str = ""
    remedy: str = ""
    message: str = ""
    ticket: str = ""
    method: str = ""
    scheme: str = ""
    host: str = ""
    port: int = 0
    path: str = ""


class RecentRefusals:
    """The newest PER_SANDBOX refusals of each of the SANDBOXES sandboxes refused last."""

    def __init__(self) -> None:
        self._notes: OrderedDict[tuple[str, str], OrderedDict[str, RefusalNote]] = OrderedDict()

    def note(self, tenant: str, sandbox: str, note: RefusalNote) -> None:
        """Remember one."""
        notes = self._notes.setdefault((tenant, sandbox), OrderedDict())
        self._notes.move_to_end((tenant, sandbox))
        notes[note.request_id] = note
        if len(notes) > PER_SANDBOX:
            notes.popitem(last=False)
        if len(self._notes) > SANDBOXES:
            self._notes.popitem(last=False)

    def find(self, tenant: str, sandbox: str, request_id: str) -> RefusalNote | None:
        """The sandbox's own refusal with that id, or None."""
        return self._notes.get((tenant, sandbox), OrderedDict[str, RefusalNote]()).get(request_id)

    def newest(self, tenant: str, sandbox: str, count: int = 20) -> tuple[RefusalNote, ...]:
        """The sandbox's newest refusals, newest first."""
        notes = self._notes.get((tenant, sandbox), OrderedDict[str, RefusalNote]())
        return tuple(reversed(notes.values()))[:count]

    def forget(self, tenant: str, sandbox: str) -> None:
        """The sandbox ended."""
        self._notes.pop((tenant, sandbox), None)
