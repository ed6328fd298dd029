"""`hmac`: a signature over what `sign:` names, in a header (RFC 2104), as many providers have their own way of it.

The text is made of the request as it goes out. `{body}` and its hashes need a body that was judged whole, or none.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime

from broker.credentials.base import Injection, KindFault, Outgoing, header_text, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef

_PLACE = re.compile(r"\{([a-z0-9_]+)\}")


def apply_hmac(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The signature, its time and the key's name in their headers. Raises KindFault for what cannot be signed."""
    params = definition.params
    secret = part(parts)
    key = _key(secret, params["key_encoding"])
    moment = _moment(params["clock"], request.now)
    key_id = header_text(part(parts, "key_id")) if "key_id" in parts else ""
    text = _text(params["sign"], request, moment, key_id)
    digest = hmac.new(key, text, getattr(hashlib, params["algorithm"])).digest()
    signature = _coded(digest, params["encoding"])
    values = {"signature": signature, "timestamp": moment, "key_id": key_id}
    rendered = _PLACE.sub(lambda match: values[match[1]], params["template"])
    fields = [(slot.name.lower(), rendered) for slot in definition.slots[:1]]
    fields += [(slot.name.lower(), key_id) for slot in definition.slots if slot.where == "header" and key_id]
    if "timestamp_header" in params:
        fields.append((params["timestamp_header"], moment))
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=tuple(fields),
        forms=tuple(dict.fromkeys((secret, key, signature.encode("ascii"), digest))),
    )


def _text(template: str, request: Outgoing, moment: str, key_id: str) -> bytes:
    """What is signed. Values go in as they are: nothing that they hold is read as a template again."""
    made: list[bytes] = []
    end = 0
    for match in _PLACE.finditer(template):
        made += [template[end : match.start()].encode(), _value(match[1], request, moment, key_id)]
        end = match.end()
    return b"".join((*made, template[end:].encode()))


def _value(name: str, request: Outgoing, moment: str, key_id: str) -> bytes:
    match name:
        case "method":
            return request.method.encode("ascii")
        case "path":
            return request.path.encode("ascii")
        case "query":
            return request.query.encode("ascii")
        case "target":
            return request.target.encode("ascii")
        case "host":
            return request.authority.encode("ascii")
        case "timestamp":
            return moment.encode("ascii")
        case "key_id":
            return key_id.encode("ascii")
    body = request.body
    if body is None:
        if request.has_body:
            raise KindFault("kind-body-unseen", "the body streams, and its signature would need all of it")
        body = b""
    match name:
        case "body":
            return body
        case "body_sha256":
            return hashlib.sha256(body).hexdigest().encode("ascii")
        case "body_sha256_base64":
            return base64.b64encode(hashlib.sha256(body).digest())
        case "body_md5_base64":
            return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest())
        case _:
            raise KindFault("kind-request-form", "the text to sign names something that there is not")


def _moment(clock: str, now: float) -> str:
    at = datetime.fromtimestamp(int(now), UTC)
    match clock:
        case "unix-ms":
            return str(int(now * 1000))
        case "iso8601":
            return at.strftime("%Y-%m-%dT%H:%M:%SZ")
        case "http":
            return format_datetime(at, usegmt=True)
        case _:
            return str(int(now))


def _key(secret: bytes, encoding: str) -> bytes:
    try:
        match encoding:
            case "hex":
                return binascii.unhexlify(secret)
            case "base64":
                return base64.b64decode(secret, validate=True)
            case _:
                return secret
    except binascii.Error:
        raise KindFault("kind-secret-form", "the key is not written as the credential says") from None


def _coded(digest: bytes, encoding: str) -> str:
    match encoding:
        case "base64":
            return base64.b64encode(digest).decode("ascii")
        case "base64url":
            return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")
        case _:
            return digest.hex()
