"""Deny rules, read as widely as their words allow: what an allow would call a near miss must not slip past one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from rules.facts import RequestFacts, Sandbox
from rules.matching import Matched, bind_arguments, match_operation
from rules.names import Destination, Host
from rules.operations import SCOPED
from rules.paths import CanonicalPath, Query
from rules.policy import Operation, Rule

ANY_METHOD = ("*",)
"""Methods of a deny operation that names none."""


def deny_matches(rule: Rule, facts: RequestFacts, sandbox: Sandbox) -> bool:
    """Return whether the deny rule `rule` covers the request.

    Scheme, headers and body are not looked at, further query keys do not matter, an encoded slash counts as a
    slash and a trailing slash as none, and an argument that the request does not state counts as bound. Of several
    values one that fits is enough, and a query that asks for several things is read as each of them alone (decision 13).
    """
    destination = facts.destination
    if not rule.operations:
        return covers(rule, destination.host, destination.port)
    if rule.port is not None and rule.port != destination.port:
        return False
    for op in rule.operations:
        if not on_host(op, destination.host) or not _required_query_present(op, facts):
            continue
        wide = replace(
            op,
            body=None,
            query=None,
            query_required=(),
            request_headers={},
            paths=tuple(replace(pattern, encoded_slash=True) for pattern in op.paths),
            methods=(facts.method,) if op.methods == ANY_METHOD else op.methods,
        )
        there = Destination(op.scheme, destination.host, op.port)
        for path, query in product(_readings(facts.path), _parts(op, facts.query)):
            read = replace(facts, path=path, query=query, destination=there, body=None, has_body=False)
            answer = match_operation(wide, read)
            if isinstance(answer, Matched) and (
                rule.bind.keys() - answer.arguments.keys()
                or bind_arguments(rule, sandbox, answer.arguments, every=False)
            ):
                return True
    return False


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
