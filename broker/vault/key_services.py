"""What each key service is asked: its own words around one ciphertext of 32 bytes. What they share is in wrapping.py.

 vault-transit    POST /v1/MOUNT/encrypt|decrypt/NAME        HashiCorp Vault and OpenBao, "Transit secrets engine (API)"
 aws-kms          TrentService.Encrypt, .Decrypt             AWS Key Management Service API Reference, JSON 1.1
 gcp-kms          POST /v1/NAME:encrypt, :decrypt            Cloud KMS API v1, projects.locations.keyRings.cryptoKeys
 azure-key-vault  POST /keys/NAME[/VERSION]/wrapkey, unwrapkey  Azure Key Vault REST API 7.4, RSA-OAEP-256

Connections, signatures and tokens are those of the sources of the same vendors (broker/sources).
"""

from __future__ import annotations

import base64
import binascii
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from broker.errors import BrokerError
from broker.sources.aws import AwsServer
from broker.sources.base import SourceError
from broker.sources.clouds import API_VERSION, CloudServer
from broker.sources.network import check_status, object_of
from broker.sources.registry import Sources
from broker.sources.vault import VaultServer
from net.client import Answer
from rules.wrapping_keys import WrappingKey

PURPOSE: Final = "exeat-store-key"
"""Bound to the ciphertext where the service can: what it wrapped for something else is not unwrapped for us."""
_CIPHERTEXT: Final = re.compile(r"[A-Za-z0-9+/=:_-]{16,8192}\Z")
_VERSION: Final = re.compile(r"[0-9a-f]{1,64}\Z")
_VAULT_NO: Final = "see that the key's name and mount: are right, that it wrapped this file, and permit update on {0}"
_GCP_NO: Final = "give the service account Cloud KMS CryptoKey Encrypter/Decrypter; see that this key wrapped the file"
_AZURE_NO: Final = "permit wrapKey and unwrapKey to the application; see that this key wrapped the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A ciphertext, and the version of the service's key where the service does not write that into it."""

    ciphertext: str = field(repr=False)
    version: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for what no service of ours writes."""
        if not _CIPHERTEXT.match(self.ciphertext) or (self.version and not _VERSION.match(self.version)):
            raise ValueError("no wrapped key")


class KeyService(Protocol):
    """One key of one service. Both raise BrokerError (SourceError mostly), which holds nothing of what was sent."""

    async def wrap(self, key: bytes) -> Wrapped: ...

    async def unwrap(self, wrapped: Wrapped) -> bytes:
        """What the service says that is inside; its length is the caller's to check."""
        ...

    async def close(self) -> None:
        """Give back what the service gave us to ask with."""
        ...


def key_service(wrapping: WrappingKey, sources: Sources) -> KeyService:
    """A fresh connection to the service that `wrapping` names. `sources` gives what it is opened with."""
    source, places = wrapping.source, wrapping.destinations
    match source.kind:
        case "vault-transit":
            return _Transit(wrapping, sources.vault_server(source, places))
        case "aws-kms":
            return _AwsKms(wrapping, sources.aws_server(source, places, "kms"))
        case "gcp-kms":
            return _GcpKms(wrapping, sources.cloud_server(source, places, "gcp"))
        case "azure-key-vault":
            return _AzureKeyVault(wrapping, sources.cloud_server(source, places, "azure"))
        case kind:
            raise BrokerError("key-provider", f"there is no kind {kind}")


class _Service[Server]:
    """One key of one service. Most give nothing to give back."""

    def __init__(self, wrapping: WrappingKey, server: Server) -> None:
        self._wrapping = wrapping
        self._server = server

    async def close(self) -> None:
        return None


class _Encrypting[Server](_Service[Server], ABC):
    """Services that encrypt and decrypt by the names `plaintext` and `ciphertext`."""

    async def wrap(self, key: bytes) -> Wrapped:
        return _wrapped(await self._ask("encrypt", {"plaintext": _text(key)}), "ciphertext", self._wrapping.label)

    async def unwrap(self, wrapped: Wrapped) -> bytes:
        found = await self._ask("decrypt", {"ciphertext": wrapped.ciphertext})
        return _plain(found, "plaintext", self._wrapping.label)

    @abstractmethod
    async def _ask(self, verb: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the service answers to `verb`."""


class _Transit(_Encrypting[VaultServer]):
    async def close(self) -> None:
        await self._server.close()

    async def _ask(self, verb: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        what, path = self._wrapping.label, f"{self._wrapping.mount}/{verb}/{self._wrapping.key}"
        answer = await self._server.ask("POST", f"/v1/{path}", what, body)
        data = _object(answer, what, _VAULT_NO.format(path)).get("data")
        return data if isinstance(data, dict) else {}


class _AwsKms(_Service[AwsServer]):
    async def wrap(self, key: bytes) -> Wrapped:
        found = await self._ask("Encrypt", {"Plaintext": _text(key)})
        return _wrapped(found, "CiphertextBlob", self._wrapping.label)

    async def unwrap(self, wrapped: Wrapped) -> bytes:
        found = await self._ask("Decrypt", {"CiphertextBlob": wrapped.ciphertext})
        return _plain(found, "Plaintext", self._wrapping.label)

    async def _ask(self, action: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        bound = {"KeyId": self._wrapping.key, "EncryptionContext": {"purpose": PURPOSE}, **body}
        return await self._server.ask(action, bound, self._wrapping.label)


class _GcpKms(_Encrypting[CloudServer]):
    async def _ask(self, verb: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        what = self._wrapping.label
        bound = {"additionalAuthenticatedData": _text(PURPOSE.encode()), **body}
        return _object(await self._server.post(f"/v1/{self._wrapping.key}:{verb}", what, bound), what, _GCP_NO)


class _AzureKeyVault(_Service[CloudServer]):
    """RSA keys know no purpose, and a ciphertext does not say which version of the key made it: we note that."""

    async def wrap(self, key: bytes) -> Wrapped:
        what = self._wrapping.label
        found = await self._ask("wrapkey", "", base64.urlsafe_b64encode(key).decode().rstrip("="))
        version = str(found.get("kid", "")).rpartition("/")[2]
        if not _VERSION.match(version):
            raise SourceError("source-unreadable", f"{what}: the answer does not say which version wrapped")
        return _wrapped(found, "value", what, version)

    async def unwrap(self, wrapped: Wrapped) -> bytes:
        found = await self._ask("unwrapkey", wrapped.version, wrapped.ciphertext)
        value = found.get("value")
        if isinstance(value, str):
            found = {"value": value.replace("-", "+").replace("_", "/") + "=" * (-len(value) % 4)}
        return _plain(found, "value", self._wrapping.label)

    async def _ask(self, verb: str, version: str, value: str) -> Mapping[str, Any]:
        what = self._wrapping.label
        middle = f"{self._wrapping.key}/{version}" if version else self._wrapping.key
        target = f"/keys/{middle}/{verb}?api-version={API_VERSION}"
        answer = await self._server.post(target, what, {"alg": "RSA-OAEP-256", "value": value})
        return _object(answer, what, _AZURE_NO)


def _object(answer: Answer, what: str, refused: str) -> Mapping[str, Any]:
    check_status(answer, what, refused=refused, missing=f"see the key's name and address: in exeat.yaml; {refused}")
    return object_of(answer, what)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _wrapped(found: Mapping[str, Any], name: str, what: str, version: str = "") -> Wrapped:
    try:
        return Wrapped(ciphertext=str(found.get(name, "")), version=version)
    except ValueError:
        raise SourceError("source-unreadable", f"{what}: the answer holds no ciphertext") from None


def _plain(found: Mapping[str, Any], name: str, what: str) -> bytes:
    """The decoder's own error would carry the text, so it is not kept as a cause either."""
    raw = None
    text = found.get(name)
    if isinstance(text, str):
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raw = None
    if raw is None:
        raise SourceError("source-unreadable", f"{what}: the answer holds no key")
    return raw
