"""Captured connections at the front door: the looked-up name takes the place of CONNECT (RULINGS 5.7)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import replace

import pytest

from net.stream import StreamBroken
from proxy.ports import Channel
from rules.names import Host, SandboxId
from tests.support.fakes import registered, sandbox
from tests.support.origins import Origin
from tests.support.rooms import Client, House, NoDialer, destination, get, op, policy, rule, tunnel_rule
from tests.support.streams import MemoryStream
from wire.dns import Unknown

KEY = b"k" * 32
OWN = Channel(listener="sb_own", kind="sandbox", sandbox=SandboxId("sb_own"), key=KEY)
RULES = policy(
    rule("dev/read", op("dev/read", "api.test", ["/v1/**"])),
    rule("dev/clear", op("dev/clear", "plain.test", ["/v1/**"], port=80, scheme="http")),
    tunnel_rule("dev/raw", "raw.test"),
)
BARE = [
    ("nothing was redirected", None),
    ("an address that nobody was given", ("198.18.0.77", 443)),
    ("a public address", ("192.0.2.1", 443)),
    ("an IPv6 address", ("2001:db8::1", 443)),
    ("an address that is another sandbox's", ("OTHER", 443)),
    ("no address at all", ("", 0)),
]


class Captured:
    """A house with the sandbox of OWN and another one, both admitted to the stub."""

    def __init__(self) -> None:
        self.dialer = NoDialer()
        boxes = [registered(sandbox(name), channel_key=KEY) for name in ("sb_own", "sb_two")]
        self.house = House(RULES, entries=boxes, dialer=self.dialer)
        self.names = self.house.room.names
        for name in ("sb_own", "sb_two"):
            self.names.admit(name)

    def given(self, name: str, box: str = "sb_own") -> str:
        """The address that the stub gives for `name`."""
        address = self.names.address_of(box, Host(name))
        assert address is not None
        return address

    def connect(self, wanted: tuple[str, int] | None, channel: Channel = OWN) -> Client:
        ours, theirs = MemoryStream.pair()
        serving = asyncio.ensure_future(self.house.room.front.serve_captured(theirs, channel, wanted))
        self.house._serving.append(serving)
        return Client(ours, serving)

    async def refused(self, client: Client) -> str:
        """The reason on record, once the connection ended without a word and without a dial."""
        with contextlib.suppress(StreamBroken):
            assert await client.rest() == b""
        await client.serving
        (record,) = self.house.records("connection.refused")
        assert self.dialer.asked == []
        assert record["sandbox"] == "sb_own"
        return str(record["reason"])


@pytest.mark.parametrize(("sentence", "wanted"), BARE, ids=[row[0] for row in BARE])
async def test_an_address_without_a_name_is_cut(sentence: str, wanted: tuple[str, int] | None) -> None:
    """Whatever is said on it: one record, nothing dialled."""
    captured = Captured()
    if wanted is not None and wanted[0] == "OTHER":
        wanted = (captured.given("api.test", "sb_two"), 443)
    client = captured.connect(wanted)
    client.send(get("/v1/x", "api.test", token=None))
    assert await captured.refused(client) == "address-literal-refused", sentence


async def test_a_name_of_before_the_stub_lost_its_memory_is_cut_until_it_is_looked_up_again() -> None:
    """A new table knows nobody; the next lookup gives the same address, which then means the same name."""
    captured = Captured()
    kept = captured.given("plain.test")
    captured.names.forget("sb_own")
    captured.names.admit("sb_own")
    for number in range(100):
        captured.given(f"n{number}.test")
    client = captured.connect((kept, 80))
    assert await captured.refused(client) == "address-literal-refused"
    assert captured.given("plain.test") == kept


async def test_our_own_name_is_looked_up_whatever_is_in_force() -> None:
    """A probe that asks for it while the vault is silent must not take us for a way out; nothing is said of others."""
    captured = Captured()
    room = captured.house.room
    assert room.name_exists("sb_own", Host("evil.test"))
    with pytest.raises(Unknown):
        room.name_exists("sb_nobody", Host("api.test"))
    captured.house.directory.lose()
    assert room.name_exists("sb_own", Host("exeat.internal"))
    with pytest.raises(Unknown):
        room.name_exists("sb_own", Host("api.test"))


async def test_a_listener_without_its_sandbox_serves_nobody() -> None:
    """An ended sandbox, or a listener whose key is of an earlier one, opens nothing."""
    for channel in (replace(OWN, sandbox=SandboxId("sb_gone")), replace(OWN, key=b"x" * 32)):
        captured = Captured()
        client = captured.connect((captured.given("api.test"), 443), channel)
        client.send(get("/v1/x", "api.test", token=None))
        with pytest.raises(StreamBroken):
            await client.rest()
        assert captured.house.records("connection.refused")[0]["reason"] == "sandbox-ended"
        assert captured.dialer.asked == []


@pytest.mark.parametrize(
    ("host", "sni", "reason"),
    [
        ("api.test", None, "sni-absent"),
        ("raw.test", None, "sni-absent"),
        ("api.test", "raw.test", "sni-mismatch"),
        ("raw.test", "api.test", "sni-mismatch"),
    ],
)
async def test_the_server_name_is_the_looked_up_one(host: str, sni: str | None, reason: str) -> None:
    """None, or another permitted one: an alert, one record, nothing dialled."""
    captured = Captured()
    client = captured.connect((captured.given(host), 443))
    context = ssl.create_default_context()
    context.check_hostname = False
    with pytest.raises((StreamBroken, ssl.SSLError)):
        await client.start_tls(context, sni or "192.0.2.1")  # for an address a client sends no server name
    await client.serving
    (record,) = captured.house.records("connection.refused")
    assert record["reason"] == reason
    assert captured.dialer.asked == []


@pytest.mark.parametrize(
    "line", [get("/v1/x", "api.test", token=None), get("http://api.test/v1/x", "api.test", token=None)]
)
async def test_clear_text_speaks_of_the_looked_up_name_alone(line: str) -> None:
    """Host and URL of another place are refused in words."""
    captured = Captured()
    client = captured.connect((captured.given("plain.test"), 80))
    client.send(line)
    answer = await client.answer()
    assert (answer.status, answer.reason) == (421, "authority-mismatch")
    assert captured.dialer.asked == []


async def test_a_denied_name_is_refused_in_words_where_words_can_be_read() -> None:
    """Clear text gets the refusal; what is no HTTP gets the end. Both are on record once."""
    captured = Captured()
    client = captured.connect((captured.given("evil.test"), 80))
    client.send(get("/", "evil.test", token=None))
    assert (await client.answer()).reason == "no-rule"
    other = captured.connect((captured.given("evil.test"), 22))
    other.send(b"SSH-2.0-x\r\n")
    with pytest.raises(StreamBroken):
        await other.rest()
    reasons = [
        record["reason"]
        for name in ("request.refused", "connection.refused")
        for record in captured.house.records(name)
    ]
    assert reasons == ["no-rule", "no-rule"]
    assert captured.dialer.asked == []


async def test_a_permitted_request_reaches_the_origin_of_its_name() -> None:
    """The name was looked up at the stub; the origin is found and vetted by ourselves."""
    async with Origin("plain.test", tls=False) as origin:
        clear = op("dev/clear", "plain.test", ["/v1/**"], port=origin.port, scheme="http")
        rules = policy(rule("dev/clear", clear), destinations=[destination(origin)])
        house = House(rules, entries=[registered(sandbox("sb_own"), channel_key=KEY)], origins=[origin])
        house.room.names.admit("sb_own")
        address = house.room.names.address_of("sb_own", Host("plain.test"))
        assert address is not None
        ours, theirs = MemoryStream.pair()
        serving = asyncio.ensure_future(house.room.front.serve_captured(theirs, OWN, (address, origin.port)))
        house._serving.append(serving)
        client = Client(ours, serving)
        client.send(get("/v1/x", f"plain.test:{origin.port}", token=None))
        assert (await client.answer()).status == 200
        assert [request.target for request in origin.received] == ["/v1/x"]
        (intent,) = house.records("request.intent")
        assert intent["sandbox"] == "sb_own"
