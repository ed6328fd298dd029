"""An origin that takes whatever comes: uploads of any framing, and WebSockets that it floods with empty frames.

python -m bench.sink FOLDER PORT        FOLDER/upstream.pem is its certificate and key
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import sys
from pathlib import Path

import uvloop

from bench.upstream import ADDRESS
from wire.websocket import accept_value

_FRAMES = b"\x8a\x00" * 8000
_END = b"\r\n0\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, EOFError, ValueError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lower = head.lower()
            if key := re.search(rb"sec-websocket-key: *(\S+)", head, re.IGNORECASE):
                accept = accept_value(key[1].decode())
                lines = f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
                writer.write(b"HTTP/1.1 101 Switching Protocols\r\n" + lines.encode())
                draining = asyncio.ensure_future(_discard(reader))
                while not draining.done():
                    writer.write(_FRAMES)
                    await writer.drain()
                break
            if b"transfer-encoding" in lower:
                tail = b"\r\n"
                while not tail.endswith(_END):
                    tail = (tail + await _some(reader))[-len(_END) :]
            elif length := re.search(rb"content-length: *(\d+)", lower):
                left = int(length[1])
                while left:
                    left -= len(await _some(reader, left))
            writer.write(_OK)
            await writer.drain()
    writer.transport.abort()


async def _some(reader: asyncio.StreamReader, most: int = 1 << 18) -> bytes:
    data = await reader.read(min(most, 1 << 18))
    if not data:
        raise EOFError
    return data


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 18):
            pass


async def main() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(sys.argv[1]) / "upstream.pem")
    server = await asyncio.start_server(_serve, ADDRESS, int(sys.argv[2]), ssl=context)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
