"""Passed sockets: one message, one stream socket; anything else is dropped and closed."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable

import pytest
import uvloop

from net.fdchannel import MAX_MESSAGE, ChannelBroken, FdChannel, channel_pair, socket_pair


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a coroutine on either loop."""

    def runner(coroutine: object) -> None:
        with asyncio.Runner(loop_factory=request.param) as loop:
            loop.run(coroutine)  # type: ignore[arg-type]

    return runner


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def rights(sock: socket.socket, message: bytes, *passed: socket.socket) -> None:
    """Send `message` with several descriptors, as a broken sender would."""
    numbers = array.array("i", [item.fileno() for item in passed])
    sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if passed else [])


def test_messages_without_exactly_one_stream_socket_are_dropped(run: Callable[..., None]) -> None:
    """No descriptor, two, or one of another kind: closed, and the next good message is delivered."""

    async def scenario() -> None:
        near, far = channel_pair()
        channel = FdChannel(far)
        ours, theirs = socket_pair()
        udp = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        before = open_descriptors()
        rights(near, b"none")
        rights(near, b"two", theirs, ours)
        rights(near, b"datagram", udp)
        rights(near, b"good", theirs)
        passed = await channel.receive()
        assert passed is not None
        assert passed[0] == b"good"
        assert open_descriptors() == before + 1
        assert not passed[1].get_inheritable()
        passed[1].close()
        for sock in (ours, theirs, udp, near):
            sock.close()
        assert await channel.receive() is None
        channel.close()

    run(scenario())


def test_a_socket_that_is_no_sequenced_channel_is_refused() -> None:
    """A stream has no message borders: it is no channel."""
    ours, theirs = socket_pair()
    with ours, theirs, pytest.raises(ChannelBroken):
        FdChannel(ours)


def test_a_peer_that_left_breaks_sending(run: Callable[..., None]) -> None:
    """Sending to nobody raises; too long or empty messages are not sent."""

    async def scenario() -> None:
        near, far = channel_pair()
        channel = FdChannel(near)
        ours, theirs = socket_pair()
        for message in (b"", b"x" * (MAX_MESSAGE + 1)):
            with pytest.raises(ChannelBroken):
                await channel.send(message, theirs)
        far.close()
        with pytest.raises(ChannelBroken):
            await channel.send(b"x", theirs)
        channel.close()
        channel.close()
        with pytest.raises(ChannelBroken):
            await channel.receive()
        ours.close()
        theirs.close()

    run(scenario())


def test_closing_wakes_whoever_waits(run: Callable[..., None]) -> None:
    """A waiting receive ends when its channel is closed."""

    async def scenario() -> None:
        near, far = channel_pair()
        channel = FdChannel(far)
        waiting = asyncio.ensure_future(channel.receive())
        await asyncio.sleep(0)
        channel.close()
        with pytest.raises(ChannelBroken):
            await waiting
        near.close()

    run(scenario())


def test_a_full_channel_waits_for_its_reader(run: Callable[..., None]) -> None:
    """Sending more than the kernel keeps waits, loses nothing and keeps the order."""

    async def scenario() -> None:
        near, far = channel_pair()
        sender, receiver = FdChannel(near), FdChannel(far)
        count = 400

        async def send() -> None:
            for number in range(count):
                ours, theirs = socket_pair()
                ours.close()
                await sender.send(b"%d" % number, theirs)
                theirs.close()

        sending = asyncio.ensure_future(send())
        for number in range(count):
            passed = await receiver.receive()
            assert passed is not None
            assert passed[0] == b"%d" % number
            passed[1].close()
        await sending
        sender.close()
        receiver.close()

    run(scenario())


def test_a_passed_socket_works_from_the_other_side(run: Callable[..., None]) -> None:
    """What was passed is the other end of what was kept."""

    async def scenario() -> None:
        near, far = channel_pair()
        sender, receiver = FdChannel(near), FdChannel(far)
        ours, theirs = socket_pair()
        await sender.send(b"handoff", theirs)
        theirs.close()
        passed = await receiver.receive()
        assert passed is not None
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, b"hello")
        assert await loop.sock_recv(passed[1], 16) == b"hello"
        ours.close()
        assert await loop.sock_recv(passed[1], 16) == b""
        passed[1].close()
        sender.close()
        receiver.close()

    run(scenario())
