"""Deny rules, read as widely as their words allow: what an allow would call a near miss must not slip past one.

A rule that binds what stands in a body has the body read (decision 18). What its matcher does not recognise there is
not let past: then only an operation of the same service that recognises this very body may permit the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from rules.facts import RequestFacts, Sandbox
from rules.matching import Matched, WantsBody, bind_arguments, match_operation
from rules.names import Destination, Host
from rules.operations import SCOPED, arguments_of
from rules.paths import CanonicalPath, Query
from rules.policy import Operation, Rule

ANY_METHOD = ("*",)
"""Methods of a deny operation that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """The rule may cover the request: at most `bound` bytes of its body decide, or with `prefix` its first bytes."""

    bound: int
    prefix: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """The head fits, and the body is not what the rule's matcher recognises: of these `services` something else."""

    services: frozenset[str]


def deny_matches(rule: Rule, facts: RequestFacts, sandbox: Sandbox) -> bool:
    """Return whether the deny rule `rule` certainly covers the request, by what is known of it."""
    return read_deny(rule, facts, sandbox) is True


def read_deny(rule: Rule, facts: RequestFacts, sandbox: Sandbox) -> bool | Unseen | Unread:
    """Return whether the deny rule `rule` covers the request, or what is missing to say so.

    Scheme and headers are not looked at, nor is a body of which the rule binds nothing; further query keys do not
    matter, an encoded slash counts as a slash and a trailing slash as none. An argument that the request does not state
    counts as bound, unless the operation leaves it to the requests that follow (Operation.unbound). Of several values
    one that fits is enough, and a query that asks for several things is read as each of them alone (decision 13).
    """
    destination = facts.destination
    if not rule.operations:
        return covers(rule, destination.host, destination.port)
    if rule.port is not None and rule.port != destination.port:
        return False
    unseen: Unseen | None = None
    services: set[str] = set()
    for op in rule.operations:
        if not on_host(op, destination.host) or not _required_query_present(op, facts):
            continue
        wide = widened(op, facts.method)
        for read in readings(op, facts):
            answer = match_operation(replace(wide, body=None), replace(read, body=None, has_body=False))
            if not isinstance(answer, Matched) or not _fits(rule, sandbox, op, answer):
                continue
            if not rule.bind.keys() & in_body(op) - answer.arguments.keys():
                return True
            whole = match_operation(wide, read)
            match whole:
                case Matched():
                    if _fits(rule, sandbox, op, whole):
                        return True
                case WantsBody(bound=bound, prefix=prefix):
                    # One that must see the end of the body makes it needed whole.
                    both = unseen is None or unseen.prefix
                    unseen = Unseen(bound=max(bound, unseen.bound if unseen else 0), prefix=prefix and both)
                case _:
                    services.add(service_of(op))
    return unseen or (Unread(services=frozenset(services)) if services else False)


def widened(op: Operation, method: str) -> Operation:
    """`op` as a deny rule reads it, for a request with `method`."""
    return replace(
        op,
        query=None,
        query_required=(),
        request_headers={},
        paths=tuple(replace(pattern, encoded_slash=True) for pattern in op.paths),
        methods=(method,) if op.methods == ANY_METHOD else op.methods,
    )


def readings(op: Operation, facts: RequestFacts) -> Iterable[RequestFacts]:
    """Every way in which a deny rule reads the head of a request: as if it went where `op` is."""
    there = Destination(op.scheme, facts.destination.host, op.port)
    body = b"" if facts.body is None and not facts.has_body else facts.body
    for path, query in product(_readings(facts.path), _parts(op, facts.query)):
        yield replace(facts, path=path, query=query, destination=there, body=body)


def in_body(op: Operation) -> frozenset[str]:
    """The arguments of `op` that stand in the body."""
    return frozenset() if op.body is None else arguments_of(op.body.matcher, op.body.params)


def service_of(op: Operation) -> str:
    """The service of an operation of the catalogue."""
    return op.id.partition("/")[0]


def _fits(rule: Rule, sandbox: Sandbox, op: Operation, found: Matched) -> bool:
    """Whether one value of every argument that is stated and bound fits, and none is left to what follows."""
    if (rule.bind.keys() - found.arguments.keys()) & {*op.unbound}:
        return False
    stated = replace(rule, bind={name: rule.bind[name] for name in rule.bind.keys() & found.arguments.keys()})
    return bind_arguments(stated, sandbox, found.arguments, every=False)


def covers(rule: Rule, host: Host, port: int) -> bool:
    return (rule.port is None or rule.port == port) and any(pattern.matches(host) for pattern in rule.hosts)


def reaches(rule: Rule, host: Host, port: int) -> bool:
    """Whether some operation of the deny rule `rule` may be meant by what goes to this host and port."""
    return (rule.port is None or rule.port == port) and any(on_host(op, host) for op in rule.operations)


def on_host(op: Operation, host: Host) -> bool:
    return any(pattern.matches(host) for pattern in op.hosts)


def _required_query_present(op: Operation, facts: RequestFacts) -> bool:
    allowed = op.query or {}
    for name in op.query_required:
        values = allowed.get(name)
        if not any(key == name and (values is None or value in values) for key, value in facts.query.pairs):
            return False
    return True


def _parts(op: Operation, query: Query) -> Iterable[Query]:
    scoped = None if op.head is None else SCOPED.get(op.head.matcher)
    parts = () if scoped is None else tuple(alone for _, alone in scoped.parts(query))
    return parts or (query,)


def _readings(path: CanonicalPath) -> Iterable[CanonicalPath]:
    yield path
    segments = path.segments
    if path.encoded_slash:
        segments = tuple(piece for segment in segments for piece in segment.split("/"))
        yield replace(path, segments=segments)
    if len(segments) > 1 and segments[-1] == "":
        yield replace(path, segments=segments[:-1])
