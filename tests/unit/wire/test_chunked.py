"""The chunked decoder: refusals, then bodies, in any split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import tried
from tests.support.rows import every_row
from wire.chunked import ChunkedDecoder, encode_chunk
from wire.heads import HeadRefused

REFUSED = [
    (b"0_2\r\n", "an underscore"),
    (b"+3\r\n", "a sign"),
    (b"0x3\r\n", "hex prefix"),
    (b"f" * 20 + b"\r\n", "twenty hex digits"),
    (b"0" * 100 + b"3\r\n", "a hundred leading zeros"),
    (b"ffffffffffffffff\r\n", "sixteen digits that overflow"),
    (b"2;\nxx", "an extension with a bare LF"),
    (b"2;a=b\r\nxx\r\n", "an extension"),
    (b"2 \r\nxx\r\n", "a space after the size"),
    (b" 2\r\nxx\r\n", "a space before the size"),
    (b"\r\n", "an empty size"),
    (b"2\nxx\r\n", "a bare LF after the size"),
    (b"2\rxx\r\n", "a bare CR after the size"),
    (b"2\r\nxxx\r\n", "a chunk longer than it said"),
    (b"2\r\nxx\n0\r\n\r\n", "a chunk that ends in a bare LF"),
    (b"-1\r\n", "a negative size"),
    (b"0\r\nContent-Length: 3\r\n\r\n", "a length among the trailers"),
    (b"0\r\nX: " + b"y" * 9000 + b"\r\n\r\n", "trailers over their bound"),
    (b"0\r\nbad trailer\r\n\r\n", "a trailer that is no field"),
]


@every_row("raw", [row[0] for row in REFUSED], ids=[row[1] for row in REFUSED])
@every_row("step", [1, 3, 10_000])
def test_what_is_not_exactly_chunked_is_refused(raw, step):
    """Whole or in pieces, the row is refused with the reason that the decoder was made with."""
    decoder = ChunkedDecoder(bad="bad-framing")
    pieces = [raw[at : at + step] for at in range(0, len(raw), step)]
    with pytest.raises(HeadRefused) as refused:
        list(map(decoder.feed, pieces))
    assert refused.value.reason == "bad-framing"


@tried()
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_any_split_gives_the_same_body_and_the_same_rest(chunks, data):
    """Body, trailers and the bytes after the message do not depend on how the bytes arrive."""
    raw = b"".join(map(encode_chunk, chunks)) + b"0\r\nX-T: 1\r\n\r\nGET /next"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    decoder = ChunkedDecoder(bad="bad-framing")
    body, rest = b"", b""
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        if decoder.done:
            rest += raw[start:end]
        else:
            body += decoder.feed(raw[start:end])
            rest += decoder.rest if decoder.done else b""
    assert (body, decoder.trailers, rest) == (b"".join(chunks), ((b"X-T", b"1"),), b"GET /next")
