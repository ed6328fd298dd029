"""JSON in which some keys must not stand anywhere: query languages whose field names are anybody's own.

A closed schema is better (rules/operations/closed.py) where one can be written. Here what is dangerous has names of its
own: an Elasticsearch query may run a `script`, or read another `index` by a lookup. Keys are compared without case and
underscores: parsers have taken `scriptFields` for `script_fields`.

With `commands: false` no text may hold a line that begins with a slash and a word: GitLab carries such lines of issues
and comments out (`/merge`, `/clone other/project`), whoever was to be told only. Source: GitLab, "quick actions".
"""

from __future__ import annotations

import re
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
    return {} if value is not None and not _holds(value, refused, params.get("commands", True)) else None


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded."""
    refused = params.get("refuse")
    if not params.keys() <= {"refuse", "commands"} or not isinstance(refused, list | tuple) or not refused:
        raise ValueError("refuse lists the keys that must not stand anywhere")
    if not isinstance(params.get("commands", True), bool):
        raise ValueError("commands is true or false")
    if not all(isinstance(key, str) and key for key in refused):
        raise ValueError("refuse lists the keys that must not stand anywhere")


_COMMAND = re.compile(r"^[^\S\n]*/[A-Za-z_]+(?=\s|\Z)", re.MULTILINE)
_LINE_ENDS = re.compile("\r\n?|[\v\f\x85\u2028\u2029]")


def _holds(value: Any, refused: set[str], commands: bool) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if any(_folded(key) in refused for key in item):
                return True
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, str) and not commands and _COMMAND.search(_LINE_ENDS.sub("\n", item)):
            return True
    return False


def _folded(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")
