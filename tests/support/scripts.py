"""Scripted answers for tests/support/origins.py: a list of steps, and a WebSocket echo.

    origin.on("/events", script(READ, sse("one"), gate, sse("two"), CLOSE))

A step is bytes (sent exactly), a Gate (waited at), or one of READ, CLOSE, ABORT.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from enum import Enum

from tests.support.origins import Exchange, Handler, head
from tests.support.signals import Gate


class Step(Enum):
    READ = "read the request's body to its end"
    CLOSE = "close the connection after what was sent"
    ABORT = "reset the connection"


READ, CLOSE, ABORT = Step.READ, Step.CLOSE, Step.ABORT


def script(*steps: bytes | Gate | Step) -> Handler:
    """A handler that takes `steps` in order. The request body stays unread unless READ is among them."""

    async def run(exchange: Exchange) -> None:
        for step in steps:
            match step:
                case bytes():
                    await exchange.send(step)
                case Gate():
                    await step.passage()
                case Step.READ:
                    await exchange.read_body()
                case Step.CLOSE:
                    exchange.keep_alive = False
                case Step.ABORT:
                    exchange.abort()

    return run


def text(body: str | bytes, status: int = 200, *headers: tuple[str, str]) -> bytes:
    """The bytes of a whole answer with a length."""
    data = body.encode() if isinstance(body, str) else body
    return head(status, (*headers, ("Content-Length", str(len(data))))) + data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunked(
    pieces: Sequence[bytes], trailers: tuple[tuple[str, str], ...] = (), headers: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """The bytes of a whole chunked answer."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in trailers).encode("latin-1")
    opening = head(200, (*headers, ("Transfer-Encoding", "chunked")))
    return opening + b"".join(chunk(piece) for piece in pieces) + b"0\r\n" + lines + b"\r\n"


def sse(events: Sequence[str], gates: Sequence[Gate] = ()) -> Handler:
    """Server-sent events as one chunk each; before event n the handler passes gates[n], if there is one."""
    steps: list[bytes | Gate | Step] = [
        READ,
        head(200, (("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"))),
    ]
    for number, event in enumerate(events):
        if number < len(gates):
            steps.append(gates[number])
        steps.append(chunk(f"data: {event}\n\n".encode()))
    return script(*steps, b"0\r\n\r\n")


def early(status: int = 403, body: str = "early") -> Handler:
    """Answers at the head, without reading the body, and closes."""

    async def run(exchange: Exchange) -> None:
        exchange.keep_alive = False
        await exchange.answer(status, body.encode())

    return run


def slow_read(gate: Gate, first: int = 1) -> Handler:
    """Reads at least `first` bytes of the body, waits at the gate, then reads the rest and answers its length."""

    async def run(exchange: Exchange) -> None:
        while exchange.request.body_bytes < first and await exchange.read_piece():
            pass
        exchange.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await gate.passage()
        exchange.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await exchange.read_body()
        await exchange.answer(200, str(exchange.request.body_bytes).encode())

    return run


_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


async def websocket_echo(exchange: Exchange) -> None:
    """RFC 6455 without extensions: sends data frames back, answers ping and close."""
    key = (exchange.request.header("sec-websocket-key") or "").encode()
    accept = base64.b64encode(hashlib.sha1(key + _MAGIC).digest()).decode()
    exchange.keep_alive = False
    await exchange.send(
        head(
            101,
            (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)),
            "Switching Protocols",
        )
    )
    while True:
        first, second = await exchange.reader.readexactly(2)
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(await exchange.reader.readexactly(2 if size == 126 else 8))
        mask = await exchange.reader.readexactly(4) if second & 0x80 else bytes(4)
        masked = await exchange.reader.readexactly(size)
        data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(masked))
        opcode = first & 0x0F
        answer = 0x8A if opcode == 9 else first
        if opcode != 10:
            await exchange.send(_frame(answer, data))
        if opcode == 8:
            return


def _frame(first: int, data: bytes) -> bytes:
    size = len(data)
    if size < 126:
        return bytes((first, size)) + data
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2) + data
    return bytes((first, 127)) + size.to_bytes(8) + data
