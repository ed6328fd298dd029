"""The HTTP/2 adapter on socket pairs: the real session and layers, a lane that the test plays, a client on h2."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st
from mitmproxy.proxy import commands
from mitmproxy.proxy.server_hooks import ClientConnectedHook

from net.fdchannel import socket_pair
from net.stream import ByteStream, StreamBroken, open_socket_stream
from proxy import mitm_adapter, mitm_selftest
from proxy.mitm_adapter import (
    FRAME_BYTES,
    TABLE_BYTES,
    UNREADABLE_HEAD,
    AdapterFault,
    FrameLengths,
    Session,
    check_version,
    stream_bodies,
    translatable,
)
from proxy.mitm_selftest import SelfTestFailed, self_test
from tests.support.properties import tried
from tests.support.rows import every_row

PSEUDO = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"ok.test"), (b":path", b"/x")]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Bench:
    """A running session, its client, and what it opened into the lane."""

    def __init__(self) -> None:
        self.lane: asyncio.Queue[ByteStream] = asyncio.Queue()
        self.streams: list[ByteStream] = []
        self.events: list[h2.events.Event] = []
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, validate_outbound_headers=False)
        )

    async def __aenter__(self) -> Bench:
        near, far = socket_pair()
        self.client = await open_socket_stream(near)
        self.running = asyncio.ensure_future(Session(await open_socket_stream(far), self.dial).run())
        self.h2.initiate_connection()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for stream in (self.client, *self.streams):
            stream.abort()
        await asyncio.sleep(0)

    async def dial(self) -> ByteStream:
        near, far = socket_pair()
        lane = await open_socket_stream(far)
        self.streams.append(lane)
        self.lane.put_nowait(lane)
        return await open_socket_stream(near)

    def ask(self, *more: tuple[bytes, bytes], pseudo: list[tuple[bytes, bytes]] = PSEUDO, end: bool = True) -> int:
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, [*pseudo, *more], end_stream=end)
        self.flush()
        return number

    def flush(self) -> None:
        self.client.write(self.h2.data_to_send())

    async def head(self) -> bytes:
        """The next request as the lane sees it, answered."""
        lane = await self.lane.get()
        seen = b""
        while b"\r\n\r\n" not in seen:
            seen += await lane.receive()
        lane.write(OK)
        return seen

    async def until[E: h2.events.Event](self, kind: type[E]) -> E:
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
            data = await self.client.receive()
            assert data, "the connection ended"
            self.events += self.h2.receive_data(data)
            self.flush()

    async def until_closed(self) -> None:
        try:
            while await self.client.receive():
                pass
        except StreamBroken:
            pass


# --- heads ----------------------------------------------------------------------------------------------------------

UNTRANSLATABLE = [
    ([(b"x-a", b"b\r\nSmuggled: 1")], "a line end in a value"),
    ([(b"x-a", b"b\nc")], "a bare LF"),
    ([(b"x-a", b"b\rc")], "a bare CR"),
    ([(b"x-a", b"\x00")], "NUL"),
    ([(b"x-a", b"\x7f")], "DEL"),
    ([(b"x a", b"1")], "a space in a name"),
    ([(b"x\r\na", b"1")], "a line end in a name"),
    ([(b"x:a", b"1")], "a colon in a name"),
    ([(b"x\xe9", b"1")], "a name beyond ASCII"),
    ([(b"", b"1")], "no name"),
    ([(b"host", b"evil.test")], "a Host that is not :authority"),
    ([(b"host", b"ok.test"), (b"host", b"evil.test")], "one of two Hosts that is not"),
    ([(b"content-length", b"7")], "a length and no body"),
]


@every_row(("fields", "sentence"), UNTRANSLATABLE)
def test_a_head_that_lines_cannot_say_is_none(fields: list[tuple[bytes, bytes]], sentence: str) -> None:
    """B064: nothing of it may become HTTP/1.1."""
    assert translatable(PSEUDO + fields, ended=True) is None, sentence


@every_row("name", [b":method", b":authority", b":path", b":scheme"])
@every_row("value", [b"a b", b"/x\r\nX: y", b"\xc3\xa9", b"http"])
def test_a_pseudo_header_is_visible_ascii_and_the_scheme_https(name: bytes, value: bytes) -> None:
    """A space in a path would be a third word of the request line."""
    head = [(key, value if key == name else old) for key, old in PSEUDO]
    assert (translatable(head) is None) == (value != b"http" or name == b":scheme")


def test_a_plain_head_stays_as_it_is() -> None:
    """Order, case of values and repeated fields are the lane's to judge."""
    head = [*PSEUDO, (b"x-a", b"B\tc"), (b"x-a", b"\xe9"), (b"host", b"ok.test"), (b"content-length", b"0")]
    assert translatable(head, ended=True) == head


@tried()
@given(st.lists(st.integers(0, 300), max_size=8), st.lists(st.integers(1, 40)), st.booleans())
def test_frame_lengths_are_seen_at_any_split(sizes: list[int], cuts: list[int], large: bool) -> None:
    """However the bytes come, a frame over the bound is seen with its head, and nothing else is."""
    raw = b"P" * 24 + b"".join(size.to_bytes(3) + bytes(6 + size) for size in sizes)
    if large:
        raw += (FRAME_BYTES + 1).to_bytes(3) + bytes(6)
    frames, at, fits = FrameLengths(), 0, True
    for cut in [*cuts, len(raw)]:
        fits = fits and frames.fit(raw[at : at + cut])
        at += cut
    assert fits == (not large)


# --- failing closed ---------------------------------------------------------------------------------------------------


async def test_a_hook_of_another_purpose_raises() -> None:
    """WebSocket, raw TCP, CONNECT and whatever a new version may bring."""
    with pytest.raises(AdapterFault):
        stream_bodies(ClientConnectedHook(None))  # type: ignore[arg-type]


async def test_a_command_of_another_purpose_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers ask for something that has no place here: both sides are aborted, and run() says why."""

    def odd(self: object, event: object) -> object:
        yield commands.RequestWakeup(1.0)

    monkeypatch.setattr(mitm_adapter._Layer, "_handle_event", odd)
    async with Bench() as bench:
        await bench.until_closed()
        with pytest.raises(AdapterFault):
            await bench.running
        assert bench.streams == []


async def test_the_self_test_passes_with_the_real_hook_and_dispatcher() -> None:
    """What gates the process's readiness holds now."""
    await self_test()


async def test_the_self_test_fails_where_an_exception_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """mitmproxy's own habit (log and go on) would be found before the first client."""

    def swallow(self: Session, command: commands.Command) -> None:
        with contextlib.suppress(RuntimeError):
            original(self, command)

    original = Session._carry_out
    monkeypatch.setattr(Session, "_carry_out", swallow)
    monkeypatch.setattr(mitm_selftest, "SECONDS", 0.5)
    with pytest.raises(SelfTestFailed):
        await self_test()


async def test_the_self_test_fails_without_flow_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog that is not seen is memory that is not bounded."""
    monkeypatch.setattr(mitm_adapter.BoundedServer, "backlog", lambda self, number: 0)
    with pytest.raises(SelfTestFailed, match="memory"):
        await self_test()


def test_another_mitmproxy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin is exact: this is its inside (RULINGS 11.6)."""
    monkeypatch.setattr(mitm_adapter.version, "VERSION", "12.3.2")
    with pytest.raises(AdapterFault):
        check_version()


async def test_a_refused_head_is_shown_to_the_lane_as_one_that_it_refuses() -> None:
    """Nothing of it is forwarded; the lane records the refusal; the stream is reset and others go on."""
    async with Bench() as bench:
        bench.ask(pseudo=[(key, b"http" if key == b":scheme" else value) for key, value in PSEUDO])
        reset = await bench.until(h2.events.StreamReset)
        assert reset.error_code == h2.errors.ErrorCodes.PROTOCOL_ERROR
        lane = await bench.lane.get()
        assert await lane.receive() == UNREADABLE_HEAD
        lane.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await lane.send_eof()
        bench.ask()
        assert (await bench.head()).startswith(b"GET /x HTTP/1.1\r\nHost: ok.test\r\n")


async def test_a_client_that_resets_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2023-44487: open and reset, again and again."""
    monkeypatch.setattr(mitm_adapter, "MAX_RESETS", 3)
    async with Bench() as bench:
        for _ in range(4):
            bench.h2.reset_stream(bench.ask())
        bench.flush()
        ended = await bench.until(h2.events.ConnectionTerminated)
        assert ended.error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM


async def test_a_connection_carries_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """mitmproxy keeps a little of each."""
    monkeypatch.setattr(mitm_adapter, "MAX_REQUESTS", 2)
    async with Bench() as bench:
        for _ in range(2):
            bench.ask()
            await bench.head()
            await bench.until(h2.events.StreamEnded)
        bench.ask()
        assert (await bench.until(h2.events.ConnectionTerminated)).error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
        assert await (await bench.lane.get()).receive() == UNREADABLE_HEAD


async def test_what_a_client_offers_to_remember_is_not_what_we_keep() -> None:
    """A table of 2 GiB for our heads would be kept and searched: after 150 answers each took 300 ms of everybody's."""
    async with Bench() as bench:
        bench.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 2**31})
        for number in range(20):
            bench.ask()
            lane = await bench.lane.get()
            await lane.receive()
            fields = "".join(f"X-{number}-{place}: {'v' * 200}\r\n" for place in range(20))
            lane.write(f"HTTP/1.1 200 OK\r\n{fields}Content-Length: 0\r\n\r\n".encode())
            answered = await bench.until(h2.events.ResponseReceived)
            assert answered.headers is not None
            assert len(answered.headers) > 20
            await bench.until(h2.events.StreamEnded)
        encoder = session_of(bench)._server.h2_conn.encoder
        assert encoder.header_table_size == TABLE_BYTES
        assert len(encoder.header_table.dynamic_entries) <= TABLE_BYTES // 32


async def test_settings_that_change_to_and_fro_are_not_kept() -> None:
    """h2 notes each change of the table until the next head: a client that never asks would fill our memory."""
    async with Bench() as bench:
        for _ in range(500):
            bench.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 0})
            bench.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 4096})
        bench.ask()
        lane = await bench.lane.get()
        assert len(session_of(bench)._server.h2_conn.encoder.table_size_changes) <= 2
        await lane.receive()
        lane.write(OK)
        await bench.until(h2.events.StreamEnded)


async def test_settings_that_mean_nothing_end_the_connection() -> None:
    """65,536 of them are 50 MiB of ours for 400 KiB of the client's."""
    async with Bench() as bench:
        unknown = b"".join(struct.pack("!HL", name, 1) for name in range(0x1000, 0x1100))
        bench.client.write(bench.h2.data_to_send() + len(unknown).to_bytes(3) + b"\x04" + bytes(5) + unknown)
        ended = await bench.until(h2.events.ConnectionTerminated)
        assert ended.error_code == h2.errors.ErrorCodes.PROTOCOL_ERROR


def session_of(bench: Bench) -> Session:
    """The session that the bench runs."""
    session = bench.running.get_coro().cr_frame.f_locals["self"]  # type: ignore[union-attr]
    assert isinstance(session, Session)
    return session


async def test_nothing_of_a_finished_request_is_kept() -> None:
    """mitmproxy's layers would keep one connection object for each request."""
    async with Bench() as bench:
        for _ in range(5):
            bench.ask()
            await bench.head()
            await bench.until(h2.events.StreamEnded)
        session = session_of(bench)
        while session._upstreams:
            await asyncio.sleep(0)
        assert len(session._layer.connections) == 1
        assert session._layer.streams == {}


async def test_an_answer_that_ends_early_is_reset() -> None:
    """A message that the lane cuts is never a whole one, and no page of mitmproxy's takes its place."""
    async with Bench() as bench:
        bench.ask()
        lane = await bench.lane.get()
        await lane.receive()
        lane.abort()
        await bench.until(h2.events.StreamReset)
        bench.ask()
        lane = await bench.lane.get()
        await lane.receive()
        lane.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await bench.until(h2.events.DataReceived)
        lane.abort()
        await bench.until(h2.events.StreamReset)


async def test_a_body_is_acknowledged_only_when_the_lane_took_it() -> None:
    """A lane that does not read closes the client's window; mitmproxy would have taken everything."""
    async with Bench() as bench:
        number = bench.ask(end=False)
        lane = await bench.lane.get()
        assert b"transfer-encoding: chunked" in await lane.receive()
        lane.pause_reading()
        sent = 0
        try:
            async with asyncio.timeout(1.0):
                while sent < 64 << 20:
                    room = min(bench.h2.local_flow_control_window(number), FRAME_BYTES)
                    if room:
                        bench.h2.send_data(number, bytes(room))
                        bench.flush()
                        sent += room
                    else:
                        await bench.until(h2.events.WindowUpdated)
        except TimeoutError:
            pass
        assert sent < 4 << 20
        taken = 0
        while taken < sent:
            taken += len(await lane.receive())
        await bench.until(h2.events.WindowUpdated)
