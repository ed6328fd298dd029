"""The snapshot: everything that a worker or executor decides from, as one JSON document.

    {generation, now_floor, digest, document,
     sandboxes: [{tenant, id, epoch, role, owner, agent, task, attributes, expires_at, token_sha256,
                  channel: {kind, address?, key_sha256?}, placeholders: {credential: sha256 hex}}],
     ended_tokens: [sha256 hex],            tokens that were valid once: 403 sandbox-ended, not bad-token
     self: {listener_ports, addresses, internal_ranges}}

Hashes only: a worker that is broken into learns no token, placeholder or reference (RULINGS 2.2).
"""

from __future__ import annotations

from typing import Any

import orjson

from rules.policy import Policy
from state.records import SandboxRecord


def render_snapshot(
    *,
    generation: int,
    now_floor: float,
    policy: Policy,
    sandboxes: tuple[SandboxRecord, ...],
    ended_tokens: tuple[bytes, ...],
    listener_ports: tuple[int, ...],
    addresses: tuple[str, ...],
    internal_ranges: tuple[str, ...],
) -> bytes:
    """The document's bytes."""
    document = {
        "generation": generation,
        "now_floor": now_floor,
        "digest": policy.digest,
        "document": policy.document,
        "sandboxes": [_sandbox(record) for record in sandboxes],
        "ended_tokens": [digest.hex() for digest in ended_tokens],
        "self": {
            "listener_ports": list(listener_ports),
            "addresses": list(addresses),
            "internal_ranges": list(internal_ranges),
        },
    }
    return orjson.dumps(document, default=_plain)


def _sandbox(record: SandboxRecord) -> dict[str, Any]:
    box = record.sandbox
    channel: dict[str, Any] = dict(record.channel)
    if record.channel_key_sha256 is not None:
        channel["key_sha256"] = record.channel_key_sha256.hex()
    return {
        "tenant": box.tenant,
        "id": box.id,
        "epoch": box.epoch,
        "role": box.role,
        "owner": box.owner,
        "agent": box.agent,
        "task": box.task,
        "attributes": dict(box.attributes),
        "expires_at": box.expires_at,
        "token_sha256": record.token_sha256.hex(),
        "channel": channel,
        "placeholders": {name: digest.hex() for name, digest in record.placeholders.items()},
    }


def _plain(value: Any) -> Any:
    # The document may be wrapped read-only (MappingProxyType) by its compiler.
    if hasattr(value, "items"):
        return dict(value.items())
    raise TypeError
