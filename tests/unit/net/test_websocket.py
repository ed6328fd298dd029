"""The WebSocket relay: what ends it first, then what passes."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from net import turns as turns_module
from net.stream import StreamBroken
from net.websocket import MessageRefused, WebSocketLimits, relay
from tests.support.streams import MemoryStream


def frame(opcode: int, payload: bytes = b"", *, masked: bool) -> bytes:
    length = bytes([len(payload)]) if len(payload) < 126 else bytes([126]) + len(payload).to_bytes(2)
    if masked:
        return bytes([0x80 | opcode, length[0] | 0x80]) + length[1:] + b"\0\0\0\0" + payload
    return bytes([0x80 | opcode]) + length + payload


@asynccontextmanager
async def relayed(**more):
    client, near = MemoryStream.pair()
    far, origin = MemoryStream.pair()
    task = asyncio.create_task(relay(near, far, **more))
    yield client, origin, task
    await task


@pytest.mark.parametrize(
    ("from_client", "raw", "reason"),
    [
        (True, frame(1, b"x", masked=False), "bad-protocol"),
        (True, b"GET / HTTP/1.1\r\n", "bad-protocol"),
        (False, frame(1, b"x", masked=True), "upstream-protocol"),
        (True, frame(2, bytes(2000), masked=True), "body-too-large"),
        (False, frame(2, bytes(2000), masked=False), "response-too-large"),
    ],
)
async def test_a_frame_that_must_not_pass_cuts_both_sides(from_client, raw, reason):
    """Not one byte of it passes."""
    async with relayed(limits=WebSocketLimits(frame_bytes=1000)) as (client, origin, task):
        sender, receiver = (client, origin) if from_client else (origin, client)
        sender.write(raw)
        with pytest.raises(StreamBroken):
            await receiver.receive()
        with pytest.raises(StreamBroken):
            await sender.receive()
    assert (await task).error == reason


@pytest.mark.parametrize("limits", [WebSocketLimits(idle_timeout=0.02), WebSocketLimits(total_timeout=0.02)])
async def test_silence_and_length_of_life_are_bounded(limits):
    """Nobody speaks, or it has lasted too long: limit-reached, both cut."""
    async with relayed(limits=limits) as (client, origin, task):
        with pytest.raises(StreamBroken):
            await client.receive()
        with pytest.raises(StreamBroken):
            await origin.receive()
    assert (await task).error == "limit-reached"


async def test_bytes_are_bounded_over_both_directions():
    """The piece that would pass the bound does not pass."""
    async with relayed(limits=WebSocketLimits(total_bytes=20)) as (client, origin, task):
        client.write(frame(1, b"12345", masked=True))
        assert len(await origin.receive()) == 11
        origin.write(frame(1, b"12345678", masked=False))
        with pytest.raises(StreamBroken):
            await client.receive()
    assert (await task).error == "limit-reached"


async def test_each_direction_has_a_bound_of_its_own():
    """What `limits:` of a rule say: the piece that would pass the bound does not pass."""
    for from_client, reason in ((True, "body-too-large"), (False, "response-too-large")):
        async with relayed(limits=WebSocketLimits(up_bytes=15, down_bytes=15)) as (client, origin, task):
            sender, receiver = (client, origin) if from_client else (origin, client)
            sender.write(frame(1, b"12345678", masked=from_client))
            assert await receiver.receive()
            sender.write(frame(1, b"12345678", masked=from_client))
            with pytest.raises(StreamBroken):
                await receiver.receive()
        assert (await task).error == reason


async def test_what_an_inspector_refuses_does_not_pass():
    """Both sides are cut with its reason before a byte of the piece."""

    async def no(data: bytes) -> bytes:
        raise MessageRefused("placeholder-misuse", "found")

    async with relayed(inspect_up=no) as (client, origin, task):
        client.write(frame(1, b"x", masked=True))
        with pytest.raises(StreamBroken):
            await origin.receive()
        with pytest.raises(StreamBroken):
            await client.receive()
    assert ((await task).error, (await task).detail) == ("placeholder-misuse", "found")


@pytest.mark.parametrize("from_client", [True, False])
async def test_frames_that_take_long_leave_others_a_turn(from_client, monkeypatch):
    """Thousands of them in one read are checked in portions that get smaller; all of them pass, in order."""
    monkeypatch.setattr(turns_module, "PORTION_SECONDS", -1.0)
    flood = frame(10, masked=from_client) * 20_000 + frame(1, b"end", masked=from_client)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with relayed() as (client, origin, _):
        beside = asyncio.ensure_future(other())
        sender, receiver = (client, origin) if from_client else (origin, client)
        sender.write(flood)
        assert await receiver.read_exactly(len(flood)) == flood
        beside.cancel()
        await sender.close()
        await receiver.close()
    assert turns >= len(flood) // 4096


async def test_a_close_that_nobody_answers_ends_it():
    """After a Close silence is short: limit-reached, both cut."""
    async with relayed(limits=WebSocketLimits(closing_timeout=0.02)) as (client, origin, task):
        client.write(frame(8, b"\x03\xe8", masked=True))
        assert await origin.read_exactly(8)
        with pytest.raises(StreamBroken):
            await origin.receive()
    assert (await task).error == "limit-reached"


async def test_after_the_closing_handshake_we_hang_up_where_nobody_does():
    """Both sent their Close and keep the connection: cut after a while, and that is a good end."""
    async with relayed(limits=WebSocketLimits(closing_timeout=0.02)) as (client, origin, task):
        client.write(frame(8, b"\x03\xe8", masked=True))
        origin.write(frame(8, b"\x03\xe8", masked=False))
        assert await client.read_exactly(4)
        with pytest.raises(StreamBroken):
            await client.receive()
    assert (await task).error is None


async def test_a_close_arrives_although_its_sender_drops_the_connection():
    """Many servers send Close and reset: the client still reads the Close, and the end is a good one."""
    async with relayed() as (client, origin, task):
        origin.write(frame(8, b"\x03\xe8", masked=False))
        assert await client.read_exactly(4) == frame(8, b"\x03\xe8", masked=False)
        origin.abort()
        assert await client.receive() == b""
        client.abort()
    assert (await task).error is None


async def test_a_side_that_vanishes_is_named():
    """The origin gone without a closing handshake: upstream-protocol; the client gone: client-gone."""
    for index, reason in ((0, "client-gone"), (1, "upstream-protocol")):
        async with relayed() as ends:
            ends[index].abort()
        assert (await ends[2]).error == reason


async def test_a_fault_in_the_byte_count_cuts_both_and_is_raised():
    """A budget that breaks is a fault, not an allowance."""

    def broken(count: int) -> None:
        raise ZeroDivisionError

    client, near = MemoryStream.pair()
    far, origin = MemoryStream.pair()
    client.write(frame(1, b"x", masked=True))
    with pytest.raises(ZeroDivisionError):
        await relay(near, far, on_bytes=broken)
    with pytest.raises(StreamBroken):
        await origin.receive()
    with pytest.raises(StreamBroken):
        await client.receive()


async def test_frames_pass_unchanged_both_ways_until_the_closing_handshake():
    """Text, a long binary frame, ping, pong, close: byte for byte, and counted (T13)."""
    async with relayed() as (client, origin, task):
        up = frame(1, b"hello", masked=True) + frame(9, b"p", masked=True) + frame(8, b"\x03\xe8", masked=True)
        down = frame(2, bytes(9000), masked=False) + frame(10, b"p", masked=False) + frame(8, b"\x03\xe8", masked=False)
        for at in range(0, len(up), 3):
            client.write(up[at : at + 3])
        origin.write(down)
        assert await origin.read_exactly(len(up)) == up
        assert await client.read_exactly(len(down)) == down
        await origin.close()
        await client.send_eof()
    result = await task
    assert result.error is None
    assert (result.bytes_up, result.bytes_down) == (len(up), len(down))
    assert (result.messages_up, result.messages_down, result.frames_up) == (1, 1, 3)
