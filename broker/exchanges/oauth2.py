"""`oauth2`: an access token from a token endpoint (RFC 6749), by one of four grants.

    kind: oauth2
    token_url: https://login.example.com/oauth/token
    grant: client_credentials            # or refresh_token, jwt_bearer (RFC 7523), token_exchange (RFC 8693)
    secret: {client_id: "env:CLIENT_ID", client_secret: "store:crm/client-secret"}
    scopes: [crm.read]

How the client proves itself follows from its parts unless `client_auth:` says it: `basic` with a client_secret
(RFC 6749 section 2.3.1), `post` in the form, `private_key_jwt` with a private_key (RFC 7523 section 2.2), `none`.
A refresh token that the endpoint replaces comes back in `Obtained.rotated`.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_plus, urlencode

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
from broker.exchanges.signing import load_key, sign
from broker.vault.secret import Secret
from rules.credential_kinds import VALUE
from rules.facts import Sandbox
from rules.policy import CredentialDef

ASSERTION_SECONDS = 120
"""How long a signed assertion of ours counts. Servers accept minutes; replay is bounded by `jti` and this."""
GRANTS = {
    "client_credentials": "client_credentials",
    "refresh_token": "refresh_token",
    "jwt_bearer": "urn:ietf:params:oauth:grant-type:jwt-bearer",
    "token_exchange": "urn:ietf:params:oauth:grant-type:token-exchange",
}
_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105 - a name (RFC 8693 section 3)


class OAuth2:
    """See the module."""

    def plan(self, definition: CredentialDef, sandbox: Sandbox) -> Plan:
        params = definition.params
        destination, target = endpoint(params["token_url"])
        asks = {key: expand_all(value, sandbox) for key, value in params.items() if key not in ("token_url", "stub")}
        rotates = "refresh_token" if params["grant"] == "refresh_token" else ""
        return Plan(destination=destination, target=target, asks=asks, rotates=rotates)

    async def obtain(self, plan: Plan, parts: Mapping[str, Secret], ask: AskEndpoint, now: float) -> Obtained:
        asks = plan.asks
        form: dict[str, Any] = {"grant_type": GRANTS[asks["grant"]]}
        if asks.get("scopes"):
            form["scope"] = " ".join(asks["scopes"])
        for key in ("audience", "resource"):
            if key in asks and asks["grant"] != "jwt_bearer":
                form[key] = asks[key]
        form |= _grant(plan, parts, now)
        headers = [FORM, JSON, *_client(plan, parts, form, now)]
        answer = read_json(await ask(plan, Wish(headers=tuple(headers), body=encode(form))))
        kind = answer.get("token_type")
        if not isinstance(kind, str) or kind.lower() != "bearer":
            raise ExchangeError("exchange-answer", "the token endpoint gave a token that is not a bearer token")
        rotated: dict[str, bytes] = {}
        if plan.rotates and "refresh_token" in answer:
            fresh = token_of(answer, "refresh_token")
            if fresh != text_of(parts, "refresh_token").encode():
                rotated["refresh_token"] = fresh
        return Obtained(parts={VALUE: token_of(answer, "access_token")}, lasts=life_of(answer), rotated=rotated)


def encode(form: Mapping[str, Any]) -> bytes:
    """application/x-www-form-urlencoded."""
    return urlencode(form).encode("ascii")


def assertion(pem: str, claims: Mapping[str, Any], now: float, *, key_id: str = "") -> str:
    """A signed assertion of a client (RFC 7523 section 3): `claims`, made now, good for two minutes, once."""
    times = {"iat": int(now), "nbf": int(now) - 30, "exp": int(now) + ASSERTION_SECONDS, "jti": secrets.token_hex(16)}
    return sign(load_key(pem), {**claims, **times}, {"kid": key_id} if key_id else None)


def _grant(plan: Plan, parts: Mapping[str, Secret], now: float) -> dict[str, Any]:
    asks = plan.asks
    match asks["grant"]:
        case "refresh_token":
            return {"refresh_token": text_of(parts, "refresh_token")}
        case "jwt_bearer":
            issuer = asks.get("issuer") or text_of(parts, "client_id")
            claims = {"iss": issuer, "sub": asks.get("subject", issuer), "aud": asks.get("audience", plan.url)}
            if asks.get("scopes"):
                claims["scope"] = " ".join(asks["scopes"])
            key_id = asks.get("key_id", "")
            return {"assertion": assertion(text_of(parts, "private_key"), claims, now, key_id=key_id)}
        case "token_exchange":
            form = {
                "subject_token": text_of(parts, "subject_token"),
                "subject_token_type": asks.get("subject_token_type", _ACCESS_TOKEN),
                "requested_token_type": asks.get("requested_token_type", _ACCESS_TOKEN),
            }
            if "actor_token" in parts:
                form["actor_token"] = text_of(parts, "actor_token")
                form["actor_token_type"] = asks.get("actor_token_type", _ACCESS_TOKEN)
            return form
        case _:
            return {}


def client_auth(asks: Mapping[str, Any], parts: Mapping[str, Secret]) -> str:
    """How the client proves itself: as written, else by what it has."""
    if "client_auth" in asks:
        return str(asks["client_auth"])
    if "client_secret" in parts:
        return "basic"
    return "private_key_jwt" if "private_key" in parts and asks["grant"] != "jwt_bearer" else "none"


def _client(plan: Plan, parts: Mapping[str, Secret], form: dict[str, Any], now: float) -> tuple[tuple[str, str], ...]:
    """Put the client's proof into `form`, or return the header that it is."""
    asks = plan.asks
    match client_auth(asks, parts):
        case "basic":
            pair = f"{quote_plus(text_of(parts, 'client_id'))}:{quote_plus(text_of(parts, 'client_secret'))}"
            return (("Authorization", "Basic " + base64.b64encode(pair.encode("ascii")).decode("ascii")),)
        case "post":
            form["client_id"] = text_of(parts, "client_id")
            form["client_secret"] = text_of(parts, "client_secret")
        case "private_key_jwt":
            client = text_of(parts, "client_id")
            claims = {"iss": client, "sub": client, "aud": plan.url}
            form["client_id"] = client
            form["client_assertion_type"] = _ASSERTION_TYPE
            form["client_assertion"] = assertion(
                text_of(parts, "private_key"), claims, now, key_id=asks.get("key_id", "")
            )
        case _:
            if "client_id" in parts:
                form["client_id"] = text_of(parts, "client_id")
    return ()
