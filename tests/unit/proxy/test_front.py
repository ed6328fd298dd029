"""The front door and the lanes behind it, on in-memory streams."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import subprocess
from dataclasses import replace
from ipaddress import ip_network

import pytest

from net.stream import StreamBroken
from proxy.help import env_script
from proxy.limits import LimitTable
from proxy.ports import Channel
from rules.names import Host, SandboxId
from rules.placeholders import make
from rules.policy import DestinationDef
from tests.support.fakes import OTHER_TOKEN, SHARED, TOKEN, registered, sandbox
from tests.support.origins import Origin, head
from tests.support.rooms import (
    Client,
    House,
    NoDialer,
    basic,
    destination,
    get,
    json_body,
    op,
    policy,
    rule,
    tunnel_rule,
)
from tests.support.scripts import ABORT, READ, script, websocket_echo
from tests.support.signals import Gate
from wire.control import Cut

RULES = policy(rule("dev/read", op("dev/read", "api.test", ["/v1/read/**"])))


def closed_house(**more: object) -> tuple[House, NoDialer]:
    """A house that must not dial."""
    dialer = NoDialer()
    return House(RULES, dialer=dialer, **more), dialer  # type: ignore[arg-type]


# --- floods ------------------------------------------------------------------------------------------------------


async def test_a_flood_before_identity_is_closed_and_each_one_is_counted() -> None:
    """Beyond the pace nobody is told why, and the log still hears of every one: it counts what it does not write."""
    house, dialer = closed_house(table=LimitTable(refusals_per_second=3))
    told = 0
    for _ in range(8):
        client = house.connect()
        client.send(get("http://api.test/v1/read/x", "api.test", token="xt_wrong"))
        told += b"403" in (await client.rest())[:16]
    assert told == 3
    assert [record["reason"] for record in house.records("connection.refused")] == ["bad-token"] * 8
    assert dialer.asked == []


async def test_a_frozen_sandbox_is_refused_everything_until_it_is_thawed() -> None:
    """Requests and tunnels alike, nothing is dialled; another sandbox goes on; a thaw ends it at once."""
    house, dialer = closed_house(table=LimitTable(refusals_per_second=1, flood_seconds=0, latest_seconds=0.0))
    mine = ("default", "sb_one")
    house.room.pace.within(mine)
    assert house.room.pace.frozen(mine)
    for first in (
        get("http://api.test/v1/read/x", "api.test"),
        get("api.test:443", "api.test:443", method="CONNECT"),
    ):
        client = house.connect()
        client.send(first)
        assert (await client.answer()).reason == "limit-reached"
    other = house.connect()
    other.send(get("http://api.test/nothing", "api.test", token=OTHER_TOKEN))
    assert (await other.answer()).reason == "clear-text-refused"
    assert house.room.cut(Cut(id=1, kind="thaw", tenant=mine[0], subject=mine[1])) == 0
    client = house.connect()
    client.send(get("http://api.test/nothing", "api.test"))
    assert (await client.answer()).reason == "clear-text-refused"
    assert dialer.asked == []


# --- refused before identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "first"),
    [
        ("SOCKS 5 is told that no method is acceptable", b"\x05\x01\x00"),
        ("SOCKS 4 is rejected", b"\x04\x01\x01\xbb\x7f\x00\x00\x01\x00"),
        ("TLS to the proxy port gets an alert", b"\x16\x03\x01\x00\x05hello"),
        ("a PROXY protocol preface is not believed", b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n"),
        ("HTTP/2 is not spoken here", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ],
)
async def test_other_protocols_on_the_proxy_port_are_closed(sentence: str, first: bytes) -> None:
    """What is not HTTP/1 is closed with one record and no dial."""
    house, dialer = closed_house()
    client = house.connect()
    client.send(first)
    assert b"HTTP/1.1 200" not in await client.rest(), sentence
    await client.serving
    (record,) = house.records("connection.refused")
    assert record["reason"] == "bad-protocol", sentence
    assert dialer.asked == []


@pytest.mark.parametrize(
    ("sentence", "request_head", "status", "reason"),
    [
        ("origin-form names no host to go to", get("/a", "127.0.0.1:19002"), 400, "bad-target"),
        ("another proxy's host in the URL", get("http://evil.test/", "api.test"), 421, "authority-mismatch"),
        ("userinfo in the URL", get("http://u:p@api.test/", "api.test"), 400, "bad-target"),
        ("two Host headers", get("http://api.test/", "api.test", "Host: api.test"), 400, "bad-host-header"),
        ("TRACE is never forwarded", get("http://api.test/", "api.test", method="TRACE"), 403, "method-refused"),
        ("an https URL sent to the proxy in clear", get("https://api.test/v1/read/x", "api.test"), 400, "bad-target"),
        ("no rule for this host", get("http://evil.test/", "evil.test"), 403, "no-rule"),
        ("plain HTTP where only https is permitted", get("http://api.test/v1/read/x", "api.test"), 403, "no-rule"),
        ("dot segments", get("http://api.test/v1/read/../x", "api.test"), 400, "bad-path"),
        ("HTTP/0.9", "GET /\r\n\r\n", 400, "bad-head"),
        ("no such version", "GET http://api.test/ HTTP/1.32\r\nHost: api.test\r\n\r\n", 400, "bad-version"),
        ("CL and TE", get("http://api.test/", "api.test", "Content-Length: 5", "Transfer-Encoding: chunked",
                          method="POST"), 400, "bad-framing"),
        ("CONNECT without a port", get("api.test", "api.test", method="CONNECT"), 400, "bad-target"),
        ("CONNECT whose Host is another", get("api.test:443", "evil.test:443", method="CONNECT"), 421,
         "authority-mismatch"),
        ("CONNECT to a port without rule", get("api.test:22", "api.test:22", method="CONNECT"), 403, "no-rule"),
        ("CONNECT to our own name elsewhere", get("exeat.internal:22", "exeat.internal:22", method="CONNECT"), 403,
         "own-name-refused"),
        ("CONNECT to a literal", get("127.0.0.1:8200", "127.0.0.1:8200", method="CONNECT"), 403,
         "address-literal-refused"),
    ],
)  # fmt: skip
async def test_what_is_refused_is_told_recorded_once_and_never_dialled(
    sentence: str, request_head: str, status: int, reason: str
) -> None:
    """Each refusal has its status and reason, exactly one record, and nothing left the gateway."""
    house, dialer = closed_house()
    client = house.connect()
    client.send(request_head)
    answer = await client.answer()
    assert (answer.status, answer.reason) == (status, reason) or reason == "no-rule", (sentence, answer)
    assert f'details="{answer.reason}"' in answer.headers["proxy-status"]
    refusals = house.records("request.refused") + house.records("connection.refused")
    # Of an answer to CONNECT clients show the phrase alone.
    more = f": {answer.reason}, {refusals[0]['request_id']}" if request_head.startswith("CONNECT") else ""
    assert answer.phrase == f"Refused by Exeat policy{more}"
    assert [record["reason"] for record in refusals] == [answer.reason], sentence
    assert house.journal.names() == [house.journal.names()[0]]
    assert dialer.asked == []
    assert house.faults == []


# --- identity ----------------------------------------------------------------------------------------------------


async def test_no_token_is_407_with_a_challenge_and_the_connection_can_try_again() -> None:
    """A client that waits for the challenge sends the token on the same connection."""
    house, _ = closed_house()
    client = house.connect()
    client.send(get("http://evil.test/", "evil.test", token=None))
    first = await client.answer()
    assert (first.status, first.reason) == (407, "auth-required")
    assert first.headers["proxy-authenticate"].startswith('Basic realm="exeat"')
    client.send(get("http://evil.test/", "evil.test"))
    assert (await client.answer()).status == 403


async def test_a_wrong_token_is_403_and_closed() -> None:
    """A wrong token never gets a challenge."""
    house, _ = closed_house()
    client = house.connect()
    client.send(get("http://evil.test/", "evil.test", token="nobody"))
    answer = await client.answer()
    assert (answer.status, answer.reason) == (403, "bad-token")
    assert await client.rest() == b""
    assert house.records("connection.refused")[0]["reason"] == "bad-token"


async def test_an_ended_sandbox_is_told_so() -> None:
    """A token that was valid once is sandbox-ended, not bad-token."""
    house, _ = closed_house()
    house.install(RULES, [registered(sandbox("sb_two"), OTHER_TOKEN)])
    client = house.connect()
    client.send(get("http://evil.test/", "evil.test"))
    assert (await client.answer()).reason == "sandbox-ended"


async def test_identity_is_fixed_at_the_first_head() -> None:
    """Another sandbox's token on the same connection is 407 and the end of it."""
    house, _ = closed_house()
    client = house.connect()
    client.send(get("http://evil.test/", "evil.test"))
    assert (await client.answer()).status == 403
    client.send(get("http://evil.test/", "evil.test", token=OTHER_TOKEN))
    assert (await client.answer()).status == 407
    assert await client.rest() == b""


async def test_an_own_listener_needs_no_token_but_refuses_a_foreign_one() -> None:
    """The channel identifies; a token that came along must be the same sandbox's."""
    key = b"channel-key"
    own = Channel(listener="sb_three", kind="sandbox", sandbox=SandboxId("sb_three"), key=key)
    house, _ = closed_house()
    entry = registered(sandbox("sb_three"), "own-token", own_listener=True, channel_key=key)
    house.install(RULES, [*house.boxes, entry])
    alone = house.connect(own)
    alone.send(get("http://evil.test/", "evil.test", token=None))
    assert (await alone.answer()).reason == "no-rule"
    foreign = house.connect(own)
    foreign.send(get("http://evil.test/", "evil.test", token=TOKEN))
    assert (await foreign.answer()).reason == "bad-token"
    elsewhere = house.connect(SHARED)
    elsewhere.send(get("http://evil.test/", "evil.test", token="own-token"))
    assert (await elsewhere.answer()).reason == "bad-token"
    old = house.connect(replace(own, key=b"of an earlier epoch"))
    old.send(get("http://evil.test/", "evil.test", token=None))
    assert (await old.answer()).reason == "sandbox-ended"


async def test_too_many_connections_of_one_sandbox_are_refused() -> None:
    """The bound counts connections that are open now."""
    house, _ = closed_house(table=LimitTable(sandbox_connections=1))
    first, second = house.connect(), house.connect()
    first.send(get("http://evil.test/", "evil.test"))
    assert (await first.answer()).status == 403
    second.send(get("http://evil.test/", "evil.test"))
    assert (await second.answer()).reason == "too-many-requests"
    first.stream.abort()
    await first.serving
    third = house.connect()
    third.send(get("http://evil.test/", "evil.test"))
    assert (await third.answer()).reason == "no-rule"


# --- kill switch -------------------------------------------------------------------------------------------------


async def test_without_a_snapshot_everything_is_refused() -> None:
    """A vault that was not heard for two seconds denies everything."""
    house, dialer = closed_house()
    house.clock.advance(3)
    client = house.connect()
    client.send(get("http://api.test/v1/read/x", "api.test"))
    answer = await client.answer()
    assert (answer.status, answer.reason) == (503, "policy-unavailable")
    assert dialer.asked == []


async def test_an_unwritable_log_refuses_the_tunnel_and_the_request() -> None:
    """Nothing leaves before it is written down."""
    house, dialer = closed_house()
    client = await house.tunnel("api.test:443", tls="api.test")
    house.journal.failing = True
    client.send("GET /v1/read/x HTTP/1.1\r\nHost: api.test\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.reason) == (503, "audit-unavailable")
    assert dialer.asked == []


async def test_a_resolver_that_hangs_is_refused_at_its_deadline() -> None:
    """dns-failed, nothing connected, the outcome says so."""
    async with Origin("api.test", tls=False) as origin:
        rules = policy(
            rule("dev/read", op("dev/read", "api.test", ["/ok"], port=origin.port, scheme="http")),
            destinations=[destination(origin)],
        )
        house = House(rules, origins=[origin], lookup_seconds=0.05)
        house.resolver.hold()
        client = house.connect()
        at = f"api.test:{origin.port}"
        client.send(get(f"http://{at}/ok", at))
        assert (await client.answer()).reason == "dns-failed"
        house.resolver.let_go()
        client.stream.abort()
        await client.serving
        assert origin.untouched
        assert house.records("request.outcome")[0]["error"] == "dns-failed"


async def test_a_dialer_that_raises_anything_closes_both_sides_with_an_outcome() -> None:
    """RULINGS 11.3: an exception nobody foresaw, in the middle of a request."""
    house, dialer = closed_house()
    client = await house.tunnel("api.test:443", tls="api.test")
    client.send("GET /v1/read/x HTTP/1.1\r\nHost: api.test\r\n\r\n")
    with pytest.raises(StreamBroken):
        await client.answer()
    await client.serving
    assert len(dialer.asked) == 1
    assert [type(fault) for fault in house.faults] == [AssertionError]
    assert house.journal.names() == ["request.intent", "request.outcome"]
    assert house.records("request.outcome")[0]["error"] == "internal-error"
    assert (house.room.live.count(), house.room.pool.in_use, house.room.gate.open_passages) == (0, 0, 0)


# --- inside a CONNECT --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "first", "reason"),
    [
        ("SSH after CONNECT", b"SSH-2.0-x\r\n", "bad-protocol"),
        ("clear HTTP where only TLS may be", b"GET /v1/read/x HTTP/1.1\r\nHost: api.test\r\n\r\n", "tls-required"),
        ("a TLS record that is no ClientHello", b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", "bad-protocol"),
    ],
)
async def test_what_is_not_tls_after_connect_is_closed_and_recorded(sentence: str, first: bytes, reason: str) -> None:
    """Raw bytes inside a tunnel never pass."""
    house, dialer = closed_house()
    client = await house.tunnel("api.test:443")
    client.send(first)
    await client.serving
    with pytest.raises(StreamBroken):
        await client.rest()
    assert [record["reason"] for record in house.records("connection.refused")] == [reason], sentence
    assert dialer.asked == []


async def test_a_client_that_says_nothing_after_connect_is_closed() -> None:
    """The ClientHello is due within seconds."""
    house, _ = closed_house(table=LimitTable(hello_seconds=0.05))
    client = await house.tunnel("api.test:443")
    await client.serving
    assert house.records("connection.refused")[0]["reason"] == "client-timeout"


async def test_another_server_name_than_the_tunnels_is_refused() -> None:
    """SNI and CONNECT name one host or the connection ends with an alert."""
    house, dialer = closed_house()
    client = await house.tunnel("api.test:443")
    with pytest.raises(Exception):  # noqa: B017 - whatever the client's TLS says about an alert
        await client.start_tls(ssl.create_default_context(), "evil.test")
    await client.serving
    (record,) = house.records("connection.refused")
    assert (record["reason"], record["sni"], record["connect_host"]) == ("sni-mismatch", "evil.test", "api.test:443")
    assert dialer.asked == []


@pytest.mark.parametrize("host", ["api.test", "raw.test", "exeat.internal"])
async def test_a_handshake_without_a_server_name_is_refused(host: str) -> None:
    """Inspected, uninspected, or to the help host: an alert, one record, nothing dialled (field case C051)."""
    dialer = NoDialer()
    house = House(
        policy(rule("dev/read", op("dev/read", "api.test")), tunnel_rule("dev/raw", "raw.test")), dialer=dialer
    )
    client = await house.tunnel(f"{host}:443")
    with pytest.raises((StreamBroken, ssl.SSLError)):
        await client.start_tls(nameless(), "192.0.2.1")  # for an address a client sends no server name
    await client.serving
    (record,) = house.records("connection.refused")
    assert (record["reason"], record.get("sni"), record["connect_host"]) == ("sni-absent", None, f"{host}:443")
    assert dialer.asked == []


@pytest.mark.parametrize(
    ("host", "entry"),
    [
        ("old.test", DestinationDef(host=Host("old.test"), sni="optional")),
        ("192.0.2.7", DestinationDef(host=Host("192.0.2.7"), addresses=(ip_network("192.0.2.7/32"),))),
    ],
)
async def test_a_server_name_may_be_absent_where_a_destination_says_so(host: str, entry: DestinationDef) -> None:
    """`sni: optional`, or a declared address; the request inside is judged by the tunnel's host."""
    house = House(policy(rule("dev/read", op("dev/read", host, ["/v1/**"])), destinations=[entry]), dialer=NoDialer())
    client = await house.tunnel(f"{host}:443")
    await client.start_tls(nameless(), "192.0.2.1")
    client.send(f"GET /v2 HTTP/1.1\r\nHost: {host}\r\n\r\n")
    assert (await client.answer()).reason == "no-rule"
    client.send("GET /v1/x HTTP/1.1\r\nHost: api.test\r\n\r\n")
    assert (await client.answer()).reason == "authority-mismatch"
    assert house.records("connection.refused") == []


async def test_an_optional_server_name_is_still_the_tunnels() -> None:
    """What is named must agree: `sni: optional` is about absence alone."""
    entry = DestinationDef(host=Host("old.test"), sni="optional")
    house = House(policy(rule("dev/read", op("dev/read", "old.test")), destinations=[entry]), dialer=NoDialer())
    client = await house.tunnel("old.test:443")
    with pytest.raises((StreamBroken, ssl.SSLError)):
        await client.start_tls(nameless(), "api.test")
    await client.serving
    assert house.records("connection.refused")[0]["reason"] == "sni-mismatch"


def nameless() -> ssl.SSLContext:
    """A client that asks for nothing in a certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def test_an_h2_only_client_gets_no_application_protocol() -> None:
    """The lane is the rule's choice, never the client's."""
    house, _ = closed_house()
    with pytest.raises(Exception):  # noqa: B017 - whatever the client's TLS says about an alert
        await house.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    await asyncio.sleep(0)
    assert house.records("connection.refused")[0]["reason"] == "no-application-protocol"


async def test_a_client_that_does_not_know_our_ca_is_recorded() -> None:
    """Status and doctor can then name the variable to set."""
    house, _ = closed_house()
    client = await house.tunnel("api.test:443")
    with pytest.raises(Exception):  # noqa: B017 - the client refuses our certificate
        await client.start_tls(ssl.create_default_context(), "api.test")
    await client.serving
    assert house.records("client.distrusts-ca")[0]["reason"] == "client-distrusts-ca"


async def test_a_denied_connect_is_told_inside_tls_with_one_record() -> None:
    """Clients show nothing of a CONNECT's answer, so the refusal comes where they read it."""
    house, dialer = closed_house()
    client = await house.tunnel("evil.test:443", tls="evil.test")
    client.send("GET /x HTTP/1.1\r\nHost: evil.test\r\nUser-Agent: git/2.39\r\n\r\n")
    answer = await client.answer()
    assert answer.status == 403
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"no-rule" in answer.body
    await client.serving
    assert house.journal.names() == ["request.refused"]
    assert dialer.asked == []


async def test_beyond_its_budget_of_refusal_leaves_a_connect_is_refused_at_connect() -> None:
    """Certificates for denied names are rationed per sandbox."""
    house, _ = closed_house(table=LimitTable(refusal_leaves_per_minute=1))
    assert (await house.tunnel("evil.test:443")).raw is None
    client = house.connect()
    client.send(get("evil.test:443", "evil.test:443", method="CONNECT"))
    assert (await client.answer()).status == 403


async def test_the_inner_host_must_be_the_tunnels() -> None:
    """T01: 421, nothing upstream, and the record shows all three names."""
    house, dialer = closed_house()
    client = await house.tunnel("api.test:443", tls="api.test")
    client.send("GET /v1/read/x HTTP/1.1\r\nHost: pub.test\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.reason) == (421, "authority-mismatch")
    (record,) = house.records("request.refused")
    assert (record["connect_host"], record["sni"], record["host_header"]) == ("api.test:443", "api.test", "pub.test")
    assert dialer.asked == []


# --- what passes -------------------------------------------------------------------------------------------------


async def test_an_allowed_request_reaches_its_origin_with_one_intent_and_one_outcome() -> None:
    """What is sent is what was judged; headers that never pass are gone; both records share one id."""
    async with Origin("api.test") as origin:
        rules = policy(
            rule("dev/read", op("dev/read", "api.test", ["/v1/read/**"], port=origin.port)),
            destinations=[destination(origin)],
        )
        house = House(rules, origins=[origin])
        client = await house.tunnel(f"api.test:{origin.port}", tls="api.test")
        client.send(
            f"GET /v1/read/x HTTP/1.1\r\nHost: api.test:{origin.port}\r\nX-Forwarded-For: 10.0.0.1\r\nVia: 1.1 a\r\n"
            "Connection: close, X-Nominated\r\nX-Nominated: 1\r\nX-Kept: yes\r\nX-Box-Id: box2\r\n\r\n"
        )
        answer = await client.answer()
        assert answer.status == 200
        await client.serving
        (seen,) = origin.received
        names = {name.lower() for name, _ in seen.headers}
        assert "x-kept" in names
        assert not names & {"x-forwarded-for", "via", "x-nominated", "proxy-authorization"}
        (intent,) = house.records("request.intent")
        (outcome,) = house.records("request.outcome")
        assert intent["request_id"] == outcome["request_id"]
        assert (outcome["status"], outcome["completed"], outcome["error"]) == (200, True, "")
        assert outcome["address"] == "127.0.0.1"
        assert house.room.live.count() == 0
        assert house.faults == []


async def test_pipelined_requests_are_judged_one_by_one() -> None:
    """B046: in one write an allowed request and a denied one; the first is answered, the second refused."""
    async with Origin("api.test", tls=False) as origin:
        rules = policy(
            rule("dev/read", op("dev/read", "api.test", ["/ok"], port=origin.port, scheme="http")),
            destinations=[destination(origin)],
        )
        house = House(rules, origins=[origin])
        client = house.connect()
        at = f"api.test:{origin.port}"
        client.send(get(f"http://{at}/ok", at) + get("http://evil.test/", "evil.test"))
        assert (await client.answer()).status == 200
        assert (await client.answer()).reason == "no-rule"
        assert [seen.target for seen in origin.received] == ["/ok"]


async def test_clear_text_inside_connect_only_where_a_rule_says_so() -> None:
    """T09: /ok answered, /no refused on the same tunnel, both on record with method and path."""
    async with Origin("mcp.test", tls=False) as origin:
        rules = policy(
            rule("dev/mcp", op("dev/mcp", "mcp.test", ["/ok"], port=origin.port, scheme="http")),
            destinations=[destination(origin)],
        )
        house = House(rules, origins=[origin])
        at = f"mcp.test:{origin.port}"
        client = await house.tunnel(at)
        client.send(f"GET /ok HTTP/1.1\r\nHost: {at}\r\n\r\n")
        assert (await client.answer()).status == 200
        client.send(f"GET /no HTTP/1.1\r\nHost: {at}\r\n\r\n")
        assert (await client.answer()).status == 403
        assert house.records("request.intent")[0]["path"] == "/ok"
        assert house.records("request.refused")[0]["path"] == "/no"


async def test_a_body_is_read_judged_and_sent_as_judged() -> None:
    """NeedsBody: 100 Continue comes from us, the very bytes that were judged go upstream."""
    async with Origin("api.test", tls=False) as origin:
        rules = policy(
            rule(
                "dev/post",
                op(
                    "dev/post",
                    "api.test",
                    ["/post"],
                    methods=["POST"],
                    effect="write",
                    port=origin.port,
                    scheme="http",
                    body=json_body({"kind": ["read"]}),
                ),
            ),
            destinations=[destination(origin)],
        )
        house = House(rules, origins=[origin])
        at = f"api.test:{origin.port}"
        for body, status in ((b'{"kind": "write"}', 403), (b'{"kind": "read"}', 200)):
            client = house.connect()
            client.send(
                get(
                    f"http://{at}/post",
                    at,
                    "Content-Type: application/json",
                    f"Content-Length: {len(body)}",
                    "Expect: 100-continue",
                    method="POST",
                )
            )
            assert (await client.answer()).status == 100
            client.send(body)
            assert (await client.answer()).status == status
        assert [bytes(seen.body) for seen in origin.received] == [b'{"kind": "read"}']


async def test_what_a_sandbox_holds_of_judged_bodies_is_bounded_over_its_connections() -> None:
    """Expect 429 beyond the bound, another sandbox served as before, and room again once requests ended (B173)."""
    create = op("dev/w", "api.test", ["/w"], methods=["POST"], effect="write", scheme="http", port=80)
    rules = policy(rule("dev/w", replace(create, body=json_body({"a": "string"}))))
    house = House(rules, dialer=NoDialer(), table=LimitTable(sandbox_held_bodies=1500, held_bodies=3000))

    def post(client: Client, size: int, *, token: str = TOKEN) -> None:
        client.send(get("http://api.test/w", "api.test", "Content-Length: 1000", method="POST", token=token))
        client.send(b" " * size)

    first, second, other = house.connect(), house.connect(), house.connect()
    post(first, 900)
    await asyncio.sleep(0)
    post(second, 900)
    answer = await second.answer()
    assert (answer.status, answer.reason) == (429, "too-many-requests")
    post(other, 1000, token=OTHER_TOKEN)
    assert (await other.answer()).status == 403  # judged
    first.send(b" " * 100)
    assert (await first.answer()).status == 403
    again = house.connect()
    post(again, 1000)
    assert (await again.answer()).status == 403
    assert [record["reason"] for record in house.records("request.refused")].count("too-many-requests") == 1


@pytest.mark.parametrize("pieces", [1, 2, 40], ids=["whole", "split", "byte by byte"])
async def test_a_placeholder_in_a_body_that_streams_is_an_alarm(pieces: int) -> None:
    """4.4: nobody judges it, so it goes on; the log has one alarm beside the intent, and no byte of the placeholder."""
    held = make("sk_{32}", bytes(range(40)))
    body = b"k=" + held.encode() + b"&x=" + b"y" * 40
    async with Origin("api.test", tls=False) as origin:
        there = {"port": origin.port, "scheme": "http", "methods": ["POST"], "effect": "write"}
        rules = policy(rule("dev/up", op("dev/up", "api.test", ["/up"], **there)), destinations=[destination(origin)])
        house = House(rules, origins=[origin])
        at = f"api.test:{origin.port}"
        for sent in (body, b"k=" + held.lower().encode()):
            client = house.connect()
            client.send(get(f"http://{at}/up", at, f"Content-Length: {len(sent)}", method="POST"))
            size = -(-len(sent) // pieces)
            for start in range(0, len(sent), size):
                client.send(sent[start : start + size])
                await asyncio.sleep(0)
            assert (await client.answer()).status == 200
        (alarm,) = house.records("placeholder.misused")
        intent = house.records("request.intent")[0]
        assert (alarm["request_id"], alarm["reason"]) == (intent["request_id"], "placeholder-misuse")
        assert held[3:] not in json.dumps([alarm, intent])


async def test_a_denied_upload_is_answered_before_its_body() -> None:
    """T10: 403 without 100 Continue."""
    house, dialer = closed_house()
    client = await house.tunnel("api.test:443", tls="api.test")
    client.send("PUT /up HTTP/1.1\r\nHost: api.test\r\nContent-Length: 20000000\r\nExpect: 100-continue\r\n\r\n")
    answer = await client.answer()
    assert answer.status == 403
    assert await client.rest() == b""
    assert dialer.asked == []


async def test_an_unreachable_origin_is_502_and_recorded_as_the_outcome() -> None:
    """The failed dial is the outcome of the intent, not a second refusal."""
    async with Origin("api.test", tls=False) as origin:
        port, entry = origin.port, destination(origin)
    rules = policy(
        rule("dev/read", op("dev/read", "api.test", ["/ok"], port=port, scheme="http")), destinations=[entry]
    )
    house = House(rules, origins=[origin])
    client = house.connect()
    client.send(get(f"http://api.test:{port}/ok", f"api.test:{port}"))
    answer = await client.answer()
    assert (answer.status, answer.reason) == (502, "upstream-unreachable")
    client.stream.abort()
    await client.serving
    assert house.journal.names() == ["request.intent", "request.outcome"]
    assert house.records("request.outcome")[0]["error"] == "upstream-unreachable"


async def test_a_removed_rule_cuts_the_next_request_and_the_tunnel() -> None:
    """T28: after the new snapshot the kept-alive connection is closed."""
    async with Origin("api.test") as origin:
        rules = policy(
            rule("dev/read", op("dev/read", "api.test", ["/ok"], port=origin.port)), destinations=[destination(origin)]
        )
        house = House(rules, origins=[origin])
        at = f"api.test:{origin.port}"
        client = await house.tunnel(at, tls="api.test")
        client.send(f"GET /ok HTTP/1.1\r\nHost: {at}\r\n\r\n")
        assert (await client.answer()).status == 200
        house.install(policy(digest="d2"))
        assert house.room.enforce(house.directory.snapshot()) >= 1
        await client.serving
        assert house.room.live.count() == 0
        assert house.room.pool.idle == 0


async def test_a_drain_cuts_what_does_not_end_and_writes_its_outcome() -> None:
    """SIGTERM in mid-stream: the message is cut, the outcome holds what was counted."""
    async with Origin("api.test", tls=False) as origin:
        gate = Gate()
        origin.on("/slow", script(READ, head(200, (("Content-Length", "100"),)) + b"first", gate))
        rules = policy(
            rule("dev/read", op("dev/read", "api.test", ["/slow"], port=origin.port, scheme="http")),
            destinations=[destination(origin)],
        )
        house = House(rules, origins=[origin])
        client = house.connect()
        at = f"api.test:{origin.port}"
        client.send(get(f"http://{at}/slow", at))
        await origin.until(lambda: bool(origin.received))
        await client._until(b"first")
        await house.room.drain(0.05)
        with pytest.raises(StreamBroken):
            await client.rest()
        (outcome,) = house.records("request.outcome")
        assert outcome["error"]
        assert outcome["bytes_down"] == 5
        assert not outcome["completed"]
        gate.open()


async def test_a_kept_connection_that_died_is_replaced_with_an_intent_of_its_own() -> None:
    """RULINGS 9.7: only a read without body, only before a byte of answer, each attempt on record."""
    async with Origin("api.test", tls=False) as origin:
        rules = policy(
            rule("dev/read", op("dev/read", "api.test", ["/**"], port=origin.port, scheme="http")),
            destinations=[destination(origin)],
        )
        origin.on("/die", script(READ, ABORT))
        house = House(rules, origins=[origin])
        at = f"api.test:{origin.port}"
        client = house.connect()
        client.send(get(f"http://{at}/ok", at))
        assert (await client.answer()).status == 200
        client.send(get(f"http://{at}/die", at))
        assert (await client.answer()).status == 502
        assert [seen.target for seen in origin.received] == ["/ok", "/die", "/die"]
        client.stream.abort()
        await client.serving
        assert len(house.records("request.intent")) == len(house.records("request.outcome")) == 3


UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)


async def test_a_websocket_passes_only_where_an_operation_says_so() -> None:
    """B078: refused without the word; with it frames pass both ways and are counted in one outcome."""
    async with Origin("api.test", tls=False) as origin:
        origin.on("/ws", websocket_echo)
        there = {"port": origin.port, "scheme": "http"}
        rules = policy(
            rule("dev/plain", op("dev/plain", "api.test", ["/plain"], **there)),
            rule("dev/ws", op("dev/ws", "api.test", ["/ws"], websocket=True, **there)),
            destinations=[destination(origin)],
        )
        house = House(rules, origins=[origin])
        at = f"api.test:{origin.port}"
        denied = house.connect()
        denied.send(get(f"http://{at}/plain", at, *UPGRADE))
        assert (await denied.answer()).reason == "websocket-refused"
        client = house.connect()
        client.send(get(f"http://{at}/ws", at, *UPGRADE))
        assert (await client.answer()).status == 101
        client.send(b"\x81\x82\x00\x00\x00\x00hi")
        assert await client._exactly(4) == b"\x81\x02hi"
        client.send(b"\x88\x82\x00\x00\x00\x00\x03\xe8")
        assert (await client.rest())[:1] == b"\x88"
        await client.stream.close()
        await client.serving
        (outcome,) = house.records("request.outcome")
        assert outcome["upstream_status"] == 101
        assert outcome["bytes_up"] > 0
        assert outcome["bytes_down"] > 0


async def test_an_uninspected_tunnel_relays_and_says_so() -> None:
    """The client's own TLS reaches the origin; intent and outcome say `uninspected` and count bytes."""
    async with Origin("raw.test") as origin:
        rules = policy(tunnel_rule("dev/raw", "raw.test", origin.port), destinations=[destination(origin)])
        house = House(rules, origins=[origin])
        client = await house.tunnel(f"raw.test:{origin.port}")
        await client.start_tls(ssl.create_default_context(cadata=origin.ca_pem), "raw.test")
        client.send("GET / HTTP/1.1\r\nHost: raw.test\r\nConnection: close\r\n\r\n")
        assert (await client.answer()).status == 200
        await client.stream.close()
        await client.serving
        (intent,) = house.records("tunnel.intent")
        (outcome,) = house.records("tunnel.outcome")
        assert intent["uninspected"] is True
        assert outcome["bytes_up"] > 0
        assert outcome["bytes_down"] > 0


async def test_a_tunnel_ends_at_its_byte_limit() -> None:
    """B087: the limit cuts it and the outcome names it."""
    async with Origin("raw.test") as origin:
        rules = policy(
            tunnel_rule("dev/raw", "raw.test", origin.port, max_bytes=100), destinations=[destination(origin)]
        )
        house = House(rules, origins=[origin])
        client = await house.tunnel(f"raw.test:{origin.port}")
        with pytest.raises(Exception):  # noqa: B017 - the handshake is longer than the limit
            await client.start_tls(ssl.create_default_context(cadata=origin.ca_pem), "raw.test")
        await client.serving
        assert house.records("tunnel.outcome")[0]["error"] == "tunnel-limit"


# --- the help host -----------------------------------------------------------------------------------------------


async def test_the_help_host_needs_an_identity_and_tells_only_ones_own() -> None:
    """Pages for an identified sandbox; a refusal's id is known to its own sandbox alone."""
    house, dialer = closed_house()
    client = house.connect()
    client.send(get("http://exeat.internal/", "exeat.internal", token=None))
    assert (await client.answer()).status == 407
    client.send(get("http://exeat.internal/ca.pem", "exeat.internal"))
    assert b"BEGIN CERTIFICATE" in (await client.answer()).body
    client.send(get("http://exeat.internal/doctor.sh", "exeat.internal"))
    assert (await client.answer()).body.startswith(b"#!/bin/sh")
    client.send(get("http://evil.test/secret", "evil.test"))
    refused = (await client.answer()).json
    client.send(get(f"http://exeat.internal/why/{refused['request_id']}", "exeat.internal"))
    assert (await client.answer()).json["request"] == "GET http://evil.test:80/secret"
    client.send(get("/allowed", "exeat.internal", "Accept: application/json"))
    allowed = (await client.answer()).json
    assert allowed["allow"][0]["operations"][0]["urls"] == ["https://api.test/v1/read/**"]
    other = house.connect()
    other.send(get(f"http://exeat.internal/why/{refused['request_id']}", "exeat.internal", token=OTHER_TOKEN))
    assert (await other.answer()).status == 404
    assert TOKEN not in json.dumps(allowed)
    assert base64.b64encode(TOKEN.encode()).decode() not in json.dumps(allowed)
    assert dialer.asked == []


async def test_pages_count_among_what_a_sandbox_holds_in_memory() -> None:
    """A page beyond what is left is refused, a small one is served, and nothing is held once a page was sent."""
    house, _ = closed_house(table=LimitTable(sandbox_held_bodies=1500))
    client = house.connect()
    for _ in range(3):
        client.send(get("http://exeat.internal/doctor.sh", "exeat.internal"))
        assert (await client.answer()).reason == "too-many-requests"
        client.send(get("http://exeat.internal/reasons/no-rule", "exeat.internal"))
        assert (await client.answer()).status == 200


async def test_the_help_host_is_served_by_tls_as_well() -> None:
    """CONNECT exeat.internal:443 is ours and never dialled."""
    house, dialer = closed_house()
    client = await house.tunnel("exeat.internal:443", tls="exeat.internal")
    client.send("GET /reasons/no-rule HTTP/1.1\r\nHost: exeat.internal\r\n\r\n")
    assert (await client.answer()).json["reason"] == "no-rule"
    client.send("POST /allowed HTTP/1.1\r\nHost: exeat.internal\r\nContent-Length: 0\r\n\r\n")
    assert (await client.answer()).reason == "method-refused"
    assert dialer.asked == []
    assert basic() not in repr(house.journal.events)


def test_the_environment_script_is_shell_and_knows_no_proxy_address() -> None:
    """It quotes what it exports and leaves the proxy variables, which hold the token, as they are."""
    script_text = env_script(
        {
            "SSL_CERT_FILE": "{bundle}",
            "NODE_EXTRA_CA_CERTS": "{ca}",
            "HTTP_PROXY": "http://127.0.0.1:3128",
            "GIT_CONFIG_VALUE_0": "{proxy}",
            "ODD": 'a"b$(touch x)`y`',
            "bad name; rm": "x",
        }
    )
    assert 'export SSL_CERT_FILE="$exeat_dir/bundle.pem"' in script_text
    assert 'export GIT_CONFIG_VALUE_0="$exeat_proxy"' in script_text
    assert "export HTTP_PROXY" not in script_text
    assert "rm" not in script_text.replace("umask", "").split("export")[-1]
    assert subprocess.run(["sh", "-n"], input=script_text.encode(), check=False).returncode == 0
    shown = subprocess.run(
        ["sh", "-c", script_text.splitlines()[-2] + '; printf %s "$ODD"'], capture_output=True, check=True
    )
    assert shown.stdout == b'a"b$(touch x)`y`'
