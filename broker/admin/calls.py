"""The handlers of the admin API, one per line of the table in __init__.py. They translate; the Desk does.

Whatever a handler raises is turned into an answer by server.py's guard.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from broker.admin.explain import explain
from broker.admin.values import BadRequest, codes, need, packets, read_object, seconds, secret_value, texts
from broker.errors import BrokerError
from broker.vault.sandboxes import ALONE, Request, armed
from broker.vault.service import Vault
from rules.reasons import reason
from state.records import SandboxRecord

VAULT: web.AppKey[Vault] = web.AppKey("vault", Vault)
ACTOR: web.RequestKey[str] = web.RequestKey("actor", str)


# sandboxes


async def create_call(request: web.Request) -> web.Response:
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
        **_sandbox(created.record, vault),
        "token": created.token,
        "channel_key": created.channel_key.hex() or None,
        "env": dict(created.environment),
        **({"google_token_uri": created.account_endpoint} if created.account_endpoint else {}),
        "credentials": dict(created.variables),
        "proxy_url": vault.boot.proxy_url if alone else _with_token(vault.boot.proxy_url, created.token),
        "unacknowledged": list(late),
    }
    return web.json_response(answer, status=201)


async def list_call(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    records = vault.table.live()
    if request.query.get("all") == "1":
        records = await vault.desk.history()
    return web.json_response({"sandboxes": [_sandbox(record, vault) for record in records]})


async def show_call(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    wanted = request.match_info["id"]
    for record in (*vault.table.live(), *await vault.desk.history()):
        if record.sandbox.id == wanted:
            return web.json_response(_sandbox(record, vault))
    raise BrokerError("no-such-sandbox", "no sandbox has this id", "see `exeat sandbox list`")


async def end_call(request: web.Request) -> web.Response:
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


async def thaw_call(request: web.Request) -> web.Response:
    sandbox = request.match_info["id"]
    count = await request.app[VAULT].desk.thaw(sandbox, request[ACTOR])
    return web.json_response({"id": sandbox, "thawed": count})


async def boundary_call(request: web.Request) -> web.Response:
    desk, sandbox = request.app[VAULT].desk, request.match_info["id"]
    body = read_object(await request.read(), {"proven": str, "broken": list})
    if "broken" not in body:
        record = await desk.prove_boundary(sandbox, need(body, "proven"), request[ACTOR])
        return web.json_response({"id": record.sandbox.id, "boundary": record.boundary})
    late = await desk.break_boundary(sandbox, codes(body, "broken"), request[ACTOR])
    return web.json_response({"id": sandbox, "boundary": "broken", "unacknowledged": list(late)})


async def drops_call(request: web.Request) -> web.Response:
    body = read_object(await request.read(), {"counts": dict, "interface": str, "error": str})
    total = await request.app[VAULT].desk.count_drops(
        request.match_info["id"],
        packets(body, "counts"),
        interface=body.get("interface", ""),
        error=body.get("error", ""),
    )
    return web.json_response({"id": request.match_info["id"], "count": total})


def _sandbox(record: SandboxRecord, vault: Vault) -> dict[str, Any]:
    box, active = record.sandbox, vault.desk.active()
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
        "boundary": record.boundary or None,
        "armed": record.ended_at is None and active is not None and armed(record, active.policy),
        "claimed": _claimed(record, vault),
        "placeholders": sorted(record.placeholders),
        "created_at": record.created_at,
        "expires_at": box.expires_at,
        "ended_at": record.ended_at,
        "state": "live" if record.ended_at is None else "ended",
        "frozen": _frozen(record, vault),
    }


def _claimed(record: SandboxRecord, vault: Vault) -> dict[str, Any] | None:
    said = vault.desk.claim_of(*record.key)
    if said is None:
        return None
    return {"at": said.at, "holds": list(said.holds), "fails": list(said.fails), "unknown": list(said.unknown)}


def _frozen(record: SandboxRecord, vault: Vault) -> list[dict[str, Any]]:
    """What a used-up budget has frozen, with the seconds that are left."""
    now = vault.clock.boot()
    notes = vault.frozen.of((record.sandbox.tenant, record.sandbox.id), now)
    return [
        {"operation": note.operation or "all", "budget": note.budget, "seconds": max(1, int(note.until - now))}
        for note in notes
    ]


def _with_token(url: str, token: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}session:{token}@{rest}"


# policy


async def policy_call(request: web.Request) -> web.Response:
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


async def reload_call(request: web.Request) -> web.Response:
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


async def decide_call(request: web.Request) -> web.Response:
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
    if record is not None and answer.get("credential") and not armed(record, active.policy):
        row = reason("boundary-unproven")
        answer |= {"decision": "deny", "reason": row.code, "remedy": row.remedy, "message": ""}
    return web.json_response(answer)


# secrets


async def secrets_call(request: web.Request) -> web.Response:
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


async def add_secret_call(request: web.Request) -> web.Response:
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


async def rotate_secret_call(request: web.Request) -> web.Response:
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


async def remove_secret_call(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    name = request.match_info["name"]
    late = await vault.desk.remove_secret(name, request[ACTOR])
    return web.json_response(
        {"name": name, "removed": True, "generation": vault.store.generation, "unacknowledged": list(late)}
    )


# status and authority


async def status_call(request: web.Request) -> web.Response:
    vault = request.app[VAULT]
    active = vault.desk.active()
    return web.json_response(
        {
            "started_at": vault.started_at,
            "generation": vault.desk.generation,
            "processes": [
                {
                    "name": member.name,
                    "kind": member.kind,
                    "generation": member.generation,
                    **_checked(member.checked),
                }
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
            "frozen": vault.frozen.count(vault.clock.boot()),
            "store": {"generation": vault.store.generation, "digest": vault.store.digest},
            "clock_behind": vault.clock.behind(),
            "shared_uid": vault.boot.danger_shared_uid,
            "memory_locked": vault.memory_locked,
        }
    )


def _checked(last: tuple[bool, float] | None) -> dict[str, Any]:
    return {} if last is None else {"self_check": {"passed": last[0], "at": last[1]}}


async def reset_clock_call(request: web.Request) -> web.Response:
    body = read_object(await request.read(), {"why": str})
    why = need(body, "why").strip()
    if not why or len(why) > 200 or not why.isprintable():
        raise BadRequest("bad-field", "why is one sentence that goes on record")
    return web.json_response({"clock": await request.app[VAULT].desk.reset_clock(why, request[ACTOR])})


async def ca_call(request: web.Request) -> web.Response:
    authority = request.app[VAULT].authority
    return web.json_response({"root_pem": authority.root_pem, "fingerprint_sha256": authority.fingerprint})
