"""SocketStream on asyncio and uvloop over loopback and Unix sockets: faults first, then flow."""

import asyncio
import socket
from collections.abc import Coroutine

import pytest

from net.http1 import ServerConnection
from net.stream import HIGH_WATER, READ_SIZE, SocketStream, StreamBroken, open_socket_stream, serve_streams
from tests.support.loops import LOOPS
from tests.support.loops import run_on as run_on_loop
from wire.heads import ResponseHead

both_loops = pytest.mark.parametrize("loop", list(LOOPS))
families = pytest.mark.parametrize("family", ["tcp", "unix"])


def connected(family: str = "tcp") -> tuple[socket.socket, socket.socket]:
    if family == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


async def streams(family: str = "tcp") -> tuple[SocketStream, SocketStream]:
    near, far = connected(family)
    one, two = await open_socket_stream(near), await open_socket_stream(far)
    OPEN.extend((one, two))
    return one, two


OPEN: list[SocketStream] = []


def run_on(loop: str, main: Coroutine[None, None, None]) -> None:
    """Run, then let go of every socket before the loop closes."""

    async def whole() -> None:
        try:
            await main
        finally:
            while OPEN:
                OPEN.pop().abort()
            for _ in range(3):
                await asyncio.sleep(0)

    run_on_loop(loop, whole())


async def drained(stream: SocketStream) -> None:
    """Read to the end."""
    while await stream.receive():
        pass


async def fill(stream: SocketStream) -> None:
    """Write far more than buffers hold."""
    for _ in range(1000):
        stream.write(b"x" * READ_SIZE)
        await stream.drain()


@both_loops
@pytest.mark.parametrize("where", ["_feed", "_feed_eof"])
def test_a_raise_in_a_receiving_callback_closes_the_socket(loop, where, monkeypatch):
    """The peer sees the end, the reader an error, and nobody waits for ever (RULINGS 11.3)."""

    async def main() -> None:
        reported: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        near, far = await streams()

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(near, where, broken)
        reading = asyncio.create_task(drained(near))
        await asyncio.sleep(0)
        far.write(b"x")
        await far.send_eof()
        with pytest.raises(StreamBroken) as failed:
            await reading
        assert failed.value.kind == "internal"
        with pytest.raises(StreamBroken):
            await drained(far)

    run_on(loop, main())


@both_loops
def test_a_raise_while_a_connection_is_made_closes_it(loop, monkeypatch):
    """connection_made is one of the callbacks after which the loops leave the socket open."""

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def broken(self: SocketStream) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(SocketStream, "_made", broken)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            server = await serve_streams(listener, lambda stream: asyncio.sleep(0), on_fault=lambda _: None)
            reader, writer = await asyncio.open_connection(*address)
            with pytest.raises((ConnectionError, EOFError)):
                raise EOFError if not await reader.read() else AssertionError
            writer.close()
            server.close()
            await server.wait_closed()

    run_on(loop, main())


@both_loops
def test_a_raise_in_a_handler_closes_its_connection_and_is_reported(loop):
    """The task of a connection runs under the last guard; the listener goes on."""

    async def main() -> None:
        faults: list[BaseException] = []

        async def handler(stream: SocketStream) -> None:
            await stream.receive()
            raise ZeroDivisionError

        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            server = await serve_streams(listener, handler, on_fault=faults.append)
            for _ in range(2):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(b"x")
                with pytest.raises((ConnectionError, EOFError)):
                    raise EOFError if not await reader.read() else AssertionError
                writer.close()
            server.close()
            await server.wait_closed()
        assert [type(fault) for fault in faults] == [ZeroDivisionError] * 2

    run_on(loop, main())


@both_loops
@families
def test_a_reset_raises_and_wakes_whoever_watches(loop, family):
    """The watcher is told once, though nobody reads."""

    async def main() -> None:
        near, far = await streams(family)
        told = asyncio.Event()
        near.on_broken(told.set)
        if family == "unix":
            near.abort()
        else:
            far.abort()
        await told.wait()
        with pytest.raises(StreamBroken):
            await near.receive()
        with pytest.raises(StreamBroken):
            await near.drain()

    run_on(loop, main())


@both_loops
def test_an_aborted_message_never_looks_whole(loop):
    """abort() after data: the peer gets a reset, not a clean end (HTTP/1.0 bodies end with the connection)."""

    async def main() -> None:
        near, far = await streams()
        near.write(b"half")
        assert await far.receive() == b"half"
        near.abort()
        with pytest.raises(StreamBroken):
            await far.receive()

    run_on(loop, main())


@both_loops
@families
def test_a_reader_that_does_not_read_holds_the_writer_back(loop, family):
    """At most the high-water mark and one read are taken; the writer's drain waits, then times out and cuts."""

    async def main() -> None:
        near, far = await streams(family)
        near.write_timeout = 0.05
        with pytest.raises(StreamBroken) as broken:
            await fill(near)
        assert broken.value.kind == "write-timeout"
        assert far.bytes_in <= HIGH_WATER + READ_SIZE

    run_on(loop, main())


@both_loops
def test_a_slow_reader_is_no_stall(loop):
    """As long as some bytes are taken, drain() goes on waiting past write_timeout."""

    async def main() -> None:
        near, far = await streams()
        near.write_timeout = 0.2
        total = 24 * 1024 * 1024
        got = 0

        async def write() -> None:
            for _ in range(total // READ_SIZE):
                near.write(b"x" * READ_SIZE)
                await near.drain()
            await near.close()

        writing = asyncio.create_task(write())
        while piece := await far.receive(1 << 20):
            got += len(piece)
            await asyncio.sleep(0)
        await writing
        assert got == total

    run_on(loop, main())


@both_loops
def test_a_silent_peer_times_out_and_the_stream_goes_on(loop):
    """idle-timeout ends one wait, not the stream."""

    async def main() -> None:
        near, far = await streams()
        near.read_timeout = 0.02
        with pytest.raises(StreamBroken) as broken:
            await near.receive()
        assert broken.value.kind == "idle-timeout"
        far.write(b"late")
        near.read_timeout = 5
        assert await near.receive() == b"late"

    run_on(loop, main())


@both_loops
@families
def test_each_side_ends_by_itself(loop, family):
    """After one side's end the other can still send, and both ends are clean."""

    async def main() -> None:
        near, far = await streams(family)
        near.write(b"question")
        await near.send_eof()
        assert await far.receive() == b"question"
        assert await far.receive() == b""
        far.write(b"answer")
        await far.close()
        assert await near.receive() == b"answer"
        assert await near.receive() == b""
        await near.close()

    run_on(loop, main())


@both_loops
def test_received_bytes_come_without_waiting_and_put_back_ones_first(loop):
    """receive_nowait and unread; sizes are respected."""

    async def main() -> None:
        near, far = await streams()
        far.write(b"abcdef")
        assert await near.receive(2) == b"ab"
        near.unread(b"AB")
        while len(data := near.receive_nowait() or b"") < 6:
            near.unread(data + await near.receive(1))
        assert data == b"ABcdef"

    run_on(loop, main())


@both_loops
@families
@pytest.mark.parametrize("ends", [False, True], ids=["a byte", "an end"])
def test_what_waits_in_the_kernel_is_no_silence(loop, family, ends):
    """silent() sees what the loop has not looked at yet, and what it does not look at while reading is paused."""

    async def main() -> None:
        ours, theirs = connected(family)
        near = await open_socket_stream(ours)
        OPEN.append(near)
        near.pause_reading()
        await asyncio.sleep(0)
        assert near.silent()
        if ends:
            theirs.shutdown(socket.SHUT_WR)
        else:
            theirs.sendall(b"x")
        assert not near.silent()
        assert near.receive_nowait() is None
        assert await near.receive() == (b"" if ends else b"x")
        assert near.silent() is not ends
        theirs.close()

    run_on(loop, main())


@both_loops
def test_sockets_send_at_once(loop):
    """TCP_NODELAY is set however the socket was made (RULINGS 11.8)."""

    async def main() -> None:
        near, far = connected()
        one, two = await open_socket_stream(near), await open_socket_stream(far)
        OPEN.extend((one, two))
        for sock in (near, far):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert one.peer.startswith("127.0.0.1:")

    run_on(loop, main())


@both_loops
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_engine_on_real_sockets_answers_any_split(loop, step):
    """Two pipelined requests over a real socket, in pieces, are two answers and a clean end."""

    async def main() -> None:
        async def handler(stream: SocketStream) -> None:
            connection = ServerConnection(stream)
            while (head := await connection.next_head()) is not None:
                body = b""
                while (piece := await connection.read_body()) is not None:
                    body += piece
                await connection.respond(ResponseHead(200, "OK", "1.1", ()), head.target.encode() + body)
            await connection.close()

        raw = (
            b"POST /1 HTTP/1.1\r\nHost: ok.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            b"GET /2 HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n"
        )
        faults: list[BaseException] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            server = await serve_streams(listener, handler, on_fault=faults.append)
            peer = await open_socket_stream(socket.create_connection(address))
            for at in range(0, len(raw), step):
                peer.write(raw[at : at + step])
                await asyncio.sleep(0)
            got = b""
            while piece := await peer.receive():
                got += piece
            assert got == (
                b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n/1abc"
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n/2"
            )
            await peer.close()
            server.close()
            await server.wait_closed()
        assert faults == []

    run_on(loop, main())
