"""`totp`: a one-time code of now in a header (RFC 6238, on RFC 4226). The seed is base32, as providers show it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

from broker.credentials.base import Injection, KindFault, Outgoing, managed_headers, managed_query, part
from broker.vault.secret import Secret
from rules.policy import CredentialDef


def apply_totp(definition: CredentialDef, parts: Mapping[str, Secret], request: Outgoing) -> Injection:
    """The code in the slot's header. Raises KindFault for a seed that is not base32."""
    seed = part(parts)
    try:
        text = seed.decode("ascii").replace(" ", "").replace("-", "").upper().rstrip("=")
        key = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, UnicodeDecodeError):
        raise KindFault("kind-secret-form", "the seed is not base32") from None
    params = definition.params
    code = totp(key, request.now, digits=params["digits"], period=params["period"], algorithm=params["algorithm"])
    return Injection(
        remove_headers=managed_headers(definition),
        remove_query=managed_query(definition),
        set_headers=((definition.slot.name.lower(), definition.slot.template.replace("{value}", code)),),
        # A code is six digits that are over in half a minute: masking it would mask any number.
        forms=tuple(dict.fromkeys((seed, text.encode("ascii")))),
    )


def totp(key: bytes, now: float, *, digits: int, period: int, algorithm: str) -> str:
    """The code of `now` (Unix seconds): RFC 6238 section 4, truncated as RFC 4226 section 5.3 says."""
    counter = int(now // period).to_bytes(8, "big")
    digest = hmac.new(key, counter, getattr(hashlib, algorithm)).digest()
    offset = digest[-1] & 0x0F
    number = int.from_bytes(digest[offset : offset + 4]) & 0x7FFFFFFF
    return str(number % 10**digits).zfill(digits)
