"""Keeps the tree over all durable records and signs checkpoints of it.

`tree` (size and subtree roots as JSON) saves reading the whole log at each start; it is believed only if its root
is the one in the last checkpoint that our own key signed, else the tree is built anew from the segments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import orjson

from audit.chain import Tree
from audit.checkpoints import Checkpoint, CheckpointInvalid, load_signer, open_note, read_notes
from audit.segments import LogRefused, fsync_directory, walk

CHECKPOINTS: Final = "checkpoints"
PUBLIC_KEY: Final = "checkpoint.pub"
TREE: Final = "tree"


class Notary:
    """Tree and signing key of one node. add() is called with each group of lines that became durable."""

    def __init__(self, directory: Path, node: str, key_path: Path) -> None:
        self._directory = directory
        self._node = node
        self._key_path = key_path
        self._tree = Tree()
        self._signed = 0

    def start(self, records: int) -> None:
        """Load the key, mend the checkpoint file, take up the tree of a log that ends with record `records`.

        Raises LogRefused when the key is unfit, a checkpoint does not hold, or records it covers are missing.
        """
        try:
            self._signer = load_signer(self._key_path, self._node)
            last = self._read_checkpoints()
        except CheckpointInvalid as error:
            raise LogRefused(f"checkpoints: {error}") from None
        self._replace(PUBLIC_KEY, f"{self._signer.key}\n".encode())
        if last is not None and records < last.size:
            raise LogRefused(f"the log ends at record {records}, but {last.size} were signed: run exeat-verify")
        if last is not None:
            self._tree = self._saved(last) or Tree()
            self._signed = last.size
        for _path, _number, line in walk(self._directory, self._tree.size + 1):
            self._tree.add(line)
        if self._tree.size != records:
            raise LogRefused("records are missing between the segments: run exeat-verify")

    def add(self, lines: list[bytes]) -> None:
        """Lines that became durable, in order."""
        for line in lines:
            self._tree.add(line)

    def sign(self) -> None:
        """Append a checkpoint over all durable records, unless nothing happened since the last. Raises OSError."""
        if self._tree.size == self._signed:
            return
        note = self._signer.sign(self._tree.size, self._tree.root())
        path = self._directory / CHECKPOINTS
        new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(("" if new else "\n").encode() + note.encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            fsync_directory(self._directory)
        self._signed = self._tree.size
        state = {"size": self._tree.size, "roots": [root.hex() for root in self._tree.roots]}
        self._replace(TREE, orjson.dumps(state) + b"\n")

    def _read_checkpoints(self) -> Checkpoint | None:
        path = self._directory / CHECKPOINTS
        if not path.exists():
            return None
        text = path.read_text()
        notes = list(read_notes(text))
        whole = "\n".join(notes)
        if whole != text:
            self._replace(CHECKPOINTS, whole.encode())  # the auditor was killed while it wrote the last one
        return open_note(notes[-1], self._signer.key) if notes else None

    def _saved(self, last: Checkpoint) -> Tree | None:
        try:
            state = orjson.loads((self._directory / TREE).read_bytes())
            tree = Tree(size=int(state["size"]), roots=[bytes.fromhex(root) for root in state["roots"]])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        fits = len(tree.roots) == tree.size.bit_count() and tree.size == last.size and tree.root() == last.root
        return tree if fits else None

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self._directory / f".{name}.new"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self._directory / name)
