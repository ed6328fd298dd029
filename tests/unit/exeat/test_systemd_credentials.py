"""What systemd passed to the gateway goes to the vault, and nothing else that lies there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exeat import systemd_credentials as module
from exeat.systemd_credentials import systemd_credentials


def test_without_a_folder_there_are_none(tmp_path: Path) -> None:
    """Not started by systemd, or a folder that cannot be read: none, and no fault."""
    assert systemd_credentials({}, None) == {}
    assert systemd_credentials({"CREDENTIALS_DIRECTORY": ""}, None) == {}
    assert systemd_credentials({"CREDENTIALS_DIRECTORY": str(tmp_path / "none")}, None) == {}


def test_what_is_no_credential_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's own key, folders, pipes, what is longer than any secret, and what is too much together."""
    monkeypatch.setattr(module, "MAX_ONE", 8)
    monkeypatch.setattr(module, "MAX_ALL", 12)
    for name, value in (("a", b"12345678"), ("b", b"123456789"), ("c", b"12345"), ("d", b"1234"), ("store.key", b"k")):
        (tmp_path / name).write_bytes(value)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    found = systemd_credentials({"CREDENTIALS_DIRECTORY": str(tmp_path)}, "store.key")
    assert found == {"a": b"12345678".hex(), "d": b"1234".hex()}
