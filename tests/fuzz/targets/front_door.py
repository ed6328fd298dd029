"""The front door as a whole: whatever bytes a sandbox sends, what leaves was permitted and on record before (I21).

Real front door, gate and lanes in memory; see tests/support/frontdoor.py for what is permitted there.
"""

from __future__ import annotations

import asyncio

from tests.support.frontdoor import play
from tests.support.fuzzing import cuts

WORDS = (
    b"GET ", b"POST ", b"CONNECT ", b" HTTP/1.1\r\n", b"\r\n\r\n", b"Host: plain.test\r\n",
    b"Host: raw.test:443\r\n", b"http://plain.test/v1/", b"plain.test:80", b"raw.test:443", b"api.test:443",
    b"Content-Length: 5\r\n", b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\n", b"Connection: Upgrade\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n",
    b"Proxy-Authorization: Basic x\r\n", b"/v1/../admin", b"exeat.internal",
)  # fmt: skip
MAX_BYTES = 1024

_RUNNER = asyncio.Runner()


def check(data: bytes) -> bool:
    """See above."""
    return _RUNNER.run(_twice(data))


async def _twice(data: bytes) -> bool:
    whole = await play([data])
    whole.check()
    *_, pieces = cuts(data)
    seen = await play(pieces)
    seen.check()
    assert seen.agrees_with(whole), (seen, whole)
    return bool(whole.whole or whole.tunnels)
