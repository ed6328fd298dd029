"""Git LFS: the batch call, which asks for downloads and uploads by one URL and one verb, and locks.

Source: the LFS API documents of the git-lfs project (docs/api/batch.md, docs/api/locking.md).

lfs_batch   params `operation`: download or upload -> ref where the body names one
lfs_lock    params `call`: create, unlock or verify -> ref likewise, path of a lock that is created

Bodies are strict JSON of a closed form. Of transfers only `basic` is taken beside those by which a client says that it
could also go other ways than HTTP; another adapter (tus, multipart) would bring URLs of another form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations import closed as c
from rules.operations.git import is_ref
from rules.operations.media import is_type
from rules.operations.strict_json import InvalidJson, load

MAX_OBJECTS = 1000
"""Objects of one batch; the client asks for 100 at a time."""

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_MEDIA = "application/vnd.git-lfs+json"


def _matches(pattern: re.Pattern[str]) -> c.Check:
    return lambda value: isinstance(value, str) and pattern.match(value) is not None


def _ref(value: Any) -> bool:
    return isinstance(value, str) and is_ref(value)


def _size(value: Any) -> bool:
    return c.integer(value) and 0 <= value <= 1 << 50


_REF = c.record({"name": _ref})
_BATCH = {
    "objects": c.array(c.record({"oid": _matches(_SHA256), "size": _size}), most=MAX_OBJECTS),
}
_BATCH_MORE = {
    "transfers": c.array(c.one_of("basic", "lfs-standalone-file", "ssh"), most=8),
    "ref": _REF,
    "hash_algo": c.one_of("sha256"),
}
_CALLS: Mapping[str, c.Check] = {
    "download": c.record({"operation": c.one_of("download"), **_BATCH}, _BATCH_MORE),
    "upload": c.record({"operation": c.one_of("upload"), **_BATCH}, _BATCH_MORE),
    "create": c.record({"path": c.label}, {"ref": _REF}),
    "unlock": c.record({}, {"force": c.boolean, "ref": _REF}),
    "verify": c.record({}, {"cursor": c.label, "limit": _size, "ref": _REF}),
}


def batch(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return the arguments of a batch call for `params["operation"]`, or None."""
    return _judge(str(params["operation"]), body, facts)


def lock(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return the arguments of a call about locks, `params["call"]`, or None."""
    return _judge(str(params["call"]), body, facts)


def lock_arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """What `lock` may state."""
    return frozenset({"ref", "path"} if params.get("call") == "create" else {"ref"})


def check_batch(params: Mapping[str, Any]) -> None:
    """Raise ValueError unless `params` name download or upload."""
    if params.keys() != {"operation"} or params["operation"] not in ("download", "upload"):
        raise ValueError("lfs_batch needs operation: download or upload")


def check_lock(params: Mapping[str, Any]) -> None:
    """Raise ValueError unless `params` name a call about locks."""
    if params.keys() != {"call"} or params["call"] not in ("create", "unlock", "verify"):
        raise ValueError("lfs_lock needs call: create, unlock or verify")


def _judge(call: str, body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    if not is_type(facts, _MEDIA):
        return None
    try:
        value = load(body, depth=6, nodes=MAX_OBJECTS * 8)
    except InvalidJson:
        return None
    if not _CALLS[call](value):
        return None
    if "transfers" in value and "basic" not in value["transfers"]:
        return None
    found: dict[str, Value] = {}
    if "ref" in value:
        found["ref"] = value["ref"]["name"]
    if call == "create":
        found["path"] = value["path"]
    return found
