"""Reads the JSON of admin requests: closed objects, one type per field, sentences for what is wrong."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

from broker.errors import BrokerError

_TTL = re.compile(r"([1-9][0-9]{0,8})([smhd]?)\Z")
_CODE = re.compile(r"[a-z][a-z0-9-]{0,39}\Z")
MAX_CODES = 64
_WORD = re.compile(r"[a-z]{1,16}\Z")
_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class BadRequest(BrokerError):
    """The request is not one of the table in broker/admin/__init__.py."""


def read_object(raw: bytes, known: Mapping[str, type]) -> dict[str, Any]:
    """The object in `raw`, with keys of `known` only, each of its type. Raises BadRequest."""
    try:
        value = json.loads(raw, object_pairs_hook=_once) if raw else {}
    except (ValueError, RecursionError):
        raise BadRequest("bad-json", "the body is not one JSON object with distinct keys") from None
    if not isinstance(value, dict):
        raise BadRequest("bad-json", "the body is not one JSON object with distinct keys")
    for name, item in value.items():
        if name not in known:
            raise BadRequest("unknown-field", f"unknown field; known are {', '.join(known)}")
        wanted = known[name]
        if wanted is not object and type(item) is not wanted:
            raise BadRequest("bad-field", f"{name} must be {_WORDS[wanted]}")
    return value


def need(value: Mapping[str, Any], name: str) -> Any:
    """`value[name]`. Raises BadRequest where it is missing."""
    if name not in value:
        raise BadRequest("missing-field", f"{name} is missing")
    return value[name]


def texts(value: Mapping[str, Any], name: str) -> dict[str, str]:
    """The object of texts in `value[name]`, or an empty one."""
    found = value.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(item, str) for item in found.values()):
        raise BadRequest("bad-field", f"{name} must be an object of texts")
    return dict(found)


def codes(value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The list of codes (small words) in `value[name]`, at least one. Raises BadRequest."""
    found = value.get(name)
    fits = isinstance(found, list) and 0 < len(found) <= MAX_CODES
    if not fits or not all(isinstance(item, str) and _CODE.match(item) for item in found or ()):
        raise BadRequest("bad-field", f"{name} must be a list of codes")
    return tuple(found or ())


def packets(value: Mapping[str, Any], name: str) -> dict[str, int]:
    """The object of counts in `value[name]`: up to 16 short words with whole numbers. Raises BadRequest."""
    found = need(value, name)
    if len(found) > 16 or not all(
        _WORD.match(key) and type(count) is int and 0 <= count <= 1 << 52 for key, count in found.items()
    ):
        raise BadRequest("bad-field", f"{name} must be an object of counts")
    return dict(found)


def seconds(value: object, *, limit: int) -> int:
    """A time to live: whole seconds, or text such as 90s, 15m, 1h, 7d. Raises BadRequest over `limit`."""
    if type(value) is int:
        total = value
    elif isinstance(value, str) and (match := _TTL.match(value)):
        total = int(match[1]) * _UNIT[match[2]]
    else:
        raise BadRequest("bad-ttl", "ttl is a number of seconds, or text such as 90s, 15m, 1h, 7d")
    if not 0 < total <= limit:
        raise BadRequest("bad-ttl", f"ttl must be between 1 and {limit} seconds")
    return total


def secret_value(value: Mapping[str, Any]) -> bytes:
    """The bytes of `value` or `value_base64`, exactly one of which is there. Raises BadRequest."""
    if ("value" in value) == ("value_base64" in value):
        raise BadRequest("missing-field", "give exactly one of value and value_base64")
    if "value" in value:
        return str(value["value"]).encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(value["value_base64"], validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("bad-field", "value_base64 is not base64") from None


_WORDS: dict[type, str] = {str: "text", bool: "true or false", dict: "an object", int: "a whole number", list: "a list"}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
