"""Placeholders: what a sandbox holds instead of a secret. Worthless elsewhere, recognised anywhere.

A placeholder is `prefix` + N characters + `suffix` as its *shape* `prefix{N}suffix` says. The N characters
open with a *core*: the mark `Xeat`, 16 random base62 characters and 4 checksum characters over those 20. The
core is what is looked for, so that a placeholder is found whatever surrounds it; the checksum keeps chance
(and prose about us) from raising alarms. Only letters and digits: a core looks the same in a URL, in JSON, in
a header and in a Basic user name, so text that spells one otherwise (`%58eat...`) is decoded before looking.

Providers whose names for keys are short and in capitals (AWS: `AKIA` and 16 of A-Z2-7) get `prefix{N:caps}`, N from
16: the mark `XEAT`, 8 random and 4 checksum characters of that alphabet. A shape may also be a name of NAMED.

This module tells *that* something is a placeholder. Whose it is, is asked by hash at the gate and the vault.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rules.facts import RequestFacts

MARK = "Xeat"
CORE_LENGTH = 24
"""Mark 4, random 16 (95 bits), checksum 4. The longest core: what a search in pieces must overlap."""
CAPS_MARK = "XEAT"
CAPS_LENGTH = 16
"""Mark 4, random 8 (40 bits: a name, not an authority), checksum 4 (20 bits)."""
MAX_LENGTH = 512
"""Characters of a whole placeholder; longer ones would not fit some clients' own checks."""
MIN_RANDOM_BYTES = 32
MAX_BASIC = 8192
"""A Basic value longer than this is not decoded: its cores, if any, are then unseen, so callers refuse it."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CAPS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_SHAPE = re.compile(r"([A-Za-z0-9._~:-]*)\{([0-9]{1,3})(:caps)?\}([A-Za-z0-9._~-]*)\Z")
# A lookahead, so that a core that begins inside a false one is still seen.
_CORE = re.compile(r"(?=(Xeat[0-9A-Za-z]{20}))")
_CAPS_CORE = re.compile(r"(?=(XEAT[A-Z2-7]{12}))")

_JWT_HEAD = "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0"  # {"alg":"none","typ":"JWT"}
_JWT_BODY = "eyJpc3MiOiJleGVhdC5pbnRlcm5hbCIsInN1YiI6InBsYWNlaG9sZGVyIiwiaWF0IjoxNzAwMDAwMDAwLCJleHAiOjQxMDI0NDQ4MDB9"
NAMED: dict[str, str] = {"jwt": f"{_JWT_HEAD}.{_JWT_BODY}.{{43}}"}
"""Shapes by name. `jwt` parses as a token that expires in the year 2100, and its core is where a signature stands."""


class InvalidShape(ValueError):
    """A placeholder shape that cannot be used. str() is a fixed sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a request head holds cores: `name` is the header or query name (lower case for headers), "" for paths."""

    where: Literal["path", "query", "header", "basic"]
    name: str
    cores: tuple[str, ...]


def make(shape: str, random: bytes) -> str:
    """Return the placeholder of `shape` made from `random` (at least 32 bytes from a secure source).

    The same arguments give the same placeholder. Raises InvalidShape, and ValueError for too little randomness.
    """
    parsed = _parse(shape)
    if len(random) < MIN_RANDOM_BYTES:
        raise ValueError("a placeholder needs at least 32 random bytes")
    letters = _letters(random, parsed.count - len(MARK) - 4, parsed.alphabet)
    cut = parsed.core - len(MARK) - 4
    head = parsed.mark + letters[:cut]
    return f"{parsed.prefix}{head}{_checksum(head, parsed.alphabet)}{letters[cut:]}{parsed.suffix}"


@cache
def pattern(shape: str) -> re.Pattern[str]:
    """What any placeholder of `shape` matches (`fullmatch`, or `finditer` within a text). Raises InvalidShape."""
    parsed = _parse(shape)
    letters = "[A-Z2-7]" if parsed.alphabet is _CAPS else "[0-9A-Za-z]"
    return re.compile(f"{re.escape(parsed.prefix)}{letters}{{{parsed.count}}}{re.escape(parsed.suffix)}")


def find(text: str) -> tuple[str, ...]:
    """Return every core with a valid checksum in `text`, in order, each once. No bound: callers bound `text`."""
    found: dict[str, None] = {}
    if MARK in text:
        for match in _CORE.finditer(text):
            core = match[1]
            if _checksum(core[:-4], _ALPHABET) == core[-4:]:
                found[core] = None
    if CAPS_MARK in text:
        for match in _CAPS_CORE.finditer(text):
            core = match[1]
            if _checksum(core[:-4], _CAPS) == core[-4:]:
                found[core] = None
    return tuple(found)


def contains(text: str) -> bool:
    """True if `text` holds a core."""
    return bool(find(text))


def find_in_basic(value: str) -> tuple[str, ...]:
    """Return the cores inside a decoded `Basic` header value; () for anything that is not Basic.

    Decoding is lenient on purpose (both alphabets, padding optional): a lenient origin must not see more than we do.
    """
    pair = _decode_basic(value)
    return () if pair is None else find(pair)


def split_basic(value: str) -> tuple[str, str] | None:
    """Return (user, password) of a well-formed `Basic` value (RFC 7617), or None."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic" or len(encoded) > MAX_BASIC:
        return None
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).decode("utf-8").partition(":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None


def find_in_head(facts: RequestFacts) -> tuple[Found, ...]:
    """Return every place of a request head that holds a core: path, query, headers, and decoded Basic values.

    Query names are searched like values. A raw and a decoded spelling both count (RULINGS 4.4).
    """
    found: list[Found] = []
    path = find("\n".join((facts.path.raw, *facts.path.segments)))
    if path:
        found.append(Found(where="path", name="", cores=path))
    if facts.query.raw:
        covered: set[str] = set()
        for name, value in facts.query.pairs:
            in_name, in_value = find(name), find(value)
            covered.update(in_name, in_value)
            if in_name:
                found.append(Found(where="query", name="", cores=in_name))
            if in_value:
                found.append(Found(where="query", name=name, cores=in_value))
        # Across a separator ("a=Xeat...&..." split oddly) nothing matches; raw text still must not surprise us.
        rest = tuple(core for core in find(facts.query.raw) if core not in covered)
        if rest:
            found.append(Found(where="query", name="", cores=rest))
    for name, value in facts.headers:
        plain = find(f"{name}\n{value}")
        if plain:
            found.append(Found(where="header", name=name, cores=plain))
        basic = find_in_basic(value)
        if basic:
            found.append(Found(where="basic", name=name, cores=basic))
    return tuple(found)


def public_prefix(shape: str) -> str:
    """Return the part of `shape` that everyone knows (`sk_live_`). Raises InvalidShape."""
    return _parse(shape).prefix


def check_shape(shape: str) -> None:
    """Raise InvalidShape unless `shape` can be used."""
    _parse(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    prefix: str
    count: int
    suffix: str
    alphabet: str
    mark: str
    core: int
    """Characters of its core."""


@cache
def _parse(shape: str) -> _Shape:
    match = _SHAPE.match(NAMED.get(shape, shape))
    if match is None:
        raise InvalidShape("a shape is prefix{N}suffix with letters, digits and . _ ~ -")
    prefix, count, caps, suffix = match[1], int(match[2]), bool(match[3]), match[4]
    core = CAPS_LENGTH if caps else CORE_LENGTH
    if count < core:
        raise InvalidShape(f"a shape needs at least {{{core}}} characters")
    if len(prefix) + count + len(suffix) > MAX_LENGTH:
        raise InvalidShape("a shape is too long")
    if any(mark in text for mark in (MARK, CAPS_MARK) for text in (prefix, suffix)):
        raise InvalidShape("a shape does not hold the mark of placeholders itself")
    return _Shape(
        prefix=prefix,
        count=count,
        suffix=suffix,
        alphabet=_CAPS if caps else _ALPHABET,
        mark=CAPS_MARK if caps else MARK,
        core=core,
    )


def _letters(random: bytes, count: int, alphabet: str) -> str:
    # SHAKE-256 stretches the input; bytes that would favour some letters are dropped.
    stream = hashlib.shake_256(b"exeat placeholder" + random).digest(2 * count + 64)
    size = len(alphabet)
    letters = [alphabet[byte % size] for byte in stream if byte < 256 - 256 % size]
    return "".join(letters[:count])


def _checksum(head: str, alphabet: str) -> str:
    number = int.from_bytes(hashlib.sha256(head.encode("ascii")).digest())
    letters = []
    for _ in range(4):
        number, digit = divmod(number, len(alphabet))
        letters.append(alphabet[digit])
    return "".join(letters)


def _decode_basic(value: str) -> str | None:
    scheme, _, encoded = value.strip().partition(" ")
    if scheme.lower() != "basic" or len(encoded) > MAX_BASIC:
        return None
    text = encoded.strip().rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4)).decode("latin-1")
    except (binascii.Error, ValueError):
        return None
