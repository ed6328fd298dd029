"""The catalogue: services, their operations with an effect, and how each is recognised (rules/services/*.yaml).

1. A file describes one service: its hosts by role (`index`, `files`), its credential slot, every auth slot that the
   provider knows, operations, and tests of what they recognise and what they do not.
2. What a file does not describe is not an operation, and so denied. Unknown keys, duplicate keys and empty
   lists are errors with file:line:column. An operation with `later: true` is known by name and denied.
3. `like`/`base` puts a service under another base URL: hosts, port and path prefix change, nothing else. Hosts
   without a `mirror:` and requests with `when: public` stay behind; they are not operations there.

read_builtin() and rules/authority_names.py are the only readers of files in this room: package data, once, at import.
Everything else is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from urllib.parse import urlsplit

from rules.names import DEFAULT_PORTS, Host, InvalidName, Scheme, parse_authority
from rules.policy import HostPattern
from rules.service import (
    EFFECTS,
    CredentialSlot,
    Endpoint,
    RequestDef,
    ServiceDef,
    ServiceTest,
    is_plain_prefix,
    put_hosts_in,
)
from rules.service_file import CatalogueError, parse_service, parse_without_tests

__all__ = [
    "EFFECTS",
    "CatalogueError",
    "CredentialSlot",
    "Endpoint",
    "InvalidBase",
    "RequestDef",
    "ServiceDef",
    "ServiceTest",
    "UnknownService",
    "builtin_services",
    "parse_service",
    "read_builtin",
    "resolve_service",
    "services_with_tests",
]


class UnknownService(LookupError):
    """`like:` or `service:` names a service that the catalogue does not have."""


class InvalidBase(ValueError):
    """`base:` is not a usable URL. str() is a fixed sentence."""


def resolve_service(defs: Mapping[str, ServiceDef], name: str, like: str, base: str) -> ServiceDef:
    """Return the service `name`: the operations of `like`, under `base` (`https://host[:port][/prefix]`).

    Raises UnknownService and InvalidBase.
    """
    original = defs.get(like)
    if original is None:
        raise UnknownService(like)
    scheme, host, port, prefix = _split_base(base)
    endpoints = {
        key: Endpoint(
            scheme=scheme,
            pattern=HostPattern(kind="exact", suffix=host.text),
            port=port,
            prefix=prefix + endpoint.mirror,
            mirror=endpoint.mirror,
        )
        for key, endpoint in original.endpoints.items()
        if endpoint.mirror is not None
    }
    requests = tuple(request for request in original.requests if request.when != "public")
    moved = replace(original, name=name, endpoints=endpoints, requests=requests, tests=(), like=like)
    return put_hosts_in(moved)


def read_builtin() -> dict[str, str]:
    """Return {file name: text} of the services that come with the package. The one reader of package data here."""
    folder = resources.files("rules") / "services"
    return {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def builtin_services() -> Mapping[str, ServiceDef]:
    """The services that come with the package, by name, without their tests. Each is parsed when first asked for."""
    return _BUILTIN


def services_with_tests() -> Mapping[str, ServiceDef]:
    """The same with their tests, parsed whole. For whoever runs the tests."""
    return {name.removesuffix(".yaml"): parse_service(text, name) for name, text in read_builtin().items()}


def _split_base(base: str) -> tuple[Scheme, Host, int, str]:
    if any(not "!" <= char <= "~" for char in base):
        raise InvalidBase("a base is plain ASCII without blanks")  # urlsplit would leave some of them out
    try:
        parts = urlsplit(base)
    except ValueError:  # brackets around what is no address
        raise InvalidBase("a base names one host, without user or password") from None
    scheme: Scheme
    match parts.scheme:
        case "https":
            scheme = "https"
        case "http":
            scheme = "http"
        case _:
            raise InvalidBase("a base is an https or http URL")
    if parts.query or parts.fragment or "?" in base or "#" in base or not parts.netloc:
        raise InvalidBase("a base has a host and a path, and nothing behind it")
    try:
        host, port = parse_authority(parts.netloc, DEFAULT_PORTS[scheme])
    except InvalidName:
        raise InvalidBase("a base names one host, without user or password") from None
    prefix = parts.path.rstrip("/")
    if not is_plain_prefix(prefix):
        raise InvalidBase("the path of a base is plain canonical text")
    return scheme, host, port, prefix


class _Builtin(Mapping[str, ServiceDef]):
    """The services of the package by name. Texts are read at once, each is parsed when it is first asked for.

    Most processes never ask for one, and a policy names a few of many: parsing all takes seconds.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = {name.removesuffix(".yaml"): text for name, text in texts.items()}
        self._parsed: dict[str, ServiceDef] = {}

    def __getitem__(self, name: str) -> ServiceDef:
        if name not in self._parsed:
            self._parsed[name] = parse_without_tests(self._texts[name], f"{name}.yaml")
        return self._parsed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


_BUILTIN = _Builtin(read_builtin())
