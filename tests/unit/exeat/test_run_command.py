"""What `exeat run` says beside what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from exeat.commands.run import not_writable


def test_root_hears_which_folders_its_sandbox_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox of root is another user; an ordinary user's is that user."""
    closed, opened = tmp_path / "closed", tmp_path / "opened"
    closed.mkdir(mode=0o755)
    opened.mkdir()
    opened.chmod(0o1777)
    folders = [str(closed), str(opened), str(closed), str(tmp_path / "absent")]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert not_writable(folders) == [str(closed)]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert not_writable(folders) == []
