"""`kind: aws-secrets-manager` and `kind: aws-parameter-store`: the two places where AWS keeps secrets.

    aws:prod/github?stage=AWSPREVIOUS#token        Secrets Manager: GetSecretValue; a JSON secret has fields
    ssm:/prod/github/token?version=3               Systems Manager: GetParameter with decryption

Requests are signed by the signer that the kind `sigv4` has. Source: AWS Secrets Manager API Reference,
GetSecretValue; AWS Systems Manager API Reference, GetParameter; both speak JSON 1.1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any, Final

from broker.credentials.base import Outgoing
from broker.credentials.sigv4 import Signing, sign
from broker.sources.base import (
    Document,
    SourceError,
    Unleased,
    fields_of,
    from_base64,
    json_object,
    plain_version,
    unreachable,
)
from broker.sources.network import Network, check_status, json_body, object_of
from net.client import Answer
from rules.secret_sources import SourceDef

_MISSING: Final = frozenset(
    {"ResourceNotFoundException", "ParameterNotFound", "ParameterVersionNotFound", "NotFoundException"}
)
_LATER: Final = frozenset(
    {
        "ThrottlingException",
        "InternalServiceError",
        "InternalServerError",
        "TooManyUpdates",
        "KMSInternalException",
        "DependencyTimeoutException",
        "KeyUnavailableException",
    }
)
_REFUSALS: Final[Mapping[str, str]] = {
    "AccessDeniedException": (
        "permit it to this key: secretsmanager:GetSecretValue, ssm:GetParameter and kms:Decrypt; "
        "for the store's key kms:Encrypt and kms:Decrypt"
    ),
    "UnrecognizedClientException": "AWS does not know this access key",
    "InvalidClientTokenId": "AWS does not know this access key",
    "InvalidSignatureException": "the secret key is not the one of this access key, or this clock is wrong",
    "ExpiredTokenException": "the stored session is over; store a new one",
    "DecryptionFailure": "permit kms:Decrypt on the key that encrypts it",
    "InvalidRequestException": "it is marked for deletion; restore it",
    "InvalidParameterException": "see the name and the version",
    "ValidationException": "see the name and the version",
    # AWS Key Management Service API Reference: Decrypt and Encrypt
    "InvalidCiphertextException": "the file is damaged, or was wrapped for something else",
    "IncorrectKeyException": "another key of KMS wrapped the file; name that one",
    "DisabledException": "enable the key in KMS",
    "KMSInvalidStateException": "enable the key in KMS, or cancel its deletion",
    "InvalidKeyUsageException": "name a symmetric key for encryption",
    "InvalidGrantTokenException": "see the grants of the key",
}


class AwsServer:
    """One service of AWS in one region."""

    def __init__(
        self,
        definition: SourceDef,
        network: Network,
        key: Callable[[str], Awaitable[str]],
        now: Callable[[], float],
        *,
        service: str,
        prefix: str,
    ) -> None:
        """`service` is signed for; `prefix` stands before an action in X-Amz-Target. `now` gives Unix time."""
        self._definition = definition
        self._network = network
        self._key = key
        self._now = now
        self._service = service
        self._prefix = prefix

    async def ask(self, action: str, body: Mapping[str, Any], what: str) -> dict[str, Any]:
        """One signed question; the answer's object. Raises SourceError."""
        address = self._definition.places["address"]
        payload = json_body(body)
        token = await self._key("session_token")
        signing = Signing(
            key_id=await self._key("access_key_id"),
            secret=(await self._key("secret_access_key")).encode(),
            region=self._definition.settings["region"],
            service=self._service,
            at=self._now(),
            token=token,
        )
        headers = (("content-type", "application/x-amz-json-1.1"), ("x-amz-target", f"{self._prefix}.{action}"))
        request = Outgoing(
            method="POST",
            authority=address.destination.authority,
            target=address.base + "/",
            headers=headers,
            body=payload,
            now=signing.at,
        )
        added, _ = sign(
            signing, request, sha256(payload).hexdigest(), [name for name, _ in headers], show_payload=False
        )
        answer = await self._network.call(address, "POST", "/", what, headers=(*headers, *added), body=payload)
        _check(answer, what)
        return object_of(answer, what)


def _check(answer: Answer, what: str) -> None:
    """By the error's name, one of a closed list; else by its status. Raises SourceError unless it is a yes."""
    if answer.status == 200:
        return
    said = json_object(answer.body) or {}
    word = str(said.get("__type", "")).rpartition("#")[2]
    if word in _MISSING:
        raise SourceError("source-missing", f"{what}: {word}", "see its name, its version and the region")
    if word in _LATER:
        raise unreachable(f"{what}: {word}", "see the limits of the account")
    if word in _REFUSALS:
        raise SourceError("source-refused", f"{what}: {word}", _REFUSALS[word])
    check_status(answer, what, refused="see the permissions of the access key", missing="see address: and region:")
    raise SourceError("source-unreadable", f"{what}: answered {answer.status} without a value")


class SecretsManagerSource(Unleased):
    """A document is `name-or-arn[?version=ID|?stage=LABEL]`."""

    def __init__(self, definition: SourceDef, server: AwsServer) -> None:
        self._name = definition.name
        self._server = server

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        name, _, query = document.partition("?")
        key, _, value = query.partition("=")
        body = {"SecretId": name}
        if key:
            body["VersionId" if key == "version" else "VersionStage"] = value
        found = await self._server.ask("GetSecretValue", body, what)
        version = plain_version(found.get("VersionId"))
        text, binary = found.get("SecretString"), found.get("SecretBinary")
        if isinstance(text, str):
            return Document(fields=fields_of(text.encode("utf-8", "surrogatepass")), version=version)
        raw = from_base64(binary)
        if raw is None:
            raise SourceError("source-unreadable", f"{what}: the answer holds no value")
        return Document(fields=fields_of(raw), version=version)


class ParameterStoreSource(Unleased):
    """A document is `name[?version=N]`."""

    def __init__(self, definition: SourceDef, server: AwsServer) -> None:
        self._name = definition.name
        self._server = server

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        name, _, query = document.partition("?")
        version = query.partition("=")[2]
        body = {"Name": f"{name}:{version}" if version else name, "WithDecryption": True}
        found = (await self._server.ask("GetParameter", body, what)).get("Parameter")
        value = found.get("Value") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(value, str):
            raise SourceError("source-unreadable", f"{what}: the answer holds no value")
        fields = fields_of(value.encode("utf-8", "surrogatepass"))
        return Document(fields=fields, version=plain_version(found.get("Version")))
