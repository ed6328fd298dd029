"""A backup: store and state of one moment in one file that cannot be changed, mixed or aged unnoticed.

Format 1 (JSON, one object):
 format        1
 made_at       wall time in seconds
 generation    of the store; with store_digest what the log remembers (RULINGS 9.8)
 store         store.json, as base64; encrypted as it lies on disk
 state         the database (sandboxes, hashes, tickets), as base64
 seal          HMAC-SHA256 of all the rest under a key that is derived from the store's

The store's key is not in it: who has the backup alone reads no secret. The log is not in it either; it is append-only
and copied by whatever copies files.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.errors import BrokerError
from broker.vault.keys import read_private
from broker.vault.store import MAX_STORE_BYTES, SecretStore
from state.store import StateStore

FORMAT = 1
MAX_BACKUP_BYTES = 1 << 30
_PURPOSE = b"backup 1"


class BackupRefused(BrokerError):
    """The backup is not taken. `code`: backup-corrupt, backup-newer, backup-wrong-key, backup-older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A backup whose form is right. Nothing is believed of it before `check`."""

    generation: int
    made_at: float
    store_json: bytes
    database: bytes
    sealed: bytes
    seal: bytes

    def check(self, store: SecretStore) -> None:
        """Raise BackupRefused unless it was made by who holds the key of `store`, which was opened from it."""
        whole = store.generation == self.generation and hashlib.sha256(self.store_json).hexdigest() == store.digest
        if not whole or not hmac.compare_digest(store.tag(_PURPOSE, self.sealed), self.seal):
            raise BackupRefused(
                "backup-corrupt", "the backup is not as it was written", "take another copy of it, or another backup"
            )


def make(store_path: Path, store: SecretStore, state: StateStore, now: float) -> bytes:
    """The backup's bytes. The caller sees to it that nothing changes meanwhile. Raises BrokerError and StateError."""
    raw = read_private(store_path, "store-missing", "store-modes", limit=MAX_STORE_BYTES)
    document: dict[str, Any] = {
        "format": FORMAT,
        "made_at": now,
        "generation": store.generation,
        "store": base64.b64encode(raw).decode(),
        "state": base64.b64encode(state.snapshot()).decode(),
    }
    document["seal"] = store.tag(_PURPOSE, _sealed(document)).hex()
    return json.dumps(document, sort_keys=True).encode() + b"\n"


def parse(raw: bytes) -> Backup:
    """Raises BackupRefused."""
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise BackupRefused(
                "backup-newer", "the backup has a format that this version does not know", "use the newer version"
            )
        seal = bytes.fromhex(document.pop("seal"))
        if document.keys() != {"format", "made_at", "generation", "store", "state"}:
            raise ValueError
        return Backup(
            generation=_whole(document["generation"]),
            made_at=float(document["made_at"]),
            store_json=base64.b64decode(document["store"], validate=True),
            database=base64.b64decode(document["state"], validate=True),
            sealed=_sealed(document),
            seal=seal,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise BackupRefused("backup-corrupt", "this is no backup of `exeat backup`, or a damaged one") from None


def check_age(backup: Backup, last: tuple[int, str], digest_of: Callable[[], str]) -> None:
    """Raise BackupRefused where a later generation than the backup's is known, or another one of the same number.

    `last` is (generation, digest) of the newest that state or log know; `digest_of` gives the backup's.
    """
    generation, digest = last
    if backup.generation > generation or (backup.generation == generation and digest in ("", digest_of())):
        return
    raise BackupRefused(
        "backup-older",
        f"the backup is of generation {backup.generation}, and generation {generation} was in use since: "
        "secrets that were rotated or removed would come back",
        "restore a newer backup; where there is none: --accept-older --why TEXT, then rotate what has changed since",
    )


def _sealed(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _whole(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value
