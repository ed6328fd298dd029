"""Entries of a sparse crate index (https://doc.rust-lang.org/cargo/reference/registry-index.html#index-files).

    1/{n}   2/{n}   3/{c}/{n}   {ab}/{cd}/{n}

The directories follow from the name; where they do not, it is not an entry. Argument: `crate`, lower case with
hyphens, since the index takes neither case nor `-` for `_` as a difference between two crates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\Z")


def head(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, str] | None:
    """Return the `crate` whose entry is asked for, or None. There are no parameters."""
    *directories, name = facts.path.segments
    if not _NAME.match(name) or tuple(directories) != _directories(name):
        return None
    return {"crate": name.replace("_", "-")}


def _directories(name: str) -> tuple[str, ...]:
    match len(name):
        case 1 | 2:
            return (str(len(name)),)
        case 3:
            return ("3", name[0])
        case _:
            return (name[:2], name[2:4])
