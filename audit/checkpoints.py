"""Signed checkpoints: one Ed25519 signature over the size and RFC 6962 root of the log so far.

Formats (C2SP): tlog-checkpoint in a signed note; the key file holds one verifier key (vkey). The file `checkpoints`
is one note after the other, separated by an empty line:

    exeat.internal/log/NODE
    1234
    base64 of the root
    <empty>
    — exeat.internal/log/NODE base64(key hash | signature)

A checkpoint is made only over records that are durable.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from audit.events import AuditError

_ED25519: Final = b"\x01"
_DASH: Final = "\N{EM DASH} "


class CheckpointInvalid(AuditError):
    """A key or note that is not what this module writes, or a signature that does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was signed: `size` records with this tree root."""

    origin: str
    size: int
    root: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierKey:
    """A name and an Ed25519 public key (32 bytes)."""

    name: str
    public: bytes

    @property
    def hash(self) -> bytes:
        """The four bytes that a signature line starts with."""
        return hashlib.sha256(self.name.encode() + b"\n" + _ED25519 + self.public).digest()[:4]

    def __str__(self) -> str:
        return f"{self.name}+{self.hash.hex()}+{base64.b64encode(_ED25519 + self.public).decode()}"

    @classmethod
    def parse(cls, text: str) -> VerifierKey:
        """From a vkey line. Raises CheckpointInvalid."""
        name, _, rest = text.strip().partition("+")
        claimed, _, encoded = rest.partition("+")
        try:
            raw = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise CheckpointInvalid("not a verifier key") from None
        key = cls(name=name, public=raw[1:])
        if not name or len(raw) != 33 or raw[:1] != _ED25519 or claimed != key.hash.hex():
            raise CheckpointInvalid("not an Ed25519 verifier key")
        return key


class Signer:
    """Holds the signing key of one node."""

    def __init__(self, private: Ed25519PrivateKey, node: str) -> None:
        self._private = private
        public = private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.key = VerifierKey(name=f"exeat.internal/log/{node}", public=public)

    def sign(self, size: int, root: bytes) -> str:
        """The signed note."""
        text = f"{self.key.name}\n{size}\n{base64.b64encode(root).decode()}\n"
        signature = base64.b64encode(self.key.hash + self._private.sign(text.encode())).decode()
        return f"{text}\n{_DASH}{self.key.name} {signature}\n"


def load_signer(path: Path, node: str) -> Signer:
    """The key in `path` (PEM, PKCS 8, mode 0600), made there if the file does not exist.

    Raises CheckpointInvalid for another kind of key, another owner or a looser mode; OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        made = Ed25519PrivateKey.generate()
        pem = made.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        return Signer(made, node)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise CheckpointInvalid("the signing key must be the auditor's own file with mode 0600")
        pem = file.read()
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise CheckpointInvalid("the signing key cannot be read") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise CheckpointInvalid("the signing key is not an Ed25519 key")
    return Signer(private, node)


def read_notes(text: str) -> Iterator[str]:
    """The notes of a `checkpoints` file. An unfinished last one is left out (the auditor was killed there)."""
    lines: list[str] = []
    signed = False
    for line in text.splitlines(keepends=True):
        if signed and line == "\n":
            yield "".join(lines)
            lines, signed = [], False
        elif lines or line != "\n":
            lines.append(line)
            signed = signed or line.startswith(_DASH)
    if signed and lines[-1].endswith("\n"):
        yield "".join(lines)


def open_note(note: str, key: VerifierKey) -> Checkpoint:
    """The checkpoint in `note` if `key` signed it. Raises CheckpointInvalid."""
    text, separator, signatures = note.partition("\n\n")
    text += "\n"
    lines = text.split("\n")
    if not separator or len(lines) < 4 or not lines[1].isdigit() or (len(lines[1]) > 1 and lines[1].startswith("0")):
        raise CheckpointInvalid("not a checkpoint")
    if lines[0] != key.name:
        raise CheckpointInvalid("a checkpoint of another log")
    for line in signatures.splitlines():
        if not line.startswith(f"{_DASH}{key.name} "):
            continue
        try:
            raw = base64.b64decode(line.rpartition(" ")[2], validate=True)
            root = base64.b64decode(lines[2], validate=True)
        except binascii.Error:
            raise CheckpointInvalid("not a checkpoint") from None
        if raw[:4] != key.hash:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(key.public).verify(raw[4:], text.encode())
        except InvalidSignature:
            raise CheckpointInvalid("the signature does not hold") from None
        return Checkpoint(origin=lines[0], size=int(lines[1]), root=root)
    raise CheckpointInvalid("not signed by this key")
