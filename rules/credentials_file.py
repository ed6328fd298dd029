"""credentials.yaml: the operator's file. What a secret is, and the only places it may ever go (RULINGS 3.6).

    version: 1
    credentials:
      shop-orders: {kind: header, header: X-Api-Key, secret: "store:shop/orders", hosts: [orders.shop.example],
                    owner: team-orders, placeholder: {env: SHOP_API_KEY, shape: "sk_live_{24}"}}
      github-reader: {service: github, secret: "store:github/${sandbox.owner}", owner: platform-team}
    sources: {...}               # rules/secret_sources.py: where references other than env:, file:, store: lead
    destinations: {...}          # as in policy.yaml; what stands here cannot be changed there

`service:` takes kind, slot, hosts and placeholder from the built-in catalogue only: a service that a policy
editor defines never says where a secret goes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rules import grammar
from rules.catalogue import ServiceDef
from rules.credential_kinds import KINDS, MAX_PARTS, PART, VALUE
from rules.names import CredentialRef, Host
from rules.placeholders import InvalidShape, check_shape
from rules.policy import CredentialDef, PlaceholderSpec, Slot
from rules.reader import Node, shown
from rules.secret_references import FROM, read_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretBinding:
    """Where the vault finds a secret: part -> reference, which may hold `${sandbox.x}`. Never part of a document."""

    references: Mapping[str, str]
    scrub: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCredential:
    """One entry as written: `ports` is None for a host where the file does not say."""

    name: CredentialRef
    node: Node
    kind: str
    slot: Slot
    hosts: tuple[tuple[Host, int | None], ...]
    from_catalogue: bool
    """The hosts are the catalogue's: they are narrowed to what rules cover, where written ones must be covered."""
    owner: str
    placeholder: PlaceholderSpec
    secret: SecretBinding
    username: str | None
    params: Mapping[str, Any] = field(default_factory=dict)

    def definition(self, default_ports: Mapping[str, int]) -> CredentialDef:
        """The credential with its ports settled: as written, else the destination's, else 443."""
        authorities = tuple((host.text, port or default_ports.get(host.text, 443)) for host, port in self.hosts)
        return CredentialDef(
            name=self.name,
            kind=self.kind,
            slot=self.slot,
            hosts=tuple(dict.fromkeys(host for host, _ in self.hosts)),
            owner=self.owner,
            placeholder=self.placeholder,
            scrub=self.secret.scrub,
            username=self.username,
            authorities=authorities,
            params=self.params,
        )


def read_credentials(
    top: Node, services: Mapping[str, ServiceDef], sources: Mapping[str, str] = MappingProxyType({})
) -> dict[str, WrittenCredential]:
    """Return the entries under `credentials:`. `services` is the built-in catalogue. Problems are noted.

    `sources`: name -> kind of what stands under `sources:`.
    """
    found: dict[str, WrittenCredential] = {}
    for text, node in top.entries():
        with node.problems.collecting():
            found[text] = _credential(grammar.checked_name(node, text), node, services, sources)
    return found


_OPTIONAL = "kind header query service hosts placeholder scrub username template"


def _credential(
    name: str, node: Node, services: Mapping[str, ServiceDef], sources: Mapping[str, str]
) -> WrittenCredential:
    fields = node.fields("secret owner", _OPTIONAL)
    owner = fields["owner"].text()
    kind: str
    service_username: str | None
    if "service" in fields:
        if "kind" in fields:
            fields["kind"].fail("service: already says the kind", on_key=True)
        service = services[fields["service"].word(services)]
        if service.credential is None:
            fields["service"].fail("this service has no place for a credential")
        offered = service.credential
        kind, slot, service_username = offered.kind, offered.slot, offered.username
        placeholder, params = offered.placeholder, offered.params
        hosts: tuple[tuple[Host, int | None], ...] = tuple(
            zip(offered.hosts, (port for _, port in offered.authorities), strict=True)
        )
        for key in ("header", "query", "template"):
            if key in fields:
                fields[key].fail("service: already says the slot", on_key=True)
    else:
        if "kind" not in fields:
            node.fail("missing key kind (or service)")
        kind = fields["kind"].word(KINDS)
        slot = _slot(kind, fields)
        if "hosts" not in fields:
            node.fail("missing key hosts: a secret goes only to named hosts")
        if "placeholder" not in fields:
            node.fail('missing key placeholder: {env: NAME, shape: "prefix{24}"}')
        hosts, placeholder, service_username, params = (), PlaceholderSpec(env="", shape=""), None, {}
    if "hosts" in fields:
        hosts = _hosts(fields["hosts"])
    elif not hosts:
        node.fail("missing key hosts: this service has a host for each customer; list the ones that are yours")
    if "placeholder" in fields:
        placeholder = _placeholder(fields["placeholder"])
    username = service_username
    if "username" in fields:
        if kind != "basic":
            fields["username"].fail("only kind: basic has a user name", on_key=True)
        username = fields["username"].text()
        if ":" in username:
            fields["username"].fail("a Basic user name holds no colon (RFC 7617)")
    return WrittenCredential(
        name=CredentialRef(name),
        node=node,
        kind=kind,
        slot=slot,
        hosts=hosts,
        from_catalogue="hosts" not in fields,
        owner=owner,
        placeholder=placeholder,
        secret=_secret(kind, fields["secret"], fields.get("scrub"), sources),
        username=username,
        params=params,
    )


# Setting one of these would let a credential rewrite the request instead of authenticating it.
_NOT_SLOTS = frozenset(
    {
        "connection",
        "content-length",
        "content-type",
        "content-encoding",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-original-url",
        "x-rewrite-url",
        "x-host",
        "x-real-ip",
    }
)
_NOT_SLOT_PREFIXES = ("proxy-", "exeat-", "x-forwarded-", "x-http-method", "x-method-", "sec-")
_QUERY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


def _slot(kind: str, fields: dict[str, Node]) -> Slot:
    for key in ("header", "query", "template"):
        if key in fields and key != kind and not (key == "template" and kind == "header"):
            fields[key].fail(f"{key}: does not go with kind: {kind}", on_key=True)
    match kind:
        case "bearer":
            return Slot(where="bearer")
        case "basic":
            return Slot(where="basic")
        case "query":
            name = _needed(fields, "query", kind).text()
            if not _QUERY_NAME.match(name):
                fields["query"].fail("a query key is letters, digits, dot, underscore and hyphen")
            return Slot(where="query", name=name)
        case _:
            node = _needed(fields, "header", kind)
            name = grammar.header(node)
            if name in _NOT_SLOTS or name.startswith(_NOT_SLOT_PREFIXES):
                node.fail(f"{name} cannot hold a credential")
            template = fields["template"].text() if "template" in fields else "{value}"
            if template.count("{value}") != 1 or not template.isascii():
                fields["template"].fail("a template is text with {value} once")
            return Slot(where="header", name=name, template=template)


def _needed(fields: dict[str, Node], key: str, kind: str) -> Node:
    if key not in fields:
        next(iter(fields.values())).fail(f"kind: {kind} needs {key}:", on_key=True)
    return fields[key]


def _hosts(node: Node) -> tuple[tuple[Host, int | None], ...]:
    found: list[tuple[Host, int | None]] = []
    for item in node.items(empty="an empty list of hosts would bind the secret to nothing; name the hosts"):
        entry = grammar.authority(item)
        if entry in found:
            item.fail(f"{shown(item.text())} is listed twice")
        found.append(entry)
    return tuple(found)


_ENV = re.compile(r"[A-Z][A-Z0-9_]{0,63}\Z")
# A placeholder put into one of these would break the sandbox or steer its programs.
_NOT_PLACEHOLDER = re.compile(
    r"PATH|HOME|USER|SHELL|PWD|TMPDIR|LANG|TERM|IFS|ENV|BASH_ENV|LD_.*|DYLD_.*|PYTHON.*|NODE_.*|GIT_SSL.*|GIT_CONFIG.*|"
    r".*_PROXY|.*_CA_BUNDLE|SSL_CERT_.*|EXEAT_.*"
)


def _placeholder(node: Node) -> PlaceholderSpec:
    fields = node.fields("env shape")
    env = fields["env"].text()
    if not _ENV.match(env):
        fields["env"].fail("a variable name is upper-case letters, digits and underscore")
    if _NOT_PLACEHOLDER.fullmatch(env):
        fields["env"].fail(f"{env} steers programs; it cannot hold a placeholder")
    shape = fields["shape"].text()
    try:
        check_shape(shape)
    except InvalidShape as error:
        fields["shape"].fail(str(error))
    return PlaceholderSpec(env=env, shape=shape)


def _secret(kind: str, node: Node, scrub: Node | None, sources: Mapping[str, str]) -> SecretBinding:
    """One reference, which is the part `value`, or a mapping of parts; which of them a kind has, its row says."""
    several = isinstance(node.value, dict) and FROM not in node.value
    parts = dict(node.entries()) if several else {VALUE: node}
    if len(parts) > MAX_PARTS or any(not PART.match(part) for part in parts):
        node.fail(f"a secret has at most {MAX_PARTS} parts, each named in lower-case letters, digits and underscore")
    if (wrong := KINDS[kind].wrong_parts(parts)) is not None:
        node.fail(wrong)
    references = {part: read_reference(found, sources) for part, found in sorted(parts.items())}
    return SecretBinding(references=references, scrub=True if scrub is None else scrub.flag())
