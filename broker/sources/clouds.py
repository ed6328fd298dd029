"""`kind: gcp-secret-manager` and `kind: azure-key-vault`: secrets behind an access token of the cloud's own.

    gcp:github-token?version=7        Secret Manager: projects.secrets.versions.access; `latest` where none is named
    azure:github-token                Key Vault: Get Secret; the current version where none is named

The token comes from the same exchanges that the credential kinds `google` and `azure` have (broker/exchanges), is kept
for as long as it says, and is asked for anew, once, when it is refused. Source: Google Cloud, "Secret Manager API v1";
Microsoft Learn, "Azure Key Vault REST API, Get Secret", version 7.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, assert_never
from urllib.parse import quote

from broker.exchanges.azure import Azure
from broker.exchanges.base import Exchange, ExchangeError, Plan, Wish
from broker.exchanges.google import Google
from broker.sources.base import Document, SourceError, Unleased, fields_of, from_base64, plain_version, unreachable
from broker.sources.network import Network, check_status, json_body, object_of
from broker.vault.secret import Secret
from net.client import Answer
from rules.credential_kinds import VALUE
from rules.secret_sources import Address, SourceDef

CLOUD_PLATFORM: Final = "https://www.googleapis.com/auth/cloud-platform"
VAULT_SCOPE: Final = "https://vault.azure.net/.default"
API_VERSION: Final = "7.4"
EARLY: Final = 60.0
"""Seconds before its end from which a token is not used any more."""
_PERMIT_GCP = "give the service account the role Secret Manager Secret Accessor"
_PERMIT_AZURE = "give the application the role Key Vault Secrets User, and see the vault's firewall"

Opening = Callable[[str], Awaitable[Secret]]
"""What the source is opened with, by its name in the definition, read now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    text: str = field(repr=False)
    ends: float


class CloudServer:
    """Asks with a bearer token that an exchange gives for what the source is opened with."""

    def __init__(
        self,
        definition: SourceDef,
        network: Network,
        opening: Opening,
        *,
        cloud: Literal["gcp", "azure"],
        now: Callable[[], float],
        boot: Callable[[], float],
    ) -> None:
        """`now` gives Unix time, `boot` the boot clock."""
        self._definition = definition
        self._network = network
        self._opening = opening
        self._cloud = cloud
        self._now = now
        self._boot = boot
        self._token: _Token | None = None
        self._turn = asyncio.Lock()

    async def get(self, target: str, what: str) -> Answer:
        """One GET with a token; once more with another one where the first is refused."""
        return await self._ask("GET", target, what, b"")

    async def post(self, target: str, what: str, body: Mapping[str, Any]) -> Answer:
        """The same with a JSON body, for questions that may be put twice."""
        return await self._ask("POST", target, what, json_body(body))

    async def _ask(self, method: Literal["GET", "POST"], target: str, what: str, body: bytes) -> Answer:
        answer = await self._send(method, target, what, body, await self._bearer(what))
        if answer.status == 401:
            self._token = None
            answer = await self._send(method, target, what, body, await self._bearer(what))
        return answer

    async def _send(self, method: Literal["GET", "POST"], target: str, what: str, body: bytes, token: str) -> Answer:
        headers = [("Authorization", f"Bearer {token}"), ("Accept", "application/json")]
        if body:
            headers.append(("Content-Type", "application/json"))
        address = self._definition.places["address"]
        return await self._network.call(address, method, target, what, headers=tuple(headers), body=body)

    async def _bearer(self, what: str) -> str:
        async with self._turn:
            if self._token is None or self._boot() >= self._token.ends:
                self._token = await self._obtained(what)
            return self._token.text

    async def _obtained(self, what: str) -> _Token:
        login = self._definition.places["login"]
        exchange: Exchange
        match self._cloud:
            case "gcp":
                exchange = Google()
                plan = _plan(login, "/token", {"scopes": (CLOUD_PLATFORM,)})
                parts: Mapping[str, Secret] = {VALUE: await self._opening("service_account")}
            case "azure":
                exchange = Azure()
                tenant, client = (self._definition.settings[key] for key in ("tenant", "client_id"))
                plan = _plan(login, f"/{tenant}/oauth2/v2.0/token", {"scope": VAULT_SCOPE})
                parts = {
                    "client_id": Secret(client.encode(), name="client_id", scrub=False),
                    "client_secret": await self._opening("client_secret"),
                }
            case _:
                assert_never(self._cloud)

        async def ask(plan: Plan, wish: Wish) -> Answer:
            return await self._network.call(
                Address(destination=plan.destination), "POST", plan.target, what, headers=wish.headers, body=wish.body
            )

        try:
            obtained = await exchange.obtain(plan, parts, ask, self._now())
        except ExchangeError as error:
            said = f"{what}: its token: {error.detail}"
            if error.transient:
                raise unreachable(said, "see login: and the endpoint's own state") from None
            remedy = error.remedy or "see what auth: names"
            raise SourceError("source-refused", said, remedy) from None
        token = obtained.parts[VALUE].decode("ascii")
        return _Token(text=token, ends=self._boot() + max(1.0, obtained.lasts - EARLY))


def _plan(login: Address, target: str, asks: Mapping[str, Any]) -> Plan:
    return Plan(destination=login.destination, target=login.base + target, asks=asks)


class GcpSource(Unleased):
    """A document is `name[?version=N]` in the definition's project."""

    def __init__(self, definition: SourceDef, server: CloudServer) -> None:
        self._name = definition.name
        self._project = definition.settings["project"]
        self._server = server

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        name, _, query = document.partition("?")
        version = query.partition("=")[2] or "latest"
        steps = ("projects", self._project, "secrets", name, "versions", version)
        answer = await self._server.get("/v1/" + "/".join(quote(step, safe="") for step in steps) + ":access", what)
        missing = f"see the project {self._project} and the secret's versions: a disabled one is not given"
        check_status(answer, what, refused=_PERMIT_GCP, missing=missing)
        found = object_of(answer, what)
        payload = found.get("payload")
        raw = from_base64(payload.get("data") if isinstance(payload, dict) else None)
        if raw is None:
            raise SourceError("source-unreadable", f"{what}: the answer holds no value")
        number = str(found.get("name", "")).rpartition("/versions/")[2]
        return Document(fields=fields_of(raw), version=plain_version(number))


class AzureSource(Unleased):
    """A document is `name[?version=ID]`."""

    def __init__(self, definition: SourceDef, server: CloudServer) -> None:
        self._name = definition.name
        self._server = server

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        name, _, query = document.partition("?")
        version = query.partition("=")[2]
        path = f"/secrets/{quote(name, safe='')}" + (f"/{quote(version, safe='')}" if version else "")
        answer = await self._server.get(f"{path}?api-version={API_VERSION}", what)
        check_status(answer, what, refused=_PERMIT_AZURE, missing="see the secret's name and version in this vault")
        found = object_of(answer, what)
        value = found.get("value")
        if not isinstance(value, str):
            raise SourceError("source-unreadable", f"{what}: the answer holds no value")
        number = str(found.get("id", "")).rpartition("/")[2]
        return Document(fields=fields_of(value.encode("utf-8", "surrogatepass")), version=plain_version(number))
