"""`google`: a service account's access token for scopes, or its ID token for an audience.

    kind: google
    secret: "file:/run/secrets/service-account.json"      # the key file as Google gives it
    scopes: ["https://www.googleapis.com/auth/devstorage.read_only"]
    audience: "https://my-service-abc.a.run.app"           # instead of scopes: an ID token

The key signs a JWT whose audience is the token endpoint, and the endpoint gives a token for it (RFC 7523). The
endpoint is `token_url:`, Google's own by default; the `token_uri` inside the key file is not read, because a stored
secret does not say where secrets go. Source: "Using OAuth 2.0 for Server to Server Applications" (Google Identity).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from broker.exchanges.base import (
    FORM,
    JSON,
    AskEndpoint,
    ExchangeError,
    Obtained,
    Plan,
    Wish,
    bounded_life,
    endpoint,
    expand_all,
    life_of,
    read_json,
    text_of,
    token_of,
)
from broker.exchanges.oauth2 import GRANTS, encode
from broker.exchanges.signing import load_key, sign
from broker.vault.secret import Secret
from rules.credential_kinds import VALUE
from rules.facts import Sandbox
from rules.operations.strict_json import InvalidJson, load
from rules.policy import CredentialDef

TOKEN_URL = "https://oauth2.googleapis.com/token"  # noqa: S105 - an address
JWT_SECONDS = 3600
"""Google's longest."""


class Google:
    """See the module."""

    def plan(self, definition: CredentialDef, sandbox: Sandbox) -> Plan:
        params = definition.params
        destination, target = endpoint(params.get("token_url", TOKEN_URL))
        asks = {key: expand_all(params[key], sandbox) for key in ("scopes", "audience", "subject") if key in params}
        return Plan(destination=destination, target=target, asks=asks)

    async def obtain(self, plan: Plan, parts: Mapping[str, Secret], ask: AskEndpoint, now: float) -> Obtained:
        account = _account(text_of(parts, VALUE))
        claims: dict[str, Any] = {
            "iss": account["client_email"],
            "aud": plan.url,
            "iat": int(now),
            "exp": int(now) + JWT_SECONDS,
        }
        identity = "audience" in plan.asks
        if identity:
            claims["target_audience"] = plan.asks["audience"]
        else:
            claims["scope"] = " ".join(plan.asks["scopes"])
        if "subject" in plan.asks:
            claims["sub"] = plan.asks["subject"]
        signed = sign(load_key(account["private_key"]), claims, {"kid": account["private_key_id"]})
        form = encode({"grant_type": GRANTS["jwt_bearer"], "assertion": signed})
        answer = read_json(await ask(plan, Wish(headers=(FORM, JSON), body=form)))
        if identity:
            token = token_of(answer, "id_token")
            return Obtained(parts={VALUE: token}, lasts=bounded_life(_ends(token) - now))
        return Obtained(parts={VALUE: token_of(answer, "access_token")}, lasts=life_of(answer))


def _account(text: str) -> Mapping[str, str]:
    """The three fields of a key file that are read. Raises ExchangeError(`exchange-material`)."""
    try:
        found = load(text.encode(), depth=2, nodes=100)
    except InvalidJson:
        found = None
    fields = ("client_email", "private_key", "private_key_id")
    if not isinstance(found, dict) or found.get("type") != "service_account":
        raise ExchangeError("exchange-material", "the secret is no service account key file", "store the JSON file")
    if any(not isinstance(found.get(name), str) or not found[name] for name in fields):
        raise ExchangeError("exchange-material", "the service account key file is not whole", "store the JSON file")
    return {name: found[name] for name in fields}


def _ends(token: bytes) -> float:
    """The `exp` of an ID token. Nobody here relies on its signature: it says how long we keep it, within bounds."""
    try:
        payload = token.split(b".")[1]
        claims = load(base64.urlsafe_b64decode(payload + b"=" * (-len(payload) % 4)), depth=4, nodes=200)
        ends = claims["exp"]
    except (IndexError, binascii.Error, ValueError, KeyError, TypeError):  # InvalidJson is a ValueError
        ends = None
    if isinstance(ends, bool) or not isinstance(ends, int | float):
        raise ExchangeError("exchange-answer", "the token endpoint gave no token: the ID token has no exp")
    return float(ends)
