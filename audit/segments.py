"""The files of the log: one writer, and what a reader needs to walk them.

Directory (0700): `exeat-000001.jsonl` ... (0600, one record a line), `lock`, `checkpoints`, `checkpoint.pub`, `tree`.

Rules of the writer (RULINGS 9.1):
1. A segment appears under its name only when its first records are on disk: written to a temporary name, fsynced,
   renamed, directory fsynced.
2. A failing write or fsync ends that file for good: it is never written again. The lines since the last good
   fsync go verbatim to the next segment, which says so (`log.sealed` with suspect). `bytes` there is where the
   good part of the old file ends; what follows is superseded.
3. A segment that was not sealed (the auditor was killed) stays as it is. The next one begins with `log.recovered`:
   good bytes, and number and SHA-256 of the bytes of an unfinished last line. The chain goes on from the last
   complete record.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from audit.chain import Head, line_hash, link
from audit.events import AuditError

SEGMENT_BYTES: Final = 64 << 20
PENDING_BYTES: Final = 8 << 20
"""Lines kept in memory until an fsync; beyond it the writer syncs before it goes on."""
_NAME = re.compile(r"exeat-(\d{6,})\.jsonl\Z")
_TEMPORARY: Final = ".next-segment"


class LogRefused(AuditError):
    """The directory cannot be used: modes, owner, another auditor, or a chain that is broken already."""


def segment_name(number: int) -> str:
    """`exeat-000001.jsonl`."""
    return f"exeat-{number:06d}.jsonl"


def segment_files(directory: Path) -> list[Path]:
    """The segments of a directory in order."""
    found = [(int(match[1]), entry) for entry in directory.iterdir() if (match := _NAME.match(entry.name))]
    return [entry for _number, entry in sorted(found)]


def segment_number(path: Path) -> int | None:
    """The number in a segment's name, None for any other name."""
    match = _NAME.match(path.name)
    return None if match is None else int(match[1])


def complete_lines(data: bytes) -> Iterator[bytes]:
    """The lines of `data` that end in a newline, without it."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        yield data[start:end]
        start = end + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a start found: the last good record, and how the last segment ended."""

    head: Head
    number: int = 0
    sealed: bool = True
    records: int = 0
    good_bytes: int = 0
    torn: bytes = b""


def recover(directory: Path, node: str) -> Recovered:
    """Read the last segment. Raises LogRefused where more than its last line is wrong, or the node is another."""
    files = segment_files(directory)
    if not files:
        return Recovered(head=Head())
    last = files[-1]
    data = last.read_bytes()
    head: Head | None = None
    event, records, good = "", 0, 0
    for line in complete_lines(data):
        record = parse_line(line)
        if record is None or (
            head is not None and (record.get("seq"), record.get("prev")) != (head.sequence + 1, head.hash)
        ):
            break
        if record.get("node") != node:
            raise LogRefused("the log belongs to another node")
        head = Head(sequence=sequence_of(record), hash=line_hash(line))
        event, records, good = str(record.get("event")), records + 1, good + len(line) + 1
    torn = data[good:]
    # What the dead writer left in the page cache must not vanish under the records that follow it.
    with last.open("rb") as file:
        os.fsync(file.fileno())
    if head is None or any(parse_line(line) is not None for line in complete_lines(torn)):
        raise LogRefused(f"{last.name} is damaged after record {head.sequence if head else 0}: run exeat-verify")
    return Recovered(
        head=head,
        number=segment_number(last) or 0,
        sealed=event == "log.sealed" and not torn,
        records=records,
        good_bytes=good,
        torn=torn,
    )


def parse_line(line: bytes) -> dict[str, object] | None:
    """The record in a raw line, or None when it is not one (JSON object with an integer `seq` above 0)."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict):
        return None
    sequence = record.get("seq")
    return record if type(sequence) is int and sequence > 0 else None


def sequence_of(record: Mapping[str, object]) -> int:
    """`seq` of a record that parse_line returned."""
    sequence = record["seq"]
    assert type(sequence) is int
    return sequence


def lock_directory(directory: Path) -> int:
    """Check modes and take the writer's lock; returns the descriptor that holds it. Raises LogRefused."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise LogRefused("the log directory must be a directory of the auditor's own uid with mode 0700")
    for entry in directory.iterdir():
        found = os.lstat(entry)
        if found.st_mode & 0o077 or not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise LogRefused(f"{entry.name} in the log directory must be the auditor's own file with mode 0600")
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise LogRefused("another auditor writes to this directory") from None
    return descriptor


def walk(directory: Path, first: int = 1) -> Iterator[tuple[Path, int, bytes]]:
    """(segment, line number, raw line) of each record from sequence `first` on, in order, superseded ones left out.

    Checks nothing: verify.py does. Lines that are no records are skipped.
    """
    files = segment_files(directory)
    starts = [first_sequence(path) for path in files]
    for index, path in enumerate(files):
        until = min((start for start in starts[index + 1 :] if start is not None), default=None)
        if until is not None and until <= first:
            continue
        for number, line in enumerate(complete_lines(path.read_bytes()), 1):
            record = parse_line(line)
            if record is None or sequence_of(record) < first:
                continue
            if until is not None and sequence_of(record) >= until:
                break
            yield path, number, line


def first_sequence(path: Path) -> int | None:
    """Sequence number of the first record in a segment, None when it has none."""
    with path.open("rb") as file:
        record = parse_line(file.readline(1 << 20).rstrip(b"\n"))
    return None if record is None else sequence_of(record)


class Faults:
    """Steps at which a test may break the writer. This one never does."""

    def hit(self, step: str) -> None:
        """Called at each named step; may raise OSError or end the process (tests/unit/audit/test_auditor.py)."""

    def cut(self, step: str, data: bytes) -> bytes:
        """How much of `data` the step really writes before it fails."""
        return data


class SegmentWriter:
    """The one writer. link() makes lines, write() puts them into the file, sync() makes them durable.

    Not thread-safe, but begin_sync()/end_sync() let the fsync itself run in a thread. After an OSError from write
    or sync call reopen() until it succeeds; linked lines are kept meanwhile and never dropped.
    """

    def __init__(
        self,
        directory: Path,
        node: str,
        clock: Callable[[], int],
        faults: Faults | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        on_durable: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self.directory = directory
        self.node = node
        self.healthy = False
        self.durable = 0
        """Sequence number up to which records are durable."""
        self._clock = clock
        self._faults = faults or Faults()
        self._segment_bytes = segment_bytes
        self._on_durable = on_durable
        self._fd = -1
        self._number = 0
        self._head = Head()
        self._size = 0
        self._records = 0
        self._good_bytes = 0
        self._good_records = 0
        self._unwritten: list[bytes] = []
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @property
    def head(self) -> Head:
        """The last linked record."""
        return self._head

    @property
    def segment(self) -> str:
        """Name of the current segment."""
        return segment_name(self._number)

    @property
    def crowded(self) -> bool:
        """Too many lines wait for an fsync."""
        return self._pending_bytes >= PENDING_BYTES

    def start(self, found: Recovered) -> None:
        """Take up the log where recover() found it and open a new segment. Raises OSError."""
        self._head, self._number, self.durable = found.head, found.number, found.head.sequence
        first: list[tuple[str, dict[str, str | int | bool]]] = []
        if not found.sealed:
            report: dict[str, str | int | bool] = {
                "segment": segment_name(found.number),
                "records": found.records,
                "bytes": found.good_bytes,
                "torn_bytes": len(found.torn),
            }
            if found.torn:
                report["torn_sha256"] = hashlib.sha256(found.torn).hexdigest()
            first.append(("log.recovered", report))
        self._open(first)

    def link(self, process: str, name: str, fields: Mapping[str, object]) -> int:
        """Make the next line; returns its sequence number. It is in the file after write()."""
        line, self._head = link(
            self._head, node=self.node, process=process, name=name, fields=fields, now_ns=self._clock()
        )
        self._unwritten.append(line)
        return self._head.sequence

    def write(self) -> None:
        """Write what was linked; starts the next segment when this one is full. Raises OSError."""
        if self._unwritten:
            lines, self._unwritten = self._unwritten, []
            # Kept until an fsync, whatever happens to this write.
            self._pending += lines
            data = b"\n".join(lines) + b"\n"
            self._pending_bytes += len(data)
            self._records += len(lines)
            try:
                self._write_all(data, "write")
            except OSError:
                self.healthy = False
                raise
            self._size += len(data)
        if self._size >= self._segment_bytes:
            self._rotate()

    def begin_sync(self) -> tuple[Callable[[], None], tuple[int, int, int, int]]:
        """An fsync to run anywhere, and the mark to give to end_sync() when it returned."""
        descriptor = os.dup(self._fd)
        faults = self._faults

        def run() -> None:
            try:
                faults.hit("fsync")
                os.fsync(descriptor)
                # A deleted file takes records that nobody will ever read (Vault #31718).
                if os.fstat(descriptor).st_nlink == 0:
                    raise OSError(errno.ENOENT, "the segment was deleted")
            finally:
                os.close(descriptor)

        return run, (self._number, self._head.sequence - len(self._unwritten), self._size, self._records)

    def end_sync(self, mark: tuple[int, int, int, int]) -> None:
        """The fsync of `mark` returned: its lines are durable."""
        number, sequence, size, records = mark
        if number == self._number and self.healthy and sequence > self.durable:
            self._settle(sequence, size, records)

    def sync_failed(self, mark: tuple[int, int, int, int]) -> None:
        """The fsync of `mark` failed: this file is over."""
        if mark[0] == self._number:
            self.healthy = False

    def sync(self) -> None:
        """fsync here and now. Raises OSError."""
        run, mark = self.begin_sync()
        try:
            run()
        except OSError:
            self.healthy = False
            raise
        self.end_sync(mark)

    def reopen(self, error: OSError) -> None:
        """After a failure: a new segment with the waiting lines and the report. Raises OSError: try again later."""
        report: dict[str, str | int | bool] = {
            "segment": self.segment,
            "records": self._good_records,
            "bytes": self._good_bytes,
            "suspect": True,
            "error": errno.errorcode.get(error.errno or 0, "unknown"),
        }
        self._open([("log.sealed", report)])

    def stop(self, process: str, fields: Mapping[str, object]) -> None:
        """Write the last two records, make all durable and close. Raises OSError."""
        self.link(process, "process.stopped", fields)
        self.write()
        self._seal()
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _seal(self) -> None:
        self.link(
            "auditor",
            "log.sealed",
            {"segment": self.segment, "records": self._records, "bytes": self._size},
        )
        lines, self._unwritten = self._unwritten, []
        self._pending += lines
        self._records += len(lines)
        try:
            self._write_all(b"\n".join(lines) + b"\n", "seal")
        except OSError:
            self.healthy = False
            raise
        self.sync()

    def _rotate(self) -> None:
        self._seal()
        try:
            self._open([])
        except OSError:
            self.healthy = False
            raise

    def _open(self, first: list[tuple[str, dict[str, str | int | bool]]]) -> None:
        """Open segment number+1 with the waiting lines, `first` and log.opened; nothing changes if it fails."""
        head = self._head
        name = segment_name(self._number + 1)
        opened: dict[str, str | int | bool] = {"segment": name}
        if self._number:
            opened["segment_before"] = segment_name(self._number)
        lines = self._pending + self._unwritten
        now = self._clock()
        for event, fields in [*first, ("log.opened", opened)]:
            line, head = link(head, node=self.node, process="auditor", name=event, fields=fields, now_ns=now)
            lines.append(line)
        data = b"\n".join(lines) + b"\n"
        temporary = self.directory / _TEMPORARY
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._faults.hit("open")
        descriptor = os.open(temporary, flags, 0o600)
        try:
            _write_all(descriptor, data)
            self._faults.hit("open-fsync")
            os.fsync(descriptor)
            if (self.directory / name).exists():
                raise FileExistsError(errno.EEXIST, "the next segment is there already")
            os.rename(temporary, self.directory / name)
            try:
                self._faults.hit("open-directory")
                fsync_directory(self.directory)
            except OSError:
                (self.directory / name).unlink()  # nothing in it was acknowledged; the lines are still here
                raise
        except OSError:
            os.close(descriptor)
            raise
        self.close()
        self._fd, self._number, self._head = descriptor, self._number + 1, head
        self._size, self._records = len(data), len(lines)
        self._unwritten, self._pending, self.healthy = [], lines, True
        self._settle(head.sequence, self._size, self._records)

    def _settle(self, sequence: int, size: int, records: int) -> None:
        """Records up to `sequence` are durable, and the file up to `size`. Line 0 of pending is durable + 1."""
        count = sequence - self.durable
        if self._on_durable is not None:
            self._on_durable(self._pending[:count])
        del self._pending[:count]
        self._pending_bytes = sum(map(len, self._pending)) + len(self._pending)
        self._good_bytes, self._good_records, self.durable = size, records, sequence

    def _write_all(self, data: bytes, step: str) -> None:
        part = self._faults.cut(step, data)
        _write_all(self._fd, part)
        self._faults.hit(step)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_directory(directory: Path) -> None:
    """Make names durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
