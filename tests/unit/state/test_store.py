"""The state database: modes, what survives, what is deleted, and the two floors."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from rules.facts import Sandbox
from state.errors import StateError
from state.records import SandboxRecord, Ticket
from state.store import StateStore

NOW = 1_800_000_000.0


def record(name: str = "sb_a", token: bytes = b"t" * 32, **changes: object) -> SandboxRecord:
    box = Sandbox(
        tenant="default",
        id=name,
        epoch=1,
        role="agent",
        owner="o",
        agent="a",
        task="t",
        attributes={"repository": "shop"},
        expires_at=NOW + 60,
    )
    return SandboxRecord(
        sandbox=box,
        token_sha256=token,
        channel={"kind": "shared"},
        channel_key_sha256=None,
        created_at=NOW,
        placeholders={"key": token[::-1] if token != b"t" * 32 else b"p" * 32},
        **changes,  # type: ignore[arg-type]  # a table of keyword arguments
    )


@pytest.fixture
def store(tmp_path: Path):
    made = StateStore(tmp_path / "state.sqlite")
    yield made
    made.close()


def test_loose_file_mode_refuses(tmp_path: Path) -> None:
    """A database that others could read is not opened."""
    path = tmp_path / "state.sqlite"
    path.touch(0o644)
    path.chmod(0o644)
    with pytest.raises(StateError, match="state-modes"):
        StateStore(path)


def test_a_file_that_is_no_database_refuses(tmp_path: Path) -> None:
    """Bytes that are not a database are a fault with a fixed code."""
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"not a database" * 100)
    path.chmod(0o600)
    with pytest.raises(StateError, match="state-unavailable"):
        StateStore(path)


def test_a_newer_schema_refuses(tmp_path: Path) -> None:
    """A database of a later program is refused, not guessed at."""
    path = tmp_path / "state.sqlite"
    StateStore(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    raw.close()
    with pytest.raises(StateError, match="state-newer"):
        StateStore(path)


@pytest.mark.parametrize("version", ["0", "-1", "x", "1.5", ""])
def test_a_version_that_never_was_refuses(tmp_path: Path, version: str) -> None:
    """Only a version that we know the way from is taken further."""
    path = tmp_path / "state.sqlite"
    StateStore(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (version,))
    raw.close()
    with pytest.raises(StateError, match="state-newer"):
        StateStore(path)


def test_the_first_version_is_taken_further_and_arms_nobody(tmp_path: Path) -> None:
    """Sandboxes of a database without boundaries survive, none of them known to be confined."""
    path = tmp_path / "state.sqlite"
    first = StateStore(path)
    first.add_sandbox(record(boundary="namespaces"))
    first.close()
    with sqlite3.connect(path) as raw:
        raw.execute("ALTER TABLE sandboxes DROP COLUMN boundary")
        raw.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    raw.close()
    for _ in range(2):
        again = StateStore(path)
        assert again.sandboxes() == (record(),)
        again.close()


def test_a_boundary_is_stored_for_a_live_sandbox_only(store: StateStore) -> None:
    """One that ended stays as it was."""
    store.add_sandbox(record())
    store.add_sandbox(record(name="sb_b", token=b"u" * 32))
    store.end_sandbox("default", "sb_a", NOW)
    for name in ("sb_a", "sb_b"):
        store.set_boundary("default", name, "namespaces")
    assert [row.boundary for row in store.sandboxes(ended=True)] == ["", "namespaces"]


def test_an_id_is_never_used_twice(store: StateStore) -> None:
    """Also after its sandbox ended, an id cannot come back."""
    store.add_sandbox(record())
    store.end_sandbox("default", "sb_a", NOW)
    with pytest.raises(StateError, match="state-exists"):
        store.add_sandbox(record(token=b"u" * 32))


def test_two_sandboxes_never_share_a_token(store: StateStore) -> None:
    """A second row with the same token hash is refused by the database itself."""
    store.add_sandbox(record())
    with pytest.raises(StateError):
        store.add_sandbox(record(name="sb_b"))


def test_ending_deletes_what_was_given(store: StateStore) -> None:
    """Placeholders, tickets and disarmings go; the row stays with its end."""
    store.add_sandbox(record())
    store.add_ticket(ticket("tk_1"))
    store.disarm("default", "sb_a", "key", NOW)
    removed = store.end_sandbox("default", "sb_a", NOW + 1)
    assert (removed.placeholders, removed.tickets, removed.disarmed) == (1, 1, 1)
    assert store.sandboxes() == ()
    (ended,) = store.sandboxes(ended=True)
    assert ended.ended_at == NOW + 1
    assert ended.placeholders == {}


def test_a_sandbox_survives_a_restart(tmp_path: Path) -> None:
    """What was committed is read back equal by the next process."""
    first = StateStore(tmp_path / "state.sqlite")
    first.add_sandbox(record())
    first.close()
    again = StateStore(tmp_path / "state.sqlite")
    assert again.sandboxes() == (record(),)
    again.close()


def test_no_value_is_stored(store: StateStore, tmp_path: Path) -> None:
    """The database holds hashes only: the token's bytes are nowhere in the files."""
    store.add_sandbox(record())
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"xt_" not in raw
    assert (tmp_path / "state.sqlite").stat().st_mode & 0o077 == 0


def test_tickets_are_bounded(store: StateStore) -> None:
    """Beyond the bound the oldest ticket of that sandbox goes."""
    store.add_sandbox(record())
    for number in range(5):
        store.add_ticket(ticket(f"tk_{number}", NOW + number), keep=3)
    assert [item.ticket for item in store.tickets("default", "sb_a")] == ["tk_2", "tk_3", "tk_4"]


def test_the_clock_floor_never_sinks(store: StateStore) -> None:
    """An earlier time does not lower the floor."""
    assert store.clock_floor() == 0.0
    assert store.raise_clock_floor(NOW) == NOW
    assert store.raise_clock_floor(NOW - 100) == NOW


def test_the_store_generation_never_goes_back(store: StateStore) -> None:
    """An older generation of the secret store is a rollback."""
    store.record_store_generation(5, "aa")
    with pytest.raises(StateError, match="state-rollback"):
        store.record_store_generation(4, "bb")
    assert store.store_generation() == (5, "aa")


def ticket(name: str, at: float = NOW) -> Ticket:
    return Ticket(
        tenant="default",
        sandbox="sb_a",
        ticket=name,
        rule="agent/release",
        operation="agent/release",
        approval="managers",
        request_sha256=b"r" * 32,
        created_at=at,
    )
