"""Backup, restore and the store's key, with a real gateway: nothing aged, changed or mixed comes back unnoticed."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import TestGateway
from tests.support.origins import Origin

pytestmark = pytest.mark.slow

OLD = "kq8-Backup-Old-1d7a93c04be2"
NEW = "kq8-Backup-New-77aa0c41de93"
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests,
        placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: keyed, host: api.test, methods: [GET], paths: [/keyed], credential: api}
"""


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin("api.test").run_in_thread() as origin:
        yield origin


@pytest.fixture
def gateway(tmp_path: Path, origin: Origin) -> Iterator[TestGateway]:
    made = TestGateway(tmp_path / "g", policy=POLICY, credentials=CREDENTIALS, secrets={"api": OLD}, origins=[origin])
    with made:
        yield made


def sent(gateway: TestGateway, origin: Origin) -> str:
    """What a sandbox of now has the gateway send as its key."""
    box = gateway.sandbox()
    assert box.curl("-o", "/dev/null", "-w", "%{http_code}", origin.url("/keyed")).out == "200"
    return str(origin.received[-1].header("authorization")).removeprefix("Bearer ")


def refused_start(gateway: TestGateway) -> str:
    """What a start that must fail says."""
    with pytest.raises(AssertionError):
        gateway.start()
    gateway.stop()
    return gateway.errors()


def test_a_backup_comes_back_only_whole_under_its_key_and_not_after_a_later_store(
    tmp_path: Path, gateway: TestGateway, origin: Origin
) -> None:
    """Each way of bringing an old secret back is refused; an operator's word lifts the age alone, and is on record."""
    backup = tmp_path / "backup.json"
    box = gateway.sandbox()
    assert gateway.exeat("backup", str(backup)).code == 0
    assert OLD not in backup.read_text()
    again = gateway.exeat("backup", str(backup))
    assert (again.code, "exists" in again.err) == (2, True)
    running = gateway.exeat("restore", str(backup))
    assert (running.code != 0, "running" in running.err) == (True, True)

    gateway.admin.rotate_secret("api", NEW.encode())
    gateway.stop()
    store = (gateway.state / "vault" / "store.json").read_bytes()
    older = gateway.exeat("restore", str(backup))
    assert (older.code, "--accept-older" in older.err) == (1, True), older.err
    assert gateway.exeat("restore", str(backup), "--accept-older").code == 2

    document = json.loads(backup.read_text())
    for change in ({"state": document["store"]}, {"generation": 99}, {"seal": "00" * 32}, {"made_at": 0}):
        (tmp_path / "changed.json").write_text(json.dumps(document | change))
        options = ("--accept-older", "--why", "a test")
        changed = gateway.exeat("restore", str(tmp_path / "changed.json"), *options)
        assert (changed.code, "not as it was written" in changed.err) == (1, True), change
    assert (gateway.state / "vault" / "store.json").read_bytes() == store

    done = gateway.exeat("restore", str(backup), "--accept-older", "--why", "the disk was lost")
    assert done.code == 0, done.err
    gateway.start()
    (told,) = gateway.awaited(event="admin.action", action="store.restored")
    assert told["why"] == "the disk was lost"
    assert box.curl("-o", "/dev/null", "-w", "%{http_code}", origin.url("/keyed")).out != "200"
    assert sent(gateway, origin) == OLD
    assert gateway.exeat("audit", "verify").code == 0


def test_store_and_state_put_back_together_are_older_than_the_log(gateway: TestGateway, origin: Origin) -> None:
    """Who copies the whole folder back is found out by the log, and the newest backup is the way out."""
    gateway.stop()
    copy = gateway.state.with_name("copy")
    shutil.copytree(gateway.state / "vault", copy)
    gateway.start()
    gateway.admin.rotate_secret("api", NEW.encode())
    gateway.stop()
    for name in ("store.json", "state.sqlite"):
        place = gateway.state / "vault" / name
        place.write_bytes((copy / name).read_bytes())
        for leftover in ("-wal", "-shm"):
            place.with_name(name + leftover).unlink(missing_ok=True)
    said = refused_start(gateway)
    assert "last recorded one" in said
    assert "exeat restore" in said


def test_the_key_is_replaced_while_calls_go_on(gateway: TestGateway, origin: Origin) -> None:
    """After a rotation everything works, here and after a restart; the old key opens nothing."""
    key = gateway.config / "keys" / "store.key"
    before = key.read_text()
    assert gateway.exeat("store", "rotate-key").code == 0
    assert key.read_text() != before
    assert sent(gateway, origin) == OLD
    assert gateway.awaited(event="admin.action", action="store.key-rotated")
    gateway.stop()
    gateway.start()
    assert sent(gateway, origin) == OLD
    gateway.stop()
    key.write_text(before)
    assert "does not open with this key" in refused_start(gateway)


def test_a_restore_onto_a_new_machine(tmp_path: Path, gateway: TestGateway, origin: Origin) -> None:
    """Backup and key are all that is needed: a machine that never had a gateway goes on where the other one was."""
    assert gateway.exeat("backup", str(tmp_path / "backup.json")).code == 0
    gateway.stop()
    other = TestGateway(tmp_path / "other", policy=POLICY, credentials=CREDENTIALS, origins=[origin])
    wrong = other.exeat("restore", str(tmp_path / "backup.json"))
    assert (wrong.code, "under another key" in wrong.err) == (1, True)
    (other.config / "keys" / "store.key").write_text((gateway.config / "keys" / "store.key").read_text())
    assert other.exeat("restore", str(tmp_path / "backup.json")).code == 0
    with other:
        assert sent(other, origin) == OLD


def test_a_scan_finds_what_the_gateway_holds_and_is_given_none_of_it(tmp_path: Path, gateway: TestGateway) -> None:
    """A workspace with a brokered secret in it is told from a clean one; the answer of the gateway shows no secret."""
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "notes.txt").write_text("nothing here, and no token\n")
    clean = gateway.exeat("scan", str(place))
    assert (clean.code, "nothing found" in clean.out) == (0, True), clean.out + clean.err
    (place / "config.json").write_bytes(gzip.compress(b'{"key": "' + base64.b64encode(OLD.encode()) + b'"}'))
    found = gateway.exeat("scan", str(place))
    assert found.code == 1
    assert "store:api" in found.out
    assert OLD not in found.out + found.err + json.dumps(gateway.admin.call("POST", "/v1/store/marks", {}))
    assert gateway.exeat("scan", str(tmp_path / "none")).code == 2
    gateway.stop()
    off = gateway.exeat("scan", str(place))
    assert (off.code != 0, "--looks-only" in off.err) == (True, True)
    assert gateway.exeat("scan", "--looks-only", str(place)).code == 0
