"""JSON in which some keys must not stand anywhere: query languages whose field names are anybody's own.

A closed schema is better (rules/operations/closed.py) where one can be written. Here what is dangerous has names of its
own: an Elasticsearch query may run a `script`, or read another `index` by a lookup. Keys are compared without case and
underscores: parsers have taken `scriptFields` for `script_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations.media import json_object


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return {} for a strict JSON object without the keys that `refuse` lists, or for no body; else None."""
    if not body:
        return {}
    value = json_object(body, facts, depth=40, nodes=50_000)
    refused = {_folded(str(key)) for key in params["refuse"]}
    return {} if value is not None and not _holds(value, refused) else None


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded."""
    refused = params.get("refuse")
    if params.keys() != {"refuse"} or not isinstance(refused, list | tuple) or not refused:
        raise ValueError("refuse lists the keys that must not stand anywhere")
    if not all(isinstance(key, str) and key for key in refused):
        raise ValueError("refuse lists the keys that must not stand anywhere")


def _holds(value: Any, refused: set[str]) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if any(_folded(key) in refused for key in item):
                return True
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return False


def _folded(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")
