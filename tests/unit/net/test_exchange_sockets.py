"""The whole chain on real sockets, on both loops: client, TLS, engine, exchange, TLS, origin; records in pieces."""

import asyncio
import socket
import ssl

import pytest
import trustme

from net import tls
from net.exchange import OutgoingRequest, exchange
from net.guard import Guard
from net.http1 import ClientConnection, ServerConnection
from net.stream import SocketStream, StreamBroken, open_socket_stream, serve_streams
from tests.support.loops import LOOPS, run_on
from wire.heads import CHUNKED, ResponseHead, strip_never_forwarded

CA = trustme.CA()
LEAF = CA.issue_cert("ok.test")
BODY = bytes(range(256)) * 800


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    LEAF.configure_cert(context)
    context.set_alpn_protocols(["http/1.1"])
    return context


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    CA.configure_trust(context)
    return context


class Split(SocketStream):
    """A socket whose writes leave in pieces, one loop turn apart."""

    step = 1 << 20

    def write(self, data: bytes) -> None:
        for at in range(0, len(data), self.step):
            super().write(data[at : at + self.step])


async def echo(stream: SocketStream) -> None:
    """An origin that streams the request body back and then ends its answer with a trailer."""
    connection = ServerConnection(await tls.server_side(stream, server_context()))
    while await connection.next_head() is not None:
        await connection.send_head(ResponseHead(200, "OK", "1.1", ()), CHUNKED)
        while (piece := await connection.read_body()) is not None:
            await connection.send_data(piece)
        await connection.finish(((b"X-Sum", b"1"),))
    await connection.close()


async def chain(step: int, *, broken: bool = False) -> tuple[list[bytes], list[BaseException]]:
    """One exchange through the chain; the body that came back and the faults that were reported."""
    faults: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as front, socket.create_server(("127.0.0.1", 0)) as back:
        addresses = front.getsockname(), back.getsockname()

        async def lane(stream: SocketStream) -> None:
            guard = Guard(faults.append)
            guard.watch(stream)
            await guard.run(relay(stream, guard))

        async def relay(stream: SocketStream, guard: Guard) -> None:
            server = ServerConnection(await tls.server_side(stream, server_context()))
            outer = guard.watch(await open_socket_stream(socket.create_connection(addresses[1])))
            upstream = ClientConnection(await tls.client_side(outer, client_context(), "ok.test"))
            while (head := await server.next_head()) is not None:
                request = OutgoingRequest(
                    method=head.method,
                    target=head.target,
                    headers=strip_never_forwarded(head.headers),
                    framing=server.framing,
                )
                result = await exchange(server, upstream, request, on_response=shaped)
                assert result.completed, result
            await server.close()

        def shaped(head: ResponseHead) -> ResponseHead:
            if broken:
                raise ZeroDivisionError
            return head

        servers = [
            await serve_streams(front, lane, on_fault=faults.append),
            await serve_streams(back, echo, on_fault=faults.append),
        ]
        bodies = []
        loop = asyncio.get_running_loop()
        sock = socket.create_connection(addresses[0])
        near = Split()
        near.step = step
        await loop.connect_accepted_socket(lambda: near, sock)
        client = ClientConnection(await tls.client_side(near, client_context(), "ok.test"))
        try:
            await client.send_request("POST", "/echo", ((b"Host", b"ok.test"),), CHUNKED)
            for at in range(0, len(BODY), 50_000):
                await client.send_data(BODY[at : at + 50_000])
            await client.finish()
            assert (await client.next_response()).status == 200
            body, got = client.body(), b""
            while (piece := await body.read()) is not None:
                got += piece
            assert body.trailers == ((b"X-Sum", b"1"),)
            bodies.append(got)
            await client.close()
        finally:
            near.abort()
            for server in servers:
                server.close()
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.001)
    return bodies, faults


@pytest.mark.parametrize("loop", list(LOOPS))
def test_a_fault_in_a_lane_closes_both_sockets(loop):
    """on_response raises: the client's and the origin's connection end, and the fault is reported once."""

    async def main() -> None:
        with pytest.raises(StreamBroken):
            await chain(1 << 20, broken=True)

    run_on(loop, main())


@pytest.mark.parametrize("loop", list(LOOPS))
@pytest.mark.parametrize("step", [37, 1000, 1 << 20])
def test_streamed_bodies_and_trailers_pass_the_whole_chain(loop, step):
    """A duplex body of 200 kB comes back unchanged while it is still being sent."""
    bodies, faults = run_on(loop, chain(step))
    assert bodies == [BODY]
    assert [fault for fault in faults if not isinstance(fault, StreamBroken)] == []
