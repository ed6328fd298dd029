"""`HandoffSide`: the worker's end of one hand-off as the engine sees it: the client of net.exchange.

One pump reads frames as long as the hand-off lives, so that a worker that cancels or dies is noticed in every
phase. What it reads of the body waits here, bounded; then the socket pushes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from net.framing import FrameStream
from net.stream import HIGH_WATER, Headers, StreamBroken
from net.turns import Share
from wire.frames import WireError
from wire.handoff import (
    DATA_CHUNK,
    Answer,
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    AnswerHead,
    FrameType,
    Refusal,
    Upgraded,
    encode_answer,
    frame_type,
)
from wire.heads import Framing, HeadRefused, Length, NoBody, ResponseHead


class HandoffSide:
    """net.exchange.ClientSide over hand-off frames, after the STATEMENT frame was taken."""

    def __init__(self, frames: FrameStream, *, has_body: bool, length: int | None) -> None:
        """`length`: exact bytes of body that the statement announced, None for chunked."""
        self._frames = frames
        self._length = length
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._total = 0
        self._ended = not has_body
        self._broken: Exception | None = None
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._on_broken: Callable[[], None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._aborted = False
        self.head_sent = False

    def start(self) -> None:
        """Begin to read frames."""
        self._pump = asyncio.get_running_loop().create_task(self._read())

    @property
    def share(self) -> Share | None:
        """What `take_turns` was given."""
        return self._frames.stream.share

    def take_turns(self, share: Share) -> None:
        """It is known whose this hand-off is: from now on its reader is woken in that sandbox's turn."""
        self._frames.stream.share = share

    @property
    def request_trailers(self) -> Headers:
        return ()

    async def read_whole(self, bound: int) -> bytes:
        """The judged body, read to its end. Raises StreamBroken, and HeadRefused past `bound` or off its length."""
        pieces: list[bytes] = []
        size = 0
        while (data := await self.read_body()) is not None:
            size += len(data)
            if size > bound:
                raise HeadRefused("body-not-judged", "the body is larger than what can be judged")
            pieces.append(data)
        return b"".join(pieces)

    async def read_ahead(self, size: int) -> bytes:
        """The first `size` bytes of the body, which are read again by who streams it. Raises as read_whole."""
        pieces: list[bytes] = []
        held = 0
        while held < size:
            data = await self.read_body()
            if data is None:
                raise HeadRefused("body-not-judged", "the body is shorter than what was judged of it")
            held += len(data)
            pieces.append(data)
        whole = b"".join(pieces)
        self._pieces.appendleft(whole)
        self._size += held
        if self._size >= HIGH_WATER:
            self._room.clear()
        return whole[:size]

    async def read_body(self) -> bytes | None:
        while True:
            data, ready = self.read_body_nowait()
            if ready:
                return data
            self._wake.clear()
            await self._wake.wait()

    def read_body_nowait(self) -> tuple[bytes | None, bool]:
        if self._pieces:
            data = self._pieces.popleft()
            self._size -= len(data)
            if self._size < HIGH_WATER:
                self._room.set()
            return data, True
        if self._broken is not None:
            raise self._broken
        return (None, True) if self._ended else (None, False)

    async def send_interim(self, head: ResponseHead) -> None:
        """Dropped: the lane answered Expect itself, and other interim answers stay out (RULINGS 11.11)."""

    async def send_head(self, head: ResponseHead, framing: Framing) -> None:
        match framing:
            case Length(size):
                length: int | None = size
            case NoBody():
                length = 0
            case _:
                length = None
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in head.headers
            if length == 0 or name.lower() != b"content-length"
        )
        self.head_sent = True
        if head.status == 101:
            # From here on the hand-off's body and data frames carry the upgraded connection's bytes.
            self._ended, self._length = False, None
            await self._send(Upgraded(headers=headers))
            return
        await self._send(AnswerHead(status=head.status, reason=head.reason, headers=headers, length=length))

    async def send_data(self, data: bytes) -> None:
        for start in range(0, len(data), DATA_CHUNK):
            await self._send(AnswerData(data[start : start + DATA_CHUNK]))

    async def flush(self) -> None:
        self._frames.flush()
        if not self._aborted:
            await self._frames.drain()

    async def finish(self, trailers: Headers = ()) -> None:
        await self._send(AnswerEnd())

    def abort(self) -> None:
        """Send nothing more of the answer; `close` says why."""
        self._aborted = True

    def stop(self) -> None:
        """abort(), and wake who waits for the worker's bytes: it gets StreamBroken."""
        self._aborted = True
        if self._broken is None:
            self._break(StreamBroken("closed", "the hand-off was cut"))

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        self._on_broken = callback
        if callback is not None and isinstance(self._broken, StreamBroken):
            self._on_broken = None
            callback()

    async def answer(self, answer: Answer) -> None:
        """Send one of our own answers (Continue). Raises StreamBroken."""
        self._aborted = False
        await self._send(answer)

    async def close(self, last: Refusal | AnswerAbort | None) -> None:
        """End the hand-off, with `last` as its last word where the answer is not whole. Never raises."""
        with contextlib.suppress(StreamBroken, WireError):
            if last is not None:
                self._frames.send(encode_answer(last))
                await self._frames.drain()
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        await self._frames.close()

    async def _send(self, answer: Answer) -> None:
        if self._aborted:
            raise StreamBroken("closed", "the hand-off was cut")
        self._frames.send(encode_answer(answer))
        await self._frames.drain()

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._frames.receive()
                if frame is None:
                    raise StreamBroken("closed", "the worker ended the hand-off")
                match frame_type(frame):
                    case FrameType.BODY if not self._ended:
                        self._take(frame.payload)
                    case FrameType.BODY_END if not self._ended and not frame.payload:
                        if self._length is not None and self._total != self._length:
                            raise HeadRefused("bad-framing", "the body is shorter than announced")
                        self._ended = True
                    case FrameType.CANCEL:
                        raise StreamBroken("closed", "the worker cancelled the hand-off")
                    case _:
                        raise StreamBroken("closed", "a frame out of place")
                self._wake.set()
                await self._room.wait()
        except (StreamBroken, HeadRefused) as error:
            self._break(error)
        except WireError:
            self._break(StreamBroken("closed", "the worker broke the hand-off's protocol"))

    def _take(self, data: bytes) -> None:
        if not data:
            return
        self._total += len(data)
        if self._length is not None and self._total > self._length:
            raise HeadRefused("bad-framing", "the body is longer than announced")
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= HIGH_WATER:
            self._room.clear()

    def _break(self, error: Exception) -> None:
        self._broken = error
        self._wake.set()
        callback, self._on_broken = self._on_broken, None
        if callback is not None and isinstance(error, StreamBroken):
            callback()
