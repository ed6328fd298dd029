"""Content codings: bombs, lies and layers are withheld; honest streams come out whole at any split."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import brotli
import pytest
import zstandard

from broker.codings import MAX_RATIO, RATIO_GRACE, CodingRefused, coding_of, decoder_for
from broker.scrub import Guarded, Patterns
from broker.shaping import Shaping
from net.exchange import AnswerRefused
from rules.decision import Restrictions
from tests.support.rows import every_row
from wire.heads import ResponseHead

SECRET = b"tok-4mVZx81LrQwS0pEyUb7N"
PLAIN = b'{"echo":"' + SECRET + b'","more":"' + bytes(range(32, 127)).replace(b'"', b"") * 40 + b'"}'


def raw_deflate(data: bytes) -> bytes:
    engine = zlib.compressobj(wbits=-15)
    return engine.compress(data) + engine.flush()


def zstd_frame(data: bytes, window_log: int = 0) -> bytes:
    if window_log:
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
        return zstandard.ZstdCompressor(compression_params=parameters).compress(data)
    return zstandard.ZstdCompressor().compress(data)


ENCODED = {
    "gzip": ("gzip", gzip.compress(PLAIN)),
    "x-gzip": ("x-gzip", gzip.compress(PLAIN)),
    "gzip, two members": ("gzip", gzip.compress(PLAIN[:100]) + gzip.compress(PLAIN[100:])),
    "deflate": ("deflate", zlib.compress(PLAIN)),
    "deflate, raw": ("deflate", raw_deflate(PLAIN)),
    "br": ("br", brotli.compress(PLAIN)),
    "zstd": ("zstd", zstd_frame(PLAIN)),
    "zstd, two frames": ("zstd", zstd_frame(PLAIN[:100]) + zstd_frame(PLAIN[100:])),
}


def decode(coding: str, *pieces: bytes, content_type: str = "application/json") -> bytes:
    """Decode `pieces` to their end."""
    decoder = decoder_for(coding_of((coding,)), content_type)
    out = b"".join(part for piece in pieces for part in decoder.feed(piece))
    decoder.finish()
    return out


def zeros(size: int) -> bytes:
    return bytes(size)


BOMBS = {
    "gzip": gzip.compress(zeros(30 << 20)),
    "deflate": zlib.compress(zeros(30 << 20)),
    "br": brotli.compress(zeros(30 << 20), quality=2),
    "zstd": zstd_frame(zeros(30 << 20)),
}


@pytest.mark.parametrize("coding", sorted(BOMBS))
def test_a_bomb_is_refused_before_it_is_in_memory(coding: str) -> None:
    """Output beyond a hundred times the input stops the decoder, wherever the bomb is cut."""
    bomb = BOMBS[coding]
    for step in (len(bomb), 1000):
        produced, fed = explode(coding, [bomb[start : start + step] for start in range(0, len(bomb), step)])
        assert produced <= MAX_RATIO * fed + RATIO_GRACE


def explode(coding: str, pieces: list[bytes]) -> tuple[int, int]:
    """Feed until refused; returns (bytes that came out, bytes that went in)."""
    decoder = decoder_for(coding)
    produced = fed = 0
    for piece in pieces:
        fed += len(piece)
        try:
            for part in decoder.feed(piece):
                produced += len(part)
        except CodingRefused:
            return produced, fed
    pytest.fail("the bomb was not refused")


@every_row(
    ("sentence", "coding", "raw"),
    [
        ("text that says gzip", "gzip", PLAIN),
        ("text that says br", "br", PLAIN),
        ("text that says zstd", "zstd", PLAIN),
        ("text that says deflate", "deflate", PLAIN),
        ("zlib that says gzip", "gzip", zlib.compress(PLAIN)),
        ("gzip that says deflate", "deflate", gzip.compress(PLAIN)),
        ("gzip that says br", "br", gzip.compress(PLAIN)),
        ("br that says zstd", "zstd", brotli.compress(PLAIN)),
        ("gzip inside gzip", "gzip", gzip.compress(gzip.compress(PLAIN))),
        ("zstd inside gzip", "gzip", gzip.compress(zstd_frame(PLAIN))),
        ("gzip inside br", "br", brotli.compress(gzip.compress(PLAIN))),
        ("gzip that nobody mentions in JSON", "identity", gzip.compress(PLAIN)),
        ("zstd that nobody mentions in JSON", "identity", zstd_frame(PLAIN)),
        ("bytes behind gzip", "gzip", gzip.compress(PLAIN) + b"x" + SECRET),
        ("bytes behind deflate", "deflate", zlib.compress(PLAIN) + SECRET),
        ("bytes behind br", "br", brotli.compress(PLAIN) + SECRET),
        ("bytes behind zstd", "zstd", zstd_frame(PLAIN) + SECRET),
        ("gzip cut short", "gzip", gzip.compress(PLAIN)[:-9]),
        ("deflate cut short", "deflate", zlib.compress(PLAIN)[:-5]),
        ("br cut short", "br", brotli.compress(PLAIN)[:-2]),
        ("zstd cut short", "zstd", zstd_frame(PLAIN)[:-2]),
        ("a broken checksum", "gzip", gzip.compress(PLAIN)[:-8] + b"\x00" * 8),
        ("a br window of 16 MiB", "br", brotli.compress(PLAIN * 3000, lgwin=24)),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
@every_row("step", [1_000_000, 7])
def test_what_is_not_what_it_says_is_withheld(sentence: str, coding: str, raw: bytes, step: int) -> None:
    """Mislabelled, layered, cut and continued streams are refused at any split."""
    if step == 7 and len(raw) > 20_000:
        raw = raw[:20_000]
    with pytest.raises(CodingRefused):
        decode(coding, *(raw[start : start + step] for start in range(0, len(raw), step)))


def test_a_zstd_window_over_8_mib_is_refused() -> None:
    """A frame that asks for a larger window is refused by its header."""
    engine = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=25))
    stream = engine.compressobj()
    raw = stream.compress(PLAIN) + stream.flush()
    with pytest.raises(CodingRefused):
        decode("zstd", raw)


@pytest.mark.parametrize(
    "values",
    [
        ("gzip, gzip",),
        ("gzip", "gzip"),
        ("gzip, br",),
        ("identity, gzip, deflate",),
        ("compress",),
        ("gzip;q=1",),
        ("*",),
    ],
)
def test_several_or_unknown_codings_are_refused(values: tuple[str, ...]) -> None:
    """One known coding or none."""
    with pytest.raises(CodingRefused):
        coding_of(values)


@pytest.mark.parametrize("values", [(), ("",), ("identity",), ("Identity, ",)])
def test_no_coding_is_identity(values: tuple[str, ...]) -> None:
    """Nothing named, nothing done."""
    assert coding_of(values) == "identity"


@every_row("name", sorted(ENCODED))
@every_row("step", [1_000_000, 100, 1])
def test_an_honest_stream_comes_out_whole(name: str, step: int) -> None:
    """Every coding at every piece size."""
    coding, raw = ENCODED[name]
    assert decode(coding, *(raw[start : start + step] for start in range(0, len(raw), step))) == PLAIN


def test_an_archive_is_opaque() -> None:
    """A download that is a gzip file is passed as bytes: no header says that it is anything else."""
    raw = gzip.compress(PLAIN)
    assert decode("identity", raw, content_type="application/octet-stream") == raw


async def everything(shaping: Shaping, pieces: list[bytes]) -> bytes:
    """What comes out of `pieces`, to the end."""
    out = [part for piece in pieces async for part in shaping.feed(piece)]
    return b"".join(out + [part async for part in shaping.finish()])


def shaped(coding: str, pieces: list[bytes]) -> bytes:
    """The whole shaping of an answer, as the executor runs it."""
    patterns = Patterns([Guarded(value=SECRET)])
    shaping = Shaping(patterns=patterns, restrictions=Restrictions(), method="GET")
    headers = ((b"Content-Type", b"application/json"), (b"Content-Encoding", coding.encode()))
    shaping.on_response(ResponseHead(200, "OK", "1.1", headers))
    out = asyncio.run(everything(shaping, pieces))
    assert shaping.hits == 1
    return out


@pytest.mark.parametrize("name", sorted(ENCODED))
def test_a_secret_inside_a_coding_is_masked_at_every_split(name: str) -> None:
    """Wherever the compressed bytes are cut, the decoded secret never shows."""
    coding, raw = ENCODED[name]
    want = PLAIN.replace(SECRET, b"*" * len(SECRET))
    for cut in range(0, len(raw), max(1, len(raw) // 60)):
        assert shaped(coding, [raw[:cut], raw[cut:]]) == want
    assert shaped(coding, [raw[at : at + 1] for at in range(len(raw))]) == want


def test_a_decoded_answer_over_its_bound_is_refused() -> None:
    """`limits: {response}` counts decoded bytes too."""
    shaping = Shaping(patterns=Patterns([]), restrictions=Restrictions(response_bytes=100), method="GET")
    shaping.on_response(ResponseHead(200, "OK", "1.1", ((b"Content-Encoding", b"gzip"),)))
    with pytest.raises(AnswerRefused) as caught:
        asyncio.run(everything(shaping, [gzip.compress(PLAIN)]))
    assert caught.value.reason == "response-too-large"
