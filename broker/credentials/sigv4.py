"""`sigv4`: AWS Signature Version 4, in the Authorization header or, for presigned URLs, in the query.

The client's own signature, made with a placeholder, says for which region and service it meant to sign; policy checked
that against the credential (rules/sigv4.py). It is dropped, and the request is signed anew as it goes out.

Source: "Create a signed AWS API request" (IAM User Guide); "Authenticating requests: using the Authorization header",
"... query parameters" and "Signature calculations: unsigned payload option" (Amazon S3 API reference). S3 is the
exception throughout: its paths are encoded once and never normalised, and it takes bodies that are not signed.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from broker.credentials.base import (
    Headers,
    Injection,
    KindFault,
    Outgoing,
    header_text,
    inject,
    managed_headers,
    managed_query,
    part,
)
from broker.vault.secret import Secret
from rules.paths import InvalidTarget, Query
from rules.policy import CredentialDef
from rules.sigv4 import ALGORITHM, QUERY_KEYS, ClientSignature, read_from

EMPTY: Final = sha256(b"").hexdigest()
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
UNSIGNED_TRAILER: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
S3_LIKE: Final = frozenset({"s3", "s3-object-lambda", "s3-outposts", "s3express"})
"""Services that encode a path once and take unsigned bodies."""
LONGEST_PRESIGNED: Final = 300
"""Seconds: we use the URL at once, whatever the client asked for."""

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_ALWAYS = frozenset({"host", "content-type", "content-md5"})
# Written anew by the engine, or by the client's connection: never part of what is signed.
_NEVER = frozenset(
    "accept-encoding authorization connection content-length cookie expect te trailer transfer-encoding upgrade "
    "user-agent x-amzn-trace-id".split()
)
_OURS = frozenset({"x-amz-date", "x-amz-security-token", "x-amz-content-sha256"})
_HASH = "x-amz-content-sha256"
_SUBRESOURCES = frozenset({"policy"})
"""A query key that is authority at other providers and names a bucket's policy here; rules decide about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """What one signature is made with. `secret` is never shown."""

    key_id: str
    secret: bytes = field(repr=False)
    region: str
    service: str
    at: float
    """Unix seconds."""
    token: str = field(default="", repr=False)
    normalise: bool = True
    """Whether a path's dot segments are resolved before it is signed; S3 never does."""

    @property
    def stamp(self) -> str:
        return datetime.fromtimestamp(int(self.at), UTC).strftime("%Y%m%dT%H%M%SZ")

    @property
    def scope(self) -> str:
        return f"{self.stamp[:8]}/{self.region}/{self.service}/aws4_request"

    def key(self) -> bytes:
        """The key of this day, region and service."""
        key = b"AWS4" + self.secret
        for word in (self.stamp[:8], self.region, self.service, "aws4_request"):
            key = hmac.digest(key, word.encode(), "sha256")
        return key

    def signature(self, canonical: str) -> str:
        text = "\n".join((ALGORITHM, self.stamp, self.scope, sha256(canonical.encode()).hexdigest()))
        return hmac.digest(self.key(), text.encode(), "sha256").hex()


def apply_sigv4(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The request's signature. Raises KindFault for what cannot be signed."""
    clients = _client_signature(request)
    regions, services = definition.params["regions"], definition.params["services"]
    if clients is None and (len(regions) != 1 or len(services) != 1):
        raise KindFault("kind-request-form", "the request names no region and service, and the credential several")
    region = regions[0] if clients is None else clients.region
    service = services[0] if clients is None else clients.service
    if region not in regions or service not in services:
        raise KindFault("kind-request-form", "the request is signed for a region or service outside the credential's")
    secret = part(parts, "secret_access_key")
    token = header_text(part(parts, "session_token")) if "session_token" in parts else ""
    signing = Signing(
        key_id=header_text(part(parts, "access_key_id")),
        secret=secret,
        region=region,
        service=service,
        at=request.now,
        token=token,
        normalise=service not in S3_LIKE,
    )
    remove = managed_headers(definition) | _OURS
    remove_query = (managed_query(definition) | {key.lower() for key in QUERY_KEYS}) - _SUBRESOURCES
    bare = inject(request, Injection(remove_headers=remove, remove_query=remove_query))
    payload = _payload(request, service, presigned=clients is not None and clients.expires is not None)
    also = () if clients is None else clients.signed_headers
    if clients is not None and clients.expires is not None:
        set_query, signature = presign(signing, bare, payload, min(clients.expires, LONGEST_PRESIGNED))
        fields: Headers = ()
    else:
        set_query = ()
        wanted = service in S3_LIKE or any(name == _HASH for name, _ in request.sent)
        fields, signature = sign(signing, bare, payload, also, show_payload=wanted)
    forms = (secret, *((token.encode(),) if token else ()), signing.key(), signature.encode())
    return Injection(
        remove_headers=remove,
        remove_query=remove_query,
        set_headers=fields,
        set_query=set_query,
        forms=forms,
    )


def sign(
    signing: Signing, request: Outgoing, payload: str, also: Sequence[str] = (), *, show_payload: bool
) -> tuple[Headers, str]:
    """(the headers to add, the signature). `also`: headers that are signed besides, where the request has them."""
    ours = [("x-amz-date", signing.stamp)]
    if show_payload:
        ours.append((_HASH, payload))
    if signing.token:
        ours.append(("x-amz-security-token", signing.token))
    names, lines = _headers((*request.headers, *ours), request.authority, also)
    canonical = canonical_request(request.method, request.target, names, lines, payload, signing)
    signature = signing.signature(canonical)
    value = f"{ALGORITHM} Credential={signing.key_id}/{signing.scope}, SignedHeaders={names}, Signature={signature}"
    return (*ours, ("authorization", value)), signature


def presign(
    signing: Signing, request: Outgoing, payload: str, expires: int, *, sign_token: bool = True
) -> tuple[tuple[tuple[str, str], ...], str]:
    """(query pairs to add, percent-encoded, the signature). Only Host and what S3 asks for are signed beside them."""
    names, lines = _headers(request.headers, request.authority, ())
    values = {
        "X-Amz-Algorithm": ALGORITHM,
        "X-Amz-Credential": f"{signing.key_id}/{signing.scope}",
        "X-Amz-Date": signing.stamp,
        "X-Amz-Expires": str(expires),
        "X-Amz-SignedHeaders": names,
    }
    if signing.token and sign_token:
        values["X-Amz-Security-Token"] = signing.token
    added = tuple((name, encoded(value.encode())) for name, value in values.items())
    question = "&" if "?" in request.target else "?"
    target = request.target + question + "&".join(f"{name}={value}" for name, value in added)
    signature = signing.signature(canonical_request(request.method, target, names, lines, payload, signing))
    if signing.token and not sign_token:
        added = (*added, ("X-Amz-Security-Token", encoded(signing.token.encode())))
    return (*added, ("X-Amz-Signature", signature)), signature


def canonical_request(method: str, target: str, names: str, lines: str, payload: str, signing: Signing) -> str:
    """The text of which the signature is made."""
    path, _, query = target.partition("?")
    return "\n".join((method, canonical_path(path, signing), canonical_query(query), lines, names, payload))


def canonical_path(path: str, signing: Signing) -> str:
    """S3: encoded once. Others: as it is sent, dot segments resolved, encoded once more."""
    if signing.service in S3_LIKE:
        return encoded(unquote_to_bytes(path), keep="/")
    return quote(_resolved(path) if signing.normalise else path, safe="/~")


def canonical_query(query: str) -> str:
    """Every name and value decoded and encoded in one way, sorted by name, then value."""
    pairs = []
    for item in query.split("&") if query else ():
        name, _, value = item.partition("=")
        pairs.append((encoded(unquote_to_bytes(name)), encoded(unquote_to_bytes(value))))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def encoded(value: bytes, keep: str = "") -> str:
    """Percent-encoded but for RFC 3986's unreserved characters and `keep`."""
    return quote(value, safe=keep + "~")


def _resolved(path: str) -> str:
    """Dot segments and empty ones resolved (RFC 3986 section 6.2.2.3)."""
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            kept[-1:] = []
        elif segment not in ("", "."):
            kept.append(segment)
    end = "/" if kept and path.endswith(("/", "/.", "/..")) else ""
    return "/" + "/".join(kept) + end


def _headers(headers: Headers, authority: str, also: Sequence[str]) -> tuple[str, str]:
    """(names joined by `;`, the canonical lines). Values of one name are joined, their spaces made one."""
    chosen: dict[str, list[str]] = {"host": [authority]}
    wanted = (_ALWAYS | frozenset(also)) - _NEVER
    for name, value in headers:
        if name != "host" and (name in wanted or (name.startswith("x-amz-") and name not in _NEVER)):
            chosen.setdefault(name, []).append(" ".join(value.split()))
    names = sorted(chosen)
    return ";".join(names), "".join(f"{name}:{','.join(chosen[name])}\n" for name in names)


def _client_signature(request: Outgoing) -> ClientSignature | None:
    try:
        pairs = Query.parse(request.query or None).pairs
    except InvalidTarget:
        pairs = ()
    found = read_from(request.sent, pairs)
    if isinstance(found, str):
        raise KindFault("kind-request-form", "the client's signature cannot be read")
    return found


def _payload(request: Outgoing, service: str, *, presigned: bool) -> str:
    """What stands for the body. Its own hash wherever the whole of it is here; else what the client says of it.

    A hash that the client made over a body that streams may be signed: the provider compares it with what arrives.
    """
    said = [value for name, value in request.sent if name == _HASH]
    claim = said[0] if len(said) == 1 else ""
    if claim.startswith("STREAMING-") and claim != UNSIGNED_TRAILER:
        raise KindFault("kind-request-form", "a body signed chunk by chunk cannot be signed anew")
    if presigned and service in S3_LIKE:
        return UNSIGNED
    if claim == UNSIGNED_TRAILER:
        return claim
    if request.body is not None:
        return sha256(request.body).hexdigest()
    if not request.has_body:
        return EMPTY
    if _DIGEST.match(claim) or claim == UNSIGNED:
        return claim
    if service in S3_LIKE:
        return UNSIGNED
    raise KindFault("kind-body-unseen", "the body streams, and this service's signature needs all of it")
