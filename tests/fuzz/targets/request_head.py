"""A request head: refused with a reason, or one request that everybody reads alike.

Accepted heads hold what RFC 9112 wants of them (looked for in the raw bytes, without our parser), llhttp sees the same
request and the same end of its body, facts are made or refused, and what we would send on parses to the same again.
"""

from __future__ import annotations

import contextlib

import httptools

from net.http1 import _second_request
from rules.facts import FactsRefused, RequestFacts, TunnelFacts
from rules.names import Host
from rules.reasons import reason
from wire.heads import (
    HOP_BY_HOP,
    NEVER_FORWARDED,
    NEVER_FORWARDED_PREFIXES,
    Chunked,
    HeadRefused,
    Length,
    NoBody,
    RequestHead,
    parse_request_head,
    request_framing,
    requested_upgrade,
    serialise_request,
    strip_never_forwarded,
)

WORDS = (
    b"GET", b"POST", b"CONNECT", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\r\n\r\n", b"Host: a.test",
    b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Connection: upgrade", b"Upgrade: websocket",
    b"Expect: 100-continue", b"Via: ", b"http://a.test/", b"X-HTTP-Method-Override: PUT", b"\n ", b" :", b"\x00",
    b"%2e%2e", b"Connection: host",
)  # fmt: skip

TUNNEL = TunnelFacts(host=Host("a.test"), port=443)


def check(data: bytes) -> bool:
    """See above."""
    try:
        head = parse_request_head(data)
    except HeadRefused as refused:
        assert reason(refused.reason).status >= 400
        return False
    _plain(data, head)
    try:
        _second_request(data, head)
        upgrade = requested_upgrade(head)
    except HeadRefused:
        return False  # the engine asks both parsers, the lane about upgrades: this head goes no further
    if head.method != "CONNECT" and upgrade is None:
        _llhttp_ends_it_alike(data, head)
    for tunnel in (None, TUNNEL):
        with contextlib.suppress(FactsRefused):
            RequestFacts.build(
                method=head.method,
                scheme="https" if tunnel else "http",
                tunnel=tunnel,
                target=head.target,
                headers=head.lower,
                has_body=request_framing(head) != NoBody(),
                upgrade=upgrade,
            )
    _sent_on(head)
    return True


def _plain(data: bytes, head: RequestHead) -> None:
    """What an accepted head must look like to a reader of bytes."""
    assert data.endswith(b"\r\n\r\n")
    assert data.count(b"\r") == data.count(b"\n") == data.count(b"\r\n")
    assert b"\x00" not in data
    line, *fields = data[:-4].split(b"\r\n")
    assert line.split(b" ") == [head.method.encode(), head.target.encode(), b"HTTP/" + head.version.encode()]
    names = [field.split(b":")[0].lower() for field in fields]
    assert not any(name.strip() != name or not name for name in names)
    assert names.count(b"host") == 1 or (head.method == "CONNECT" and head.version == "1.0" and b"host" not in names)
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() == b"content-length":
            digits = value.strip(b" \t")
            assert digits == b"%d" % int(digits)
        if name.lower() == b"transfer-encoding":
            assert value.strip(b" \t") == b"chunked"
            assert head.version == "1.1"


class _Messages:
    """Counts what llhttp completes."""

    def __init__(self) -> None:
        self.ended = 0
        self.body = b""

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.ended += 1


def _llhttp_ends_it_alike(data: bytes, head: RequestHead) -> None:
    framing = request_framing(head)
    match framing:
        case Length(size) if size <= 65536:
            body, last = b"b" * (size - 1), b"b"
        case Length():
            return
        case Chunked():
            body, last = b"1\r\nb\r\n0\r\n\r", b"\n"
        case _:
            body, last = b"", b""
    seen = _Messages()
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(data)
    if last:
        parser.feed_data(body) if body else None
        assert seen.ended == 0, "llhttp ends the body sooner"
        parser.feed_data(last)
    assert seen.ended == 1, "llhttp ends the body later"


def _sent_on(head: RequestHead) -> None:
    """What the http1 lane would send: the same request, without what must not go on."""
    kept = strip_never_forwarded(head.headers)
    raw = serialise_request(head.method, head.target, kept, request_framing(head))
    try:
        again = parse_request_head(raw)
    except HeadRefused:
        # CONNECT of HTTP/1.0 without a Host has none to send on either; it is never sent on.
        assert head.method == "CONNECT"
        return
    assert (again.method, again.target) == (head.method, head.target)
    assert request_framing(again) == request_framing(head)
    for name, _ in again.lower:
        assert name not in NEVER_FORWARDED
        assert not name.startswith(NEVER_FORWARDED_PREFIXES)
        assert name not in HOP_BY_HOP - {"transfer-encoding"}
    nominated = {item.strip().lower() for value in head.get("connection") for item in value.split(",")}
    for name, _ in again.lower:
        framing = ("host", "content-length", "content-type", "content-encoding", "authorization", "transfer-encoding")
        assert name not in nominated or name in framing, "a nominated field went on"
