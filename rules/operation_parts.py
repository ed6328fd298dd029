"""The parts of a hand-written operation: where it is, which paths and query keys, which body, which effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, get_args

from rules import grammar
from rules.matching import InvalidTemplate, parse_path
from rules.names import DEFAULT_PORTS, Host, Scheme
from rules.operations import json_fields
from rules.policy import BodySpec, DestinationDef, Effect, HostPattern, PathPattern
from rules.reader import Node, shown

DEFAULT_BODY = 256 << 10
MAX_BODY = 16 << 20

_EFFECTS = get_args(Effect)


def host_patterns(node: Node, *, allow: bool, destinations: Mapping[str, DestinationDef]) -> tuple[HostPattern, ...]:
    nodes = [node] if isinstance(node.value, str) else node.items(empty="an empty list of hosts names nothing")
    patterns = tuple(grammar.host_pattern(item, allow=allow) for item in nodes)
    if len(set(patterns)) != len(patterns):
        node.fail("a host is listed twice")
    for item, pattern in zip(nodes, patterns, strict=True):
        literal = pattern.kind == "exact" and Host.of(pattern.suffix).is_literal
        if allow and literal and pattern.suffix not in destinations:
            item.fail("an address is reached only with an entry in destinations:")
        if not allow and pattern.kind == "one":
            item.warn(
                f"*.{pattern.suffix} denies one label only, a.b.{pattern.suffix} passes; "
                f'to deny all of them write "**.{pattern.suffix}"'
            )
    return patterns


def place(
    fields: Mapping[str, Node], hosts: Sequence[HostPattern], destinations: Mapping[str, DestinationDef]
) -> tuple[int, Scheme]:
    """Port and scheme: as written, else the destination's, else 443 over TLS (80 with `scheme: http`)."""
    entries = {destinations.get(pattern.suffix) if pattern.kind == "exact" else None for pattern in hosts}
    defaults = {(entry.port, entry.scheme) if entry else (None, "https") for entry in entries}
    if len(defaults) > 1 and not {"port", "scheme"} <= fields.keys():
        fields["host"].fail("these hosts have different ports or schemes in destinations:; write one rule for each")
    entry_port, entry_scheme = next(iter(defaults))
    scheme = cast("Scheme", fields["scheme"].word(("https", "http")) if "scheme" in fields else entry_scheme)
    if "port" in fields:
        return fields["port"].natural(1, 65535), scheme
    if entry_port is not None and scheme == entry_scheme:
        return entry_port, scheme
    return DEFAULT_PORTS[scheme], scheme


def paths(node: Node) -> tuple[tuple[PathPattern, ...], tuple[str, ...]]:
    """Return the patterns and the attributes that every one of them substitutes as a whole segment."""
    node.texts(empty="an empty list of paths permits nothing; name the paths")
    patterns: list[PathPattern] = []
    references: set[tuple[str, ...]] = set()
    for item in node.items(empty=None):
        text = item.text()
        named = grammar.sandbox_references(item, text)
        references.add(tuple(sorted(named)))
        for segment in text.split("/"):
            if "${" in segment and not grammar.SANDBOX_REFERENCE.fullmatch(segment):
                item.fail("${sandbox.x} stands for one whole path segment")
        try:
            pattern = parse_path(grammar.SANDBOX_REFERENCE.sub(lambda match: "{sandbox_" + match[1] + "}", text))
        except InvalidTemplate as error:
            item.fail(f"{shown(text)}: {error}")
        mine = {f"sandbox_{name}" for name in named}
        if any(name.startswith("sandbox_") and name not in mine for name in pattern.names):
            item.fail("capture names that start with sandbox_ are ours")
        patterns.append(pattern)
    if len(references) > 1:
        node.fail("every path of a rule substitutes the same ${sandbox.x}, or none does; write two rules")
    return tuple(patterns), next(iter(references))


def effect(node: Node | None, methods: Sequence[str], websocket: Node | None = None) -> Effect:
    """As written, else read for GET and HEAD alone and write for the rest; a WebSocket writes (RULINGS 7.5)."""
    upgrades = websocket is not None and websocket.flag()
    if websocket is not None and upgrades and tuple(methods) != ("GET",):
        websocket.fail("a WebSocket is opened by GET alone (RFC 6455): methods: [GET]", on_key=True)
    if node is not None:
        written = cast("Effect", node.word(_EFFECTS))
        if upgrades and written in ("read", "disclose"):
            node.fail("messages of a WebSocket are not judged: its effect is write, execute or mint")
        return written
    return "read" if set(methods) <= {"GET", "HEAD"} and not upgrades else "write"


def query(node: Node | None) -> tuple[Mapping[str, tuple[str, ...] | None] | None, tuple[str, ...]]:
    """Return (allowed keys, their names). `any` lifts the check; without `query:` no key is allowed."""
    if node is None:
        return {}, ()
    if node.value == "any":
        return None, ()
    found: dict[str, tuple[str, ...] | None] = {}
    for key, item in node.entries():
        if item.value == "any":
            found[key] = None
            continue
        values = []
        for value in item.items(empty="an empty list permits no value; list values or write any"):
            number = type(value.value) is int
            values.append(str(value.value) if number else value.text())
        found[key] = tuple(values)
    return found, tuple(found)


def body(node: Node, methods: Sequence[str]) -> BodySpec:
    fields = node.fields("json", "max")
    if set(methods) & {"GET", "HEAD"}:
        node.fail("a GET has no body that could be judged", on_key=True)
    params = fields["json"].value
    try:
        json_fields.check(params)
    except ValueError as error:
        fields["json"].fail(str(error))
    bound = grammar.size(fields["max"]) if "max" in fields else DEFAULT_BODY
    if bound > MAX_BODY:
        fields["max"].fail("a judged body is at most 16MiB")
    return BodySpec(matcher="json_fields", bound=bound, params=params)
