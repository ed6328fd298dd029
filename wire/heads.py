"""HTTP/1.1 heads: what we accept as one, on both sides, and how we write one. Strict; nothing is repaired.

Map: `parse_request_head`, `parse_response_head` (bytes to values), `request_framing`, `response_framing` (how the
body ends), `strip_hop_by_hop`, `serialise_request`, `serialise_response` (values to bytes).

The rules stand behind llhttp, which net/http1.py runs on the same bytes as second opinion: llhttp accepts no Host,
two Hosts, `HTTP/2.0`, `Transfer-Encoding: gzip, chunked`, transfer codings on HTTP/1.0, `Content-Length: 01`, RTSP
methods and `#` in a target (RULINGS 11.2; RFC 9112). No regular expressions: every check is one pass over the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

Headers = tuple[tuple[bytes, bytes], ...]

MAX_HEADERS = 100

METHODS = frozenset(
    b"GET HEAD POST PUT PATCH DELETE OPTIONS CONNECT TRACE ACL BIND CHECKOUT COPY LINK LIST LOCK MERGE MKACTIVITY "
    b"MKCALENDAR MKCOL MOVE NOTIFY PROPFIND PROPPATCH PURGE QUERY REBIND REPORT SEARCH SUBSCRIBE UNBIND UNLINK "
    b"UNLOCK UNSUBSCRIBE".split()
)
"""The HTTP methods that llhttp knows, without those of RTSP, ICE and the HTTP/2 preface; and LIST, a verb of Vault's
(https://developer.hashicorp.com/vault/api-docs#api-operations)."""

HOP_BY_HOP = frozenset(
    {"connection", "proxy-connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Fields about one connection (RFC 9110 7.6.1); written anew on each side, never copied."""

NEVER_FORWARDED = frozenset(
    {
        "x-original-url",
        "x-rewrite-url",
        "x-method-override",
        "forwarded",
        "x-real-ip",
        "x-host",
        "via",
    }
)
"""Client fields that could relax a verdict further on (RULINGS 4.1); see also NEVER_FORWARDED_PREFIXES."""
NEVER_FORWARDED_PREFIXES = ("x-http-method", "x-forwarded-", "proxy-", "exeat-")

FORBIDDEN_TRAILERS = HOP_BY_HOP | {
    "content-length",
    "host",
    "content-encoding",
    "content-type",
    "content-range",
    "expect",
    "max-forwards",
    "cache-control",
    "authorization",
    "proxy-authorization",
    "proxy-authenticate",
    "www-authenticate",
    "cookie",
    "set-cookie",
    "range",
    "location",
}
"""Fields that mean something before the body only (RFC 9110 6.5.1): a message that trails one is refused."""


class HeadRefused(ValueError):
    """A message that is not exactly HTTP/1.1 as we accept it. `reason` is a code of rules.reasons.

    `detail` is a fixed sentence: it never holds a byte of the message.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class NoBody:
    """The message ends with its head."""


@dataclass(frozen=True, slots=True)
class Length:
    """Exactly `size` bytes follow."""

    size: int


@dataclass(frozen=True, slots=True)
class Chunked:
    """Chunks follow, then trailers."""


@dataclass(frozen=True, slots=True)
class UntilClose:
    """The body ends with the connection (answers only)."""


Framing = NoBody | Length | Chunked | UntilClose

NO_BODY = NoBody()
CHUNKED = Chunked()
UNTIL_CLOSE = UntilClose()


def _lower(headers: Headers) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower().decode("latin-1"), value.decode("latin-1")) for name, value in headers)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request line and its fields in the order received. `lower` has lower-case names, values as latin-1 text."""

    method: str
    target: str
    version: str
    headers: Headers
    lower: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.headers and not self.lower:
            object.__setattr__(self, "lower", _lower(self.headers))

    def get(self, name: str) -> tuple[str, ...]:
        """All values of the field `name` (lower case), in order."""
        return tuple(value for key, value in self.lower if key == name)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A status line and its fields in the order received."""

    status: int
    reason: str
    version: str
    headers: Headers
    lower: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.headers and not self.lower:
            object.__setattr__(self, "lower", _lower(self.headers))

    def get(self, name: str) -> tuple[str, ...]:
        """All values of the field `name` (lower case), in order."""
        return tuple(value for key, value in self.lower if key == name)


# --- bytes to values ---

_TOKEN = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS = b"0123456789"
_TARGET = bytes(set(range(0x21, 0x7F)) - set(b'#"<>\\'))
_HEAD = bytes(set(range(0x20, 0x7F)) | {0x09, 0x0D, 0x0A} | set(range(0x80, 0x100)))
"""Every byte that may occur in a head: visible ASCII, space, tab, CR, LF (pairs are checked apart), obs-text."""
_REASON = bytes(set(range(0x20, 0x7F)) | {0x09} | set(range(0x80, 0x100)))

_COMMON = {
    spelling: name.lower()
    for name in (
        "Host User-Agent Accept Accept-Encoding Accept-Language Authorization Connection Content-Length Content-Type "
        "Content-Encoding Transfer-Encoding Expect Cookie Cache-Control Pragma Range If-Range If-None-Match "
        "If-Modified-Since Origin Referer Upgrade Proxy-Authorization Proxy-Connection Keep-Alive TE Trailer Via Date "
        "Server ETag Last-Modified Location Set-Cookie Vary Age Expires Link Retry-After X-Api-Key Accept-Ranges "
        "Content-Range Strict-Transport-Security X-Request-Id Git-Protocol"
    ).split()
    for spelling in (name.encode(), name.lower().encode())
}
"""Spellings seen all the time, so that they are neither checked nor lowered anew."""


def parse_request_head(raw: bytes, *, max_headers: int = MAX_HEADERS) -> RequestHead:
    """The request head in `raw`, which ends with its empty line and holds nothing else.

    Raises HeadRefused: bad-head, bad-version, bad-target, bad-host-header, bad-framing, head-too-large.
    """
    lines = _lines(raw, max_headers, "bad-head")
    parse_request_line(lines[0])
    method, target, version = lines[0].split(b" ")
    headers, lower = _fields(lines, "bad-head")
    head = RequestHead(method.decode(), target.decode(), version[5:].decode(), headers, lower)
    _check_host(head)
    request_framing(head)
    for value in head.get("expect"):
        if value.lower() != "100-continue":
            raise HeadRefused("bad-head", "the only expectation that exists is 100-continue")
    return head


def parse_request_line(line: bytes) -> None:
    """Check a request line without its CRLF, so that other protocols are told by their first line.

    Raises HeadRefused: bad-head, bad-version, bad-target.
    """
    parts = line.split(b" ")
    if len(parts) != 3:
        raise HeadRefused("bad-head", "the request line is not a method, a target and a version")
    method, target, version = parts
    if method not in METHODS:
        raise HeadRefused("bad-head", "not an HTTP method")
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise HeadRefused("bad-version", "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if not target or target.translate(None, _TARGET):
        raise HeadRefused("bad-target", "the target holds a character that must be percent-encoded")


def parse_response_head(raw: bytes, *, max_headers: int = MAX_HEADERS) -> ResponseHead:
    """The answer head in `raw`, which ends with its empty line and holds nothing else.

    Raises HeadRefused(upstream-protocol), also where the framing is ambiguous (RULINGS 4.6).
    """
    lines = _lines(raw, max_headers, "upstream-protocol")
    status, reason, version = parse_status_line(lines[0])
    headers, lower = _fields(lines, "upstream-protocol")
    head = ResponseHead(status, reason, version, headers, lower)
    response_framing(head, "GET")
    return head


def parse_status_line(line: bytes) -> tuple[int, str, str]:
    """(status, reason, version) of a status line without its CRLF. Raises HeadRefused(upstream-protocol)."""
    version, code, reason = line[:8], line[9:12], line[13:]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or line[8:9] != b" " or line[12:13] not in (b" ", b""):
        raise HeadRefused("upstream-protocol", "not an HTTP/1 status line")
    if len(code) != 3 or code.translate(None, _DIGITS) or not b"100" <= code <= b"599":
        raise HeadRefused("upstream-protocol", "not an HTTP status")
    if reason.translate(None, _REASON):
        raise HeadRefused("upstream-protocol", "the reason phrase holds a control character")
    return int(code), reason.decode("latin-1"), version[5:].decode()


def _lines(raw: bytes, max_headers: int, bad: str) -> list[bytes]:
    if raw[-4:] != b"\r\n\r\n":
        raise HeadRefused(bad, "the head does not end with an empty line")
    pairs = raw.count(b"\r\n")
    if raw.translate(None, _HEAD) or raw.count(b"\r") != pairs or raw.count(b"\n") != pairs:
        raise HeadRefused(bad, "the head holds a control character or a bare line end")
    lines = raw[:-4].split(b"\r\n")
    if len(lines) - 1 > max_headers:
        raise HeadRefused("head-too-large" if bad == "bad-head" else bad, "too many header fields")
    return lines


def _fields(lines: list[bytes], bad: str) -> tuple[Headers, tuple[tuple[str, str], ...]]:
    headers: list[tuple[bytes, bytes]] = []
    lower: list[tuple[str, str]] = []
    for index in range(1, len(lines)):
        name, colon, value = lines[index].partition(b":")
        known = _COMMON.get(name)
        if known is None:
            # Also catches an empty line, obs-fold (leading space) and a space before the colon.
            if not colon or not name or name.translate(None, _TOKEN):
                raise HeadRefused(bad, "not a header field")
            known = name.lower().decode()
        elif not colon:
            raise HeadRefused(bad, "not a header field")
        value = value.strip(b" \t")
        headers.append((name, value))
        lower.append((known, value.decode("latin-1")))
    return tuple(headers), tuple(lower)


def parse_trailers(block: bytes, *, max_count: int, bad: str = "bad-framing") -> Headers:
    """The trailer fields in `block` (field lines, each with CRLF; no empty line). Raises HeadRefused(`bad`)."""
    if not block:
        return ()
    pairs = block.count(b"\r\n")
    if (
        block[-2:] != b"\r\n"
        or pairs > max_count
        or block.translate(None, _HEAD)
        or block.count(b"\r") != pairs
        or block.count(b"\n") != pairs
    ):
        raise HeadRefused(bad, "the trailers are malformed or too many")
    headers, lower = _fields([b"", *block[:-2].split(b"\r\n")], bad)
    if any(name in FORBIDDEN_TRAILERS for name, _ in lower):
        raise HeadRefused(bad, "a trailer field that may only stand in a head")
    return headers


def _check_host(head: RequestHead) -> None:
    count = sum(1 for name, _ in head.lower if name == "host")
    if count == 1:
        return
    # An HTTP/1.0 CONNECT names its authority in the target alone (http.client before Python 3.12 sends no Host).
    if count == 0 and head.method == "CONNECT" and head.version == "1.0":
        return
    raise HeadRefused("bad-host-header", "exactly one Host header is required")


# --- framing ---


def request_framing(head: RequestHead) -> Framing:
    """How the body of this request ends (RFC 9112 6.3). Raises HeadRefused(bad-framing)."""
    length, chunked = _framing_fields(head.lower, head.version, "bad-framing", exact=True)
    if head.method == "CONNECT" and (chunked or length is not None):
        raise HeadRefused("bad-framing", "a CONNECT request has no body")
    if chunked:
        return CHUNKED
    return NO_BODY if not length else Length(length)


def response_framing(head: ResponseHead, request_method: str) -> Framing:
    """How the body of this answer ends, given the method it answers. Raises HeadRefused(upstream-protocol)."""
    length, chunked = _framing_fields(head.lower, head.version, "upstream-protocol", exact=False)
    status = head.status
    if status < 200 or status == 204:
        # RFC 9110 8.6, 9112 6.1: neither field may stand here; a zero length is common and harmless.
        if chunked or length:
            raise HeadRefused("upstream-protocol", "an answer that cannot have a body announces one")
        return NO_BODY
    if request_method == "HEAD" or status == 304:
        return NO_BODY
    if chunked:
        return CHUNKED
    if length is None:
        return UNTIL_CLOSE
    return Length(length) if length else NO_BODY


def _framing_fields(
    lower: tuple[tuple[str, str], ...], version: str, bad: str, *, exact: bool
) -> tuple[int | None, bool]:
    length: int | None = None
    chunked = False
    for name, value in lower:
        if name == "content-length":
            # ASCII digits only: no sign, list, hex, underscore, other digits (B068); no leading zero (E5).
            if (
                length is not None
                or not value
                or len(value) > 18
                or not value.isascii()
                or not value.isdigit()
                or (value[0] == "0" and value != "0")
            ):
                raise HeadRefused(bad, "not one plain Content-Length")
            length = int(value)
        elif name == "transfer-encoding":
            if chunked or (value if exact else value.lower()) != "chunked" or version != "1.1":
                raise HeadRefused(bad, "the only transfer coding is one `chunked`, on HTTP/1.1")
            chunked = True
    if chunked and length is not None:
        raise HeadRefused(bad, "both Content-Length and Transfer-Encoding")
    return length, chunked


def connection_tokens(lower: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The options that the Connection fields name, lower case."""
    found: set[str] = set()
    for name, value in lower:
        if name == "connection":
            found.update(token.strip(" \t").lower() for token in value.split(","))
    found.discard("")
    return frozenset(found)


def keeps_alive(head: RequestHead | ResponseHead) -> bool:
    """Whether the sender means to use the connection again. HTTP/1.0 never does here."""
    if head.version != "1.1":
        return False
    return all(name != "connection" or "close" not in connection_tokens(((name, value),)) for name, value in head.lower)


def requested_upgrade(head: RequestHead) -> str | None:
    """The one protocol that the request asks to change to (lower case), or None.

    Whole tokens only (`notupgrade` is no `upgrade`). Raises HeadRefused(upgrade-refused) for an Upgrade that is a
    list, repeated, without its Connection option, on HTTP/1.0, or with a body (llhttp takes that body for raw bytes).
    """
    values = head.get("upgrade")
    nominated = "upgrade" in connection_tokens(head.lower)
    if not values and not nominated:
        return None
    if (
        len(values) != 1
        or not nominated
        or head.version != "1.1"
        or not values[0]
        or values[0].encode("latin-1").translate(None, _TOKEN + b"/")
        or request_framing(head) != NO_BODY
    ):
        raise HeadRefused("upgrade-refused", "not one plain upgrade request")
    return values[0].lower()


# --- hop by hop ---


def strip_hop_by_hop(headers: Headers) -> Headers:
    """`headers` without hop-by-hop fields and those that Connection nominates (RFC 9110 7.6.1).

    Framing fields stay out too as far as they are hop-by-hop (Transfer-Encoding); Content-Length stays.
    """
    nominated: frozenset[str] | None = None
    plain = True
    for name, value in headers:
        known = _COMMON.get(name) or name.lower().decode("latin-1")
        if known in HOP_BY_HOP:
            plain = False
            if known == "connection":
                tokens = connection_tokens(((known, value.decode("latin-1")),))
                nominated = tokens if nominated is None else nominated | tokens
    if plain:
        return headers
    gone = HOP_BY_HOP if nominated is None else HOP_BY_HOP | (nominated - _NOT_NOMINABLE)
    return tuple(
        (name, value) for name, value in headers if (_COMMON.get(name) or name.lower().decode("latin-1")) not in gone
    )


_NOT_NOMINABLE = frozenset({"host", "content-length", "content-type", "content-encoding", "authorization"})
"""Fields that `Connection:` cannot remove: without them the message would be another one (RFC 9110 7.6.1)."""


def strip_never_forwarded(headers: Headers) -> Headers:
    """`headers` without hop-by-hop fields and those of RULINGS 4.1: what may go on from a client."""
    kept = []
    for name, value in strip_hop_by_hop(headers):
        known = _COMMON.get(name) or name.lower().decode("latin-1")
        if known not in NEVER_FORWARDED and not known.startswith(NEVER_FORWARDED_PREFIXES):
            kept.append((name, value))
    return tuple(kept)


NEVER_RETURNED = frozenset({"alt-svc", "refresh", "public-key-pins"})
"""Answer fields aimed at the sandbox's route or at us (B201); also everything `proxy-*` and `exeat-*`."""


def strip_answer(headers: Headers, *, interim: bool = False) -> Headers:
    """Answer `headers` without hop-by-hop fields and those aimed at a proxy or forged in our name (B201).

    In interim answers framing fields mean nothing and stay out as well.
    """
    kept = []
    for name, value in strip_hop_by_hop(headers):
        known = _COMMON.get(name) or name.lower().decode("latin-1")
        if known in NEVER_RETURNED or known.startswith(("proxy-", "exeat-")) or (interim and known == "content-length"):
            continue
        kept.append((name, value))
    return tuple(kept)


def announced_trailers(headers: Headers) -> Headers:
    """The Trailer fields of an answer, for where its trailers pass too (RFC 9110 6.6.2)."""
    found = tuple((name, value) for name, value in headers if name.lower() == b"trailer")
    if not found:
        return ()
    pairs = tuple((name.lower().decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    return () if "trailer" in connection_tokens(pairs) else found


# --- values to bytes ---

_WRITTEN_HERE = frozenset({"content-length", "transfer-encoding", "connection", "proxy-connection", "keep-alive"})


def serialise_request(
    method: str, target: str, headers: Headers, framing: Framing, *, upgrade: str | None = None, close: bool = False
) -> bytes:
    """The bytes of a request head. Framing and connection fields in `headers` are replaced by ours.

    Raises ValueError for values that could not have been parsed (a head never writes what it would not read).
    """
    out = [f"{method} {target} HTTP/1.1\r\n".encode("ascii")]
    if out[0].count(b" ") != 2 or out[0].count(b"\r") != 1 or out[0].count(b"\n") != 1:
        raise ValueError("not a request line")
    _write_fields(out, headers)
    match framing:
        case Length(size):
            out.append(b"Content-Length: %d\r\n" % size)
        case Chunked():
            out.append(b"Transfer-Encoding: chunked\r\n")
        case NoBody():
            # RFC 9110 8.6: methods that usually carry content say that there is none.
            if method in ("POST", "PUT", "PATCH"):
                out.append(b"Content-Length: 0\r\n")
        case UntilClose():
            raise ValueError("a request cannot end with its connection")
    if upgrade is not None:
        out.append(b"Connection: Upgrade\r\nUpgrade: %b\r\n" % upgrade.encode("ascii"))
    elif close:
        out.append(b"Connection: close\r\n")
    out.append(b"\r\n")
    return b"".join(out)


def serialise_response(
    head: ResponseHead, framing: Framing, *, close: bool = False, keep_length: bool = False, upgrade: str | None = None
) -> bytes:
    """The bytes of an answer head, always HTTP/1.1. Framing and connection fields in it are replaced by ours.

    `keep_length` keeps its Content-Length although no body follows (answers to HEAD, 304). Raises ValueError.
    """
    status = head.status
    reason = head.reason or _PHRASES.get(status, "")
    out = [b"HTTP/1.1 %d %b\r\n" % (status, reason.encode("latin-1"))]
    if out[0].count(b"\r") != 1 or out[0].count(b"\n") != 1:
        raise ValueError("not a reason phrase")
    _write_fields(out, head.headers)
    match framing:
        case Length(size):
            out.append(b"Content-Length: %d\r\n" % size)
        case Chunked():
            out.append(b"Transfer-Encoding: chunked\r\n")
        case NoBody():
            if keep_length:
                out.extend(b"Content-Length: %b\r\n" % value.encode() for value in head.get("content-length")[:1])
            elif status >= 200 and status not in (204, 304):
                out.append(b"Content-Length: 0\r\n")
        case UntilClose():
            close = True
    if upgrade is not None:
        out.append(b"Connection: Upgrade\r\nUpgrade: %b\r\n" % upgrade.encode("ascii"))
    elif close:
        out.append(b"Connection: close\r\n")
    out.append(b"\r\n")
    return b"".join(out)


_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def _write_fields(out: list[bytes], headers: Headers) -> None:
    for name, value in headers:
        known = _COMMON.get(name)
        if known is None:
            if not name or name.translate(None, _TOKEN):
                raise ValueError("not a header name")
            known = name.lower().decode()
        if known in _WRITTEN_HERE or known == "upgrade":
            continue
        if value.translate(None, _REASON):
            raise ValueError("not a header value")
        out.append(b"%b: %b\r\n" % (name, value))


def serialise_trailers(trailers: Headers) -> bytes:
    """Trailer field lines, each with CRLF. Raises ValueError as the heads do."""
    if not trailers:
        return b""
    out: list[bytes] = []
    _write_fields(out, trailers)
    return b"".join(out)
