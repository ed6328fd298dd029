"""A service: its places, its credential slot, its operations. Values only; files are read in rules/service_file.py.

A service is first written without hosts (`RequestDef`: which of its places, which paths); `put_hosts_in` makes
the operations. So the same description serves the public hosts and any `base` that `like:` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rules.arguments import Value
from rules.matching import InvalidTemplate, parse_path
from rules.names import Host, Scheme
from rules.operations import arguments_of
from rules.paths import CanonicalPath, InvalidTarget
from rules.policy import BodySpec, Effect, HeadSpec, HostPattern, Operation, PlaceholderSpec, RedirectSpec, Slot

EFFECTS: tuple[str, ...] = get_args(Effect)
NATIVES = (
    "problem", "forge", "git", "npm", "pypi", "cargo", "go", "bundler", "apt", "oci", "huggingface", "registry",
    "openai", "anthropic", "jsonrpc", "graphql", "aws-query", "aws-json", "s3",
)  # fmt: skip
"""Shapes of refusals that clients show (wire/refusals.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One place of a service: where it is, and where it lies under a `base` (None: nowhere).

    `pattern` is exact, or a template for hosts that belong to many customers; then `tenant` names the argument that
    says whose, and every allow rule must bind it.
    """

    scheme: Scheme
    pattern: HostPattern
    port: int
    prefix: str
    mirror: str | None
    tenant: str | None = None

    @property
    def host(self) -> Host | None:
        """The one host, or None for a template."""
        if self.pattern.kind != "exact":
            return None
        return Host.of(self.pattern.suffix)


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSlot:
    """How the provider takes a credential. What credentials.yaml means by `service: NAME`."""

    kind: str
    written: Mapping[str, Any]
    """The kind's own keys as the file has them; those of OPEN_KEYS may be left to the operator."""
    slots: tuple[Slot, ...]
    authorities: tuple[tuple[str, int], ...]
    """(host text, port). Empty where the service's hosts are templates: the operator lists them."""
    placeholders: tuple[tuple[str, PlaceholderSpec], ...]
    """(part, placeholder)."""
    username: str | None = None

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(Host.of(host) for host, _ in self.authorities)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTest:
    """One line of `tests:`. `near` is where a denied request fails (rules.matching.NEARNESS, or `target`)."""

    expect: Literal["deny", "allow"]
    method: str
    url: str
    why: str
    operation: str = ""
    effect: str | None = None
    arguments: Mapping[str, Value] | None = None
    near: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDef:
    """One way to state an operation, before hosts are put in."""

    operation: str
    effect: Effect
    at: tuple[str, ...]
    when: Literal["both", "public", "mirror"]
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    """Below the prefix; "" is the prefix itself, or `/` where there is none."""
    encoded_slash: bool
    query: Mapping[str, tuple[str, ...] | None] | None
    query_required: tuple[str, ...]
    request_headers: Mapping[str, tuple[str, ...]]
    head: HeadSpec | None
    body: BodySpec | None
    arguments: Mapping[str, str]
    must_bind: tuple[str, ...]
    unbound: tuple[str, ...]
    fold: tuple[str, ...]
    extra_request_headers: tuple[str, ...]
    placeholders_inert: bool
    redirects: tuple[RedirectSpec, ...]
    download: bool
    request_bytes: int | None
    native: str
    answer: str = ""
    captures: tuple[str, ...] = ()
    takes: str = ""
    extra_response_headers: tuple[str, ...] = ()
    shared_state: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDef:
    """One service, ready to use. `operations` ids are unique: `github/git.fetch`, and `github/git.fetch#2` for its
    second way of being stated. Select them with `select`, never by comparing ids."""

    name: str
    title: str
    native: str
    endpoints: Mapping[str, Endpoint]
    operations: tuple[Operation, ...]
    credential: CredentialSlot | None
    auth_headers: tuple[str, ...]
    auth_query: tuple[str, ...]
    requests: tuple[RequestDef, ...]
    credential_at: tuple[str, ...] = ()
    tests: tuple[ServiceTest, ...] = ()
    like: str | None = None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The exact ones; templates have none."""
        found = (endpoint.host for endpoint in self.endpoints.values())
        return tuple(dict.fromkeys(host for host in found if host is not None))

    @property
    def operation_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(request.operation for request in self.requests))

    def select(self, selector: str) -> tuple[Operation, ...]:
        """The operations named `selector`, or all whose effect it is. () where there is none: an error for callers."""
        if selector in EFFECTS:
            return tuple(op for op in self.operations if op.effect == selector)
        wanted = f"{self.name}/{selector}"
        return tuple(op for op in self.operations if op.name == wanted)

    def arguments(self, selector: str) -> frozenset[str]:
        """The arguments that a rule may bind on `selector`."""
        names: set[str] = set()
        for op in self.select(selector):
            names |= op.arguments.keys() | head_arguments(op)
            if op.body is not None:
                names |= arguments_of(op.body.matcher, op.body.params)
        return frozenset(names)


def head_arguments(op: Operation) -> frozenset[str]:
    """The arguments that the operation's head matcher may state."""
    return frozenset() if op.head is None else arguments_of(op.head.matcher, op.head.params)


def put_hosts_in(service: ServiceDef) -> ServiceDef:
    """`service` with its operations and credential places made from its endpoints."""
    operations: list[Operation] = []
    used: dict[str, int] = {}
    for request in service.requests:
        if request.when == "mirror" and service.like is None:
            continue
        # One operation for each (scheme, port, prefix, tenant): hosts that share them are one place, spelt differently.
        places: dict[tuple[Scheme, int, str, str | None], list[HostPattern]] = {}
        for key in request.at:
            endpoint = service.endpoints.get(key)
            if endpoint is not None:
                place = (endpoint.scheme, endpoint.port, endpoint.prefix, endpoint.tenant)
                places.setdefault(place, []).append(endpoint.pattern)
        for (scheme, port, prefix, tenant), hosts in places.items():
            count = used[request.operation] = used.get(request.operation, 0) + 1
            suffix = "" if count == 1 else f"#{count}"
            operations.append(
                Operation(
                    id=f"{service.name}/{request.operation}{suffix}",
                    effect=request.effect,
                    hosts=tuple(hosts),
                    port=port,
                    scheme=scheme,
                    methods=request.methods,
                    paths=tuple(
                        parse_path(prefix + template or "/", encoded_slash=request.encoded_slash)
                        for template in request.paths
                    ),
                    query=request.query,
                    query_required=request.query_required,
                    request_headers=request.request_headers,
                    head=None if request.head is None else replace(request.head, prefix=prefix),
                    body=request.body,
                    arguments=request.arguments,
                    must_bind=tuple(dict.fromkeys((*request.must_bind, *([tenant] if tenant else [])))),
                    unbound=request.unbound,
                    fold=request.fold,
                    extra_request_headers=request.extra_request_headers,
                    native=request.native,
                    placeholders_inert=request.placeholders_inert,
                    # Declared of the public hosts; where one's own base keeps its files, nobody has reviewed.
                    redirects=request.redirects if service.like is None else (),
                    download=request.download,
                    request_bytes=request.request_bytes,
                    answer=request.answer,
                    captures=request.captures,
                    takes=request.takes,
                    extra_response_headers=request.extra_response_headers,
                    shared_state=request.shared_state,
                )
            )
    credential = service.credential
    if credential is not None:
        places_of = (service.endpoints.get(key) for key in service.credential_at)
        places_known = [place for place in places_of if place is not None]
        authorities = dict.fromkeys((place.host.text, place.port) for place in places_known if place.host is not None)
        credential = replace(credential, authorities=tuple(authorities)) if places_known else None
    return replace(service, operations=tuple(operations), credential=credential)


def is_plain_prefix(prefix: str) -> bool:
    if prefix == "":
        return True
    try:
        path = CanonicalPath.parse(prefix)
        pattern = parse_path(prefix)
    except (InvalidTarget, InvalidTemplate):
        return False
    return not prefix.endswith("/") and not pattern.names and not pattern.rest and path.segments == pattern.segments
