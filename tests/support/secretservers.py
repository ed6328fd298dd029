"""Secret managers on loopback that speak their documented protocols, and a bench that asks each through the product.

Each takes only what its documentation asks for (tokens, signatures checked by botocore, JWTs by PyJWT), quotes what it
was sent when it refuses, as real ones may, and can be told to refuse, to fail or to answer nonsense.
"""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote

from broker.sources.base import Document
from broker.sources.registry import Sources
from net.addresses import AddressTable
from net.client import HttpClient
from net.contexts import ClientContexts
from net.resolve import Lookups
from rules.names import Host
from rules.policy import DestinationDef
from tests.support.origins import Exchange, Origin
from tests.support.resolver import StaticResolver
from tests.support.secretsources import all_sources, definitions, sandbox
from tests.support.tokenservers import GoogleServer, account_file, answer_json, rsa_key, signature_of

HOST = "secrets.test"


@dataclass
class SecretServer:
    """What all have in common: `values` are fields by path, `how` says what goes wrong."""

    origin: Origin
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    how: str = ""
    """"": as documented; refuse, fault, redirect, nonsense, empty, cut."""
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origin.on("/*", self.handle)

    def put(self, path: str, **fields: str) -> None:
        self.values[path] = fields
        self.versions[path] = self.versions.get(path, 0) + 1

    def remove(self, path: str) -> None:
        del self.values[path]

    async def handle(self, exchange: Exchange) -> None:
        self.asked.append(f"{exchange.request.method} {exchange.request.target}")
        match self.how:
            case "fault":
                await self.say(exchange, 503)
            case "redirect":
                await exchange.answer(307, b"", (("Location", f"https://{HOST}:1/elsewhere"),))
            case "nonsense":
                await exchange.answer(200, b"<html>" + repr(self.values).encode())
            case "empty":
                await answer_json(exchange, 200, {"data": None, "canary": self.values})
            case "cut":
                exchange.abort()
            case _:
                await self.serve(exchange)

    async def say(self, exchange: Exchange, status: int) -> None:
        """A refusal that quotes the request's head, and what it asks for."""
        quoted = exchange.request.raw_head.decode() + repr(self.values)
        await answer_json(exchange, status, {"errors": [quoted], "message": quoted})

    async def serve(self, exchange: Exchange) -> None:
        raise NotImplementedError


class Spoken(Protocol):
    """One protocol as the contract suite sees it."""

    server: SecretServer

    def text(self) -> str:
        """The entry `s:` under `sources:`."""
        ...

    def environment(self) -> Mapping[str, str]: ...

    def reference(self, path: str, name: str) -> str: ...


@dataclass
class VaultServer(SecretServer):
    """KV 2 at kv/, KV 1 at old/, AppRole, Kubernetes, leases at db/creds/."""

    role: tuple[str, str] = ("role-1", "secret-id-canary-0123")
    jwt: str = "jwt-canary-0123456789"
    namespace: str = ""
    tokens: dict[str, str] = field(default_factory=lambda: {"root-canary-0123456789": "root"})
    """token -> who."""
    life: int = 3600
    renewable: bool = True
    leases: dict[str, str] = field(default_factory=dict)
    """lease id -> password, of those that live."""
    lease_seconds: int = 600
    renewals: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    greatest: bool = False
    """A renewal gives no more time: the lease is at its greatest age."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = itertools.count(1)

    async def serve(self, exchange: Exchange) -> None:
        request = exchange.request
        raw = bytes(await exchange.read_body()) or b"{}"
        body: dict[str, Any] = json.loads(raw)
        path, _, query = request.target.partition("?")
        words = path.removeprefix("/v1/")
        if self.namespace and request.header("x-vault-namespace") != self.namespace:
            await self.say(exchange, 404)
        elif request.header("x-vault-request") != "true":
            await self.say(exchange, 400)
        elif words == "auth/approle/login" and request.method == "POST":
            await self.login(exchange, (body.get("role_id"), body.get("secret_id")) == self.role)
        elif words == "auth/kubernetes/login" and request.method == "POST":
            await self.login(exchange, (body.get("role"), body.get("jwt")) == ("exeat", self.jwt))
        elif self.how == "refuse" or request.header("x-vault-token") not in self.tokens:
            await self.say(exchange, 403)
        elif words == "auth/token/renew-self":
            self.renewals.append("self")
            await self.answer_auth(exchange, request.header("x-vault-token") or "")
        elif words == "auth/token/revoke-self":
            del self.tokens[request.header("x-vault-token") or ""]
            self.revoked.append("self")
            await exchange.answer(204, b"")
        elif words.startswith("sys/leases/"):
            await self.lease(exchange, words.rpartition("/")[2], body["lease_id"])
        elif words.startswith("db/creds/"):
            await self.make(exchange, words)
        elif words.startswith(("kv/data/", "old/")):
            await self.secret(exchange, unquote(words), dict(parse_qsl(query)))
        else:
            await self.say(exchange, 404)

    async def login(self, exchange: Exchange, known: bool) -> None:
        if not known:
            await self.say(exchange, 400)
            return
        token = f"login-{next(self._numbers)}-canary-0123456789"
        self.tokens[token] = "login"
        await self.answer_auth(exchange, token)

    async def answer_auth(self, exchange: Exchange, token: str) -> None:
        auth = {"client_token": token, "lease_duration": self.life, "renewable": self.renewable}
        await answer_json(exchange, 200, {"auth": auth})

    async def secret(self, exchange: Exchange, words: str, query: dict[str, str]) -> None:
        second = words.startswith("kv/data/")
        path = words.removeprefix("kv/data/") if second else words.removeprefix("old/")
        number = self.versions.get(path, 0)
        if path not in self.values or query.get("version", str(number)) != str(number):
            await self.say(exchange, 404)
        elif second:
            await answer_json(exchange, 200, {"data": {"data": self.values[path], "metadata": {"version": number}}})
        else:
            await answer_json(exchange, 200, {"data": self.values[path], "lease_duration": 2764800})

    async def make(self, exchange: Exchange, words: str) -> None:
        if words.removeprefix("db/creds/") not in self.values:
            await self.say(exchange, 404)
            return
        lease = f"{words}/{next(self._numbers)}"
        self.leases[lease] = f"made-password-{lease.rpartition('/')[2]}-canary"
        data = {"username": "v-made", "password": self.leases[lease]}
        answer = {"lease_id": lease, "lease_duration": self.lease_seconds, "renewable": True, "data": data}
        await answer_json(exchange, 200, answer)

    async def lease(self, exchange: Exchange, verb: str, lease: str) -> None:
        if lease not in self.leases:
            await self.say(exchange, 400)
        elif verb == "revoke":
            del self.leases[lease]
            self.revoked.append(lease)
            await exchange.answer(204, b"")
        else:
            self.renewals.append(lease)
            left = 1 if self.greatest else self.lease_seconds
            await answer_json(exchange, 200, {"lease_id": lease, "lease_duration": left, "renewable": True})


class SpokenVault:
    """KV version 2, opened by an AppRole."""

    def __init__(self, origin: Origin) -> None:
        self.server = VaultServer(origin)

    def text(self) -> str:
        auth = "{approle: {role_id: 'env:R', secret_id: 'env:S'}}"
        return f"s: {{kind: vault, address: 'https://{HOST}', auth: {auth}}}"

    def environment(self) -> Mapping[str, str]:
        return {"R": self.server.role[0], "S": self.server.role[1]}

    def reference(self, path: str, name: str) -> str:
        return f"s:kv/{path}#{name}"


class SpokenOldVault(SpokenVault):
    """KV version 1, opened by a token, in a namespace, below a path of the operator's own proxy."""

    def text(self) -> str:
        self.server.namespace = "team/a"
        more = "namespace: team/a, kv: {old: 1}, auth: {token: 'env:T'}"
        return f"s: {{kind: vault, address: 'https://{HOST}', {more}}}"

    def environment(self) -> Mapping[str, str]:
        return {"T": "root-canary-0123456789"}

    def reference(self, path: str, name: str) -> str:
        return f"s:old/{path}#{name}"


@dataclass
class AwsServer(SecretServer):
    """Secrets Manager and Parameter Store in one; every signature is made again by botocore."""

    key: tuple[str, str, str | None] = ("AKIAEXAMPLE", "aws-secret-canary-0123456789", "session-canary-0123")
    service: str = "secretsmanager"

    async def serve(self, exchange: Exchange) -> None:
        request = exchange.request
        raw = bytes(await exchange.read_body())
        sent = ("host", "content-type", "x-amz-target", "x-amz-security-token")
        headers = {name: value for name in sent if (value := request.header(name)) is not None}
        url = f"https://{request.header('host')}{request.target}"
        wanted = signature_of(
            "POST", url, headers, raw, self.key, (self.service, "eu-central-1"), request.header("x-amz-date") or ""
        )
        if request.header("authorization") != wanted:
            await self.error(exchange, "InvalidSignatureException")
        elif self.how == "refuse":
            await self.error(exchange, "AccessDeniedException")
        elif request.header("x-amz-target") == "secretsmanager.GetSecretValue" and self.service == "secretsmanager":
            await self.secret(exchange, json.loads(raw))
        elif request.header("x-amz-target") == "AmazonSSM.GetParameter" and self.service == "ssm":
            await self.parameter(exchange, json.loads(raw))
        else:
            await self.error(exchange, "UnknownOperationException")

    async def error(self, exchange: Exchange, word: str) -> None:
        quoted = exchange.request.raw_head.decode() + repr(self.values)
        await answer_json(exchange, 400, {"__type": f"com.amazonaws.x#{word}", "message": quoted})

    async def secret(self, exchange: Exchange, body: dict[str, Any]) -> None:
        path = body["SecretId"]
        if path not in self.values or body.get("VersionStage", "AWSCURRENT") != "AWSCURRENT":
            await self.error(exchange, "ResourceNotFoundException")
            return
        text = json.dumps(self.values[path])
        await answer_json(exchange, 200, {"SecretString": text, "VersionId": f"v-{self.versions[path]}", "Name": path})

    async def parameter(self, exchange: Exchange, body: dict[str, Any]) -> None:
        path, _, version = body["Name"].partition(":")
        if body.get("WithDecryption") is not True or path not in self.values:
            await self.error(exchange, "ParameterNotFound")
            return
        if version and version != str(self.versions[path]):
            await self.error(exchange, "ParameterVersionNotFound")
            return
        value = {"Name": path, "Value": json.dumps(self.values[path]), "Version": self.versions[path]}
        await answer_json(exchange, 200, {"Parameter": value})


class SpokenSecretsManager:
    """With temporary keys, so that the session's token is signed too."""

    kind, service = "aws-secrets-manager", "secretsmanager"

    def __init__(self, origin: Origin) -> None:
        self.server = AwsServer(origin, service=self.service)

    def text(self) -> str:
        keys = "{access_key_id: 'env:K', secret_access_key: 'env:S', session_token: 'env:T'}"
        return f"s: {{kind: {self.kind}, region: eu-central-1, address: 'https://{HOST}', auth: {{keys: {keys}}}}}"

    def environment(self) -> Mapping[str, str]:
        key, secret, token = self.server.key
        return {"K": key, "S": secret, "T": token or ""}

    def reference(self, path: str, name: str) -> str:
        return f"s:{path}#{name}"


class SpokenParameterStore(SpokenSecretsManager):
    kind, service = "aws-parameter-store", "ssm"


@dataclass
class GcpServer(SecretServer):
    """projects.secrets.versions.access; tokens of GoogleServer."""

    google: GoogleServer | None = None

    async def serve(self, exchange: Exchange) -> None:
        assert self.google is not None
        request = exchange.request
        token = (request.header("authorization") or "").removeprefix("Bearer ")
        if token not in self.google.given:
            await self.say(exchange, 401)
            return
        if self.how == "refuse":
            await self.say(exchange, 403)
            return
        steps = request.target.removesuffix(":access").split("/")
        path, version = steps[5], steps[7]
        asked = request.target.endswith(":access") and steps[:4] == ["", "v1", "projects", "shop"]
        if not asked or path not in self.values or version not in ("latest", str(self.versions[path])):
            await self.say(exchange, 404)
        else:
            data = base64.b64encode(json.dumps(self.values[path]).encode()).decode()
            name = f"projects/123/secrets/{path}/versions/{self.versions[path]}"
            await answer_json(exchange, 200, {"name": name, "payload": {"data": data, "dataCrc32c": "1"}})


class SpokenGcp:
    """Opened by a service account's key."""

    def __init__(self, origin: Origin) -> None:
        key = rsa_key()
        self.server = GcpServer(origin)
        self.server.google = GoogleServer(origin, key)
        self._account = account_file(key)

    def text(self) -> str:
        place = f"https://{HOST}"
        return (
            f"s: {{kind: gcp-secret-manager, project: shop, address: '{place}', login: '{place}', "
            "auth: {service_account: 'env:A'}}"
        )

    def environment(self) -> Mapping[str, str]:
        return {"A": self._account}

    def reference(self, path: str, name: str) -> str:
        return f"s:{path}#{name}"


@dataclass
class AzureServer(SecretServer):
    """Get Secret, and the token endpoint of one tenant."""

    client: tuple[str, str] = ("client-1", "azure-secret-canary/0123+456")
    given: list[str] = field(default_factory=list)

    async def serve(self, exchange: Exchange) -> None:
        request = exchange.request
        path, _, query = request.target.partition("?")
        if path == "/tenant-1/oauth2/v2.0/token":
            form = dict(parse_qsl((await exchange.read_body()).decode()))
            known = (form.get("client_id"), form.get("client_secret")) == self.client
            if not known or form.get("scope") != "https://vault.azure.net/.default":
                await answer_json(exchange, 401, {"error": "invalid_client", "error_description": repr(form)})
                return
            self.given.append(f"eyJ-token-{len(self.given)}-canary-0123")
            answer = {"access_token": self.given[-1], "token_type": "Bearer", "expires_in": 3599}
            await answer_json(exchange, 200, answer)
            return
        token = (request.header("authorization") or "").removeprefix("Bearer ")
        if token not in self.given:
            await self.say(exchange, 401)
            return
        if self.how == "refuse":
            await self.say(exchange, 403)
            return
        name, _, version = path.removeprefix("/secrets/").partition("/")
        if query != "api-version=7.4" or name not in self.values or version not in ("", f"{self.versions[name]:032x}"):
            await self.say(exchange, 404)
            return
        where = f"https://{HOST}/secrets/{name}/{self.versions[name]:032x}"
        await answer_json(exchange, 200, {"value": json.dumps(self.values[name]), "id": where})


class SpokenAzure:
    """Opened by an application's client secret."""

    def __init__(self, origin: Origin) -> None:
        self.server = AzureServer(origin)

    def text(self) -> str:
        place = f"https://{HOST}"
        client = "{tenant: tenant-1, client_id: client-1, client_secret: 'env:C'}"
        return f"s: {{kind: azure-key-vault, address: '{place}', login: '{place}', auth: {{client: {client}}}}}"

    def environment(self) -> Mapping[str, str]:
        return {"C": self.server.client[1]}

    def reference(self, path: str, name: str) -> str:
        return f"s:{path}#{name}"


PROTOCOLS: dict[str, type[Spoken]] = {
    "vault": SpokenVault,
    "vault-kv1": SpokenOldVault,
    "aws-secrets-manager": SpokenSecretsManager,
    "aws-parameter-store": SpokenParameterStore,
    "gcp-secret-manager": SpokenGcp,
    "azure-key-vault": SpokenAzure,
}


class Asking:
    """One protocol, asked as the vault asks it: real TLS to loopback, addresses only by the operator's word."""

    def __init__(self, folder: Path, origin: Origin, spoken: Spoken, *, text: str = "", ca_pem: str = "") -> None:
        self.spoken, self.server = spoken, spoken.server
        self.boot = 1000.0
        client = HttpClient(
            Lookups(StaticResolver({HOST: ["127.0.0.1"]}), clock=lambda: self.boot),
            ClientContexts(),
            AddressTable,
            interfaces=frozenset,
            seconds=20.0,
        )
        self.places = {
            HOST: DestinationDef(
                host=Host.of(HOST),
                port=origin.port,
                addresses=(ip_network("127.0.0.1/32"),),
                ca_pem=ca_pem or origin.ca_pem,
            )
        }
        self.written = text or spoken.text()
        self.sources: Sources = all_sources(
            folder,
            spoken.environment(),
            ask=client.ask,
            now=time.time,
            boot=lambda: self.boot,
        )

    async def start(self) -> Asking:
        await self.sources.configure(definitions(self.written, self.places), self.places)
        return self

    async def document(self, reference: str, before: Document | None = None) -> Document:
        opened, place = self.sources.named(reference, sandbox())
        return await opened.source.read(place.document, before)

    async def value(self, path: str, name: str = "token") -> bytes:
        reference = self.spoken.reference(path, name)
        _, place = self.sources.named(reference, sandbox())
        return (await self.document(reference)).value(place.field, reference)
