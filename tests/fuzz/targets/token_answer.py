"""Answers of token endpoints: a token that may stand in a request, for a bounded time, or a fixed refusal.

The first byte picks the kind of credential, the second the status; the rest is the body.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from broker.exchanges import EXCHANGES, ExchangeError, Plan
from broker.exchanges.base import MAX_LIFE, Wish
from broker.vault.secret import MIN_SECRET_BYTES, Secret
from exeat.google_account import throw_away_account
from net.client import Answer
from rules.exchanges import read_exchange
from rules.facts import Sandbox
from rules.names import CredentialRef, Host
from rules.policy import CredentialDef, PlaceholderSpec

WORDS = (
    b'{"access_token":"', b'"token_type":"Bearer"', b'"expires_in":', b'"token":"', b'"expires_at":"', b'"id_token":"',
    b"<Credentials>", b"</Credentials>", b"<AccessKeyId>", b"<!DOCTYPE a>", b"<![CDATA[", b"&lt;", b"&#10;", b"\\n",
    b"\\u000a", b"1e9", b"2027-01-15T09:00:00Z", b'"error":"invalid_grant"',
)  # fmt: skip
MAX_BYTES = 2048

_NOW = 1_800_000_000.0
_BOX = Sandbox(tenant="t", id="sb_a", epoch=1, role="r", owner="o", agent="a", task="t")
_ROLE = "arn:aws:iam::123456789012:role/r"
_KINDS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("oauth2", {"token_url": "https://t.test/x", "grant": "refresh_token"}),
    ("github-app", {"app_id": "1", "installation_id": "2", "permissions": {"contents": "read"}}),
    ("aws-sts", {"role_arn": _ROLE, "regions": ["eu-central-1"], "aws_services": ["s3"]}),
    ("google", {"audience": "https://run.test"}),
    ("azure", {"tenant": "t"}),
)
_STATUSES = (200, 201, 302, 400, 403, 503)
_SENDABLE = re.compile(rb"[\x21-\x7e]+\Z")


def check(data: bytes) -> bool:
    """See above."""
    if len(data) < 2:
        return False
    kind, _ = _KINDS[data[0] % len(_KINDS)]
    status = _STATUSES[data[1] % len(_STATUSES)]
    media = ("content-type", "application/json")

    async def ask(plan: Plan, wish: Wish) -> Answer:
        return Answer(status=status, headers=(media,), body=data[2:])

    exchange, definition = EXCHANGES[kind], _definition(kind)
    try:
        got = asyncio.run(exchange.obtain(exchange.plan(definition, _BOX), _parts(), ask, _NOW))
    except ExchangeError as error:
        assert error.code in ("exchange-refused", "exchange-answer", "exchange-unreachable")
        return False
    assert 0 < got.lasts <= MAX_LIFE
    for value in (*got.parts.values(), *got.rotated.values()):
        assert len(value) >= MIN_SECRET_BYTES
        assert _SENDABLE.match(value)
    return True


@functools.cache
def _definition(kind: str) -> CredentialDef:
    form = read_exchange(kind, dict(_KINDS)[kind])
    return CredentialDef(
        name=CredentialRef("c"),
        kind=kind,
        slot=form.slots[0],
        hosts=(Host("api.test"),),
        owner="o",
        placeholder=PlaceholderSpec(env="C", shape="t_{24}"),
        params=form.params,
    )


@functools.cache
def _parts() -> Mapping[str, Secret]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    values = {
        "client_id": b"client-0123456789",
        "client_secret": b"secret-0123456789",
        "refresh_token": b"refresh-0123456789",
        "private_key": pem,
        "access_key_id": b"AKIAEXAMPLE000000000",
        "secret_access_key": b"secret-0123456789",
        "value": throw_away_account("https://t.test/x").encode(),
    }
    return {part: Secret(value, name=part) for part, value in values.items()}
