"""Tokens in the answer of a mint operation: the broker keeps them, the sandbox gets placeholders (RULINGS 7.2).

The answer is one strict JSON document, whole and bounded. The service's file names the fields that are authority;
whatever else looks like authority in it withholds the answer (a fixed 502), so that a field which a provider adds is no
leak. A token must not stand in a second place either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from broker.result import ResultRefused, rewrite

MAX_DEPTH: Final = 16
_LOOKS = re.compile(
    r"token|secret|password|passwd|refresh|assertion|credential|api[-_]?key|private|cookie|session|jwt", re.I
)
_HARMLESS: Final = frozenset({"token_type", "tokentype", "refresh_expires_in", "refresh_in", "session_state"})
"""RFC 6749 section 5.1, and what says how long something lasts."""
MIN_TOKEN: Final = 12
"""Bytes; what is shorter could not be told from other text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is captured from one answer: each token once, in order; `seconds` that they are good for, 0 unsaid."""

    tokens: tuple[str, ...]
    seconds: int


def look(raw: bytes, bound: int, fields: tuple[str, ...]) -> Found:
    """Return what is to be kept of `raw`. Raises ResultRefused where it cannot be shown without authority."""
    found: list[Found] = []

    def read(message: Any) -> Any:
        found.append(_found(message, fields))
        return None

    rewrite(raw, bound, read)
    return found[0]


def replaced(raw: bytes, bound: int, fields: tuple[str, ...], placeholders: Mapping[str, str]) -> bytes:
    """Return `raw` with each captured token's placeholder in its place. Raises ResultRefused."""

    def change(message: Any) -> Any:
        for path, holder, name in _places(message, fields):
            if holder[name] not in placeholders:
                raise ResultRefused(f"the token in {path} was not kept")
            holder[name] = placeholders[holder[name]]
        return message

    made = rewrite(raw, bound, change)
    text = made.decode("utf-8")
    if any(token in text or json.dumps(token)[1:-1] in text for token in placeholders):
        raise ResultRefused("a token stands in a field that the service does not name")
    return made


def _found(message: Any, fields: tuple[str, ...]) -> Found:
    if not isinstance(message, dict):
        raise ResultRefused("the answer is no JSON object")
    tokens: list[str] = []
    for path, holder, name in _places(message, fields):
        value = holder[name]
        if type(value) is not str or len(value.encode("utf-8", "surrogatepass")) < MIN_TOKEN or not value.isascii():
            raise ResultRefused(f"{path} holds no token")
        tokens.append(value)
    if not tokens:
        raise ResultRefused("the answer brings none of the tokens that its service names")
    for path, value in _strings(message, "", 0):
        name = path.rpartition(".")[2].lower()
        if path not in fields and value and name not in _HARMLESS and _LOOKS.search(name):
            raise ResultRefused("a field looks like authority, and the service does not name it")
        if path not in fields and any(token in value for token in tokens):
            raise ResultRefused("a token stands in a field that the service does not name")
    return Found(tokens=tuple(dict.fromkeys(tokens)), seconds=_seconds(message))


def _places(message: Any, fields: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, the object that holds it, its name there) of each named field that is there and not null."""
    for path in fields:
        *above, name = path.split(".")
        holder = message
        for step in above:
            holder = holder.get(step) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and holder.get(name) is not None:
            yield path, holder, name


def _strings(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Every text in the document with the names that lead to it; in a list those of the list."""
    if depth > MAX_DEPTH:
        raise ResultRefused("the answer is too deep")
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _strings(inner, f"{path}.{name}" if path else name, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, path, depth + 1)
    elif type(value) is str:
        yield path, value


def _seconds(message: dict[str, Any]) -> int:
    """`expires_in`, in whole seconds; 0 where it is not said or is no such number."""
    said = str(message.get("expires_in", ""))
    return int(said) if re.fullmatch(r"[0-9]{1,9}", said) else 0
