"""The store's key: from a file or a passphrase. Loose modes, wrong owners and missing files refuse (RULINGS 9.8).

 key file         32 bytes as 64 hex digits or base64, mode 0600, ours, not below the state directory
 key text         the same, from a service manager's credential
 passphrase file  at least 12 characters; argon2id (64 MiB, 3 passes) with the salt written in the store

The key never travels by argv or environment; the boot JSON names the file, or holds the passphrase itself.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path

from argon2.low_level import Type, hash_secret_raw

from broker.errors import BrokerError

KEY_BYTES = 32
MIN_PASSPHRASE = 12
ARGON2_PASSES = 3
ARGON2_MEMORY_KIB = 64 * 1024
ARGON2_LANES = 1


class KeyRefused(BrokerError):
    """The key cannot be used. `code`: key-missing, key-modes, key-invalid, key-beside-store."""


def read_key_file(path: Path, *, state_dir: Path, danger_beside_store: bool = False) -> bytes:
    """The 32 key bytes in `path`. Raises KeyRefused."""
    if not danger_beside_store and path.resolve().is_relative_to(state_dir.resolve()):
        raise KeyRefused(
            "key-beside-store",
            "the key file lies in the state directory, so whoever copies one has the other",
            "move it elsewhere, or say --danger-key-beside-store",
        )
    key = key_from_text(read_private(path, "key-missing", "key-modes"))
    if key is None:
        raise KeyRefused(
            "key-invalid",
            f"{path} does not hold a key (32 bytes as 64 hex digits or base64)",
            "restore the key that the store was made with; without a store, remove the file and run `exeat init`",
        )
    return key


def key_from_text(text: bytes) -> bytes | None:
    """The 32 bytes that `text` spells as 64 hex digits or base64, or None."""
    for decode in (bytes.fromhex, lambda value: base64.b64decode(value, validate=True)):
        try:
            key = decode(text.strip().decode("ascii"))
        except (ValueError, binascii.Error, UnicodeDecodeError):
            continue
        if len(key) == KEY_BYTES:
            return key
    return None


def key_from_passphrase(passphrase: bytes, salt: bytes) -> bytes:
    """argon2id over `passphrase`; `salt` is the store's 16 bytes. Raises KeyRefused for a short passphrase."""
    if len(passphrase) < MIN_PASSPHRASE:
        raise KeyRefused("key-invalid", f"the passphrase is shorter than {MIN_PASSPHRASE} characters")
    return hash_secret_raw(
        passphrase,
        salt,
        time_cost=ARGON2_PASSES,
        memory_cost=ARGON2_MEMORY_KIB,
        parallelism=ARGON2_LANES,
        hash_len=KEY_BYTES,
        type=Type.ID,
    )


def read_private(path: Path, missing: str, modes: str, *, limit: int = 64 * 1024) -> bytes:
    """The bytes of a file that only we (or root) can read. Raises KeyRefused with the code `missing` or `modes`.

    The descriptor is checked, not the name, so that the file judged is the file read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        remedy = f"let uid {os.geteuid()} alone read it: chown {os.geteuid()} {path.parent} {path}"
        raise KeyRefused(missing, f"{path} cannot be opened: permission denied", remedy) from None
    except OSError:
        raise KeyRefused(
            missing,
            f"{path} cannot be opened",
            "run `exeat init`, which writes what is missing, or name the right file",
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
            raise KeyRefused(modes, f"{path} must be a regular file of ours with mode 0600", f"chmod 600 {path}")
        folder = os.stat(path.parent)
        if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
            raise KeyRefused(modes, f"others may replace {path}", f"chmod go-w {path.parent}")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise KeyRefused(missing, f"{path} is too large")
        return content
    finally:
        os.close(descriptor)


def check_private_directory(path: Path) -> None:
    """Raise KeyRefused(`dir-modes`) unless `path` is our own directory with mode 0700."""
    try:
        found = os.lstat(path)
    except OSError:
        raise KeyRefused("dir-missing", f"{path} does not exist", "run `exeat init`") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise KeyRefused("dir-modes", f"{path} must be a directory of ours with mode 0700", f"chmod 700 {path}")
