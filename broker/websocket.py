"""A credentialed WebSocket after its 101: whole messages, read both ways before they pass (RULINGS 7.5).

    worker --frames of the hand-off--> HandoffStream --relay--> upstream
                                                 up:   no placeholder in any message; masked anew, with keys of ours
                                                 down: every message scrubbed, masked at the same length

Nothing is compressed: the extension is never offered upstream. A message waits until it is whole, up to MESSAGE_BYTES;
control frames pass between its frames. What must not pass ends the connection before any byte of it; the client is
told by a Close of ours. What a secret spread over several messages shows is not found (docs/limits.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from broker.handoffside import HandoffSide
from broker.scrub import Patterns, Scrubber, slices
from net.stream import READ_SIZE, ByteStream, StreamBroken
from net.websocket import MessageRefused, WebSocketLimits, WebSocketResult, relay
from rules.authority import LONGEST_SPELLING, holds_placeholder
from rules.decision import Restrictions
from rules.names import Owner
from wire.handoff import AnswerData, AnswerEnd
from wire.heads import HeadRefused
from wire.websocket import Frame, MessageReader, close_frame

MESSAGE_BYTES: Final = 8 << 20
"""Largest message, and so the most that one direction holds."""
HELD_BYTES: Final = 128 << 20
HELD_BYTES_OF_ONE: Final = 32 << 20
"""What all conversations of one executor may hold of unfinished messages, and those of one sandbox."""
ECHOED_MESSAGES: Final = 3
"""Messages with a secret in them that end the connection; as many disarm the credential (RULINGS 7.1)."""
_PIECE: Final = 64 * 1024
"""Read at once between two turns of the loop."""

_CLOSE_CODES: Final = {
    "placeholder-misuse": 1008,
    "secret-echoed": 1008,
    "limit-reached": 1008,
    "bad-protocol": 1002,
    "body-too-large": 1009,
    "response-too-large": 1009,
    "upstream-protocol": 1011,
}
"""What the client is told by (RFC 6455 7.4.1). A client that is gone is told nothing."""


class Waiting:
    """What the conversations of one executor hold, by (tenant, sandbox)."""

    def __init__(self, total: int = HELD_BYTES, one: int = HELD_BYTES_OF_ONE) -> None:
        self._bounds = (total, one)
        self._total = 0
        self._by_owner: Counter[Owner] = Counter()

    def change(self, owner: Owner, before: int, now: int) -> None:
        """A conversation of `owner` holds `now` bytes instead of `before`. Raises MessageRefused past a bound."""
        self._total += now - before
        self._by_owner[owner] += now - before
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        total, one = self._bounds
        if now > before and (self._total > total or self._by_owner[owner] > one):
            raise MessageRefused("limit-reached", "too much is held of messages that are not whole")


class CredentialedSocket:
    """One upgraded call. `bytes_up`, `bytes_down` and `hits` are right at any moment, also after a cut."""

    def __init__(
        self,
        side: HandoffSide,
        upstream: ByteStream,
        *,
        patterns: Patterns,
        restrictions: Restrictions,
        random: Callable[[int], bytes],
        on_echo: Callable[[int], None],
        waiting: Waiting,
        owner: Owner,
        rest: Callable[[], Awaitable[None]],
    ) -> None:
        """`waiting` is the executor's own, `owner` (tenant, sandbox) the key in it.

        `rest` is awaited between two slices of work.

        `random` gives masking keys; `on_echo(hits)` is told of each message in which places were masked.
        """
        self._side = side
        self._upstream = upstream
        self._limits = WebSocketLimits(
            frame_bytes=MESSAGE_BYTES,
            message_bytes=MESSAGE_BYTES,
            up_bytes=restrictions.request_bytes,
            down_bytes=restrictions.response_bytes,
        )
        self._up = _Searched(_Share(waiting, owner), random, rest, inert=restrictions.placeholders_inert)
        self._down = _Scrubbed(_Share(waiting, owner), patterns, rest, on_echo)
        self.told = False
        """The client got a Close of ours: nothing is left to say on the hand-off."""

    @property
    def bytes_up(self) -> int:
        return self._up.seen

    @property
    def bytes_down(self) -> int:
        return self._down.seen

    @property
    def hits(self) -> int:
        return self._down.hits

    async def run(self) -> WebSocketResult:
        """Relay to the end; both sides are closed then. Never raises for what peers do."""
        try:
            result = await relay(
                HandoffStream(self._side),
                self._upstream,
                limits=self._limits,
                inspect_up=self._up,
                inspect_down=self._down,
            )
        finally:
            self._up.share.give_back()
            self._down.share.give_back()
        code = _CLOSE_CODES.get(result.error or "")
        if code is not None and not self._down.closed:
            # Whole messages only were passed on, so that a Close of ours stands between two of them.
            with contextlib.suppress(StreamBroken):
                await self._side.answer(AnswerData(close_frame(code, f"Refused by Exeat policy: {result.error}")))
                await self._side.answer(AnswerEnd())
                self.told = True
        return result


class _Share:
    """One direction's part of what is held."""

    def __init__(self, waiting: Waiting, owner: Owner) -> None:
        self._waiting = waiting
        self._owner = owner
        self._size = 0

    def take(self, size: int) -> None:
        """It is `size` bytes now. Raises MessageRefused."""
        before, self._size = self._size, size
        self._waiting.change(self._owner, before, size)

    def give_back(self) -> None:
        self.take(0)


class _Searched:
    """Up: messages as they are under masks of our own (RFC 6455 5.3), unless one holds a placeholder.

    What is searched includes the end of the message before, so that a placeholder in two messages is one.
    """

    def __init__(
        self, share: _Share, random: Callable[[int], bytes], rest: Callable[[], Awaitable[None]], *, inert: bool
    ) -> None:
        self.share = share
        self._rest = rest
        self._reader = MessageReader()
        self._random = random
        self._inert = inert
        self._before = b""
        self.seen = 0

    async def __call__(self, data: bytes) -> bytes:
        self.seen += len(data)
        out: list[bytes] = []
        units = self._reader.feed(data)
        self.share.take(self._reader.held)
        for unit in units:
            payload = b"".join(frame.payload for frame in unit)
            if not self._inert and await self._finds(payload, alone=unit[0].control):
                raise MessageRefused("placeholder-misuse", "a placeholder in a WebSocket message")
            out += [frame.encode(mask=self._random(len(frame.mask))) for frame in unit]
        return b"".join(out)

    async def _finds(self, payload: bytes, *, alone: bool) -> bool:
        text = payload if alone else self._before + payload
        for start in range(0, len(text), _PIECE):
            if start:
                await self._rest()
            if holds_placeholder(text[max(0, start - LONGEST_SPELLING) : start + _PIECE]):
                return True
        if not alone:
            self._before = text[-LONGEST_SPELLING:]
        return False


class _Scrubbed:
    """Down: messages with every promised form of a guarded value masked. Control frames too: they carry 125 bytes."""

    def __init__(
        self,
        share: _Share,
        patterns: Patterns,
        rest: Callable[[], Awaitable[None]],
        on_echo: Callable[[int], None],
    ) -> None:
        self.share = share
        self._rest = rest
        self._patterns = patterns
        self._on_echo = on_echo
        self._reader = MessageReader()
        self._echoed = 0
        self.seen = 0
        self.hits = 0
        self.closed = False

    async def __call__(self, data: bytes) -> bytes:
        self.seen += len(data)
        out: list[bytes] = []
        units = self._reader.feed(data)
        self.share.take(self._reader.held)
        for unit in units:
            out += await self._clean(unit)
            self.closed = self.closed or unit[0].closes
        return b"".join(out)

    async def _clean(self, unit: tuple[Frame, ...]) -> list[bytes]:
        payload = b"".join(frame.payload for frame in unit)
        scrubber = Scrubber(self._patterns)
        pieces: list[bytes] = []
        for part in slices(payload):
            if pieces:
                await self._rest()
            pieces.append(scrubber.feed(part))
        pieces.append(scrubber.finish())
        if scrubber.hits:
            self._count(scrubber.hits)
        clean = memoryview(b"".join(pieces))
        out: list[bytes] = []
        at = 0
        for frame in unit:
            out.append(frame.encode(bytes(clean[at : at + len(frame.payload)])))
            at += len(frame.payload)
        return out

    def _count(self, hits: int) -> None:
        self.hits += hits
        self._echoed += 1
        self._on_echo(hits)
        if self._echoed >= ECHOED_MESSAGES:
            raise MessageRefused("secret-echoed", "an upstream that sends the secret back again and again")


class HandoffStream:
    """The worker's end of an upgraded hand-off as a side of net.websocket.relay."""

    def __init__(self, side: HandoffSide) -> None:
        self._side = side
        self._queued = bytearray()
        self._ended = False
        self.read_timeout: float | None = None
        self.share = side.share

    async def receive(self, max_bytes: int = READ_SIZE) -> bytes:
        """The next bytes of the client, b"" at its end. Raises StreamBroken. `max_bytes` is the frames' own bound."""
        try:
            async with asyncio.timeout(self.read_timeout):
                return await self._side.read_body() or b""
        except TimeoutError:
            raise StreamBroken("idle-timeout") from None
        except HeadRefused as refused:
            raise StreamBroken("closed", refused.detail) from None
        except StreamBroken:
            if self._ended:
                return b""  # our end came first: the worker has nothing left to say
            raise

    def write(self, data: bytes) -> None:
        self._queued += data

    async def drain(self) -> None:
        if self._queued:
            data = bytes(self._queued)
            self._queued.clear()
            await self._side.send_data(data)

    async def send_eof(self) -> None:
        """The upstream has ended: so has the answer."""
        if not self._ended:
            self._ended = True
            await self.drain()
            await self._side.finish()

    def abort(self) -> None:
        self._side.stop()

    async def close(self) -> None:
        """The hand-off is closed by who opened it; here the answer ends."""
        try:
            await self.send_eof()
        except StreamBroken:
            self._side.abort()
