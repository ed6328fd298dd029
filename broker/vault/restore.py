"""`python -I -m broker.vault.restore BOOT_FD BACKUP_FD ANSWER_FD`: a backup into the state folder, or no change at all.

A process of its own, so that it runs as the vault's user, who alone enters that folder. The order: everything of the
backup is checked in a scratch folder; what lies in the way is kept as *.replaced; the database comes first and the
store last, each by one rename. After a crash between the two, restoring again mends it.

It writes one JSON object: {"generation"} or {"error", "detail", "remedy"}.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from broker.errors import BrokerError
from broker.vault.backup import MAX_BACKUP_BYTES, Backup, BackupRefused, check_age, parse
from broker.vault.keys import check_private_directory
from broker.vault.store import SecretStore, StoreError
from broker.vault.store_key import StoreKey
from broker.vault.wrapping import Unwrapped, unwrapped_of
from net.process import quiet_hooks, read_boot
from net.upstream import UpstreamProxy
from state.errors import StateError
from state.store import StateStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What the command says. The key fields are those of the vault's own boot document."""

    state_dir: str
    key_file: str | None = None
    key_text: str | None = field(default=None, repr=False)
    passphrase_file: str | None = None
    passphrase: str | None = field(default=None, repr=False)
    wrapped_file: str | None = None
    wrapping: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    systemd: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    internal_ranges: tuple[str, ...] = ()
    self_addresses: tuple[str, ...] = ()
    upstream: UpstreamProxy | None = None
    danger_key_beside_store: bool = False
    logged_generation: int = 0
    logged_digest: str = ""
    accept_older: bool = False
    why: str = ""
    actor: str = ""


def restore(boot: Boot, backup: Backup, now: float, unwrapped: Unwrapped | None = None) -> int:
    """Do it; returns the store's generation afterwards. Raises BrokerError and StateError, and nothing has changed.

    `unwrapped`: the key, where a key service wraps it.
    """
    folder = Path(boot.state_dir)
    check_private_directory(folder)
    last = _last(folder, (boot.logged_generation, boot.logged_digest))
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=folder) as name:
        scratch = Path(name)
        for file, content in (("store.json", backup.store_json), ("state.sqlite", backup.database)):
            with os.fdopen(os.open(scratch / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(content)
        try:
            store = SecretStore(scratch / "store.json", StoreKey(boot, os.urandom, None, unwrapped).read, os.urandom)
        except StoreError as error:
            raise _unopened(error) from None
        backup.check(store)
        state = StateStore(scratch / "state.sqlite")
        try:
            _settle(boot, backup, store, state, last, now)
        finally:
            state.close()
        for file in ("state.sqlite", "store.json"):
            _exchange(scratch / file, folder / file)
        return store.generation


def _settle(
    boot: Boot, backup: Backup, store: SecretStore, state: StateStore, last: tuple[int, str], now: float
) -> None:
    """Bring what lies in the scratch folder up to now. Raises BackupRefused and StateError."""
    try:
        check_age(backup, last, lambda: store.digest)
    except BackupRefused:
        if not boot.accept_older:
            raise
        store.lift(last[0])
    state.record_store_generation(store.generation, store.digest)
    note: dict[str, str | int] = {"generation": backup.generation, "actor": boot.actor, "why": boot.why}
    state.restored(note, state.raise_clock_floor(now))


def _last(folder: Path, logged: tuple[int, str]) -> tuple[int, str]:
    """(generation, digest) of the newest store that the folder's own database or the log know of."""
    path = folder / "state.sqlite"
    if not path.exists():
        return logged
    try:
        state = StateStore(path)
    except StateError:
        return logged  # it is being replaced because it is damaged, perhaps
    try:
        return max(state.store_generation(), logged)
    finally:
        state.close()


def _exchange(fresh: Path, place: Path) -> None:
    for leftover in (place.with_name(place.name + "-wal"), place.with_name(place.name + "-shm")):
        leftover.unlink(missing_ok=True)  # of the database that goes; its own would be read into the new one
    if place.exists():
        place.replace(place.with_name(place.name + ".replaced"))
    fresh.replace(place)
    descriptor = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unopened(error: StoreError) -> BackupRefused:
    if error.code == "store-wrong-key":
        return BackupRefused(
            "backup-wrong-key",
            "the backup was made under another key than the one that exeat.yaml names",
            "put that key back (key: in exeat.yaml), restore, and rotate it again",
        )
    return BackupRefused("backup-corrupt", error.detail or error.code, "take another copy of it, or another backup")


def main(arguments: list[str]) -> int:
    quiet_hooks("restore")
    logging.disable(logging.CRITICAL)  # no logger of a library prints what it was given, as in the vault
    boot = read_boot(int(arguments[0]), Boot)
    try:
        with os.fdopen(int(arguments[1]), "rb") as stream:
            raw = stream.read(MAX_BACKUP_BYTES + 1)
        if len(raw) > MAX_BACKUP_BYTES:
            raise BackupRefused("backup-corrupt", "the file is too large for a backup")
        _, unwrapped = asyncio.run(unwrapped_of(boot))
        answer: dict[str, object] = {"generation": restore(boot, parse(raw), time.time(), unwrapped)}
    except BrokerError as error:
        answer = {"error": error.code, "detail": error.detail or error.code, "remedy": error.remedy}
    except StateError as error:
        answer = {"error": error.code, "detail": f"the backup's database: {error.detail or error.code}", "remedy": ""}
    except OSError as error:
        answer = {"error": "state-unavailable", "detail": os.strerror(error.errno or 0), "remedy": ""}
    with os.fdopen(int(arguments[2]), "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
