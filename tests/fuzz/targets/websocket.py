"""WebSocket frames: refused or passed as they came in any cut, and another implementation reads the same payload.

The first byte says which side sends (bit 0: masked) and whether compression was agreed (bit 1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from wsproto.frame_protocol import FrameProtocol, ParseFailed

from tests.support.fuzzing import cuts
from wire.websocket import Frame, FrameChecker, FrameRefused, FrameTooLarge, MessageReader

WORDS = (
    b"\x81\x05hello", b"\x82\x00", b"\x01\x02ab\x80\x01c", b"\x89\x00", b"\x8a\x00", b"\x88\x02\x03\xe8",
    b"\x88\x01", b"\x81\x7e\x00\x7e", b"\x81\x7f\x00\x00\x00\x00\x00\x01\x00\x00", b"\x81\x85\x00\x00\x00\x00hello",
    b"\xc1", b"\xf0",
)  # fmt: skip

BOUND = 2048


def check(data: bytes) -> bool:
    """See above."""
    if not data:
        return False
    flags, data = data[0], data[1:]
    masked, compressed = bool(flags & 1), bool(flags & 2)
    whole = _pass([data], masked, compressed)
    for pieces in cuts(data):
        assert _pass(pieces, masked, compressed) == whole
    passed, units, _ = whole
    assert data.startswith(passed)
    written = b"".join(frame.encode() for unit in units for frame in unit)
    assert len(written) <= len(passed)
    for unit in units:
        for frame in unit:
            size = len(frame.payload)
            shortest = 2 + (0 if size < 126 else 2 if size < 1 << 16 else 8) + (4 if masked else 0)
            assert len(frame.head) == shortest, "a length that is not in its shortest form"
    if not compressed:
        _wsproto_agrees(passed, units, masked)
    return bool(units)


def _pass(pieces: Iterable[bytes], masked: bool, compressed: bool) -> tuple[bytes, list[tuple[Frame, ...]], str]:
    """What the relay does (net/websocket.py): what may pass is handed on, the start of a frame head waits."""
    checker = FrameChecker(masked=masked, compressed=compressed, frame_bound=BOUND, message_bound=2 * BOUND)
    reader = MessageReader()
    units: list[tuple[Frame, ...]] = []
    passed = waiting = b""
    try:
        for piece in pieces:
            waiting += piece
            count = checker.feed(waiting)
            units += reader.feed(waiting[:count])
            passed += waiting[:count]
            waiting = waiting[count:]
            assert len(waiting) < 14, "more than a frame head waits"
    except (FrameRefused, FrameTooLarge):
        # How much passed before depends on the reads; that it ends here does not.
        return b"", [], "refused"
    return passed, units, "closed" if checker.closed else "open"


def _wsproto_agrees(passed: bytes, units: list[tuple[Frame, ...]], masked: bool) -> None:
    ours = b"".join(frame.payload for unit in units for frame in unit if not frame.control)
    theirs = b""
    protocol = FrameProtocol(client=not masked, extensions=[])
    protocol.receive_bytes(passed)
    with contextlib.suppress(ParseFailed):  # it also judges UTF-8 and close codes, which we pass on
        for frame in protocol.received_frames():
            if frame.opcode.iscontrol():
                continue
            theirs += frame.payload.encode() if isinstance(frame.payload, str) else bytes(frame.payload)
        # It hands out payload before the frame is whole; ours come as whole messages.
        assert theirs.startswith(ours), "another implementation reads another payload"
