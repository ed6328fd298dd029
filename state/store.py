"""`StateStore`: the database file, opened once, by the vault alone.

One connection, `BEGIN IMMEDIATE` for every write, WAL, synchronous=FULL: a committed change survives power loss.
All methods block; the vault calls them on one thread of their own (broker/vault/sandboxes.py). Any fault of the
driver is narrowed to StateError here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, delete, event, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from rules.facts import Sandbox
from state import schema
from state.errors import StateError
from state.records import Removed, SandboxRecord, Ticket


class StateStore:
    """Rows of sandboxes, placeholders, tickets and the two floors (clock, secret store generation)."""

    def __init__(self, path: Path) -> None:
        """Open or create the database at `path` (mode 0600). Raises StateError."""
        _private_file(path)
        self._path = path
        self._engine = create_engine(
            f"sqlite:///{path}", poolclass=StaticPool, connect_args={"check_same_thread": False, "timeout": 2.0}
        )
        event.listen(self._engine, "connect", _on_connect)
        event.listen(self._engine, "begin", _on_begin)
        try:
            self._prepare()
        except StateError:
            self._engine.dispose()
            raise

    def close(self) -> None:
        self._engine.dispose()

    def _prepare(self) -> None:
        with self._write() as connection:
            schema.metadata.create_all(connection)
            version = _meta(connection, "schema")
            if version is None:
                _set_meta(connection, "schema", str(schema.SCHEMA_VERSION))
            elif version != str(schema.SCHEMA_VERSION):
                _migrate(connection, version)

    # sandboxes

    def add_sandbox(self, record: SandboxRecord) -> None:
        """Store a new sandbox with its placeholders. Raises StateError(`state-exists`) for a used id or token."""
        box = record.sandbox
        with self._write() as connection:
            if connection.execute(
                select(schema.sandboxes.c.id).where(_is(schema.sandboxes, box.tenant, box.id))
            ).first():
                raise StateError("state-exists", "the sandbox id was used before")
            connection.execute(
                insert(schema.sandboxes).values(
                    tenant=box.tenant,
                    id=box.id,
                    epoch=box.epoch,
                    role=box.role,
                    owner=box.owner,
                    agent=box.agent,
                    task=box.task,
                    attributes=json.dumps(dict(box.attributes), sort_keys=True),
                    channel=json.dumps(dict(record.channel), sort_keys=True),
                    channel_key_sha256=record.channel_key_sha256,
                    token_sha256=record.token_sha256,
                    created_at=record.created_at,
                    expires_at=box.expires_at,
                    ended_at=None,
                    boundary=record.boundary,
                )
            )
            for credential, digest in record.placeholders.items():
                connection.execute(
                    insert(schema.placeholders).values(
                        tenant=box.tenant, sandbox=box.id, credential=credential, sha256=digest
                    )
                )

    def end_sandbox(self, tenant: str, sandbox: str, now: float) -> Removed:
        """Mark it ended and delete what it was given. Ending twice is harmless."""
        with self._write() as connection:
            connection.execute(
                update(schema.sandboxes)
                .where(_is(schema.sandboxes, tenant, sandbox), schema.sandboxes.c.ended_at.is_(None))
                .values(ended_at=now)
            )
            counts = [
                connection.execute(delete(table).where(table.c.tenant == tenant, table.c.sandbox == sandbox)).rowcount
                for table in (schema.placeholders, schema.tickets, schema.disarmed)
            ]
        return Removed(placeholders=counts[0], tickets=counts[1], disarmed=counts[2])

    def sandboxes(self, *, ended: bool = False) -> tuple[SandboxRecord, ...]:
        """All live sandboxes, or with `ended` the ended ones too, oldest first."""
        with self._read() as connection:
            query = select(schema.sandboxes).order_by(schema.sandboxes.c.created_at)
            if not ended:
                query = query.where(schema.sandboxes.c.ended_at.is_(None))
            rows = connection.execute(query).mappings().all()
            digests: dict[tuple[str, str], dict[str, bytes]] = {}
            for row in connection.execute(select(schema.placeholders)).mappings():
                digests.setdefault((row["tenant"], row["sandbox"]), {})[row["credential"]] = row["sha256"]
        try:
            return tuple(_record(dict(row), digests.get((row["tenant"], row["id"]), {})) for row in rows)
        except (ValueError, TypeError, KeyError):
            raise StateError("state-corrupt", "a sandbox row cannot be read") from None

    def set_boundary(self, tenant: str, sandbox: str, boundary: str) -> None:
        """Store what is known of the confinement of a live sandbox."""
        with self._write() as connection:
            connection.execute(
                update(schema.sandboxes)
                .where(_is(schema.sandboxes, tenant, sandbox), schema.sandboxes.c.ended_at.is_(None))
                .values(boundary=boundary)
            )

    # tickets and disarmed credentials

    def add_ticket(self, ticket: Ticket, *, keep: int = 100) -> None:
        """Store a ticket; beyond `keep` for one sandbox the oldest go."""
        with self._write() as connection:
            connection.execute(
                insert(schema.tickets).values(
                    tenant=ticket.tenant,
                    sandbox=ticket.sandbox,
                    ticket=ticket.ticket,
                    rule=ticket.rule,
                    operation=ticket.operation,
                    approval=ticket.approval,
                    request_sha256=ticket.request_sha256,
                    created_at=ticket.created_at,
                )
            )
            owned = (schema.tickets.c.tenant == ticket.tenant, schema.tickets.c.sandbox == ticket.sandbox)
            old = (
                select(schema.tickets.c.ticket).where(*owned).order_by(schema.tickets.c.created_at.desc()).offset(keep)
            )
            connection.execute(delete(schema.tickets).where(*owned, schema.tickets.c.ticket.in_(old)))

    def tickets(self, tenant: str, sandbox: str) -> tuple[Ticket, ...]:
        with self._read() as connection:
            rows = connection.execute(
                select(schema.tickets)
                .where(schema.tickets.c.tenant == tenant, schema.tickets.c.sandbox == sandbox)
                .order_by(schema.tickets.c.created_at)
            ).mappings()
            return tuple(Ticket(**row) for row in rows)

    def disarm(self, tenant: str, sandbox: str, credential: str, now: float) -> None:
        """Remember that this sandbox may not use this credential any more."""
        with self._write() as connection:
            table = schema.disarmed
            found = connection.execute(
                select(table.c.at).where(
                    table.c.tenant == tenant, table.c.sandbox == sandbox, table.c.credential == credential
                )
            ).first()
            if found is None:
                connection.execute(insert(table).values(tenant=tenant, sandbox=sandbox, credential=credential, at=now))

    def disarmed(self) -> frozenset[tuple[str, str, str]]:
        with self._read() as connection:
            rows = connection.execute(
                select(schema.disarmed.c.tenant, schema.disarmed.c.sandbox, schema.disarmed.c.credential)
            )
            return frozenset((row[0], row[1], row[2]) for row in rows)

    # floors

    def clock_floor(self) -> float:
        """The highest wall time ever recorded; 0.0 when none was."""
        with self._read() as connection:
            return float(_meta(connection, "clock_floor") or 0.0)

    def raise_clock_floor(self, now: float) -> float:
        """Record `now` if it is the highest time yet; returns the floor."""
        with self._write() as connection:
            floor = max(float(_meta(connection, "clock_floor") or 0.0), now)
            _set_meta(connection, "clock_floor", repr(floor))
            return floor

    def reset_clock_floor(self, now: float) -> None:
        """An operator takes the clock as right (RULINGS 9.6); the caller has put it on record."""
        with self._write() as connection:
            _set_meta(connection, "clock_floor", repr(now))

    def store_generation(self) -> tuple[int, str]:
        """(generation, digest) of the secret store as last recorded; (0, "") at the very first start."""
        with self._read() as connection:
            return int(_meta(connection, "store_generation") or 0), _meta(connection, "store_digest") or ""

    def record_store_generation(self, generation: int, digest: str) -> None:
        """Never goes back. Raises StateError(`state-rollback`)."""
        with self._write() as connection:
            if generation < int(_meta(connection, "store_generation") or 0):
                raise StateError("state-rollback", "the secret store is older than the last one recorded")
            _set_meta(connection, "store_generation", str(generation))
            _set_meta(connection, "store_digest", digest)

    # backup

    def snapshot(self) -> bytes:
        """The whole database at this moment, as the bytes of a file."""
        try:
            with (
                contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as source,
                contextlib.closing(sqlite3.connect(":memory:")) as copy,
            ):
                source.backup(copy)
                return copy.serialize()
        except sqlite3.Error as error:
            raise StateError("state-unavailable", type(error).__name__) from None

    def restored(self, note: Mapping[str, str | int], now: float) -> None:
        """This database came from a backup: no sandbox of its time lives on, and the next start says so on record."""
        with self._write() as connection:
            connection.execute(
                update(schema.sandboxes).where(schema.sandboxes.c.ended_at.is_(None)).values(ended_at=now)
            )
            for table in (schema.placeholders, schema.tickets, schema.disarmed):
                connection.execute(delete(table))
            _set_meta(connection, "restored", json.dumps(note))

    def restored_note(self) -> dict[str, str | int] | None:
        """What `restored` left for the record, until `restored_told`."""
        with self._read() as connection:
            text = _meta(connection, "restored")
        return None if text is None else dict(json.loads(text))

    def restored_told(self) -> None:
        """It is on record."""
        with self._write() as connection:
            connection.execute(delete(schema.meta).where(schema.meta.c.key == "restored"))

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StateError("state-unavailable", type(error).__name__) from None

    _read = _write
    """Reads take the same lock: there is one connection, and reading beside a half-done write would be a bug."""


def _record(row: dict[str, Any], digests: dict[str, bytes]) -> SandboxRecord:
    sandbox = Sandbox(
        tenant=row["tenant"],
        id=row["id"],
        epoch=row["epoch"],
        role=row["role"],
        owner=row["owner"],
        agent=row["agent"],
        task=row["task"],
        attributes={str(key): str(value) for key, value in json.loads(row["attributes"]).items()},
        expires_at=row["expires_at"],
    )
    return SandboxRecord(
        sandbox=sandbox,
        token_sha256=row["token_sha256"],
        channel=json.loads(row["channel"]),
        channel_key_sha256=row["channel_key_sha256"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        placeholders=digests,
        boundary=row["boundary"],
    )


def _is(table: Any, tenant: str, sandbox: str) -> Any:
    return (table.c.tenant == tenant) & (table.c.id == sandbox)


def _migrate(connection: Connection, version: str) -> None:
    """Take a database of an earlier version to ours, or refuse. The caller's transaction holds all of it."""
    steps = [number for number in schema.MIGRATIONS if version.isdecimal() and number >= int(version)]
    if not steps or min(steps) != int(version):
        raise StateError("state-newer", "the database was written by another version")
    for number in sorted(steps):
        for statement in schema.MIGRATIONS[number]:
            connection.exec_driver_sql(statement)
    _set_meta(connection, "schema", str(schema.SCHEMA_VERSION))


def _meta(connection: Connection, key: str) -> str | None:
    row = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == key)).first()
    return None if row is None else str(row[0])


def _set_meta(connection: Connection, key: str, value: str) -> None:
    connection.execute(delete(schema.meta).where(schema.meta.c.key == key))
    connection.execute(insert(schema.meta).values(key=key, value=value))


def _on_connect(dbapi_connection: Any, _: Any) -> None:
    # The driver's own transaction handling starts DEFERRED ones; we say BEGIN IMMEDIATE ourselves (RULINGS 9.3).
    dbapi_connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON", "trusted_schema=OFF"):
        dbapi_connection.execute(f"PRAGMA {pragma}")


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _private_file(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        found = path.stat()
    except OSError:
        raise StateError("state-unavailable", f"{path.name} cannot be opened") from None
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
        raise StateError("state-modes", f"{path.name} must be ours with mode 0600")
