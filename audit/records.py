"""From an event to the bytes of its record.

Rules: a record is one line of canonical JSON (RFC 8785: keys sorted, no spaces, no floats; a property test
holds orjson's bytes equal to the rfc8785 library's). Strings are printable, at most MAX_STRING characters and
free of placeholders; what is not printable is escaped with a backslash, reversibly. Sensitive strings are keyed
digests. The client renders; the auditor checks what it received against the same rules (`accept`).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from typing import Final

import orjson

from audit.events import MAX_LIST, MAX_STRING, SENSITIVE, Event, EventInvalid, Value, check

type Rendered = str | int | bool | list[str]

MAX_ITEM: Final = 256
"""Characters of one item of a list."""
_ROOM: Final = 70
"""Characters kept free for the note of a cut string: length and digest."""
_PLACEHOLDER = re.compile(r"Xeat[0-9A-Za-z]{20}")
_DIGEST = re.compile(r"hmac:[0-9a-f]{32}\Z")
_MASK: Final = "{placeholder}"
_KEY_BYTES: Final = 32


def canonical(value: Mapping[str, object]) -> bytes:
    """The RFC 8785 bytes of a record. Keys are ASCII and numbers integers, so orjson's sorted form is that form."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def keyed_digest(key: bytes, text: str) -> str:
    """`hmac:` and 128 bits of HMAC-SHA256: equal texts can be told to be equal, nothing else (T30, I23)."""
    return "hmac:" + hmac.digest(key, text.encode("utf-8", "surrogatepass"), "sha256").hex()[:32]


def escape(text: str) -> str:
    """`text` with every unprintable character and every backslash written as a backslash escape (B156).

    Unprintable as in str.isprintable: controls, line separators, bidi and zero-width characters, surrogates.
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_escape_one(char) for char in text)


def _escape_one(char: str) -> str:
    if char == "\\":
        return "\\\\"
    if char.isprintable():
        return char
    number = ord(char)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _plain(text: str) -> bool:
    """True for the text that is written as it is: short, printable ASCII without backslash or placeholder."""
    return len(text) <= MAX_STRING and text.isascii() and text.isprintable() and "\\" not in text and "Xeat" not in text


class Renderer:
    """Turns events into JSON values under one installation's digest key (at least 32 bytes)."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < _KEY_BYTES:
            raise ValueError("the digest key has at least 32 bytes")
        self._key = key

    def fields(self, event: Event) -> dict[str, Rendered]:
        """The fields of `event` as they may be written."""
        return {
            name: value if type(value) is str and name not in SENSITIVE and _plain(value) else self._value(name, value)
            for name, value in event.fields.items()
        }

    def digest(self, text: str) -> str:
        """The keyed digest of `text` under this renderer's key."""
        return keyed_digest(self._key, text)

    def _value(self, name: str, value: Value) -> Rendered:
        if isinstance(value, str):
            return self.digest(value) if name in SENSITIVE else self._text(value, MAX_STRING)
        if isinstance(value, tuple):
            shown = value if len(value) <= MAX_LIST else value[: MAX_LIST - 1]
            if name in SENSITIVE:
                return [self.digest(item) for item in shown]
            items = [self._text(item, MAX_ITEM) for item in shown]
            if len(shown) < len(value):
                items.append(f"[{len(value) - len(shown)} more]")
            return items
        return value

    def _text(self, text: str, bound: int) -> str:
        if len(text) <= bound and _plain(text):
            return text
        masked = _PLACEHOLDER.sub(_MASK, text) if "Xeat" in text else text
        if len(masked) <= bound:
            whole = escape(masked)
            if len(whole) <= bound:
                return whole
        keep = bound - _ROOM
        shown = escape(masked[:keep])
        while len(shown) > bound - _ROOM:
            keep //= 2
            shown = escape(masked[:keep])
        return f"{shown}[{len(text)} characters, {self.digest(text)}]"


def accept(name: str, fields: Mapping[str, object]) -> dict[str, Value]:
    """Return `fields` as received from a client, checked: tables, types, bounds, printability, digests.

    The auditor's gate: a broken client can write nothing that this module would not have rendered.
    Raises EventInvalid.
    """
    kept = check(name, fields)
    for key, value in kept.items():
        if type(value) is str:
            if key in SENSITIVE or not _plain(value):
                _accept_text(name, key, value, MAX_STRING)
        elif isinstance(value, tuple):
            if len(value) > MAX_LIST:
                raise EventInvalid(f"{name}: {key} is too long")
            for item in value:
                _accept_text(name, key, item, MAX_ITEM)
    return kept


def _accept_text(name: str, key: str, text: str, bound: int) -> None:
    if key in SENSITIVE:
        if not _DIGEST.match(text):
            raise EventInvalid(f"{name}: {key} is not a keyed digest")
    elif len(text) > bound or not text.isprintable() or ("Xeat" in text and _PLACEHOLDER.search(text)):
        raise EventInvalid(f"{name}: {key} is not rendered")
