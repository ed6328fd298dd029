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
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rules import grammar
from rules.catalogue import CredentialSlot, ServiceDef
from rules.credential_kinds import KINDS, MAX_PARTS, PART, VALUE
from rules.credential_slots import OPEN_KEYS, BadForm, Form, read_form
from rules.exchanges import clear_text, is_exchange, read_exchange, written_back, wrong_parts
from rules.names import CredentialRef, Host
from rules.placeholders import InvalidShape, check_shape
from rules.policy import CredentialDef, DestinationDef, PlaceholderSpec
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
    form: Form
    hosts: tuple[tuple[Host, int | None], ...]
    from_catalogue: bool
    """The hosts are the catalogue's: they are narrowed to what rules cover, where written ones must be covered."""
    owner: str
    placeholders: tuple[tuple[str, PlaceholderSpec], ...]
    """(part, placeholder)."""
    secret: SecretBinding
    username: str | None

    def definition(self, default_ports: Mapping[str, int]) -> CredentialDef:
        """The credential with its ports settled: as written, else the destination's, else 443."""
        lead = self.form.slots[0]
        authorities = tuple((host.text, port or default_ports.get(host.text, 443)) for host, port in self.hosts)
        return CredentialDef(
            name=self.name,
            kind=self.kind,
            slot=lead,
            hosts=tuple(dict.fromkeys(host for host, _ in self.hosts)),
            owner=self.owner,
            placeholder=dict(self.placeholders).get(lead.part, PlaceholderSpec(env="", shape="")),
            scrub=self.secret.scrub,
            username=self.username,
            authorities=authorities,
            params=self.form.params,
            more_slots=self.form.slots[1:],
            more_placeholders=tuple(pair for pair in self.placeholders if pair[0] != lead.part),
        )


def read_credentials(
    top: Node,
    services: Mapping[str, ServiceDef],
    sources: Mapping[str, str] = MappingProxyType({}),
    destinations: Mapping[str, DestinationDef] = MappingProxyType({}),
) -> dict[str, WrittenCredential]:
    """Return the entries under `credentials:`. `services` is the built-in catalogue. Problems are noted.

    `sources`: name -> kind of what stands under `sources:`. `destinations`: those of the same file.
    """
    found: dict[str, WrittenCredential] = {}
    for text, node in top.entries():
        with node.problems.collecting():
            found[text] = entry = _credential(grammar.checked_name(node, text), node, services, sources)
            if (wrong := clear_text(entry.kind, entry.form.params, destinations)) is not None:
                node.fail(wrong)
    return found


_GENERAL = "kind service hosts placeholder scrub username"
_OF_KINDS = sorted({key for row in KINDS.values() for key in row.keys} - {"username"})


def _credential(
    name: str, node: Node, services: Mapping[str, ServiceDef], sources: Mapping[str, str]
) -> WrittenCredential:
    fields = node.fields("secret owner", f"{_GENERAL} {' '.join(_OF_KINDS)}")
    owner = fields["owner"].text()
    own = {key: fields[key].value for key in _OF_KINDS if key in fields}
    offered: CredentialSlot | None = None
    if "service" in fields:
        if "kind" in fields:
            fields["kind"].fail("service: already says the kind", on_key=True)
        offered = services[fields["service"].word(services)].credential
        if offered is None:
            fields["service"].fail("this service has no place for a credential")
        for key in own:
            if key in offered.written or key not in OPEN_KEYS.get(offered.kind, {}):
                fields[key].fail("service: already says the slot", on_key=True)
        kind, own = offered.kind, {**offered.written, **own}
    else:
        if "kind" not in fields:
            node.fail("missing key kind (or service)")
        kind = fields["kind"].word(KINDS)
    form = _form(kind, own, fields, node)
    hosts: tuple[tuple[Host, int | None], ...] = ()
    if "hosts" in fields:
        hosts = _hosts(fields["hosts"])
    elif offered is None:
        node.fail("missing key hosts: a secret goes only to named hosts")
    else:
        hosts = tuple(zip(offered.hosts, (port for _, port in offered.authorities), strict=True))
        if not hosts:
            node.fail("missing key hosts: this service has a host for each customer; list the ones that are yours")
    placeholders = () if offered is None else offered.placeholders
    if "placeholder" in fields:
        placeholders = _placeholders(kind, form, fields["placeholder"])
    elif offered is None and KINDS[kind].needs_placeholder:
        node.fail('missing key placeholder: {env: NAME, shape: "prefix{24}"}')
    username = None if offered is None else offered.username
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
        form=form,
        hosts=hosts,
        from_catalogue="hosts" not in fields,
        owner=owner,
        placeholders=placeholders,
        secret=_secret(kind, form, fields["secret"], fields.get("scrub"), sources),
        username=username,
    )


def _form(kind: str, own: Mapping[str, Any], fields: Mapping[str, Node], node: Node) -> Form:
    try:
        return read_exchange(kind, own) if is_exchange(kind) else read_form(kind, own)
    except BadForm as error:
        if error.key not in fields:
            node.fail(f"kind: {kind}: {error}")
        fields[error.key].fail(str(error), on_key=error.key not in KINDS[kind].keys)


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


def _placeholders(kind: str, form: Form, node: Node) -> tuple[tuple[str, PlaceholderSpec], ...]:
    """One, which stands for the part of the first slot, or a mapping of parts."""
    lead = form.slots[0].part
    if isinstance(node.value, dict) and not {"env", "shape"} & node.value.keys():
        row = KINDS[kind]
        known = {slot.part for slot in form.slots} | set(() if row.open else row.parts)
        found = []
        for part, entry in node.entries():
            if part not in known:
                entry.fail(f"{shown(part)} is no part of this credential; its parts: {', '.join(sorted(known))}")
            found.append((part, _placeholder(entry)))
        if row.needs_placeholder and lead not in {part for part, _ in found}:
            node.fail(f"the part {lead} needs a placeholder: it is what clients send")
        if len({spec.env for _, spec in found}) != len(found):
            node.fail("two placeholders would stand in one variable")
        return tuple(found)
    return ((lead, _placeholder(node)),)


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


def _secret(kind: str, form: Form, node: Node, scrub: Node | None, sources: Mapping[str, str]) -> SecretBinding:
    """One reference, which is the part `value`, or a mapping of parts; which of them a kind has, its row says."""
    several = isinstance(node.value, dict) and FROM not in node.value
    parts = dict(node.entries()) if several else {VALUE: node}
    if len(parts) > MAX_PARTS or any(not PART.match(part) for part in parts):
        node.fail(f"a secret has at most {MAX_PARTS} parts, each named in lower-case letters, digits and underscore")
    named = tuple(dict.fromkeys(slot.part for slot in form.slots))
    wrong = KINDS[kind].wrong_parts(parts, named) or wrong_parts(kind, form.params, frozenset(parts))
    if wrong is not None:
        node.fail(wrong)
    references = {part: read_reference(found, sources) for part, found in sorted(parts.items())}
    back = written_back(kind, form.params)
    if back is not None and not references[back].startswith("store:"):
        parts[back].fail(f"the {back} is replaced when it is used, so it lies in the store: store:NAME")
    return SecretBinding(references=references, scrub=True if scrub is None else scrub.flag())
