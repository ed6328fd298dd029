"""`CanonicalPath` and `Query`: the only readers of request targets.

The path that is judged is the path that is sent, byte for byte. What two servers could read differently is
refused, not repaired: dot segments (also encoded), empty segments, backslashes, `;` parameters, control
bytes, invalid or lower-level-encoded percent sequences, encoded unreserved characters (`%70`, but `%7E`), and `%2F`
unless the matching operation says that it takes one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

MAX_PATH = 2048
MAX_SEGMENT = 255
MAX_QUERY = 8192

_PATH_CHARS = re.compile(r"[A-Za-z0-9._~!$&'()*+,=:@%/-]*\Z")
_QUERY_CHARS = re.compile(r"[A-Za-z0-9._~!$&'()*+,=:@%/?\[\]|^{}`-]*\Z")
_PERCENT = re.compile(r"%(.{0,2})")
_HEX2 = re.compile(r"[0-9A-Fa-f]{2}\Z")
# Without the tilde: RFC 1738 had it among the unsafe characters, and clients (apt) still encode it in file names.
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._")


class InvalidTarget(ValueError):
    """A path or query that is not canonical. str() is a fixed sentence that reflects no input."""


@dataclass(frozen=True, slots=True)
class CanonicalPath:
    """A request path: `raw` exactly as sent, `segments` percent-decoded once, `encoded_slash` if any holds %2F."""

    raw: str
    segments: tuple[str, ...]
    encoded_slash: bool = False

    @classmethod
    def parse(cls, raw: str) -> CanonicalPath:
        """Return the path for `raw` (starts with `/`, no `?`). Raises InvalidTarget.

        `/` gives one empty segment; a trailing slash gives a last empty segment; other empty segments are refused.
        """
        if not raw.startswith("/"):
            raise InvalidTarget("the path does not start with a slash")
        if len(raw) > MAX_PATH:
            raise InvalidTarget("the path is too long")
        if not _PATH_CHARS.match(raw):
            raise InvalidTarget("the path holds a character that must be percent-encoded")
        encoded_slash = False
        for match in _PERCENT.finditer(raw):
            if not _HEX2.match(match[1]):
                raise InvalidTarget("the path holds a broken percent sequence")
            value = int(match[1], 16)
            if value < 0x20 or value == 0x7F or value == 0x5C or value == 0x25:
                raise InvalidTarget("the path encodes a control, percent or backslash character")
            if chr(value) in _UNRESERVED:
                raise InvalidTarget("the path encodes a character that needs no encoding")
            if value == 0x2F:
                encoded_slash = True
        parts = raw[1:].split("/")
        segments: list[str] = []
        for index, part in enumerate(parts):
            if part == "" and index != len(parts) - 1:
                raise InvalidTarget("the path holds an empty segment")
            if len(part) > MAX_SEGMENT:
                raise InvalidTarget("a path segment is too long")
            try:
                decoded = unquote_to_bytes(part).decode("utf-8")
            except UnicodeDecodeError:
                raise InvalidTarget("the path is not UTF-8") from None
            if any(piece in (".", "..") for piece in decoded.split("/")):
                raise InvalidTarget("the path holds a dot segment")
            segments.append(decoded)
        return cls(raw, tuple(segments), encoded_slash)

    def below(self, prefix: str) -> CanonicalPath | None:
        """The path under `prefix` (plain canonical text, no slash at its end), or None where it lies elsewhere."""
        count = prefix.count("/")
        if list(self.segments[:count]) != prefix[1:].split("/") or len(self.segments) <= count:
            return None
        raw = "/" + "/".join(self.raw.split("/")[count + 1 :])
        return CanonicalPath(raw, self.segments[count:], self.encoded_slash)


@dataclass(frozen=True, slots=True)
class Query:
    """A query string: `raw` exactly as sent (without `?`; "" and absent are told apart), `pairs` decoded once."""

    raw: str | None
    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, raw: str | None) -> Query:
        """Return the query for `raw` (None: no question mark). Raises InvalidTarget. `+` decodes to a space."""
        if raw is None:
            return cls(None)
        if len(raw) > MAX_QUERY:
            raise InvalidTarget("the query is too long")
        if not _QUERY_CHARS.match(raw):
            raise InvalidTarget("the query holds a character that must be percent-encoded")
        pairs: list[tuple[str, str]] = []
        for part in raw.split("&") if raw else ():
            for match in _PERCENT.finditer(part):
                if not _HEX2.match(match[1]):
                    raise InvalidTarget("the query holds a broken percent sequence")
            name, _, value = part.partition("=")
            try:
                pairs.append((_decode(name), _decode(value)))
            except UnicodeDecodeError:
                raise InvalidTarget("the query is not UTF-8") from None
        return cls(raw, tuple(pairs))

    def duplicates(self) -> frozenset[str]:
        """Names that occur more than once."""
        seen: set[str] = set()
        twice: set[str] = set()
        for name, _ in self.pairs:
            (twice if name in seen else seen).add(name)
        return frozenset(twice)


def _decode(text: str) -> str:
    return unquote_to_bytes(text.replace("+", " ")).decode("utf-8")
