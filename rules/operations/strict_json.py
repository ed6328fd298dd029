"""Strict JSON: one text, one meaning. What two parsers could read differently is refused (RFC 8259, RFC 7493).

Refused: a byte order mark, UTF-16 and UTF-32, bytes that are not UTF-8, duplicate keys, NaN and Infinity,
numbers that overflow, lone surrogates, and anything beyond the caps. Depth and size are counted on the bytes
before the parser runs, so that hostile nesting never reaches its recursion.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_NODES = 200_000
"""Values and keys, counted generously: separators plus containers."""
MAX_DIGITS = 40
"""Characters of one number. Longer ones mean different things to different parsers."""


class InvalidJson(ValueError):
    """The bytes are not strict JSON. str() is a fixed sentence that reflects no input."""


def load(body: bytes, *, depth: int = MAX_DEPTH, nodes: int = MAX_NODES) -> Any:
    """Return the value of `body`. Raises InvalidJson; time and memory are linear in len(body), which callers bound."""
    measure(body, depth, nodes)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidJson("not UTF-8") from None
    if text.startswith("\ufeff"):
        raise InvalidJson("a byte order mark")
    try:
        value = _DECODER.decode(text)
    except InvalidJson:
        raise
    except (ValueError, RecursionError):
        raise InvalidJson("not JSON") from None
    if _SURROGATE.search(body):
        # Pairs are joined by the parser; what is left over has no UTF-8 form, and so no single meaning.
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidJson("a lone surrogate") from None
    return value


def measure(body: bytes, depth: int, nodes: int) -> None:
    """Raise InvalidJson where `body` has more than `nodes` values or is nested deeper than `depth`.

    Walk over strings and structure until a cap is passed, so that what costs most is refused soonest.

    One token at a time: a single search over a hostile body would hold the interpreter for seconds, and with it every
    other sandbox of the process. What no JSON has, closing brackets and strings in a row, is counted as well.
    """
    level = separators = strings = 0
    for match in _TOKEN.finditer(body):
        token = match[1]
        if token is None:
            strings += 1
            if strings > nodes + 1:
                raise InvalidJson("too many values")
        elif token in b"]}":
            level -= 1
            if level < 0:
                raise InvalidJson("not JSON")
        else:
            separators += 1
            if separators > nodes:
                raise InvalidJson("too many values")
            if token in b"[{":
                level += 1
                if level > depth:
                    raise InvalidJson("nested too deeply")


# A string also ends with the body, and possessively: every byte is looked at once, whatever comes.
_TOKEN = re.compile(rb'([\[\]{},:])|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook`. Raises InvalidJson."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InvalidJson("a duplicate key")
    return value


def no_constant(name: str) -> NoReturn:
    """A `parse_constant`. Raises InvalidJson."""
    raise InvalidJson("NaN and Infinity are not JSON")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise InvalidJson("a number is too long")
    return int(text)


def _float(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise InvalidJson("a number is too long")
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJson("a number is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_keys, parse_constant=no_constant, parse_int=_integer, parse_float=_float, strict=True
)
