"""An answer head: refused as upstream-protocol, or one answer whose end both parsers see alike, for every method."""

from __future__ import annotations

import httptools

from net.http1 import _second_response
from wire.heads import (
    NEVER_RETURNED,
    Chunked,
    HeadRefused,
    Length,
    NoBody,
    ResponseHead,
    UntilClose,
    keeps_alive,
    parse_response_head,
    response_framing,
    serialise_response,
    strip_answer,
)

WORDS = (
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 ", b"HTTP/1.1 101", b"HTTP/1.1 204 ", b"HTTP/1.1 304 ", b"HTTP/1.1 100 ",
    b"\r\n\r\n", b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip",
    b"Connection: close", b"Set-Cookie: a=b", b"Proxy-Authenticate: x", b"Exeat-Request: x", b"Alt-Svc: h3", b"\n ",
    b" :", b"\x00",
)  # fmt: skip


def check(data: bytes) -> bool:
    """See above."""
    try:
        head = parse_response_head(data)
    except HeadRefused as refused:
        assert refused.reason == "upstream-protocol"
        return False
    assert 100 <= head.status <= 599
    assert data.count(b"\r") == data.count(b"\n") == data.count(b"\r\n")
    names = [line.split(b":")[0].lower() for line in data[:-4].split(b"\r\n")[1:]]
    assert names.count(b"content-length") <= 1
    assert not (b"content-length" in names and b"transfer-encoding" in names)
    keeps_alive(head)
    try:
        _second_response(data, head)
    except HeadRefused:
        return False
    for method in ("GET", "HEAD", "POST"):
        _ends(data, head, method)
    _sent_down(head)
    return True


class _Ended:
    """Counts what llhttp completes."""

    def __init__(self) -> None:
        self.count = 0

    def on_message_complete(self) -> None:
        self.count += 1


def _ends(data: bytes, head: ResponseHead, method: str) -> None:
    """llhttp, which knows no method, agrees about the end of an answer to GET."""
    framing = response_framing(head, method)
    if method == "HEAD" or head.status < 200 or head.status in (204, 304):
        assert framing == NoBody()
        return
    if method != "GET":
        return
    seen = _Ended()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return
    match framing:
        case Length(size) if size <= 65536:
            assert seen.count == 0
            parser.feed_data(b"b" * size)
            assert seen.count == 1
        case Chunked():
            parser.feed_data(b"1\r\nb\r\n0\r\n\r")
            assert seen.count == 0
            parser.feed_data(b"\n")
            assert seen.count == 1
        case UntilClose():
            parser.feed_data(b"HTTP/1.1 200 OK\r\n\r\n")
            assert seen.count == 0
        case _:
            pass


def _sent_down(head: ResponseHead) -> None:
    """What the sandbox would get parses to the same answer, without what is aimed at a proxy."""
    kept = ResponseHead(head.status, head.reason, head.version, strip_answer(head.headers))
    framing = NoBody() if head.status < 200 else response_framing(head, "GET")
    again = parse_response_head(serialise_response(kept, framing))
    assert again.status == head.status
    if head.status >= 200 and head.status not in (204, 304):
        assert response_framing(again, "GET") == framing
    for name, _ in again.lower:
        assert name not in NEVER_RETURNED
        assert not name.startswith(("proxy-", "exeat-"))
