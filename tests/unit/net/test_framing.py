"""Frames over a stream: what of a turn leaves together, and that nothing queued is lost or overtaken."""

from __future__ import annotations

import asyncio

import pytest

from net.framing import GATHER_BYTES, FrameStream
from net.stream import StreamBroken
from tests.support.streams import MemoryStream
from wire.frames import encode_frame


class Counting(MemoryStream):
    """One end that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        super().write(data)


@pytest.fixture
def ends() -> tuple[FrameStream, FrameStream, Counting]:
    ours, theirs = Counting(), MemoryStream()
    ours.other, theirs.other = theirs, ours
    return FrameStream(ours), FrameStream(theirs), ours


async def test_an_end_inside_a_frame_is_a_broken_stream(ends: tuple[FrameStream, FrameStream, Counting]) -> None:
    """Half a frame is no frame, and no clean end."""
    ours, theirs, _ = ends
    ours.send(encode_frame(1, b"whole")[:-1])
    await ours.close()
    with pytest.raises(StreamBroken):
        await theirs.receive()


async def test_frames_of_one_turn_leave_in_one_write(ends: tuple[FrameStream, FrameStream, Counting]) -> None:
    """Draining between them waits for no turn, so head, data and end of a small answer wake the other side once."""
    ours, theirs, stream = ends
    for payload in (b"head", b"data", b"end"):
        ours.send(encode_frame(1, payload))
        await ours.drain()
    assert stream.writes == []
    received = [await theirs.receive() for _ in range(3)]
    assert [frame.payload for frame in received if frame is not None] == [b"head", b"data", b"end"]
    assert len(stream.writes) == 1


async def test_what_waits_is_bounded(ends: tuple[FrameStream, FrameStream, Counting]) -> None:
    """A big frame leaves at once, with what waited before it and in that order."""
    ours, theirs, stream = ends
    ours.send(encode_frame(1, b"first"))
    ours.send(encode_frame(1, bytes(GATHER_BYTES)))
    assert len(stream.writes) == 1
    first, second = await theirs.receive(), await theirs.receive()
    assert first is not None
    assert second is not None
    assert (first.payload, len(second.payload)) == (b"first", GATHER_BYTES)


@pytest.mark.parametrize("end", ["abort", "close", "flush"])
async def test_what_was_queued_leaves_before_the_end(ends: tuple[FrameStream, FrameStream, Counting], end: str) -> None:
    """A last word (a refusal, a cancel) that was sent before the end is written before it."""
    ours, _, stream = ends
    ours.send(encode_frame(1, b"last word"))
    ended = getattr(ours, end)()
    if asyncio.iscoroutine(ended):
        await ended
    assert stream.writes == [encode_frame(1, b"last word")]
