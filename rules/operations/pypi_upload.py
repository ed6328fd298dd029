"""Uploads to a Python index: `POST /legacy/`, multipart, metadata first and the file last (twine, uv, poetry, flit).

The fields before the file say what is published, and the file's name says it again: both have to agree. Arguments:
`package` (normal form, PEP 503) and `version`. A field that stands twice, another file, or parts written in any other
way than these clients write them are refused. Source: https://docs.pypi.org/api/upload/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations.media import is_coded
from rules.shapes import SHAPES

ARGUMENTS = frozenset({"package", "version"})

_BOUNDARY = re.compile(r"multipart/form-data; ?boundary=\"?([0-9A-Za-z'_.+=-]{1,70})\"?\Z", re.I)
_NAME = rb"([A-Za-z0-9_:.-]{1,64})"
_FILE = rb"([A-Za-z0-9._+!-]{1,255})"
_DISPOSITION = re.compile(
    rb'content-disposition: form-data; name="' + _NAME + rb'"(?:; filename="' + _FILE + rb'")?\Z', re.I
)
_TYPE = re.compile(rb"content-type: [a-z0-9./+; =\"-]{1,100}\Z", re.I)
_LENGTH = re.compile(rb"content-length: [0-9]{1,12}\Z", re.I)
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.!+_-]{0,127}\Z")
MAX_PARTS = 2000


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return `package` and `version` of an upload whose metadata lies within the first bytes, else None."""
    if is_coded(facts):
        return None
    types = facts.header("content-type")
    boundary = _BOUNDARY.match(types[0].strip()) if len(types) == 1 else None
    if boundary is None:
        return None
    read = _fields(body, b"--" + boundary[1].encode("ascii"))
    if read is None:
        return None
    fields, file = read
    package = SHAPES["python-project"](fields.get("name", ""))
    version = fields.get("version", "")
    if fields.get(":action") != "file_upload" or package is None or not _VERSION.match(version):
        return None
    return {"package": package, "version": version} if SHAPES["python-file-project"](file) == package else None


_ASKED = frozenset({":action", "name", "version"})


def _fields(body: bytes, mark: bytes) -> tuple[dict[str, str], str] | None:
    """The fields before the file and the file's name, or None where they are not written in the one way."""
    fields: dict[str, str] = {}
    if not body.startswith(mark + b"\r\n"):
        return None
    position = len(mark) + 2
    for _ in range(MAX_PARTS):
        end = body.find(b"\r\n\r\n", position, position + 1024)
        if end < 0:
            return None
        name, file = _named(body[position:end])
        if name is None:
            return None
        if file is not None:
            return (fields, file) if name == "content" else None
        start = end + 4
        stop = body.find(b"\r\n" + mark + b"\r\n", start)
        if stop < 0:
            return None
        if name in _ASKED:
            if name in fields:
                return None
            try:
                fields[name] = body[start:stop].decode("ascii")
            except UnicodeDecodeError:
                return None
        position = stop + 2 + len(mark) + 2
    return None


def _named(head: bytes) -> tuple[str | None, str | None]:
    """The name and file name of a part's head, (None, None) where it holds anything else."""
    lines = head.split(b"\r\n")
    matches = [match for line in lines if (match := _DISPOSITION.match(line))]
    others = [line for line in lines if not _DISPOSITION.match(line)]
    if len(matches) != 1 or not all(_TYPE.match(line) or _LENGTH.match(line) for line in others):
        return None, None
    name, file = matches[0][1], matches[0][2]
    return name.decode("ascii"), None if file is None else file.decode("ascii")
