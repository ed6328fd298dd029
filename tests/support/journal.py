"""An in-memory Journal that keeps what it was told, and can be told to fail."""

from __future__ import annotations

from audit.events import Event
from audit.journal import AuditUnavailable


class MemoryJournal:
    """Same contract as the auditor's link. `events` holds (event, durable) in order; sequence starts at 1."""

    def __init__(self) -> None:
        self.events: list[tuple[Event, bool]] = []
        self.failing = False
        """True: every append raises AuditUnavailable and keeps nothing."""

    async def append(self, event: Event, *, durable: bool = False) -> int:
        """Keep the event, or raise AuditUnavailable when told to fail."""
        if self.failing:
            raise AuditUnavailable("the journal was told to fail")
        self.events.append((event, durable))
        return len(self.events)

    def names(self) -> list[str]:
        """The names of all events, in order."""
        return [event.name for event, _durable in self.events]

    def named(self, name: str) -> list[Event]:
        """All events of that name, in order."""
        return [event for event, _durable in self.events if event.name == name]
