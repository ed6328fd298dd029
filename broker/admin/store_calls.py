"""The admin API's handlers about the store as a whole. Secrets one by one are in calls.py."""

from __future__ import annotations

from aiohttp import web

from broker.admin.calls import ACTOR, VAULT
from broker.admin.values import read_object, secret_value


async def rotate_key_call(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    body = read_object(await request.read(), {"value": str, "value_base64": str})
    count = await vault.desk.rotate_key(secret_value(body) if body else None, request[ACTOR])
    return web.json_response({"records": count, "generation": vault.store.generation})


async def backup_call(request: web.Request) -> web.Response:
    read_object(await request.read(), {})
    raw = await request.app[VAULT].desk.backup(request[ACTOR])
    return web.Response(body=raw, content_type="application/octet-stream")


async def marks_call(request: web.Request) -> web.Response:
    read_object(await request.read(), {})
    key, found, missing = await request.app[VAULT].desk.marks(request[ACTOR])
    rows = [
        {"name": one.name, "form": one.form, "lead": one.lead.hex(), "length": one.length, "digest": one.digest.hex()}
        for one in found
    ]
    return web.json_response({"key": key.hex(), "marks": rows, "missing": list(missing)})
