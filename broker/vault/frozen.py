"""`FrozenTable`: what workers froze, for people who ask. The freezing itself is the workers' (proxy/limits.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rules.names import Owner

MAX_OPERATIONS: Final = 64
"""Remembered of one sandbox; a sandbox that froze more is frozen all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenNote:
    """`operation` "" is all of them. `until` is boot-clock seconds."""

    operation: str
    budget: str
    until: float


class FrozenTable:
    """One per vault. Times are boot-clock seconds, passed in."""

    def __init__(self) -> None:
        self._notes: dict[Owner, dict[str, FrozenNote]] = {}

    def note(self, owner: Owner, note: FrozenNote, now: float) -> None:
        """Remember that `note.operation` is frozen."""
        kept = {name: old for name, old in self._notes.get(owner, {}).items() if old.until > now}
        if note.operation in kept or len(kept) < MAX_OPERATIONS:
            kept[note.operation] = note
        self._notes[owner] = kept

    def of(self, owner: Owner, now: float) -> tuple[FrozenNote, ...]:
        """What is frozen for `owner`."""
        return tuple(note for note in self._notes.get(owner, {}).values() if note.until > now)

    def count(self, now: float) -> int:
        """Sandboxes for which something is frozen."""
        return sum(1 for owner in self._notes if self.of(owner, now))

    def forget(self, owner: Owner) -> None:
        """The sandbox ended or was thawed."""
        self._notes.pop(owner, None)
