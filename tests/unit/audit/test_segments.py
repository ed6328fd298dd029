"""The writer and its files, with faults at each step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from audit.chain import Head
from audit.segments import Faults, LogRefused, lock_directory, recover, segment_files, walk
from audit.verify import verify
from tests.support.events import intent, outcome
from tests.support.logs import NODE, put, sample, writer


class Breaking(Faults):
    """Fails at one step, `times` times, after `keep` bytes."""

    def __init__(self, step: str, keep: int = 0, times: int = 1) -> None:
        self.step, self.keep, self.times = step, keep, times

    def cut(self, step: str, data: bytes) -> bytes:
        return data[: self.keep] if step == self.step and self.times > 0 else data

    def hit(self, step: str) -> None:
        if step == self.step and self.times > 0:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_log_of_another_node_is_not_continued(tmp_path: Path) -> None:
    """Two nodes never share a chain."""
    sample(tmp_path)
    with pytest.raises(LogRefused, match="another node"):
        recover(tmp_path, "node-2")


def test_a_segment_without_a_record_is_not_continued(tmp_path: Path) -> None:
    """A file that holds no record is not the end of a log."""
    (tmp_path / "exeat-000001.jsonl").write_bytes(b"\x00" * 4_096)
    with pytest.raises(LogRefused, match="damaged"):
        recover(tmp_path, NODE)


def test_a_symbolic_link_as_log_directory_is_refused(tmp_path: Path) -> None:
    """Where the log goes is not for whoever can write a link."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "log").symlink_to(tmp_path / "real")
    with pytest.raises(LogRefused):
        lock_directory(tmp_path / "log")


def test_zeros_after_a_power_loss_are_a_torn_line(tmp_path: Path) -> None:
    """A tail of zero bytes is reported like any unfinished line."""
    made = writer(tmp_path)
    put(made, intent())
    made.sync()
    made.close()
    segment = segment_files(tmp_path)[0]
    segment.write_bytes(segment.read_bytes() + b"\x00" * 512)
    found = recover(tmp_path, NODE)
    assert (found.sealed, len(found.torn), found.head.sequence) == (False, 512, 2)
    again = writer(tmp_path)
    again.close()
    report = verify([tmp_path])
    assert report.bad is None
    assert report.coverage.torn_bytes == 512


@pytest.mark.parametrize("step", ["open", "open-fsync", "open-directory"])
def test_a_segment_that_cannot_be_opened_changes_nothing(tmp_path: Path, step: str) -> None:
    """The next attempt succeeds and no number or record is lost."""
    made = writer(tmp_path)
    put(made, intent())
    made._faults = Breaking(step)
    before = made.head
    with pytest.raises(OSError, match="Input/output"):
        made.reopen(OSError(errno.ENOSPC, "full"))
    assert made.head == before
    made.reopen(OSError(errno.ENOSPC, "full"))
    put(made, outcome())
    made.stop("auditor", {})
    assert [path.name for path in segment_files(tmp_path)] == ["exeat-000001.jsonl", "exeat-000002.jsonl"]
    assert verify([tmp_path], deep=True).bad is None


@pytest.mark.parametrize("keep", [0, 1, 300, 100_000])
def test_lines_of_a_failed_write_go_verbatim_to_the_next_segment(tmp_path: Path, keep: int) -> None:
    """Same sequence, same bytes: what the client was told stays true."""
    made = writer(tmp_path, Breaking("write", keep=keep))
    with pytest.raises(OSError, match="Input/output"):
        put(made, intent("req_1"), outcome("req_1"))
    assert not made.healthy
    last = made.head.sequence
    made.reopen(OSError(errno.EIO, "x"))
    assert (made.healthy, made.durable) == (True, last + 2)
    put(made, intent("req_2"))
    made.stop("auditor", {})
    assert [number for number, _line in enumerate(walk(tmp_path), 1)] == list(range(1, made.head.sequence + 1))
    report = verify([tmp_path], deep=True)
    assert report.bad is None
    assert report.coverage.suspect_segments == 1


def test_an_fsync_of_an_old_segment_settles_nothing_in_the_new_one(tmp_path: Path) -> None:
    """An fsync that was under way while the segment changed is ignored when it ends."""
    made = writer(tmp_path, segment_bytes=900)
    put(made, intent("req_1"))
    run, mark = made.begin_sync()
    put(made, intent("req_2"), intent("req_3"))
    durable = made.durable
    assert made.segment == "exeat-000002.jsonl"
    put(made, intent("req_4"))
    run()
    made.end_sync(mark)
    assert made.durable == durable == made.head.sequence - 1
    made.close()


def test_an_overtaken_fsync_settles_only_its_own_lines(tmp_path: Path) -> None:
    """A later, faster fsync in the same segment does not make newer lines durable by mistake."""
    made = writer(tmp_path)
    put(made, intent("req_1"))
    run, mark = made.begin_sync()
    put(made, intent("req_2"))
    made.sync()
    put(made, intent("req_3"))
    run()
    made.end_sync(mark)
    assert made.durable == made.head.sequence - 1
    made.close()


def test_the_head_of_nothing_is_genesis(tmp_path: Path) -> None:
    """An empty directory is a new log."""
    assert recover(tmp_path, NODE).head == Head()
