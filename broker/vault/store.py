"""The embedded secret store: one file, envelope-encrypted, unreadable without the key.

Format 1 (JSON, one object; a change of meaning takes a new number, and unknown numbers are refused):
 format      1
 generation  counts changes; inside `seal`
 salt        16 bytes for argon2id, whether or not a passphrase is used
 seal        AES-256-GCM of the empty string under the key; its associated data is the SHA-256 of all the rest: it
             proves the generation and the set of records (no record can be dropped, added or put back)
 check       AES-256-GCM of the empty string under the key, bound to the salt: tells a wrong key from damage
 records     name -> {owner, version, created_at, scrub, wrapped, body}
             wrapped: a fresh data key per record, under the key; body: the value, under the data key.
             Both are bound to (name, owner, version, scrub) as associated data, so that a swapped record fails.
Every ciphertext is nonce (12 bytes) + AES-256-GCM, as base64.

Opening checks all of it and fails closed, naming the record. Writes go to a new file, fsync, rename, fsync of the
directory. The SHA-256 of the file is the generation digest that the log and the state remember (RULINGS 9.8).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from broker.errors import BrokerError
from broker.vault.keys import check_private_directory, read_private
from broker.vault.secret import Secret, check_value

FORMAT = 1
OWN_SECRETS = "exeat/"
"""Names below this are ours (the certificate authority): not listed, not added by anyone, not a source."""
MAX_STORE_BYTES = 64 * 1024 * 1024
_KEY_CHECK = b"exeat store key 1\x00"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(?:/[a-z0-9][a-z0-9._-]*)*\Z")

KeySource = Callable[[bytes], bytes]
"""Gives the 32-byte key; the argument is the store's salt."""
Random = Callable[[int], bytes]


class StoreError(BrokerError):
    """The store cannot be used, or refuses a change. Never holds a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    name: str
    owner: str
    version: int
    created_at: float
    scrub: bool
    wrapped: bytes
    body: bytes

    @property
    def bound(self) -> bytes:
        return json.dumps([FORMAT, self.name, self.owner, self.version, self.scrub]).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretInfo:
    """What may be shown of a stored secret."""

    name: str
    owner: str
    version: int
    created_at: float
    scrub: bool


class _Held(NamedTuple):
    """Key and records go together: one thread reads while another one rotates."""

    key: bytes
    records: dict[str, _Record]


_RESTORE = "restore store.json in the state folder from a backup of the same generation"


class SecretStore:
    """The open store. All methods block; changes are on disk when they return."""

    def __init__(self, path: Path, key: KeySource, random: Random) -> None:
        """Open the store at `path`, or make an empty one. Raises StoreError and KeyRefused.

        Codes: store-modes, store-corrupt, store-wrong-key, record-corrupt (`detail` names the record), store-newer.
        """
        self._path = path
        self._random = random
        check_private_directory(path.parent)
        if os.path.lexists(path):
            raw = read_private(path, "store-missing", "store-modes", limit=MAX_STORE_BYTES)
            self._salt, self.generation, check, seal, records = _parse(raw)
            self._held = _Held(key(self._salt), records)
            self._verify(check, seal)
            self.digest = hashlib.sha256(raw).hexdigest()
        else:
            self._salt = random(16)
            self._held = _Held(key(self._salt), {})
            self.generation = 0
            self.digest = ""
            self._commit(self._held)

    def names(self) -> tuple[SecretInfo, ...]:
        """Everything but values, sorted by name."""
        return tuple(
            SecretInfo(
                name=record.name,
                owner=record.owner,
                version=record.version,
                created_at=record.created_at,
                scrub=record.scrub,
            )
            for _, record in sorted(self._held.records.items())
        )

    @property
    def salt(self) -> bytes:
        """What a key from a passphrase is derived with."""
        return self._salt

    def read(self, name: str) -> Secret:
        """The secret `name`. Raises StoreError(`secret-missing` | `record-corrupt`)."""
        held = self._held
        record = held.records.get(name)
        if record is None:
            raise StoreError("secret-missing", name, "add it: exeat secret add")
        return Secret(
            _decrypt(held.key, record), name=name, version=str(record.version), owner=record.owner, scrub=record.scrub
        )

    def add(self, name: str, value: bytes, *, owner: str, now: float, scrub: bool = True) -> SecretInfo:
        """Store a new secret. Raises StoreError(`secret-exists`, `secret-name`) and SecretRefused."""
        if not _NAME.match(name) or len(name) > 200:
            raise StoreError("secret-name", "a name is lower-case words of [a-z0-9._-] joined by /")
        if name in self._held.records:
            raise StoreError(
                "secret-exists", f"the store already has {name}", f"give it another value: exeat secret rotate {name}"
            )
        return self._put(name, value, owner=owner, version=1, now=now, scrub=scrub)

    def rotate(self, name: str, value: bytes, *, now: float, scrub: bool | None = None) -> SecretInfo:
        """Give `name` a new value and the next version. Raises StoreError(`secret-missing`) and SecretRefused."""
        old = self._held.records.get(name)
        if old is None:
            raise StoreError("secret-missing", f"the store has no {name}", f"add it: exeat secret add {name}")
        keep = old.scrub if scrub is None else scrub
        return self._put(name, value, owner=old.owner, version=old.version + 1, now=now, scrub=keep)

    def remove(self, name: str) -> None:
        """Forget `name`. Raises StoreError(`secret-missing`)."""
        held = self._held
        if name not in held.records:
            raise StoreError("secret-missing", f"the store has no {name}", "see `exeat secret list`")
        self._commit(held._replace(records={key: record for key, record in held.records.items() if key != name}))

    def rekey(self, key: bytes) -> int:
        """`store rotate-key`: every value under a fresh data key, every data key under `key`; how many there are.

        One write: until it is on disk the old key opens the store, from then on only `key`.
        """
        held = self._held
        values = ((record, _decrypt(held.key, record)) for record in held.records.values())
        fresh = {record.name: self._sealed(key, record, value) for record, value in values}
        self._commit(_Held(key, fresh))
        return len(fresh)

    def tag(self, purpose: bytes, content: bytes) -> bytes:
        """32 bytes that only who holds the store's key can make for `content`, and for no other `purpose`."""
        derived = HKDF(algorithm=SHA256(), length=32, salt=self._salt, info=b"exeat " + purpose).derive(self._held.key)
        return hmac.digest(derived, content, "sha256")

    def lift(self, generation: int) -> None:
        """Write the store again as a generation after `generation`, which was used up by another copy of it."""
        self.generation = max(self.generation, generation)
        self._commit(self._held)

    def _put(self, name: str, value: bytes, *, owner: str, version: int, now: float, scrub: bool) -> SecretInfo:
        check_value(value, scrub=scrub)
        blank = _Record(name=name, owner=owner, version=version, created_at=now, scrub=scrub, wrapped=b"", body=b"")
        held = self._held
        self._commit(held._replace(records={**held.records, name: self._sealed(held.key, blank, value)}))
        return SecretInfo(name=name, owner=owner, version=version, created_at=now, scrub=scrub)

    def _sealed(self, key: bytes, record: _Record, value: bytes) -> _Record:
        data_key = self._random(32)
        return replace(
            record,
            wrapped=_seal(key, data_key, record.bound, self._random),
            body=_seal(data_key, value, record.bound, self._random),
        )

    def _verify(self, check: bytes, seal: bytes) -> None:
        key, records = self._held
        try:
            _open(key, check, _KEY_CHECK + self._salt, "")
        except StoreError:
            raise StoreError(
                "store-wrong-key",
                "the store does not open with this key",
                "restore the key it was made with (key: in exeat.yaml); no other can open it",
            ) from None
        # The records before the seal: where one of them is bad, its name is worth more than "the seal does not fit".
        for name, record in sorted(records.items()):
            try:
                _decrypt(key, record)
            except StoreError:
                raise StoreError("record-corrupt", name, "restore the store from a backup of this generation") from None
        try:
            _open(key, seal, _rest(self._salt, self.generation, records), "")
        except StoreError:
            raise StoreError("store-corrupt", "the set of records is not the one that was sealed", _RESTORE) from None

    def _commit(self, held: _Held) -> None:
        generation = self.generation + 1
        seal = _seal(held.key, b"", _rest(self._salt, generation, held.records), self._random)
        check = _seal(held.key, b"", _KEY_CHECK + self._salt, self._random)
        raw = _render(self._salt, generation, check, seal, held.records)
        _write_private(self._path, raw)
        self._held = held
        self.generation = generation
        self.digest = hashlib.sha256(raw).hexdigest()


def check_rollback(store: SecretStore, recorded: tuple[int, str]) -> None:
    """Raise StoreError(`store-rolled-back`) unless the store is the recorded generation or a later one.

    Later is accepted: a crash between the file's rename and the record of it leaves exactly that.
    """
    generation, digest = recorded
    if store.generation < generation or (store.generation == generation and digest and store.digest != digest):
        raise StoreError(
            "store-rolled-back",
            f"the store is generation {store.generation}, the last recorded one is {generation}"
            + (" with other contents" if store.generation == generation else ""),
            "restore the newest backup: exeat restore FILE (its --help says what to do where there is no newer one)",
        )


def _decrypt(key: bytes, record: _Record) -> bytes:
    data_key = _open(key, record.wrapped, record.bound, record.name)
    return _open(data_key, record.body, record.bound, record.name)


def _seal(key: bytes, value: bytes, bound: bytes, random: Random) -> bytes:
    nonce = random(12)
    return nonce + AESGCM(key).encrypt(nonce, value, bound)


def _open(key: bytes, sealed: bytes, bound: bytes, name: str) -> bytes:
    try:
        return AESGCM(key).decrypt(sealed[:12], sealed[12:], bound)
    except (InvalidTag, ValueError):
        raise StoreError("record-corrupt", name) from None


def _document(salt: bytes, generation: int, records: Mapping[str, _Record]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "generation": generation,
        "salt": base64.b64encode(salt).decode(),
        "records": {
            name: {
                "owner": record.owner,
                "version": record.version,
                "created_at": record.created_at,
                "scrub": record.scrub,
                "wrapped": base64.b64encode(record.wrapped).decode(),
                "body": base64.b64encode(record.body).decode(),
            }
            for name, record in records.items()
        },
    }


def _rest(salt: bytes, generation: int, records: Mapping[str, _Record]) -> bytes:
    text = json.dumps(_document(salt, generation, records), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def _render(salt: bytes, generation: int, check: bytes, seal: bytes, records: Mapping[str, _Record]) -> bytes:
    document = {
        **_document(salt, generation, records),
        "check": base64.b64encode(check).decode(),
        "seal": base64.b64encode(seal).decode(),
    }
    return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"


def _parse(raw: bytes) -> tuple[bytes, int, bytes, bytes, dict[str, _Record]]:
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise StoreError(
                "store-newer", "the store has a format that this version does not know", "start the newer version"
            )
        records: dict[str, _Record] = {}
        for name, item in document["records"].items():
            try:
                records[name] = _Record(
                    name=name,
                    owner=str(item["owner"]),
                    version=int(item["version"]),
                    created_at=float(item["created_at"]),
                    scrub=item["scrub"] is True,
                    wrapped=base64.b64decode(item["wrapped"], validate=True),
                    body=base64.b64decode(item["body"], validate=True),
                )
            except (KeyError, TypeError, ValueError):
                raise StoreError("record-corrupt", str(name)) from None
        return (
            base64.b64decode(document["salt"], validate=True),
            int(document["generation"]),
            base64.b64decode(document["check"], validate=True),
            base64.b64decode(document["seal"], validate=True),
            records,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise StoreError("store-corrupt", "the store file is damaged and cannot be read", _RESTORE) from None


def _write_private(path: Path, raw: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise StoreError("store-unavailable", os.strerror(error.errno or 0)) from None
