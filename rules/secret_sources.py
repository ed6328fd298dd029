"""`sources:` of credentials.yaml: the secret managers and programs that references may name, and how each is opened.

    sources:
      corp-vault: {kind: vault, address: "https://vault.corp.example:8200", ttl: 5m,
                   auth: {approle: {role_id: "store:vault/role-id", secret_id: "file:/run/secrets/vault-secret-id"}}}
      aws-prod:   {kind: aws-secrets-manager, region: eu-central-1,
                   auth: {keys: {access_key_id: "env:AKID", secret_access_key: "store:aws/key"}}}

The operator's alone, like everything in that file (RULINGS 3.6). What a source is opened with is itself named by
a reference, to a source at hand. Where a source is, stands here and nowhere else; how its name may be reached
(private addresses, own authority, clear text), under `destinations:` of the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from rules import grammar
from rules.names import DEFAULT_PORTS, Destination, Host, InvalidName, Scheme
from rules.policy import DestinationDef
from rules.reader import Node
from rules.secret_references import AT_HAND, KINDS, read_at_hand

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_PROGRAM = re.compile(r"(?:/[^\x00-\x1f\x7f/]+)+\Z")
MOUNT = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*\Z")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}\Z")
NAMESPACE = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*/?\Z")

MAX_ARGUMENTS: Final = 32
DEFAULT_TTL: Final = 300
DEFAULT_FAILURE_TTL: Final = 5
DEFAULT_STALE: Final = 0
MAX_SECONDS: Final = 24 * 3600
KUBERNETES_TOKEN: Final = "file:/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
"""Where Kubernetes mounts the service account's token (kubernetes.io: Configure Service Accounts for Pods)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a source is: `base` is a path before those that its protocol names ("" or "/x/y")."""

    destination: Destination
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDef:
    """One entry of `sources:`. Never part of a document. Equal definitions are the same source."""

    name: str
    kind: str
    places: Mapping[str, Address] = field(default_factory=dict)
    """`address`, and `login` where tokens come from another place."""
    settings: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings that are lists."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """What it is opened with: name -> a reference to a source at hand."""
    ttl: int = DEFAULT_TTL
    failure_ttl: int = DEFAULT_FAILURE_TTL
    stale: int = DEFAULT_STALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """One way to open a source. `alone`: the value under its name is the one secret itself."""

    secrets: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    settings: Mapping[str, str | None] = field(default_factory=dict)
    """Plain settings with their defaults; None: to be written."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """References that need not be written."""
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """The keys of one kind of source, beside kind, ttl, failure_ttl and stale."""

    address: str | None = None
    """None: no network. "": to be written. Else the default, with {setting} replaced."""
    login: str | None = None
    auth: Mapping[str, Auth] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    program: bool = False


VAULT_AUTH = {
    "token": Auth(secrets=("token",), alone=True),
    "approle": Auth(secrets=("role_id", "secret_id"), settings={"mount": "approle"}),
    "kubernetes": Auth(
        secrets=("token",), defaults={"token": KUBERNETES_TOKEN}, settings={"role": None, "mount": "kubernetes"}
    ),
}
AWS_AUTH = {
    "keys": Auth(secrets=("access_key_id", "secret_access_key"), optional=("session_token",)),
}
GCP_AUTH = {"service_account": Auth(secrets=("service_account",), alone=True)}
AZURE_AUTH = {"client": Auth(secrets=("client_secret",), settings={"tenant": None, "client_id": None})}
GCP_LOGIN: Final = "https://oauth2.googleapis.com"
AZURE_LOGIN: Final = "https://login.microsoftonline.com"
_KINDS: Final[Mapping[str, SourceKind]] = {
    "vault": SourceKind(address="", auth=VAULT_AUTH),
    "vault-dynamic": SourceKind(address="", auth=VAULT_AUTH),
    "aws-secrets-manager": SourceKind(
        address="https://secretsmanager.{region}.amazonaws.com", auth=AWS_AUTH, required=("region",)
    ),
    "aws-parameter-store": SourceKind(
        address="https://ssm.{region}.amazonaws.com", auth=AWS_AUTH, required=("region",)
    ),
    "gcp-secret-manager": SourceKind(
        address="https://secretmanager.googleapis.com",
        login=GCP_LOGIN,
        auth=GCP_AUTH,
        required=("project",),
    ),
    "azure-key-vault": SourceKind(
        address="",
        login=AZURE_LOGIN,
        auth=AZURE_AUTH,
    ),
    "onepassword": SourceKind(program=True, auth={"token": Auth(secrets=("token",), alone=True)}),
    "sops": SourceKind(program=True, auth={"age_key": Auth(secrets=("age_key",), alone=True)}),
    "age": SourceKind(program=True, required=("identity",)),
    "keyring": SourceKind(program=True),
    "exec": SourceKind(program=True),
}
_OPTIONAL_AUTH = frozenset({"sops", "onepassword"})
"""Kinds whose program may find its own key by the variables that it is passed."""


def read_sources(top: Node, destinations: Mapping[str, DestinationDef]) -> dict[str, SourceDef]:
    """The entries under `sources:`. `destinations` are the operator's. Problems are noted."""
    found: dict[str, SourceDef] = {}
    for name, node in top.entries():
        with node.problems.collecting():
            if name in AT_HAND:
                node.fail(f"{name}: is a source already; give this one another name", on_key=True)
            if not _NAME.match(name):
                node.fail("a source's name is lower-case letters, digits and hyphen, at most 63", on_key=True)
            found[name] = _source(name, node, destinations)
    return found


def kinds_of(sources: Mapping[str, SourceDef]) -> dict[str, str]:
    """Name -> kind, as rules.secret_references takes it."""
    return {name: source.kind for name, source in sources.items()}


def _source(name: str, node: Node, destinations: Mapping[str, DestinationDef]) -> SourceDef:
    if not isinstance(node.value, dict) or "kind" not in node.value:
        node.fail("a source is a mapping with kind: and what belongs to it")
    kind = node.child("kind").word(KINDS)
    row = _KINDS[kind]
    required = ["kind", *row.required]
    optional = ["ttl", "failure_ttl", "stale"]
    if row.program:
        required.append("program")
        optional.append("environment")
    if kind == "exec":
        optional += ["arguments", "format"]
    if kind in ("vault", "vault-dynamic"):
        optional += ["namespace"]
    if kind == "vault":
        optional += ["kv"]
    if row.address is not None:
        (required if row.address == "" else optional).append("address")
    if row.login is not None:
        optional.append("login")
    if row.auth:
        (optional if kind in _OPTIONAL_AUTH else required).append("auth")
    fields = node.fields(" ".join(required), " ".join(optional))
    settings: dict[str, str] = {}
    words: dict[str, tuple[str, ...]] = {}
    for key in row.required:
        settings[key] = read_setting(fields[key], key)
    if "namespace" in fields:
        settings["namespace"] = read_matching(fields["namespace"], NAMESPACE, "a namespace is words joined by /")
    if "kv" in fields:
        words["kv"] = _mounts(fields["kv"])
    if row.program:
        settings["program"] = read_matching(fields["program"], _PROGRAM, "a program is named by its absolute path")
        words["environment"] = _variables(fields.get("environment"))
    if kind == "exec":
        words["arguments"] = _arguments(fields.get("arguments"))
        settings["format"] = fields["format"].word(("plain", "json")) if "format" in fields else "plain"
    secrets: dict[str, str] = {}
    if "auth" in fields:
        read_auth(fields["auth"], row, settings, secrets)
    places = read_places(fields, row, settings, destinations)
    return SourceDef(
        name=name,
        kind=kind,
        places=places,
        settings=settings,
        words=words,
        secrets=secrets,
        ttl=_seconds(fields, "ttl", DEFAULT_TTL),
        failure_ttl=_seconds(fields, "failure_ttl", DEFAULT_FAILURE_TTL),
        stale=_seconds(fields, "stale", DEFAULT_STALE),
    )


def read_setting(node: Node, key: str) -> str:
    if key == "identity":
        return read_matching(node, _PROGRAM, "an identity is a file, named by its absolute path")
    return read_matching(node, _PLAIN, f"{key}: is one word")


def read_matching(node: Node, pattern: re.Pattern[str], complaint: str) -> str:
    text = node.text()
    if not pattern.match(text) or {"..", "."} & set(text.split("/")):
        node.fail(complaint)
    return text


def _seconds(fields: Mapping[str, Node], key: str, default: int) -> int:
    if key not in fields:
        return default
    seconds = grammar.duration(fields[key])
    if seconds > MAX_SECONDS:
        fields[key].fail("a copy of a secret is kept for a day at most")
    return seconds


def read_auth(node: Node, row: SourceKind, settings: dict[str, str], secrets: dict[str, str]) -> None:
    """`auth:` of `row` into `settings` (with the way's name under `auth`) and `secrets`. Raises Rejected."""
    entries = node.entries()
    if len(entries) != 1:
        node.fail(f"auth: says one way, one of {', '.join(row.auth)}")
    way, given = entries[0]
    if way not in row.auth:
        given.fail(f"there is no such way here; one of {', '.join(row.auth)}", on_key=True)
    auth = row.auth[way]
    settings["auth"] = way
    if auth.alone:
        secrets[auth.secrets[0]] = read_at_hand(given)
        return
    needed = [key for key in auth.secrets if key not in auth.defaults]
    needed += [key for key, default in auth.settings.items() if default is None]
    free = [key for key in (*auth.secrets, *auth.optional, *auth.settings) if key not in needed]
    fields = given.fields(" ".join(needed), " ".join(free))
    for key in (*auth.secrets, *auth.optional):
        if key in fields:
            secrets[key] = read_at_hand(fields[key])
        elif key in auth.defaults:
            secrets[key] = auth.defaults[key]
    for key, default in auth.settings.items():
        if key in fields:
            pattern = MOUNT if key == "mount" else _PLAIN
            settings[key] = read_matching(fields[key], pattern, f"{key}: is one word")
        elif default is not None:
            settings[key] = default


def _mounts(node: Node) -> tuple[str, ...]:
    """`kv: {team/kv: 1}` as ("team/kv=1",). A mount that is not named has version 2 and one segment."""
    found = []
    for mount, version in node.entries():
        if not MOUNT.match(mount) or {"..", "."} & set(mount.split("/")):
            version.fail("a mount is words joined by /", on_key=True)
        found.append(f"{mount}={version.natural(1, 2)}")
    return tuple(found)


def _variables(node: Node | None) -> tuple[str, ...]:
    if node is None:
        return ()
    names = node.texts(empty="an empty list passes nothing; leave it out")
    for index, name in enumerate(names):
        if not _VARIABLE.match(name):
            node.child(index).fail("environment: lists names of variables, which are passed on as the gateway has them")
        if name.startswith(("LD_", "PYTHON", "BASH_")) or name in ("IFS", "ENV"):
            node.child(index).fail(f"{name} steers how a program is loaded; it is not passed on")
    return tuple(names)


def _arguments(node: Node | None) -> tuple[str, ...]:
    if node is None:
        return ("{name}",)
    items = [item.text() for item in node.items(empty=None)]
    if len(items) > MAX_ARGUMENTS:
        node.fail(f"at most {MAX_ARGUMENTS} arguments")
    return tuple(items)


def read_places(
    fields: Mapping[str, Node], row: SourceKind, settings: Mapping[str, str], destinations: Mapping[str, DestinationDef]
) -> dict[str, Address]:
    """`address:` and `login:` of `row`, as written or by default. Raises Rejected."""
    places: dict[str, Address] = {}
    for key, default in (("address", row.address), ("login", row.login)):
        if default is None:
            continue
        node = fields.get(key)
        if node is not None:
            places[key] = _address(node, node.text(), destinations)
        else:
            some = next(iter(fields.values()))
            places[key] = _address(some, default.format_map(settings), destinations)
    return places


def _address(node: Node, text: str, destinations: Mapping[str, DestinationDef]) -> Address:
    complaint = "expected https://host, https://host:port or https://host:port/path"
    parts = urlsplit(text)
    try:
        port = parts.port
        host = Host.parse(parts.netloc.rpartition(":")[0] if port is not None else parts.netloc)
    except (InvalidName, ValueError):
        node.fail(complaint)
    if parts.query or parts.fragment or "@" in parts.netloc or parts.scheme not in DEFAULT_PORTS:
        node.fail(complaint)
    base = parts.path.rstrip("/")
    if base and (not re.fullmatch(r"(?:/[A-Za-z0-9._~-]+)+", base) or {"..", "."} & set(base.split("/"))):
        node.fail(complaint)
    scheme: Scheme = "https" if parts.scheme == "https" else "http"
    known = destinations.get(host.text)
    if scheme == "http" and (known is None or known.scheme != "http"):
        node.fail(
            f"secrets would come in clear text; write https://, or say scheme: http for {host.text} under destinations:"
        )
    default = DEFAULT_PORTS[scheme] if known is None or known.port is None else known.port
    return Address(destination=Destination(scheme, host, port or default), base=base)
