"""Explicit operations: what a sandbox may do, listed with JSON Schemas; and one of them turned into its request.

    offers(policy, sandbox)          -> what `GET /operations` of the help host lists
    state(policy, sandbox, name, input) -> Stated: an ordinary request, which is then judged like any other
                                        | Unstated: what is wrong with the input, in policy's own words

An offer permits nothing. `state` only saves the agent from speaking the service's API: the request that it makes goes
through the same gate, and a policy that changed in between is the one that counts. Bindings (`with:`) are shown, not
applied here.

An input is an object: `request` (one of the listed ways, may be left out where there is one), `host` (only where the
operation lies on many), `path`, `query`, `body`. Headers that the operation asks for are filled in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

from rules.facts import Sandbox
from rules.matching import match_path
from rules.names import DEFAULT_PORTS, Destination, Host, InvalidName, RuleId, Scheme
from rules.operations.strict_json import InvalidJson, load
from rules.paths import CanonicalPath, InvalidTarget, Query
from rules.policy import BodySpec, HostPattern, Operation, PathPattern, Policy, Rule

MAX_INPUT: Final = 64 * 1024
"""Bytes of an input (RULINGS 8.2)."""
REST: Final = "rest"
"""The name in `path` of what a trailing `**` takes: one or more segments with slashes between."""

_INPUTS: Final = ("request", "host", "path", "query", "body")
_BODILESS: Final = frozenset({"GET", "HEAD"})
_SAFE: Final = "~!$&'()*+,=:@"
"""Characters beyond the unreserved ones that a path segment may hold as they are (RFC 3986 section 3.3)."""
_TYPES: Final = {"string": "string", "number": "number", "integer": "integer", "boolean": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of stating an operation: a method and a path template at a host."""

    rule: Rule
    operation: Operation
    method: str
    host: HostPattern
    path: PathPattern

    @property
    def text(self) -> str:
        """`GET https://host/path/{name}`: how it is listed and asked for."""
        port = "" if self.operation.port == DEFAULT_PORTS[self.operation.scheme] else f":{self.operation.port}"
        return f"{self.method} {self.operation.scheme}://{self.host.text}{port}{self.path.template}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One operation that some allow rule of the sandbox's role names."""

    name: str
    """`service.operation`, or the name of the rule for a hand-written one."""
    effect: str
    rules: tuple[RuleId, ...]
    bound: Mapping[str, tuple[str, ...]]
    """What `with:` binds, where one rule alone permits it."""
    approval: str
    ways: tuple[Way, ...]

    def schema(self) -> dict[str, Any]:
        """The JSON Schema (2020-12) of the input: one flat object, because not every client takes alternatives."""
        return _schema(self.ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstated:
    """No request could be made. `unknown` where no such operation is offered; else `problem` is a sentence of ours."""

    problem: str
    unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """An ordinary request. `target` is origin-form; `body` None has none. Judged by nobody yet."""

    method: str
    scheme: Scheme
    host: Host
    port: int
    target: str
    headers: tuple[tuple[str, str], ...]
    """Host first; then media types that the operation asks for."""
    body: bytes | None


def offers(policy: Policy, sandbox: Sandbox) -> tuple[Offer, ...]:
    """Return what the role of `sandbox` may state as operations, by name. Tunnels and deny rules state none."""
    found: dict[str, list[Way]] = {}
    for way in _ways(policy, sandbox):
        found.setdefault(offer_name(way.rule, way.operation), []).append(way)
    return tuple(_offer(name, tuple(ways)) for name, ways in sorted(found.items()))


def offer_name(rule: Rule, operation: Operation) -> str:
    """`github.rest.read` for a service's operation, the rule's own name for a hand-written one."""
    return operation.name.partition("/")[2] if operation.name == rule.id else operation.name.replace("/", ".", 1)


def state(policy: Policy, sandbox: Sandbox, name: str, raw: bytes) -> Stated | Unstated:
    """Return the request that states the operation `name` with the JSON input `raw`. Never raises."""
    ways = tuple(way for way in _ways(policy, sandbox) if offer_name(way.rule, way.operation) == name)
    if not ways:
        return Unstated(problem="No such operation is offered to this sandbox.", unknown=True)
    try:
        given = _input(raw)
        return _state(_choose(ways, given), given)
    except _Wrong as error:
        return Unstated(problem=str(error))


# --- what is offered ---------------------------------------------------------------------------------------------


def _ways(policy: Policy, sandbox: Sandbox) -> Iterator[Way]:
    role = policy.roles.get(sandbox.role)
    for rule in role.rules if role is not None else ():
        if rule.action != "allow" or rule.tunnel:
            continue
        for operation in rule.operations:
            if operation.websocket or (operation.body is not None and operation.body.prefix):
                continue  # streams in both directions, and packs: not a call with a result
            for method in operation.methods:
                for host in operation.hosts:
                    for path in operation.paths:
                        yield Way(rule=rule, operation=operation, method=method, host=host, path=path)


def _offer(name: str, ways: tuple[Way, ...]) -> Offer:
    rules = {way.rule.id: way.rule for way in ways}
    one = next(iter(rules.values())) if len(rules) == 1 else None
    return Offer(
        name=name,
        effect=ways[0].operation.effect,
        rules=tuple(sorted(rules)),
        bound=one.bind if one is not None else {},
        approval=(one.approval or "") if one is not None else "",
        ways=ways,
    )


def _schema(ways: tuple[Way, ...]) -> dict[str, Any]:
    texts = list(dict.fromkeys(way.text for way in ways))
    single = len(texts) == 1
    properties: dict[str, Any] = {}
    required: list[str] = []
    if not single:
        properties["request"] = {"enum": texts, "description": "which of the requests that this operation knows"}
        required.append("request")
    if any(way.host.kind != "exact" for way in ways):
        properties["host"] = {"type": "string", "description": "the host, where it is a pattern"}
        if all(way.host.kind != "exact" for way in ways):
            required.append("host")
    names = list(dict.fromkeys(name for way in ways for name in _captures(way.path)))
    if names:
        properties["path"] = _object({name: {"type": ["string", "integer"]} for name in names}, names if single else [])
        if single:
            required.append("path")
    query = _query_schema(ways, single)
    if query is not None:
        properties["query"] = query
        if query["required"]:
            required.append("query")
    if any(way.method not in _BODILESS for way in ways):
        bodies = [_body_schema(way.operation.body) for way in ways if way.method not in _BODILESS]
        properties["body"] = bodies[0] if all(body == bodies[0] for body in bodies) else {}
        if single and ways[0].operation.body is not None:
            required.append("body")
    return _object(properties, required)


def _query_schema(ways: tuple[Way, ...], single: bool) -> dict[str, Any] | None:
    names: dict[str, Any] = {}
    free = False
    for way in ways:
        if way.operation.query is None:
            free = True
            continue
        for name, values in way.operation.query.items():
            names.setdefault(
                name, {"type": ["string", "integer", "boolean"]} if values is None else {"enum": [*values]}
            )
    if not names and not free:
        return None
    return _object(names, list(ways[0].operation.query_required) if single else []) | {"additionalProperties": free}


def _body_schema(body: BodySpec | None) -> dict[str, Any]:
    if body is None or body.matcher != "json_fields":
        return {}
    return _fields_schema(body.params)


def _fields_schema(params: Mapping[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field, spec in params.items():
        name = field.removesuffix("?")
        if isinstance(spec, Mapping):
            properties[name] = _fields_schema(spec)
        elif isinstance(spec, list | tuple):
            properties[name] = {"enum": list(spec)}
        elif isinstance(spec, str) and spec in _TYPES:
            properties[name] = {"type": _TYPES[spec]}
        else:
            properties[name] = {"const": spec}
    return _object(properties, [field for field in params if not field.endswith("?")])


def _object(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


def _captures(path: PathPattern) -> tuple[str, ...]:
    return (*path.names, REST) if path.rest else path.names


# --- one input to one request ------------------------------------------------------------------------------------


class _Wrong(Exception):
    """The input states no request. str() is a sentence of ours with policy's own words only."""


def _input(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_INPUT:
        raise _Wrong("An input has at most 64 KiB.")
    try:
        value = load(raw, depth=32, nodes=20_000) if raw.strip() else {}
    except InvalidJson:
        raise _Wrong("The input is not a JSON object.") from None
    if not isinstance(value, dict):
        raise _Wrong("The input is not a JSON object.")
    if not value.keys() <= set(_INPUTS):
        raise _Wrong(f"An input holds only {', '.join(_INPUTS)}.")
    return value


def _choose(ways: tuple[Way, ...], given: Mapping[str, Any]) -> Way:
    asked = given.get("request")
    if asked is None:
        if len({way.text for way in ways}) > 1:
            raise _Wrong("This operation knows several requests: say which in `request`.")
        return ways[0]
    for way in ways:
        if way.text == asked:
            return way
    raise _Wrong("`request` is not one of those that this operation knows.")


def _state(way: Way, given: Mapping[str, Any]) -> Stated:
    operation = way.operation
    host = _host(way, given.get("host"))
    path = _path(way.path, _mapping(given, "path"))
    query = _query(operation, _mapping(given, "query"))
    kind, body = _body(way, given)
    destination = Destination(operation.scheme, host, operation.port)
    headers = [("host", destination.authority)]
    for name, values in operation.request_headers.items():
        if name == "content-type":
            continue
        if values and "" not in values:
            headers.append((name, values[0]))
    if not any(name == "accept" for name, _ in headers):
        headers.append(("accept", "application/json, */*;q=0.5"))
    headers += [("content-type", kind)] if body is not None else []
    return Stated(
        method=way.method,
        scheme=operation.scheme,
        host=host,
        port=operation.port,
        target=path + (f"?{query}" if query else ""),
        headers=tuple(headers),
        body=body,
    )


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise _Wrong(f"`{name}` is an object.")
    return value


def _host(way: Way, asked: Any) -> Host:
    if asked is None and way.host.kind == "exact":
        return Host.of(way.host.suffix)
    if not isinstance(asked, str):
        raise _Wrong("`host` names the one host to ask.")
    try:
        host = Host.parse(asked)
    except InvalidName:
        raise _Wrong("`host` is not a host name.") from None
    if not way.host.matches(host):
        raise _Wrong(f"`host` does not fit {way.host.text}.")
    return host


def _path(pattern: PathPattern, given: Mapping[str, Any]) -> str:
    wanted = set(_captures(pattern))
    if given.keys() != wanted:
        raise _Wrong(f"`path` holds exactly: {', '.join(sorted(wanted)) or 'nothing'}.")
    names = iter(pattern.names)
    parts = [_segment(segment if segment is not None else given[next(names)]) for segment in pattern.segments]
    if pattern.rest:
        rest = given[REST]
        parts += [_segment(piece) for piece in (rest.split("/") if isinstance(rest, str) else (rest,))]
    try:
        path = CanonicalPath.parse("/" + "/".join(parts))
    except InvalidTarget as error:
        raise _Wrong(f"These values make no path: {error}.") from None
    if match_path(pattern, path) is None:
        raise _Wrong(f"These values do not fit {pattern.template}.")
    return path.raw


def _segment(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Wrong("A value in `path` is text or a whole number.")
    try:
        return quote(str(value), safe=_SAFE)
    except UnicodeEncodeError:
        raise _Wrong("A value in `path` has no UTF-8 form.") from None


def _query(operation: Operation, given: Mapping[str, Any]) -> str:
    for name in operation.query_required:
        if name not in given:
            raise _Wrong(f"`query` needs {name}.")
    pairs: list[tuple[str, str]] = []
    for name, value in given.items():
        if isinstance(value, bool):
            value = "true" if value else "false"
        if not isinstance(value, str | int):
            raise _Wrong("A value in `query` is text, a whole number or a truth value.")
        if operation.query is not None:
            if name not in operation.query:
                raise _Wrong(f"`query` may hold: {', '.join(operation.query) or 'nothing'}.")
            allowed = operation.query[name]
            if allowed is not None and str(value) not in allowed:
                raise _Wrong(f"`query` takes for {name}: {', '.join(allowed)}.")
        pairs.append((name, str(value)))
    try:
        return Query.parse(urlencode(pairs, quote_via=quote)).raw or ""
    except UnicodeEncodeError:
        raise _Wrong("A value in `query` has no UTF-8 form.") from None
    except InvalidTarget as error:
        raise _Wrong(f"These values make no query: {error}.") from None


def _body(way: Way, given: Mapping[str, Any]) -> tuple[str, bytes | None]:
    if "body" not in given:
        return "", None
    if way.method in _BODILESS:
        raise _Wrong(f"A {way.method} has no body.")
    value = given["body"]
    kind = next((k for k in way.operation.request_headers.get("content-type", ()) if k), "application/json")
    if kind == "application/x-www-form-urlencoded":
        if not isinstance(value, dict) or not all(isinstance(v, str | int) for v in value.values()):
            raise _Wrong("This body is an object of texts.")
        text = urlencode(value, quote_via=quote)
    elif kind == "application/json" or kind.endswith("+json") or kind.startswith("application/x-amz-json"):
        text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    elif isinstance(value, str):
        text = value
    else:
        raise _Wrong(f"This body is text ({kind}).")
    try:
        return kind, text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Wrong("The body has no UTF-8 form.") from None
