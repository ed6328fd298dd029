"""policy.yaml: what is permitted. Reads one file into roles of `WrittenRule`; names secrets by reference only.

A rule has one of three forms, told by its keys, each with its own table of keys (unknown key = error):

    service: github          operations: [git.fetch]         the catalogue recognises the request
    host: deploy.example     methods: [POST]  paths: [/x]    a hand-written operation
    host: opaque.example     tunnel: true     reason: ...    bytes relayed unseen

What can be said wrong within one rule is found here; what takes two rules or two files, in checks.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast, get_args

from rules import grammar
from rules import operation_parts as parts
from rules.catalogue import ServiceDef
from rules.denials import ANY_METHOD
from rules.matching import parse_path
from rules.names import RuleId
from rules.operations import LATER, arguments_of
from rules.policy import DestinationDef, Dns, Effect, HostPattern, Operation, Rule
from rules.reader import Node, shown
from rules.rule_terms import bound, shared

DEFAULT_TUNNEL_BYTES = 1 << 30
DEFAULT_TUNNEL_SECONDS = 3600

_EFFECTS = get_args(Effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRule:
    """A rule and the node it came from, for complaints."""

    rule: Rule
    node: Node


@dataclass(slots=True, kw_only=True)
class WrittenRole:
    name: str
    node: Node
    rules: list[WrittenRule] = field(default_factory=list)
    include: list[Node] = field(default_factory=list)
    message: str = ""
    boundary: str | None = None
    dns: Dns = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a rule may refer to."""

    services: Mapping[str, ServiceDef]
    destinations: Mapping[str, DestinationDef]


def read_role(name: str, node: Node, around: Surroundings) -> WrittenRole:
    """Return the role; rules that cannot be read are noted and left out (the whole policy is refused anyway)."""
    fields = node.fields("", "allow deny include message boundary dns")
    role = WrittenRole(name=name, node=node)
    if not fields.keys() & {"allow", "deny", "include"}:
        node.note("the role says nothing: write allow: [] to mean that it permits nothing")
    _read_rules(role, fields, around)
    if "include" in fields:
        role.include = fields["include"].items(empty="an empty include: takes over nothing; leave it out")
    if "message" in fields:
        role.message = fields["message"].text()
    if "boundary" in fields:
        inner = fields["boundary"].fields("external reason")
        inner["reason"].text()
        role.boundary = inner["external"].text()
    if "dns" in fields:
        role.dns = cast("Dns", fields["dns"].word(get_args(Dns)))
    return role


def read_everyone(node: Node, around: Surroundings) -> WrittenRole:
    """`everyone: {deny: [...]}`: rules that bind every role. It cannot allow."""
    role = WrittenRole(name="everyone", node=node)
    _read_rules(role, node.fields("deny"), around)
    return role


def _read_rules(role: WrittenRole, fields: Mapping[str, Node], around: Surroundings) -> None:
    for action in ("deny", "allow"):
        if action not in fields:
            continue
        with fields[action].problems.collecting():
            taken = {entry.rule.id for entry in role.rules}
            for node in fields[action].items(empty=None):
                with node.problems.collecting():
                    for rule in _rules(role.name, action, node, around):
                        _add(role, WrittenRule(rule=rule, node=node), taken)


def _add(role: WrittenRole, written: WrittenRule, taken: set[RuleId]) -> None:
    if written.rule.id in taken:
        name = written.rule.id.partition("/")[2]
        written.node.fail(f"a second rule is called {name}; give one of them a name:")
    taken.add(written.rule.id)
    role.rules.append(written)


def _rules(role: str, action: str, node: Node, around: Surroundings) -> list[Rule]:
    keys = set(node.value) if isinstance(node.value, dict) else set()
    allow = action == "allow"
    if "service" in keys:
        return _service_rules(role, allow, node, around)
    if "host" not in keys:
        node.fields("", _KEYS_SERVICE + _KEYS_HAND if allow else _KEYS_DENY)
        node.fail("a rule names a service: or a host:")
    if allow and "tunnel" in keys:
        return [_tunnel_rule(role, node)]
    return [_hand_rule(role, node, around) if allow else _deny_host_rule(role, node, around)]


# --- service rules ---

_KEYS_SHARED = " name credential with result limits approval protocol client_auth headers message"
_KEYS_SERVICE = "service operations shared" + _KEYS_SHARED
_KEYS_HAND = " host port scheme methods paths query body effect websocket" + _KEYS_SHARED
_KEYS_DENY = "name service operations with host port methods paths query message quiet"


def _service_rules(role: str, allow: bool, node: Node, around: Surroundings) -> list[Rule]:
    if allow:
        fields = node.fields("service operations", _KEYS_SERVICE)
    else:
        fields = node.fields("service", "operations with name message quiet")
    names = _service_names(fields["service"], around.services)
    written = None if "name" not in fields else grammar.name(fields["name"])
    if written is not None and len(names) > 1:
        fields["name"].fail("a rule for several services cannot have one name; write one rule for each")
    rules: list[Rule] = []
    chosen = _chosen(fields["operations"], [around.services[name] for name in names]) if "operations" in fields else {}
    for name in names:
        service = around.services[name]
        base = Rule(id=RuleId(f"{role}/{written or name}"), action="allow" if allow else "deny", operations=())
        if "operations" in fields:
            selectors, ops = chosen[name]
            base = replace(base, operations=ops)
            arguments = {argument for selector in selectors for argument in service.arguments(selector)}
            base = bound(base, fields, arguments, allow=allow)
            if allow:
                base = replace(base, shared="shared" in fields and fields["shared"].flag())
                _check_terms(base, selectors, fields)
        elif "with" in fields:
            fields["with"].fail("with: binds arguments of operations; name the operations")
        else:
            base = replace(base, hosts=_hosts_of(service))
        rules.append(shared(base, fields) if allow else _deny_extras(base, fields))
    if "shared" in fields:
        _check_shared(rules, fields["shared"])
    return rules


def _check_shared(rules: Sequence[Rule], node: Node) -> None:
    if not node.flag():
        node.fail("shared: true, or leave it out")
    if not any(rule.credential and op.shared_state is not None for rule in rules for op in rule.operations):
        node.warn("shared: true says nothing here: no operation of this rule reaches what an account shares")


def _check_terms(rule: Rule, selectors: Sequence[str], fields: Mapping[str, Node]) -> None:
    """What the catalogue asks of every allow rule: bindings of shared hosts, and care with what mints authority."""
    for op in rule.operations:
        node = fields.get("with", fields["operations"])
        for name in op.must_bind:
            if name not in rule.bind:
                node.fail(f"{op.id}: this host is shared by everybody; with: must bind {name}")
            if any(not pattern.replace("*", "").replace("/", "") for pattern in rule.bind[name]):
                node.fail(f"{op.id}: this host is shared by everybody; a pattern for {name} needs more than *")
        if op.shared_state is not None and "credential" in fields and not rule.shared:
            _check_told_apart(op, op.shared_state, rule, node)
        if op.effect == "mint" and "mint" in selectors:
            fields["operations"].fail(f"{op.id} gives out authority; name it, operations: [mint] would take all")
        if op.effect == "mint" and "credential" in fields and not op.captures:
            fields["credential"].fail(
                f"{op.id} answers with authority made from this credential, and its service does not say in which "
                "fields"
            )


def _check_told_apart(op: Operation, apart: Sequence[str], rule: Rule, node: Node) -> None:
    """RULINGS 7.6: one credential is one account, in which every sandbox finds what the others left."""
    told = [name for name in apart if name in rule.bind]
    if any(all(pattern.replace("*", "").replace("/", "") for pattern in rule.bind[name]) for name in told):
        return
    reaches = f"{op.id} reaches what other sandboxes left under this credential's account"
    if told:
        node.fail(f"{reaches}; a pattern for {' or '.join(told)} needs more than *, or say shared: true")
    if apart:
        node.fail(f"{reaches}; with: must bind {' or '.join(apart)}, or say shared: true")
    node.fail(f"{reaches}, and states nothing that tells them apart; say shared: true, or leave it out")


def _service_names(node: Node, services: Mapping[str, ServiceDef]) -> list[str]:
    if isinstance(node.value, str):
        return [node.word(services)]
    names = [item.word(services) for item in node.items(empty="an empty list of services permits nothing")]
    node.texts(empty="")
    return names


def _chosen(node: Node, services: Sequence[ServiceDef]) -> dict[str, tuple[tuple[str, ...], tuple[Operation, ...]]]:
    """Each word is an effect or the name of an operation; it must choose something in at least one service.

    Return (words, operations) by service name.
    """
    words = node.texts(empty="an empty list of operations permits nothing; name operations or effects")
    for index, word in enumerate(words):
        if not any(service.select(word) for service in services):
            known = sorted({name for service in services for name in service.operation_names})
            effects = [effect for effect in _EFFECTS if any(service.select(effect) for service in services)]
            near = difflib.get_close_matches(word, (*known, *effects), 1)
            if word in known:
                hint = "it exists only at a base of your own (services: like:)"
            else:
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join((*effects, *known))}"
            what = (
                f"no operation here has the effect {word}" if word in _EFFECTS else f"no operation {shown(word)} here"
            )
            node.child(index).fail(f"{what}; {hint}")
        for op in (op for service in services for op in service.select(word) if word not in _EFFECTS):
            if op.body is not None and op.body.matcher == LATER:
                node.child(index).warn(f"{op.id} is known but cannot be judged yet, so it stays denied")
    chosen: dict[str, tuple[tuple[str, ...], tuple[Operation, ...]]] = {}
    for service in services:
        ops = {op.id: op for word in words for op in service.select(word)}
        if not ops:
            node.fail(f"none of these operations is one of service {service.name}; write a rule of its own for it")
        chosen[service.name] = (tuple(words), tuple(ops.values()))
    return chosen


def _hosts_of(service: ServiceDef) -> tuple[HostPattern, ...]:
    return tuple(dict.fromkeys(pattern for op in service.operations for pattern in op.hosts))


# --- hand-written rules ---


def _hand_rule(role: str, node: Node, around: Surroundings) -> Rule:
    fields = node.fields("host methods paths", _KEYS_HAND)
    if "name" not in fields:
        node.fail("a hand-written operation needs a name:")
    name = grammar.name(fields["name"])
    methods = grammar.methods(fields["methods"])
    hosts = parts.host_patterns(fields["host"], allow=True, destinations=around.destinations)
    port, scheme = parts.place(fields, hosts, around.destinations)
    paths, references = parts.paths(fields["paths"])
    captures = {capture for pattern in paths for capture in pattern.names}
    body = parts.body(fields["body"], methods) if "body" in fields else None
    query, _ = parts.query(fields.get("query"))
    op = Operation(
        id=f"{role}/{name}",
        effect=parts.effect(fields.get("effect"), methods, fields.get("websocket")),
        hosts=hosts,
        port=port,
        scheme=scheme,
        methods=methods,
        paths=paths,
        query=query,
        body=body,
        arguments={capture: "{" + capture + "}" for capture in sorted(captures)},
        websocket=fields["websocket"].flag() if "websocket" in fields else False,
    )
    rule = Rule(id=RuleId(f"{role}/{name}"), action="allow", operations=(op,))
    fields_stated = arguments_of(body.matcher, body.params) if body else frozenset()
    arguments = captures | fields_stated
    clash = captures & fields_stated
    if clash:
        fields["body"].fail(f"{', '.join(sorted(clash))}: a path capture and a body field share a name")
    rule = bound(rule, fields, arguments, allow=True)
    for reference in references:
        rule = replace(rule, bind={**rule.bind, f"sandbox_{reference}": ("${sandbox." + reference + "}",)})
    rule = shared(rule, fields)
    if op.websocket and "result" in fields:
        fields["result"].fail("a WebSocket has no fields to keep: its messages are scrubbed, not pruned", on_key=True)
    if "approval" in fields and "shows" in fields["approval"].value:
        for item in fields["approval"].child("shows").items(empty=None):
            item.word(sorted(arguments))
    return rule


# --- tunnels and denials ---


def _tunnel_rule(role: str, node: Node) -> Rule:
    if "credential" in node.value:
        node.child("credential").fail("a credential cannot be put into a tunnel: nothing in it is seen", on_key=True)
    fields = node.fields("host tunnel reason", "name port limits message")
    if not fields["tunnel"].flag():
        fields["tunnel"].fail("tunnel: true, or leave it out")
    if "*" in str(fields["host"].value):
        fields["host"].fail("a tunnel needs one exact host")
    host = grammar.exact_host(fields["host"])
    limits = fields["limits"].fields("", "bytes time") if "limits" in fields else {}
    name = grammar.name(fields["name"]) if "name" in fields else host.text
    return Rule(
        id=RuleId(f"{role}/{name}"),
        action="allow",
        operations=(),
        hosts=(HostPattern(kind="exact", suffix=host.text),),
        port=fields["port"].natural(1, 65535) if "port" in fields else 443,
        tunnel=True,
        tunnel_reason=fields["reason"].text(),
        max_bytes=grammar.size(limits["bytes"]) if "bytes" in limits else DEFAULT_TUNNEL_BYTES,
        max_seconds=grammar.duration(limits["time"]) if "time" in limits else DEFAULT_TUNNEL_SECONDS,
        message=fields["message"].text() if "message" in fields else "",
    )


def _deny_host_rule(role: str, node: Node, around: Surroundings) -> Rule:
    if isinstance(node.value, dict) and "body" in node.value:
        node.child("body").fail("a deny rule does not look into bodies: what cannot be read would slip past it")
    fields = node.fields("host", "name port methods paths query message quiet")
    hosts = parts.host_patterns(fields["host"], allow=False, destinations=around.destinations)
    port = fields["port"].natural(1, 65535) if "port" in fields else None
    name = grammar.name(fields["name"]) if "name" in fields else _default_name(hosts)
    rule = Rule(id=RuleId(f"{role}/{name}"), action="deny", operations=(), hosts=hosts, port=port)
    if fields.keys() & {"methods", "paths", "query"}:
        paths, references = parts.paths(fields["paths"]) if "paths" in fields else (_EVERY_PATH, ())
        if references:
            fields["paths"].fail(
                "a deny rule does not depend on the sandbox: an attribute that is missing would lift it"
            )
        query, required = parts.query(fields.get("query"))
        op = Operation(
            id=f"{role}/{name}",
            effect="write",
            hosts=hosts,
            port=port or 443,
            scheme="https",
            methods=grammar.methods(fields["methods"]) if "methods" in fields else ANY_METHOD,
            paths=paths,
            query=query,
            query_required=required,
        )
        rule = replace(rule, operations=(op,), hosts=())
    return _deny_extras(rule, fields)


_EVERY_PATH = (parse_path("/"), parse_path("/**"))


def _default_name(hosts: Sequence[HostPattern]) -> str:
    return "+".join(pattern.text for pattern in hosts)


def _deny_extras(rule: Rule, fields: Mapping[str, Node]) -> Rule:
    return replace(
        rule,
        message=fields["message"].text() if "message" in fields else "",
        quiet=fields["quiet"].flag() if "quiet" in fields else False,
    )
