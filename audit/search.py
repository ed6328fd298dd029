"""Find records, follow the log, and say in words what became of one request.

Reads segment files only and checks nothing: verify.py does. Each record is a dict as it stands in the log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from audit.budget import REFUSALS
from audit.events import EVENTS
from audit.segments import parse_line, segment_files, segment_number, sequence_of, walk

type Record = dict[str, object]

REFUSED: Final = REFUSALS | {"refusals.summarised", "approval.requested"}
_INSTANT = re.compile(r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?Z?)?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which records: all conditions that are set must hold. `since` is a UTC date or time, inclusive.

    `refused` and `reason` also find the outcomes of permitted requests that ended in a refusal of ours.
    """

    sandbox: str | None = None
    tenant: str | None = None
    refused: bool = False
    reason: str | None = None
    host: str | None = None
    since: str | None = None
    request_id: str | None = None
    event: str | None = None
    credential: str | None = None

    def __post_init__(self) -> None:
        if self.since is not None and not _INSTANT.match(self.since):
            raise ValueError("since is a UTC date or time such as 2026-01-31 or 2026-01-31T08:00:00Z")

    def matches(self, record: Mapping[str, object]) -> bool:
        """True if `record` is one of those."""
        if self.refused and not is_refusal(record):
            return False
        # Times are written at one width in UTC, so their prefixes sort as they do.
        if self.since is not None and str(record.get("at")) < self.since.removesuffix("Z"):
            return False
        if self.host is not None and not self._names_host(record):
            return False
        if self.reason is not None and reason_of(record) != self.reason and not self._counted(record):
            return False
        wanted = {
            "sandbox": self.sandbox,
            "tenant": self.tenant,
            "request_id": self.request_id,
            "event": self.event,
            "credential": self.credential,
        }
        return all(value is None or record.get(key) == value for key, value in wanted.items())

    def _names_host(self, record: Mapping[str, object]) -> bool:
        wanted = (self.host or "").lower()
        tunnel = str(record.get("connect_host", ""))
        return wanted in (record.get("host"), tunnel, tunnel.rpartition(":")[0])

    def _counted(self, record: Mapping[str, object]) -> bool:
        reasons = record.get("reasons")
        return isinstance(reasons, list) and any(str(item).startswith(f"{self.reason}=") for item in reasons)


def last_store(directory: Path) -> tuple[int, str]:
    """(generation, digest) of the store as the newest record that states them; (0, "") where none does.

    Read from the end: each start of a vault writes one.
    """
    for path in reversed(segment_files(directory)):
        lines = path.read_bytes().split(b"\n")
        for line in reversed(lines):
            record = parse_line(line) if b'"store_digest":' in line else None
            if record is not None and type(generation := record.get("generation")) is int:
                return generation, str(record["store_digest"])
    return 0, ""


def is_refusal(record: Mapping[str, object]) -> bool:
    """Whether a client got a refusal: it was denied or held, or permitted and then not carried out."""
    if record.get("event") in REFUSED:
        return True
    if not str(record.get("event")).endswith(".outcome") or record.get("completed") or record.get("bytes_down"):
        return False
    return record.get("error", "") not in ("", "client-gone", "cancelled")


def reason_of(record: Mapping[str, object]) -> str:
    """The reason code in `record`: of a refusal, or of what became of a permitted request. Empty when none."""
    return str(record.get("reason") or record.get("error") or "")


def search(directory: Path, wanted: Filter) -> Iterator[Record]:
    """All matching records in order. Raises OSError."""
    for _path, _number, line in walk(directory):
        record = parse_line(line)
        if record is not None and wanted.matches(record):
            yield record


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An end that the log had once."""

    segment: int = 0
    offset: int = 0


def end_of_log(directory: Path) -> Place:
    """Where the log ends now. Raises OSError."""
    files = segment_files(directory)
    return Place(segment=segment_number(files[-1]) or 0, offset=files[-1].stat().st_size) if files else Place()


def refusals_since(directory: Path, place: Place, sandbox: str) -> Iterator[Record]:
    """The refusals of `sandbox` that were written after `place`, in order. Raises OSError."""
    wanted = Filter(sandbox=sandbox, refused=True)
    name = sandbox.encode()
    seen = 0
    for path in segment_files(directory):
        number = segment_number(path) or 0
        if number < place.segment:
            continue
        with path.open("rb") as file:
            file.seek(place.offset if number == place.segment else 0)
            for line in file:
                record = parse_line(line.rstrip(b"\n")) if name in line else None
                # After a failed write the same records stand in two segments; each counts once.
                if record is not None and sequence_of(record) > seen and wanted.matches(record):
                    seen = sequence_of(record)
                    yield record


def follow(directory: Path, wanted: Filter, wait: Callable[[], bool], *, last: int = 10) -> Iterator[Record]:
    """The last `last` matching records, then new ones as they are written.

    `wait` is called when there is nothing more; it sleeps as long as it likes and returns False to end.
    Raises OSError.
    """
    shown: list[Record] = []
    sequence = 0
    for _path, _number, line in walk(directory):
        record = parse_line(line)
        if record is not None:
            sequence = sequence_of(record)
            if wanted.matches(record):
                shown.append(record)
                del shown[: max(0, len(shown) - last)]
    yield from shown
    files = segment_files(directory)
    path = files[-1] if files else None
    offset = 0
    while True:
        moved = False
        if path is not None:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            end = data.rfind(b"\n") + 1
            offset += end
            moved = end > 0
            for line in data[:end].split(b"\n")[:-1]:
                record = parse_line(line)
                # After a failed write the same records stand in two segments; each is shown once.
                if record is not None and sequence_of(record) > sequence:
                    sequence = sequence_of(record)
                    if wanted.matches(record):
                        yield record
        if not moved:
            files = segment_files(directory)
            at = files.index(path) + 1 if path in files else 0
            if at < len(files):
                path, offset = files[at], 0
            elif not wait():
                return


def explain_record(records: Iterable[Mapping[str, object]]) -> str:
    """What became of one request, from all records that share its id, as lines for a person.

    Without records: a sentence that says so. Values are as in the log: escaped, capped, without secrets.
    """
    lines: list[str] = []
    seen: set[str] = set()
    for record in records:
        event = str(record.get("event"))
        seen.add(event)
        spec = EVENTS.get(event)
        lines.append(f"{record.get('at')}  record {record.get('seq')}  {event}: {spec.meaning if spec else 'unknown'}")
        for label, value in _facts(record):
            lines.append(f"    {label}: {value}")
    if not lines:
        return "There is no record of this request."
    if "request.outcome" not in seen and "request.intent" in seen:
        lines.append("There is no outcome yet: the request is still running, or its process ended.")
    if "broker.outcome" not in seen and "broker.intent" in seen:
        lines.append("There is no outcome of the broker's call yet.")
    return "\n".join(lines)


def _facts(record: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    get = record.get
    if get("sandbox"):
        who = ", ".join(f"{name} {get(name)}" for name in ("role", "owner", "agent", "task") if get(name))
        yield "sandbox", f"{get('sandbox')} ({who})" if who else str(get("sandbox"))
    if get("host"):
        port = f":{get('port')}" if "port" in record else ""
        yield "request", f"{get('method', 'CONNECT')} {get('scheme', 'tcp')}://{get('host')}{port}{get('path', '')}"
    for name in ("asked", "granted"):
        if isinstance(scopes := get(name), list):
            yield name, " ".join(map(str, scopes))
    if get("decision"):
        yield "decision", str(get("decision"))
    if get("reason"):
        yield "reason", str(get("reason"))
    if get("rule"):
        yield "rule", f"{get('rule')} (operation {get('operation', '?')}, policy {get('policy', '?')})"
    if get("remedy"):
        yield "remedy", str(get("remedy"))
    if get("credential"):
        yield "credential", f"{get('credential')} version {get('credential_version', '?')}"
    if get("grant"):
        yield "grant", f"{get('grant')}: an address that a redirect opened"
    if get("redirect_host"):
        # Only calls of the broker say what became of it; what a plain rule permits leads where it leads.
        yield "leads to", f"{get('redirect_host')} ({get('redirect', 'undeclared')})"
    if "status" in record:
        yield "status", f"{get('status')}, {get('bytes_up', 0)} bytes up, {get('bytes_down', 0)} bytes down"
    if get("address"):
        yield "address", str(get("address"))
    if get("error"):
        yield "error", f"{get('error')} ({get('detail')})" if get("detail") else str(get("error"))
