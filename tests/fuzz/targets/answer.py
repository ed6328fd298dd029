"""An origin's answer as a whole: its client gets one answer at most, and the next request never gets a part of it.

The input is what a permitted origin says to GET /v1/a; on the same connection it answers GET /v1/b as it should. What
stands behind `{again}` it says in between.
"""

from __future__ import annotations

import asyncio

import httptools

from tests.support.frontdoor import CLEAN, two_answers

WORDS = (
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 204 No\r\n", b"HTTP/1.1 304 No\r\n", b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\n\r\n", b"HTTP/1.1 101 Switching\r\n",
    b"Content-Length: 2\r\n", b"{again}", b"Transfer-Encoding: chunked\r\n", b"2\r\nab\r\n", b"0\r\n\r\n",
    b"Connection: close\r\n", b"\x00", b"\n",
)  # fmt: skip
MAX_BYTES = 1024

_RUNNER = asyncio.Runner()


class _Seen:
    """What an independent parser finds in the client's bytes."""

    def __init__(self) -> None:
        self.final = 0
        self.ended = 0
        self.body = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.final += self.parser.get_status_code() >= 200

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.ended += self.parser.get_status_code() >= 200


def _read(raw: bytes) -> _Seen:
    seen = _Seen()
    seen.parser.feed_data(raw)
    return seen


def check(data: bytes) -> bool:
    """See above."""
    first, second, faults = _RUNNER.run(two_answers(data))
    assert not faults, faults
    one, two = _read(first), _read(second)
    assert one.final <= 1, "two answers to one request"
    assert (two.final, two.ended) == (1, 1)
    assert two.body == CLEAN or b"\nproxy-status: exeat" in second.lower(), "the next request got another's answer"
    ours = b"\nproxy-status: exeat" in first.lower()
    return one.ended == 1 and not ours
