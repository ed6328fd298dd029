"""exeat-verify: check a log offline, with nothing but its files (and, better, a key or an anchor kept elsewhere).

Steps, in the order in which they are made (tagged in the code):
    1  names: segments are read in order of number; a gap is a bad record.
    2  bounds: where the next segment reports how this one ended (log.recovered, log.sealed with suspect), only the
       good bytes count; an unfinished line must be exactly the one reported.
    3  each line is one record of a known version, of one node, with the next sequence number and the hash of the
       line before. Where a hash does not fit, the line after tells which of the two was changed.
    4  --deep: the line is its own RFC 8785 form, and event, code and fields are in the tables.
    5  checkpoints, with --key: signature, size, and RFC 6962 root over the very lines.
    6  anchors: the record of that number has that hash.

Exit code 0: everything that was checked holds; 1: it does not, with file, line and sequence of the first bad
record; 2: could not be checked. The answer is never a plain "OK" (RULINGS 9.9): without an anchor nothing shows
that records were not cut off at the end, and the statement says so.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from audit.chain import GENESIS, VERSION, Head, Tree, line_hash
from audit.checkpoints import Checkpoint, CheckpointInvalid, VerifierKey, open_note, read_notes
from audit.coverage import Bad, Coverage, Report, as_text
from audit.events import EVENTS, RESERVED, AuditError, EventInvalid
from audit.notary import CHECKPOINTS
from audit.records import accept, canonical
from audit.segments import first_sequence, parse_line, segment_files, segment_number, sequence_of

_ANCHOR = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})\Z")


class Unverifiable(AuditError):
    """The log cannot be checked at all (exit code 2)."""


def verify(
    paths: Sequence[Path],
    *,
    key: VerifierKey | None = None,
    checkpoints: str | None = None,
    anchors: Mapping[int, str] | None = None,
    deep: bool = False,
) -> Report:
    """Check a log directory, or segment files in order. Raises Unverifiable, OSError.

    `checkpoints` is the text of a checkpoint file (needs `key`); `anchors` maps sequence numbers to line hashes.
    """
    files, whole = _files(paths)
    walk = _Walk(files, whole=whole, live=whole and _is_written(paths[0]), deep=deep)
    notes = _open_notes(checkpoints, key)
    report = Report()
    anchored = dict(anchors or {})
    if 0 in anchored:
        raise Unverifiable("an anchor names a record; the first is 1")
    try:
        _read(walk, report, notes, anchored)
    except _Found as found:
        report.bad = found.bad
    report.notes += walk.notes
    if checkpoints is not None and key is None:
        report.notes.append(
            "there are checkpoints, but no --key: they were not checked (checkpoint.pub in the log folder; "
            "better a copy of it that was kept elsewhere)"
        )
    return report


class _Found(AuditError):
    """The first bad record was found."""

    def __init__(self, file: str, line: int, sequence: int, problem: str) -> None:
        super().__init__(problem)
        self.bad = Bad(file=file, line=line, sequence=sequence, problem=problem)


@dataclass(frozen=True, slots=True)
class _Line:
    file: str
    number: int
    raw: bytes
    record: dict[str, object]
    sequence: int


def _read(walk: _Walk, report: Report, notes: list[Checkpoint], anchors: dict[int, str]) -> None:
    seen = report.coverage
    seen.segments = len(walk.files)
    tree = Tree()
    intents: set[str] = set()
    place = ("", 0)
    due = sorted(notes, key=lambda note: note.size)
    if due and walk.first not in (0, 1):
        raise Unverifiable("checkpoints cover the log from its first record; give the whole directory")
    for line in walk:
        _count(seen, line, intents)
        place = (line.file, line.number)
        # 6
        wanted = anchors.pop(line.sequence, None)
        if wanted is not None:
            if wanted != line_hash(line.raw):
                raise _Found(line.file, line.number, line.sequence, "is not the record that the anchor names")
            seen.anchors += 1
            seen.anchored_up_to = line.sequence
        # 5
        if due:
            tree.add(line.raw)
            while due and due[0].size == tree.size:
                if due[0].root != tree.root():
                    raise _Found(
                        line.file, line.number, line.sequence, "the signed checkpoint over the records up to it differs"
                    )
                seen.checkpoints += 1
                seen.signed_up_to = due.pop(0).size
    seen.open_intents = len(intents)
    if due:
        raise _Found(*place, seen.last + 1, f"is missing: a checkpoint was signed over {due[0].size} records")
    if anchors:
        missing = min(anchors)
        where = "before the first" if missing < seen.first else "after the last"
        raise _Found(*place, missing, f"is missing: the anchor names it, {where} record here")


class _Walk:
    """Steps 1 to 4: yields the records that hold, raises _Found at the first that does not."""

    def __init__(self, files: list[Path], *, whole: bool, live: bool, deep: bool) -> None:
        self.files = files
        self.notes: list[str] = []
        self._whole = whole
        self._live = live
        self._deep = deep
        self._node: object = None
        self.first = first_sequence(files[0]) or 0

    def __iter__(self) -> Iterator[_Line]:
        head: Head | None = None
        before: _Line | None = None
        try:
            for line in self._lines():
                if head is None:
                    head = self._begin(line)
                self._fits(head, before, line)
                # A line is yielded when the next one confirmed its hash, so that the right one of two is blamed.
                if before is not None:
                    yield before
                before, head = line, Head(sequence=line.sequence, hash=line_hash(line.raw))
        except _Found as found:
            if before is not None and (found.bad.file, found.bad.line) != (before.file, before.number):
                yield before
            raise
        if before is None:
            raise Unverifiable("there is no record here")
        yield before

    def _fits(self, head: Head, before: _Line | None, line: _Line) -> None:
        """3: the next number, the hash of the line before, a known version, the same node."""
        linked = line.record.get("prev") == head.hash
        expected = head.sequence + 1
        if line.sequence > expected:
            raise _Found(line.file, line.number, expected, f"is missing: record {line.sequence} is here")
        if line.sequence < expected and linked:
            raise _Found(line.file, line.number, expected, f"was changed: it calls itself {line.sequence}")
        if line.sequence < expected:
            raise _Found(line.file, line.number, line.sequence, "stands here again")
        if not linked:
            raise self._blame(before, line)
        self._check(line)

    def _begin(self, line: _Line) -> Head:
        self._node = line.record.get("node")
        if line.sequence == 1:
            return Head(sequence=0, hash=GENESIS)
        if self._whole:
            raise _Found(line.file, line.number, 1, f"is missing: the log begins with record {line.sequence}")
        self.notes.append(f"begins at record {line.sequence}: what came before was not checked")
        return Head(sequence=line.sequence - 1, hash=str(line.record.get("prev")))

    def _blame(self, before: _Line | None, line: _Line) -> _Found:
        """Two neighbours do not fit: if the line after names `line` by its hash, the one before was changed."""
        if before is None:
            return _Found(line.file, line.number, line.sequence, "the first record names one before it")
        follower = self._after(line)
        if follower is not None and follower.get("prev") == line_hash(line.raw):
            return _Found(
                before.file, before.number, before.sequence, "was changed: the record after it names another hash"
            )
        return _Found(line.file, line.number, line.sequence, "was changed: it does not name the record before it")

    def _after(self, line: _Line) -> dict[str, object] | None:
        for later in self._raw_lines():
            if (later[0], later[1]) > (line.file, line.number):
                return parse_line(later[2])
        return None

    def _check(self, line: _Line) -> None:
        """3 and 4: what can be said of one record by itself."""
        record = line.record
        problem = ""
        if record.get("v") != VERSION:
            problem = "is of a version that this verifier does not know"
        elif record.get("node") != self._node:
            problem = "belongs to another node"
        elif self._deep:
            problem = _deep_problem(line)
        if problem:
            raise _Found(line.file, line.number, line.sequence, problem)

    def _lines(self) -> Iterator[_Line]:
        sequence = 0
        for file, number, raw in self._raw_lines():
            record = parse_line(raw)
            if record is None:
                raise _Found(file, number, sequence + 1, "is not a record")
            sequence = sequence_of(record)
            yield _Line(file, number, raw, record, sequence)

    def _raw_lines(self) -> Iterator[tuple[str, int, bytes]]:
        """1 and 2: the lines that count."""
        number_before = None
        for index, path in enumerate(self.files):
            number = segment_number(path)
            if number_before is not None and number is not None and number != number_before + 1:
                raise _Found(path.name, 1, 0, f"segment {number_before + 1} is missing")
            number_before = number if number is not None else number_before
            data = path.read_bytes()
            good = self._good(path, data, self.files[index + 1] if index + 1 < len(self.files) else None)
            yield from ((path.name, line, raw) for line, raw in enumerate(good.split(b"\n")[:-1], 1))

    def _good(self, path: Path, data: bytes, following: Path | None) -> bytes:
        """The part of a segment that counts."""
        report = _ending(path.name, following) if following is not None else None
        if report is None:
            torn = len(data) - (data.rfind(b"\n") + 1)
            if torn:
                line = data.count(b"\n") + 1
                if following is not None or not self._live:
                    raise _Found(path.name, line, self._next(data), f"is unfinished: {torn} bytes without an end")
                self._note(f"{path.name}: the auditor is writing; {torn} bytes of its last line were left out")
            return data[: len(data) - torn]
        good = report.get("bytes")
        if type(good) is not int or not 0 <= good <= len(data) or data[:good][-1:] not in (b"\n", b""):
            raise _Found(path.name, data.count(b"\n") + 1, self._next(data), "is missing: the segment was cut")
        rest = data[good:]
        if report.get("suspect") is True:
            self._note(
                f"{path.name}: a write failed here; {len(rest)} bytes after record {report.get('records')} "
                "were written again in the next segment"
            )
            return data[:good]
        if report.get("torn_bytes") != len(rest) or (
            rest and report.get("torn_sha256") != hashlib.sha256(rest).hexdigest()
        ):
            raise _Found(
                path.name,
                data[:good].count(b"\n") + 1,
                self._next(data[:good]),
                "the unfinished line is not the one that was found at the restart",
            )
        if rest:
            self._note(f"{path.name}: {len(rest)} bytes of an unfinished line, reported at the restart")
        return data[:good]

    def _next(self, data: bytes) -> int:
        lines = data.split(b"\n")[:-1]
        record = parse_line(lines[-1]) if lines else None
        return 1 if record is None else sequence_of(record) + 1

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _ending(name: str, following: Path) -> dict[str, object] | None:
    """How the segment `name` ended, as the segment after it reports before its log.opened."""
    with following.open("rb") as file:
        for raw in file:
            record = parse_line(raw.rstrip(b"\n"))
            if record is None:
                return None
            event = record.get("event")
            if record.get("segment") == name and (
                event == "log.recovered" or (event == "log.sealed" and record.get("suspect") is True)
            ):
                return record
            if event == "log.opened":
                return None
    return None


def _deep_problem(line: _Line) -> str:
    record = line.record
    if canonical(record) != line.raw:
        return "is not in canonical form"
    name = record.get("event")
    if not isinstance(name, str) or name not in EVENTS or record.get("code") != EVENTS[name].code:
        return "has an event or code that the tables do not have"
    try:
        accept(name, {key: value for key, value in record.items() if key not in RESERVED})
    except EventInvalid as error:
        return f"has fields that the tables do not allow ({error})"
    return ""


def _count(seen: Coverage, line: _Line, intents: set[str]) -> None:
    record = line.record
    seen.first = seen.first or line.sequence
    seen.last = line.sequence
    seen.records += 1
    at = str(record.get("at"))
    seen.since, seen.until = seen.since or at, at
    seen.head = f"{line.sequence}:{line_hash(line.raw)}"
    if (node := str(record.get("node"))) not in seen.nodes:
        seen.nodes.append(node)
    if record.get("decision") == "observe":
        seen.observed_passes += 1
    event = record.get("event")
    key = f"{str(event).partition('.')[0]} {record.get('request_id') or record.get('connection_id')}"
    match event:
        case "process.started":
            seen.starts += 1
        case "process.stopped":
            seen.stops += 1
        case "process.lost":
            seen.lost += 1
        case "clock.jumped":
            seen.clock_jumps += 1
        case "log.recovered":
            seen.recoveries += 1
            torn = record.get("torn_bytes")
            seen.torn_bytes += torn if type(torn) is int else 0
        case "log.sealed" if record.get("suspect") is True:
            seen.suspect_segments += 1
        case "refusals.summarised":
            count = record.get("count")
            seen.refusals_counted += count if type(count) is int else 0
        case "drops.counted":
            count = record.get("count")
            seen.kernel_drops += count if type(count) is int else 0
        case "request.intent" | "broker.intent" | "tunnel.intent":
            intents.add(key)
        case "request.outcome" | "broker.outcome" | "tunnel.outcome":
            intents.discard(key)
            seen.tunnels_uninspected += event == "tunnel.outcome"
        case _:
            pass


def _files(paths: Sequence[Path]) -> tuple[list[Path], bool]:
    if len(paths) == 1 and paths[0].is_dir():
        files = segment_files(paths[0])
        if not files:
            raise Unverifiable(f"{paths[0]}: no segment in this directory")
        return files, True
    if not paths or any(path.is_dir() for path in paths):
        raise Unverifiable("give one log directory, or segment files in order")
    return list(paths), False


def _is_written(directory: Path) -> bool:
    """An auditor holds the lock: a last line without an end is being written."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _open_notes(text: str | None, key: VerifierKey | None) -> list[Checkpoint]:
    # 5
    if text is None or key is None:
        return []
    try:
        notes = [open_note(note, key) for note in read_notes(text)]
    except CheckpointInvalid as error:
        raise Unverifiable(f"checkpoints: {error}") from None
    return [note for note in notes if note.size > 0]


def parse_anchor(text: str) -> tuple[int, str]:
    """`sequence:hash` as printed under `head`. Raises argparse.ArgumentTypeError."""
    match = _ANCHOR.match(text)
    if match is None:
        raise argparse.ArgumentTypeError("an anchor is SEQUENCE:SHA256")
    return int(match[1]), match[2]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="exeat-verify", description="Check an Exeat log offline and say what the check covers."
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="a log directory, or segment files in order"
    )
    parser.add_argument("--key", type=Path, help="public key file of the checkpoints, kept from the log's beginning")
    parser.add_argument("--checkpoints", type=Path, help="a checkpoint file kept elsewhere (default: the directory's)")
    parser.add_argument(
        "--anchor", type=parse_anchor, action="append", default=[], help="SEQUENCE:SHA256 kept elsewhere; repeatable"
    )
    parser.add_argument(
        "--deep", action="store_true", help="also check canonical form, codes and fields of each record"
    )
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args(argv)
    try:
        key = VerifierKey.parse(options.key.read_text()) if options.key else None
        text: str | None = None
        if options.checkpoints is not None:
            text = options.checkpoints.read_text()
        elif (kept := options.paths[0] / CHECKPOINTS).is_file():
            text = kept.read_text()
        anchors: dict[int, str] = {}
        for sequence, digest in options.anchor:
            if anchors.setdefault(sequence, digest) != digest:
                raise Unverifiable("two anchors for one record differ")
        report = verify(options.paths, key=key, checkpoints=text, anchors=anchors, deep=options.deep)
    except (AuditError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"exeat-verify: {error}\n")
        return 2
    write = sys.stdout.write
    if options.output == "json":
        shown = {
            "verified": report.bad is None,
            "statement": report.statement,
            "bad": None if report.bad is None else asdict(report.bad),
            "coverage": asdict(report.coverage),
            "notes": report.notes,
        }
        write(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        write(as_text(report))
    return 0 if report.bad is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
