"""What of a request's body was read to judge it, and the client's side with that put in front again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from net.exchange import ClientSide
from net.stream import Headers
from rules.placeholders import CORE_LENGTH, find
from wire.heads import Framing, ResponseHead

WATCHED_BYTES: Final = 256 * 1024
"""Of a streamed body in which placeholders are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`data` are the bytes that were judged, `behind` those that were read after them; None: `data` is the whole."""

    data: bytes
    behind: bytes | None = None

    @property
    def whole(self) -> bytes | None:
        """The whole body, None where more of it streams."""
        return self.data if self.behind is None else None


class Resumed:
    """A ClientSide whose body begins with `ahead`, which was read from it before. Everything else is `side`'s."""

    def __init__(self, side: ClientSide, ahead: bytes) -> None:
        self._side = side
        self._ahead = ahead

    @property
    def request_trailers(self) -> Headers:
        return self._side.request_trailers

    async def read_body(self) -> bytes | None:
        if self._ahead:
            return self._take()
        return await self._side.read_body()

    def read_body_nowait(self) -> tuple[bytes | None, bool]:
        return (self._take(), True) if self._ahead else self._side.read_body_nowait()

    def _take(self) -> bytes:
        data, self._ahead = self._ahead, b""
        return data

    async def send_interim(self, head: ResponseHead) -> None:
        await self._side.send_interim(head)

    async def send_head(self, head: ResponseHead, framing: Framing) -> None:
        await self._side.send_head(head, framing)

    async def send_data(self, data: bytes) -> None:
        await self._side.send_data(data)

    async def flush(self) -> None:
        await self._side.flush()

    async def finish(self, trailers: Headers = ()) -> None:
        await self._side.finish(trailers)

    def abort(self) -> None:
        self._side.abort()

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        self._side.on_broken(callback)


class Watched(Resumed):
    """Resumed, and a look at the first WATCHED_BYTES that pass: a placeholder there is an alarm (RULINGS 4.4)."""

    def __init__(self, side: ClientSide, ahead: bytes = b"") -> None:
        super().__init__(side, ahead)
        self.found = False
        self._left = WATCHED_BYTES
        self._tail = b""

    async def read_body(self) -> bytes | None:
        piece = await super().read_body()
        self._look(piece)
        return piece

    def read_body_nowait(self) -> tuple[bytes | None, bool]:
        piece, ready = super().read_body_nowait()
        self._look(piece)
        return piece, ready

    def _look(self, piece: bytes | None) -> None:
        if piece and self._left > 0 and not self.found:
            text = self._tail + piece[: self._left]
            self.found = bool(find(text.decode("latin-1")))
            self._tail = text[-(CORE_LENGTH - 1) :]
            self._left -= len(piece)
