"""Sources at hand: what is swapped, half written or gone under a reader, and what systemd passed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.sources import file as file_module
from broker.sources.base import SourceError
from broker.sources.registry import Sources
from tests.support.secretsources import CANARY, all_sources, sandbox

FIRST, SECOND = b"first-" + b"1" * 4000, b"second-" + b"2" * 5000


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return all_sources(tmp_path, systemd={"shop-key": CANARY + b"\n", "short": b"abc"})


def read(sources: Sources, reference: str) -> bytes:
    return sources.fetch(reference, sandbox(), scrub=True).reveal()


def private(path: Path, value: bytes) -> Path:
    path.write_bytes(value)
    path.chmod(0o600)
    return path


class Mount:
    """A folder as the kubelet makes it (kubernetes.io: Secrets mounted as volumes are updated atomically)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounds = 0
        folder.mkdir()

    def publish(self, value: bytes) -> None:
        """Write a new round beside, and swap `..data` by one rename."""
        self.rounds += 1
        name = f"..2026_12_01_{self.rounds}"
        (self.folder / name).mkdir()
        private(self.folder / name / "token", value)
        fresh = self.folder / "..data_tmp"
        fresh.symlink_to(name)
        fresh.replace(self.folder / "..data")
        if not (self.folder / "token").is_symlink():
            (self.folder / "token").symlink_to("..data/token")
        for old in self.folder.iterdir():
            if old.name.startswith("..2026") and old.name != name:
                (old / "token").unlink()
                old.rmdir()


def test_a_swap_is_seen_whole(sources: Sources, tmp_path: Path) -> None:
    """T17: while `..data` is swapped a thousand times, each read gives one round's value or says missing."""
    mount = Mount(tmp_path / "mount")
    mount.publish(FIRST)
    going = threading.Event()

    def swap() -> None:
        while not going.is_set():
            mount.publish(SECOND if mount.rounds % 2 else FIRST)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen: set[bytes] = set()
    said: set[str] = set()
    try:
        while mount.rounds < 1000 or len(seen) < 2:
            try:
                seen.add(read(sources, f"file:{mount.folder}/token"))
            except SourceError as error:
                said.add(error.code)
    finally:
        going.set()
        swapper.join()
    assert seen == {FIRST, SECOND}
    assert said <= {"source-missing"}  # the round that the link led to was removed between the look and the opening


def test_a_mount_that_is_removed_and_put_back_is_read_again(sources: Sources, tmp_path: Path) -> None:
    """T17: nothing remembers that it was gone."""
    mount = Mount(tmp_path / "mount")
    mount.publish(FIRST)
    assert read(sources, f"file:{mount.folder}/token") == FIRST
    (mount.folder / "..data").unlink()
    with pytest.raises(SourceError, match="source-missing") as caught:
        read(sources, f"file:{mount.folder}/token")
    assert caught.value.remedy
    mount.publish(SECOND)
    assert read(sources, f"file:{mount.folder}/token") == SECOND


@pytest.mark.parametrize(
    ("sentence", "value", "code"),
    [
        ("truncated, nothing written yet", b"", "source-refused"),
        ("a line end and nothing else", b"\n", "source-refused"),
        ("shorter than a secret can be", b"ghp_", "source-refused"),
        ("two lines", b"first-line-0123\nsecond-line-0123\n", "source-refused"),
        ("a NUL that a crash left", CANARY + b"\x00" * 8, "source-refused"),
        ("longer than any secret", b"x" * (64 * 1024 + 1), "source-refused"),
    ],
)
def test_what_was_half_written_is_refused(
    sources: Sources, tmp_path: Path, sentence: str, value: bytes, code: str
) -> None:
    """No part of a secret is sent as if it were the whole."""
    path = private(tmp_path / "token", value)
    with pytest.raises(SourceError) as caught:
        read(sources, f"file:{path}")
    assert caught.value.code == code, sentence
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("changes", [1, 2, 3, 99])
def test_a_file_that_changes_while_it_is_read(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """Read again, and refused where it does not come to rest."""
    path = private(tmp_path / "token", FIRST[:2000])
    stat_of: Callable[[int], os.stat_result] = os.fstat
    calls = 0

    def fstat(descriptor: int) -> Any:
        nonlocal calls
        found = stat_of(descriptor)
        calls += 1
        if calls % 2 and (calls + 1) // 2 <= changes:  # between the first look and the read
            with path.open("ab") as stream:
                stream.write(b"+")
        return found

    monkeypatch.setattr(file_module.os, "fstat", fstat)
    if changes < file_module.READS:
        assert read(sources, f"file:{path}") == FIRST[:2000] + b"+" * changes
    else:
        with pytest.raises(SourceError, match="source-unreadable") as caught:
            read(sources, f"file:{path}")
        assert "rename" in caught.value.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_we_may_not_read_says_so(sources: Sources, tmp_path: Path) -> None:
    """Not there and not for us are two things to mend."""
    path = private(tmp_path / "token", CANARY)
    path.chmod(0o000)
    with pytest.raises(SourceError, match="source-unreadable") as caught:
        read(sources, f"file:{path}")
    assert "uid" in caught.value.remedy


def test_what_systemd_passed(sources: Sources) -> None:
    """By name, one line end taken off; what was not passed says which line of the unit would."""
    assert read(sources, "systemd:shop-key") == CANARY
    assert not sources.blocks("systemd:shop-key")
    with pytest.raises(SourceError, match="source-missing") as caught:
        read(sources, "systemd:other")
    assert "LoadCredential=other:PATH" in caught.value.remedy
    with pytest.raises(SourceError, match="source-refused"):
        read(sources, "systemd:short")
