"""Capture shapes: what one path segment may be, and its canonical spelling. `{repo:git-repository}` in a template.

A shape makes two spellings of one thing one argument (`Foo_Bar` and `foo-bar` at the Python index), and refuses
what is not such a thing, so that a rule that binds the argument binds the thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


def lower_ascii(text: str) -> str:
    """`text` with A-Z in lower case and every other character as it is."""
    # ASCII only: str.lower() also maps the Kelvin sign to k, which no server does.
    return "".join(chr(ord(char) + 32) if "A" <= char <= "Z" else char for char in text)


_NPM_NAME = r"[A-Za-z0-9~][A-Za-z0-9._~-]{0,213}"
_NPM_RELEASE = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"
_PYTHON_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
_PYTHON_FILE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._+!-]{0,240})\.(whl|egg|zip|tar\.gz|tar\.bz2|tgz)(?:\.metadata|\.asc|\.provenance)?\Z"
)


def _segment(text: str) -> str | None:
    return text or None


def _shape(regex: str) -> Callable[[str], str | None]:
    compiled = re.compile(rf"(?:{regex})\Z")
    return lambda text: text if compiled.match(text) else None


def _git_repository(text: str) -> str | None:
    """A repository name with its optional `.git` removed; `x.git.git` and names of dots are refused."""
    name = text[:-4] if lower_ascii(text).endswith(".git") else text
    if not re.match(r"[A-Za-z0-9._-]{1,100}\Z", name) or lower_ascii(name).endswith(".git") or set(name) == {"."}:
        return None
    return name


def _npm_release(name: str) -> Callable[[str], str | None]:
    """`name@release`, as attestations are asked for: the name."""
    compiled = re.compile(rf"({name})@{_NPM_RELEASE}\Z")

    def shape(text: str) -> str | None:
        match = compiled.match(text)
        return match[1] if match else None

    return shape


def _python_project(text: str) -> str | None:
    """A project name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text).lower() if re.match(rf"{_PYTHON_NAME}\Z", text) else None


def _python_file_project(text: str) -> str | None:
    """The project that a distribution file (or its sidecar) belongs to, told from its name (PEP 427, PEP 625).

    A wheel's name ends at the first hyphen. A source archive's version begins at the last hyphen that a digit
    follows; older archives keep hyphens in the name.
    """
    match = _PYTHON_FILE.match(text)
    if match is None:
        return None
    if match[2] in ("whl", "egg"):
        name, hyphen, rest = match[1].partition("-")
    else:
        name, hyphen, rest = match[1].rpartition("-")
    return _python_project(name) if hyphen and rest[:1].isdigit() else None


SHAPES: Mapping[str, Callable[[str], str | None]] = {
    "segment": _segment,
    "number": _shape(r"[0-9]{1,20}"),
    "word": _shape(r"[A-Za-z0-9_-]{1,128}"),
    "hex": _shape(r"[0-9a-f]{2,128}"),
    "git-owner": _shape(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,98})"),
    "git-repository": _git_repository,
    "npm-package": _shape(rf"{_NPM_NAME}|@{_NPM_NAME}/{_NPM_NAME}"),
    "npm-package-release": _npm_release(rf"{_NPM_NAME}|@{_NPM_NAME}/{_NPM_NAME}"),
    "npm-scope": _shape(rf"@{_NPM_NAME}"),
    "npm-name": _shape(_NPM_NAME),
    "npm-name-release": _npm_release(_NPM_NAME),
    "npm-release": _shape(_NPM_RELEASE),
    "npm-tarball": _shape(r"[A-Za-z0-9~._-][A-Za-z0-9._~+-]{0,240}\.tgz"),
    "python-project": _python_project,
    "python-file-project": _python_file_project,
}
"""Capture shapes: text of one decoded segment -> its canonical spelling, or None where it does not fit."""
