"""No byte reaches an upstream before a permit whose intent is on record, whatever is said and however cut (I21)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.frontdoor import Request, Seen, play
from tests.support.hello import client_hello, records

"""Thousands of connections: ten seconds where nothing else runs."""

PLAIN = (
    b"GET http://plain.test/v1/a HTTP/1.1\r\nHost: plain.test\r\n\r\n"
    b"POST http://plain.test/v1/b HTTP/1.1\r\nHost: plain.test\r\nContent-Length: 5\r\n\r\nhello"
    b"GET http://plain.test/admin HTTP/1.1\r\nHost: plain.test\r\n\r\n"
    b"POST http://plain.test/v1/c HTTP/1.1\r\nHost: plain.test\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\n\r\n"
)
INSIDE = (
    b"CONNECT plain.test:80 HTTP/1.1\r\nHost: plain.test:80\r\n\r\n"
    b"GET /v1/d HTTP/1.1\r\nHost: plain.test\r\n\r\n"
    b"POST /v1/e HTTP/1.1\r\nHost: plain.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /v1/smuggled HTTP/1.1\r\nHost: plain.test\r\n\r\n"
)
TUNNEL = b"CONNECT raw.test:443 HTTP/1.1\r\nHost: raw.test:443\r\n\r\n" + records(client_hello("raw.test"), 3)
WRONG_NAME = b"CONNECT raw.test:443 HTTP/1.1\r\nHost: raw.test:443\r\n\r\n" + records(client_hello("api.test"), 3)


REQUESTS = [("GET", "/v1/a", b""), ("POST", "/v1/b", b"hello"), ("POST", "/v1/c", b"abc"), ("GET", "/v1/d", b"")]
PIECES = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"0\r\n\r\n", b"Content-Length: 5\r\n",
    b"Expect: 100-continue\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: api.test\r\n", b"/v1/../admin",
    b"/admin", b"HTTP/1.0", b"TRACE ", b"CONNECT ", b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    b"http://api.test", b"@", b"\x16\x03\x01", b"PRI * HTTP/2.0",
]  # fmt: skip


# --- nothing leaves ---


@pytest.mark.parametrize("transcript", [PLAIN, INSIDE, TUNNEL], ids=["absolute form", "CONNECT", "tunnel"])
async def test_without_a_writable_log_nothing_leaves_in_any_split(transcript: bytes) -> None:
    """No intent, no dial, wherever the reads end."""
    for cut in range(0, len(transcript), 7):
        seen = await play([transcript[:cut], transcript[cut:]], unwritable=True)
        assert seen.dials == 0
        assert seen.requests == []


async def test_a_tunnel_is_not_dialled_before_its_whole_hello_was_seen() -> None:
    """Every beginning of the bytes that open a tunnel leads nowhere, and another name in them in any split."""
    for end in range(len(TUNNEL)):
        seen = await play([TUNNEL[:end]])
        assert (seen.dials, seen.tunnels) == (0, 0), end
    for cut in range(0, len(WRONG_NAME), 3):
        seen = await play([WRONG_NAME[:cut], WRONG_NAME[cut:]])
        assert (seen.dials, seen.tunnels) == (0, 0), cut


async def test_a_request_that_is_not_whole_leads_nowhere() -> None:
    """Every beginning of a head leads nowhere; a body that is cut short is never completed by us."""
    for end in range(len(PLAIN)):
        seen = await play([PLAIN[:end]])
        seen.check()
        assert seen.whole == REQUESTS[: len(seen.whole)], end
        assert len(seen.requests) - len(seen.whole) <= 1, end


def test_the_check_can_fail() -> None:
    """A witness that sees a byte without an intent, another request than the one on record, or noise says so."""
    good = Seen(requests=[Request("GET", "/v1/a", 1)], intents=[("GET", "/v1/a")])
    good.check()
    for bad in (
        Seen(requests=[Request("GET", "/v1/a", 0)], intents=[("GET", "/v1/a")]),
        Seen(requests=[Request("GET", "/v1/b", 1)], intents=[("GET", "/v1/a")]),
        Seen(requests=[Request("GET", "/admin", 1)], intents=[("GET", "/admin")]),
        Seen(strange=b"x"),
        Seen(dials_too_early=1),
    ):
        with pytest.raises(AssertionError):
            bad.check()


# --- what leaves is what was permitted, in any cut ---


@pytest.mark.parametrize("transcript", [PLAIN, INSIDE], ids=["absolute form", "CONNECT"])
async def test_every_split_gives_the_same_requests_records_and_answers(transcript: bytes) -> None:
    """Two reads with the border anywhere, and one byte a read."""
    whole = await play([transcript])
    whole.check()
    assert whole.whole == (REQUESTS[:3] if transcript is PLAIN else REQUESTS[3:])
    splits = [[transcript[:cut], transcript[cut:]] for cut in range(1, len(transcript))]
    for pieces in [*splits, [transcript[at : at + 1] for at in range(len(transcript))]]:
        seen = await play(pieces)
        seen.check()
        assert seen.whole == whole.whole
        assert seen.intents == whole.intents
        assert seen.told == whole.told, pieces[0]


async def test_a_tunnel_is_the_same_in_every_split() -> None:
    """One intent and one dial, wherever the reads end."""
    for cut in range(1, len(TUNNEL)):
        seen = await play([TUNNEL[:cut], TUNNEL[cut:]])
        seen.check()
        assert (seen.dials, seen.tunnels) == (1, 1), cut


async def test_captured_connections_are_the_same_in_every_split() -> None:
    """There is no CONNECT: clear requests to a captured port, and a hello to a tunnel's, judged alike in any reads."""
    inside = INSIDE.partition(b"\r\n\r\n")[2]
    hello = TUNNEL.partition(b"\r\n\r\n")[2]
    for transcript, place in ((inside, ("plain.test", 80)), (hello, ("raw.test", 443))):
        whole = await play([transcript], captured=place)
        assert whole.whole == (REQUESTS[3:] if transcript is inside else [])
        assert whole.tunnels == (transcript is hello)
        for cut in range(1, len(transcript)):
            seen = await play([transcript[:cut], transcript[cut:]], captured=place)
            seen.check()
            assert (seen.whole, seen.intents, seen.tunnels) == (whole.whole, whole.intents, whole.tunnels), cut
            assert seen.dials == 1
            ended = await play([transcript[:cut]], captured=place)
            ended.check()
            assert transcript is inside or ended.dials == 0, cut


@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.data())
async def test_damaged_traffic_never_gets_further_than_its_permits(data: st.DataObject) -> None:
    """Bytes lost, replaced and put in anywhere, in any reads: what leaves was permitted and on record."""
    transcript = data.draw(st.sampled_from([PLAIN, INSIDE, PLAIN + INSIDE, TUNNEL]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(transcript)))
        lost = data.draw(st.sampled_from([0, 0, 1, 2, 20]))
        new = data.draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=3)))
        transcript = transcript[:at] + new + transcript[at + lost :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(transcript)), max_size=6)))
    pieces = [transcript[start:end] for start, end in zip([0, *cuts], [*cuts, len(transcript)], strict=True)]
    whole = await play([transcript])
    seen = await play(pieces)
    for one in (whole, seen):
        one.check()
    assert seen.agrees_with(whole)
