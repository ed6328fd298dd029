"""`Search`: what is looked for in streams of bytes. It knows marks and looks, never a secret, and tells places only."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

import ahocorasick_rs

from exeat.scan.shapes import LONGEST as LONGEST_LOOK
from exeat.scan.shapes import SHAPES
from rules.placeholders import contains
from wire.marks import LONGEST as LONGEST_MARK
from wire.marks import Mark, digest

OVERLAP = max(LONGEST_MARK, LONGEST_LOOK)
"""Bytes that two pieces of a stream have in common, so that nothing falls between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing in one stream: how often, and where first. `kind`: "secret" (one of ours) or "token" (by its look)."""

    place: str
    kind: str
    name: str
    form: str
    offset: int
    count: int


class Search:
    """One scan's question; `stream` gives what looks through one stream of bytes."""

    def __init__(self, key: bytes, marks: Iterable[Mark], *, looks: bool = True) -> None:
        self.key = key
        self.by_lead: dict[bytes, list[Mark]] = {}
        for mark in marks:
            self.by_lead.setdefault(mark.lead, []).append(mark)
        self.looks = {prefix: (name, look) for name, prefix, look in SHAPES} if looks else {}
        self.patterns = sorted({*self.by_lead, *self.looks})
        self.automaton = ahocorasick_rs.BytesAhoCorasick(self.patterns)

    def stream(self, place: str) -> Stream:
        """A fresh look-through. `place` names the stream to a person."""
        return Stream(self, place)


class Stream:
    """Feed it everything, then `end` it."""

    def __init__(self, search: Search, place: str) -> None:
        self._search = search
        self._place = place
        self._held = b""
        self._before = 0
        """Bytes that came before what is held."""
        self._found: dict[tuple[str, str, str], tuple[int, int]] = {}

    def feed(self, data: bytes) -> None:
        """The next bytes, however they were cut."""
        self._held += data
        if len(self._held) > 2 * OVERLAP:
            self._look(len(self._held) - OVERLAP)

    def end(self) -> tuple[Finding, ...]:
        """What was found in all of it."""
        self._look(len(self._held))
        return tuple(
            Finding(place=self._place, kind=kind, name=name, form=form, offset=offset, count=count)
            for (kind, name, form), (offset, count) in sorted(self._found.items())
        )

    def _look(self, until: int) -> None:
        """Take every place that begins before `until`, and let go of what lies before it."""
        search, data = self._search, self._held
        for index, start, _ in search.automaton.find_matches_as_indexes(data, overlapping=True):
            if start >= until:
                continue
            lead = search.patterns[index]
            for mark in search.by_lead.get(lead, ()):
                piece = data[start : start + mark.length]
                if len(piece) == mark.length and hmac.compare_digest(digest(search.key, piece), mark.digest):
                    self._note("secret", mark.name, mark.form, start)
            if (look := search.looks.get(lead)) is not None:
                found = look[1].match(data, start, start + LONGEST_LOOK)
                if found is not None and not contains(found[0].decode("latin-1")):
                    self._note("token", look[0], "by its look", start)
        self._before += until
        self._held = data[until:]

    def _note(self, kind: str, name: str, form: str, start: int) -> None:
        first, count = self._found.get((kind, name, form), (self._before + start, 0))
        self._found[kind, name, form] = (first, count + 1)
