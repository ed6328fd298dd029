"""Signed notes and the keys that check them."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.checkpoints import CheckpointInvalid, Signer, VerifierKey, load_signer, open_note, read_notes

SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))), "node-1")
NOTE = SIGNER.sign(7, b"r" * 32)

CHANGED = [
    (NOTE.replace("\n7\n", "\n8\n"), "does not hold", "Another size."),
    (
        NOTE.replace(base64.b64encode(b"r" * 32).decode(), base64.b64encode(b"s" * 32).decode()),
        "does not hold",
        "Root.",
    ),
    (NOTE.replace("node-1\n7", "node-2\n7"), "another log", "Another log's name."),
    (NOTE.replace("\n7\n", "\n07\n"), "not a checkpoint", "A size with a leading zero."),
    (NOTE.replace("\n\n", "\n"), "not a checkpoint", "No empty line before the signatures."),
    (NOTE.replace("\n7\n", "\n7\nextra\n".replace("7\nextra", "7")[:-1] + "\nmore\n"), "does not hold", "A line more."),
    ("", "not a checkpoint", "Nothing."),
]


@pytest.mark.parametrize(("note", "problem", "sentence"), CHANGED, ids=[row[2] for row in CHANGED])
def test_a_changed_note_does_not_open(note: str, problem: str, sentence: str) -> None:
    """Every byte of the text is signed."""
    with pytest.raises(CheckpointInvalid, match=problem):
        open_note(note, SIGNER.key)


def test_a_note_of_another_key_does_not_open() -> None:
    """The name alone proves nothing."""
    other = Signer(Ed25519PrivateKey.from_private_bytes(b"k" * 32), "node-1")
    with pytest.raises(CheckpointInvalid, match="not signed by this key"):
        open_note(NOTE, other.key)


@pytest.mark.parametrize("text", ["", "a+b+c", "name+00000000+AQ==", str(SIGNER.key).replace("node-1", "node-2")])
def test_a_wrong_verifier_key_is_refused(text: str) -> None:
    """The hash in a key line covers name and key."""
    with pytest.raises(CheckpointInvalid):
        VerifierKey.parse(text)


def test_a_signed_note_opens() -> None:
    """Size and root come back as signed, and the key line reads back as the same key."""
    checkpoint = open_note(NOTE, VerifierKey.parse(f"{SIGNER.key}\n"))
    assert (checkpoint.size, checkpoint.root) == (7, b"r" * 32)


def test_notes_are_read_one_by_one_and_an_unfinished_one_is_left_out() -> None:
    """The file is notes with an empty line between them."""
    other = SIGNER.sign(9, b"t" * 32)
    assert list(read_notes(f"{NOTE}\n{other}")) == [NOTE, other]
    assert list(read_notes(f"{NOTE}\n{other[:-3]}")) == [NOTE]
    assert list(read_notes("")) == []


def test_a_signing_key_is_made_once_and_must_stay_private(tmp_path: Path) -> None:
    """Made with mode 0600; a looser one is refused."""
    path = tmp_path / "key.pem"
    made = load_signer(path, "node-1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_signer(path, "node-1").key == made.key
    path.chmod(0o640)
    with pytest.raises(CheckpointInvalid, match="0600"):
        load_signer(path, "node-1")


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    """A file that is no Ed25519 key is named as such, without its text."""
    path = tmp_path / "key.pem"
    path.write_text("hunter2")
    path.chmod(0o600)
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        load_signer(path, "node-1")
