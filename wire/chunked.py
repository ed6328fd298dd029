"""The chunked transfer coding, both ways: a strict incremental decoder and the encoding of one chunk.

Rules (RFC 9112 7.1, narrowed): a size is 1 to 16 hex digits and nothing else (no extension, sign, `0x`, space,
underscore: B070); every line ends in CRLF; lines, trailers and the whole body are bounded. The decoder stops exactly
at the end of its message and hands back what follows, so that two messages can never run into one (RULINGS 11.2).
"""

from __future__ import annotations

from wire.heads import Headers, HeadRefused, parse_trailers

_HEX = b"0123456789abcdefABCDEF"
LAST_CHUNK = b"0\r\n\r\n"


def encode_chunk(data: bytes, *, behind: bytes = b"") -> bytes:
    """`data` (not empty) as one chunk, `behind` what is sent before it: copied once."""
    return b"%b%x\r\n%b\r\n" % (behind, len(data), data)


class ChunkedDecoder:
    """Feed it the bytes after a head, take the body bytes out; `done` once the final chunk and trailers were read.

    Raises HeadRefused(`bad`) for anything that is not one well-formed chunked body.
    """

    __slots__ = (
        "_bad",
        "_left",
        "_line_bound",
        "_partial",
        "_state",
        "_trailer_bytes",
        "_trailer_count",
        "rest",
        "trailers",
    )

    def __init__(self, *, bad: str, line_bound: int = 18, trailer_bytes: int = 8192, trailer_count: int = 32) -> None:
        self._bad = bad
        self._line_bound = line_bound
        self._trailer_bytes = trailer_bytes
        self._trailer_count = trailer_count
        self._state = "size"  # size -> data -> data-end -> size ... -> trailers -> done
        self._left = 0
        self._partial = b""  # the start of a line that is not complete yet
        self.trailers: Headers = ()
        self.rest = b""
        """Once done: the bytes after the message."""

    @property
    def done(self) -> bool:
        return self._state == "done"

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`; may be empty. Not to be called once done."""
        if self._partial:
            data = self._partial + data
            self._partial = b""
        out: list[bytes] = []
        at = 0
        size = len(data)
        while True:
            match self._state:
                case "data":
                    piece = data[at : at + self._left]
                    if piece:
                        out.append(piece)
                        at += len(piece)
                        self._left -= len(piece)
                    if self._left:
                        break
                    self._state = "data-end"
                case "data-end":
                    end = data[at : at + 2]
                    if end != b"\r\n":
                        if end == b"\r" or not end:
                            self._partial = end
                            break
                        raise HeadRefused(self._bad, "a chunk does not end where it said")
                    at += 2
                    self._state = "size"
                case "size":
                    line_end = data.find(b"\n", at, at + self._line_bound)
                    if line_end < 0:
                        partial = data[at:]
                        # What cannot become a size any more is refused now, not after a timeout.
                        if len(partial) >= self._line_bound or partial.removesuffix(b"\r").translate(None, _HEX):
                            raise HeadRefused(self._bad, "not a chunk size")
                        self._partial = partial
                        break
                    line = data[at : line_end + 1]
                    digits = line[:-2]
                    if not digits or line[-2:] != b"\r\n" or len(digits) > 16 or digits.translate(None, _HEX):
                        raise HeadRefused(self._bad, "not a chunk size")
                    at = line_end + 1
                    self._left = int(digits, 16)
                    if self._left >= 1 << 62:
                        raise HeadRefused(self._bad, "not a chunk size")
                    self._state = "data" if self._left else "trailers"
                case "trailers":
                    if data[at : at + 2] == b"\r\n":
                        at += 2
                    else:
                        end_at = data.find(b"\r\n\r\n", at, at + self._trailer_bytes)
                        if end_at < 0:
                            if size - at >= self._trailer_bytes:
                                raise HeadRefused(self._bad, "the trailers are too long")
                            self._partial = data[at:]
                            break
                        self.trailers = parse_trailers(
                            data[at : end_at + 2], max_count=self._trailer_count, bad=self._bad
                        )
                        at = end_at + 4
                    self._state = "done"
                    self.rest = data[at:]
                    break
                case _:
                    raise HeadRefused(self._bad, "bytes after the end of a body")
        return out[0] if len(out) == 1 else b"".join(out)
