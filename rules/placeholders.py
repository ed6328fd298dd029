"""Placeholders: what a sandbox holds instead of a secret. Worthless elsewhere, recognised anywhere.

A placeholder is `prefix` + N characters + `suffix` as its *shape* `prefix{N}suffix` says. The N characters
open with a *core*: the mark `Xeat`, 16 random base62 characters and 4 checksum characters over those 20. The
core is what is looked for, so that a placeholder is found whatever surrounds it; the checksum keeps chance
(and prose about us) from raising alarms. Only letters and digits: a core looks the same in a URL, in JSON, in
a header and in a Basic user name, so text that spells one otherwise (`%58eat...`) is decoded before looking.

This module tells *that* something is a placeholder. Whose it is, is asked by hash at the gate and the vault.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from rules.facts import RequestFacts

MARK = "Xeat"
CORE_LENGTH = 24
"""Mark 4, random 16 (95 bits), checksum 4."""
MAX_LENGTH = 512
"""Characters of a whole placeholder; longer ones would not fit some clients' own checks."""
MIN_RANDOM_BYTES = 32
MAX_BASIC = 8192
"""A Basic value longer than this is not decoded: its cores, if any, are then unseen, so callers refuse it."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHAPE = re.compile(r"([A-Za-z0-9._~-]*)\{([0-9]{1,3})\}([A-Za-z0-9._~-]*)\Z")
# A lookahead, so that a core that begins inside a false one is still seen.
_CORE = re.compile(r"(?=(Xeat[0-9A-Za-z]{20}))")


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
    prefix, count, suffix = _parse(shape)
    if len(random) < MIN_RANDOM_BYTES:
        raise ValueError("a placeholder needs at least 32 random bytes")
    letters = _letters(random, count - len(MARK) - 4)
    head = MARK + letters[:16]
    return f"{prefix}{head}{_checksum(head)}{letters[16:]}{suffix}"


def find(text: str) -> tuple[str, ...]:
    """Return every core with a valid checksum in `text`, in order, each once. No bound: callers bound `text`."""
    if MARK not in text:
        return ()
    found: dict[str, None] = {}
    for match in _CORE.finditer(text):
        core = match[1]
        if _checksum(core[:20]) == core[20:]:
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
    return _parse(shape)[0]


def check_shape(shape: str) -> None:
    """Raise InvalidShape unless `shape` can be used."""
    _parse(shape)


def _parse(shape: str) -> tuple[str, int, str]:
    match = _SHAPE.match(shape)
    if match is None:
        raise InvalidShape("a shape is prefix{N}suffix with letters, digits and . _ ~ -")
    prefix, count, suffix = match[1], int(match[2]), match[3]
    if count < CORE_LENGTH:
        raise InvalidShape("a shape needs at least {24} characters")
    if len(prefix) + count + len(suffix) > MAX_LENGTH:
        raise InvalidShape("a shape is too long")
    if MARK in prefix or MARK in suffix:
        raise InvalidShape("a shape does not hold the mark of placeholders itself")
    return prefix, count, suffix


def _letters(random: bytes, count: int) -> str:
    # SHAKE-256 stretches the input; bytes of 248 and above are dropped so that every letter is equally likely.
    stream = hashlib.shake_256(b"exeat placeholder" + random).digest(2 * count + 64)
    letters = [_ALPHABET[byte % 62] for byte in stream if byte < 248]
    return "".join(letters[:count])


def _checksum(head: str) -> str:
    number = int.from_bytes(hashlib.sha256(head.encode("ascii")).digest())
    letters = []
    for _ in range(4):
        number, digit = divmod(number, 62)
        letters.append(_ALPHABET[digit])
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
