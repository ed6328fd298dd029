"""HTTP/2 of one client connection, taken apart by mitmproxy into HTTP/1.1 requests for our own lane. No opinion here.

    client (HTTP/2, already without TLS) -> Session -> one stream per request, clear HTTP/1.1 -> lanes/http1.py

mitmproxy's layers are machines without sockets: events in, commands out. `Session` is their driver, in the place of
mitmproxy's own, which logs exceptions and goes on (11 of 11 hooks fail open). It knows the few commands of this one
purpose; no addon, no master, no TLS, no dialling is there. Docs: docs/decisions/0007.

Rules:
1. Whatever is raised while an event is carried out ends the connection: both sides are aborted, nothing is forwarded.
   A command or hook that is not expected raises.
2. What is not HTTP/2 cannot be parsed; upgrades, CONNECT and tunnels do not exist.
3. A head that would not survive as HTTP/1.1 lines (B064) is reset; the lane is shown a head that it refuses, so that
   the refusal is recorded where all others are.
4. Memory: an upstream stream is read only while at most STREAM_UNSENT bytes of its answer wait for the client; a
   client's DATA is acknowledged only when the lane has room (mitmproxy acknowledges at once, without bound).
5. Bodies are streamed; trailers are dropped (HTTP/1.1 trailers make mitmproxy fail); a message that the lane cuts
   reaches the client as a reset stream, never as a whole answer.
6. Connections take turns of the loop (net/turns.py), and what a client sent is taken in by about a millisecond's worth.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Buffer, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
from mitmproxy import version
from mitmproxy.connection import Client, Connection, ConnectionState
from mitmproxy.options import Options
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import CommandGenerator
from mitmproxy.proxy.layers.http import HttpLayer, HTTPMode, HttpStream
from mitmproxy.proxy.layers.http._base import ReceiveHttp
from mitmproxy.proxy.layers.http._events import ErrorCode, RequestData, ResponseProtocolError
from mitmproxy.proxy.layers.http._hooks import (
    HttpErrorHook,
    HttpRequestHeadersHook,
    HttpRequestHook,
    HttpResponseHeadersHook,
    HttpResponseHook,
)
from mitmproxy.proxy.layers.http._http2 import Http2Server, StreamState
from mitmproxy.proxy.layers.http._http_h2 import BufferedH2Connection
from mitmproxy.proxy.mode_specs import ProxyMode

from net.stream import ByteStream, StreamBroken
from net.turns import Portion, rest

PINNED: Final = "12.3.1"
"""The only version whose inside this was written and tested for."""
MAX_STREAMS: Final = 100
"""Open streams of one connection."""
MAX_REQUESTS: Final = 10_000
"""Of one connection in its life; mitmproxy keeps a little of each."""
MAX_RESETS: Final = 500
"""Streams that one client resets before its connection ends (CVE-2023-44487)."""
STREAM_UNSENT: Final = 24 * 1024
READ_BYTES: Final = 16 * 1024
"""Together 40 KiB a stream: 100 stalled streams hold 4 MB."""
FRAME_BYTES: Final = 16 * 1024
UNREAD_BYTES: Final = 4 * 1024 * 1024
"""What a client may have under way towards us, all streams together; a single one has the default 65,535."""
TABLE_BYTES: Final = 4096
"""Of the heads that we sent and refer back to. A client may offer 4 GiB: we would keep them, and search them all."""
MAX_SETTINGS: Final = 64
"""Different ones of a client. Seven have a meaning (RFC 9113 6.5.2 and 8441); h2 keeps whatever is sent."""
MAX_NOTES: Final = 8
NOTE_SECONDS: Final = 5.0
UNREADABLE_HEAD: Final = b"\x00\r\n\r\n"
"""Shown to the lane in the place of a head that must not be shown."""

Dial = Callable[[], Awaitable[ByteStream]]
"""A new stream into our own lane, for one request. Raises net.stream.NetError and OSError."""
Hook = Callable[[commands.StartHook], None]


class AdapterFault(Exception):
    """mitmproxy did what this adapter does not expect of it."""


def stream_bodies(hook: commands.StartHook) -> None:
    """The only hook: bodies are passed on as they come. Raises AdapterFault for hooks of another purpose."""
    match hook:
        case HttpRequestHeadersHook():
            hook.flow.request.stream = True
        case HttpResponseHeadersHook() if hook.flow.response is not None:
            hook.flow.response.stream = True
        case HttpRequestHook() | HttpResponseHook() | HttpErrorHook():
            pass
        case _:
            raise AdapterFault(f"the hook {hook.name} has no place here")


def check_version() -> None:
    """Raises AdapterFault where another mitmproxy is installed (RULINGS 11.6: exact pin)."""
    if version.VERSION != PINNED:
        raise AdapterFault(f"mitmproxy {PINNED} is needed")


class Session:
    """One client connection. `run` serves it to its end; every stream is closed when it returns or raises."""

    def __init__(self, client: ByteStream, dial: Dial, *, hook: Hook = stream_bodies) -> None:
        self._client = client
        self._dial = dial
        self._hook = hook
        self._conn = Client(
            peername=("client", 0),
            sockname=("exeat", 0),
            timestamp_start=time.time(),
            alpn=b"h2",
            state=ConnectionState.OPEN,
            proxy_mode=ProxyMode.parse("regular"),
        )
        context = Context(self._conn, _options())
        context.server.address = ("exeat", 80)  # never dialled: every connection is self._dial()
        self._layer = _Layer(context, HTTPMode.transparent)
        self._server = BoundedServer(context.fork(), self._note_refused)
        self._layer.connections[self._conn] = self._server
        self._upstreams: dict[Connection, ByteStream] = {}
        self._events: deque[events.Event] = deque()
        self._feeding = False
        self._moved = asyncio.Event()
        """Set whenever something was sent, read or ended: who waits for room looks again."""
        self._over = asyncio.Event()
        self._fault: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._acknowledging: set[int] = set()
        self._notes = 0

    async def run(self) -> None:
        """Serve. Raises what went wrong inside, after both sides were aborted."""
        try:
            self._spawn(self._read_client())
            await self._over.wait()
            if self._fault is None:
                while self._notes:  # the worker knows this connection only as long as it is open
                    self._moved.clear()
                    await self._moved.wait()
                await self._client.close()  # a GOAWAY may still be on its way
        finally:
            self._abort()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    def backlog(self) -> int:
        """Bytes of answers that wait for the client's window."""
        return sum(self._server.backlog(number) for number in tuple(self._server.h2_conn.stream_buffers))

    # --- the two directions ---

    async def _read_client(self) -> None:
        client = self._client
        client.read_timeout = None  # the worker watches for idle connections
        portion, backlog = Portion(first=1024, most=READ_BYTES), b""
        self._feed(events.Start())
        while not self._over.is_set():
            try:
                await client.drain()
                data = backlog or await client.receive(READ_BYTES)
            except StreamBroken:
                break
            if not data:
                break
            data, backlog = data[: portion.size], data[portion.size :]
            begun = time.perf_counter()
            self._feed(events.DataReceived(self._conn, data))
            crowded = portion.took(time.perf_counter() - begun)
            self._moved.set()
            if crowded:  # a read has room for hundreds of heads and thousands of pings (rule 6)
                await rest(client.share)
            for number in self._server.owed.keys() - self._acknowledging:
                self._acknowledging.add(number)
                self._spawn(self._acknowledge(number))
        self._conn.state = ConnectionState.CLOSED
        self._feed(events.ConnectionClosed(self._conn))
        self._over.set()

    async def _serve_upstream(self, command: commands.OpenConnection) -> None:
        conn = command.connection
        stream = await self._dial()
        try:
            stream.read_timeout = None  # the lane has the deadlines
            self._upstreams[conn] = stream
            conn.timestamp_start = time.time()
            conn.state = ConnectionState.OPEN
            self._feed(events.OpenConnectionCompleted(command, None))
            self._moved.set()
            while True:
                await self._room(conn)
                try:
                    data = await stream.receive(READ_BYTES)
                    stream.pause_reading()
                except StreamBroken:
                    break
                if not data:
                    break
                self._feed(events.DataReceived(conn, data))
                try:
                    await self._client.drain()
                except StreamBroken:
                    break
            conn.state = ConnectionState.CLOSED
            number = self._stream_of(conn)
            self._feed(events.ConnectionClosed(conn))
            # One connection, one request: nothing of either is needed again, and mitmproxy would keep both.
            self._layer.connections.pop(conn, None)
            if number is not None:
                self._layer.streams.pop(number, None)
        finally:
            self._upstreams.pop(conn, None)
            stream.abort()
            self._moved.set()

    async def _room(self, conn: Connection) -> None:
        """Wait while too much of this answer waits for the client (rule 4)."""
        while conn.state is ConnectionState.OPEN:
            number = self._stream_of(conn)
            if number is None or self._server.backlog(number) <= STREAM_UNSENT:
                return
            self._moved.clear()
            await self._moved.wait()

    async def _acknowledge(self, number: int) -> None:
        """Give the client its window back once the lane took what it sent (rule 4)."""
        try:
            while (stream := self._layer.streams.get(number)) is not None:
                upstream = self._upstreams.get(stream.context.server)
                if upstream is None:
                    self._moved.clear()
                    await self._moved.wait()
                    continue
                try:
                    await upstream.drain()
                except StreamBroken:
                    upstream.abort()
                break
        finally:
            self._acknowledging.discard(number)
        data = self._server.acknowledge(number)
        if data:
            self._client.write(data)

    def _stream_of(self, conn: Connection) -> int | None:
        return next((number for number, one in self._layer.streams.items() if one.context.server is conn), None)

    # --- the machine ---

    def _feed(self, event: events.Event) -> None:
        """Let the layers see `event` and carry out what they ask for. Whatever is raised ends the connection."""
        if self._fault is not None:
            return
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                for command in self._layer.handle_event(self._events.popleft()):
                    self._carry_out(command)
        finally:
            self._feeding = False

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.SendData():
                if command.connection is self._conn:
                    self._client.write(command.data)
                elif (stream := self._upstreams.get(command.connection)) is not None:
                    stream.write(command.data)
            case commands.OpenConnection():
                self._spawn(self._serve_upstream(command))
            case commands.CloseTcpConnection() if command.half_close:
                raise AdapterFault("half a connection cannot be closed here")
            case commands.CloseConnection():
                if command.connection is self._conn:
                    self._over.set()
                elif (stream := self._upstreams.get(command.connection)) is not None:
                    command.connection.state = ConnectionState.CLOSED
                    stream.abort()
                    self._moved.set()
            case commands.StartHook():
                self._hook(command)
                if isinstance(command, HttpResponseHook):
                    self._answered(command)
                if command.blocking:
                    self._events.append(events.HookCompleted(command))
            case commands.Log():
                pass  # written from hostile bytes; what counts is recorded by the lane
            case _:
                raise AdapterFault(f"the command {type(command).__name__} has no place here")

    def _answered(self, hook: HttpResponseHook) -> None:
        """The answer is whole. A request body that is still coming is given up, so that the answer can end.

        mitmproxy would wait for all of it first; a refusal of an upload would never be seen.
        """
        for number, stream in self._layer.streams.items():
            if stream.flow is hook.flow and stream.client_state != stream.state_done:
                stream.client_state = stream.state_done
                self._server.given_up.add(number)
                if (upstream := self._upstreams.get(stream.context.server)) is not None:
                    upstream.abort()
                return

    # --- refused heads (rule 3) ---

    def _note_refused(self) -> None:
        if self._notes >= MAX_NOTES:
            raise AdapterFault("too many unreadable requests at once")
        self._notes += 1
        self._spawn(self._show_unreadable())

    async def _show_unreadable(self) -> None:
        try:
            stream = await self._dial()
            try:
                stream.write(UNREADABLE_HEAD)
                async with asyncio.timeout(NOTE_SECONDS):
                    while await stream.receive():
                        pass
            except (StreamBroken, TimeoutError):
                pass
            finally:
                stream.abort()
        finally:
            self._notes -= 1
            self._moved.set()

    # --- tasks ---

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            if self._fault is None:
                self._fault = error
            self._abort()
            self._over.set()

    def _abort(self) -> None:
        self._client.abort()
        for stream in tuple(self._upstreams.values()):
            stream.abort()


class BoundedServer(Http2Server):
    """mitmproxy's HTTP/2 towards the client, with flow control, bounds, and heads checked before they are lines."""

    def __init__(self, context: Context, on_refused: Callable[[], None]) -> None:
        super().__init__(context)
        self.h2_conn = _BoundedConnection(self.h2_conf)
        self.owed: dict[int, int] = {}
        """Stream -> bytes received and not yet acknowledged."""
        self.given_up: set[int] = set()
        """Streams answered before their request ended."""
        self._on_refused = on_refused
        self._frames = FrameLengths()
        self._requests = 0
        self._resets = 0

    def backlog(self, number: int) -> int:
        """Bytes of this stream's answer that wait for the client's window."""
        return sum(len(piece.data) for piece in self.h2_conn.stream_buffers.get(number, ()))

    def acknowledge(self, number: int) -> bytes:
        """Acknowledge what is owed for a stream; return the bytes to send."""
        owed = self.owed.pop(number, 0)
        if not owed or self.h2_conn.state_machine.state is h2.connection.ConnectionState.CLOSED:
            return b""
        self.h2_conn.acknowledge_received_data(owed, number)
        return self.h2_conn.data_to_send()

    def _handle_event(self, event: events.Event) -> CommandGenerator[None]:
        if isinstance(event, ResponseProtocolError):
            # A reset; mitmproxy would make a page of its own, which looks like an answer of somebody's.
            event = replace(event, code=ErrorCode.KILL)
        if isinstance(event, events.DataReceived) and not self._frames.fit(event.data):
            yield from self.protocol_error("too large", h2.errors.ErrorCodes.FRAME_SIZE_ERROR)
            return
        yield from super()._handle_event(event)
        for number in tuple(self.given_up):
            if number in self.h2_conn.stream_buffers or self.is_open_for_us(number):
                continue
            self.given_up.discard(number)
            if not self.is_closed(number):
                # RFC 9113 8.1: the answer is whole, the rest of the request is not wanted.
                self.h2_conn.reset_stream(number, h2.errors.ErrorCodes.NO_ERROR)
                self.streams.pop(number, None)
                yield commands.SendData(self.conn, self.h2_conn.data_to_send())

    def handle_h2_event(self, event: h2.events.Event) -> CommandGenerator[bool]:
        match event:
            case h2.events.RequestReceived():
                assert event.headers is not None
                assert event.stream_id is not None
                self._requests += 1
                if self._requests > MAX_REQUESTS:
                    yield from self.protocol_error("too many", h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
                    return True
                headers = translatable(event.headers, ended=event.stream_ended is not None)
                if headers is None:
                    self._on_refused()
                    self.h2_conn.reset_stream(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
                    return False
                event.headers = headers
                return (yield from super().handle_h2_event(event))
            case h2.events.DataReceived():
                assert event.stream_id is not None
                assert event.flow_controlled_length is not None
                self.owed[event.stream_id] = self.owed.get(event.stream_id, 0) + event.flow_controlled_length
                if event.data and self.streams.get(event.stream_id) is StreamState.HEADERS_RECEIVED:
                    yield ReceiveHttp(RequestData(event.stream_id, bytes(event.data)))
                return False
            case h2.events.TrailersReceived():
                return False  # RFC 9110 6.5.1: trailers may be discarded
            case h2.events.StreamReset():
                self._resets += 1
                if self._resets > MAX_RESETS:
                    yield from self.protocol_error("too many", h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
                    return True
                return (yield from super().handle_h2_event(event))
            case _:
                return (yield from super().handle_h2_event(event))

    def protocol_error(
        self, message: str, error_code: int = h2.errors.ErrorCodes.PROTOCOL_ERROR
    ) -> CommandGenerator[None]:
        self._on_refused()
        # The client learns the code only: `message` quotes its own bytes.
        yield from super().protocol_error("refused", error_code)


class FrameLengths:
    """Walks over frame heads: h2 checks a length only after it kept that many bytes, up to 16 MiB."""

    def __init__(self) -> None:
        self._skip = 24  # the preface
        self._head = b""

    def fit(self, data: bytes) -> bool:
        """False once a frame announces more than FRAME_BYTES."""
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
            else:
                step = min(9 - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                if len(self._head) == 9:
                    self._skip = int.from_bytes(self._head[:3])
                    self._head = b""
                    if self._skip > FRAME_BYTES:
                        return False
            at += step
        return True


class _BoundedConnection(BufferedH2Connection):
    """The windows that we mean, in the place of 2 GiB each."""

    def __init__(self, config: h2.config.H2Configuration) -> None:
        super().__init__(config)
        self.local_settings.initial_window_size = 65_535
        self.local_settings.max_frame_size = FRAME_BYTES
        self.local_settings.max_concurrent_streams = MAX_STREAMS
        self.max_inbound_frame_size = FRAME_BYTES
        self.local_settings.acknowledge()

    def receive_data(self, data: Buffer) -> list[h2.events.Event]:
        """As h2's; afterwards what the client has us remember is bounded. Raises h2.exceptions.ProtocolError."""
        found: list[h2.events.Event] = super().receive_data(data)
        encoder = self.encoder
        if encoder.header_table_size > TABLE_BYTES:
            encoder.header_table_size = TABLE_BYTES
        # RFC 7541 4.2: of several changes the smallest and the last one are told with the next head.
        if len(changes := encoder.table_size_changes) > 2:
            encoder.table_size_changes = [min(changes), changes[-1]]
        if len(self.remote_settings) > MAX_SETTINGS:
            raise h2.exceptions.ProtocolError("too many settings")
        return found

    def initiate_connection(self) -> None:
        h2.connection.H2Connection.initiate_connection(self)
        self.increment_flow_control_window(UNREAD_BYTES - self.inbound_flow_control_window)


class _Stream(HttpStream):
    """What arrives for a stream after its end is dropped, not a crash; a body of unknown length becomes chunks."""

    def start_request_stream(self) -> CommandGenerator[None]:
        if "content-length" not in self.flow.request.headers:
            # HTTP/2 needs no length. In HTTP/1.1 unframed bytes would be the next request.
            self.flow.request.headers["transfer-encoding"] = "chunked"
        yield from super().start_request_stream()

    def state_done(self, _: events.Event) -> CommandGenerator[None]:
        yield from ()


class _Layer(HttpLayer):
    """mitmproxy's HTTP layer with our streams."""

    def make_stream(self, stream_id: int) -> CommandGenerator[None]:
        self.streams[stream_id] = _Stream(self.context.fork(), stream_id)
        yield from self.event_to_child(self.streams[stream_id], events.Start())


def translatable(headers: Sequence[tuple[bytes, bytes]], *, ended: bool = False) -> list[tuple[bytes, bytes]] | None:
    """The fields of a request head as HTTP/1.1 can say them, or None where it cannot (B064).

    Refused: bytes below space other than a tab in values, DEL, anything but visible ASCII in names and pseudo-header
    values, a scheme other than https, a Host that is not :authority. `ended`: no body follows, so that a
    Content-Length would be waited for in vain.
    """
    found: list[tuple[bytes, bytes]] = []
    authority = b""
    for raw_name, raw_value in headers:
        name, value = bytes(raw_name), bytes(raw_value)
        if not name or any(not 0x21 <= byte <= 0x7E for byte in name):
            return None
        if name.startswith(b":"):
            if any(not 0x21 <= byte <= 0x7E for byte in value) or (name == b":scheme" and value != b"https"):
                return None
            if name == b":authority":
                authority = value
        elif b":" in name or any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in value):
            return None
        if ended and name == b"content-length" and value != b"0":
            return None
        found.append((name, value))
    if authority and any(name == b"host" and value != authority for name, value in found):
        return None  # h2 refuses this as well; which of the two would be judged must not depend on it
    return found


def _options() -> Options:
    options = Options()
    for name, kind, value in (
        ("validate_inbound_headers", bool, True),
        ("normalize_outbound_headers", bool, True),
        ("store_streamed_bodies", bool, False),
        ("keep_host_header", bool, True),
        ("stream_large_bodies", str, ""),
        ("body_size_limit", str, ""),
        ("connection_strategy", str, "lazy"),
    ):
        options.add_option(name, kind, value, "")
    options.update(rawtcp=False, websocket=False)
    return options
