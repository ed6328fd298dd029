"""What `cargo publish` sends (https://doc.rust-lang.org/cargo/reference/registry-web-api.html#publish).

    u32 length, JSON of that many bytes, u32 length, the .crate file      (lengths in little endian)

The JSON says what is published, so the first bytes are enough: arguments `crate` (as its index compares names) and
`version`. The registry refuses a file whose own manifest says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations.media import is_coded
from rules.operations.strict_json import InvalidJson, load
from rules.shapes import SHAPES

ARGUMENTS = frozenset({"crate", "version"})

_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+-]{0,100}\Z")


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return `crate` and `version` of a publication whose JSON lies within the first bytes, else None."""
    if is_coded(facts):
        return None
    length = int.from_bytes(body[:4], "little")
    # Behind the JSON there is the second length at least: cut short, it is no publication.
    if len(body) < 8 or len(body) < 4 + length + 4:
        return None
    try:
        value = load(body[4 : 4 + length])
    except InvalidJson:
        return None
    if not isinstance(value, dict):
        return None
    name, version = value.get("name"), value.get("vers")
    if not isinstance(name, str) or not isinstance(version, str) or not _VERSION.match(version):
        return None
    crate = SHAPES["crate-name"](name)
    return None if crate is None else {"crate": crate, "version": version}
