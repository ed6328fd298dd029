"""Makes small logs without a process, with a fixed clock."""

from __future__ import annotations

from pathlib import Path

from audit.events import Event
from audit.records import Renderer
from audit.segments import Faults, SegmentWriter, recover
from tests.support.auditors import DIGEST_KEY
from tests.support.events import intent, outcome, refusal

NODE = "node-1"
RENDERER = Renderer(DIGEST_KEY)


class Ticking:
    """A clock that moves one second at each look."""

    def __init__(self) -> None:
        self.now = 1_767_225_600_000_000_000

    def __call__(self) -> int:
        self.now += 1_000_000_000
        return self.now


def writer(directory: Path, faults: Faults | None = None, *, segment_bytes: int = 1 << 20) -> SegmentWriter:
    """A started writer on `directory`."""
    directory.mkdir(mode=0o700, exist_ok=True)
    made = SegmentWriter(directory, NODE, Ticking(), faults, segment_bytes=segment_bytes)
    made.start(recover(directory, NODE))
    return made


def put(made: SegmentWriter, *events: Event) -> None:
    """Link and write events as worker-1."""
    for event in events:
        made.link("worker-1", event.name, RENDERER.fields(event))
    made.write()


def sample(directory: Path, *, segment_bytes: int = 1 << 20) -> None:
    """An orderly log of a few requests: allowed, refused, allowed."""
    made = writer(directory, segment_bytes=segment_bytes)
    put(made, intent("req_1"), outcome("req_1"))
    put(made, refusal(request_id="req_2", path="/x", method="GET", user_agent="curl/8"))
    put(made, intent("req_3", host="other.example"), outcome("req_3", status=404))
    made.stop("auditor", {"program": "auditor"})
