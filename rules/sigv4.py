"""What a client's own AWS signature says: the key's name, day, region and service, and which fields it signed.

Source: "Create a signed AWS API request" (IAM User Guide), AWS Signature Version 4: the Authorization header, the
query form of presigned URLs, and `x-amz-content-sha256`. The signature itself is worthless (it was made with a
placeholder): it is read for what the client means, checked against the credential's definition, and dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rules.facts import RequestFacts
from rules.policy import CredentialDef

ALGORITHM: Final = "AWS4-HMAC-SHA256"
QUERY_KEYS: Final = (
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-Security-Token",
    "X-Amz-SignedHeaders",
    "X-Amz-Signature",
)
"""What a presigned URL adds to its query."""
HEADERS: Final = frozenset(
    "x-amz-date x-amz-content-sha256 x-amz-decoded-content-length x-amz-trailer x-amz-sdk-checksum-algorithm "
    "x-amz-checksum-mode x-amz-checksum-crc32 x-amz-checksum-crc32c x-amz-checksum-crc64nvme x-amz-checksum-sha1 "
    "x-amz-checksum-sha256 content-md5 amz-sdk-invocation-id amz-sdk-request x-amz-user-agent".split()
)
"""What says how a body is signed, framed and summed, and who asks: goes along with every signed request."""
SKEW_SECONDS: Final = 15 * 60
"""AWS refuses signatures further from its clock; what a client dates further from ours is not a request of now."""
MAX_EXPIRES: Final = 7 * 86_400

_KEY = re.compile(r"[A-Za-z0-9._~:-]{1,512}\Z")
_WORD = re.compile(r"[a-z0-9][a-z0-9-]{0,63}\Z")
_SIGNED = re.compile(r"[a-z0-9-]+(?:;[a-z0-9-]+)*\Z")
_STAMP = re.compile(r"[0-9]{8}T[0-9]{6}Z\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSignature:
    """What the client's signature names. `at` is its own time (Unix seconds), `expires` seconds of a presigned URL."""

    key_id: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    at: float
    expires: int | None = None


def client_key_id(text: str) -> str | None:
    """The key's name in an Authorization value or a credential scope; None where it is neither."""
    if text.startswith(ALGORITHM):
        fields = _fields(text)
        text = "" if fields is None else fields.get("Credential", "")
    parts = text.split("/")
    return parts[0] if len(parts) == 5 and parts[4] == "aws4_request" and _KEY.match(parts[0]) else None


def read_signature(facts: RequestFacts) -> ClientSignature | str | None:
    """The client's signature, a sentence that says what is wrong with it, or None where it made none."""
    return read_from(facts.headers, facts.query.pairs)


def read_from(headers: Sequence[tuple[str, str]], query: Sequence[tuple[str, str]]) -> ClientSignature | str | None:
    """As `read_signature`, of (lower-case name, value) headers and decoded query pairs."""
    written = [value for name, value in headers if name == "authorization"]
    keys = {name: value for name, value in query if name in QUERY_KEYS}
    if not written and not keys:
        return None
    if (written and keys) or len(written) > 1:
        return "the request is signed twice"
    if written:
        fields = _fields(written[0])
        stamps = [value for name, value in headers if name == "x-amz-date"]
        if fields is None:
            return f"only {ALGORITHM} signatures can be made anew"
        scope, signed = fields.get("Credential", ""), fields.get("SignedHeaders", "")
        return _made(scope, signed, stamps[0] if len(stamps) == 1 else None, None)
    if keys.get("X-Amz-Algorithm") != ALGORITHM:
        return f"only {ALGORITHM} signatures can be made anew"
    expires = keys.get("X-Amz-Expires", "")
    if not expires.isdecimal() or not 0 < int(expires) <= MAX_EXPIRES:
        return "X-Amz-Expires is not a number of seconds up to a week"
    scope, signed = keys.get("X-Amz-Credential", ""), keys.get("X-Amz-SignedHeaders", "")
    return _made(scope, signed, keys.get("X-Amz-Date"), int(expires))


def is_signed(definition: CredentialDef) -> bool:
    """Whether requests with this credential are signed in this way."""
    return any(slot.where == "sigv4" for slot in definition.slots)


def signed_keys(facts: RequestFacts) -> frozenset[str]:
    """The query keys of a presigned URL, where the request is one whose key id can be read; else none."""
    scope = [value for name, value in facts.query.pairs if name == "X-Amz-Credential"]
    return frozenset(QUERY_KEYS) if len(scope) == 1 and client_key_id(scope[0]) is not None else frozenset()


def unsignable(definition: CredentialDef, facts: RequestFacts, now: float) -> str | None:
    """Why this request cannot be signed anew with the credential, as a sentence; None where it can."""
    payload = facts.header("x-amz-content-sha256")
    if any(value.startswith("STREAMING-") and not value.startswith("STREAMING-UNSIGNED-") for value in payload):
        return (
            "The body is signed chunk by chunk with the placeholder, and every chunk would have to be rewritten. Let "
            "the client send it unsigned (x-amz-content-sha256: UNSIGNED-PAYLOAD or "
            "STREAMING-UNSIGNED-PAYLOAD-TRAILER) or hashed as a whole."
        )
    if facts.header("x-amz-region-set"):
        return "Signatures for several regions (SigV4a) are not made."
    signature = read_signature(facts)
    if isinstance(signature, str):
        return f"The signature cannot be read: {signature}."
    if signature is None:
        one = all(len(definition.params.get(name, ())) == 1 for name in ("regions", "services"))
        return None if one else "The request is not signed, and the credential names several regions or services."
    regions, services = definition.params.get("regions", ()), definition.params.get("services", ())
    if signature.region not in regions:
        return (
            f"The request is signed for the region {signature.region}; the credential signs for {', '.join(regions)}."
        )
    if signature.service not in services:
        return f"The request is signed for {signature.service}; the credential signs for {', '.join(services)}."
    ends = signature.at + (SKEW_SECONDS if signature.expires is None else signature.expires)
    if not signature.at - SKEW_SECONDS <= now <= ends:
        return "The request's own date is not now: check the sandbox's clock, or sign the URL again."
    return None


def _fields(text: str) -> dict[str, str] | None:
    scheme, _, rest = text.partition(" ")
    if scheme != ALGORITHM:
        return None
    fields: dict[str, str] = {}
    for item in rest.split(","):
        name, equals, value = item.strip().partition("=")
        if not equals or name in fields:
            return None
        fields[name] = value
    return fields if fields.keys() == {"Credential", "SignedHeaders", "Signature"} else None


def _made(scope: str, signed: str, stamp: str | None, expires: int | None) -> ClientSignature | str:
    parts = scope.split("/")
    if len(parts) != 5 or parts[4] != "aws4_request" or not _KEY.match(parts[0]):
        return "its scope is not KEY/DATE/REGION/SERVICE/aws4_request"
    key_id, day, region, service, _ = parts
    if not _WORD.match(region) or not _WORD.match(service) or not _SIGNED.match(signed):
        return "it names no region, service or headers"
    if stamp is None or not _STAMP.match(stamp) or stamp[:8] != day:
        return "its date is missing, or not that of its scope"
    try:
        at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return "its date is no date"
    return ClientSignature(
        key_id=key_id, region=region, service=service, signed_headers=tuple(signed.split(";")), at=at, expires=expires
    )
