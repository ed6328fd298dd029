"""`kind: vault` and `kind: vault-dynamic`: HashiCorp Vault and OpenBao, by their HTTP API.

    corp-vault:kv/team/github?version=3#token      KV; version 2 unless `kv: {MOUNT: 1}` says otherwise
    corp-db:database/creds/readonly#password       dynamic: made for one sandbox, renewed while used, revoked with it

Opened by a token, an AppRole or the service account of a Kubernetes pod. A login is kept and renewed from two thirds
of its life on; when it is refused, another one is made, once. Leases never outlive the login that made them (Vault
revokes them with it), so they are not counted on for longer. Source: developer.hashicorp.com/vault/api-docs and
openbao.org/api-docs: KV secrets engine, Token, AppRole and Kubernetes auth methods, /sys/leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from broker.errors import BrokerError
from broker.sources.base import Document, SourceError, flat, plain_version
from broker.sources.network import Network, check_status, json_body, object_of
from net.client import Answer
from rules.secret_sources import SourceDef

RENEW_AT: Final = 2 / 3
"""Of a login's life."""
_AUTH = "see that what auth: names is valid, and the policies of its role"
_PATH = "see the path, its mount, and kv: {MOUNT: 1} for version 1 of the KV engine"

Key = Callable[[str], Awaitable[str]]
"""What gives a secret of the definition by its name, read now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Login:
    """A client token with its times on the boot clock; `ends` None: it does not end."""

    token: str = field(repr=False)
    renew_at: float | None
    ends: float | None
    renewable: bool


class VaultServer:
    """The connection that both kinds share: logging in, and asking with a token."""

    def __init__(self, definition: SourceDef, network: Network, key: Key, boot: Callable[[], float]) -> None:
        self._definition = definition
        self._network = network
        self._key = key
        self._boot = boot
        self._login: _Login | None = None
        self._turn = asyncio.Lock()
        self.closed = False

    @property
    def own_login(self) -> bool:
        """We logged in ourselves: whatever that login made ends with it."""
        return self._definition.settings["auth"] != "token"

    def remaining(self) -> float | None:
        """Seconds until the login ends; None where it does not, or we do not know."""
        return None if self._login is None or self._login.ends is None else self._login.ends - self._boot()

    async def ask(self, method: Any, path: str, what: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One question as whom we are; once more with another login where the first is not accepted any more."""
        answer = await self._send(method, path, what, body, await self._token(what))
        if answer.status == 403 and self.own_login:
            self._login = None
            answer = await self._send(method, path, what, body, await self._token(what))
        return answer

    async def close(self) -> None:
        """Give our own login back, and with it everything that it made."""
        self.closed = True
        login, self._login = self._login, None
        if login is not None and self.own_login:
            await self._send("POST", "/v1/auth/token/revoke-self", self._definition.name, {}, login.token)

    async def _token(self, what: str) -> str:
        if not self.own_login:
            return await self._key("token")
        async with self._turn:
            login, now = self._login, self._boot()
            if login is not None and (login.ends is None or now < login.ends):
                if login.renew_at is None or now < login.renew_at:
                    return login.token
                if login.renewable and (renewed := await self._renewed(login, what)) is not None:
                    self._login = renewed
                    return renewed.token
            self._login = await self._logged_in(what)
            return self._login.token

    async def _renewed(self, login: _Login, what: str) -> _Login | None:
        """None where it cannot be renewed any more; the next login takes its place."""
        try:
            answer = await self._send("POST", "/v1/auth/token/renew-self", what, {}, login.token)
            check_status(answer, what, refused=_AUTH, missing=_AUTH)
            return self._login_of(answer, what)
        except BrokerError:
            return None

    async def _logged_in(self, what: str) -> _Login:
        settings = self._definition.settings
        mount = settings["mount"]
        match settings["auth"]:
            case "approle":
                body = {"role_id": await self._key("role_id"), "secret_id": await self._key("secret_id")}
            case _:
                body = {"role": settings["role"], "jwt": await self._key("token")}
        answer = await self._send("POST", f"/v1/auth/{_quoted(mount)}/login", what, body, "")
        if answer.status in (400, 403):
            raise SourceError("source-refused", f"{what}: the login was refused ({answer.status})", _AUTH)
        check_status(answer, f"{what}: login", refused=_AUTH, missing="see auth: and its mount:")
        return self._login_of(answer, what)

    def _login_of(self, answer: Answer, what: str) -> _Login:
        auth = object_of(answer, what).get("auth")
        token = auth.get("client_token") if isinstance(auth, dict) else None
        if not isinstance(auth, dict) or not isinstance(token, str) or not token:
            raise SourceError("source-unreadable", f"{what}: the login gave no token")
        life, now = _seconds(auth.get("lease_duration")), self._boot()
        return _Login(
            token=token,
            renew_at=None if not life else now + life * RENEW_AT,
            ends=None if not life else now + life,
            renewable=auth.get("renewable") is True,
        )

    async def _send(self, method: Any, path: str, what: str, body: Mapping[str, Any] | None, token: str) -> Answer:
        headers = [("X-Vault-Request", "true")]
        if token:
            headers.append(("X-Vault-Token", token))
        if "namespace" in self._definition.settings:
            headers.append(("X-Vault-Namespace", self._definition.settings["namespace"]))
        if body is not None:
            headers.append(("Content-Type", "application/json"))
        return await self._network.call(
            self._definition.places["address"],
            method,
            path,
            what,
            headers=tuple(headers),
            body=b"" if body is None else json_body(body),
        )


class VaultSource:
    """KV secrets. A document is `mount/path[?version=N]`."""

    own = False

    def __init__(self, definition: SourceDef, server: VaultServer) -> None:
        self._name = definition.name
        self._server = server
        pairs = (entry.rpartition("=") for entry in definition.words.get("kv", ()))
        self._mounts = {mount: int(version) for mount, _, version in pairs}

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        path, _, query = document.partition("?")
        mount, rest = self._split(path, what)
        version = self._mounts.get(mount, 2)
        middle = "data/" if version == 2 else ""
        target = f"/v1/{_quoted(mount)}/{middle}{_quoted(rest)}" + (f"?{query}" if query else "")
        answer = await self._server.ask("GET", target, what)
        check_status(answer, what, refused=_AUTH, missing=_PATH)
        data = object_of(answer, what).get("data")
        found, number = data, ""
        if version == 2 and isinstance(data, dict):
            metadata = data.get("metadata")
            found, number = data.get("data"), metadata.get("version", "") if isinstance(metadata, dict) else ""
        if found is None:
            raise SourceError("source-missing", f"{what} was deleted", "put it back, or name another version")
        if not isinstance(found, dict):
            raise SourceError("source-unreadable", f"{what}: the answer holds no fields", _PATH)
        return Document(fields=flat(found), version=plain_version(number))

    async def revoke(self, document: Document) -> None:
        return None

    async def close(self) -> None:
        await self._server.close()

    def _split(self, path: str, what: str) -> tuple[str, str]:
        """(mount, rest): the longest mount that `kv:` names, else the first segment."""
        named = [mount for mount in self._mounts if path.startswith(mount + "/")]
        mount = max(named, key=len) if named else path.partition("/")[0]
        rest = path[len(mount) + 1 :]
        if not rest:
            raise SourceError("source-refused", f"{what} names a mount and nothing in it", "write MOUNT/PATH#FIELD")
        return mount, rest


class VaultDynamicSource:
    """Secrets that Vault makes when they are asked for. A document is the path that makes them."""

    own = True

    def __init__(self, definition: SourceDef, server: VaultServer) -> None:
        self._name = definition.name
        self._server = server

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        if before is not None and before.lease:
            renewed = await self._renewed(before, what)
            if renewed is not None:
                return renewed
        answer = await self._server.ask("GET", f"/v1/{_quoted(document)}", what)
        check_status(answer, what, refused=_AUTH, missing="see the path of the secrets engine and its role")
        found = object_of(answer, what)
        lease, data = found.get("lease_id"), found.get("data")
        if not isinstance(lease, str) or not lease or not isinstance(data, dict):
            raise SourceError("source-unreadable", f"{what} gives no lease", "kind: vault is for what is stored there")
        return Document(fields=flat(data), lease=lease, lasts=self._lasts(found.get("lease_duration"), what))

    async def revoke(self, document: Document) -> None:
        if self._server.closed and self._server.own_login:
            return  # it went with the login
        body = {"lease_id": document.lease}
        answer = await self._server.ask("PUT", "/v1/sys/leases/revoke", f"{self._name}: a lease", body)
        if answer.status not in (400, 404):  # that one is gone already
            check_status(answer, f"{self._name}: a lease", refused="permit update on sys/leases/revoke", missing="")

    async def close(self) -> None:
        await self._server.close()

    async def _renewed(self, before: Document, what: str) -> Document | None:
        """The same with more time; None where Vault gives it none, so that another one is made."""
        answer = await self._server.ask("PUT", "/v1/sys/leases/renew", what, {"lease_id": before.lease})
        if answer.status in (400, 403, 404):
            return None
        check_status(answer, what, refused="permit update on sys/leases/renew", missing="")
        lasts = self._lasts(object_of(answer, what).get("lease_duration"), what)
        return Document(fields=before.fields, lease=before.lease, lasts=lasts) if lasts >= MIN_LEASE else None

    def _lasts(self, told: object, what: str) -> float:
        seconds = _seconds(told)
        if seconds is None:
            raise SourceError("source-unreadable", f"{what}: the answer does not say how long the lease lives")
        remaining = self._server.remaining()
        return seconds if remaining is None else min(seconds, remaining)


MIN_LEASE: Final = 10.0
"""Seconds. A lease that is renewed for less is at its greatest age: another one is made."""


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _quoted(path: str) -> str:
    return "/".join(quote(step, safe="") for step in path.split("/"))
