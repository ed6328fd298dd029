"""Headers of a credentialed call: what may go up, what may come back. Allowlists both ways (RULINGS 4.3, 7.2).

Up: the permit's list (rules.decide), without hop-by-hop, forwarding and client-authority fields; Accept-Encoding is
ours (`identity`: the answer is read), Expect is answered by the lane, Range only on a declared download.
Down: the base list below and what the permit names; never what carries authority or aims at the client's connection.
Values are scrubbed; the reason phrase is the standard one, so that nothing of the upstream's start line passes.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import urlsplit

from broker.scrub import Patterns, scrub_whole
from rules.authority_names import AUTH_HEADERS
from rules.decide import BASE_REQUEST_HEADERS
from rules.decision import Restrictions
from wire.heads import HOP_BY_HOP, NEVER_FORWARDED, NEVER_FORWARDED_PREFIXES, ResponseHead, connection_tokens

Pairs = tuple[tuple[str, str], ...]
"""(lower-case name, value) in order."""

BASE_RESPONSE_HEADERS = frozenset(
    {
        "accept-ranges",
        "age",
        "cache-control",
        "content-disposition",
        "content-language",
        "content-length",
        "content-location",
        "content-range",
        "content-type",
        "date",
        "deprecation",
        "etag",
        "expires",
        "last-modified",
        "location",
        "pragma",
        "ratelimit-limit",
        "ratelimit-remaining",
        "ratelimit-reset",
        "request-id",
        "retry-after",
        "sunset",
        "vary",
        "warning",
        "x-content-type-options",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "x-request-id",
    }
)
"""What passes on every answer that is shaped; the permit may name more."""

NEVER_RETURNED = HOP_BY_HOP | frozenset(
    {
        "alt-svc",
        "authentication-info",
        "clear-site-data",
        "link",
        "nel",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-status",
        "refresh",
        "report-to",
        "set-cookie",
        "set-cookie2",
        "sourcemap",
        "strict-transport-security",
        "www-authenticate",
    }
)
"""Authority, challenges and orders to the client: removed whatever a list says."""

WEBSOCKET_RESPONSE_HEADERS = frozenset({"sec-websocket-accept", "sec-websocket-protocol"})
"""All that passes of a 101: the key's answer and the chosen subprotocol."""

_OURS_UP = frozenset({"accept-encoding", "expect", "content-length", "transfer-encoding"})
_RANGES = frozenset({"range", "if-range"})
_BODY_SHAPE = frozenset(
    {"content-encoding", "content-length", "content-md5", "digest", "content-digest", "repr-digest"}
)
_SERVED_TWICE = frozenset({"content-type", "content-length", "location", "etag", "content-range"})


def request_headers(headers: Pairs, restrictions: Restrictions, *, credentialed: bool) -> tuple[Pairs, tuple[str, ...]]:
    """Return the fields that go upstream before the injection, and the names of those that were dropped.

    Without a credential (a call that is only counted) every header that the gate let through goes on.
    """
    allowed = restrictions.request_headers
    if allowed is None and credentialed:
        allowed = BASE_REQUEST_HEADERS
    nominated = connection_tokens(headers)
    kept: list[tuple[str, str]] = []
    dropped: list[str] = []
    for name, value in headers:
        if name in _OURS_UP or name in HOP_BY_HOP or name == "proxy-authorization":
            continue
        out = (
            name in nominated
            or name in NEVER_FORWARDED
            or name.startswith(NEVER_FORWARDED_PREFIXES)
            or name == "sec-websocket-extensions"  # messages are read, so none is compressed (7.5)
            or (allowed is not None and name not in allowed and not (credentialed and name in AUTH_HEADERS))
            or (credentialed and name in _RANGES and not restrictions.download)
        )
        # A client's auth field stays until the kind removes it: the kind reads the user name of Basic from it.
        (dropped.append(name) if out else kept.append((name, value)))
    if credentialed:
        kept.append(("accept-encoding", "identity"))
    else:
        kept += [(name, value) for name, value in headers if name == "accept-encoding"]
    return tuple(kept), tuple(sorted(set(dropped)))


def spelled(headers: Pairs, received: Pairs, ours: frozenset[str]) -> tuple[tuple[bytes, bytes], ...]:
    """`headers` as they are written to the origin, because some servers compare letters.

    Names are as the client spelled them (`received`); those that we set (`ours`) are by convention, `X-Api-Key`.
    """
    as_sent = {name.lower(): name for name, _ in reversed(received)}
    return tuple(
        ((name.title() if name in ours else as_sent.get(name, name.title())).encode("latin-1"), value.encode("latin-1"))
        for name, value in headers
    )


def response_head(
    head: ResponseHead,
    restrictions: Restrictions,
    patterns: Patterns,
    *,
    body_changes: bool,
    here: str = "",
    granted: frozenset[str] = frozenset(),
) -> tuple[ResponseHead, int]:
    """Return the head that the sandbox sees and how many secrets were masked in it.

    `here` is the authority that answers. An operation whose `answer_headers` name `location` goes on where a 201 or 202
    of that very place says, query included: the next piece of an upload, judged like every request.
    `granted` are addresses that the sandbox may fetch from now on: a redirect there goes on as it is.
    `body_changes`: the body is decoded or pruned, so fields that describe its old bytes go.
    """
    allowed = BASE_RESPONSE_HEADERS | restrictions.response_headers
    if head.status == 101:
        allowed = WEBSOCKET_RESPONSE_HEADERS
    nominated = connection_tokens(head.lower)
    _, hits = scrub_whole(head.reason.encode("latin-1"), patterns)
    kept: list[tuple[bytes, bytes]] = []
    once: set[str] = set()
    for (name, value), (lower, text) in zip(head.headers, head.lower, strict=True):
        if lower == "www-authenticate" and restrictions.challenge and text.lower().startswith("bearer "):
            kept.append((name, value))
            continue
        if lower in NEVER_RETURNED or lower in nominated or lower not in allowed or lower == "content-encoding":
            continue
        if body_changes and lower in _BODY_SHAPE:
            continue
        if lower in _SERVED_TWICE:
            if lower in once:
                continue
            once.add(lower)
        if lower == "location" and text in granted:
            kept.append((name, value))
            continue
        if lower in ("location", "content-location") and not is_bare_location(text):
            goes_on = lower == "location" and head.status in (201, 202) and lower in restrictions.response_headers
            if not goes_on or not is_own_location(text, here):
                continue
        kept.append((name, value))
    # All values at once: no pattern and no escape has a NUL in it, so what is clean together is clean in each.
    if scrub_whole(b"\0".join(value for _, value in kept), patterns)[1]:
        shown = [(name, *scrub_whole(value, patterns)) for name, value in kept]
        kept = [(name, clean) for name, clean, _ in shown]
        hits += sum(found for _, _, found in shown)
    return ResponseHead(status=head.status, reason=_phrase(head.status), version="1.1", headers=tuple(kept)), hits


def is_bare_location(value: str) -> bool:
    """True for a redirect target without query, fragment and userinfo: what can carry a token is not shown (B110)."""
    try:
        parts = urlsplit(value)
        return not (parts.query or parts.fragment or "@" in parts.netloc or "?" in value or "#" in value)
    except ValueError:
        return False


def is_own_location(value: str, authority: str) -> bool:
    """True for a place at `authority` itself, by path alone or as a whole https URL, without fragment and userinfo."""
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    relative = not parts.scheme and not parts.netloc and value.startswith("/")
    same = parts.scheme == "https" and bool(authority) and parts.netloc.lower() == authority
    return (relative or same) and not parts.fragment and "#" not in value and "\\" not in value


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
