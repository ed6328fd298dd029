"""The worker's side of a probe in a sandbox's network namespace (wire/probe.py, I28).

Only who has a capability in that namespace can mark packets, and no sandbox has one. So a marked connection is ours: it
is answered with a proof that it ended here, is never judged, and leaves no record and no count.
"""

from __future__ import annotations

from typing import Final

from net.stream import ByteStream, StreamBroken
from wire.probe import NONCE_BYTES, proof

SECONDS: Final = 5.0


async def answer_probe(stream: ByteStream, channel_key: bytes) -> None:
    """Read one nonce and answer it; whatever else comes, the stream is dropped. Never raises but CancelledError."""
    stream.read_timeout = stream.write_timeout = SECONDS
    nonce = b""
    try:
        while len(nonce) < NONCE_BYTES:
            piece = await stream.receive(NONCE_BYTES - len(nonce))
            if not piece:
                break
            nonce += piece
        if len(nonce) == NONCE_BYTES and channel_key:
            stream.write(proof(channel_key, nonce))
            await stream.close()
    except StreamBroken:
        pass
    finally:
        stream.abort()
