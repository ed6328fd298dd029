"""WebSocket handshake and frames: refusals first."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import tried
from tests.support.rows import every_row
from wire.heads import HeadRefused, RequestHead, ResponseHead
from wire.websocket import (
    MESSAGE_FRAMES,
    Frame,
    FrameChecker,
    FrameRefused,
    FrameTooLarge,
    MessageReader,
    accept_value,
    apply_mask,
    check_accept,
    check_request,
    close_frame,
)

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = (b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
UP = ((b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"))


def frame(opcode: int, payload: bytes = b"", *, final: bool = True, masked: bool = True, rsv: int = 0) -> bytes:
    head = bytes([(0x80 if final else 0) | rsv | opcode])
    mask = 0x80 if masked else 0
    if len(payload) < 126:
        head += bytes([mask | len(payload)])
    elif len(payload) < 65536:
        head += bytes([mask | 126]) + len(payload).to_bytes(2)
    else:
        head += bytes([mask | 127]) + len(payload).to_bytes(8)
    return head + (b"\0\0\0\0" if masked else b"") + payload


def checker(*, masked: bool = True, compressed: bool = False) -> FrameChecker:
    return FrameChecker(masked=masked, compressed=compressed, frame_bound=100_000, message_bound=150_000)


def walk(check: FrameChecker, raw: bytes, step: int) -> None:
    kept = b""
    for at in range(0, len(raw), step):
        piece = kept + raw[at : at + step]
        kept = piece[check.feed(piece) :]


REFUSED = [
    (frame(1, b"x", masked=False), "an unmasked client frame"),
    (frame(3, b"x"), "an opcode that does not exist"),
    (frame(1, b"x", rsv=0x40), "compression that was not agreed"),
    (frame(1, b"x", rsv=0x20), "a reserved bit"),
    (frame(0, b"x"), "a continuation of nothing"),
    (frame(1, b"x", final=False) + frame(1, b"y"), "a new message inside another"),
    (frame(9, b"x", final=False), "a ping in fragments"),
    (frame(9, bytes(126)), "a long ping"),
    (frame(8, b"x"), "a close frame of one byte"),
    (frame(8) + frame(1, b"x"), "data after a close frame"),
    (b"\x81\xfe\x00\x05\0\0\0\0hello", "a length not in its shortest form"),
    (b"\x81\xff" + (5).to_bytes(8) + b"\0\0\0\0hello", "a 64-bit length not in its shortest form"),
    (b"\x81\xff" + b"\xff" * 8 + b"\0\0\0\0", "a length with its top bit set"),
    (frame(2, bytes(100_001)), "a frame over its bound"),
    (frame(2, bytes(99_000), final=False) + frame(0, bytes(99_000)), "a message over its bound"),
]


@every_row("raw", [row[0] for row in REFUSED], ids=[row[1] for row in REFUSED])
@every_row("step", [1, 1_000_000])
def test_frames_that_are_not_legal_from_this_side_are_refused(raw, step):
    """Whole or byte by byte, the row is refused."""
    with pytest.raises(FrameRefused):
        walk(checker(), raw, step)


def test_a_masked_server_frame_is_refused():
    """Masking belongs to clients."""
    with pytest.raises(FrameRefused):
        checker(masked=False).feed(frame(1, b"x"))


@tried()
@given(st.data())
def test_any_split_passes_the_same_bytes_and_counts(data):
    """Fragments, pings in between, long frames, compression: all pass unchanged."""
    raw = (frame(1, b"hello", rsv=0x40) + frame(2, bytes(70_000), final=False) + frame(9, b"p") + frame(0, b"end")
           + frame(10) + frame(2, bytes(300)) + frame(8, b"\x03\xe8"))  # fmt: skip
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    check, kept, passed = checker(compressed=True), b"", b""
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        piece = kept + raw[start:end]
        whole = check.feed(piece)
        passed, kept = passed + piece[:whole], piece[whole:]
    assert (passed, kept) == (raw, b"")
    assert (check.frames, check.messages, check.closed, check.between_frames) == (7, 3, True, True)
    assert check.passed == len(raw)


@pytest.mark.parametrize(
    "headers",
    [
        (*UP,),
        (*UP, (b"Sec-WebSocket-Accept", b"AAAAAAAAAAAAAAAAAAAAAAAAAAA=")),
        (*UP, ACCEPT, ACCEPT),
        (UP[0], ACCEPT),
        (UP[1], ACCEPT),
        ((b"Upgrade", b"h2c"), UP[1], ACCEPT),
        (*UP, ACCEPT, (b"Sec-WebSocket-Protocol", b"other")),
        (*UP, ACCEPT, (b"Sec-WebSocket-Extensions", b"x-other")),
        (*UP, ACCEPT, (b"Content-Length", b"0")),
    ],
)
def test_an_acceptance_that_does_not_answer_this_handshake_is_refused(headers):
    """Accept value, protocol and extensions must be what was asked for."""
    with pytest.raises(HeadRefused):
        check_accept(ResponseHead(101, "", "1.1", headers), key=KEY, protocols=("chat",))


def test_a_right_acceptance_says_whether_compression_was_agreed():
    """The sample of RFC 6455 1.3, with and without permessage-deflate."""
    assert accept_value(KEY).encode() == ACCEPT[1]
    assert not check_accept(ResponseHead(101, "", "1.1", (*UP, ACCEPT)), key=KEY)
    deflate = (b"Sec-WebSocket-Extensions", b"permessage-deflate; server_no_context_takeover")
    assert check_accept(
        ResponseHead(101, "", "1.1", (*UP, ACCEPT, deflate)), key=KEY, extensions=("permessage-deflate; x",)
    )


@pytest.mark.parametrize(
    ("method", "version", "key"),
    [("POST", b"13", KEY.encode()), ("GET", b"8", KEY.encode()), ("GET", b"13", b"short"),
     ("GET", b"13", base64.b64encode(bytes(15)))],
)  # fmt: skip
def test_a_request_that_is_no_websocket_handshake_is_refused(method, version, key):
    """GET, version 13 and a key of 16 bytes, or nothing."""
    head = RequestHead(method, "/", "1.1", ((b"Sec-WebSocket-Version", version), (b"Sec-WebSocket-Key", key)))
    with pytest.raises(HeadRefused):
        check_request(head)


# --- whole messages ---


def read(reader: MessageReader, raw: bytes, step: int) -> list[tuple[Frame, ...]]:
    return [unit for at in range(0, len(raw), step) for unit in reader.feed(raw[at : at + step])]


def test_a_frame_is_not_written_with_a_payload_of_another_length():
    """Its head says the length: another one would shift everything behind it. Nor with half a mask, nor a mask more."""
    ((whole,),) = MessageReader().feed(frame(1, b"hello"))
    ((bare,),) = MessageReader().feed(frame(1, b"hello", masked=False))
    for attempt in (
        lambda: whole.encode(b"hell"),
        lambda: whole.encode(mask=b"ab"),
        lambda: bare.encode(mask=b"abcd"),
    ):
        with pytest.raises(ValueError, match="another length"):
            attempt()


def test_a_message_in_too_many_frames_is_refused():
    """Empty frames carry nothing and are within every bound in bytes, but each costs memory."""
    reader = MessageReader()
    reader.feed(frame(1, final=False))
    with pytest.raises(FrameTooLarge):
        reader.feed(frame(0, final=False) * MESSAGE_FRAMES)


def test_what_is_held_is_told():
    """Until a message is whole; control frames pass through."""
    reader = MessageReader()
    reader.feed(frame(1, b"hello", final=False) + frame(9, b"ping") + frame(0, b"world")[:4])
    assert reader.held == 9
    reader.feed(frame(0, b"world")[4:])
    assert reader.held == 0


def test_no_part_of_a_message_is_told_before_its_end():
    """Control frames between its frames are told at once."""
    reader = MessageReader()
    assert reader.feed(frame(1, b"hel", final=False)) == []
    ((ping,),) = reader.feed(frame(9, b"p"))
    assert (ping.control, ping.payload) == (True, b"p")
    ((first, last),) = reader.feed(frame(0, b"lo"))
    assert (first.payload + last.payload, first.final, last.final) == (b"hello", False, True)


@given(
    payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=5),
    mask=st.binary(min_size=4, max_size=4),
    step=st.integers(1, 400),
)
def test_messages_are_the_same_in_any_split_and_written_as_they_came(payloads: list[bytes], mask: bytes, step: int):
    """One message in as many frames as payloads: unmasked, in order; encode() gives the bytes back."""
    frames = []
    for number, payload in enumerate(payloads):
        head = frame(0 if number else 2, payload, final=number == len(payloads) - 1)
        cut = len(head) - len(payload)
        frames.append(head[: cut - 4] + mask + apply_mask(payload, mask))
    raw = b"".join(frames)
    (unit,) = read(MessageReader(), raw, step)
    assert [item.payload for item in unit] == payloads
    assert b"".join(item.encode() for item in unit) == raw
    anew = b"".join(item.encode(mask=b"\x01\x02\x03\x04") for item in unit)
    (again,) = read(MessageReader(), anew, 1_000)
    assert [item.payload for item in again] == payloads
    assert all(item.mask == b"\x01\x02\x03\x04" for item in again)


def test_a_close_of_ours_is_a_legal_server_frame():
    """Its text is cut to what a control frame holds."""
    ((close,),) = MessageReader().feed(close_frame(1008, "x" * 300))
    assert (close.closes, close.payload[:2], len(close.payload)) == (True, b"\x03\xf0", 125)
    walk(checker(masked=False), close_frame(1008, "no"), 1)
