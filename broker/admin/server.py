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
from broker.admin import calls, credential_calls, store_calls
from broker.admin.calls import ACTOR, VAULT
from broker.admin.peers import Peer, peer_of, refuse
from broker.admin.values import BadRequest
from broker.errors import BrokerError
from broker.vault.boot import BootRefused
from broker.vault.policies import PolicyRejected
from broker.vault.service import Vault
from net.process import complain
from state.errors import StateError

MAX_BODY = 256 * 1024
HOSTS = frozenset({"localhost", "exeat"})
"""Names that a Host header may have: a browser led here by a web page says another (B155)."""

STATUS = {
    "not-permitted": 403,
    "no-such-sandbox": 404,
    "secret-missing": 404,
    "no-such-credential": 404,
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
    app.router.add_get("/v1/status", calls.status_call)
    app.router.add_get("/v1/sandboxes", calls.list_call)
    app.router.add_post("/v1/sandboxes", calls.create_call)
    app.router.add_get("/v1/sandboxes/{id}", calls.show_call)
    app.router.add_delete("/v1/sandboxes/{id}", calls.end_call)
    app.router.add_post("/v1/sandboxes/{id}/thaw", calls.thaw_call)
    app.router.add_post("/v1/sandboxes/{id}/boundary", calls.boundary_call)
    app.router.add_post("/v1/sandboxes/{id}/drops", calls.drops_call)
    app.router.add_get("/v1/policy", calls.policy_call)
    app.router.add_post("/v1/policy/reload", calls.reload_call)
    app.router.add_post("/v1/policy/decide", calls.decide_call)
    app.router.add_get("/v1/secrets", calls.secrets_call)
    app.router.add_post("/v1/secrets", calls.add_secret_call)
    app.router.add_put("/v1/secrets/{name:.+}", calls.rotate_secret_call)
    app.router.add_delete("/v1/secrets/{name:.+}", calls.remove_secret_call)
    app.router.add_post("/v1/store/rotate-key", store_calls.rotate_key_call)
    app.router.add_post("/v1/store/marks", store_calls.marks_call)
    app.router.add_post("/v1/store/backup", store_calls.backup_call)
    app.router.add_post("/v1/credentials/check", credential_calls.check_call)
    app.router.add_post("/v1/credentials/sync", credential_calls.sync_call)
    app.router.add_get("/v1/ca", calls.ca_call)
    app.router.add_post("/v1/clock/reset", calls.reset_clock_call)
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
        return _error("audit-unavailable", "the log cannot be written, so nothing is done", "see `exeat doctor`")
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
