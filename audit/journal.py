"""The port through which every other room writes to the log.

Rule of use: append the intent, await it, and only then send the first byte upstream. If it raises, refuse.
The real one is link.AuditorLink; the fake is tests/support/journal.MemoryJournal; one contract suite runs
against both (tests/unit/audit/test_journal_contract.py).
"""

from __future__ import annotations

from typing import Final, Protocol

from audit.events import AuditError, Event

DEADLINE_S: Final = 2.0
"""RULINGS 9.1: what is not acknowledged by then is refused."""


class AuditUnavailable(AuditError):
    """The record could not be written in time: refuse the request (reason `audit-unavailable`).

    It may still reach the log later: an intent without an outcome is what a reader then sees.
    """


class Journal(Protocol):
    """Append events; the number returned is the record's sequence in the log of this node."""

    async def append(self, event: Event, *, durable: bool = False) -> int:
        """Write one event and return its sequence number.

        `durable` False: returns once the auditor's write returned (survives the death of our processes).
        `durable` True: returns once the file, and its directory when new, were fsynced.
        A refusal beyond its sandbox's budget is counted instead of written and returns 0.
        Raises AuditUnavailable after DEADLINE_S or when the auditor is gone or refuses the event.
        """
        ...
