"""Heads: what is refused first, then what passes, then how heads are written."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import tried
from tests.support.rows import every_row
from wire.heads import (
    CHUNKED,
    NO_BODY,
    UNTIL_CLOSE,
    HeadRefused,
    Length,
    RequestHead,
    ResponseHead,
    keeps_alive,
    parse_request_head,
    parse_response_head,
    parse_trailers,
    request_framing,
    requested_upgrade,
    response_framing,
    serialise_request,
    serialise_response,
    strip_answer,
    strip_hop_by_hop,
    strip_never_forwarded,
)

HOST = b"Host: ok.test\r\n"


def request(line: bytes = b"GET /x HTTP/1.1", fields: bytes = HOST) -> bytes:
    return line + b"\r\n" + fields + b"\r\n"


REFUSED_REQUESTS = [
    (request(fields=b""), "bad-host-header", "no Host"),
    (request(fields=HOST + HOST), "bad-host-header", "two equal Hosts"),
    (request(fields=HOST + b"hOsT: evil.test\r\n"), "bad-host-header", "two Hosts in different case"),
    (request(b"GET /x HTTP/1.0", b""), "bad-host-header", "no Host on HTTP/1.0"),
    (request(b"GET /x HTTP/2.0"), "bad-version", "HTTP/2.0 as a version line"),
    (request(b"GET /x HTTP/0.9"), "bad-version", "HTTP/0.9 as a version line"),
    (request(b"GET /x HTTP/1.32"), "bad-version", "a two-digit minor version"),
    (request(b"GET /x http/1.1"), "bad-version", "a lower-case version"),
    (request(b"GET /x"), "bad-head", "an HTTP/0.9 request line"),
    (request(b"DESCRIBE /x RTSP/1.0"), "bad-head", "an RTSP method"),
    (request(b"SETUP /x HTTP/1.1"), "bad-head", "an RTSP method with an HTTP version"),
    (request(b"SOURCE /x ICE/1.0"), "bad-head", "an ICE method"),
    (request(b"PRI * HTTP/2.0"), "bad-head", "the HTTP/2 preface"),
    (request(b"get /x HTTP/1.1"), "bad-head", "a lower-case method"),
    (request(b"G\x00T /x HTTP/1.1"), "bad-head", "NUL in the method"),
    (request(b"GET  /x HTTP/1.1"), "bad-head", "two spaces before the target"),
    (request(b"GET /x  HTTP/1.1"), "bad-head", "two spaces after the target"),
    (request(b"GET /x HTTP/1.1 "), "bad-head", "a trailing space"),
    (request(b" GET /x HTTP/1.1"), "bad-head", "a leading space"),
    (request(b"GET\t/x\tHTTP/1.1"), "bad-head", "tabs for spaces"),
    (b"\r\n" + request(), "bad-head", "a leading blank line"),
    (request(b"GET /x#y HTTP/1.1"), "bad-target", "a fragment"),
    (request(b'GET /"x HTTP/1.1'), "bad-target", "a quote in the target"),
    (request(b"GET /<x> HTTP/1.1"), "bad-target", "markup in the target"),
    (request(b"GET /\\x HTTP/1.1"), "bad-target", "a backslash in the target"),
    (request(b"GET /\xc3\xa9 HTTP/1.1"), "bad-target", "raw UTF-8 in the target"),
    (request(b"GET /x\x7f HTTP/1.1"), "bad-head", "DEL in the target"),
    (request(fields=HOST + b"X: a\x00b\r\n"), "bad-head", "NUL in a value"),
    (request(fields=HOST + b"X: a\rb\r\n"), "bad-head", "a bare CR in a value"),
    (request(fields=HOST + b"X: a\nY: b\r\n"), "bad-head", "a bare LF in a value"),
    (request(fields=HOST + b"X: a\r\n b\r\n"), "bad-head", "a folded line"),
    (request(fields=HOST + b"X : a\r\n"), "bad-head", "a space before the colon"),
    (request(fields=b" " + HOST), "bad-head", "a space before the first field"),
    (request(fields=HOST + b": a\r\n"), "bad-head", "an empty name"),
    (request(fields=HOST + b"X\r\n"), "bad-head", "a field without colon"),
    (request(fields=HOST + b"Host\r\n"), "bad-head", "a well-known name without colon"),
    (request(fields=HOST + b"X(y): a\r\n"), "bad-head", "a name that is no token"),
    (request(fields=HOST + b"X\xe9: a\r\n"), "bad-head", "a name outside ASCII"),
    (request(fields=HOST + b"Expect: 200-ok\r\n"), "bad-head", "an unknown expectation"),
    (request(fields=HOST + b"X: y\r\n" * 100), "head-too-large", "one field too many"),
    (request(fields=HOST + b"Content-Length: +5\r\n"), "bad-framing", "a sign"),
    (request(fields=HOST + b"Content-Length: -1\r\n"), "bad-framing", "a negative length"),
    (request(fields=HOST + b"Content-Length: 5, 5\r\n"), "bad-framing", "a list"),
    (request(fields=HOST + b"Content-Length: 5\r\nContent-Length: 5\r\n"), "bad-framing", "two equal lengths"),
    (request(fields=HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n"), "bad-framing", "two lengths"),
    (request(fields=HOST + b"Content-Length: 0x5\r\n"), "bad-framing", "hex"),
    (request(fields=HOST + b"Content-Length: 5_0\r\n"), "bad-framing", "an underscore"),
    (
        request(fields=HOST + "Content-Length: \N{ARABIC-INDIC DIGIT FIVE}\r\n".encode()),
        "bad-framing",
        "an Arabic digit",
    ),
    (request(fields=HOST + b"Content-Length: \xb2\r\n"), "bad-framing", "a superscript digit"),
    (request(fields=HOST + b"Content-Length: 01\r\n"), "bad-framing", "a leading zero"),
    (request(fields=HOST + b"Content-Length:\r\n"), "bad-framing", "an empty length"),
    (request(fields=HOST + b"Content-Length: 9999999999999999999\r\n"), "bad-framing", "a length beyond bounds"),
    (request(fields=HOST + b"Transfer-Encoding: gzip, chunked\r\n"), "bad-framing", "a second coding"),
    (request(fields=HOST + b"Transfer-Encoding: chunked, chunked\r\n"), "bad-framing", "chunked twice in a list"),
    (request(fields=HOST + b"Transfer-Encoding: chunked\r\n" * 2), "bad-framing", "chunked twice"),
    (request(fields=HOST + b"Transfer-Encoding: xchunked\r\n"), "bad-framing", "another coding"),
    (request(fields=HOST + b"Transfer-Encoding: Chunked\r\n"), "bad-framing", "another spelling"),
    (request(fields=HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"), "bad-framing", "both, TE first"),
    (request(fields=HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), "bad-framing", "both, CL first"),
    (request(b"GET /x HTTP/1.0", HOST + b"Transfer-Encoding: chunked\r\n"), "bad-framing", "TE on HTTP/1.0"),
    (request(b"CONNECT ok.test:443 HTTP/1.1", HOST + b"Content-Length: 5\r\n"), "bad-framing", "CONNECT with body"),
    (request()[:-2], "bad-head", "no empty line"),
]


@every_row(("raw", "reason"), [row[:2] for row in REFUSED_REQUESTS], ids=[r[2] for r in REFUSED_REQUESTS])
def test_a_request_head_that_is_not_exactly_http_is_refused(raw, reason):
    """Every row is refused with its reason, and the sentence reflects nothing of the message."""
    with pytest.raises(HeadRefused) as refused:
        parse_request_head(raw)
    assert refused.value.reason == reason
    assert "evil" not in refused.value.detail


def test_a_plain_request_head_is_parsed_in_order():
    """Names keep their spelling, values lose their outer blanks, duplicates and obs-text stay."""
    head = parse_request_head(request(b"POST /a?b=%20 HTTP/1.1", HOST + b"X-A:\t1 \r\nx-a: \xe9\r\nEmpty:\r\n"))
    assert (head.method, head.target, head.version) == ("POST", "/a?b=%20", "1.1")
    assert head.headers == ((b"Host", b"ok.test"), (b"X-A", b"1"), (b"x-a", b"\xe9"), (b"Empty", b""))
    assert head.get("x-a") == ("1", "é")


def test_an_old_connect_needs_no_host():
    """HTTP/1.0 CONNECT without Host passes, HTTP/1.1 CONNECT without Host does not."""
    assert parse_request_head(request(b"CONNECT ok.test:443 HTTP/1.0", b"")).target == "ok.test:443"
    with pytest.raises(HeadRefused):
        parse_request_head(request(b"CONNECT ok.test:443 HTTP/1.1", b""))


@pytest.mark.parametrize(
    ("fields", "framing"),
    [(b"", NO_BODY), (b"Content-Length: 0\r\n", NO_BODY), (b"Content-Length: 7\r\n", Length(7)),
     (b"Transfer-Encoding: chunked\r\n", CHUNKED)],
)  # fmt: skip
def test_request_framing(fields, framing):
    """A request has no body unless one of the two fields says so."""
    assert request_framing(parse_request_head(request(b"GET /x HTTP/1.1", HOST + fields))) == framing


REFUSED_ANSWERS = [
    (b"<html>hello</html>\r\n\r\n", "an HTTP/0.9 answer"),
    (b"HTTP/2.0 200 OK\r\n\r\n", "another version"),
    (b"HTTP/1.1 20 OK\r\n\r\n", "a status of two digits"),
    (b"HTTP/1.1 2000 OK\r\n\r\n", "a status of four digits"),
    (b"HTTP/1.1 099 OK\r\n\r\n", "a status below 100"),
    (b"HTTP/1.1 600 OK\r\n\r\n", "a status above 599"),
    (b"HTTP/1.1  200 OK\r\n\r\n", "two spaces"),
    (b"HTTP/1.1 200 O\x00K\r\n\r\n", "NUL in the reason phrase"),
    (b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n", "a folded line"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "both framings"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", "both framings, other order"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n", "two lengths"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "a coding other than chunked"),
    (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "a coding on HTTP/1.0"),
    (b"HTTP/1.1 204 X\r\nContent-Length: 5\r\n\r\n", "204 with a body"),
    (b"HTTP/1.1 204 X\r\nTransfer-Encoding: chunked\r\n\r\n", "204 with chunks"),
    (b"HTTP/1.1 103 X\r\nContent-Length: 5\r\n\r\n", "an interim answer with a body"),
    (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 101 + b"\r\n", "one field too many"),
]


@every_row("raw", [row[0] for row in REFUSED_ANSWERS], ids=[row[1] for row in REFUSED_ANSWERS])
def test_an_answer_head_that_is_ambiguous_is_refused(raw):
    """Every row becomes the one reason `upstream-protocol`."""
    with pytest.raises(HeadRefused) as refused:
        parse_response_head(raw)
    assert refused.value.reason == "upstream-protocol"


@pytest.mark.parametrize(
    ("raw", "method", "framing"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "GET", Length(5)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", NO_BODY),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", "GET", CHUNKED),
        (b"HTTP/1.1 304 X\r\nContent-Length: 5\r\n\r\n", "GET", NO_BODY),
        (b"HTTP/1.1 204\r\nContent-Length: 0\r\n\r\n", "GET", NO_BODY),
        (b"HTTP/1.1 200 \r\n\r\n", "GET", UNTIL_CLOSE),
        (b"HTTP/1.0 200 OK\r\n\r\n", "GET", UNTIL_CLOSE),
    ],
)
def test_response_framing(raw, method, framing):
    """RFC 9112 6.3, in its order."""
    assert response_framing(parse_response_head(raw), method) == framing


@pytest.mark.parametrize(
    "fields",
    [
        b"Upgrade: websocket\r\n",
        b"Upgrade: websocket\r\nConnection: notupgrade\r\n",
        b"Connection: Upgrade\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket, h2c\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 3\r\n",
    ],
)
def test_an_upgrade_that_is_not_plain_is_refused(fields):
    """One protocol, nominated as a whole token, without a body, or nothing."""
    with pytest.raises(HeadRefused) as refused:
        requested_upgrade(parse_request_head(request(fields=HOST + fields)))
    assert refused.value.reason == "upgrade-refused"


def test_an_upgrade_is_found_as_a_whole_token():
    """`keep-alive, Upgrade` nominates it; without any of both there is none."""
    raw = request(fields=HOST + b"Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n")
    assert requested_upgrade(parse_request_head(raw)) == "websocket"
    assert requested_upgrade(parse_request_head(request())) is None


def test_hop_by_hop_and_nominated_fields_go_but_not_what_makes_the_message():
    """Connection removes what it names, except fields without which the message would be another."""
    headers = ((b"Host", b"h"), (b"Connection", b"close, X-A, Authorization, host"), (b"X-a", b"1"),
               (b"Keep-Alive", b"5"), (b"TE", b"trailers"), (b"Authorization", b"k"), (b"X-B", b"2"))  # fmt: skip
    assert [name for name, _ in strip_hop_by_hop(headers)] == [b"Host", b"Authorization", b"X-B"]


@every_row(
    "name",
    [b"X-Original-URL", b"x-rewrite-url", b"X-HTTP-Method-Override", b"X-Method-Override", b"X-Forwarded-For",
     b"Forwarded", b"X-Real-IP", b"X-Host", b"Via", b"Proxy-Authorization", b"Exeat-Request", b"Proxy-Anything"],
)  # fmt: skip
def test_fields_that_could_relax_a_verdict_further_on_are_not_forwarded(name):
    """RULINGS 4.1, in any case of letters."""
    assert strip_never_forwarded(((name, b"1"), (name.upper(), b"1"), (b"Accept", b"*/*"))) == ((b"Accept", b"*/*"),)


def test_answer_fields_aimed_at_the_route_are_removed():
    """B201: Alt-Svc, proxy fields, nominated fields and forged fields of ours do not reach the sandbox."""
    headers = ((b"Alt-Svc", b"h3"), (b"Proxy-Authenticate", b"Basic"), (b"Proxy-Status", b"x"), (b"Exeat-A", b"1"),
               (b"Connection", b"x-verdict"), (b"X-Verdict", b"1"), (b"ETag", b"1"))  # fmt: skip
    assert strip_answer(headers) == ((b"ETag", b"1"),)


@pytest.mark.parametrize(
    "headers",
    [((b"X", b"a\r\nY: b"),), ((b"X\r\nY", b"a"),), ((b"X", b"a\x00"),), ((b"", b"a"),)],
)
def test_a_head_never_writes_what_it_would_not_read(headers):
    """Line ends or controls in a value or name raise before a byte is written."""
    with pytest.raises(ValueError, match="header"):
        serialise_request("GET", "/", headers, NO_BODY)
    with pytest.raises(ValueError, match="header"):
        serialise_response(ResponseHead(200, "OK", "1.1", headers), NO_BODY)


@pytest.mark.parametrize("target", ["/ HTTP/1.1\r\nX: y", "/a b", "/\r\n"])
def test_a_request_line_never_splits(target):
    """A target with blanks or line ends raises."""
    with pytest.raises(ValueError, match="line"):
        serialise_request("GET", target, (), NO_BODY)


def test_framing_fields_are_written_once_and_by_us():
    """Lengths and codings among the given headers are replaced."""
    raw = serialise_request(
        "PUT", "/x", ((b"Host", b"h"), (b"content-length", b"9"), (b"Transfer-Encoding", b"chunked")), Length(3)
    )
    assert raw == b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\n"
    assert b"Content-Length: 0\r\n" in serialise_request("POST", "/x", (), NO_BODY)
    assert b"Content-Length" not in serialise_request("GET", "/x", (), NO_BODY)


@pytest.mark.parametrize("block", [b"Content-Length: 1\r\n", b"Host: x\r\n", b"Authorization: x\r\n", b"a b: c\r\n",
                                   b"X: y\n", b"X: y", b"X: a\r\n b\r\n", b"X: y\r\n" * 33])  # fmt: skip
def test_trailers_that_may_stand_in_a_head_only_are_refused(block):
    """Framing, routing and authority never arrive after the body; neither do malformed lines."""
    with pytest.raises(HeadRefused):
        parse_trailers(block, max_count=32)


def test_keeps_alive():
    """HTTP/1.1 unless it says close; HTTP/1.0 never."""
    assert keeps_alive(parse_request_head(request()))
    assert not keeps_alive(parse_request_head(request(fields=HOST + b"Connection: foo, Close\r\n")))
    assert not keeps_alive(parse_request_head(request(b"GET / HTTP/1.0", HOST + b"Connection: keep-alive\r\n")))


token = st.text("abcXYZ-_!09", min_size=1, max_size=12).map(str.encode)
value = st.binary(max_size=20).map(lambda b: bytes(c for c in b if c >= 0x20 and c != 0x7F).strip(b" \t"))


@tried()
@given(st.lists(st.tuples(token, value), max_size=8))
def test_what_is_written_is_read_back_equal(fields):
    """Serialise, parse: the same method, target and fields (those that are ours to write apart)."""
    headers = ((b"Host", b"ok.test"), *((b"X-" + name, text) for name, text in fields))
    head = parse_request_head(serialise_request("POST", "/p?q=1", headers, Length(4)))
    assert head == RequestHead("POST", "/p?q=1", "1.1", (*headers, (b"Content-Length", b"4")))


@tried()
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(data):
    """Hostile bytes end in HeadRefused or a head, never in another exception."""
    for parse in (parse_request_head, parse_response_head):
        for raw in (data, data + b"\r\n\r\n", b"GET /x HTTP/1.1\r\n" + data + b"\r\n\r\n", b"HTTP/1.1 " + data):
            with contextlib.suppress(HeadRefused):
                parse(raw)
