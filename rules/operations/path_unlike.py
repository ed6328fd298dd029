"""A path that is not one of several others: servers route `/orders/export` to its own operation, not to `/orders/{id}`.

Source: OpenAPI Specification 3.1.1, section 4.8.8: concrete paths are matched before templated ones. `*` in a listed
path stands for any characters of one segment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts

MAX_PATHS = 500


def head(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return {} unless the path is one of `params["paths"]`, in whatever case, with a slash at its end or none."""
    segments = facts.path.segments
    if len(segments) > 1 and segments[-1] == "":
        segments = segments[:-1]
    for listed in params["paths"]:
        wanted = listed[1:].lower().split("/")
        if len(wanted) == len(segments) and all(map(_fits, wanted, (segment.lower() for segment in segments))):
            return None
    return {}


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded."""
    paths = params.get("paths")
    if params.keys() != {"paths"} or not isinstance(paths, list | tuple) or not 0 < len(paths) <= MAX_PATHS:
        raise ValueError("path_unlike takes paths: a list of at most 500")
    if not all(isinstance(path, str) and path.startswith("/") and path.count("*") <= 32 for path in paths):
        raise ValueError("a path starts with a slash; * stands for any characters of one segment")


@lru_cache(maxsize=4096)
def _pattern(wanted: str) -> re.Pattern[str]:
    return re.compile(".*?".join(re.escape(piece) for piece in wanted.split("*")) + r"\Z", re.DOTALL)


def _fits(wanted: str, segment: str) -> bool:
    return wanted == "*" or wanted == segment or ("*" in wanted and _pattern(wanted).match(segment) is not None)
