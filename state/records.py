"""Frozen rows of the state database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rules.facts import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """One sandbox as stored: what policy may know, plus hashes of what it was given."""

    sandbox: Sandbox
    token_sha256: bytes
    channel: Mapping[str, str]
    """{"kind": shared|address|port|unix|namespace, "address"?: text}."""
    channel_key_sha256: bytes | None
    created_at: float
    ended_at: float | None = None
    placeholders: Mapping[str, bytes] = field(default_factory=dict)
    """credential -> SHA-256 of the placeholder."""
    boundary: str = ""
    """What is known of its confinement: "" nothing, "namespaces" our launcher built it, "external" its role said so."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.sandbox.tenant, self.sandbox.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One held request, as an agent may quote it. Answering it comes with its own issue."""

    tenant: str
    sandbox: str
    ticket: str
    rule: str
    operation: str
    approval: str
    request_sha256: bytes
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What ending a sandbox deleted from the database."""

    placeholders: int
    tickets: int
    disarmed: int
