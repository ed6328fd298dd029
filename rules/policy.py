"""`Policy`: what was written, compiled. Frozen; named by one digest; made only from a resolved document.

A *document* is the plain JSON value that rules/parse.py makes from the operator's and the policy editor's
files (services resolved, defaults filled in, no secret references). The vault parses YAML once; workers and
executors receive the document and call `compile_policy` (rules/compile.py), so all decide from the same value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Literal

from rules.names import CredentialRef, Destination, Host, RuleId, Scheme

Effect = Literal["read", "write", "mint", "execute", "disclose"]
ANSWERS = ("capture", "lfs_batch", "mcp_tools")
"""`capture`: behind a credential, with placeholders for the tokens that it brings (rules/captured.py).
`lfs_batch`: behind a credential, without the signed URLs and tokens that a forge adds (broker/lfs.py).
`mcp_tools`: of the tools that a server lists only those that the rules grant (rules/answers.py)."""
INDEXED = 8
"""Segments of a path by which rules are found. What they share beyond that is compared one by one."""
Sni = Literal["required", "optional"]
Dns = Literal["synthetic", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPattern:
    """`exact`, `*.x` (one label, apex excluded), `**.x` (one or more labels), or the `template` of a service file.

    `suffix` is without the dots; that of a template is the template: `{bucket}.s3.{region}.amazonaws.com`, where each
    `{name}` is exactly one label.
    """

    kind: Literal["exact", "one", "many", "template"]
    suffix: str

    def matches(self, host: Host) -> bool:
        if self.kind == "exact":
            return host.text == self.suffix
        if self.kind == "template":
            return self.captures(host) is not None
        if host.is_literal or not host.text.endswith("." + self.suffix):
            return False
        return self.kind == "many" or "." not in host.text[: -len(self.suffix) - 1]

    def captures(self, host: Host) -> dict[str, str] | None:
        """The labels that a template takes from `host`, by name; None where it does not fit. {} for other kinds."""
        if self.kind != "template":
            return {} if self.matches(host) else None
        wanted, given = self.suffix.split("."), host.text.split(".")
        if host.is_literal or len(wanted) != len(given):
            return None
        found: dict[str, str] = {}
        for label, text in zip(wanted, given, strict=True):
            if label.startswith("{"):
                found[label[1:-1]] = text
            elif label != text:
                return None
        return found

    @property
    def text(self) -> str:
        """As it is written: `x`, `*.x`, `**.x` or the template; IPv6 literals without brackets."""
        return {"exact": "", "one": "*.", "many": "**.", "template": ""}[self.kind] + self.suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPattern:
    """An anchored template: literal segments, `{name}` (one segment) and a trailing `**` (the rest, at least one)."""

    template: str
    segments: tuple[str | None, ...]
    """None stands for a capture; literal segments are decoded text."""
    names: tuple[str, ...]
    rest: bool
    encoded_slash: bool = False
    shapes: tuple[str, ...] = ()
    """One per name, a key of rules.shapes.SHAPES (`segment`: any). Made by rules.matching.parse_path."""


Where = Literal[
    "bearer", "basic", "header", "query", "cookie", "path", "body", "sigv4", "subprotocol", "signature", "none"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a placeholder of a credential stands, and what of it goes there.

    `name`: the header, query key or cookie; of `body` the field (`form:client_secret`, `json:auth.token`); of
    `subprotocol` the beginning of the WebSocket subprotocol that carries it. `template` renders `{value}`; of `path`
    it is a path of literal segments, `*` and a last `**`, with `{value}` in one of them. In a `signature` the client
    proves with its placeholder what we prove with the secret: whatever stands there is dropped and made anew.
    """

    where: Where
    name: str = "authorization"
    template: str = "{value}"
    part: str = "value"
    """Whose placeholder it is: a part of the credential (rules/credential_kinds.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderSpec:
    """The variable that holds the placeholder in the sandbox and its shape (`sk_live_{24}`: 24 random characters).

    Both empty: there is none, because clients send nothing for the credential.
    """

    env: str
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialDef:
    """What everyone may know of a credential: never its value or source. Hosts bound every use (RULINGS 3.6)."""

    name: CredentialRef
    kind: str
    """A key of rules.credential_kinds.KINDS."""
    slot: Slot
    hosts: tuple[Host, ...]
    owner: str
    placeholder: PlaceholderSpec
    scrub: bool = True
    username: str | None = None
    """For `basic`: the fixed user name, or None to keep the one that the client sent."""
    authorities: tuple[tuple[str, int], ...] | None = None
    """(host text, port) of every place it may go; None means port 443 of each of `hosts`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """What the kind is told beyond its slot: a closed schema for each kind (rules/credential_kinds.py)."""
    more_slots: tuple[Slot, ...] = ()
    """Slots of the other parts, and other places for the same one."""
    more_placeholders: tuple[tuple[str, PlaceholderSpec], ...] = ()
    """(part, placeholder) beyond `placeholder`, which is that of the part in `slot`."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.slot, *self.more_slots)

    @property
    def placeholders(self) -> tuple[tuple[str, PlaceholderSpec], ...]:
        """(part, placeholder) of every part that the sandbox holds a stand-in for."""
        lead = ((self.slot.part, self.placeholder),) if self.placeholder.shape else ()
        return (*lead, *self.more_placeholders)

    def placeholder_of(self, part: str | None = None) -> PlaceholderSpec | None:
        """The placeholder of a part; of the leading one unless told otherwise."""
        return dict(self.placeholders).get(part or self.slot.part)

    def placeholder_name(self, part: str) -> str:
        """Under which the hash of a part's placeholder is kept: the credential's name, or NAME#part."""
        return str(self.name) if part == self.slot.part else f"{self.name}#{part}"

    def binds(self, destination: Destination) -> bool:
        """True if this credential may ever go to `destination`: verified TLS, bound host, bound port (I10)."""
        if destination.scheme != "https" or destination.host not in self.hosts:
            return False
        if self.authorities is None:
            return destination.port == 443
        return (destination.host.text, destination.port) in self.authorities


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationDef:
    """What belongs to a host and not to a rule. `addresses` is the only exception to the address table."""

    host: Host
    port: int | None = None
    scheme: Scheme = "https"
    addresses: tuple[IPv4Network | IPv6Network, ...] = ()
    static: tuple[str, ...] = ()
    """`resolve:` fixed addresses used instead of DNS; each must lie in `addresses`."""
    ca_pem: str | None = None
    sni: Sni = "required"
    """Whether a client's TLS handshake must name this host; an address has no such name (RFC 6066 section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodySpec:
    """How an operation is recognised in a body. `matcher` names an evaluator in rules/operations/__init__.py.

    `params` is that evaluator's own closed parameter value. `bound` is in bytes. With `prefix` only the first `bound`
    bytes are judged, and whatever follows them streams behind: what the operation is stands at the beginning.
    """

    matcher: str
    bound: int
    params: Mapping[str, Any] = field(default_factory=dict)
    prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """How an operation is recognised in a head beyond its paths. `matcher` names one of HEAD_MATCHERS.

    `prefix` is the path of the `base` under which the service lies, "" for none: the matcher does not see it.
    """

    matcher: str
    params: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedirectSpec:
    """Where an answer may send its client: https on port 443 of one of `to`, and nowhere else (RULINGS 7.4).

    Checked in rules/redirects.py when the service file is read.
    """

    to: tuple[HostPattern, ...]
    path: PathPattern | None = None
    """None: any path."""
    query_keys: tuple[str, ...] = ()
    """The only names that the query may hold, as they are written. (): no query."""
    then: tuple[RedirectSpec, ...] = ()
    """Where that address may lead in its turn; these have no `then` of their own."""

    @property
    def text(self) -> str:
        """`https://a.example/bucket/**`, one for each host, with a comma between them."""
        path = "/**" if self.path is None else self.path.template
        return ", ".join(f"https://{pattern.text}{path}" for pattern in self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing a client can do at a service, and how it is recognised. Unknown means write."""

    id: str
    """`service/operation` (`github/git.fetch`, its second way of being stated `github/git.fetch#2`); hand-written ones
    are `role/rule-name`. Unique."""
    effect: Effect
    hosts: tuple[HostPattern, ...]
    port: int
    scheme: Scheme
    methods: tuple[str, ...]
    """Upper case. GET includes HEAD."""
    paths: tuple[PathPattern, ...]
    query: Mapping[str, tuple[str, ...] | None] | None = field(default_factory=dict)
    """None: `query: any`. Otherwise allowed names; a tuple lists allowed values, None allows any value."""
    query_required: tuple[str, ...] = ()
    request_headers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Headers that must be present once with one of these values (media types are compared without parameters).

    The value "" means that the header may be absent.
    """
    head: HeadSpec | None = None
    body: BodySpec | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    """argument -> how it is made from captures: `{owner}/{repo}`; values are decoded text."""
    must_bind: tuple[str, ...] = ()
    """Arguments that every allow rule must bind: the host or account is everybody's (a policy error otherwise)."""
    unbound: tuple[str, ...] = ()
    """Arguments that this way of stating it leaves to the requests that follow (the discovery of a push)."""
    fold: tuple[str, ...] = ()
    """Arguments that ignore ASCII case when a rule binds them (repository names at GitHub)."""
    auth_headers: tuple[str, ...] = ()
    """Lower-case headers that carry authority at this service, beyond those of the catalogue (rules/authority.py)."""
    auth_query: tuple[str, ...] = ()
    """The same for names in a query, in lower case."""
    extra_request_headers: tuple[str, ...] = ()
    """Names beyond the base allowlist that may pass on a credentialed call."""
    native: str = "problem"
    """The refusal shape, one of rules.service.NATIVES."""
    placeholders_inert: bool = False
    redirects: tuple[RedirectSpec, ...] = ()
    download: bool = False
    websocket: bool = False
    request_bytes: int | None = None
    """Upload bound that the catalogue states; None: the default for the effect."""
    answer: str = ""
    """What is done to its answer before a sandbox sees it, one of ANSWERS; "" for nothing."""
    captures: tuple[str, ...] = ()
    """With `answer: capture`: the fields of its JSON answer that are authority (rules/captured.py)."""
    takes: str = ""
    """Its authority is a token that was captured under the same rule: `bearer`, or the header it stands in."""
    extra_response_headers: tuple[str, ...] = ()
    """Names beyond the base allowlist that may come back with an answer that is shaped."""
    shared_state: tuple[str, ...] | None = None
    """Not None: it reaches what other sandboxes left under the same account (RULINGS 7.6). A rule with a credential
    binds one of these arguments, which tell sandboxes apart, or says `shared: true`. (): nothing tells them apart."""

    @property
    def redirects_declared(self) -> bool:
        return bool(self.redirects)

    @property
    def name(self) -> str:
        """The id without its `#2`: what rules, records and people call it, whichever way it is stated."""
        return self.id.partition("#")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of a role's allow or deny list, with its operations resolved."""

    id: RuleId
    action: Literal["deny", "allow"]
    operations: tuple[Operation, ...]
    """For a deny of whole hosts: empty, with `hosts` set."""
    hosts: tuple[HostPattern, ...] = ()
    port: int | None = None
    bind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """`with:` argument -> allowed patterns; may hold `${sandbox.x}`."""
    credential: CredentialRef | None = None
    tunnel: bool = False
    tunnel_reason: str = ""
    max_bytes: int | None = None
    max_seconds: float | None = None
    protocol: Literal["http1", "h2"] = "http1"
    client_auth: bool = False
    result_keep: tuple[str, ...] | None = None
    requests: tuple[int, int] | None = None
    """(count, seconds)."""
    response_bytes: int | None = None
    request_bytes: int | None = None
    approval: str | None = None
    shared: bool = False
    """`shared: true`: what other sandboxes left under the same account may be reached."""
    headers: tuple[str, ...] | None = None
    """`headers:` lower-case names that may pass besides the base set; None where the rule does not say."""
    message: str = ""
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRules:
    """Some rules, each list sorted by id, and where to look for what a request may meet: a decision asks no others."""

    denying: tuple[Rule, ...] = ()
    tunnels: tuple[Rule, ...] = ()
    allowing: tuple[Rule, ...] = ()
    """Allow rules that are no tunnels."""
    under: Mapping[tuple[str, ...], tuple[Rule, ...]] = field(default_factory=dict)
    """The literal segments with which a path pattern begins, at most INDEXED -> those of `allowing` that have one."""
    inspected: Mapping[int, tuple[frozenset[str], bool]] | None = None
    """Port -> protocols of the rules there, and whether one is in clear text. None: look at every rule."""

    @classmethod
    def of(cls, rules: Iterable[Rule], host: str | None = None) -> HostRules:
        """Index `rules`. `host`: they hold exact hosts alone, and are asked about this one."""
        ordered = sorted(rules, key=lambda rule: rule.id)
        allowing = tuple(rule for rule in ordered if rule.action == "allow" and not rule.tunnel)
        under: dict[tuple[str, ...], list[Rule]] = {}
        inspected: dict[int, tuple[frozenset[str], bool]] = {}
        for rule in allowing:
            for begin in {_leading(pattern) for op in rule.operations for pattern in op.paths}:
                under.setdefault(begin, []).append(rule)
            for op in rule.operations:
                if any(pattern.suffix == host for pattern in op.hosts):
                    protocols, clear = inspected.get(op.port, (frozenset(), False))
                    inspected[op.port] = (protocols | {rule.protocol}, clear or op.scheme == "http")
        return cls(
            denying=tuple(rule for rule in ordered if rule.action == "deny"),
            tunnels=tuple(rule for rule in ordered if rule.action == "allow" and rule.tunnel),
            allowing=allowing,
            under={begin: tuple(found) for begin, found in under.items()},
            inspected=None if host is None else inspected,
        )

    def near(self, segments: tuple[str, ...]) -> tuple[Rule, ...]:
        """Those of `allowing` of which some pattern's literal beginning is that of a path with these segments."""
        lengths = range(min(len(segments), INDEXED) + 1)
        found = [rule for length in lengths for rule in self.under.get(segments[:length], ())]
        return tuple({rule.id: rule for rule in found}.values())


def _leading(pattern: PathPattern) -> tuple[str, ...]:
    literal = itertools.takewhile(lambda segment: segment is not None, pattern.segments[:INDEXED])
    return tuple(str(segment) for segment in literal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    name: str
    rules: tuple[Rule, ...]
    """`everyone` deny rules included."""
    message: str = ""
    boundary_external: str | None = None
    dns: Dns = "synthetic"
    """`strict`: names that no rule of this role could permit do not exist in its sandboxes."""
    exact: Mapping[str, tuple[Rule, ...]] | None = None
    """Host index made by rules.compile: exact host text -> its rules. None (hand-made roles): look at every rule."""
    wild: tuple[Rule, ...] = ()
    """With `exact`: the rules that hold a wildcard."""
    index: Mapping[str, HostRules] = field(default_factory=dict)
    """With `exact`: the same, for decisions."""
    index_wild: HostRules = HostRules()

    def rules_for(self, host: Host) -> tuple[Rule, ...]:
        """Every rule that can speak about `host`, and possibly more."""
        if self.exact is None:
            return self.rules
        return self.exact.get(host.text, ()) + self.wild

    def places(self, host: Host) -> tuple[HostRules, ...]:
        """Every rule that can speak about `host`, and possibly more, each once."""
        if self.exact is None:
            return (HostRules.of(self.rules),)
        found = self.index.get(host.text)
        return (self.index_wild,) if found is None else (found, self.index_wild)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The whole policy. `digest` is hex SHA-256 over the canonical document; `document` is that JSON value."""

    digest: str
    document: Mapping[str, Any]
    roles: Mapping[str, Role]
    destinations: Mapping[str, DestinationDef]
    """By host text."""
    credentials: Mapping[CredentialRef, CredentialDef]
