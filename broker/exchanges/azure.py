"""`azure`: an access token of a Microsoft Entra application, by client credentials.

    kind: azure
    tenant: 00000000-0000-0000-0000-000000000000
    secret: {client_id: "env:AZURE_CLIENT_ID", client_secret: "store:azure/app"}
    scope: "https://management.azure.com/.default"

Instead of a client_secret the application may prove itself with `certificate` and `private_key`: a JWT that names the
certificate by its SHA-256 (`x5t#S256`). Source: learn.microsoft.com, "Microsoft identity platform and the OAuth 2.0
client credentials flow" and "application authentication certificate credentials".
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from broker.exchanges.base import (
    FORM,
    JSON,
    AskEndpoint,
    ExchangeError,
    Obtained,
    Plan,
    Wish,
    endpoint,
    expand_all,
    life_of,
    read_json,
    text_of,
    token_of,
)
from broker.exchanges.oauth2 import ASSERTION_SECONDS, encode
from broker.exchanges.signing import base64url, load_key, sign
from broker.vault.secret import Secret
from rules.credential_kinds import VALUE
from rules.facts import Sandbox
from rules.policy import CredentialDef

AUTHORITY = "https://login.microsoftonline.com"
SCOPE = "https://management.azure.com/.default"


class Azure:
    """See the module."""

    def plan(self, definition: CredentialDef, sandbox: Sandbox) -> Plan:
        params = definition.params
        destination, base = endpoint(params.get("authority", AUTHORITY))
        target = f"{base.rstrip('/')}/{params['tenant']}/oauth2/v2.0/token"
        return Plan(
            destination=destination, target=target, asks={"scope": expand_all(params.get("scope", SCOPE), sandbox)}
        )

    async def obtain(self, plan: Plan, parts: Mapping[str, Secret], ask: AskEndpoint, now: float) -> Obtained:
        client = text_of(parts, "client_id")
        form = {"grant_type": "client_credentials", "client_id": client, "scope": plan.asks["scope"]}
        if "client_secret" in parts:
            form["client_secret"] = text_of(parts, "client_secret")
        else:
            form["client_assertion_type"] = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
            form["client_assertion"] = _assertion(plan, parts, client, now)
        answer = read_json(await ask(plan, Wish(headers=(FORM, JSON), body=encode(form))))
        kind = answer.get("token_type")
        if not isinstance(kind, str) or kind.lower() != "bearer":
            raise ExchangeError("exchange-answer", "the token endpoint gave a token that is not a bearer token")
        return Obtained(parts={VALUE: token_of(answer, "access_token")}, lasts=life_of(answer))


def _assertion(plan: Plan, parts: Mapping[str, Secret], client: str, now: float) -> str:
    try:
        certificate = x509.load_pem_x509_certificate(text_of(parts, "certificate").replace("\\n", "\n").encode())
    except ValueError:
        raise ExchangeError("exchange-material", "the certificate is not PEM") from None
    claims = {
        "iss": client,
        "sub": client,
        "aud": plan.url,
        "jti": secrets.token_hex(16),
        "nbf": int(now) - 30,
        "iat": int(now),
        "exp": int(now) + ASSERTION_SECONDS,
    }
    named = {"x5t#S256": base64url(certificate.fingerprint(hashes.SHA256()))}
    return sign(load_key(text_of(parts, "private_key")), claims, named)
