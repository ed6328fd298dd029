"""The chunked decoder: refused, unfinished or whole, the same however it is cut, and llhttp reads the same body."""

from __future__ import annotations

from collections.abc import Iterable

import httptools

from tests.support.fuzzing import cuts
from wire.chunked import LAST_CHUNK, ChunkedDecoder, encode_chunk
from wire.heads import FORBIDDEN_TRAILERS, HeadRefused

WORDS = (
    b"0\r\n\r\n", b"\r\n", b"5\r\nhello\r\n", b"0\r\nX-A: b\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0x",
    b";a=b", b"ffffffffffffffff", b"\n", b"00", b"+1", b"_", b"0\r\nHost: x\r\n\r\n",
)  # fmt: skip

HEAD = b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n"


def check(data: bytes) -> bool:
    """See above."""
    if not data:
        return False
    whole = _decode([data])
    for pieces in cuts(data):
        other = _decode(pieces)
        # What was given out before a refusal depends on the reads, and is never more than what comes whole.
        assert other[0] == whole[0], (whole, other)
        if whole[0] != "refused":
            assert other == whole
    state, body, trailers, rest = whole
    if state != "done":
        return False
    assert data.endswith(rest)
    _llhttp_agrees(data[: len(data) - len(rest)], body)
    assert not any(name.lower().decode() in FORBIDDEN_TRAILERS for name, _ in trailers)
    again = (encode_chunk(body) if body else b"") + LAST_CHUNK
    assert _decode([again])[:2] == ("done", body)
    return True


def _decode(pieces: Iterable[bytes]) -> tuple[str, bytes, tuple[tuple[bytes, bytes], ...], bytes]:
    decoder = ChunkedDecoder(bad="bad-framing")
    body = b""
    rest = b""
    try:
        for piece in pieces:
            if decoder.done:
                rest += piece
            else:
                body += decoder.feed(piece)
    except HeadRefused:
        return "refused", b"", (), b""
    return ("done" if decoder.done else "more"), body, decoder.trailers, decoder.rest + rest


class _Body:
    def __init__(self) -> None:
        self.body = b""
        self.ended = 0

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.ended += 1


def _llhttp_agrees(message: bytes, body: bytes) -> None:
    seen = _Body()
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(HEAD)
    parser.feed_data(message[:-1])
    assert seen.ended == 0, "llhttp ends the message sooner"
    parser.feed_data(message[-1:])
    assert (seen.ended, seen.body) == (1, body), "llhttp reads another body"
