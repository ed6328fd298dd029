"""Fixed-layout fields: the only encoding of hand-off statements and control messages.

Rules: integers are big-endian and unsigned; text is UTF-8; every variable field carries its length (u32) and has a
stated bound on both sides; a reader must consume its input to the last byte; booleans are exactly 0 or 1. There are
no types, names or optional layouts on the wire, so that the vault, which reads what hostile-facing processes wrote,
has nothing to interpret (RULINGS 1.1).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from wire.frames import WireError

MAX_FIELD = 1 << 20
"""Bytes in one field unless the caller states another bound."""
MAX_ITEMS = 1024
"""Items in one list unless the caller states another bound."""


class FieldWriter:
    """Appends fields in order; `finish()` returns the bytes. Raises WireError where a value exceeds its bound."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def number(self, value: int, size: int = 8) -> FieldWriter:
        """An unsigned integer of `size` bytes (1, 2, 4 or 8)."""
        if not 0 <= value < 1 << (8 * size):
            raise WireError("a number does not fit its field")
        self._parts.append(value.to_bytes(size, "big"))
        return self

    def flag(self, value: bool) -> FieldWriter:
        self._parts.append(b"\x01" if value else b"\x00")
        return self

    def real(self, value: float) -> FieldWriter:
        """A time in seconds, as an IEEE 754 double."""
        self._parts.append(struct.pack(">d", value))
        return self

    def data(self, value: bytes, bound: int = MAX_FIELD) -> FieldWriter:
        if len(value) > bound:
            raise WireError("a field is longer than its bound")
        self._parts.append(len(value).to_bytes(4, "big"))
        self._parts.append(bytes(value))
        return self

    def text(self, value: str, bound: int = MAX_FIELD) -> FieldWriter:
        try:
            return self.data(value.encode("utf-8"), bound)
        except UnicodeEncodeError:
            raise WireError("a text field is not Unicode text") from None

    def texts(self, values: Sequence[str], items: int = MAX_ITEMS, bound: int = MAX_FIELD) -> FieldWriter:
        """A list of text fields, its count first (u32)."""
        self._count(len(values), items)
        for value in values:
            self.text(value, bound)
        return self

    def datas(self, values: Sequence[bytes], items: int = MAX_ITEMS, bound: int = MAX_FIELD) -> FieldWriter:
        self._count(len(values), items)
        for value in values:
            self.data(value, bound)
        return self

    def pairs(self, values: Sequence[tuple[str, str]], items: int = MAX_ITEMS, bound: int = MAX_FIELD) -> FieldWriter:
        """A list of (text, text), order and duplicates kept."""
        self._count(len(values), items)
        for name, value in values:
            self.text(name, bound).text(value, bound)
        return self

    def finish(self) -> bytes:
        return b"".join(self._parts)

    def _count(self, count: int, items: int) -> None:
        if count > items:
            raise WireError("a list is longer than its bound")
        self.number(count, 4)


class FieldReader:
    """Takes fields in the order in which they were written. Raises WireError at the first thing out of place."""

    __slots__ = ("_at", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    def number(self, size: int = 8) -> int:
        return int.from_bytes(self._take(size), "big")

    def flag(self) -> bool:
        value = self._take(1)
        if value not in (b"\x00", b"\x01"):
            raise WireError("a flag is neither 0 nor 1")
        return value == b"\x01"

    def real(self) -> float:
        value: float = struct.unpack(">d", self._take(8))[0]
        if value != value or value in (float("inf"), float("-inf")):
            raise WireError("a time is not a finite number")
        return value

    def data(self, bound: int = MAX_FIELD) -> bytes:
        length = self.number(4)
        if length > bound:
            raise WireError("a field is longer than its bound")
        return self._take(length)

    def text(self, bound: int = MAX_FIELD) -> str:
        try:
            return self.data(bound).decode("utf-8")
        except UnicodeDecodeError:
            raise WireError("a text field is not UTF-8") from None

    def texts(self, items: int = MAX_ITEMS, bound: int = MAX_FIELD) -> tuple[str, ...]:
        return tuple(self.text(bound) for _ in range(self._count(items)))

    def datas(self, items: int = MAX_ITEMS, bound: int = MAX_FIELD) -> tuple[bytes, ...]:
        return tuple(self.data(bound) for _ in range(self._count(items)))

    def pairs(self, items: int = MAX_ITEMS, bound: int = MAX_FIELD) -> tuple[tuple[str, str], ...]:
        return tuple((self.text(bound), self.text(bound)) for _ in range(self._count(items)))

    def finish(self) -> None:
        """Raise WireError if anything is left."""
        if self._at != len(self._raw):
            raise WireError("bytes follow the last field")

    def _count(self, items: int) -> int:
        count = self.number(4)
        if count > items:
            raise WireError("a list is longer than its bound")
        return count

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._raw):
            raise WireError("a field ends early")
        taken = self._raw[self._at : end]
        self._at = end
        return taken
