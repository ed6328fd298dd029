"""The worker's side of HTTP/2: a real front door and http1 lane, an adapter that the test plays or the real one."""

from __future__ import annotations

import asyncio

import h2.config
import h2.connection
import h2.events
import pytest

from net.fdchannel import FdChannel, channel_pair, socket_pair
from net.stream import open_socket_stream
from proxy.lanes import mitm
from proxy.mitm_process import Adapter
from tests.support.rooms import Client, House, NoDialer, op, policy, rule

H2_RULES = policy(rule("dev/h2", op("dev/h2", "api.test", ["/v1/**"]), protocol="h2"))


def house() -> House:
    return House(H2_RULES, dialer=NoDialer())


async def closed(client: Client) -> None:
    """Until the sandbox's side ended."""
    while True:
        try:
            if not await client.stream.receive():
                return
        except Exception:
            return


async def test_without_an_adapter_an_h2_only_client_is_refused_with_a_reason() -> None:
    """The lane does not exist until the adapter passed its self-test."""
    here = house()
    with pytest.raises(Exception):  # noqa: B017 - whatever the client's TLS says about an alert
        await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    await asyncio.sleep(0)
    (record,) = here.records("connection.refused")
    assert record["reason"] == "no-application-protocol"


async def test_without_an_adapter_a_client_of_both_is_served_over_http1() -> None:
    """What is missing is HTTP/2, not the host."""
    here = house()
    client = await here.tunnel("api.test:443", tls="api.test", alpn=["h2", "http/1.1"])
    assert client.stream.selected_alpn == "http/1.1"
    client.send("GET /nothing HTTP/1.1\r\nHost: api.test\r\n\r\n")
    assert (await client.answer()).reason == "no-rule"


async def test_beyond_its_connections_a_sandbox_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sandbox cannot take the whole adapter."""
    monkeypatch.setattr(mitm, "SANDBOX_CONNECTIONS", 1)
    here = house()
    near, far = channel_pair()
    here.room.mitm_lane.attach(near)
    channel = FdChannel(far)
    first = await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    taken = await channel.receive()
    assert taken is not None
    with pytest.raises(Exception):  # noqa: B017 - whatever the client's TLS says about an alert
        await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    taken[1].close()
    await closed(first)
    channel.close()
    await here.room.mitm_lane.close()


async def test_beyond_its_streams_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more request than a sandbox may have at a time over HTTP/2 is answered 429 and recorded; others go on."""
    monkeypatch.setattr(mitm, "SANDBOX_STREAMS", 1)
    here = house()
    near, far = channel_pair()
    here.room.mitm_lane.attach(near)
    channel = FdChannel(far)
    client = await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    taken = await channel.receive()
    assert taken is not None
    number, plain = taken
    streams = []
    for _ in range(2):
        ours, theirs = socket_pair()
        await channel.send(number, theirs)
        theirs.close()
        streams.append(await open_socket_stream(ours))
    request = b"GET /nothing HTTP/1.1\r\nHost: api.test\r\n\r\n"
    streams[1].write(request)
    assert (await streams[1].receive()).split(b" ")[1] == b"429"
    streams[0].write(request)
    assert (await streams[0].receive()).split(b" ")[1] == b"403"
    records = here.records("request.refused")
    assert [(one["reason"], one["sandbox"]) for one in records] == [
        ("too-many-requests", "sb_one"),
        ("no-rule", "sb_one"),
    ]
    for stream in streams:
        stream.abort()
    plain.close()
    await closed(client)
    channel.close()
    await here.room.mitm_lane.close()


async def test_connections_that_shake_hands_at_once_are_counted_like_those_that_are_served() -> None:
    """Expect one sandbox to get its few places, however many handshakes it begins before the first one ends."""
    here = house()
    near, far = channel_pair()
    here.room.mitm_lane.attach(near)
    channel = FdChannel(far)
    begun = (here.tunnel("api.test:443", tls="api.test", alpn=["h2"]) for _ in range(3 * mitm.SANDBOX_CONNECTIONS))
    opened = await asyncio.gather(*begun, return_exceptions=True)
    served = [client for client in opened if isinstance(client, Client)]
    assert len(served) == mitm.SANDBOX_CONNECTIONS
    refused = here.records("connection.refused")
    assert [record["reason"] for record in refused] == ["no-application-protocol"] * 2 * mitm.SANDBOX_CONNECTIONS
    for _ in served:
        taken = await channel.receive()
        assert taken is not None
        taken[1].close()
    for client in served:
        await closed(client)
    again = await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])  # places come back with their connections
    taken = await channel.receive()
    assert taken is not None
    taken[1].close()
    await closed(again)
    channel.close()
    await here.room.mitm_lane.close()


async def test_a_stream_with_an_unknown_id_is_closed_unread() -> None:
    """The adapter can only speak for connections that were given to it."""
    here = house()
    near, far = channel_pair()
    here.room.mitm_lane.attach(near)
    channel = FdChannel(far)
    ours, theirs = socket_pair()
    await channel.send(b"no such id 12345", theirs)
    theirs.close()
    stream = await open_socket_stream(ours)
    assert await stream.receive() == b""
    stream.abort()
    channel.close()
    await here.room.mitm_lane.close()
    assert here.journal.names() == []


async def test_an_id_of_an_adapter_that_was_replaced_counts_no_more() -> None:
    """A new adapter ends what the old one served."""
    here = house()
    near, far = channel_pair()
    here.room.mitm_lane.attach(near)
    channel = FdChannel(far)
    client = await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    taken = await channel.receive()
    assert taken is not None
    again_near, again_far = channel_pair()
    here.room.mitm_lane.attach(again_near)
    await closed(client)
    taken[1].close()
    channel.close()
    again_far.close()
    await here.room.mitm_lane.close()


async def test_a_request_of_the_adapter_is_judged_as_the_sandbox_in_its_tunnel() -> None:
    """Whatever Host the adapter writes, the tunnel's is the only one that counts; the record names the lane."""
    here = house()
    near, far = channel_pair()
    here.room.mitm_lane.attach(near)
    channel = FdChannel(far)
    client = await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    taken = await channel.receive()
    assert taken is not None
    number, plain = taken
    for host, status in (("evil.test", b"421"), ("api.test", b"403")):
        ours, theirs = socket_pair()
        await channel.send(number, theirs)
        theirs.close()
        stream = await open_socket_stream(ours)
        stream.write(f"GET /nothing HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert (await stream.receive()).split(b" ")[1] == status
        stream.abort()
    records = here.records("request.refused")
    assert [(one["reason"], one["lane"], one["sandbox"]) for one in records] == [
        ("authority-mismatch", "mitm", "sb_one"),
        ("no-rule", "mitm", "sb_one"),
    ]
    plain.close()
    await closed(client)
    channel.close()
    await here.room.mitm_lane.close()


async def test_the_adapter_and_the_lane_together_refuse_what_no_rule_allows() -> None:
    """The whole way in memory: TLS, HTTP/2, the adapter, the http1 lane, and back."""
    here = house()
    near, far = channel_pair()
    here.room.mitm_lane.attach(near)
    adapter, channel = Adapter(), FdChannel(far)
    serving = adapter.serve(channel)
    client = await here.tunnel("api.test:443", tls="api.test", alpn=["h2"])
    assert client.stream.selected_alpn == "h2"
    speaks = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="ascii"))
    speaks.initiate_connection()
    head = [(":method", "GET"), (":scheme", "https"), (":authority", "api.test"), (":path", "/nothing")]
    speaks.send_headers(1, head, end_stream=True)
    client.stream.write(speaks.data_to_send())
    status, body, ended = "", b"", False
    while not ended:
        for event in speaks.receive_data(await client.stream.receive()):
            match event:
                case h2.events.ResponseReceived():
                    status = dict(event.headers)[":status"]
                case h2.events.DataReceived():
                    body += event.data
                case h2.events.StreamEnded():
                    ended = True
                case _:
                    pass
    assert status == "403"
    assert b'"reason":"no-rule"' in body
    client.stream.abort()
    await client.serving
    await adapter.stop()
    channel.close()
    await asyncio.gather(serving, return_exceptions=True)
    await here.room.mitm_lane.close()
