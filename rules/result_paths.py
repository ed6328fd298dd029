"""`result: {keep: [...]}`: the small language that names fields of a JSON answer (RULINGS 7.3).

    id    items[].sku    owner?.login?    [].name    meta.**

A step is a field name; `?` behind it lets the field be missing, `[]` goes into every item of a list; `.**` at the
end keeps whatever lies below. Here it is only checked when policy is loaded; pruning is broker/result.py's.
"""

from __future__ import annotations

import re

_NAME = r"[^.\[\]?*\s\"]+"
_PATH = re.compile(rf"(?:(?:\[\])+|{_NAME}\??(?:\[\])*)(?:\.{_NAME}\??(?:\[\])*)*(?:\.\*\*)?\Z")
MAX_LENGTH = 512


class InvalidKeep(ValueError):
    """Not a field path. str() is a fixed sentence."""


def check_keep(text: str) -> None:
    """Raise InvalidKeep unless `text` is one field path. `**` alone is refused: it would keep everything."""
    if len(text) > MAX_LENGTH or not _PATH.match(text):
        raise InvalidKeep("a kept field is written like id, items[].sku, owner?.login? or meta.**")
