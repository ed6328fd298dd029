"""`result: {keep: [...]}`: of a JSON answer only the named fields come back, in the vendor's own shape (RULINGS 7.3).

    keep: [id, status, "items[].sku", "buyer?.country?", "meta.**"]

`.` goes into an object, `[]` into every element of a list (`[]` alone first where the answer is a list). A field must
be there unless written `field?`. What is kept is a scalar or a list of scalars, unless the path ends in `.**`. Not
JSON, a repeated key, a missing field, another shape, over the bound: ResultRefused, which is a fixed 502.
Numbers come back digit by digit as they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rules.decision import ResultSpec
from rules.operations.strict_json import measure, no_constant, unique_keys

MAX_DEPTH = 64
MAX_NODES = 200_000

_NAME = re.compile(r"[^.\[\]?*\s\"]{1,128}\Z")


class ResultRefused(Exception):
    """The answer is not what `result:` promised. str() is a fixed sentence."""


class KeepInvalid(ValueError):
    """A keep path that cannot be read. str() is a fixed sentence."""


@dataclass(slots=True)
class _Node:
    """One place in the tree of kept paths."""

    fields: dict[str, _Node] = field(default_factory=dict)
    optional: dict[str, bool] = field(default_factory=dict)
    element: _Node | None = None
    everything: bool = False


def check_keep(paths: tuple[str, ...]) -> None:
    """Raise KeepInvalid unless every path can be read and the list is not empty."""
    _tree(paths)


def prune(raw: bytes, spec: ResultSpec) -> bytes:
    """Return the kept part of the JSON text `raw`, as JSON. Raises ResultRefused, and KeepInvalid for a bad spec."""
    tree = _tree(spec.keep)
    return rewrite(raw, spec.bound, lambda document: _kept(document, tree))


def rewrite(raw: bytes, bound: int, change: Callable[[Any], Any]) -> bytes:
    """Return the JSON text `raw` with its value changed by `change`, which may raise ResultRefused as this does.

    Numbers come to `change` as text that is written back as it was.
    """
    if len(raw) > bound:
        raise ResultRefused("the answer is larger than its bound")
    try:
        measure(raw, MAX_DEPTH, MAX_NODES)  # before anything is built: a list of ones is five values for ten bytes
        document = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=unique_keys,
            parse_int=_number,
            parse_float=_number,
            parse_constant=no_constant,
        )
    except (ValueError, RecursionError):
        raise ResultRefused("the answer is not strict JSON") from None
    out: list[str] = []
    _write(change(document), out, 0)
    return "".join(out).encode("utf-8")


class _Number(str):
    """A JSON number as its own digits."""

    __slots__ = ()


def _number(text: str) -> _Number:
    # In Python, so that the interpreter can be handed over in the middle of a long list.
    return _Number(text)


def _tree(paths: tuple[str, ...]) -> _Node:
    if not paths:
        raise KeepInvalid("an empty keep list keeps nothing")
    root = _Node()
    for path in paths:
        _add(root, path)
    return root


def _add(root: _Node, path: str) -> None:
    everything = path.endswith(".**")
    node = root
    for index, step in enumerate(path.removesuffix(".**").split(".")):
        name, lists = step, 0
        while name.endswith("[]"):
            name, lists = name[:-2], lists + 1
        optional = name.endswith("?")
        name = name.removesuffix("?")
        if name:
            if not _NAME.match(name):
                raise KeepInvalid("a keep path is names joined by dots, each with an optional ? and []")
            node.optional[name] = node.optional.get(name, True) and optional
            node = node.fields.setdefault(name, _Node())
        elif index or not lists or optional:
            raise KeepInvalid("a keep path is names joined by dots, each with an optional ? and []")
        for _ in range(lists):
            node.element = node.element or _Node()
            node = node.element
    node.everything = node.everything or everything


def _kept(value: Any, node: _Node) -> Any:
    if node.everything:
        return value
    if node.fields or node.element is not None:
        return _kept_inside(value, node)
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value)):
        raise ResultRefused("a kept field is neither a scalar nor a list of scalars")
    return value


def _kept_inside(value: Any, node: _Node) -> Any:
    if isinstance(value, list) and node.element is not None:
        return [_kept(item, node.element) for item in value]
    if isinstance(value, dict) and node.fields:
        kept: dict[str, Any] = {}
        for name in value:
            if name in node.fields:
                kept[name] = _kept(value[name], node.fields[name])
        for name, optional in node.optional.items():
            if name not in value and not optional:
                raise ResultRefused("a kept field is missing")
        return kept
    if value is None and node.fields and all(node.optional.values()):
        return None
    raise ResultRefused("the answer has another shape than its kept fields")


def _write(value: Any, out: list[str], depth: int) -> None:
    if depth > MAX_DEPTH or len(out) > MAX_NODES:
        raise ResultRefused("the answer is too deep or too large")
    if isinstance(value, _Number) or type(value) is int:
        out.append(str(value))
    elif isinstance(value, dict):
        out.append("{")
        for index, (name, inner) in enumerate(value.items()):
            out.append(("," if index else "") + _text(name) + ":")
            _write(inner, out, depth + 1)
        out.append("}")
    elif isinstance(value, list):
        out.append("[")
        for index, inner in enumerate(value):
            if index:
                out.append(",")
            _write(inner, out, depth + 1)
        out.append("]")
    elif isinstance(value, str):
        out.append(_text(value))
    else:
        out.append("null" if value is None else "true" if value else "false")


def _text(value: str) -> str:
    # Lone surrogates have no UTF-8 form; escaped they stay what they were.
    return json.dumps(value, ensure_ascii=not _encodable(value))


def _encodable(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
