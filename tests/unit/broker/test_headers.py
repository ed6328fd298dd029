"""Headers of credentialed calls: allowlists both ways."""

from __future__ import annotations

import pytest

from broker.headers import NEVER_RETURNED, is_bare_location, request_headers, response_head, spelled
from broker.scrub import Guarded, Patterns
from rules.decision import Restrictions
from tests.support.rows import every_row
from wire.heads import ResponseHead

SECRET = b"tok-4mVZx81LrQwS0pEyUb7N"
PATTERNS = Patterns([Guarded(value=SECRET)])


def down(*headers: tuple[bytes, bytes], status: int = 200, **restrictions: object) -> dict[str, str]:
    """The headers that a sandbox sees."""
    head, _ = response_head(
        ResponseHead(status, "OK", "1.1", headers),
        Restrictions(**restrictions),  # type: ignore[arg-type]
        PATTERNS,
        body_changes=False,
    )
    return {name.decode().lower(): value.decode() for name, value in head.headers}


@every_row("name", sorted(NEVER_RETURNED | {"x-proxy-decision", "server", "content-encoding", "x-any"}))
def test_authority_and_orders_are_not_returned(name: str) -> None:
    """Cookies, challenges, routing orders, hop-by-hop and unknown fields stop here (B110, B201)."""
    assert down((name.encode(), b"value")) == {}


@pytest.mark.parametrize("name", ["set-cookie", "www-authenticate", "link", "alt-svc"])
def test_a_list_cannot_let_authority_through(name: str) -> None:
    """Naming such a field in a list changes nothing."""
    assert down((name.encode(), b"value"), response_headers=frozenset({name})) == {}


def test_a_name_of_the_permit_comes_back_beside_the_base_list() -> None:
    """What the catalogue names of an operation's answer passes, and the base list still does."""
    fields = ((b"MCP-Session-Id", b"1"), (b"ETag", b"2"), (b"X-Any", b"3"))
    assert down(*fields, response_headers=frozenset({"mcp-session-id"})) == {"mcp-session-id": "1", "etag": "2"}
    assert down(*fields) == {"etag": "2"}


def test_nominated_fields_are_not_returned() -> None:
    """What Connection names is hop-by-hop."""
    assert down((b"Connection", b"ETag"), (b"ETag", b"1")) == {}


@pytest.mark.parametrize(
    "value", ["https://x.test/a?token=1", "/a?x", "https://u:p@x.test/", "/a#frag", "/a?", "/a#", "https://[x"]
)
def test_a_location_that_can_carry_a_token_is_not_returned(value: str) -> None:
    """Query, fragment and userinfo can be authority."""
    assert not is_bare_location(value)
    assert down((b"Location", value.encode()), (b"Content-Location", value.encode())) == {}
    assert down((b"Location", value.encode()), status=302) == {}


@pytest.mark.parametrize(
    ("status", "value"),
    [
        (302, "/v2/a/blobs/uploads/1?_state=x"),
        (200, "/v2/a/blobs/uploads/1?_state=x"),
        (202, "https://other.test/v2/a?_state=x"),
        (202, "https://x.test.other.test/v2/a?_state=x"),
        (202, "https://x.test:8443/v2/a?_state=x"),
        (202, "https://u:p@x.test/v2/a?_state=x"),
        (202, "http://x.test/v2/a?_state=x"),
        (202, "//other.test/v2/a?_state=x"),
        (202, "/\\other.test/v2/a?_state=x"),
        (202, "v2/a?_state=x"),
        (202, "/v2/a?_state=x#y"),
    ],
)
def test_only_an_upload_at_this_very_place_goes_on_with_its_query(status: int, value: str) -> None:
    """A redirect, another host, and whatever could be read as one stay out, also where the operation names location."""
    head = ResponseHead(status, "OK", "1.1", ((b"Location", value.encode()),))
    restrictions = Restrictions(response_headers=frozenset({"location"}))
    assert response_head(head, restrictions, PATTERNS, body_changes=False, here="x.test")[0].headers == ()


@pytest.mark.parametrize("value", ["/v2/a/blobs/uploads/1?_state=x", "https://x.test/v2/a/blobs/uploads/1?_state=x"])
def test_an_upload_goes_on_where_its_operation_says_so(value: str) -> None:
    """The next piece's URL comes back to a client of an operation that names location, and of no other."""
    head = ResponseHead(202, "Accepted", "1.1", ((b"Location", value.encode()),))
    named = Restrictions(response_headers=frozenset({"location"}))
    assert response_head(head, named, PATTERNS, body_changes=False, here="x.test")[0].headers == head.headers
    assert response_head(head, Restrictions(), PATTERNS, body_changes=False, here="x.test")[0].headers == ()


def test_a_bare_location_is_data() -> None:
    """A redirect comes back as an answer."""
    assert down((b"Location", b"https://other.test/path"), status=302) == {"location": "https://other.test/path"}


def test_secrets_are_masked_in_values_and_the_phrase_is_ours() -> None:
    """Values keep their length; nothing of the start line passes but the status."""
    head, hits = response_head(
        ResponseHead(200, "OK " + SECRET.decode(), "1.1", ((b"ETag", b'"' + SECRET + b'"'),)),
        Restrictions(),
        PATTERNS,
        body_changes=False,
    )
    assert head.reason == "OK"
    assert head.headers == ((b"ETag", b'"' + b"*" * len(SECRET) + b'"'),)
    assert hits == 2


def test_a_body_that_changes_loses_its_digests() -> None:
    """Fields that describe other bytes go."""
    headers = ((b"Content-Length", b"9"), (b"Digest", b"sha-256=x"), (b"Content-Type", b"text/plain"))
    head, _ = response_head(ResponseHead(200, "OK", "1.1", headers), Restrictions(), PATTERNS, body_changes=True)
    assert head.headers == ((b"Content-Type", b"text/plain"),)


UP = (
    ("host", "x.test"),
    ("accept", "*/*"),
    ("accept-encoding", "gzip"),
    ("range", "bytes=0-1"),
    ("if-range", "x"),
    ("expect", "100-continue"),
    ("content-length", "3"),
    ("connection", "close, x-nominated"),
    ("x-nominated", "1"),
    ("x-forwarded-for", "10.0.0.1"),
    ("x-original-url", "/admin"),
    ("proxy-authorization", "Basic x"),
    ("x-data", "1"),
)


def test_a_credentialed_request_carries_the_list_only() -> None:
    """Everything else is dropped and named (RULINGS 4.3)."""
    kept, dropped = request_headers(UP, Restrictions(), credentialed=True)
    assert kept == (("host", "x.test"), ("accept", "*/*"), ("accept-encoding", "identity"))
    assert dropped == ("if-range", "range", "x-data", "x-forwarded-for", "x-nominated", "x-original-url")


def test_a_declared_download_may_ask_for_ranges() -> None:
    """Range stays where the operation says so."""
    kept, _ = request_headers(UP, Restrictions(download=True), credentialed=True)
    assert ("range", "bytes=0-1") in kept


def test_a_counted_call_keeps_its_own_headers() -> None:
    """Without a credential only what never goes on is removed."""
    kept, dropped = request_headers(UP, Restrictions(), credentialed=False)
    assert ("x-data", "1") in kept
    assert ("accept-encoding", "gzip") in kept
    assert dropped == ("x-forwarded-for", "x-nominated", "x-original-url")


def test_names_go_up_as_the_client_spelled_them_and_ours_by_convention() -> None:
    """C074: some servers compare letters; the credential's header never has the client's spelling."""
    headers = (("host", "a.test"), ("x-custom", "1"), ("accept-encoding", "identity"), ("x-api-key", "real"))
    received = (("HOST", "a.test"), ("X-CuStOm", "1"), ("x-custom", "2"), ("x-api-KEY", "placeholder"))
    written = spelled(headers, received, frozenset({"host", "x-api-key"}))
    assert [name for name, _ in written] == [b"Host", b"X-CuStOm", b"Accept-Encoding", b"X-Api-Key"]
    assert [value for _, value in written] == [value.encode() for _, value in headers]
