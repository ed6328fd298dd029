"""Scrubbing: no byte that goes to a sandbox shows a secret in any promised form, whatever the split (I14).

The closed list of forms (docs/limits.md says it too). A run of 12 bytes of a secret's unpredictable part is a hit, as

    raw        the bytes themselves
    base64     standard and URL alphabet, all three alignments, padded or not (HTTP Basic is one of them)
    hex        upper, lower and mixed case
    percent    `%XX`, any case of the digits, any subset of the characters escaped
    JSON       `\\uXXXX` (surrogate pairs too) and `\\" \\\\ \\/ \\b ...`, any subset escaped
               and percent inside JSON; base64 and hex inside percent or JSON

Percent and JSON are undone by a decoder that remembers where each byte came from; they are not enumerated. Not
promised: other transforms (reversed, spaced, line-wrapped, HTML entities, two layers of one escape, encryption).

How it streams (RULINGS 11.11): bytes are held back only while they are a proper prefix of a pattern in some view,
or an unfinished escape; all else leaves with the `feed` that brought it. A hit is masked at the same length.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import ahocorasick_rs

RUN = 12
"""Bytes of the unpredictable part that make a hit; shorter secrets are refused when they are added (RULINGS 7.1)."""
MASK = b"*"
MAX_MATERIAL = 128 * 1024
"""Bytes of secrets in one scrubber; beyond it the call is not made."""
STREAM_BYTES = 256 * 1024
"""After this many bytes searched, a set builds the automaton that is slow to build and fast to run."""
FAST_PATTERNS = 512
"""Patterns up to which it does: for more, that automaton takes megabytes."""
_PIECE_BYTES = 400
"""What looking at one more piece costs, in bytes searched instead."""
_FEW_SYMBOLS = 3
"""A window of so few distinct bytes is no part of anything unpredictable; the whole secret still counts."""
SLICE_BYTES = 64 * 1024
SLICE_ESCAPES = 512
"""Searched at once: undoing an escape costs a microsecond, so that 64 KiB of nothing else take 20 to 70 ms."""


class ScrubError(Exception):
    """The answer cannot be shown clean: it is withheld. str() is a fixed sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """One byte string that must not come back. `public_prefix` is the part that everyone knows (`ghp_`)."""

    value: bytes = field(repr=False)
    public_prefix: bytes = b""

    @property
    def unpredictable(self) -> bytes:
        if self.public_prefix and self.value.startswith(self.public_prefix):
            rest = self.value[len(self.public_prefix) :]
            if len(rest) >= RUN:
                return rest
        return self.value


class Patterns:
    """The compiled scrub set of a call. Holds secret material: it lives as long as a call that uses it, never longer.

    Building costs about 0.3 ms for a 40-byte secret and 20 ms for a 1.7 kB key; large sets are built in a thread by
    the executor. Raises ScrubError over MAX_MATERIAL.
    """

    __slots__ = (
        "__weakref__",
        "_exact",
        "_exact_ends",
        "_exact_patterns",
        "_folded",
        "_folded_ends",
        "_until_fast",
        "empty",
        "escapes",
        "longest",
    )

    def __init__(self, guarded: Iterable[Guarded]) -> None:
        values = {item.unpredictable for item in guarded if len(item.value) >= RUN}
        if sum(map(len, values)) > MAX_MATERIAL:
            raise ScrubError("the scrub set is too large")
        exact: set[bytes] = set()
        folded: set[bytes] = set()
        self._exact_ends: list[_Prefixes] = []
        self._folded_ends: list[_Prefixes] = []
        for value in values:
            width = min(RUN, len(value))
            for lead in range(3):
                self._add_base64(value, width, lead, exact)
            for start in _windows(value, width):
                exact.add(value[start : start + width])
                folded.add(value[start : start + width].hex().encode())
            self._exact_ends.append(_Prefixes(value, width, width))
            self._folded_ends.append(_Prefixes(value.hex().encode(), 2 * width, 2 * width))
        self.empty = not exact
        self.escapes = _telling_escapes(b"".join(values))
        """Finds a JSON escape that could hide a byte of a pattern; where none is, the text is its own reading."""
        self.longest = max((len(pattern) for pattern in exact | folded), default=0)
        implementation = ahocorasick_rs.Implementation.ContiguousNFA
        self._exact_patterns = sorted(exact)
        self._exact = ahocorasick_rs.BytesAhoCorasick(self._exact_patterns, implementation=implementation)
        self._folded = ahocorasick_rs.BytesAhoCorasick(sorted(folded), implementation=implementation)
        self._until_fast = STREAM_BYTES if len(exact) <= FAST_PATTERNS else 0

    def find(self, text: bytes) -> list[tuple[int, int]]:
        """Return (start, end) of every occurrence in `text`, overlapping ones included."""
        if self._until_fast > 0:
            self._until_fast -= len(text)
            if self._until_fast <= 0:
                fast = ahocorasick_rs.Implementation.DFA
                self._exact = ahocorasick_rs.BytesAhoCorasick(self._exact_patterns, implementation=fast)
        found = [(start, end) for _, start, end in self._exact.find_matches_as_indexes(text, overlapping=True)]
        found += [
            (start, end) for _, start, end in self._folded.find_matches_as_indexes(text.lower(), overlapping=True)
        ]
        return found

    def held(self, text: bytes) -> int:
        """Return the length of the longest end of `text` that is a proper prefix of a pattern."""
        tail = text[-self.longest :] if self.longest else b""
        longest = max((ends.longest(tail) for ends in self._exact_ends), default=0)
        lowered = tail.lower()
        return max(longest, max((ends.longest(lowered) for ends in self._folded_ends), default=0))

    def _add_base64(self, value: bytes, width: int, lead: int, exact: set[bytes]) -> None:
        """Patterns for `value` after `lead` unknown bytes: only characters that depend on nothing else."""
        encoded = base64.b64encode(bytes(lead) + value)
        first, last = -(-8 * lead // 6), 8 * (lead + len(value)) // 6
        shortest, longest = 8 * width // 6 - 1, 8 * width // 6 + 1
        for text in {encoded, encoded.translate(_URL_ALPHABET)}:
            for start in _windows(value, width):
                begin, end = -(-8 * (lead + start) // 6), 8 * (lead + start + width) // 6
                exact.add(text[begin:end])
            self._exact_ends.append(_Prefixes(text[first:last], min(shortest, last - first), longest))


class Scrubber:
    """Masks one byte stream. `hits` counts masked places so far."""

    __slots__ = ("_marks", "_open", "_patterns", "_pending", "hits")

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._pending = b""
        self._marks: list[tuple[int, int]] = []
        self._open = False
        self.hits = 0

    def feed(self, data: bytes) -> bytes:
        """Return all bytes that are decided after `data` came, masked where they hit."""
        if self._patterns.empty:
            return data
        self._pending += data
        views = _views(self._pending, self._patterns.escapes)
        self._mark(views)
        return self._release(self._boundary(views))

    def finish(self) -> bytes:
        """Return what was held: the stream is over, so it was no secret (its marked parts stay masked)."""
        return self._release(len(self._pending))

    def _mark(self, views: Sequence[_View]) -> None:
        spans = self._marks
        for view in views:
            for offset, text in view.pieces(self._patterns.longest):
                found = self._patterns.find(text)
                if found:
                    spans = spans + [(view.begin(offset + start), view.end(offset + end)) for start, end in found]
        if spans is not self._marks:
            self._marks = _merged(spans)

    def _boundary(self, views: Sequence[_View]) -> int:
        """Where the held part starts: the earliest need of any view, moved to a place where none splits an escape."""
        cut = len(self._pending)
        for view in views:
            held = self._patterns.held(view.text)
            cut = min(cut, view.begin(len(view.text) - held) if held else view.whole)
        moved = True
        while moved:
            moved = False
            for view in views:
                start = view.token_start(cut)
                if start < cut:
                    cut, moved = start, True
        return cut

    def _release(self, cut: int) -> bytes:
        if cut == 0:
            return b""
        out = bytearray(self._pending[:cut])
        rest: list[tuple[int, int]] = []
        for start, end in self._marks:
            if start < cut:
                stop = min(end, cut)
                out[start:stop] = MASK * (stop - start)
                self.hits += not (start == 0 and self._open)
            if end > cut:
                rest.append((max(start, cut) - cut, end - cut))
        # A place that reaches over the cut was counted now; its rest starts the next piece.
        self._open = any(start < cut < end for start, end in self._marks)
        self._pending = self._pending[cut:]
        self._marks = rest
        return bytes(out)


def slices(data: bytes) -> Iterator[bytes]:
    """`data` in parts of at most SLICE_BYTES and about SLICE_ESCAPES escapes: each a millisecond or two to search."""
    for start in range(0, len(data), SLICE_BYTES):
        yield from _slices(data[start : start + SLICE_BYTES])


def _slices(data: bytes) -> Iterator[bytes]:
    if data.count(b"%") + data.count(b"\\") <= SLICE_ESCAPES:
        yield data
        return
    middle = len(data) // 2
    yield from _slices(data[:middle])
    yield from _slices(data[middle:])


def scrub_whole(data: bytes, patterns: Patterns) -> tuple[bytes, int]:
    """Return `data` masked and the number of masked places: for header values and short texts."""
    scrubber = Scrubber(patterns)
    out = scrubber.feed(data) + scrubber.finish()
    return out, scrubber.hits


# Views: the text as it is, and with escapes undone, each knowing where its bytes came from.

_URL_ALPHABET = bytes.maketrans(b"+/", b"-_")
_PERCENT = re.compile(rb"%([0-9A-Fa-f]{2})")
_PERCENT_OPEN = re.compile(rb"%[0-9A-Fa-f]?\Z")
_JSON = re.compile(
    rb"\\(?:u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})"
    # A high surrogate whose low half may still come is unfinished, not alone.
    rb"|u(?![dD][89abAB][0-9A-Fa-f]{2}(?:\\(?:u[0-9A-Fa-f]{0,3})?)?\Z)([0-9A-Fa-f]{4})"
    rb"|([\"\\/bfnrt]))"
)
_JSON_OPEN = re.compile(rb"\\(?:u(?:[0-9A-Fa-f]{0,3}|[dD][89abAB][0-9A-Fa-f]{2}(?:\\(?:u[0-9A-Fa-f]{0,3})?)?))?\Z")
_LONGEST_OPEN = 16
"""More than the bytes of the longest unfinished escape."""
_SHORT_ESCAPES = {b'"': b'"', b"\\": b"\\", b"/": b"/", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


class _View:
    """A reading of the pending bytes. Positions of `text` map back to the pending bytes by `begin` and `end`."""

    __slots__ = ("_derived", "_parent", "_sizes", "_starts", "_tokens", "text", "whole")

    def __init__(
        self,
        text: bytes,
        tokens: list[tuple[int, int, int, int]],
        whole: int,
        parent: _View | None = None,
        *,
        derived: bool = True,
    ) -> None:
        self.text = text
        self._derived = derived
        self._tokens = tokens
        """(position in text, bytes in text, source start, source end) of each undone escape."""
        self._starts = [token[0] for token in tokens]
        self._sizes = [token[2] for token in tokens]
        self._parent = parent
        if parent is not None:
            whole = parent.begin(whole) if whole < len(parent.text) else parent.whole
        self.whole: int = whole
        """Where in the pending bytes an unfinished escape starts; their length where none does."""

    def pieces(self, reach: int) -> list[tuple[int, bytes]]:
        """(position, bytes) of all parts of the text where a pattern of up to `reach` bytes may be new to this view.

        What touches no undone escape reads the same in the view that this one was made from, and is found there.
        """
        if not self._derived or (2 * reach + _PIECE_BYTES) * len(self._tokens) >= len(self.text):
            return [(0, self.text)]
        parts: list[tuple[int, int]] = []
        for at, size, _, _ in self._tokens:
            start, stop = max(0, at - reach), at + size + reach
            if parts and start <= parts[-1][1]:
                parts[-1] = (parts[-1][0], stop)
            else:
                parts.append((start, stop))
        return [(start, self.text[start:stop]) for start, stop in parts]

    def begin(self, position: int) -> int:
        """The first pending byte of the text byte at `position` (or the end)."""
        at = self._source(position, first=True)
        return at if self._parent is None else self._parent.begin(at)

    def end(self, position: int) -> int:
        """The pending position behind the text byte before `position`."""
        at = self._source(position - 1, first=False)
        return at if self._parent is None else self._parent.end(at)

    def token_start(self, cut: int) -> int:
        """`cut`, or the start of the escape (in pending bytes) that it would split."""
        if self._parent is not None:
            return self._split_in_parent(cut)
        index = bisect_right(self._sizes, cut) - 1
        if index >= 0:
            _, _, start, stop = self._tokens[index]
            if start < cut < stop:
                return start
        return cut

    def _split_in_parent(self, cut: int) -> int:
        assert self._parent is not None
        for _, _, start, stop in self._tokens:
            if self._parent.begin(start) < cut < self._parent.end(stop):
                return self._parent.begin(start)
        return cut

    def _source(self, position: int, *, first: bool) -> int:
        index = bisect_right(self._starts, position) - 1
        if index < 0:
            return position if first else position + 1
        start, size, source_start, source_end = self._tokens[index]
        if position < start + size:
            return source_start if first else source_end
        return source_end + position - start - size + (0 if first else 1)


def _telling_escapes(alphabet: bytes) -> re.Pattern[bytes]:
    """A pattern for the JSON escapes that stand for a byte of `alphabet` or of base64, hex and percent forms."""
    short = b"".join(name for name, byte in _SHORT_ESCAPES.items() if byte in alphabet or byte == b"/")
    wide = b"[0-9A-Fa-f]" if not alphabet.isascii() else b"00[2-7]"
    return re.compile(rb"\\(?:u" + wide + rb"|[" + re.escape(short) + rb"])")


def _views(pending: bytes, escapes: re.Pattern[bytes]) -> list[_View]:
    plain = _View(pending, [], len(pending), derived=False)
    views = [plain]
    if b"%" in pending:
        views.append(_undo_percent(plain, None))
    if b"\\" in pending:
        if escapes.search(pending) is None and not _ends_in_escape(pending):
            return views  # most JSON has only \\n and \\": no byte of a secret hides there
        unescaped = _undo_json(plain)
        views.append(unescaped)
        if b"%" in unescaped.text:
            views.append(_undo_percent(unescaped, unescaped))
    return views


def _ends_in_escape(pending: bytes) -> bool:
    """True if `pending` ends in the middle of a JSON escape."""
    match = _JSON_OPEN.search(pending, max(0, len(pending) - _LONGEST_OPEN))
    if match is None:
        return False
    before = pending[: match.start()]
    # A backslash behind an odd number of them is itself escaped: that escape is finished.
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _undo_percent(source: _View, parent: _View | None) -> _View:
    return _undo(source.text, _PERCENT, _PERCENT_OPEN, lambda match: bytes((int(match[1], 16),)), parent)


def _undo_json(source: _View) -> _View:
    return _undo(source.text, _JSON, _JSON_OPEN, _json_character, None)


def _json_character(match: re.Match[bytes]) -> bytes:
    high, low, single, short = match.groups()
    if short is not None:
        return _SHORT_ESCAPES[short]
    if high is not None:
        code = 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00
        return chr(code).encode()
    return chr(int(single, 16)).encode("utf-8", "replace")


def _undo(
    text: bytes,
    escape: re.Pattern[bytes],
    unfinished: re.Pattern[bytes],
    character: Callable[[re.Match[bytes]], bytes],
    parent: _View | None,
) -> _View:
    pieces: list[bytes] = []
    tokens: list[tuple[int, int, int, int]] = []
    at = size = 0
    for match in escape.finditer(text):
        start, stop = match.span()
        decoded = character(match)
        pieces += (text[at:start], decoded)
        size += start - at
        tokens.append((size, len(decoded), start, stop))
        size += len(decoded)
        at = stop
    open_at = unfinished.search(text, max(at, len(text) - _LONGEST_OPEN))
    whole = len(text) if open_at is None else open_at.start()
    pieces.append(text[at:whole])
    return _View(b"".join(pieces), tokens, whole, parent)


class _Prefixes:
    """All proper prefixes of the windows of one encoded secret, without listing them.

    A prefix of length k of a window is a part of `text` that ends at least `shortest - k` before its end.
    Base64 windows of one length in bytes differ by a character or two, hence `shortest` and `longest`.
    """

    __slots__ = ("_longest", "_room", "_symbols", "_text")

    def __init__(self, text: bytes, shortest: int, longest: int) -> None:
        self._text = text
        self._room = len(text) - shortest
        self._longest = longest
        self._symbols = frozenset(text)

    def longest(self, tail: bytes) -> int:
        if not tail or tail[-1] not in self._symbols:
            return 0
        best = 0
        for size in range(1, min(len(tail), self._longest - 1) + 1):
            end = tail[-size:]
            if end not in self._text:
                break
            if self._text.find(end, 0, self._room + size) >= 0:
                best = size
        return best


def _windows(value: bytes, width: int) -> list[int]:
    starts = range(len(value) - width + 1)
    telling = [start for start in starts if len(set(value[start : start + width])) > _FEW_SYMBOLS]
    return telling or list(starts)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
