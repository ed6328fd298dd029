"""The tables, and how they may change.

Every table that belongs to a sandbox starts its key with (tenant, sandbox). No secret, token or placeholder is
stored: only their SHA-256 (all are random and long, so a plain hash is enough). `meta.schema` is the version; a
database from a newer program is refused, never guessed at. A new version adds a step to MIGRATIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sqlalchemy import Column, Float, Integer, LargeBinary, MetaData, PrimaryKeyConstraint, String, Table, Text

SCHEMA_VERSION = 2

MIGRATIONS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        # What is known of a sandbox from before is nothing: it has to be created again to be armed.
        1: ("ALTER TABLE sandboxes ADD COLUMN boundary VARCHAR(32) NOT NULL DEFAULT ''",),
    }
)
"""version -> the statements that make it the next one, all in one transaction."""

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))
"""schema, clock_floor, store_generation, store_digest, restored."""

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("tenant", String(64), nullable=False),
    Column("id", String(64), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("role", String(128), nullable=False),
    Column("owner", String(256), nullable=False),
    Column("agent", String(256), nullable=False),
    Column("task", String(256), nullable=False),
    Column("attributes", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("channel_key_sha256", LargeBinary(32), nullable=True),
    Column("token_sha256", LargeBinary(32), nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False, index=True),
    Column("ended_at", Float, nullable=True, index=True),
    Column("boundary", String(32), nullable=False, server_default=""),
    PrimaryKeyConstraint("tenant", "id"),
)

placeholders = Table(
    "placeholders",
    metadata,
    Column("tenant", String(64), nullable=False),
    Column("sandbox", String(64), nullable=False),
    Column("credential", String(128), nullable=False),
    Column("sha256", LargeBinary(32), nullable=False, unique=True),
    PrimaryKeyConstraint("tenant", "sandbox", "credential"),
)

disarmed = Table(
    "disarmed",
    metadata,
    Column("tenant", String(64), nullable=False),
    Column("sandbox", String(64), nullable=False),
    Column("credential", String(128), nullable=False),
    Column("at", Float, nullable=False),
    PrimaryKeyConstraint("tenant", "sandbox", "credential"),
)

tickets = Table(
    "tickets",
    metadata,
    Column("tenant", String(64), nullable=False),
    Column("sandbox", String(64), nullable=False),
    Column("ticket", String(64), nullable=False),
    Column("rule", String(256), nullable=False),
    Column("operation", String(256), nullable=False),
    Column("approval", String(128), nullable=False),
    Column("request_sha256", LargeBinary(32), nullable=False),
    Column("created_at", Float, nullable=False),
    PrimaryKeyConstraint("tenant", "sandbox", "ticket"),
)
