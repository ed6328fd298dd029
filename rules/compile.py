"""`compile_policy`: from a document (rules/document.py) to a `Policy`.

The document comes from the vault, but is read as if it did not: every field is present and of its type, no
field is unknown, every reference resolves. Anything else raises DocumentFault, and the caller keeps what it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Any, cast, get_args

from rules.credential_kinds import KINDS, wrong_params
from rules.document import VERSION, digest
from rules.matching import InvalidTemplate, check_binding, parse_host_template, parse_path
from rules.names import CredentialRef, Host, InvalidName, RuleId, Scheme
from rules.operations import prepare
from rules.placeholders import InvalidShape, check_shape
from rules.policy import (
    ANSWERS,
    BodySpec,
    CredentialDef,
    DestinationDef,
    Dns,
    Effect,
    HeadSpec,
    HostPattern,
    HostRules,
    Operation,
    PathPattern,
    PlaceholderSpec,
    Policy,
    RedirectSpec,
    Role,
    Rule,
    Slot,
    Sni,
    Where,
)


class DocumentFault(ValueError):
    """The document is not one that rules/parse.py makes. str() names the field, never a value."""


def compile_policy(document: Mapping[str, Any]) -> Policy:
    """Return the policy of `document`. Raises DocumentFault. The same document gives equal policies."""
    try:
        return _policy(document)
    except DocumentFault:
        raise
    except (InvalidName, InvalidTemplate, InvalidShape, KeyError, TypeError, ValueError) as error:
        raise DocumentFault(f"the policy document is damaged ({type(error).__name__})") from None


def compile_host(text: str) -> HostPattern:
    """Return the pattern of `x`, `*.x`, `**.x` or a host template (HostPattern.text). Raises DocumentFault."""
    if "{" in text:
        return parse_host_template(text)
    kind, suffix = ("many", text[3:]) if text.startswith("**.") else ("one", text[2:])
    if not text.startswith(("*.", "**.")):
        return HostPattern(kind="exact", suffix=_host(text).text)
    # A wildcard's suffix may be one label, which Host.parse refuses: parse it as the parent of a name.
    if Host.parse("x." + suffix).text != "x." + suffix:
        raise DocumentFault("a host pattern is not canonical")
    return HostPattern(kind=cast("Any", kind), suffix=suffix)


def _policy(document: Mapping[str, Any]) -> Policy:
    whole = _fields(document, "document", "version basis operations credentials destinations roles")
    if whole["version"] != VERSION:
        raise DocumentFault("the document has another version")
    operations = {
        _text(name, "operation"): _operation(name, value) for name, value in _pairs(whole["operations"], "operations")
    }
    credentials = {
        CredentialRef(name): _credential(name, value) for name, value in _pairs(whole["credentials"], "credentials")
    }
    destinations = {name: _destination(name, value) for name, value in _pairs(whole["destinations"], "destinations")}
    roles = {_text(name, "role"): _role(name, value, operations) for name, value in _pairs(whole["roles"], "roles")}
    for role in roles.values():
        for rule in role.rules:
            if rule.credential is not None and rule.credential not in credentials:
                raise DocumentFault("a rule names a credential that the document does not hold")
    return Policy(
        digest=digest(document),
        document=document,
        roles=roles,
        destinations=destinations,
        credentials=credentials,
    )


def _role(name: str, value: Any, operations: Mapping[str, Operation]) -> Role:
    whole = _fields(value, "role", "message boundary dns rules")
    rules = tuple(
        sorted((_rule(item, operations) for item in _items(whole["rules"], "rules")), key=lambda rule: rule.id)
    )
    if len({rule.id for rule in rules}) != len(rules):
        raise DocumentFault("two rules of a role share an id")
    exact: dict[str, list[Rule]] = {}
    wild: list[Rule] = []
    for rule in rules:
        patterns = [*rule.hosts, *(pattern for op in rule.operations for pattern in op.hosts)]
        if any(pattern.kind != "exact" for pattern in patterns):
            wild.append(rule)
            continue
        for suffix in {pattern.suffix for pattern in patterns}:
            exact.setdefault(suffix, []).append(rule)
    return Role(
        name=name,
        rules=rules,
        message=_text(whole["message"], "message"),
        boundary_external=_optional_text(whole["boundary"], "boundary"),
        dns=cast("Dns", _one_of(whole["dns"], get_args(Dns), "dns")),
        exact={host: tuple(found) for host, found in exact.items()},
        wild=tuple(wild),
        index={host: HostRules.of(found, host) for host, found in exact.items()},
        index_wild=HostRules.of(wild),
    )


_RULE = (
    "id action operations hosts port bind credential tunnel tunnel_reason max_bytes max_seconds protocol client_auth "
    "result_keep requests response_bytes request_bytes approval shared headers message quiet"
)


def _rule(value: Any, operations: Mapping[str, Operation]) -> Rule:
    whole = _fields(value, "rule", _RULE)
    bind = {_text(name, "bind"): _texts(patterns, "bind") for name, patterns in _pairs(whole["bind"], "bind")}
    for patterns in bind.values():
        if not patterns:
            raise DocumentFault("a binding is empty")
        for pattern in patterns:
            check_binding(pattern)
    requests = whole["requests"]
    if requests is not None:
        count, seconds = (_natural(number, "requests") for number in _items(requests, "requests"))
        requests = (count, seconds)
    tunnel = _flag(whole["tunnel"], "tunnel")
    ops = tuple(operations[_text(name, "operation")] for name in _items(whole["operations"], "operations"))
    hosts = tuple(compile_host(_text(text, "host")) for text in _items(whole["hosts"], "hosts"))
    action = _one_of(whole["action"], ("deny", "allow"), "action")
    if (not ops and not hosts) or (action == "allow" and not ops and not tunnel):
        raise DocumentFault("a rule covers nothing, or everything")
    if tunnel and (ops or action == "deny" or any(pattern.kind != "exact" for pattern in hosts)):
        raise DocumentFault("a tunnel rule is one exact host and nothing else")
    credential = _optional_text(whole["credential"], "credential")
    if action == "allow" and any(name not in bind for op in ops for name in op.must_bind):
        raise DocumentFault("a rule does not bind what an operation of it must have bound")
    shared = _flag(whole["shared"], "shared")
    if action == "allow" and credential is not None and not shared:
        for op in ops:
            if op.shared_state is not None and not any(name in bind for name in op.shared_state):
                raise DocumentFault("a rule neither binds what tells sandboxes apart nor says that they share it")
    return Rule(
        id=RuleId(_text(whole["id"], "id")),
        action=cast("Any", action),
        operations=ops,
        hosts=hosts,
        port=_optional_natural(whole["port"], "port"),
        bind=bind,
        credential=None if credential is None else CredentialRef(credential),
        tunnel=tunnel,
        tunnel_reason=_text(whole["tunnel_reason"], "tunnel_reason"),
        max_bytes=_optional_natural(whole["max_bytes"], "max_bytes"),
        max_seconds=_optional_natural(whole["max_seconds"], "max_seconds"),
        protocol=cast("Any", _one_of(whole["protocol"], ("http1", "h2"), "protocol")),
        client_auth=_flag(whole["client_auth"], "client_auth"),
        result_keep=None if whole["result_keep"] is None else _texts(whole["result_keep"], "result_keep"),
        requests=requests,
        response_bytes=_optional_natural(whole["response_bytes"], "response_bytes"),
        request_bytes=_optional_natural(whole["request_bytes"], "request_bytes"),
        approval=_optional_text(whole["approval"], "approval"),
        shared=shared,
        headers=None if whole["headers"] is None else _texts(whole["headers"], "headers"),
        message=_text(whole["message"], "message"),
        quiet=_flag(whole["quiet"], "quiet"),
    )


_OPERATION = (
    "effect hosts port scheme methods paths query query_required request_headers head body arguments must_bind unbound "
    "fold auth_headers auth_query extra_request_headers native placeholders_inert redirects download websocket "
    "request_bytes answer captures takes extra_response_headers shared_state"
)


def _operation(name: str, value: Any) -> Operation:
    whole = _fields(value, "operation", _OPERATION)
    query = whole["query"]
    if query is not None:
        query = {
            _text(key, "query"): None if item is None else _texts(item, "query") for key, item in _pairs(query, "query")
        }
    hosts = tuple(compile_host(_text(text, "host")) for text in _items(whole["hosts"], "hosts"))
    methods, paths = _texts(whole["methods"], "methods"), tuple(_path(item) for item in _items(whole["paths"], "paths"))
    if not (hosts and methods and paths):
        raise DocumentFault("an operation without host, method or path would mean everything")
    return Operation(
        id=name,
        effect=cast("Effect", _one_of(whole["effect"], get_args(Effect), "effect")),
        hosts=hosts,
        port=_natural(whole["port"], "port"),
        scheme=_scheme(whole["scheme"]),
        methods=methods,
        paths=paths,
        query=query,
        query_required=_texts(whole["query_required"], "query_required"),
        request_headers={
            _text(key, "request_headers"): _texts(item, "request_headers")
            for key, item in _pairs(whole["request_headers"], "request_headers")
        },
        head=None if whole["head"] is None else _head(whole["head"]),
        body=None if whole["body"] is None else _body(whole["body"]),
        arguments={
            _text(key, "arguments"): _text(item, "arguments") for key, item in _pairs(whole["arguments"], "arguments")
        },
        must_bind=_texts(whole["must_bind"], "must_bind"),
        unbound=_texts(whole["unbound"], "unbound"),
        fold=_texts(whole["fold"], "fold"),
        auth_headers=_texts(whole["auth_headers"], "auth_headers"),
        auth_query=_texts(whole["auth_query"], "auth_query"),
        extra_request_headers=_texts(whole["extra_request_headers"], "extra_request_headers"),
        native=_text(whole["native"], "native"),
        placeholders_inert=_flag(whole["placeholders_inert"], "placeholders_inert"),
        redirects=tuple(_redirect(item) for item in _items(whole["redirects"], "redirects")),
        download=_flag(whole["download"], "download"),
        websocket=_flag(whole["websocket"], "websocket"),
        answer=_one_of(whole["answer"], ("", *ANSWERS), "answer"),
        captures=_texts(whole["captures"], "captures"),
        takes=_text(whole["takes"], "takes"),
        extra_response_headers=_texts(whole["extra_response_headers"], "extra_response_headers"),
        request_bytes=_optional_natural(whole["request_bytes"], "request_bytes"),
        shared_state=None if whole["shared_state"] is None else _texts(whole["shared_state"], "shared_state"),
    )


def _redirect(value: Any, *, first: bool = True) -> RedirectSpec:
    whole = _fields(value, "redirect", "to path query_keys then")
    to = tuple(compile_host(_text(text, "to")) for text in _items(whole["to"], "to"))
    if not to or any(pattern.kind == "template" or Host.of(pattern.suffix).is_literal for pattern in to):
        raise DocumentFault("a redirect leads nowhere, or to an address")
    if whole["then"] and not first:
        raise DocumentFault("a redirect leads on twice")
    return RedirectSpec(
        to=to,
        path=None if whole["path"] is None else _path(whole["path"]),
        query_keys=_texts(whole["query_keys"], "query_keys"),
        then=tuple(_redirect(item, first=False) for item in _items(whole["then"], "then")),
    )


def _path(value: Any) -> PathPattern:
    whole = _fields(value, "path", "template encoded_slash")
    return parse_path(_text(whole["template"], "template"), encoded_slash=_flag(whole["encoded_slash"], "slash"))


def _head(value: Any) -> HeadSpec:
    whole = _fields(value, "head", "matcher params prefix")
    if not isinstance(whole["params"], dict):
        raise DocumentFault("params is not an object")
    return HeadSpec(
        matcher=_text(whole["matcher"], "matcher"), params=whole["params"], prefix=_text(whole["prefix"], "prefix")
    )


def _body(value: Any) -> BodySpec:
    whole = _fields(value, "body", "matcher bound params prefix")
    if not isinstance(whole["params"], dict):
        raise DocumentFault("params is not an object")
    prepare(whole["matcher"])
    return BodySpec(
        matcher=_text(whole["matcher"], "matcher"),
        bound=_natural(whole["bound"], "bound"),
        params=whole["params"],
        prefix=_flag(whole["prefix"], "prefix"),
    )


def _credential(name: str, value: Any) -> CredentialDef:
    whole = _fields(value, "credential", "kind slots authorities owner placeholders scrub username params")
    kind = _one_of(whole["kind"], tuple(KINDS), "kind")
    slots = [_slot(item) for item in _items(whole["slots"], "slots")]
    placeholders = [_placeholder(item) for item in _items(whole["placeholders"], "placeholders")]
    if not slots or len({part for part, _ in placeholders}) != len(placeholders):
        raise DocumentFault("a credential without a slot, or with two placeholders for one part")
    lead = next((spec for part, spec in placeholders if part == slots[0].part), PlaceholderSpec(env="", shape=""))
    if KINDS[kind].needs_placeholder and not lead.shape:
        raise DocumentFault("a credential without a placeholder")
    authorities = tuple(
        (_host(_text(host, "host")), _natural(port, "port"))
        for host, port in _items(whole["authorities"], "authorities")
    )
    if not authorities:
        raise DocumentFault("a credential is bound to no host")
    if not isinstance(whole["params"], dict):
        raise DocumentFault("params is not an object")
    if (wrong := wrong_params(kind, whole["params"])) is not None:
        raise DocumentFault(wrong)
    return CredentialDef(
        name=CredentialRef(_text(name, "credential")),
        kind=kind,
        slot=slots[0],
        hosts=tuple(dict.fromkeys(host for host, _ in authorities)),
        owner=_text(whole["owner"], "owner"),
        placeholder=lead,
        scrub=_flag(whole["scrub"], "scrub"),
        username=_optional_text(whole["username"], "username"),
        authorities=tuple((host.text, port) for host, port in authorities),
        params=whole["params"],
        more_slots=tuple(slots[1:]),
        more_placeholders=tuple(pair for pair in placeholders if pair[0] != slots[0].part),
    )


def _slot(value: Any) -> Slot:
    slot = _fields(value, "slot", "where name template part")
    return Slot(
        where=cast("Where", _one_of(slot["where"], get_args(Where), "where")),
        name=_text(slot["name"], "name"),
        template=_text(slot["template"], "template"),
        part=_text(slot["part"], "part"),
    )


def _placeholder(value: Any) -> tuple[str, PlaceholderSpec]:
    found = _fields(value, "placeholder", "part env shape")
    check_shape(_text(found["shape"], "shape"))
    return _text(found["part"], "part"), PlaceholderSpec(env=_text(found["env"], "env"), shape=found["shape"])


def _destination(name: str, value: Any) -> DestinationDef:
    whole = _fields(value, "destination", "port scheme addresses static ca_pem sni")
    networks = tuple(ip_network(_text(text, "addresses")) for text in _items(whole["addresses"], "addresses"))
    static = _texts(whole["static"], "static")
    for text in static:
        address = ip_address(text)
        if not any(address in network for network in networks):
            raise DocumentFault("a static address lies outside the destination's addresses")
    return DestinationDef(
        host=_host(name),
        port=_optional_natural(whole["port"], "port"),
        scheme=_scheme(whole["scheme"]),
        addresses=networks,
        static=static,
        ca_pem=_optional_text(whole["ca_pem"], "ca_pem"),
        sni=cast("Sni", _one_of(whole["sni"], get_args(Sni), "sni")),
    )


# --- typed field readers: each raises DocumentFault naming the field ---


def _fields(value: Any, what: str, names: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or value.keys() != set(names.split()):
        raise DocumentFault(f"{what} does not have exactly its fields")
    return value


def _pairs(value: Any, what: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise DocumentFault(f"{what} is not an object")
    return list(value.items())


def _items(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise DocumentFault(f"{what} is not a list")
    return list(value)


def _host(text: str) -> Host:
    host = Host.of(text)
    if host.text != text:
        raise DocumentFault("a host is not canonical")
    return host


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise DocumentFault(f"{what} is not text")
    return value


def _optional_text(value: Any, what: str) -> str | None:
    return None if value is None else _text(value, what)


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise DocumentFault(f"{what} is not a list")
    return tuple(_text(item, what) for item in value)


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise DocumentFault(f"{what} is not a natural number")
    return value


def _optional_natural(value: Any, what: str) -> int | None:
    return None if value is None else _natural(value, what)


def _flag(value: Any, what: str) -> bool:
    if type(value) is not bool:
        raise DocumentFault(f"{what} is not true or false")
    return value


def _one_of(value: Any, allowed: tuple[str, ...], what: str) -> str:
    if value not in allowed:
        raise DocumentFault(f"{what} is not one of its values")
    return cast("str", value)


def _scheme(value: Any) -> Scheme:
    return cast("Scheme", _one_of(value, ("https", "http"), "scheme"))
