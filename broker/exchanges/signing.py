"""JSON Web Tokens that we sign (RFC 7515, 7518, 7519): RS256 and ES256, with a stored private key, for minutes.

Signing only, so that `cryptography`, which is here anyway, is all it takes: what JOSE libraries are for (choosing
among algorithms, checking somebody else's tokens) does not happen here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from broker.exchanges.base import ExchangeError

MIN_RSA_BITS = 2048
"""RFC 7518 section 3.3."""

SigningKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


def load_key(pem: str) -> SigningKey:
    r"""An RSA (2048 bits or more) or P-256 private key, unencrypted PEM. Raises ExchangeError(`exchange-material`).

    `\n` written as two characters counts as a line end: so keys stand in JSON files and in variables.
    """
    try:
        key = load_pem_private_key(pem.replace("\\n", "\n").encode("ascii"), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _unusable("it is no unencrypted PEM") from None
    match key:
        case rsa.RSAPrivateKey() if key.key_size >= MIN_RSA_BITS:
            return key
        case ec.EllipticCurvePrivateKey() if isinstance(key.curve, ec.SECP256R1):
            return key
    raise _unusable(f"it is neither RSA of {MIN_RSA_BITS} bits or more nor P-256")


def sign(key: SigningKey, claims: Mapping[str, Any], header: Mapping[str, Any] | None = None) -> str:
    """A signed token in compact form. `header` adds fields such as `kid` and `x5t#S256`."""
    algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
    signed = f"{_part({**(header or {}), 'alg': algorithm, 'typ': 'JWT'})}.{_part(claims)}"
    match key:
        case rsa.RSAPrivateKey():
            signature = key.sign(signed.encode("ascii"), padding.PKCS1v15(), hashes.SHA256())
        case ec.EllipticCurvePrivateKey():
            r, s = decode_dss_signature(key.sign(signed.encode("ascii"), ec.ECDSA(hashes.SHA256())))
            signature = r.to_bytes(32, "big") + s.to_bytes(32, "big")  # RFC 7518 section 3.4
    return f"{signed}.{base64url(signature)}"


def base64url(data: bytes) -> str:
    """Without padding (RFC 7515 section 2)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _part(value: Mapping[str, Any]) -> str:
    return base64url(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())


def _unusable(why: str) -> ExchangeError:
    return ExchangeError("exchange-material", f"the private key cannot be used: {why}", "store the key as it was given")
