"""The admin API's server: aiohttp on a Unix socket, inside the vault. The table of calls is in __init__.py.

Every request passes `_guard`: peer, Host, media type, size; and whatever a handler raises becomes one JSON object with
a fixed sentence. Nothing here decides anything: handlers translate between JSON and the Desk.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from audit.journal import AuditUnavailable
from broker.admin.explain import explain
from broker.admin.peers import Peer, peer_of, refuse
from broker.admin.values import BadRequest, need, read_object, seconds, secret_value, texts
from broker.errors import BrokerError
from broker.vault.boot import BootRefused
from broker.vault.policies import PolicyRejected
from broker.vault.sandboxes import ALONE, Request
from broker.vault.service import Vault
from net.process import complain
from state.errors import StateError
from state.records import SandboxRecord

MAX_BODY = 256 * 1024
HOSTS = frozenset({"localhost", "exeat"})
"""Names that a Host header may have: a browser led here by a web page says another (B155)."""

STATUS = {
    "not-permitted": 403,
    "no-such-sandbox": 404,
    "secret-missing": 404,
    "no-such-call": 404,
    "secret-exists": 409,
    "policy-unavailable": 503,
    "store-unavailable": 503,
    "audit-unavailable": 503,
    "state-unavailable": 503,
    "internal-error": 500,
}
"""Codes that are not 400. Those that begin with `policy-` and are not here are 422."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VAULT: web.AppKey[Vault] = web.AppKey("vault", Vault)
ACTOR: web.RequestKey[str] = web.RequestKey("actor", str)


async def serve_admin(vault: Vault) -> web.AppRunner:
    """Serve until the runner is cleaned up. Raises BootRefused where the socket cannot be made."""
    app = make_app(vault)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    site = web.SockSite(runner, _listener(vault))
    await site.start()
    return runner


def make_app(vault: Vault) -> web.Application:
    """The application, with every call of the table."""
    app = web.Application(middlewares=[_guard], client_max_size=MAX_BODY)
    app[VAULT] = vault
    app.router.add_get("/v1/status", _status)
    app.router.add_get("/v1/sandboxes", _list)
    app.router.add_post("/v1/sandboxes", _create)
    app.router.add_get("/v1/sandboxes/{id}", _show)
    app.router.add_delete("/v1/sandboxes/{id}", _end)
    app.router.add_get("/v1/policy", _policy)
    app.router.add_post("/v1/policy/reload", _reload)
    app.router.add_post("/v1/policy/decide", _decide)
    app.router.add_get("/v1/secrets", _secrets)
    app.router.add_post("/v1/secrets", _add_secret)
    app.router.add_put("/v1/secrets/{name:.+}", _rotate_secret)
    app.router.add_delete("/v1/secrets/{name:.+}", _remove_secret)
    app.router.add_get("/v1/ca", _ca)
    app.router.add_post("/v1/clock/reset", _reset_clock)
    return app


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    vault = request.app[VAULT]
    try:
        peer = _peer(request)
        uids = frozenset(vault.boot.admin_uids or (os.geteuid(),))
        why = refuse(peer, uids, any_namespace=vault.boot.admin_any_namespace, own_uid=os.geteuid())
        if why is not None:
            raise BrokerError("not-permitted", why, "run as the gateway's user, outside any sandbox")
        if request.host.partition(":")[0] not in HOSTS:
            raise BrokerError("not-permitted", "the Host header is not ours")
        if request.method in ("POST", "PUT") and request.content_type != "application/json":
            raise BadRequest("bad-json", "the body must be application/json")
        request[ACTOR] = f"uid:{peer.uid}"
        return await handler(request)
    except PolicyRejected as error:
        return _error(error.code, error.detail, error.remedy, problems=list(error.problems))
    except BrokerError as error:
        return _error(error.code, error.detail, error.remedy)
    except StateError as error:
        return _error("state-unavailable", error.code, "see the vault's own messages")
    except AuditUnavailable:
        return _error("audit-unavailable", "the log cannot be written, so nothing is done", "see `exeat status`")
    except web.HTTPRequestEntityTooLarge:
        return _error("bad-json", f"the body is longer than {MAX_BODY} bytes")
    except web.HTTPException:
        return _error("no-such-call", "the admin API has no such call")
    except Exception as error:
        complain("vault", "an admin call failed", error)
        return _error("internal-error", "the call failed; what was begun may have been done", "see `exeat status`")


def _peer(request: web.Request) -> Peer:
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    if sock is None:
        raise BrokerError("not-permitted", "the caller is gone")
    return peer_of(sock)


def _error(code: str, detail: str, remedy: str = "", **more: Any) -> web.Response:
    status = STATUS.get(code, 422 if code.startswith("policy-") else 400)
    return web.json_response({"error": code, "detail": detail, "remedy": remedy, **more}, status=status)


# sandboxes


async def _create(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    known: dict[str, type] = {
        "role": str,
        "ttl": object,
        "owner": str,
        "agent": str,
        "task": str,
        "attributes": dict,
        "channel": dict,
        "tenant": str,
    }
    body = read_object(await request.read(), known)
    asked = Request(
        tenant=body.get("tenant", vault.boot.tenant),
        role=need(body, "role"),
        ttl=seconds(body.get("ttl", vault.boot.default_ttl), limit=vault.boot.max_ttl),
        owner=body.get("owner", ""),
        agent=body.get("agent", ""),
        task=body.get("task", ""),
        attributes=texts(body, "attributes"),
        channel=texts(body, "channel") or {"kind": "shared"},
    )
    created, late = await vault.desk.create(asked, request[ACTOR])
    alone = created.record.channel["kind"] in ALONE
    answer = {
        **_sandbox(created.record),
        "token": created.token,
        "channel_key": created.channel_key.hex() or None,
        "env": dict(created.environment),
        "credentials": dict(created.variables),
        "proxy_url": vault.boot.proxy_url if alone else _with_token(vault.boot.proxy_url, created.token),
        "unacknowledged": list(late),
    }
    return web.json_response(answer, status=201)


async def _list(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    records = vault.table.live()
    if request.query.get("all") == "1":
        records = await vault.desk.history()
    return web.json_response({"sandboxes": [_sandbox(record) for record in records]})


async def _show(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    wanted = request.match_info["id"]
    for record in (*vault.table.live(), *await vault.desk.history()):
        if record.sandbox.id == wanted:
            return web.json_response(_sandbox(record))
    raise BrokerError("no-such-sandbox", "no sandbox has this id", "see `exeat sandbox list`")


async def _end(request: web.Request) -> web.Response:
    ended = await request.app[VAULT].desk.end(request.match_info["id"], request[ACTOR])
    return web.json_response(
        {
            "id": ended.sandbox,
            "ended_at": ended.ended_at,
            "deleted": list(ended.deleted),
            "remains": list(ended.remains),
            "unacknowledged": list(ended.unacknowledged),
        }
    )


def _sandbox(record: SandboxRecord) -> dict[str, Any]:
    box = record.sandbox
    return {
        "id": box.id,
        "tenant": box.tenant,
        "epoch": box.epoch,
        "role": box.role,
        "owner": box.owner,
        "agent": box.agent,
        "task": box.task,
        "attributes": dict(box.attributes),
        "channel": dict(record.channel),
        "placeholders": sorted(record.placeholders),
        "created_at": record.created_at,
        "expires_at": box.expires_at,
        "ended_at": record.ended_at,
        "state": "live" if record.ended_at is None else "ended",
    }


def _with_token(url: str, token: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}session:{token}@{rest}"


# policy


async def _policy(request: web.Request) -> web.Response:
    desk = request.app[VAULT].desk
    active = desk.active()
    if active is None:
        raise BrokerError("policy-unavailable", "no policy is in force", "run `exeat init`")
    return web.json_response(
        {
            "digest": active.digest,
            "loaded_at": active.loaded_at,
            "files": list(active.files),
            "roles": sorted(active.policy.roles),
            "warnings": list(active.warnings),
            "rejected": None if desk.rejection is None else desk.rejection.as_json(),
            "document": dict(active.policy.document),
        }
    )


async def _reload(request: web.Request) -> web.Response:
    read_object(await request.read(), {})
    active, changed, late = await request.app[VAULT].desk.reload(request[ACTOR])
    return web.json_response(
        {
            "digest": active.digest,
            "changed": changed,
            "warnings": list(active.warnings),
            "unacknowledged": list(late),
        }
    )


async def _decide(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    known: dict[str, type] = {"sandbox": str, "role": str, "method": str, "url": str, "headers": dict}
    body = read_object(await request.read(), known)
    active = vault.desk.active()
    if active is None:
        raise BrokerError("policy-unavailable", "no policy is in force", "run `exeat init`")
    record = None
    if "sandbox" in body:
        record = vault.table.get(body["sandbox"])
        if record is None:
            raise BrokerError("no-such-sandbox", "no live sandbox has this id", "see `exeat sandbox list`")
    answer = explain(
        active.policy,
        None if record is None else record.sandbox,
        body.get("role"),
        method=need(body, "method"),
        url=need(body, "url"),
        headers=texts(body, "headers"),
        now=vault.clock.wall(),
    )
    return web.json_response(answer)


# secrets


async def _secrets(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    listed = [
        {
            "name": info.name,
            "owner": info.owner,
            "version": info.version,
            "created_at": info.created_at,
            "scrub": info.scrub,
        }
        for info in vault.desk.secrets()
    ]
    return web.json_response({"generation": vault.store.generation, "secrets": listed})


async def _add_secret(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    known: dict[str, type] = {"name": str, "owner": str, "value": str, "value_base64": str, "scrub": bool}
    body = read_object(await request.read(), known)
    info = await vault.desk.add_secret(
        need(body, "name"),
        secret_value(body),
        owner=body.get("owner", ""),
        scrub=body.get("scrub", True),
        actor=request[ACTOR],
    )
    answer = {"name": info.name, "version": info.version, "generation": vault.store.generation}
    return web.json_response(answer, status=201)


async def _rotate_secret(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    body = read_object(await request.read(), {"value": str, "value_base64": str, "scrub": bool})
    info, late = await vault.desk.rotate_secret(
        request.match_info["name"], secret_value(body), scrub=body.get("scrub"), actor=request[ACTOR]
    )
    return web.json_response(
        {
            "name": info.name,
            "version": info.version,
            "generation": vault.store.generation,
            "unacknowledged": list(late),
        }
    )


async def _remove_secret(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    name = request.match_info["name"]
    late = await vault.desk.remove_secret(name, request[ACTOR])
    return web.json_response(
        {"name": name, "removed": True, "generation": vault.store.generation, "unacknowledged": list(late)}
    )


# status and authority


async def _status(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    active = vault.desk.active()
    return web.json_response(
        {
            "started_at": vault.started_at,
            "generation": vault.desk.generation,
            "processes": [
                {"name": member.name, "kind": member.kind, "generation": member.generation}
                for member in vault.fleet.members()
            ],
            "lost": list(vault.lost),
            "policy": {
                "digest": None if active is None else active.digest,
                "loaded_at": None if active is None else active.loaded_at,
                "roles": [] if active is None else sorted(active.policy.roles),
                "rejected": None if vault.desk.rejection is None else vault.desk.rejection.as_json(),
            },
            "sandboxes": len(vault.table.live()),
            "store": {"generation": vault.store.generation, "digest": vault.store.digest},
            "clock_behind": vault.clock.behind(),
            "shared_uid": vault.boot.danger_shared_uid,
        }
    )


async def _reset_clock(request: web.Request) -> web.Response:
    body = read_object(await request.read(), {"why": str})
    why = need(body, "why").strip()
    if not why or len(why) > 200 or not why.isprintable():
        raise BadRequest("bad-field", "why is one sentence that goes on record")
    return web.json_response({"clock": await request.app[VAULT].desk.reset_clock(why, request[ACTOR])})


async def _ca(request: web.Request) -> web.Response:
    authority = request.app[VAULT].authority
    return web.json_response({"root_pem": authority.root_pem, "fingerprint_sha256": authority.fingerprint})


def _listener(vault: Vault) -> socket.socket:
    boot = vault.boot
    if boot.admin_fd is not None:
        sock = socket.socket(fileno=boot.admin_fd)
        sock.setblocking(False)
        return sock
    assert boot.admin_path is not None
    path = Path(boot.admin_path)
    try:
        found = os.lstat(path.parent)
        if found.st_mode & 0o022 or found.st_uid not in (0, os.geteuid()):
            raise BootRefused("admin-modes", f"others may write {path.parent}", f"chmod go-w {path.parent}")
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()  # ours from before: the supervisor holds the lock of this state folder (RULINGS 9.4)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        if set(boot.admin_uids) - {os.geteuid(), 0}:
            path.chmod(0o666)  # others on the list must be able to connect; the uid check decides
        sock.listen(64)
    except OSError as error:
        raise BootRefused("admin-unavailable", f"{path}: {os.strerror(error.errno or 0)}") from None
    sock.setblocking(False)
    return sock
