"""Frames between a client and the auditor, for every split and every way of being wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.frames import (
    ACK,
    APPEND,
    MAX_FRAME,
    Answer,
    FrameError,
    FrameReader,
    Item,
    Verdict,
    frame,
    pack_answers,
    pack_appends,
    unpack_answers,
    unpack_appends,
)
from tests.support.properties import tried

WRONG = [
    (b"\x00\x00\x00\x00\x01", "A frame without a type is refused."),
    (b"\xff\xff\xff\xff\x01", "A frame beyond the bound is refused before it is read."),
]


@pytest.mark.parametrize(("data", "sentence"), WRONG, ids=[row[1] for row in WRONG])
def test_a_wrong_frame_is_refused(data: bytes, sentence: str) -> None:
    """The length is checked before anything is kept for it."""
    with pytest.raises(FrameError):
        list(FrameReader().feed(data))


@pytest.mark.parametrize("cut", [1, 5, 12, 13, 15])
def test_an_item_cut_short_is_refused(cut: int) -> None:
    """An APPEND payload ends where an item ends."""
    payload = pack_appends([Item(1, True, b"{}xx")])[5:]
    with pytest.raises(FrameError):
        unpack_appends(payload[:-1] if cut > len(payload) else payload[:cut])


def test_an_unknown_verdict_is_refused() -> None:
    """An answer that this version does not know is no answer."""
    with pytest.raises(FrameError):
        unpack_answers(b"\x00" * 8 + b"\x09" + b"\x00" * 8)
    with pytest.raises(FrameError):
        unpack_answers(b"\x00" * 16)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=50)), max_size=20), st.data())
@tried()
def test_frames_survive_any_split(bodies: list[tuple[bool, bytes]], data: st.DataObject) -> None:
    """However the stream is cut, the same items come out in the same order."""
    items = [Item(number, durable, body) for number, (durable, body) in enumerate(bodies)]
    wire = pack_appends(items) + frame(APPEND, b"")
    reader, found = FrameReader(), []
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        for kind, payload in reader.feed(wire[:size]):
            assert kind == APPEND
            found += unpack_appends(payload)
        wire = wire[size:]
    assert found == items
    assert reader.pending == 0


def test_many_items_become_frames_within_the_bound() -> None:
    """A batch larger than a frame is cut between items, answers likewise."""
    items = [Item(number, False, bytes(200_000)) for number in range(12)]
    found = list(FrameReader().feed(pack_appends(items)))
    assert len(found) == 3
    assert [item for _kind, payload in found for item in unpack_appends(payload)] == items
    answers = [Answer(number, Verdict.WRITTEN, number) for number in range(MAX_FRAME // 16)]
    frames = list(FrameReader().feed(pack_answers(answers)))
    assert all(kind == ACK for kind, _payload in frames)
    assert [answer for _kind, payload in frames for answer in unpack_answers(payload)] == answers
