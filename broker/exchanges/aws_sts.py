"""`aws-sts`: the temporary keys of a role, for one sandbox, by AssumeRole.

    kind: aws-sts
    secret: {access_key_id: "env:AKID", secret_access_key: "store:aws/key"}
    role_arn: "arn:aws:iam::123456789012:role/agents"
    regions: [eu-central-1]
    services: [s3]
    session_policy: {Version: "2012-10-17", Statement: [{Effect: Allow, Action: "s3:GetObject",
                     Resource: "arn:aws:s3:::data/${sandbox.owner}/*"}]}

The session's name is made from the sandbox's id, so that the provider's own log says who it was, and the keys end with
the sandbox. The question is signed (Signature Version 4) with the stored keys; what comes back is applied as `sigv4`.
Source: AWS STS API Reference, AssumeRole. The answer is XML without a document type: one that brings one is refused,
so that no entity is ever expanded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any, Final
from xml.parsers import expat

from broker.credentials.base import Headers, Outgoing
from broker.credentials.sigv4 import Signing, sign
from broker.exchanges.base import (
    FORM,
    AskEndpoint,
    ExchangeError,
    Obtained,
    Plan,
    Wish,
    bounded_life,
    check_now,
    endpoint,
    expand,
    text_of,
)
from broker.exchanges.oauth2 import encode
from broker.vault.secret import Secret
from net.client import Answer
from rules.facts import Sandbox
from rules.policy import CredentialDef

SECONDS: Final = 3600
"""AWS's default, and the most where a role is assumed from another role's session."""
MAX_POLICY: Final = 2048
"""Characters of a session policy (AssumeRole)."""
MAX_DEPTH: Final = 8
MAX_ELEMENTS: Final = 200

_SESSION = re.compile(r"[A-Za-z0-9_=,.@-]{2,64}\Z")
_PARTS: Final = {
    "AccessKeyId": "access_key_id",
    "SecretAccessKey": "secret_access_key",
    "SessionToken": "session_token",
}
_PLAIN: Final = re.compile(rb"[\x21-\x7e]{12,16384}\Z")
_CREDENTIALS: Final = ("AssumeRoleResponse", "AssumeRoleResult", "Credentials")
_REFUSALS: Final[Mapping[str, str]] = {
    "AccessDenied": "this key may not assume the role",
    "ExpiredToken": "the stored session is over",
    "ExpiredTokenException": "the stored session is over",
    "InvalidClientTokenId": "it does not know this key",
    "SignatureDoesNotMatch": "the secret key is not the one of this key id",
    "MalformedPolicyDocument": "the session policy is malformed",
    "PackedPolicyTooLarge": "the session policy is too large",
    "RegionDisabledException": "STS is not active in this region",
    "ValidationError": "it does not accept the request",
}


class AwsSts:
    """See the module."""

    def plan(self, definition: CredentialDef, sandbox: Sandbox) -> Plan:
        params = definition.params
        region = params["regions"][0]
        destination, target = endpoint(params.get("sts_url", f"https://sts.{region}.amazonaws.com/"))
        session = "exeat-" + sandbox.id
        if not _SESSION.match(session):
            raise ExchangeError("exchange-material", "the sandbox's id cannot name a session")
        form: dict[str, Any] = {
            "Action": "AssumeRole",
            "Version": "2011-06-15",
            "RoleArn": params["role_arn"],
            "RoleSessionName": session,
            "DurationSeconds": str(params.get("duration", SECONDS)),
        }
        if "external_id" in params:
            form["ExternalId"] = params["external_id"]
        if "session_policy" in params:
            form["Policy"] = expand(params["session_policy"], sandbox)
            if len(form["Policy"]) > MAX_POLICY:
                raise ExchangeError("exchange-material", f"the session policy is longer than {MAX_POLICY} characters")
        return Plan(destination=destination, target=target, asks={"region": region, **form}, own=True)

    async def obtain(self, plan: Plan, parts: Mapping[str, Secret], ask: AskEndpoint, now: float) -> Obtained:
        form = {name: value for name, value in plan.asks.items() if name != "region"}
        body = encode(form)
        signed = _signed(plan, parts, body, now)
        answer = await ask(plan, Wish(headers=signed, body=body))
        if answer.status != 200:
            check_now(answer)
            code = _read(answer).get(("ErrorResponse", "Error", "Code"), "")
            said = f": {code}: {_REFUSALS[code]}" if code in _REFUSALS else ""
            raise ExchangeError("exchange-refused", f"STS answered {answer.status}{said}")
        found = _read(answer)
        values = {part: found.get((*_CREDENTIALS, name), "").encode() for name, part in _PARTS.items()}
        if any(not _PLAIN.match(value) for value in values.values()):
            raise ExchangeError("exchange-answer", "STS gave no keys that can be signed with")
        return Obtained(parts=values, lasts=_life(found.get((*_CREDENTIALS, "Expiration"), ""), now))


def _signed(plan: Plan, parts: Mapping[str, Secret], body: bytes, now: float) -> Headers:
    """The headers of the question, signed by the same code that signs a sandbox's requests."""
    signing = Signing(
        key_id=text_of(parts, "access_key_id"),
        secret=text_of(parts, "secret_access_key").encode(),
        region=plan.asks["region"],
        service="sts",
        at=now,
        token=text_of(parts, "session_token") if "session_token" in parts else "",
    )
    form = (FORM[0].lower(), FORM[1])
    request = Outgoing(
        method="POST", authority=plan.destination.authority, target=plan.target, headers=(form,), body=body
    )
    fields, _ = sign(signing, request, sha256(body).hexdigest(), show_payload=False)
    return (form, *fields)


def _life(text: str, now: float) -> float:
    try:
        ends = datetime.fromisoformat(text) if len(text) <= 40 else None
    except ValueError:
        ends = None
    if ends is None or ends.tzinfo is None:
        raise ExchangeError("exchange-answer", "STS gave no keys: Expiration is not a time")
    return bounded_life(ends.timestamp() - now)


class _Reader:
    """Path of element names -> text, of a document without document type, entities and attributes that matter."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, ...], str] = {}
        self._path: list[str] = []
        self._elements = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        self._path.append(name.rpartition(" ")[2])
        if len(self._path) > MAX_DEPTH or self._elements > MAX_ELEMENTS:
            raise ValueError("too much of it")
        if self.found.setdefault(tuple(self._path), ""):
            raise ValueError("an element that stands there twice")

    def end(self, name: str) -> None:
        path = tuple(self._path)
        self.found[path] = self.found[path].strip()
        self._path.pop()

    def text(self, data: str) -> None:
        if self._path:
            self.found[tuple(self._path)] += data

    def refuse(self, *what: object) -> None:
        raise ValueError("a document type")


def _read(answer: Answer) -> Mapping[tuple[str, ...], str]:
    """The texts of a small XML document. Raises ExchangeError(`exchange-answer`). Linear in its bounded length."""
    reader = _Reader()
    parser = expat.ParserCreate("UTF-8", " ")  # namespace, blank, name: the reader drops the former
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.EntityDeclHandler = reader.refuse
    try:
        parser.Parse(answer.body, True)
    except (expat.ExpatError, ValueError):
        raise ExchangeError("exchange-answer", "STS gave no keys: its answer is not plain XML") from None
    return reader.found
