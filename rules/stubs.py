"""Stub endpoints: where an SDK "logs in" and is given this sandbox's own placeholders (decision 15).

    stub: [oauth2-token]      POST to the credential's token endpoint            access_token: the placeholder
    stub: [google-token]      the same for a service account's assertion         access_token, or id_token
    stub: [gce-metadata]      metadata.google.internal and 169.254.169.254       the same
    stub: [ec2-metadata]      169.254.169.254, IMDSv2                            keys whose names are placeholders
    stub: [ecs-metadata]      169.254.170.2/exeat/CREDENTIAL                     the same

Nothing here is forwarded, resolved or dialled, and nothing that the client sends is read but method, path and two
headers. The answers are constants but for the placeholders, which are worth something only on this sandbox's own
channel. Placeholders of such a credential are derived (`seed`) instead of drawn, so that who answers needs not be told
them: from a key of this installation and the sandbox's id. Pure.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

from rules.exchanges import stubs_of, token_endpoint
from rules.facts import RequestFacts, Sandbox
from rules.names import Destination, Host
from rules.placeholders import make
from rules.policy import CredentialDef, Policy

LIFE_SECONDS: Final = 3600
"""What is said of a placeholder's life: SDKs ask again some minutes before."""
LINK_LOCAL: Final = "169.254.169.254"
CONTAINER: Final = "169.254.170.2"
GCE_NAME: Final = "metadata.google.internal"
SESSION_SECONDS: Final = 21600
MAX_BODY: Final = 64 * 1024
"""Bytes of a token request that are read, and dropped."""

_EC2_KEYS: Final = "/latest/meta-data/iam/security-credentials/"
_GCE: Final = "/computeMetadata/v1/"
_ACCOUNT: Final = _GCE + "instance/service-accounts/"
_SECRET: Final = "placeholder-of-a-secret-access-key-000000"  # noqa: S105 - worth nothing, and needed by no one
_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    """One stub endpoint of one credential."""

    kind: str
    credential: CredentialDef


@dataclass(frozen=True, slots=True, kw_only=True)
class StubAnswer:
    """What the endpoint says. `body` holds at most this sandbox's own placeholders."""

    stub: Stub
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def seed(key: bytes, sandbox: Sandbox, name: str) -> bytes:
    """The 64 bytes that a derived placeholder is made of. `name`: CredentialDef.placeholder_name of its part."""
    whose = json.dumps([sandbox.tenant, sandbox.id, sandbox.epoch, name]).encode()
    return hmac.digest(key, b"exeat stub placeholder\x00" + whose, "sha512")


def is_derived(definition: CredentialDef) -> bool:
    """Whether the placeholders of a credential are derived."""
    return bool(stubs_of(definition.params))


def leads_to_stub(policy: Policy, names: Mapping[str, bytes], host: Host, port: int) -> bool:
    """Whether a connection to `host` may exist because a stub of the sandbox is there. `names`: its placeholders."""
    return any(place.host == host and place.port == port for stub in _stubs(policy, names) for place in _places(stub))


def has_stub(policy: Policy, names: Mapping[str, bytes], host: Host) -> bool:
    """Whether a stub of the sandbox is at `host`, at whatever port: its name then exists where `dns: strict` says."""
    return any(place.host == host for stub in _stubs(policy, names) for place in _places(stub))


def find_stub(policy: Policy, names: Mapping[str, bytes], facts: RequestFacts) -> tuple[Stub, ...]:
    """The stubs that a request is for: () where it goes its ordinary way."""
    found: list[Stub] = []
    for stub in _stubs(policy, names):
        if facts.destination not in _places(stub):
            continue
        endpoint = token_endpoint(stub.credential.kind, stub.credential.params)
        if stub.kind.endswith("-metadata") or (endpoint is not None and facts.path.raw == endpoint[1]):
            found.append(stub)
    return tuple(found)


def answer(
    stubs: tuple[Stub, ...], facts: RequestFacts, sandbox: Sandbox, key: bytes, names: Mapping[str, bytes], now: float
) -> StubAnswer:
    """The answer to a request for `stubs` (at least one, all at one place). `now`: Unix seconds."""
    stub = stubs[0]
    match stub.kind:
        case "oauth2-token" | "google-token":
            return _token(stub, facts, _own(stub.credential, sandbox, key, names))
        case "ecs-metadata":
            return _ecs(stubs, facts, sandbox, key, names, now)
        case _ if (
            any(name == "metadata-flavor" for name, _ in facts.headers) or facts.destination.host.text == GCE_NAME
        ):
            gce = next((one for one in stubs if one.kind == "gce-metadata"), None)
            return _no(stub) if gce is None else _gce(gce, facts, _own(gce.credential, sandbox, key, names))
        case _:
            ec2 = tuple(one for one in stubs if one.kind == "ec2-metadata")
            return _ec2(ec2, facts, sandbox, key, names, now) if ec2 else _no(stub)


def environment(definition: CredentialDef) -> dict[str, str]:
    """The variables that lead SDKs to a credential's stubs, besides its placeholders."""
    found: dict[str, str] = {}
    for kind in stubs_of(definition.params):
        match kind:
            case "ecs-metadata":
                found["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = f"/exeat/{definition.name}"
            case "ec2-metadata":
                found["AWS_EC2_METADATA_DISABLED"] = "false"
                found["AWS_EC2_METADATA_V1_DISABLED"] = "true"
                found["AWS_METADATA_SERVICE_TIMEOUT"] = "5"  # seconds; the default of one ends on a busy machine
                found["AWS_METADATA_SERVICE_NUM_ATTEMPTS"] = "3"
            case "gce-metadata":
                found["GCE_METADATA_HOST"] = GCE_NAME
                found["GCE_METADATA_IP"] = LINK_LOCAL
    return found


def account_endpoint(definition: CredentialDef) -> str | None:
    """The token_uri of the key file that leads Google's SDKs to a credential's stub; None where it has none."""
    if "google-token" not in stubs_of(definition.params):
        return None
    found = token_endpoint(definition.kind, definition.params)
    return None if found is None else f"{found[0]}{found[1]}"


def _stubs(policy: Policy, names: Mapping[str, bytes]) -> Iterator[Stub]:
    """Of every credential that the sandbox was given a placeholder for, in order of name."""
    for name in sorted(names):
        definition = policy.credentials.get(name.partition("#")[0])  # type: ignore[call-overload]
        if definition is not None and definition.placeholder_name(definition.slot.part) == name:
            for kind in stubs_of(definition.params):
                yield Stub(kind=kind, credential=definition)


def _places(stub: Stub) -> tuple[Destination, ...]:
    match stub.kind:
        case "ec2-metadata":
            return (Destination("http", Host.of(LINK_LOCAL), 80),)
        case "gce-metadata":
            return (Destination("http", Host.of(GCE_NAME), 80), Destination("http", Host.of(LINK_LOCAL), 80))
        case "ecs-metadata":
            return (Destination("http", Host.of(CONTAINER), 80),)
        case _:
            endpoint = token_endpoint(stub.credential.kind, stub.credential.params)
            return () if endpoint is None else (endpoint[0],)


def _own(definition: CredentialDef, sandbox: Sandbox, key: bytes, names: Mapping[str, bytes]) -> Mapping[str, str]:
    """part -> placeholder, of those that this sandbox was really given: what is derived otherwise is nobody's."""
    found: dict[str, str] = {}
    for part, spec in definition.placeholders:
        name = definition.placeholder_name(part)
        if spec.shape and name in names:
            text = make(spec.shape, seed(key, sandbox, name))
            if hmac.compare_digest(sha256(text.encode()).digest(), names[name]):
                found[part] = text
    return found


def _token(stub: Stub, facts: RequestFacts, own: Mapping[str, str]) -> StubAnswer:
    """RFC 6749 section 5.1, whatever was presented."""
    token = own.get(stub.credential.slot.part)
    if facts.method != "POST":
        return _json(stub, 405, {"error": "invalid_request"}, (("allow", "POST"),))
    if token is None:
        return _json(stub, 400, {"error": "invalid_grant"})
    if stub.kind == "google-token" and "audience" in stub.credential.params:
        return _json(stub, 200, {"id_token": token})
    said: dict[str, object] = {"access_token": token, "token_type": "Bearer", "expires_in": LIFE_SECONDS}
    if stub.credential.params.get("scopes") and stub.kind == "oauth2-token":
        said["scope"] = " ".join(scope for scope in stub.credential.params["scopes"] if "${" not in scope)
    return _json(stub, 200, said)


def _ecs(
    stubs: tuple[Stub, ...], facts: RequestFacts, sandbox: Sandbox, key: bytes, names: Mapping[str, bytes], now: float
) -> StubAnswer:
    """Amazon ECS Developer Guide, "IAM roles for tasks": the relative URI says whose."""
    for stub in stubs:
        if facts.path.raw == f"/exeat/{stub.credential.name}" and facts.method == "GET":
            said = _keys(_own(stub.credential, sandbox, key, names), now)
            return _no(stub) if said is None else _json(stub, 200, said)
    return _no(stubs[0])


def _ec2(
    stubs: tuple[Stub, ...], facts: RequestFacts, sandbox: Sandbox, key: bytes, names: Mapping[str, bytes], now: float
) -> StubAnswer:
    """Amazon EC2 User Guide, "Use the Instance Metadata Service": version 2 only, with its session token."""
    path = facts.path.raw
    session = "exeat-" + seed(key, sandbox, "#imds").hex()[:40]
    if path == "/latest/api/token" and facts.method == "PUT":
        ttl = ("x-aws-ec2-metadata-token-ttl-seconds", str(SESSION_SECONDS))
        return _text(stubs[0], session, (ttl,))
    if facts.method != "GET" or facts.header("x-aws-ec2-metadata-token") != (session,):
        return StubAnswer(stub=stubs[0], status=401, content_type="text/plain", body=b"")
    if path in (_EC2_KEYS, _EC2_KEYS.rstrip("/")):
        return _text(stubs[0], "\n".join(str(stub.credential.name) for stub in stubs))
    for stub in stubs:
        if path == f"{_EC2_KEYS}{stub.credential.name}":
            said = _keys(_own(stub.credential, sandbox, key, names), now)
            more = {"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": _stamp(now)}
            return _no(stub) if said is None else _json(stub, 200, {**more, **said})
    region = next(iter(stubs[0].credential.params.get("regions", ())), "")
    if path == "/latest/meta-data/placement/region" and region:
        return _text(stubs[0], str(region))
    if path == "/latest/dynamic/instance-identity/document" and region:
        return _json(stubs[0], 200, {"region": region})
    return _no(stubs[0])


def _gce(stub: Stub, facts: RequestFacts, own: Mapping[str, str]) -> StubAnswer:
    """Google Compute Engine, "About VM metadata": one service account, `default`."""
    flavor = (("metadata-flavor", "Google"), ("server", "Metadata Server for VM"))
    path, token = facts.path.raw, own.get(stub.credential.slot.part)
    email = "default@exeat.invalid"
    if facts.method not in ("GET", "HEAD"):
        return StubAnswer(stub=stub, status=405, content_type="text/plain", body=b"", headers=flavor)
    if path == "/":
        return _text(stub, "computeMetadata/", flavor)
    if facts.header("metadata-flavor") != ("Google",):
        return StubAnswer(stub=stub, status=403, content_type="text/plain", body=b"", headers=flavor)
    for account in ("default", email):
        base = f"{_ACCOUNT}{account}/"
        if path == base + "token" and token is not None and "audience" not in stub.credential.params:
            said = {"access_token": token, "expires_in": LIFE_SECONDS - 1, "token_type": "Bearer"}
            return _json(stub, 200, said, flavor)
        if path == base + "identity" and token is not None and "audience" in stub.credential.params:
            return _text(stub, token, flavor)
        if path == base + "email":
            return _text(stub, email, flavor)
        if path == base:
            scopes = list(stub.credential.params.get("scopes", ()))
            return _json(stub, 200, {"aliases": ["default"], "email": email, "scopes": scopes}, flavor)
        if path == base + "scopes":
            return _text(stub, "\n".join(stub.credential.params.get("scopes", ())), flavor)
    if path in (_GCE + "project/project-id", _GCE + "project/numeric-project-id"):
        return _text(stub, "exeat" if path.endswith("/project-id") else "1", flavor)
    return StubAnswer(stub=stub, status=_NOT_FOUND, content_type="text/plain", body=b"", headers=flavor)


def _keys(own: Mapping[str, str], now: float) -> dict[str, object] | None:
    """Keys as both AWS services give them. The secret is never needed: we sign anew whatever a client signs."""
    if "access_key_id" not in own:
        return None
    return {
        "AccessKeyId": own["access_key_id"],
        "SecretAccessKey": own.get("secret_access_key", _SECRET),
        "Token": own.get("session_token", ""),
        "Expiration": _stamp(now + LIFE_SECONDS),
    }


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _json(
    stub: Stub, status: int, value: Mapping[str, object], headers: tuple[tuple[str, str], ...] = ()
) -> StubAnswer:
    body = json.dumps(value, separators=(",", ":")).encode()
    return StubAnswer(stub=stub, status=status, content_type="application/json", body=body, headers=headers)


def _text(stub: Stub, text: str, headers: tuple[tuple[str, str], ...] = ()) -> StubAnswer:
    return StubAnswer(stub=stub, status=200, content_type="text/plain", body=text.encode(), headers=headers)


def _no(stub: Stub) -> StubAnswer:
    return StubAnswer(stub=stub, status=_NOT_FOUND, content_type="text/plain", body=b"")
