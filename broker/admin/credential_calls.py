"""The admin API's handlers about where credentials come from. They answer versions and keyed digests, never values."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from broker.admin.calls import ACTOR, VAULT
from broker.admin.values import read_object
from broker.vault.supply import Row


async def check_call(request: web.Request) -> web.Response:
    return await _asked(request, renew=False)


async def sync_call(request: web.Request) -> web.Response:
    return await _asked(request, renew=True)


async def _asked(request: web.Request, *, renew: bool) -> web.Response:
    body = read_object(await request.read(), {"credential": str, "sandbox": str})
    rows = await request.app[VAULT].desk.ask_sources(
        body.get("credential"), body.get("sandbox"), request[ACTOR], renew=renew
    )
    return web.json_response({"references": [_row(row) for row in rows]})


def _row(row: Row) -> dict[str, Any]:
    return {
        "credential": row.credential,
        "part": row.part,
        "source": row.source,
        "version": row.version,
        "fingerprint": row.fingerprint,
        "age": None if row.age is None else int(row.age),
        "needs_sandbox": row.needs_sandbox,
        "error": row.error,
        "detail": row.detail,
        "remedy": row.remedy,
    }
