r"""The corpus of operations as data: tests/cases/operations/*.yaml read into `Vector`s. Every key is documented here.

A service's own tests say what its operations recognise; these say what a *role* gets, as a platform team writes it.

    sentence: what the file shows
    roles:                             roles of a policy; names are unique over all files, rules get names here
      npm-reads: {allow: [{service: npm, operations: [read]}]}
    rows:
      - role: npm-reads
        deny: 'PUT https://...'        METHOD URL; or a list of them; or {request: [operation, effect, why]} and
                                       {request: [nothing, why]}
        reason: no-rule                code of rules.reasons
        is: [npm/publish, write]       optional for text and lists: what a role without bounds would see in it;
                                       `nothing`: no operation of any service named in the role
        why: one sentence              of a row; what a mapping says replaces it
      - role: npm-reads
        permit: 'GET https://...'      or a list, or {request: [operation, effect, arguments, why]} (the last two may
                                       be left out; commas of a why need no quotes)
        operation: npm/package.read
        effect: read
        arguments: {package: express}  exactly these; left out: none
        why: one sentence
      - role: ...
        hold: ...                      as permit, for a role with an approval (an effect is not stated by a hold)

What a request has besides (for every request of a row): `headers: {name: value}` (a list: several lines), and one of
`json: value`, `form: text`, `text: text`, `push: [[old, new, ref]]` and
`repeat: {text: x, count: 9, before: a, after: b}`; `gzip: true` codes the body and says so. `host: other` is what the
Host header says instead. `trick: true` marks rows that `make test` plays through every live lane, `apart: {lane: why}`
rows that a lane cannot play. `sent: target` is what leaves of a token call that is narrowed. Old and new of a push: 0
none, a and b two objects. `{sha}` in a URL is a digest.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rules.arguments import Value
from rules.compile import compile_policy
from rules.decide import decide_request
from rules.decision import Decision, Denied, NeedsBody
from rules.facts import FactsRefused, RequestFacts, Sandbox, TunnelFacts
from rules.narrowing import narrowed
from rules.parse import Sources, parse_sources
from rules.policy import Policy
from rules.yaml12 import load
from tests.support.policies import NOW
from tests.support.pushes import NEW, OLD, TYPE, ZERO, push

FOLDER = Path(__file__).parents[1] / "cases" / "operations"
NOTHING = "nothing"
DIGEST = "sha256:" + "a" * 64
_OBJECTS = {"0": ZERO, "a": OLD, "b": NEW}
_ROW = frozenset(
    "role deny permit hold reason is why operation effect arguments headers json form text push repeat gzip host trick "
    "apart sent".split()
)


class VectorFault(ValueError):
    """A row that is not written as documented."""


@dataclass(frozen=True, kw_only=True)
class Vector:
    """One request, the role it is judged under, and what must come of it."""

    name: str
    role: str
    verdict: Literal["deny", "hold", "permit"]
    method: str
    url: str
    why: str
    reason: str = ""
    operation: str = ""
    """What it is; for a denied one what it would be, `nothing` or "" (not stated)."""
    effect: str = ""
    arguments: Mapping[str, Value] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    host: str | None = None
    trick: bool = False
    sent: str = ""
    """Path and query as they leave, where they are not those that came."""
    apart: Mapping[str, str] = field(default_factory=dict)
    """Lane -> why it is not played there."""

    @property
    def scheme(self) -> Literal["https", "http"]:
        return "http" if self.url.startswith("http://") else "https"

    @property
    def authority(self) -> str:
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def target(self) -> str:
        """Path and query."""
        _, slash, rest = self.url.partition("://")[2].partition("/")
        return slash + rest or "/"

    @property
    def all_headers(self) -> tuple[tuple[str, str], ...]:
        """Lower-case (name, value), Host first."""
        return (("host", self.host or self.authority), *self.headers)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All files together."""

    vectors: tuple[Vector, ...]
    roles: Mapping[str, Any]
    """As written, for a policy that holds them all."""

    def services_of(self, role: str) -> tuple[str, ...]:
        """The services that a role's allow rules name."""
        rules = self.roles[role].get("allow", [])
        return tuple(dict.fromkeys(rule["service"] for rule in rules if "service" in rule))


@cache
def corpus(folder: Path = FOLDER) -> Corpus:
    """Read everything. Raises VectorFault naming file and row."""
    vectors: list[Vector] = []
    roles: dict[str, Any] = {}
    for path in sorted(folder.glob("*.yaml")):
        whole, _ = load(path.read_text("utf-8"), path.name)
        if set(whole) != {"sentence", "roles", "rows"} or not whole["sentence"]:
            raise VectorFault(f"{path.name}: a file has a sentence, roles and rows")
        if shared := roles.keys() & whole["roles"].keys():
            raise VectorFault(f"{path.name}: other files have the roles {sorted(shared)}")
        roles |= {name: _named(role) for name, role in whole["roles"].items()}
        for number, row in enumerate(whole["rows"], 1):
            try:
                if row["role"] not in whole["roles"]:
                    raise VectorFault(f"no such role: {row['role']}")
                vectors += _vectors(row, f"{path.stem}-{number}")
            except (VectorFault, KeyError, TypeError, ValueError) as error:
                raise VectorFault(f"{path.name}: row {number}: {type(error).__name__}: {error}") from None
    return Corpus(vectors=tuple(vectors), roles=roles)


def policy_text(roles: Mapping[str, Any], *, destinations: Mapping[str, Any] | None = None) -> str:
    """The policy file with these roles: JSON, which is YAML."""
    whole: dict[str, Any] = {"version": 1}
    if destinations:
        whole["destinations"] = destinations
    return json.dumps({**whole, "roles": roles})


def policy_of(text: str, credentials: str | None = None, ca_pem: str = "") -> Policy:
    """The policy as a process has it."""
    sources = Sources(
        policy={"policy.yaml": text},
        credentials=None if credentials is None else ("credentials.yaml", credentials),
        ca_files=lambda name: ca_pem,
    )
    return compile_policy(parse_sources(sources).document)


def facts_of(vector: Vector) -> RequestFacts:
    """The facts of the request, in a tunnel to the URL's host where it is by TLS. Raises FactsRefused."""
    authority = vector.authority
    connect = authority if ":" in authority else f"{authority}:443"
    https = vector.scheme == "https"
    return RequestFacts.build(
        method=vector.method,
        scheme=vector.scheme,
        tunnel=TunnelFacts.build(connect) if https else None,
        target=vector.target if https else vector.url,
        headers=vector.all_headers,
        has_body=vector.body is not None,
    )


def decide(policy: Policy, box: Sandbox, vector: Vector) -> Decision:
    """The verdict, by rules alone, with the body where it is asked for."""
    try:
        facts = narrowed(policy, box, facts_of(vector), NOW)
    except FactsRefused as refused:
        return Denied(reason=refused.reason)
    decision = decide_request(policy, box, facts, NOW)
    if isinstance(decision, NeedsBody):
        body = vector.body or b""
        partial = len(body) > decision.bound
        if partial and not decision.prefix:
            return Denied(reason="body-not-judged")
        decision = decide_request(policy, box, replace(facts, body=body[: decision.bound], partial=partial), NOW)
    return decision


def _named(role: Mapping[str, Any]) -> dict[str, Any]:
    """The role with a name for each rule: two rules of one service need them."""
    made: dict[str, Any] = dict(role)
    for action in ("allow", "deny"):
        if action in role:
            rules = enumerate(role[action], 1)
            made[action] = [{"name": f"{action}-{number}", **rule} for number, rule in rules]
    return made


def _vectors(row: Mapping[str, Any], name: str) -> Iterator[Vector]:
    if unknown := row.keys() - _ROW:
        raise VectorFault(f"unknown keys {sorted(unknown)}")
    verdicts = [word for word in ("deny", "permit", "hold") if word in row]
    if len(verdicts) != 1:
        raise VectorFault("a row has one of deny, permit, hold")
    verdict: Any = verdicts[0]
    requests = row[verdict]
    if isinstance(requests, str):
        requests = [requests]
    headers, body = _carried(row)
    for number, line in enumerate(requests, 1):
        words = requests[line] if isinstance(requests, dict) else _shared(row, verdict)
        operation, effect, arguments, why = _said(list(words), verdict, row)
        method, _, url = line.partition(" ")
        if not why:
            raise VectorFault(f"{line}: why?")
        if (verdict == "deny") != ("reason" in row) or (verdict != "deny" and not (operation and effect)):
            raise VectorFault(f"{line}: a denial has a reason, all else an operation and an effect")
        yield Vector(
            name=name if len(requests) == 1 else f"{name}.{number}",
            role=row["role"],
            verdict=verdict,
            method=method,
            url=url.replace("{sha}", DIGEST),
            why=why,
            reason=row.get("reason", ""),
            operation=operation,
            effect=effect,
            arguments={key: _value(value) for key, value in arguments.items()},
            headers=headers,
            body=body,
            host=row.get("host"),
            trick=row.get("trick", False),
            sent=row.get("sent", "").replace("{sha}", DIGEST),
            apart=row.get("apart", {}),
        )


def _shared(row: Mapping[str, Any], verdict: str) -> list[Any]:
    if verdict == "deny":
        said = row.get("is", [])
        return [said] if isinstance(said, str) else list(said)
    return [row["operation"], row["effect"]]


def _said(words: list[Any], verdict: str, row: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any], str]:
    """(operation, effect, arguments, why) of one request."""
    arguments: Mapping[str, Any] = row.get("arguments", {})
    why: str = row.get("why", "")
    operation = words.pop(0) if words else ""
    effect = words.pop(0) if words and operation != NOTHING else ""
    if words and isinstance(words[0], dict):
        arguments = words.pop(0)
    if words:
        why = ", ".join(words)
    if arguments and verdict == "deny":
        raise VectorFault("a denial states no arguments")
    return operation, effect, arguments, why


def _value(value: Any) -> Value:
    return tuple(sorted(value)) if isinstance(value, list) else str(value).replace("{sha}", DIGEST)


def _carried(row: Mapping[str, Any]) -> tuple[tuple[tuple[str, str], ...], bytes | None]:
    """Headers and body that every request of the row has."""
    bodies = [word for word in ("json", "form", "text", "push", "repeat") if word in row]
    if len(bodies) > 1:
        raise VectorFault("a row has one body")
    kind, body = "", None
    match bodies:
        case ["json"]:
            kind, body = "application/json", json.dumps(row["json"]).encode()
        case ["form"]:
            kind, body = "application/x-www-form-urlencoded", row["form"].encode()
        case ["text"]:
            body = row["text"].encode()
        case ["push"]:
            commands = [(_OBJECTS[str(old)], _OBJECTS[str(new)], ref) for old, new, ref in row["push"]]
            pack = {} if any(new != ZERO for _, new, _ in commands) else {"pack": b""}  # nothing is sent with a delete
            kind, body = TYPE, push(*commands, **pack) if commands else b"0000"
        case ["repeat"]:
            made = row["repeat"]
            body = (made.get("before", "") + made["text"] * made["count"] + made.get("after", "")).encode()
        case _:
            pass
    headers: list[tuple[str, str]] = []
    for name, values in row.get("headers", {}).items():
        headers += [(name.lower(), str(value)) for value in (values if isinstance(values, list) else [values])]
    if kind and not any(name == "content-type" for name, _ in headers):
        headers.append(("content-type", kind))
    if row.get("gzip"):
        body = gzip.compress(body or b"", mtime=0)
        headers.append(("content-encoding", "gzip"))
    if body is not None and not any(name == "content-length" for name, _ in headers):
        headers.append(("content-length", str(len(body))))
    return tuple(headers), body
