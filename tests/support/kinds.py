"""One sample for each way in which a credential is applied: its definition, its parts with canaries, and a request.

Definitions are made as credentials.yaml makes them: from a kind's own keys. What a kind promises of each canary (where
it stands in the request, and in which spelling) is in `Sample.seen`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.credentials import ClientCertificate, Injection, Outgoing, inject
from broker.credentials import apply as apply_kind
from broker.vault.secret import Secret
from rules.credential_kinds import is_public
from rules.credential_slots import read_form
from rules.exchanges import is_exchange, read_exchange
from rules.names import CredentialRef, Host
from rules.placeholders import make
from rules.policy import CredentialDef, PlaceholderSpec

NOW = 1_440_938_160.0
"""2015-08-30T12:36:00Z, the hour of AWS's own examples."""
CANARY = b"canary-0123456789+/="
OTHER = b"canary-abcdefghij+/="
SEED = base64.b32encode(b"canary-seed-12345678")
PLACEHOLDER = make("sk_{24}", bytes(range(32)))
KEY_ID = make("AKIA{16:caps}", bytes(range(32)))
PEM = b"-----BEGIN PRIVATE KEY-----\nY2FuYXJ5LTAxMjM0NTY3ODkwMTIzNDU2Nzg5\n-----END PRIVATE KEY-----\n"
CHAIN = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
FOREIGN = (
    ("authorization", "Bearer mine"),
    ("cookie", "session=mine"),
    ("x-api-key", "mine"),
    ("private-token", "mine"),
    ("accept", "application/json"),
)


def definition(
    kind: str,
    written: Mapping[str, Any] | None = None,
    *,
    username: str | None = None,
    shapes: Mapping[str, str] | None = None,
) -> CredentialDef:
    """A credential `c` of `kind` whose own keys are `written`. Its leading part has the shape `sk_{24}`."""
    form = read_exchange(kind, written or {}) if is_exchange(kind) else read_form(kind, written or {})
    lead = form.slots[0]
    named = shapes or {lead.part: "sk_{24}"}
    specs = {part: PlaceholderSpec(env=f"C_{part.upper()}", shape=shape) for part, shape in named.items()}
    return CredentialDef(
        name=CredentialRef("c"),
        kind=kind,
        slot=lead,
        hosts=(Host("a.example"),),
        owner="o",
        placeholder=specs.pop(lead.part, PlaceholderSpec(env="", shape="")),
        username=username,
        params=form.params,
        more_slots=form.slots[1:],
        more_placeholders=tuple(specs.items()),
    )


def outgoing(target: str = "/", headers: tuple[tuple[str, str], ...] = (), **rest: Any) -> Outgoing:
    values: dict[str, Any] = {"method": "GET", "authority": "a.example", "now": NOW, "sent": headers, **rest}
    return Outgoing(target=target, headers=headers, **values)


def secrets(values: Mapping[str, bytes]) -> dict[str, Secret]:
    return {name: Secret(value, name="c", scrub=False) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Sample:
    definition: CredentialDef
    parts: Mapping[str, bytes] = field(default_factory=lambda: {"value": CANARY})
    request: Outgoing = field(default_factory=outgoing)
    seen: Mapping[str, bytes] = field(default_factory=dict)
    """part -> its spelling in the request, exactly once. A part that is not here is nowhere in it."""
    at: str = "header"
    """header, target, body or connection."""

    def apply(self, request: Outgoing | None = None, **parts: bytes) -> Injection:
        held = secrets({**self.parts, **parts})
        return apply_kind(self.definition, held, self.request if request is None else request)

    @property
    def hidden(self) -> dict[str, bytes]:
        """The parts that nobody may see."""
        return {name: value for name, value in self.parts.items() if not is_public(self.definition.kind, name)}


def text_of(request: Outgoing, certificate: ClientCertificate | None = None) -> bytes:
    """Everything that leaves: line, headers, body."""
    lines = [f"{request.method} {request.target}", *(f"{name}: {value}" for name, value in request.headers)]
    return "\n".join(lines).encode() + b"\n\n" + (request.body or b"")


def sent(sample: Sample, request: Outgoing | None = None) -> Outgoing:
    return inject(sample.request if request is None else request, sample.apply(request))


_JSON = json.dumps({"auth": {"token": PLACEHOLDER}, "n": 1}).encode()
_AWS = {"access_key_id": b"AKIDEXAMPLE", "secret_access_key": CANARY, "session_token": OTHER}

SAMPLES: dict[str, Sample] = {
    "bearer": Sample(definition=definition("bearer"), seen={"value": b"Bearer " + CANARY}),
    "basic": Sample(
        definition=definition("basic", username="robot"),
        seen={"value": base64.b64encode(b"robot:" + CANARY)},
    ),
    "header": Sample(
        definition=definition("header", {"header": "X-Api-Key", "template": "key={value}"}),
        seen={"value": b"x-api-key: key=" + CANARY},
    ),
    "oauth2": Sample(
        definition=definition("oauth2", {"token_url": "https://t.example/x", "grant": "client_credentials"}),
        seen={"value": b"authorization: Bearer " + CANARY},
    ),
    "oauth2 in a header": Sample(
        definition=definition(
            "oauth2",
            {
                "token_url": "https://t.example/x",
                "grant": "refresh_token",
                "header": "X-Session",
                "template": "v2 {value}",
            },
        ),
        seen={"value": b"x-session: v2 " + CANARY},
    ),
    "query": Sample(
        definition=definition("query", {"query": "api_key"}),
        seen={"value": b"api_key=canary-0123456789%2B%2F%3D"},
        at="target",
    ),
    "headers": Sample(
        definition=definition(
            "headers",
            {"headers": {"DD-API-KEY": "{api_key}", "DD-APPLICATION-KEY": "app {application_key}"}},
        ),
        parts={"api_key": CANARY, "application_key": OTHER},
        seen={"api_key": b"dd-api-key: " + CANARY, "application_key": b"dd-application-key: app " + OTHER},
    ),
    "cookie": Sample(
        definition=definition("cookie", {"cookie": {"sid": "{sid}", "csrf": "{csrf}"}}),
        parts={"sid": CANARY, "csrf": OTHER},
        seen={"sid": b"cookie: sid=" + CANARY + b"; csrf=" + OTHER, "csrf": OTHER},
    ),
    "path": Sample(
        definition=definition("path", {"path": ["/bot{value}/**", "/file/bot{value}/**"]}),
        request=outgoing(f"/bot{PLACEHOLDER}/getMe?a=1"),
        seen={"value": b"/botcanary-0123456789%2B%2F%3D/getMe?a=1"},
        at="target",
    ),
    "body": Sample(
        definition=definition("body", {"field": "json:auth.token"}),
        request=outgoing(method="POST", body=_JSON, has_body=True),
        seen={"value": b'{"auth": {"token": "' + CANARY + b'"}, "n": 1}'},
        at="body",
    ),
    "subprotocol": Sample(
        definition=definition("subprotocol", {"subprotocol": "key.", "encoding": "base64url"}),
        request=outgoing(
            headers=(
                (
                    "sec-websocket-protocol",
                    f"chat, key.{base64.urlsafe_b64encode(PLACEHOLDER.encode()).decode().rstrip('=')}",
                ),
            )
        ),
        seen={"value": b"chat, key." + base64.urlsafe_b64encode(CANARY).rstrip(b"=")},
    ),
    "sigv4": Sample(
        definition=definition(
            "sigv4",
            {"regions": ["us-east-1"], "aws_services": ["service"]},
            shapes={"access_key_id": "AKIA{16:caps}", "session_token": "{100}"},
        ),
        parts=_AWS,
        seen={"access_key_id": b"Credential=AKIDEXAMPLE/20150830/us-east-1/service/", "session_token": OTHER},
    ),
    "hmac": Sample(
        definition=definition(
            "hmac",
            {
                "header": "X-Signature",
                "sign": "{timestamp}.{method}.{target}",
                "template": "v1={signature}",
                "timestamp_header": "X-Timestamp",
                "key_id_header": "X-Key",
            },
            shapes={"key_id": "key_{24}"},
        ),
        parts={"value": CANARY, "key_id": b"key-of-ours"},
        seen={"key_id": b"x-key: key-of-ours"},
    ),
    "totp": Sample(definition=definition("totp", {"header": "X-OTP"}), parts={"value": SEED}),
    "mtls": Sample(definition=definition("mtls", shapes={}), parts={"certificate": CHAIN, "key": PEM}, at="connection"),
}
