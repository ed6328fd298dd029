r"""Attack cases as data: tests/attacks/*.yaml read into `Case`s. Every key is documented here; an unknown one fails.

A file is a list of cases:

    - id: B033                     the attack's number; a letter or word after a dash tells cases of one number apart
      sentence: what must happen
      each: [a, b]                 optional: one case per entry; `{each}` stands for it in every text below
      connect: '{ok}'              optional: CONNECT to this authority first, then
      tls: false                   clear bytes in the tunnel; without it a TLS handshake
      sni: evil.test               the server name; `none` sends none; without it the host of `connect`
      alpn: [h2]                   what the client offers; without it http/1.1
      send: 'GET ...'              raw bytes (or a list: one write each), innermost level: the proxy itself, the tunnel,
                                   or TLS; OR
      request: {method: GET, url: 'https://{ok}/v1/read/x', headers: ['X-A: b'], body: '...', upgrade: websocket}
                                   one request that every entry point makes in its own form
      token: none                  the Proxy-Authorization that `{auth}` and CONNECT use: own (default), none, other
                                   (a sandbox whose channel this is not), wrong, ended
      answers: 2                   final answers to read; what is judged is the last one
      origin: ...                  what the origin answers: a name of answers.HANDLERS, or
                                   {head: '...', body: '...', coding: gzip, label: br, close: true}: raw bytes; without
                                   `head` one is made, which names `label`, else `coding`
      then: '...'                  sent after a 101; `echoes: '...'` is what must come back
      at: [decide, explicit, ...]  the entry points (entrypoints.ENTRY_POINTS) where it applies; `captured` stands for
                                   `gateway` too, which is the same by other rules
      expect:
        verdict: denied            denied | malformed | closed | bad-upstream | unavailable | cut | allowed
                                   (`cut`: the answer broke midway: cut off, or where nothing had left yet, a 502)
        reason: no-rule            code of rules.reasons; none where allowed
        status: 403                where an answer is sent; without it, what the reason's row says
        upstream: nothing          nothing | once | twice | {target:, method:, has: ['name: value'], lacks: [name]}
        records: 1                 decisions on record (refusals and intents); 1 without it
        body: '...'                what the delivered body must contain; `size:` how many bytes it has
        headers: {name: value}     what the answer must carry (`none`: what it must not carry)
      differs: {captured: {...}}   optional: what of `expect` is otherwise at one entry point (`captured`: at both)

Text to bytes: `\r \n \t \0 \\` and `\xNN` are those bytes, `{name}` is a value that only the entry point knows
(hosts with their ports, `{auth}`, `{ph}`, `{can}`; see attempts.host_names), `{65536*A}` is a repetition. Every other
brace is itself. All else is UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent.parent / "attacks"
COVERAGE = "coverage.yaml"
"""The one YAML file of the folder that holds no cases."""
VERDICTS = frozenset("denied malformed closed bad-upstream unavailable cut allowed".split())
_TOKEN = re.compile(r"\\x[0-9A-Fa-f]{2}|\\[rnt0\\]|\\|\{[a-z][a-z0-9.-]*\}|\{[0-9]+\*[^{}]+\}")
_ESCAPES = {"\\r": b"\r", "\\n": b"\n", "\\t": b"\t", "\\0": b"\0", "\\\\": b"\\"}


class CaseFault(ValueError):
    """A case that is not written as documented."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, for entry points to put into their own form. Texts are templates."""

    method: str
    url: str
    headers: tuple[str, ...] = ()
    body: str | None = None
    upgrade: str | None = None


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What must come of it."""

    verdict: str
    reason: str | None = None
    status: int | None = None
    upstream: str | Mapping[str, Any] = "nothing"
    records: int = 1
    body: str | None = None
    size: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attack (or control) with one input. `name` is unique."""

    name: str
    id: str
    sentence: str
    at: tuple[str, ...]
    expect: Expect
    connect: str | None = None
    tls: bool = True
    sni: str | None = None
    alpn: tuple[str, ...] = ("http/1.1",)
    send: tuple[str, ...] = ()
    request: Request | None = None
    token: str = "own"
    answers: int = 1
    origin: str | Mapping[str, Any] | None = None
    differs: Mapping[str, Expect] = field(default_factory=dict)
    then: str | None = None
    echoes: str | None = None


def load(folder: Path = FOLDER) -> list[Case]:
    """All cases of all files, in order. Raises CaseFault naming file and case."""
    found: list[Case] = []
    for path in sorted(set(folder.glob("*.yaml")) - {folder / COVERAGE}):
        for entry in yaml.safe_load(path.read_text("utf-8")):
            try:
                found += _cases(entry)
            except (CaseFault, TypeError, KeyError) as error:
                name = entry.get("id") if isinstance(entry, dict) else entry
                raise CaseFault(f"{path.name}: {name}: {error}") from None
    names = [case.name for case in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise CaseFault(f"names are used twice: {sorted(twice)}")
    return found


def render(text: str, names: Mapping[str, bytes]) -> bytes:
    """The bytes of a template. Raises CaseFault for an unknown name or escape."""

    def one(match: re.Match[str]) -> bytes:
        token = match[0]
        if token in _ESCAPES:
            return _ESCAPES[token]
        if token.startswith("\\x"):
            return bytes([int(token[2:], 16)])
        if token == "\\":
            raise CaseFault(f"a backslash that escapes nothing in {text!r}")
        count, star, piece = token[1:-1].partition("*")
        if star:
            return render(piece, names) * int(count)
        if token[1:-1] not in names:
            raise CaseFault(f"unknown name {token} in {text!r}")
        return names[token[1:-1]]

    made = b""
    last = 0
    for match in _TOKEN.finditer(text):
        made += text[last : match.start()].encode() + one(match)
        last = match.end()
    return made + text[last:].encode()


def _cases(entry: Mapping[str, Any]) -> Iterator[Case]:
    known = {item.name for item in fields(Case)} - {"name"} | {"each"}
    if unknown := set(entry) - known:
        raise CaseFault(f"unknown keys {sorted(unknown)}")
    inputs = entry.get("each")
    for number, value in enumerate(inputs if inputs is not None else [None], 1):
        plain = {key: _put(item, value) for key, item in entry.items() if key != "each"}
        yield _case(plain, str(entry["id"]) if value is None else f"{entry['id']}.{number}")


def _put(item: Any, value: Any) -> Any:
    """`item` with `{each}` replaced in all its texts."""
    if isinstance(item, str):
        return item if value is None else item.replace("{each}", str(value))
    if isinstance(item, list):
        return [_put(part, value) for part in item]
    if isinstance(item, dict):
        return {key: _put(part, value) for key, part in item.items()}
    return item


def _both(names: Iterable[str]) -> Iterator[str]:
    """`names` with `gateway` behind `captured`."""
    for name in names:
        yield name
        if name == "captured":
            yield "gateway"


def _case(entry: Mapping[str, Any], name: str) -> Case:
    values = dict(entry)
    send = values.get("send", ())
    values["send"] = (send,) if isinstance(send, str) else tuple(send)
    values["at"] = tuple(_both(values["at"]))
    if "alpn" in values:
        values["alpn"] = tuple(values["alpn"])
    if "request" in values:
        request = dict(values["request"])
        request["headers"] = tuple(request.get("headers", ()))
        values["request"] = Request(**request)
    expect = dict(values["expect"])
    values["expect"] = Expect(**expect)
    values["differs"] = {
        entry: Expect(**(expect | other))
        for name, other in values.get("differs", {}).items()
        for entry in _both([name])
    }
    case = Case(name=name, **values)
    if (case.request is None) == (not case.send and case.connect is None):
        raise CaseFault("a case has either `request` or `send` (with or without `connect`)")
    for expected in (case.expect, *case.differs.values()):
        if expected.verdict not in VERDICTS:
            raise CaseFault(f"unknown verdict {expected.verdict}")
        if (expected.reason is None) != (expected.verdict in ("allowed",)):
            raise CaseFault("a reason belongs to every verdict but `allowed`")
    if set(case.differs) - set(case.at):
        raise CaseFault("`differs` is about entry points of `at`")
    return case
