"""The HTTP/1.1 engine: a connection towards a client (`ServerConnection`), one towards an origin (`ClientConnection`).

Map: the two connections; `MessageBody` (how a body is read); `_Inbox` (how a head is cut out of the stream);
`_second_request`, `_second_response` (llhttp's opinion).

Rules kept here (RULINGS 11.2-11.4): a head is parsed once, by wire.heads, and llhttp must see the same method, target
and fields in the same bytes; bodies are framed by our own decoder, because llhttp cannot be stopped between two
pipelined messages (decision 0002); a second request waits in the inbox until the first was answered; whatever is
ambiguous is refused and the connection closes; a wait happens only where no byte is buffered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools

from net.stream import DEFAULT_LIMITS, Body, ByteStream, Headers, Limits, StreamBroken
from net.turns import rest
from wire.chunked import LAST_CHUNK, ChunkedDecoder, encode_chunk
from wire.heads import (
    CHUNKED,
    NO_BODY,
    UNTIL_CLOSE,
    Chunked,
    Framing,
    HeadRefused,
    Length,
    NoBody,
    RequestHead,
    ResponseHead,
    UntilClose,
    keeps_alive,
    parse_request_head,
    parse_request_line,
    parse_response_head,
    parse_status_line,
    request_framing,
    requested_upgrade,
    response_framing,
    serialise_request,
    serialise_response,
    serialise_trailers,
)

CROWD = 512
"""Chunks decoded at once: each costs a microsecond or two, and a read has room for eleven thousand empty ones."""
_METHOD_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")


class ServerConnection:
    """Requests in, answers out, one exchange at a time. Also a `ClientSide` for net.exchange.exchange().

    A second request in the same read stays queued and is judged by itself, after the first was answered (RULINGS 11.2).
    Use: `while head := await c.next_head(): ...answer...`, then `await c.close()`.
    """

    def __init__(self, stream: ByteStream, limits: Limits = DEFAULT_LIMITS) -> None:
        self.stream = stream
        self.limits = limits
        self.request: RequestHead | None = None
        self.must_close = False
        self.head_sent = False
        """The final head of the current exchange was queued or sent."""
        self._inbox = _Inbox(stream, limits)
        self._body: MessageBody | None = None
        self._finished = True
        self._heads = 0
        self._queued = b""  # a head that waits for its first data
        self._out: Framing = NO_BODY
        self._left = 0
        self._continued = False

    @property
    def used(self) -> bool:
        """Whether a request came over it."""
        return self._heads > 0

    async def next_head(self) -> RequestHead | None:
        """The next request head; None when the client ended the connection cleanly or it must not be used again.

        Raises HeadRefused (answer it, then close: must_close is set) and StreamBroken. Reading pauses after a head
        with a body until the body is asked for (T10).
        """
        if self._body is not None and not (self._finished and self._body.done):
            self.must_close = True
        if self.must_close:
            return None
        self.request, self._body = None, None
        self.head_sent = self._continued = False
        limits = self.limits
        try:
            raw = await self._inbox.head(
                idle=limits.keepalive_timeout if self._heads else limits.head_timeout,
                total=limits.head_timeout,
                late=HeadRefused("client-timeout", "the request head did not come in time"),
                large=HeadRefused("head-too-large", "the request head is too large"),
                opening=_opens_request,
                check_line=parse_request_line,
            )
            if raw is None:
                self.must_close = True
                return None
            head = parse_request_head(raw, max_headers=limits.header_count)
            _second_request(raw, head)
        except (HeadRefused, StreamBroken):
            self.must_close = True
            raise
        self._heads += 1
        framing = request_framing(head)
        body = MessageBody(self._inbox, framing, limits, bad="bad-framing", over="body-too-large")
        if not body.done and not body.all_here():
            self.stream.pause_reading()
        self.request, self._body = head, body
        self._finished = False
        if not keeps_alive(head):
            self.must_close = True
        return head

    def body(self, limit: int | None = None) -> Body:
        """The current request's body; reading more than `limit` bytes raises HeadRefused(body-too-large)."""
        assert self._body is not None
        self._body.set_limit(limit)
        return self._body

    @property
    def framing(self) -> Framing:
        """How the current request's body ends."""
        return self._body.framing if self._body is not None else NO_BODY

    @property
    def body_done(self) -> bool:
        """The current request's body was read to its end."""
        return self._body is None or self._body.done

    @property
    def request_trailers(self) -> Headers:
        return self._body.trailers if self._body is not None else ()

    async def read_body(self) -> bytes | None:
        """ClientSide: body().read()."""
        return None if self._body is None else await self._body.read()

    def read_body_nowait(self) -> tuple[bytes | None, bool]:
        """ClientSide: (bytes or None at the end, True), or (None, False) where read_body() would wait."""
        return (None, True) if self._body is None else self._body.read_nowait()

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        self.stream.on_broken(callback)

    async def send_interim(self, head: ResponseHead) -> None:
        """Send a 1xx answer other than 101 (dropped for HTTP/1.0 clients and after the final head)."""
        if self.request is None or self.request.version != "1.1" or self.head_sent:
            return
        if not 100 <= head.status < 200 or head.status == 101:
            raise ValueError("not an interim answer")
        if head.status == 100:
            self._continued = True
        self.stream.write(serialise_response(head, NO_BODY))
        await self._drain()

    async def send_continue(self) -> None:
        """Our own `100 Continue` where the client waits for one (on NeedsBody, RULINGS 11.4); else nothing."""
        if self.request is not None and not self._continued and self.request.get("expect"):
            await self.send_interim(ResponseHead(100, "Continue", "1.1", ()))

    async def send_head(self, head: ResponseHead, framing: Framing) -> None:
        """Queue the final head. We write framing and connection fields; for HTTP/1.0 clients Chunked becomes
        UntilClose. The bytes leave with the first data, finish() or flush()."""
        if self.head_sent:
            raise RuntimeError("two final heads for one request")
        request = self.request
        self.head_sent = True
        status = head.status
        if request is None or self._body is None:
            self.must_close = True  # the answer to a head that was refused
        elif not self._body.done:
            self.must_close = True  # an early answer: the rest of the body has no place on this connection
        if status == 101:
            upgrade = requested_upgrade(request) if request is not None else None
            if upgrade is None:
                raise ValueError("101 without a request for it")
            self._out = NO_BODY
            self._queued = serialise_response(head, NO_BODY, upgrade=upgrade)
            return
        silent = status in (204, 304) or (request is not None and request.method == "HEAD")
        written = framing
        if isinstance(framing, Chunked | UntilClose) and not silent:
            # Towards HTTP/1.1 chunks say whether the message is whole; HTTP/1.0 does not know them.
            written = CHUNKED if request is None or request.version == "1.1" else UNTIL_CLOSE
            if written is UNTIL_CLOSE:
                self.must_close = True
        elif silent and (status in (204, 304) or not isinstance(framing, Length)):
            written = NO_BODY
        self._out = NO_BODY if silent else written
        self._left = written.size if isinstance(written, Length) and not silent else 0
        self._queued = serialise_response(
            head, written, close=self.must_close, keep_length=silent and status != 204 and written is NO_BODY
        )

    async def send_data(self, data: bytes) -> None:
        """Send body bytes (ignored for HEAD). Past the announced length: aborts and raises ValueError."""
        if not data:
            return
        match self._out:
            case Chunked():
                self.stream.write(encode_chunk(data, behind=self._queued))
            case Length():
                self._left -= len(data)
                if self._left < 0:
                    self.abort()
                    raise ValueError("more body than announced")
                self.stream.write(self._queued + data if self._queued else data)
            case UntilClose():
                self.stream.write(self._queued + data if self._queued else data)
            case NoBody():
                return
        self._queued = b""
        await self._drain()

    async def flush(self) -> None:
        """Let a queued head leave."""
        if self._queued:
            data, self._queued = self._queued, b""
            self.stream.write(data)
            await self._drain()

    async def finish(self, trailers: Headers = ()) -> None:
        """End the answer. Raises ValueError when fewer bytes than announced were sent (and aborts)."""
        if self._left and isinstance(self._out, Length):
            self.abort()
            raise ValueError("less body than announced")
        tail = self._queued
        self._queued = b""
        if isinstance(self._out, Chunked):
            tail += b"0\r\n%b\r\n" % serialise_trailers(trailers) if trailers else LAST_CHUNK
        self._out = NO_BODY
        self._finished = True
        if tail:
            self.stream.write(tail)
        await self._drain()

    async def respond(self, head: ResponseHead, body: bytes = b"") -> None:
        """A whole answer of our own (refusals, help host), in one write; the body stays out for HEAD.

        A request body that is small and already here is dropped first, so that the connection can go on; otherwise
        reading stays paused and the connection closes after the answer (RULINGS 11.4).
        """
        self._drop_what_is_here()
        await self.send_head(head, Length(len(body)) if body else NO_BODY)
        await self.send_data(body)
        await self.finish()

    def _drop_what_is_here(self) -> None:
        body = self._body
        if body is None or body.done:
            return
        if not body.all_here() or body.size_here() > self.limits.discard_bytes:
            self.stream.pause_reading()
            return
        try:
            while not body.done and body.read_nowait()[1]:
                pass
        except (HeadRefused, StreamBroken):
            self.must_close = True

    async def discard_bounded(self) -> bool:
        """After an early answer: drop at most limits.discard_bytes of the rest of the request body.

        True when that was all of it. The connection goes on only if must_close is not set for another reason.
        """
        body = self._body
        if body is None or body.done:
            return True
        left = self.limits.discard_bytes
        try:
            async with asyncio.timeout(self.limits.discard_timeout):
                while left > 0:
                    data = await body.read()
                    if data is None:
                        return True
                    left -= len(data)
        except (HeadRefused, StreamBroken, TimeoutError):
            pass
        self.must_close = True
        return False

    async def linger(self) -> None:
        """End our side, let the client read our last answer (bounded by discard_bytes, discard_timeout), close.

        Closing with unread bytes makes the kernel send a reset, which can eat the answer on the client's side.
        """
        self.must_close = True
        stream = self.stream
        try:
            await self.flush()
            await stream.send_eof()
            async with asyncio.timeout(self.limits.discard_timeout):
                left = self.limits.discard_bytes
                while left > 0:
                    data = await stream.receive(min(left, 16 * 1024))
                    if not data:
                        break
                    left -= len(data)
                else:
                    stream.pause_reading()
                    await asyncio.Event().wait()  # the client reads and leaves, or the timeout ends this
        except (StreamBroken, TimeoutError):
            pass
        await stream.close()

    async def close(self) -> None:
        """End the connection so that the last answer arrives: gently, lingering where request bytes are left."""
        if self.body_done and not self._inbox.pending and self.request is not None:
            await self.stream.close()
        else:
            await self.linger()

    def detach(self) -> ByteStream:
        """Give up the stream (CONNECT, 101): bytes read beyond the head are put back into it."""
        self.must_close = True
        pending, self._inbox.pending = self._inbox.pending, b""
        self.stream.unread(pending)
        return self.stream

    def abort(self) -> None:
        """Drop the connection: the client sees a cut message."""
        self.must_close = True
        self.stream.abort()

    async def _drain(self) -> None:
        await self.stream.drain()


class ClientConnection:
    """Requests out, answers in, one exchange at a time. Does not dial: give it a connected stream."""

    def __init__(self, stream: ByteStream, limits: Limits = DEFAULT_LIMITS) -> None:
        self.stream = stream
        self.limits = limits
        self.exchanges = 0
        """Requests sent so far; above 1 the connection was used before."""
        self.answered = False
        """A byte of an answer to the current request came."""
        self._inbox = _Inbox(stream, limits)
        self._queued = b""
        self._method = ""
        self._out: Framing = NO_BODY
        self._left = 0
        self._sent = True
        self._upgrade: str | None = None
        self._interims = 0
        self._final: ResponseHead | None = None
        self._body: MessageBody | None = None
        self._alive = True

    @property
    def reusable(self) -> bool:
        """The last exchange ended cleanly on both sides, nothing is unread, both sides keep alive."""
        return (
            self._alive
            and self._sent
            and self._body is not None
            and self._body.done
            and not self._inbox.pending
            and self._final is not None
            and self._final.status != 101
            and keeps_alive(self._final)
        )

    @property
    def has_leftover(self) -> bool:
        """Bytes beyond the current answer were received."""
        return bool(self._inbox.pending)

    def is_quiet(self) -> bool:
        """Nothing arrived while idle (no byte, no end, no error): ask before keeping it, and it goes on listening."""
        if not self._alive or self._inbox.pending:
            return False
        try:
            data = self.stream.receive_nowait()
        except StreamBroken:
            return False
        if data is None:
            self.stream.resume_reading()
            return True
        self._inbox.pending = data
        self._alive = False
        return False

    def is_silent(self) -> bool:
        """The same up to this very moment, also for what nobody has looked at yet: ask before using it again.

        An answer that waits there belongs to no request, and would be taken for the answer to the next one.
        """
        return self.is_quiet() and self.stream.silent()

    async def send_request(
        self, method: str, target: str, headers: Headers, framing: Framing, *, upgrade: str | None = None
    ) -> None:
        """Queue a request head (leaves with the first data, finish() or flush()).

        Raises HeadRefused(upstream-protocol) when the origin already sent something: an answer before its request;
        StreamBroken(closed) when it ended the connection; ValueError for a head that could not be parsed again.
        """
        if self.exchanges and not self.reusable:
            raise StreamBroken("closed", "the connection cannot be used again")
        if not self._alive:
            raise StreamBroken("closed")
        early: bytes | None = self._inbox.pending or self.stream.receive_nowait()
        if early is not None:
            self._alive = False
            if early:
                raise HeadRefused("upstream-protocol", "an answer before its request")
            raise StreamBroken("closed", "the origin ended the idle connection")
        self._queued = serialise_request(method, target, headers, framing, upgrade=upgrade)
        self.exchanges += 1
        self.answered = False
        self._method, self._upgrade, self._out = method, upgrade, framing
        self._left = framing.size if isinstance(framing, Length) else 0
        self._sent = False
        self._interims = 0
        self._final = self._body = None

    async def send_data(self, data: bytes) -> None:
        """Send body bytes. Raises ValueError past the announced length (and aborts), StreamBroken."""
        if not data:
            return
        match self._out:
            case Chunked():
                self.stream.write(encode_chunk(data, behind=self._queued))
            case Length() | NoBody() | UntilClose():
                self._left -= len(data)
                if self._left < 0:
                    self.abort()
                    raise ValueError("more body than announced")
                self.stream.write(self._queued + data if self._queued else data)
        self._queued = b""
        await self.stream.drain()

    async def flush(self) -> None:
        """Let a queued head leave."""
        if self._queued:
            data, self._queued = self._queued, b""
            self.stream.write(data)
            await self.stream.drain()

    async def finish(self, trailers: Headers = ()) -> None:
        """End the request. Raises ValueError when fewer bytes than announced were sent (and aborts)."""
        if self._left:
            self.abort()
            raise ValueError("less body than announced")
        tail, self._queued = self._queued, b""
        if isinstance(self._out, Chunked):
            tail += b"0\r\n%b\r\n" % serialise_trailers(trailers) if trailers else LAST_CHUNK
        self._sent = True
        if tail:
            self.stream.write(tail)
        await self.stream.drain()

    async def next_response(self) -> ResponseHead:
        """The next answer head, interim ones included (status < 200 other than an asked-for 101).

        Raises HeadRefused(upstream-protocol) for what is not one answer to this request, more than
        limits.interim_answers interim ones included; StreamBroken.
        """
        if self._final is not None or not self.exchanges:
            raise RuntimeError("no answer is due")
        limits = self.limits
        try:
            raw = await self._inbox.head(
                idle=limits.answer_timeout,
                total=limits.answer_timeout,
                late=StreamBroken("idle-timeout"),
                large=HeadRefused("upstream-protocol", "the answer head is too large"),
                opening=_opens_answer,
                check_line=_check_status_line,
            )
            if raw is None:
                raise StreamBroken("closed", "the origin ended the connection without an answer")
            self.answered = True
            head = parse_response_head(raw, max_headers=limits.header_count)
            _second_response(raw, head)
            if head.status < 200:
                return self._interim(head)
            framing = response_framing(head, self._method)
            body = MessageBody(self._inbox, framing, limits, bad="upstream-protocol", over="response-too-large")
            body.refuse_excess()
        except (HeadRefused, StreamBroken) as error:
            # Whoever refused a head has taken its bytes already: they were an answer all the same.
            self.answered = self.answered or isinstance(error, HeadRefused) or bool(self._inbox.pending)
            self._alive = False
            raise
        self._final, self._body = head, body
        return head

    def _interim(self, head: ResponseHead) -> ResponseHead:
        if head.status == 101:
            if self._upgrade is None:
                raise HeadRefused("upstream-protocol", "101 without a request for it")
            self._final = head
            return head
        self._interims += 1
        if self._interims > self.limits.interim_answers:
            raise HeadRefused("upstream-protocol", "too many interim answers")
        return head

    def body(self, limit: int | None = None) -> MessageBody:
        """The final answer's body; more than `limit` bytes raises HeadRefused(response-too-large)."""
        assert self._body is not None
        self._body.set_limit(limit)
        return self._body

    def detach(self) -> ByteStream:
        """After a 101: give up the stream, unread bytes put back."""
        self._alive = False
        pending, self._inbox.pending = self._inbox.pending, b""
        self.stream.unread(pending)
        return self.stream

    def abort(self) -> None:
        """Drop the connection."""
        self._alive = False
        self.stream.abort()

    async def close(self) -> None:
        """End the connection."""
        self._alive = False
        await self.stream.close()


class MessageBody:
    """A `Body` cut out of the stream by its framing; it ends exactly at its end and leaves the rest in the inbox."""

    __slots__ = (
        "_bad",
        "_crowded",
        "_decoder",
        "_inbox",
        "_left",
        "_limit",
        "_limits",
        "_over",
        "count",
        "done",
        "framing",
    )

    def __init__(self, inbox: _Inbox, framing: Framing, limits: Limits, *, bad: str, over: str) -> None:
        self._inbox = inbox
        self._limits = limits
        self._bad = bad
        self._over = over
        self._limit: int | None = None
        self.framing = framing
        self.count = 0
        """Body bytes read so far."""
        self.done = isinstance(framing, NoBody)
        self._left = framing.size if isinstance(framing, Length) else 0
        self._crowded = False
        """Others get a turn before the next bytes."""
        self._decoder: ChunkedDecoder | None = None
        if isinstance(framing, Chunked):
            self._decoder = ChunkedDecoder(
                bad=bad,
                line_bound=limits.chunk_line,
                trailer_bytes=limits.trailer_bytes,
                trailer_count=limits.trailer_count,
            )

    @property
    def trailers(self) -> Headers:
        return self._decoder.trailers if self._decoder is not None else ()

    def set_limit(self, limit: int | None) -> None:
        """Bound the body from now on. Raises HeadRefused where its announced length is already more."""
        self._limit = limit
        if limit is not None and isinstance(self.framing, Length) and self.framing.size > limit:
            raise HeadRefused(self._over, "the body is larger than its bound")

    def all_here(self) -> bool:
        """The whole rest is in the inbox (told for announced lengths only)."""
        return self.done or (isinstance(self.framing, Length) and len(self._inbox.pending) >= self._left)

    def size_here(self) -> int:
        """Bytes left of an announced length."""
        return self._left

    def refuse_excess(self) -> None:
        """Raise HeadRefused where bytes beyond this body are already here (two answers to one request, B197)."""
        over = len(self._inbox.pending) - self._left
        if over > 0 and isinstance(self.framing, NoBody | Length):
            raise HeadRefused(self._bad, "bytes after the end of the answer")

    def read_nowait(self) -> tuple[bytes | None, bool]:
        """(bytes or None at the end, True), or (None, False) where read() would wait."""
        inbox = self._inbox
        while not self.done:
            if self._crowded:
                return None, False
            data: bytes | None = inbox.pending
            if data:
                inbox.pending = b""
            else:
                data = inbox.stream.receive_nowait()
                if data is None:
                    return None, False
                if not data:
                    if isinstance(self.framing, UntilClose):
                        self.done = True
                        break
                    raise StreamBroken("truncated", "the connection ended inside a body")
            piece = self._take(data)
            if piece:
                self.count += len(piece)
                if self._limit is not None and self.count > self._limit:
                    raise HeadRefused(self._over, "the body is larger than its bound")
                return piece, True
        return None, True

    async def read(self) -> bytes | None:
        while True:
            data, ready = self.read_nowait()
            if ready:
                return data
            stream = self._inbox.stream
            if self._crowded:
                self._crowded = False
                await rest(stream.share)
                continue
            stream.read_timeout = self._limits.body_timeout
            self._inbox.pending = await stream.receive()

    def _take(self, data: bytes) -> bytes:
        if self._decoder is not None:
            later = b""
            if (lines := data.count(b"\n")) > CROWD:
                # Chunks of a few bytes: thousands of them are in one read.
                cut = max(1, len(data) * CROWD // lines)
                data, later = data[:cut], data[cut:]
                self._crowded = True
            piece = self._decoder.feed(data)
            if self._decoder.done:
                self.done = True
                later = self._decoder.rest + later
            self._inbox.pending = later
            return piece
        if isinstance(self.framing, UntilClose):
            return data
        left = self._left
        if len(data) > left:
            self._inbox.pending = data[left:]
            data = data[:left]
        self._left = left = left - len(data)
        self.done = not left
        return data

    def cancel(self) -> None:
        """The rest will not be read: the connection ends with it."""
        self._inbox.stream.pause_reading()


class _Inbox:
    """Bytes that were received and not used yet, and how a head is cut out of them."""

    __slots__ = ("limits", "pending", "stream")

    def __init__(self, stream: ByteStream, limits: Limits) -> None:
        self.stream = stream
        self.limits = limits
        self.pending = b""

    async def head(
        self,
        *,
        idle: float,
        total: float,
        late: Exception,
        large: Exception,
        opening: Callable[[bytes], None],
        check_line: Callable[[bytes], Any],
    ) -> bytes | None:
        """The bytes of one head, its empty line included; None at a clean end or after `idle` seconds of nothing.

        Raises `late` when the rest takes more than `total` seconds, `large` past limits.head_bytes, what `opening`
        and `check_line` raise, StreamBroken(truncated) where the stream ends inside.
        """
        stream = self.stream
        data = self.pending
        if not data:
            got = stream.receive_nowait()
            if got is None:
                stream.read_timeout = idle
                try:
                    got = await stream.receive()
                except StreamBroken as error:
                    if error.kind == "idle-timeout" and not isinstance(late, StreamBroken):
                        return None
                    raise
            if not got:
                return None
            data = got
        end = data.find(b"\r\n\r\n")
        if end < 0:
            data, end = await self._rest(data, total, late, large, opening, check_line)
        if end + 4 > self.limits.head_bytes:
            raise large
        opening(data)
        self.pending = data[end + 4 :]
        return data[: end + 4]

    async def _rest(
        self,
        data: bytes,
        total: float,
        late: Exception,
        large: Exception,
        opening: Callable[[bytes], None],
        check_line: Callable[[bytes], Any],
    ) -> tuple[bytes, int]:
        """A head in several reads. What cannot become one is refused as soon as that shows, not after a timeout."""
        stream = self.stream
        buffer = bytearray(data)
        seen = 0
        line_checked = False
        now = asyncio.get_running_loop().time
        deadline = now() + total
        try:
            while True:
                opening(bytes(buffer[:16]))
                if not line_checked:
                    line_end = buffer.find(b"\r\n", max(seen - 1, 0))
                    if line_end >= 0:
                        check_line(bytes(buffer[:line_end]))
                        line_checked = True
                end = buffer.find(b"\r\n\r\n", max(seen - 3, 0))
                if end >= 0:
                    return bytes(buffer), end
                # No end yet, so all of this is head (what follows a head is not looked at here).
                at = buffer.find(b"\n", seen)
                while at >= 0:
                    if at == 0 or buffer[at - 1] != 0x0D:
                        raise HeadRefused(_reason_of(large), "a bare line feed in a head")
                    at = buffer.find(b"\n", at + 1)
                if len(buffer) >= self.limits.head_bytes:
                    raise large
                seen = len(buffer)
                stream.read_timeout = max(deadline - now(), 0.001)
                try:
                    more = await stream.receive()
                except StreamBroken as error:
                    if error.kind == "idle-timeout":
                        raise late from None
                    raise
                if not more:
                    raise StreamBroken("truncated", "the connection ended inside a head")
                buffer += more
        except BaseException:
            self.pending = bytes(buffer)
            raise


def _reason_of(error: Exception) -> str:
    reason = getattr(error, "reason", "upstream-protocol")
    return "bad-head" if reason == "head-too-large" else str(reason)


def _opens_request(data: bytes) -> None:
    if data[0] not in _METHOD_LETTERS:
        raise HeadRefused("bad-head", "not the beginning of an HTTP request")


def _opens_answer(data: bytes) -> None:
    # An HTTP/0.9 answer, or TLS where none was asked for, is told by its first bytes (B199).
    if not data.startswith(b"HTTP/1."[: len(data)]):
        raise HeadRefused("upstream-protocol", "not the beginning of an HTTP/1 answer")


def _check_status_line(line: bytes) -> None:
    parse_status_line(line)


# --- llhttp's opinion ---


class _Seen:
    """What llhttp found in a head."""

    __slots__ = ("complete", "fields", "on_header", "url")

    def __init__(self) -> None:
        self.url = b""
        self.fields: list[tuple[bytes, bytes]] = []
        fields = self.fields
        self.on_header: Callable[[bytes, bytes], None] = lambda name, value: fields.append((name, value))
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_headers_complete(self) -> None:
        self.complete = True

    def agrees(self, headers: Headers) -> bool:
        fields = tuple(self.fields)
        # llhttp leaves trailing blanks on values; RFC 9112 5.1 says that they are not part of them.
        return self.complete and (
            fields == headers or tuple((name, value.strip(b" \t")) for name, value in fields) == headers
        )


def _second_request(raw: bytes, head: RequestHead) -> None:
    """Refuse where llhttp sees another request in these bytes than we do (RULINGS 11.2)."""
    seen = _Seen()
    parser = httptools.HttpRequestParser(seen)
    method = head.method.encode()
    if head.method == "LIST" and raw.startswith(b"LIST "):
        # llhttp takes a fixed list of methods. It reads the same head under one of the same length.
        method, raw = b"LINK", b"LINK" + raw[4:]
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # how it says that CONNECT or an upgrade request ends here
    except httptools.HttpParserError:
        raise HeadRefused("bad-head", "the two parsers disagree about this head") from None
    if (
        parser.get_method() != method
        or seen.url != head.target.encode()
        or parser.get_http_version() != head.version
        or not seen.agrees(head.headers)
    ):
        raise HeadRefused("bad-head", "the two parsers disagree about this head")


def _second_response(raw: bytes, head: ResponseHead) -> None:
    """Refuse where llhttp sees another answer in these bytes than we do."""
    seen = _Seen()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError:
        raise HeadRefused("upstream-protocol", "the two parsers disagree about this head") from None
    if (
        parser.get_status_code() != head.status
        or parser.get_http_version() != head.version
        or not seen.agrees(head.headers)
    ):
        raise HeadRefused("upstream-protocol", "the two parsers disagree about this head")
