"""The small languages inside values: host patterns, sizes, durations, rates, methods, names.

Each function takes the Node that holds the text and returns the value, or notes the problem there and raises
Rejected. What is accepted is exactly one spelling of each thing.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re

from publicsuffixlist import PublicSuffixList

from rules.names import OWN_NAME, Host, InvalidName, parse_authority
from rules.policy import HostPattern
from rules.reader import Node, shown
from rules.yaml12 import QUOTE_THIS

ATTRIBUTE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:[./][A-Za-z0-9_-]+)*\Z")
"""What an attribute of a sandbox may be: words joined by single `.` or `/`, at most MAX_ATTRIBUTE characters.

Inside longer text (paths, secret references) only a single word is substituted (RULINGS 3.3); alone in `with:` the
whole attribute is compared as plain text.
"""
MAX_ATTRIBUTE = 128
ATTRIBUTE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
SANDBOX_REFERENCE = re.compile(r"\$\{sandbox\.([a-z][a-z0-9_]{0,31})\}")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_ROLE = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}\Z")
_SIZE = re.compile(r"([1-9][0-9]{0,11})(B|KiB|MiB|GiB)\Z")
_DURATION = re.compile(r"([1-9][0-9]{0,5})(s|m|h|d)\Z")
_RATE = re.compile(r"([1-9][0-9]{0,8})/(second|minute|hour|day)\Z")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}\Z")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}\Z")

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PERIODS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_NEVER_METHODS = ("TRACE", "TRACK", "CONNECT", "DEBUG", "PRI")


def valid_attribute(value: str) -> bool:
    """True if `value` can be an attribute of a sandbox (checked where a sandbox is created)."""
    return len(value) <= MAX_ATTRIBUTE and ATTRIBUTE.match(value) is not None


def host_pattern(node: Node, *, allow: bool) -> HostPattern:
    """`x`, `*.x` or `**.x`. With `allow`, a wildcard at or above a public suffix is an error."""
    text = node.text()
    for mark, kind in (("**.", "many"), ("*.", "one")):
        if text.startswith(mark):
            parent = _parse_host(node, "x." + text[len(mark) :]).text[2:]
            if allow and is_public_suffix(parent):
                node.fail(f"{shown(text)} is a wildcard at or above a public suffix: anybody can register names there")
            _not_ours(node, "x." + parent)
            return HostPattern(kind="many" if kind == "many" else "one", suffix=parent)
    host = exact_host(node)
    return HostPattern(kind="exact", suffix=host.text)


def exact_host(node: Node) -> Host:
    """One host name, or one address in its one spelling (IPv6 in brackets)."""
    text = node.text()
    if "*" in text:
        node.fail("a wildcard does not stand here: name one host (*. and **. stand first in host: of a rule)")
    host = _parse_host(node, text)
    _not_ours(node, host.text)
    return host


def authority(node: Node) -> tuple[Host, int | None]:
    """`host` or `host:port`; the port is None where it is not written."""
    text = node.text()
    if "*" in text:
        node.fail("a credential is bound to named hosts, never to a wildcard: one name under it may be an attacker's")
    if "://" in text or "/" in text:
        node.fail("expected host or host:port, without scheme and path")
    try:
        host, port = parse_authority(text, 1)
    except InvalidName as error:
        node.fail(f"{shown(text)}: {error}")
    _not_ours(node, host.text)
    written = ":" in text.rpartition("]")[2]
    return host, port if written else None


def _parse_host(node: Node, text: str) -> Host:
    if "{" in text or "$" in text:
        node.fail("a host is written out: no captures and no ${...}")
    try:
        return Host.parse(text)
    except InvalidName as error:
        node.fail(f"{shown(node.value)}: {error}")


def _not_ours(node: Node, text: str) -> None:
    if text == OWN_NAME or text.endswith("." + OWN_NAME):
        node.fail(f"{OWN_NAME} is decided before policy: it can be neither allowed nor denied")


def is_public_suffix(suffix: str) -> bool:
    """True if names directly under `suffix` belong to different people (publicsuffix.org, private section too)."""
    return bool(_suffixes().publicsuffix(suffix) == suffix)


def registrable(host: str) -> str | None:
    """The part of `host` that one owner registered (`example.com` of `a.example.com`); None for a public suffix."""
    found = _suffixes().privatesuffix(host)
    return None if found is None else str(found)


@functools.cache
def _suffixes() -> PublicSuffixList:
    # Package data, read once: with the catalogue the only file that rules/ opens.
    return PublicSuffixList()


@functools.cache
def public_suffix_version() -> str:
    """The version of the bundled list; part of a policy's digest (RULINGS 3.7)."""
    return importlib.metadata.version("publicsuffixlist")


def size(node: Node) -> int:
    """`1MiB`, `64KiB`, `500B` in bytes."""
    match = _SIZE.match(node.text())
    if match is None:
        node.fail("expected a size such as 500B, 64KiB, 1MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]


def duration(node: Node) -> int:
    """`45s`, `10m`, `1h`, `2d` in seconds."""
    match = _DURATION.match(node.text())
    if match is None:
        node.fail("expected a duration such as 45s, 10m, 1h or 2d")
    return int(match[1]) * _SECONDS[match[2]]


def rate(node: Node) -> tuple[int, int]:
    """`60/minute` as (60, 60 seconds)."""
    match = _RATE.match(node.text())
    if match is None:
        node.fail("expected a rate such as 60/minute (per second, minute, hour or day)")
    return int(match[1]), _PERIODS[match[2]]


def methods(node: Node) -> tuple[str, ...]:
    """HTTP methods in upper case. GET includes HEAD."""
    found = node.texts(empty="an empty list of methods permits nothing; name the methods")
    for index, method in enumerate(found):
        item = node.child(index)
        if method in ("*", "ANY", "ALL"):
            item.fail("name each method: what is not named is not judged")
        if not _METHOD.match(method):
            item.fail(f"{shown(method)} is not a method; methods are upper case")
        if method in _NEVER_METHODS:
            item.fail(f"{method} is never forwarded")
    return tuple(found)


def header(node: Node) -> str:
    """A header name, lower case."""
    text = node.text()
    if not _HEADER.match(text):
        node.fail(f"{shown(text)} is not a header name")
    return text.lower()


def name(node: Node) -> str:
    """The name of a rule, credential or service."""
    return checked_name(node, node.text())


def checked_name(node: Node, text: str) -> str:
    if not _NAME.match(text):
        node.fail(f"{shown(text)} is not a name: letters, digits, dot, underscore and hyphen, at most 64", on_key=True)
    return text


def role_name(node: Node, text: str) -> str:
    if not _ROLE.match(text) or text == "everyone":
        node.fail(f"{shown(text)} is not a role name: lower-case letters, digits, hyphen, underscore", on_key=True)
    return text


def sandbox_references(node: Node, text: str) -> tuple[str, ...]:
    """The attributes that `text` substitutes; any other `${` is an error."""
    if "${" in SANDBOX_REFERENCE.sub("", text):
        node.fail(f"only ${{sandbox.name}} is substituted; to mean a dollar sign elsewhere, {QUOTE_THIS}")
    return tuple(SANDBOX_REFERENCE.findall(text))
