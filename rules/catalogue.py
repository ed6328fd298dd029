"""The catalogue: services, their operations with an effect, and how each is recognised (rules/services/*.yaml).

1. A file describes one service: its hosts by role (`index`, `files`), its credential slot, every auth slot that the
   provider knows, operations, and tests of what they recognise and what they do not.
2. What a file does not describe is not an operation, and so denied. Unknown keys, duplicate keys and empty
   lists are errors with file:line:column. An operation with `later: true` is known by name and denied.
3. `like`/`base` puts a service under another base URL: hosts, port and path prefix change, nothing else. Hosts
   without a `mirror:` and requests with `when: public` stay behind; they are not operations there.

read_builtin() is the only reader of files in this room: package data, once, at import. Everything else is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from urllib.parse import urlsplit

from rules.names import Host, InvalidName, Scheme, parse_authority
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
from rules.service_file import CatalogueError, parse_service

__all__ = [
    "AUTH_HEADERS",
    "AUTH_QUERY",
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
    """The services that come with the package, by name."""
    return _BUILTIN


def _split_base(base: str) -> tuple[Scheme, Host, int, str]:
    parts = urlsplit(base)
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
        host, port = parse_authority(parts.netloc, 443 if scheme == "https" else 80)
    except InvalidName:
        raise InvalidBase("a base names one host, without user or password") from None
    prefix = parts.path.rstrip("/")
    if not is_plain_prefix(prefix):
        raise InvalidBase("the path of a base is plain canonical text")
    return scheme, host, port, prefix


_BUILTIN: Mapping[str, ServiceDef] = {
    service.name: service for service in (parse_service(text, name) for name, text in read_builtin().items())
}

_WELL_KNOWN_HEADERS = """
    authorization proxy-authorization cookie x-api-key api-key apikey x-apikey x-auth-token x-access-token
    x-authorization x-goog-api-key x-goog-iam-authorization-token x-serverless-authorization private-token job-token
    deploy-token x-gitlab-token x-github-token x-vault-token x-consul-token x-nomad-token x-figma-token
    x-shopify-access-token x-amz-security-token x-ms-authorization-auxiliary ocp-apim-subscription-key
    x-functions-key dd-api-key dd-application-key x-sentry-auth x-datadog-api-key
    x-honeycomb-team x-session-token
    x-token x-secret-key x-client-secret x-jwt-assertion
"""
_WELL_KNOWN_QUERY = """
    access_token api_key apikey api-key x-api-key auth auth_token authorization token id_token refresh_token
    client_secret client_assertion private_token job_token password passwd secret signature sig sv se sp sr st
    skoid sktid skt ske sks skv x-amz-signature x-amz-credential x-amz-security-token x-amz-algorithm
    x-goog-signature x-goog-credential x-goog-algorithm awsaccesskeyid googleaccessid key-pair-id policy jwt
    session_token sessionid
"""

AUTH_HEADERS: frozenset[str] = frozenset(_WELL_KNOWN_HEADERS.split()) | {
    name for service in _BUILTIN.values() for name in service.auth_headers
}
"""Lower-case names of every header that is known to carry authority, at any provider (RULINGS 4.2)."""

AUTH_QUERY: frozenset[str] = frozenset(_WELL_KNOWN_QUERY.split()) | {
    name for service in _BUILTIN.values() for name in service.auth_query
}
"""Lower-case query names that carry authority or belong to a signed URL; compare them in lower case."""
