"""Frames of hand-offs and of the vault's streams: the same in any cut, bounded, and each payload read or refused."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.fuzzing import cuts
from wire.control import decode_from_vault, decode_to_vault
from wire.control import encode as encode_control
from wire.frames import Frame, FrameReader, WireError, encode_frame
from wire.handoff import decode_answer, encode_answer, frame_type

WORDS = tuple(
    bytes((0, 0, 0, size, kind)) for size in (0, 1, 8) for kind in (1, 2, 3, 16, 17, 18, 19, 20, 21, 33, 40, 48)
)

BOUND = 1 << 16


def check(data: bytes) -> bool:
    """See above."""
    whole = _read([data])
    for pieces in cuts(data):
        assert _read(pieces) == whole
    frames, _ = whole
    decoded = 0
    for frame in frames:
        assert len(frame.payload) <= BOUND
        assert list(FrameReader(BOUND).feed(encode_frame(frame.type, frame.payload, BOUND))) == [frame]
        decoded += _decoded(frame)
    return decoded > 0


def _read(pieces: Iterable[bytes]) -> tuple[tuple[Frame, ...], str]:
    reader = FrameReader(BOUND)
    frames: list[Frame] = []
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                frames.append(frame)
    except WireError:
        return tuple(frames), "refused"
    return tuple(frames), "inside" if reader.pending else "between"


def _decoded(frame: Frame) -> int:
    """How many of the three tables know it."""
    known = 0
    for decode, encode in (
        (decode_answer, encode_answer),
        (decode_from_vault, encode_control),
        (decode_to_vault, encode_control),
    ):
        try:
            value = decode(frame)
            frame_type(frame)
        except WireError:
            continue
        (again,) = FrameReader(64 << 20).feed(encode(value))  # type: ignore[arg-type]
        assert decode(again) == value
        known += 1
    return known
