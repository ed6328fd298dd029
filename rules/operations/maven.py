"""Files of a Maven repository (https://maven.apache.org/repositories/layout.html): groups hold slashes.

    {g/r/o/u/p}/{artifact}/{version}/{artifact}-{version}[-{classifier}].{extension}
    {g/r/o/u/p}/{artifact}[/{version}-SNAPSHOT]/maven-metadata.xml

Each with `.sha1`, `.md5`, `.sha256`, `.sha512` or `.asc` behind it. Arguments: `package` (`group:artifact`) and, where
one is named, `version`. A directory listing names no file and is not described.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}\Z")
_SIDECAR = re.compile(r"(?:\.(?:sha1|md5|sha256|sha512|asc))*\Z")
_TAIL = re.compile(r"(?:-[A-Za-z0-9._+-]{1,128})?\.[A-Za-z0-9][A-Za-z0-9._+-]{0,63}\Z")
_BUILD = re.compile(r"[0-9]{8}\.[0-9]{6}-[0-9]{1,6}(.*)\Z", re.DOTALL)
_SNAPSHOT = "SNAPSHOT"


def head(params: Mapping[str, Any], facts: RequestFacts) -> Mapping[str, str] | None:
    """Return `package` and `version` of a repository file, or None. `params`: `prefix`, segments before the layout."""
    front = tuple(params.get("prefix", ()))
    segments = facts.path.segments
    if facts.path.encoded_slash or segments[: len(front)] != front:
        return None
    parts = segments[len(front) :]
    if len(parts) < 3 or not all(_PART.match(part) for part in parts):
        return None
    *folders, file = parts
    if file.startswith("maven-metadata.xml") and _SIDECAR.match(file[len("maven-metadata.xml") :]):
        return _metadata(folders)
    if len(folders) < 3:
        return None
    *group, artifact, version = folders
    return _named(group, artifact, version) if _belongs(file, artifact, version) else None


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed."""
    prefix = params.get("prefix", ())
    if not params.keys() <= {"prefix"} or not all(isinstance(part, str) for part in prefix):
        raise ValueError("maven knows the parameter prefix, a list of segments")


def _metadata(folders: list[str]) -> dict[str, str] | None:
    if folders[-1].endswith(f"-{_SNAPSHOT}"):
        return _named(folders[:-2], folders[-2], folders[-1]) if len(folders) > 2 else None
    # That of a group of plug-ins reads like that of an artefact; either way it is the name that was asked for.
    return _named(folders[:-1], folders[-1], None)


def _belongs(file: str, artifact: str, version: str) -> bool:
    """True if `file` is one that this artefact and version have."""
    front = f"{artifact}-{version}"
    if file.startswith(front) and _TAIL.match(file[len(front) :]):
        return True
    if not version.endswith(f"-{_SNAPSHOT}"):
        return False
    # A snapshot's files carry a timestamp and a build number in place of the word.
    front = f"{artifact}-{version.removesuffix(_SNAPSHOT)}"
    build = _BUILD.match(file[len(front) :]) if file.startswith(front) else None
    return build is not None and _TAIL.match(build[1]) is not None


def _named(group: list[str], artifact: str, version: str | None) -> dict[str, str] | None:
    # The dots of a group are slashes here: a folder with one would be another place under the same name.
    if not group or any("." in part for part in group):
        return None
    package = f"{'.'.join(group)}:{artifact}"
    return {"package": package} if version is None else {"package": package, "version": version}
