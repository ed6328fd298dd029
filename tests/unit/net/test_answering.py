"""Length-prefixed questions and answers over a stream: bounded in messages, connections and time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from net.answering import MESSAGES_PER_CONNECTION, StreamAnswers
from net.stream import serve_streams

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def echo(message: bytes) -> bytes | None:
    return None if message == b"silence" else message


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


@asynccontextmanager
async def answering(connections: int = 16) -> AsyncIterator[Connect]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    faults: list[BaseException] = []
    answers = StreamAnswers(echo, connections)
    server = await serve_streams(listener, answers.serve, on_fault=faults.append)
    opened: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append(writer)
        return reader, writer

    yield connect
    for writer in opened:
        writer.close()
    server.close()
    assert faults == []


async def test_a_message_that_gets_silence_ends_its_connection() -> None:
    """What has no answer is not worth a connection."""
    async with answering() as connect:
        reader, writer = await connect()
        writer.write(framed(b"one") + framed(b"silence") + framed(b"two"))
        assert await reader.read() == framed(b"one")


async def test_a_connection_over_the_bound_is_cut_and_has_room_once_another_ended() -> None:
    """Connections that say nothing hold no more than their bound of descriptors."""
    async with answering(connections=2) as connect:
        held = [await connect() for _ in range(2)]
        for reader, writer in held:
            writer.write(framed(b"a"))
            assert await reader.readexactly(3) == framed(b"a")
        reader, writer = await connect()
        writer.write(framed(b"b"))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(3)
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(60):
            while True:
                reader, writer = await connect()
                writer.write(framed(b"c"))
                try:
                    assert await reader.readexactly(3) == framed(b"c")
                    break
                except (ConnectionError, asyncio.IncompleteReadError):
                    continue


async def test_pipelined_messages_are_answered_up_to_the_bound() -> None:
    """Then the connection ends."""
    async with answering() as connect:
        reader, writer = await connect()
        writer.write(framed(b"x") * (MESSAGES_PER_CONNECTION + 10))
        got = b""
        try:
            while piece := await reader.read(4096):
                got += piece
        except ConnectionError:
            pass
        assert got == framed(b"x") * MESSAGES_PER_CONNECTION
