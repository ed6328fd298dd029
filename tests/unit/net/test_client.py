"""The client of sources and exchanges against real loopback origins: what it refuses, then what it brings back."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from net.addresses import Address, AddressTable
from net.client import MAX_ANSWER_BYTES, Answer, Endpoint, HttpClient, NoAnswer, Question
from net.contexts import ClientContexts
from net.interfaces import InterfacesUnreadable
from net.resolve import Lookups
from net.trust import TrustKey
from net.upstream import UpstreamProxy
from rules.names import Destination, Host
from tests.support.authority import Certificate
from tests.support.forwarders import Forwarder
from tests.support.origins import Origin, head
from tests.support.resolver import StaticResolver
from tests.support.scripts import ABORT, CLOSE, READ, chunk, script, text
from tests.support.signals import Gate

LOOPBACK = (ip_network("127.0.0.0/8"),)
CANARY = "canary-5d1f0c7a93be"


def client(
    resolver: StaticResolver | None = None,
    table: AddressTable | None = None,
    *,
    seconds: float = 20.0,
    interfaces: Callable[[], frozenset[Address]] = frozenset,
    upstream: UpstreamProxy | None = None,
) -> HttpClient:
    known = resolver or StaticResolver({"token.test": ["127.0.0.1"]})
    return HttpClient(
        Lookups(known, clock=lambda: 0.0, seconds=1.0),
        ClientContexts(),
        lambda: table or AddressTable(),
        interfaces=interfaces,
        seconds=seconds,
        upstream=upstream,
    )


def endpoint(origin: Origin, name: str = "token.test") -> Endpoint:
    return Endpoint(
        destination=Destination("https", Host.of(name), origin.port),
        addresses=LOOPBACK,
        trust=TrustKey(ca_pem=origin.ca_pem),
    )


def question(where: Endpoint, target: str = "/token", *, body: bytes = b"", **headers: str) -> Question:
    return Question(
        endpoint=where,
        method="POST",
        target=target,
        headers=tuple((name.replace("_", "-"), value) for name, value in headers.items()),
        body=body or f"secret={CANARY}".encode(),
    )


async def refused(asked: HttpClient, what: Question) -> NoAnswer:
    answer = await asked.ask(what)
    assert isinstance(answer, NoAnswer), answer
    assert CANARY not in repr(answer) + repr(what)
    return answer


async def test_a_private_address_is_refused_unless_the_destination_names_it() -> None:
    """A token endpoint whose name turns out to live inside is not dialled: `destinations:` is the only exception."""
    async with Origin("token.test") as origin:
        bare = replace(endpoint(origin), addresses=())
        for where in (
            bare,
            replace(bare, static=("127.0.0.1",)),
            replace(bare, destination=Destination("https", Host.of("127.0.0.1"), origin.port)),
            replace(bare, addresses=(ip_network("127.0.0.2/32"),)),
        ):
            assert (await refused(client(), question(where))).code == "address-refused"
        assert origin.untouched


@pytest.mark.parametrize("answers", [["127.0.0.1", "169.254.169.254"], ["::ffff:127.0.0.1"], ["127.0.0.1", "token"]])
async def test_one_bad_address_refuses_all(answers: list[str]) -> None:
    """A resolver that mixes gains nothing."""
    async with Origin("token.test") as origin:
        no = await refused(client(StaticResolver({"token.test": answers})), question(endpoint(origin)))
        assert (no.code, origin.untouched) == ("address-refused", True)


async def test_our_own_listeners_are_never_asked_nor_our_own_name() -> None:
    """A token endpoint that is this gateway would be a loop with a secret in it."""
    async with Origin("token.test") as origin:
        table = AddressTable(listener_ports=frozenset({origin.port}))
        assert (await refused(client(table=table), question(endpoint(origin)))).code == "address-refused"
        own = endpoint(origin, "exeat.internal")
        assert (await refused(client(), question(own))).code == "address-refused"
        assert origin.untouched


async def test_an_address_of_this_machine_is_refused_and_so_is_all_where_interfaces_cannot_be_read() -> None:
    """Interfaces are read at each question; without them nothing is dialled."""

    def unreadable() -> frozenset[Address]:
        raise InterfacesUnreadable("rtnetlink: none")

    async with Origin("token.test") as origin:
        mine = client(
            StaticResolver({"token.test": ["203.0.113.7"]}), interfaces=lambda: frozenset({ip_address("203.0.113.7")})
        )
        where = replace(endpoint(origin), addresses=())
        assert (await refused(mine, question(where))).code == "address-refused"
        assert (await refused(client(interfaces=unreadable), question(endpoint(origin)))).code == "address-refused"
        assert origin.untouched


@pytest.mark.parametrize("kind", ["wrong-name", "expired", "self-signed", "untrusted"])
async def test_a_certificate_that_does_not_verify_gets_no_byte_of_the_question(kind: Certificate) -> None:
    """The secret leaves only after the handshake."""
    async with Origin("token.test", certificate=kind) as origin:
        no = await refused(client(), question(endpoint(origin)))
        assert no.code == "certificate-refused"
        assert not origin.received
        assert CANARY.encode() not in b"".join(bytes(each.raw) for each in origin.connections)


async def test_the_destinations_own_authority_is_the_only_one_believed() -> None:
    """The system store does not vouch for an endpoint with `ca`, nor the other way round."""
    async with Origin("token.test") as origin, Origin("other.test") as other:
        wrong = replace(endpoint(origin), trust=TrustKey(ca_pem=other.ca_pem))
        assert (await refused(client(), question(wrong))).code == "certificate-refused"
        system = replace(endpoint(origin), trust=TrustKey())
        assert (await refused(client(), question(system))).code == "certificate-refused"
        empty = replace(endpoint(origin), trust=TrustKey(ca_pem=""))
        assert (await refused(client(), question(empty))).code == "certificate-refused"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_an_answer_and_is_not_followed(status: int) -> None:
    """The secret in the question must not travel on, whatever the token endpoint says (RULINGS 7)."""
    async with Origin("token.test") as origin, Origin("evil.test") as evil:
        origin.on("/token", script(READ, text("", status, ("Location", evil.url("/take")))))
        answer = await client(StaticResolver({"token.test": ["127.0.0.1"], "evil.test": ["127.0.0.1"]})).ask(
            question(endpoint(origin))
        )
        assert isinstance(answer, Answer)
        assert (answer.status, answer.header("location")) == (status, evil.url("/take"))
        assert (len(origin.received), evil.untouched) == (1, True)


async def test_a_compressed_answer_is_refused_and_not_decoded() -> None:
    """The vault decompresses nothing; it asks for identity and keeps to it."""
    async with Origin("token.test") as origin:
        bomb = gzip.compress(b"\0" * (64 << 20))
        origin.on("/token", script(READ, text(bomb, 200, ("Content-Encoding", "gzip"))))
        assert (await refused(client(), question(endpoint(origin)))).code == "answer-encoded"
        assert origin.received[0].values("accept-encoding") == ["identity"]


@pytest.mark.parametrize("framing", ["length", "chunked", "to the end"])
async def test_an_answer_over_the_bound_is_refused(framing: str) -> None:
    """5 MB are not read to their end, however they are framed."""
    body = b"x" * (5 << 20)
    whole = {
        "length": text(body),
        "chunked": head(200, (("Transfer-Encoding", "chunked"),)) + chunk(body) + b"0\r\n\r\n",
        "to the end": b"HTTP/1.1 200 OK\r\n\r\n" + body,
    }[framing]
    async with Origin("token.test") as origin:
        origin.on("/token", script(READ, whole, CLOSE))
        assert (await refused(client(), question(endpoint(origin)))).code == "answer-too-large"


async def test_an_answer_of_exactly_the_bound_passes() -> None:
    """The bound is what it says."""
    async with Origin("token.test") as origin:
        origin.on("/token", script(READ, text(b"x" * MAX_ANSWER_BYTES)))
        answer = await client().ask(question(endpoint(origin)))
        assert isinstance(answer, Answer)
        assert len(answer.body) == MAX_ANSWER_BYTES


async def test_an_endpoint_that_falls_silent_anywhere_ends_at_the_deadline() -> None:
    """One deadline over name, connection, head and body."""
    gate = Gate()
    async with Origin("token.test") as origin:
        origin.on("/silent", script(READ, gate, text("late")))
        origin.on("/half", script(READ, head(200, (("Content-Length", "100"),)) + b"half", gate))
        for target in ("/silent", "/half"):
            assert (await refused(client(seconds=0.5), question(endpoint(origin), target))).code == "timed-out"
        resolver = StaticResolver({"token.test": ["127.0.0.1"]})
        resolver.hold()
        assert (await refused(client(resolver, seconds=0.2), question(endpoint(origin)))).code == "timed-out"
        gate.open()


BROKEN = {
    "no HTTP": (b"220 mail.test ESMTP\r\n\r\n", CLOSE),
    "cut body": (head(200, (("Content-Length", "100"),)) + b"short", CLOSE),
    "cut chunk": (head(200, (("Transfer-Encoding", "chunked"),)) + b"5\r\nab", CLOSE),
    "both lengths": (head(200, (("Content-Length", "2"), ("Transfer-Encoding", "chunked"))) + b"zz\r\n", CLOSE),
    "long header": (head(200, (("X-Long", "y" * 20_000), ("Content-Length", "0"))), CLOSE),
    "many headers": (head(200, tuple((f"X-{n}", "1") for n in range(200))), CLOSE),
    "reset": (b"", ABORT),
    "closed": (b"", CLOSE),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
async def test_a_broken_answer_is_no_answer(case: str) -> None:
    """Half an answer is never taken for a whole one, and no fault escapes."""
    sent, last = BROKEN[case]
    async with Origin("token.test") as origin:
        origin.on("/token", script(READ, sent, last))
        assert (await refused(client(), question(endpoint(origin)))).code in ("answer-malformed", "unreachable")


async def test_nobody_listening_and_no_such_name_are_told_apart() -> None:
    """Fixed codes, with the address or the name for the operator."""
    async with Origin("token.test") as origin:
        where = endpoint(origin)
    assert (await refused(client(), question(where))).code == "unreachable"
    assert (await refused(client(StaticResolver()), question(where))).code == "name-unresolved"


@pytest.mark.parametrize("target", ["token", "", "//x y", "/a\r\nX: y", "/ä", "/a#b", "http://evil.test/", "/\x00"])
async def test_a_target_that_is_more_than_a_target_is_not_sent(target: str) -> None:
    """Whoever builds targets from attributes cannot split the request."""
    async with Origin("token.test") as origin:
        assert (await refused(client(), question(endpoint(origin), target))).code == "question-malformed"
        assert origin.untouched


@pytest.mark.parametrize(
    "header",
    [("X-A", "b\r\nX-C: d"), ("X A", "b"), ("Host", "evil.test"), ("Transfer-Encoding", "chunked"), ("X", "ä")],
)
async def test_a_header_that_is_more_than_a_header_is_not_sent(header: tuple[str, str]) -> None:
    """Nor can whoever fills in a header, and framing and Host are not theirs."""
    async with Origin("token.test") as origin:
        what = replace(question(endpoint(origin)), headers=(header,))
        assert (await refused(client(), what)).code == "question-malformed"
        assert origin.untouched


async def test_proxy_variables_and_netrc_of_the_environment_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Set in our own environment, they neither divert the question nor add to it (attack B102)."""
    async with Origin("token.test") as origin, Origin("evil.test", tls=False) as evil:
        netrc = tmp_path / ".netrc"
        netrc.write_text(f"machine token.test login thief password {CANARY}-netrc\n")
        netrc.chmod(0o600)
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(name, evil.base)
        monkeypatch.setenv("NETRC", str(netrc))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
        answer = await client().ask(question(endpoint(origin)))
        assert isinstance(answer, Answer)
        assert (origin.received[0].values("authorization"), evil.untouched) == ([], True)


async def test_cookies_are_not_kept_and_connections_not_shared() -> None:
    """Two questions have nothing in common: no cookie of the first, no connection of it."""
    async with Origin("token.test") as origin:
        origin.on("/token", script(READ, text("{}", 200, ("Set-Cookie", "s=1; Path=/"))))
        asked = client()
        for _ in range(2):
            assert isinstance(await asked.ask(question(endpoint(origin))), Answer)
        assert [each.values("cookie") for each in origin.received] == [[], []]
        assert len(origin.connections) == 2


async def test_the_question_arrives_as_it_was_put() -> None:
    """Target, headers and body byte for byte; signatures depend on it."""
    async with Origin("token.test") as origin:
        what = Question(
            endpoint=endpoint(origin),
            method="PUT",
            target="/v1/a%2Fb;c/x?q=%7e&r=a+b&&s",
            headers=(("Content-Type", "application/x-www-form-urlencoded"), ("Authorization", f"Bearer {CANARY}")),
            body=b"a=1&b=%20",
        )
        answer = await client().ask(what)
        assert isinstance(answer, Answer)
        assert CANARY not in repr(answer)
        got = origin.received[0]
        assert (got.method, got.target, bytes(got.body)) == ("PUT", what.target, what.body)
        assert got.values("host") == [f"token.test:{origin.port}"]
        assert got.values("authorization") == [f"Bearer {CANARY}"]
        assert got.values("content-type") == ["application/x-www-form-urlencoded"]
        assert got.values("user-agent") == ["exeat"]
        assert origin.connections[0].sni == "token.test"


async def test_clear_text_goes_only_where_the_operator_wrote_http() -> None:
    """The scheme is the endpoint's: an http endpoint is asked in clear, a https one never."""
    async with Origin("plain.test", tls=False) as origin:
        asked = client(StaticResolver({"plain.test": ["127.0.0.1"]}))
        clear = Endpoint(destination=Destination("http", Host.of("plain.test"), origin.port), addresses=LOOPBACK)
        assert isinstance(await asked.ask(question(clear)), Answer)
        over_tls = replace(clear, destination=Destination("https", Host.of("plain.test"), origin.port))
        hasty = client(StaticResolver({"plain.test": ["127.0.0.1"]}), seconds=0.5)  # the origin waits for a head
        assert (await refused(hasty, question(over_tls))).code == "timed-out"
        assert CANARY.encode() not in bytes(origin.connections[1].raw)


async def test_all_addresses_are_tried_and_static_ones_need_no_lookup() -> None:
    """As at every dial: the next address where one refuses."""
    async with Origin("token.test") as origin:
        resolver = StaticResolver()
        where = replace(endpoint(origin), static=("127.0.0.9", "127.0.0.1"))
        assert isinstance(await client(resolver).ask(question(where)), Answer)
        assert resolver.queries == []


async def test_the_upstream_proxy_is_asked_by_name_and_never_gone_round() -> None:
    """Where the operator set one: CONNECT with its own password, TLS for the endpoint inside, no other way."""
    async with Origin("token.example.com") as origin:
        async with Forwarder({"token.example.com": ("127.0.0.1", origin.port)}) as forwarder:
            via = UpstreamProxy(host="127.0.0.1", port=forwarder.port, authorization=b"Basic cHJveHk6cHc=")
            asked = client(StaticResolver(), upstream=via)
            where = replace(endpoint(origin, "token.example.com"), addresses=())
            assert isinstance(await asked.ask(question(where)), Answer)
            assert forwarder.heads[0].startswith(b"CONNECT token.example.com:%d HTTP/1.1\r\n" % origin.port)
            assert b"Proxy-Authorization: Basic cHJveHk6cHc=\r\n" in forwarder.heads[0]
            assert CANARY.encode() not in bytes(forwarder.carried) + forwarder.heads[0]
            for bad in (endpoint(origin, "token.example.com"), replace(endpoint(origin, "token.test"), addresses=())):
                assert (await refused(asked, question(bad))).code == "proxy-refused"
        assert (await refused(asked, question(where))).code == "unreachable"
        async with Forwarder(answer=b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n") as refusing:
            asked = client(StaticResolver(), upstream=UpstreamProxy(host="127.0.0.1", port=refusing.port))
            assert (await refused(asked, question(where))).code == "proxy-refused"
        assert len(origin.received) == 1
        assert origin.received[0].values("proxy-authorization") == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=400), head_first=st.booleans())
def test_no_bytes_of_an_endpoint_make_the_client_raise(raw: bytes, head_first: bool) -> None:
    """Whatever is sent back, the outcome is an answer within the bound or a fixed code."""

    async def main() -> None:
        async with Origin("token.test", tls=False) as origin:
            origin.on("/token", script(READ, (b"HTTP/1.1 200 OK\r\n" if head_first else b"") + raw, CLOSE))
            where = Endpoint(destination=Destination("http", Host.of("token.test"), origin.port), addresses=LOOPBACK)
            answer = await client().ask(question(where))
            match answer:
                case Answer(body=body):
                    assert len(body) <= MAX_ANSWER_BYTES
                case NoAnswer(code=code):
                    assert code in ("answer-malformed", "unreachable", "answer-encoded", "answer-too-large")

    asyncio.run(main())
