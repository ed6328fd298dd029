"""Key services on loopback: the documented encrypt and decrypt of each, on top of its vendor's secret server.

What they wrap is kept in a table, bound to key name and purpose as the service binds it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.sources.registry import Sources
from broker.vault.wrapping import Wrapping
from net.addresses import AddressTable
from net.client import HttpClient
from net.contexts import ClientContexts
from net.resolve import Lookups
from rules.reader import Node, Problems
from rules.wrapping_keys import read_wrapping_key
from tests.support.origins import Exchange, Origin
from tests.support.resolver import StaticResolver
from tests.support.secretservers import (
    HOST,
    AwsServer,
    AzureServer,
    GcpServer,
    SpokenAzure,
    SpokenGcp,
    SpokenSecretsManager,
    SpokenVault,
    VaultServer,
)
from tests.support.tokenservers import answer_json

GCP_KEY = "projects/p/locations/eu/keyRings/r/cryptoKeys/exeat"
PURPOSE = "exeat-store-key"


@dataclass
class Safe:
    """ciphertext -> (key name, plaintext)."""

    held: dict[str, tuple[str, str]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    answer: str = ""
    """What is given back instead of the plaintext, where set."""
    how: str = ""
    """"refuse", "slow", "html", "short": what goes wrong from now on."""

    def wrap(self, key: str, plain: str, prefix: str = "") -> str:
        text = prefix + base64.b64encode(f"ciphertext-{next(self.numbers):08d}".encode()).decode().rstrip("=")
        self.held[text] = (key, plain)
        return text

    def unwrap(self, key: str, text: str) -> str | None:
        name, plain = self.held.get(text, ("", ""))
        return (self.answer or plain) if name == key else None

    async def wrong(self, exchange: Exchange) -> bool:
        """Whether this answered already."""
        match self.how:
            case "slow":
                await asyncio.Event().wait()
            case "html":
                await exchange.answer(200, b"<html>" + repr(self.held).encode())
            case "refuse":
                await answer_json(exchange, 403, {"errors": [repr(self.held)], "__type": "AccessDeniedException"})
            case _:
                return False
        return True


class Transit(VaultServer):
    """transit/encrypt and transit/decrypt of one key, `exeat`."""

    async def secret(self, exchange: Exchange, words: str, query: dict[str, str]) -> None:
        raise NotImplementedError

    async def serve(self, exchange: Exchange) -> None:
        request = exchange.request
        if "/transit/" not in request.target:
            await super().serve(exchange)
            return
        body = json.loads(await exchange.read_body())
        verb, name = request.target.removeprefix("/v1/transit/").split("/")
        if request.header("x-vault-token") not in self.tokens:
            await self.say(exchange, 403)
        elif await self.safe.wrong(exchange):
            return
        elif verb == "encrypt" and name == "exeat":
            data = {"ciphertext": self.safe.wrap(name, body["plaintext"], "vault:v1:"), "key_version": 1}
            await answer_json(exchange, 200, {"data": data})
        elif (plain := self.safe.unwrap(name, body.get("ciphertext", ""))) is not None:
            await answer_json(exchange, 200, {"data": {"plaintext": plain}})
        else:
            await self.say(exchange, 400)

    safe: Safe


class Kms(AwsServer):
    """TrentService.Encrypt and .Decrypt of `alias/exeat`; signatures are checked by the parent."""

    safe: Safe

    async def secret(self, exchange: Exchange, body: dict[str, Any]) -> None:
        raise NotImplementedError

    async def error(self, exchange: Exchange, word: str) -> None:
        target = exchange.request.header("x-amz-target") or ""
        if word != "UnknownOperationException" or not target.startswith("TrentService."):
            await super().error(exchange, word)
            return
        body = json.loads(self.raw)
        if await self.safe.wrong(exchange):
            return
        if body["KeyId"] != "alias/exeat":
            await super().error(exchange, "NotFoundException")
        elif body["EncryptionContext"] != {"purpose": PURPOSE}:
            await super().error(exchange, "InvalidCiphertextException")
        elif target.endswith("Encrypt"):
            blob = self.safe.wrap(body["KeyId"], body["Plaintext"])
            await answer_json(exchange, 200, {"CiphertextBlob": blob, "KeyId": "arn:aws:kms:x"})
        elif (plain := self.safe.unwrap(body["KeyId"], body["CiphertextBlob"])) is not None:
            await answer_json(exchange, 200, {"Plaintext": plain, "KeyId": "arn:aws:kms:x"})
        else:
            await super().error(exchange, "InvalidCiphertextException")

    raw: bytes = b""

    async def serve(self, exchange: Exchange) -> None:
        self.raw = bytes(await exchange.read_body())

        async def again() -> bytes:
            return self.raw

        exchange.read_body = again  # type: ignore[method-assign,assignment]  # read once, checked twice
        await super().serve(exchange)


class CloudKms(GcpServer):
    safe: Safe

    async def serve(self, exchange: Exchange) -> None:
        assert self.google is not None
        request = exchange.request
        body = json.loads(await exchange.read_body())
        name, _, verb = request.target.removeprefix("/v1/").partition(":")
        bound = base64.b64decode(body["additionalAuthenticatedData"]).decode() == PURPOSE
        if (request.header("authorization") or "").removeprefix("Bearer ") not in self.google.given:
            await self.say(exchange, 401)
        elif await self.safe.wrong(exchange):
            return
        elif name != GCP_KEY or not bound:
            await self.say(exchange, 404)
        elif verb == "encrypt":
            found = {"name": f"{name}/cryptoKeyVersions/1", "ciphertext": self.safe.wrap(name, body["plaintext"])}
            await answer_json(exchange, 200, found)
        elif (plain := self.safe.unwrap(name, body["ciphertext"])) is not None:
            await answer_json(exchange, 200, {"plaintext": plain})
        else:
            await self.say(exchange, 400)


class AzureKeys(AzureServer):
    safe: Safe

    async def serve(self, exchange: Exchange) -> None:
        request = exchange.request
        path, _, query = request.target.partition("?")
        if not path.startswith("/keys/"):
            await super().serve(exchange)
            return
        body = json.loads(await exchange.read_body())
        _, _, name, *version, verb = path.split("/")
        at = "0" * 31 + "1"
        if (request.header("authorization") or "").removeprefix("Bearer ") not in self.given:
            await self.say(exchange, 401)
        elif await self.safe.wrong(exchange):
            return
        elif name != "exeat" or query != "api-version=7.4" or body["alg"] != "RSA-OAEP-256":
            await self.say(exchange, 404)
        elif verb == "wrapkey":
            value = self.safe.wrap(name, body["value"])
            await answer_json(exchange, 200, {"kid": f"https://{HOST}/keys/exeat/{at}", "value": value})
        elif version == [at] and (plain := self.safe.unwrap(name, body["value"])) is not None:
            await answer_json(exchange, 200, {"kid": f"https://{HOST}/keys/exeat/{at}", "value": plain})
        else:
            await self.say(exchange, 400)


KINDS = ("vault-transit", "aws-kms", "gcp-kms", "azure-key-vault")


class KeyServer:
    """One service, and Wrappings that ask it as the vault does: real TLS to loopback."""

    def __init__(self, kind: str, origin: Origin) -> None:
        self.kind, self.origin, self.safe = kind, origin, Safe()
        spoken: Any = {
            "vault-transit": SpokenVault,
            "aws-kms": SpokenSecretsManager,
            "gcp-kms": SpokenGcp,
            "azure-key-vault": SpokenAzure,
        }[kind](origin)
        made: Any = {"vault-transit": Transit, "aws-kms": Kms, "gcp-kms": CloudKms, "azure-key-vault": AzureKeys}[kind]
        spoken.server.__class__ = made
        spoken.server.safe = self.safe
        if kind == "aws-kms":
            spoken.server.service = "kms"
        self.environment: Mapping[str, str] = spoken.environment()
        written = spoken.text().removeprefix("s: ")
        node = Node.load(f"by: {written}", "x", Problems())
        key = {"aws-kms": "alias/exeat", "gcp-kms": GCP_KEY}.get(kind, "exeat")
        self.by: dict[str, Any] = {**node.value["by"], "kind": kind, "key": key}
        self.by.pop("project", None)
        self.by["destinations"] = {HOST: {"addresses": ["127.0.0.1/32"], "port": origin.port, "ca": "file:ca.pem"}}

    def wrapping(self, *, seconds: float = 20.0, ca_pem: str = "", **changes: object) -> Wrapping:
        problems = Problems()
        node = Node.load(json.dumps({**self.by, **changes}), "by:", problems)
        parsed = read_wrapping_key(node, lambda path: ca_pem or self.origin.ca_pem)
        assert not problems.errors, problems.errors
        client = HttpClient(
            Lookups(StaticResolver({HOST: ["127.0.0.1"]}), clock=time.monotonic),
            ClientContexts(),
            AddressTable,
            interfaces=frozenset,
            seconds=seconds,
        )
        sources = Sources(
            store=None,
            environment=self.environment,
            version_key=b"v" * 32,
            ask=client.ask,
            now=time.time,
            boot=time.monotonic,
        )
        return Wrapping(parsed, sources)
