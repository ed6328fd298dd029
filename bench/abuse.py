"""One sandbox that misbehaves: `python -m bench.abuse KIND < FIELDS`, until it is killed.

Prints what it did each second. Everything is sent from 127.0.0.2, so that before identity is known it is another
source than its neighbour. Nothing here is measured: answers are only counted, to see that the abuse takes place.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import h2.config
import h2.connection
import uvloop

SOURCE: Final = "127.0.0.2"
PROXY: Final = "127.0.0.1"
LONGEST_WAIT: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What is told of the ground. `ports` are those of the origins by host; `token` is the sandbox's."""

    proxy: int
    token: str
    ca: str
    key: str
    ports: Mapping[str, int]
    counted: Counter[str] = field(default_factory=Counter)

    def authority(self, host: str) -> str:
        return f"{host}:{self.ports.get(host, 443)}"

    @property
    def identity(self) -> str:
        return "Proxy-Authorization: Basic " + base64.b64encode(f"session:{self.token}".encode()).decode()


type Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
type Abuse = Callable[[Fields], Awaitable[None]]


async def dial(fields: Fields) -> Pair:
    """A connection to the proxy, from the abuser's own address."""
    return await asyncio.open_connection(PROXY, fields.proxy, local_addr=(SOURCE, 0))


async def ask_tunnel(fields: Fields, host: str) -> tuple[Pair, bytes]:
    """CONNECT; the answer's head is returned as it came."""
    reader, writer = await dial(fields)
    authority = fields.authority(host)
    writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{fields.identity}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    return (reader, writer), head


async def tunnel(fields: Fields, host: str, alpn: str = "http/1.1") -> Pair:
    """TLS with the proxy inside a CONNECT."""
    (reader, writer), head = await ask_tunnel(fields, host)
    if b" 200 " not in head[:16]:
        writer.transport.abort()
        raise ConnectionError("CONNECT was refused")
    context = ssl.create_default_context(cafile=fields.ca)
    context.set_alpn_protocols([alpn])
    await writer.start_tls(context, server_hostname=host)
    return reader, writer


def head_of(fields: Fields, method: str, host: str, path: str, *lines: str) -> bytes:
    more = "".join(line + "\r\n" for line in lines)
    return f"{method} {path} HTTP/1.1\r\nHost: {fields.authority(host)}\r\n{more}\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> int:
    """Read one answer; its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        while (size := int(await reader.readline(), 16)) or (await reader.readline()) != b"\r\n":
            if size:
                await reader.readexactly(size + 2)
    elif b"content-length:" in lower:
        await reader.readexactly(int(lower.partition(b"content-length:")[2].split(b"\r\n")[0]))
    return int(head[9:12])


async def many(fields: Fields, count: int, one: Callable[[], Awaitable[str]]) -> None:
    """`one` over and over in `count` tasks; what it returns, or how it failed, is counted."""

    async def again() -> None:
        while True:
            try:
                async with asyncio.timeout(LONGEST_WAIT):
                    fields.counted[await one()] += 1
            except (OSError, ssl.SSLError, EOFError, TimeoutError, ValueError) as error:
                fields.counted[type(error).__name__] += 1
                await asyncio.sleep(0.005)

    await asyncio.gather(*(again() for _ in range(count)))


def kept(fields: Fields, host: str, request: Callable[[], bytes]) -> Callable[[], Awaitable[str]]:
    """The same request over kept-alive connections, one for each task that runs this."""
    mine: dict[object, Pair] = {}

    async def one() -> str:
        task = asyncio.current_task()
        pair = mine.pop(task, None) or await tunnel(fields, host)
        reader, writer = pair
        try:
            writer.write(request())
            await writer.drain()
            status = await answer(reader)
        except BaseException:
            writer.transport.abort()
            raise
        if reader.at_eof():
            writer.transport.abort()
        else:
            mine[task] = pair
        return str(status)

    return one


# --- the abuses ----------------------------------------------------------------------------------------------------


async def nothing(fields: Fields) -> None:
    """The control: a processor kept busy, and not a byte to the gateway. What that costs is no work of the gateway."""
    while True:
        for _ in range(10_000):
            pass
        await asyncio.sleep(0)
        fields.counted["rounds"] += 1


async def connections(fields: Fields) -> None:
    """As many connections as there may be, and asking for more."""
    held: list[asyncio.StreamWriter] = []

    async def one() -> str:
        (_, writer), head = await ask_tunnel(fields, "plain.bench.test")
        if b" 200 " in head[:16] and len(held) < 400:
            held.append(writer)
            return "open"
        writer.transport.abort()
        return head[9:12].decode()

    await many(fields, 32, one)


async def unidentified(fields: Fields) -> None:
    """Connections without a token, with a wrong one, and of other protocols."""
    first = (
        b"GET http://plain.bench.test/small HTTP/1.1\r\nHost: plain.bench.test\r\n\r\n",
        b"CONNECT plain.bench.test:443 HTTP/1.1\r\nProxy-Authorization: Bearer xt_wrong\r\n\r\n",
        b"\x05\x01\x00",
        b"\x16\x03\x01\x02\x00\x01",
    )
    turn = itertools.cycle(first)

    async def one() -> str:
        reader, writer = await dial(fields)
        writer.write(next(turn))
        got = await reader.read(64)
        writer.transport.abort()
        return got[9:12].decode("latin-1") or "closed"

    await many(fields, 60, one)


async def slow_heads(fields: Fields) -> None:
    """Heads that never end, a byte at a time, over sixty connections."""

    async def one() -> str:
        _, writer = await dial(fields)
        start = f"GET http://plain.bench.test/small HTTP/1.1\r\n{fields.identity}\r\nX: "
        for byte in (start + "a" * 60_000).encode():
            writer.write(bytes((byte,)))
            await asyncio.sleep(0)
            if writer.is_closing():
                return "closed"
        return "sent"

    await many(fields, 60, one)


async def big_bodies(fields: Fields) -> None:
    """Uploads of 64 MiB and downloads of 50 MB, as fast as they are taken."""
    block = random.Random(1).randbytes(1 << 16)

    async def up() -> str:
        reader, writer = await tunnel(fields, "sink.bench.test")
        writer.write(head_of(fields, "PUT", "sink.bench.test", "/upload", f"Content-Length: {64 << 20}"))
        for _ in range(1024):
            writer.write(block)
            await writer.drain()
        status = await answer(reader)
        writer.transport.abort()
        return f"up {status}"

    async def down() -> str:
        reader, writer = await tunnel(fields, "plain.bench.test")
        writer.write(head_of(fields, "GET", "plain.bench.test", "/large"))
        status = await answer(reader)
        writer.transport.abort()
        return f"down {status}"

    await asyncio.gather(many(fields, 8, up), many(fields, 8, down))


async def refusals(fields: Fields) -> None:
    """Denied requests over kept-alive connections, and denied CONNECTs."""
    await asyncio.gather(
        many(fields, 32, kept(fields, "plain.bench.test", lambda: head_of(fields, "GET", "plain.bench.test", "/no"))),
        many(fields, 16, lambda: denied_connect(fields)),
    )


async def denied_connect(fields: Fields) -> str:
    reader, writer = await dial(fields)
    writer.write(f"CONNECT denied.test:443 HTTP/1.1\r\nHost: denied.test:443\r\n{fields.identity}\r\n\r\n".encode())
    got = await reader.read(64)
    writer.transport.abort()
    return "connect " + (got[9:12].decode("latin-1") or "closed")


async def json_bombs(fields: Fields) -> None:
    """Bodies that are judged, made of what costs a parser most."""
    bombs = [b'{"op":"read","id":[' + b"1," * 4900 + b"1]}", b'{"op":"read","id":"' + b"\\u0041" * 40_000 + b'"}']
    bombs.append(b'{"op":"read",' + b" " * 250_000 + b'"id":"x"}')
    turn = itertools.cycle(bombs)

    def request() -> bytes:
        body = next(turn)
        lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        return head_of(fields, "POST", "plain.bench.test", "/ask", *lines) + body

    await many(fields, 16, kept(fields, "plain.bench.test", request))


async def handshakes(fields: Fields) -> None:
    """A CONNECT and a whole TLS handshake, again and again."""

    async def one() -> str:
        _, writer = await tunnel(fields, "plain.bench.test")
        writer.transport.abort()
        return "handshake"

    await many(fields, 32, one)


async def names(fields: Fields) -> None:
    """A name under a wildcard that nobody asked for before, each with its certificate, and a request."""

    async def one() -> str:
        host = f"n{os.urandom(8).hex()}.wild.bench.test"
        reader, writer = await tunnel(fields, host)
        writer.write(head_of(fields, "GET", host, "/small"))
        status = await answer(reader)
        writer.transport.abort()
        return str(status)

    await many(fields, 32, one)


async def tiny_chunks(fields: Fields) -> None:
    """Request bodies in chunks of one byte, sixteen connections at once."""
    piece = b"1\r\na\r\n" * 2000

    async def one() -> str:
        reader, writer = await tunnel(fields, "sink.bench.test")
        writer.write(head_of(fields, "PUT", "sink.bench.test", "/upload", "Transfer-Encoding: chunked"))
        for _ in range(100):
            writer.write(piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        status = await answer(reader)
        writer.transport.abort()
        return str(status)

    await many(fields, 16, one)


async def hostile_answers(fields: Fields) -> None:
    """Credentialed calls whose answers are nothing but escapes, which cost the scrubber most."""
    paths = itertools.cycle(("/percent", "/unicode", "/slashes", "/packed"))
    key = f"X-Api-Key: {fields.key}"
    request = lambda: head_of(fields, "GET", "keyed.bench.test", next(paths), key)  # noqa: E731
    await many(fields, 16, kept(fields, "keyed.bench.test", request))


async def websocket_frames(fields: Fields) -> None:
    """WebSockets full of frames without a byte in them, both ways."""
    empty = b"\x8a\x80" + bytes(4)
    block = empty * 4000

    async def one() -> str:
        reader, writer = await tunnel(fields, "sink.bench.test")
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}")
        writer.write(head_of(fields, "GET", "sink.bench.test", "/socket", *lines))
        head = await reader.readuntil(b"\r\n\r\n")
        for _ in range(50 if b" 101 " in head[:16] else 0):
            writer.write(block)
            await writer.drain()
        writer.transport.abort()
        return head[9:12].decode()

    await many(fields, 16, one)


async def http2_streams(fields: Fields) -> None:
    """HTTP/2: streams opened as fast as they may be, pings between them."""

    async def one() -> str:
        reader, writer = await tunnel(fields, "h2.bench.test", "h2")
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        client.initiate_connection()
        headers = [(b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/small")]
        headers.append((b":authority", fields.authority("h2.bench.test").encode()))
        done = 0
        while done < 5000:
            while client.open_outbound_streams < 100:
                client.send_headers(client.get_next_available_stream_id(), headers, end_stream=True)
                done += 1
            for _ in range(50):
                client.ping(bytes(8))
            writer.write(client.data_to_send())
            await writer.drain()
            if not (data := await reader.read(1 << 16)):
                break
            for event in client.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        writer.transport.abort()
        return "connection"

    await many(fields, 4, one)


async def requests(fields: Fields) -> None:
    """Nothing wrong but their number: permitted requests over two hundred connections."""
    request = lambda: head_of(fields, "GET", "plain.bench.test", "/small")  # noqa: E731
    await many(fields, 200, kept(fields, "plain.bench.test", request))


async def calls(fields: Fields) -> None:
    """The same with a credential: each is decided four times and written durably."""
    key = f"X-Api-Key: {fields.key}"
    request = lambda: head_of(fields, "GET", "keyed.bench.test", "/small", key)  # noqa: E731
    await many(fields, 100, kept(fields, "keyed.bench.test", request))


ABUSES: Final[Mapping[str, Abuse]] = {
    one.__name__: one
    for one in (
        nothing,
        connections,
        unidentified,
        slow_heads,
        big_bodies,
        refusals,
        json_bombs,
        handshakes,
        names,
        tiny_chunks,
        hostile_answers,
        websocket_frames,
        http2_streams,
        requests,
        calls,
    )
}


async def main() -> None:
    fields = Fields(**json.loads(sys.stdin.readline()))
    running = asyncio.ensure_future(ABUSES[sys.argv[1]](fields))
    while not running.done():
        await asyncio.wait([running], timeout=1.0)
        print(json.dumps(fields.counted), flush=True)
    running.result()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main())
