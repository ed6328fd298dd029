"""One exchange relayed: request up, answer down, both at once. Used by the http1 lane and by the executor.

Map: the ports (`ClientSide`, `BodyTransform`), the request and the result, `exchange()`; below it `_Relay`, which is
the whole procedure from top to bottom.

Rules kept here: the answer is read while the body is still being sent, so an early answer passes at once; interim
answers pass in order; a message that was cut is passed on as cut, never as a short whole one; after anything but a
clean end the upstream connection is of no more use; a fault closes it and is raised again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from net.http1 import ClientConnection, MessageBody
from net.stream import Headers, StreamBroken
from wire.heads import (
    CHUNKED,
    NO_BODY,
    Chunked,
    Framing,
    HeadRefused,
    Length,
    NoBody,
    RequestHead,
    ResponseHead,
    UntilClose,
    announced_trailers,
    strip_answer,
    strip_never_forwarded,
)
from wire.websocket import check_accept, check_request

_GATHER = 32 * 1024
"""Body bytes that are already here and are sent together with the head, or before the upload gets its own task."""


class AnswerRefused(Exception):
    """Raised by on_response or a transform: this answer must not pass. `reason` is a code of rules.reasons."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail


class ClientSide(Protocol):
    """Whoever sent the request: net.http1.ServerConnection, or the executor's hand-off frames."""

    async def read_body(self) -> bytes | None:
        """Next request body bytes, None at the end. Raises StreamBroken, HeadRefused."""
        ...

    def read_body_nowait(self) -> tuple[bytes | None, bool]:
        """(bytes or None at the end, True), or (None, False) where read_body() would wait."""
        ...

    @property
    def request_trailers(self) -> Headers: ...

    async def send_interim(self, head: ResponseHead) -> None: ...

    async def send_head(self, head: ResponseHead, framing: Framing) -> None: ...

    async def send_data(self, data: bytes) -> None: ...

    async def flush(self) -> None: ...

    async def finish(self, trailers: Headers = ()) -> None: ...

    def abort(self) -> None:
        """End so that the client sees a cut message, never a well-formed short one."""
        ...

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        """Call once when the client is gone (reset), so that the origin is not kept waiting for it."""
        ...


class BodyTransform(Protocol):
    """Changes an answer body on its way down (scrubbing, pruning)."""

    @property
    def keeps_length(self) -> bool:
        """Output is as long as the input: Content-Length stays. Read after on_response ran."""
        ...

    @property
    def holds_head(self) -> bool:
        """Nothing is sent before finish(): the whole answer is made first, then sent with its length."""
        ...

    def feed(self, data: bytes) -> AsyncIterator[bytes]:
        """What may be sent now, in pieces; between two of them others may run. Raises AnswerRefused."""
        ...

    def finish(self) -> AsyncIterator[bytes]:
        """The rest, likewise. Raises AnswerRefused."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRequest:
    """What goes to the origin: judged, stripped and complete, Host included; framing fields are ours to write."""

    method: str
    target: str
    headers: Headers
    framing: Framing
    body: bytes | None = None
    """A body already collected (judged): sent as Length; the client is not read. None: streamed from the client."""
    upgrade: str | None = None
    request_limit: int | None = None
    response_limit: int | None = None
    drop_trailers: bool = False
    """Answer trailers are dropped (credentialed operations, RULINGS 11.11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeResult:
    """How it ended. `error` is None, a reason code or `client-gone`; with it and not `head_sent`, answer a refusal."""

    status: int | None
    bytes_up: int
    bytes_down: int
    completed: bool
    error: str | None = None
    detail: str = ""
    head_sent: bool = False
    upgraded: bool = False
    """A valid 101 was relayed: go on with net.websocket.relay on both detached streams."""
    answered: bool = False
    """At least one byte of an answer came. A request on a reused connection without it may be tried once more."""
    interims: int = 0


async def exchange(
    server: ClientSide,
    upstream: ClientConnection,
    request: OutgoingRequest,
    *,
    on_response: Callable[[ResponseHead], ResponseHead],
    transform: BodyTransform | None = None,
    relay_interim: bool = True,
    consider: Callable[[ResponseHead], Awaitable[None]] | None = None,
) -> ExchangeResult:
    """Relay one exchange and return how it ended; never raises for what peers do.

    `on_response` gets the final head without hop-by-hop fields and returns the one to send; it may raise
    AnswerRefused. `consider` is awaited with the final head before that. After an error with the head already sent,
    `server` was aborted; the upstream connection is aborted after any error. After an early answer
    upstream.reusable is False and the server connection has body left: call discard_bounded().
    """
    relay = _Relay(server, upstream, request, on_response, transform, relay_interim, consider)
    try:
        async with asyncio.timeout(upstream.limits.exchange_timeout):
            await relay.run()
    except TimeoutError:
        relay.fail("limit-reached", "the exchange took longer than its bound")
    except _ClientFailed as failed:
        relay.fail(failed.reason, failed.detail)
    except HeadRefused as refused:
        relay.fail(refused.reason, refused.detail)
    except AnswerRefused as refused:
        relay.fail(refused.reason, refused.detail)
    except StreamBroken as broken:
        timed_out = broken.kind in ("idle-timeout", "write-timeout")
        relay.fail("upstream-timeout" if timed_out else "upstream-protocol", broken.detail or broken.kind)
    except BaseException:
        relay.fail("internal-error", "")
        raise
    finally:
        server.on_broken(None)
        await relay.stop_upload()
    return relay.result()


class _ClientFailed(Exception):
    """The client's side ended the exchange: gone, or its body is not acceptable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class _Relay:
    """The state of one exchange."""

    __slots__ = (
        "bytes_down",
        "bytes_up",
        "client_failure",
        "completed",
        "consider",
        "detail",
        "error",
        "head_sent",
        "interims",
        "on_response",
        "relay_interim",
        "request",
        "server",
        "status",
        "transform",
        "upgraded",
        "upload",
        "upstream",
    )

    def __init__(
        self,
        server: ClientSide,
        upstream: ClientConnection,
        request: OutgoingRequest,
        on_response: Callable[[ResponseHead], ResponseHead],
        transform: BodyTransform | None,
        relay_interim: bool,
        consider: Callable[[ResponseHead], Awaitable[None]] | None,
    ) -> None:
        self.server = server
        self.upstream = upstream
        self.request = request
        self.on_response = on_response
        self.transform = transform
        self.relay_interim = relay_interim
        self.consider = consider
        self.status: int | None = None
        self.bytes_up = self.bytes_down = self.interims = 0
        self.completed = self.head_sent = self.upgraded = False
        self.error: str | None = None
        self.detail = ""
        self.upload: asyncio.Task[None] | None = None
        self.client_failure: _ClientFailed | None = None

    async def run(self) -> None:
        self.server.on_broken(self._client_gone)
        try:
            if await self._send():
                self.upload = asyncio.get_running_loop().create_task(self._pump())
            while True:
                head = await self.upstream.next_response()
                if head.status >= 200 or head.status == 101:
                    break
                self.interims += 1
                await self._pass_interim(head)
            self.status = head.status
            if self.consider is not None:
                await self.consider(head)
            await self._answer(head)
        except (StreamBroken, HeadRefused):
            # Where the upload gave up because of the client, what the upstream's stream says is only the echo.
            if self.client_failure is not None:
                raise self.client_failure from None
            raise
        self.completed = True

    # --- up ---

    async def _send(self) -> bool:
        """Send the head and what of the body is already here; True when the rest needs the upload task."""
        request, upstream = self.request, self.upstream
        whole = request.body
        framing = request.framing if whole is None else (Length(len(whole)) if whole else NO_BODY)
        if request.request_limit is not None and isinstance(framing, Length) and framing.size > request.request_limit:
            raise _ClientFailed("body-too-large", "the body is larger than its bound")
        if request.upgrade == "websocket":
            try:
                check_request(RequestHead(request.method, request.target, "1.1", request.headers))
            except HeadRefused as refused:
                raise _ClientFailed(refused.reason, refused.detail) from None
        await upstream.send_request(request.method, request.target, request.headers, framing, upgrade=request.upgrade)
        if whole is not None:
            await upstream.send_data(whole)
            self.bytes_up = len(whole)
            await upstream.finish()
            return False
        if isinstance(framing, NoBody):
            await upstream.finish()
            return False
        gathered: list[bytes] = []
        size = 0
        while size < _GATHER:
            try:
                data, ready = self.server.read_body_nowait()
            except StreamBroken as broken:
                raise _ClientFailed("client-gone", broken.kind) from None
            except HeadRefused as refused:
                raise _ClientFailed(refused.reason, refused.detail) from None
            if not ready:
                break
            if data is None:
                self._count_up(size)
                await upstream.send_data(b"".join(gathered))
                await upstream.finish(self._request_trailers())
                return False
            gathered.append(data)
            size += len(data)
        self._count_up(size)
        await upstream.send_data(b"".join(gathered))
        await upstream.flush()
        return True

    async def _pump(self) -> None:
        """The upload task: the rest of the request body. What the client does wrong ends the exchange."""
        upstream, server = self.upstream, self.server
        try:
            while True:
                try:
                    data = await server.read_body()
                    if data is not None:
                        self._count_up(len(data))
                except StreamBroken as broken:
                    raise _ClientFailed(
                        "client-timeout" if broken.kind == "idle-timeout" else "client-gone", broken.kind
                    ) from None
                except HeadRefused as refused:
                    raise _ClientFailed(refused.reason, refused.detail) from None
                if data is None:
                    break
                await upstream.send_data(data)
            await upstream.finish(self._request_trailers())
        except _ClientFailed as failed:
            self.client_failure = failed
            upstream.abort()
        except StreamBroken:
            pass  # the upstream takes no more: its answer, or its silence, is read by run()
        except Exception as error:
            self.client_failure = _ClientFailed("internal-error", type(error).__name__)
            upstream.abort()
            raise

    def _count_up(self, size: int) -> None:
        self.bytes_up += size
        limit = self.request.request_limit
        if limit is not None and self.bytes_up > limit:
            raise _ClientFailed("body-too-large", "the body is larger than its bound")

    def _request_trailers(self) -> Headers:
        trailers = self.server.request_trailers
        return strip_never_forwarded(trailers) if trailers and not self.request.drop_trailers else ()

    def _client_gone(self) -> None:
        if self.client_failure is None:
            self.client_failure = _ClientFailed("client-gone", "the client reset the connection")
        self.upstream.abort()

    async def stop_upload(self) -> None:
        """End the upload task, whatever it waits for. A fault that it met is raised."""
        task, self.upload = self.upload, None
        if task is None:
            return
        if not task.done():
            task.cancel()
            # An answer that came whole before the request was: the connection is half way through a message.
            self.upstream.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
            task.result()

    # --- down ---

    async def _pass_interim(self, head: ResponseHead) -> None:
        if self.relay_interim:
            head = ResponseHead(head.status, head.reason, "1.1", strip_answer(head.headers, interim=True))
        elif head.status == 100:
            head = ResponseHead(100, "Continue", "1.1", ())
        else:
            return
        with _client_side():
            await self.server.send_interim(head)

    async def _answer(self, head: ResponseHead) -> None:
        request, upstream, server = self.request, self.upstream, self.server
        if head.status == 101:
            self._check_upgrade(head)
            answer = self.on_response(ResponseHead(101, head.reason, "1.1", strip_answer(head.headers)))
            with _client_side():
                self.head_sent = True
                await server.send_head(answer, NO_BODY)
                await server.flush()
            self.upgraded = True
            return
        body = upstream.body(request.response_limit)
        passing = strip_answer(head.headers)
        if isinstance(body.framing, Chunked) and self.transform is None and not request.drop_trailers:
            passing += announced_trailers(head.headers)
        answer = self.on_response(ResponseHead(head.status, head.reason, "1.1", passing))
        if isinstance(body.framing, NoBody):
            with _client_side():
                self.head_sent = True
                await server.send_head(answer, NO_BODY)
                await server.finish()
        elif self.transform is not None:
            await self._transformed(answer, body, self.transform)
        else:
            await self._plain(answer, body)

    async def _plain(self, answer: ResponseHead, body: MessageBody) -> None:
        server = self.server
        # A small answer that is here whole leaves with its head in one write, and is known to be one answer only.
        gathered: list[bytes] = []
        size = 0
        data: bytes | None = b""
        while size < _GATHER:
            data, ready = body.read_nowait()
            if not ready or data is None:
                break
            gathered.append(data)
            size += len(data)
        framing: Framing = body.framing
        if body.done:
            self._refuse_leftover()
            if not isinstance(framing, Length) and not body.trailers and not answer.get("trailer"):
                framing = Length(size) if size else NO_BODY
        first = gathered[0] if len(gathered) == 1 else b"".join(gathered)
        with _client_side():
            self.head_sent = True
            await server.send_head(answer, _downwards(framing))
            await server.send_data(first)
            self.bytes_down = size
            if not body.done:
                await server.flush()
        while not body.done:
            data = await body.read()
            if data is None:
                break
            with _client_side():
                await server.send_data(data)
            self.bytes_down += len(data)
        await self._end(body)

    async def _transformed(self, answer: ResponseHead, body: MessageBody, transform: BodyTransform) -> None:
        server = self.server
        held: list[bytes] | None = [] if transform.holds_head else None
        if held is None:
            with _client_side():
                self.head_sent = True
                await server.send_head(answer, _downwards(body.framing) if transform.keeps_length else CHUNKED)
                if not body.all_here():
                    await server.flush()
        while (data := await body.read()) is not None:
            async for out in transform.feed(data):
                if held is not None:
                    held.append(out)
                elif out:
                    with _client_side():
                        await server.send_data(out)
                    self.bytes_down += len(out)
        self._refuse_leftover()
        rest = [out async for out in transform.finish()]
        out = b"".join(rest if held is None else held + rest)
        if held is not None:
            with _client_side():
                self.head_sent = True
                await server.send_head(answer, Length(len(out)) if out else NO_BODY)
        with _client_side():
            await server.send_data(out)
            self.bytes_down += len(out)
            await server.finish()

    async def _end(self, body: MessageBody) -> None:
        trailers = body.trailers
        kept = strip_answer(trailers) if trailers and not self.request.drop_trailers else ()
        with _client_side():
            await self.server.finish(kept)

    def _refuse_leftover(self) -> None:
        if self.upstream.has_leftover:
            raise HeadRefused("upstream-protocol", "bytes after the end of the answer")

    def _check_upgrade(self, head: ResponseHead) -> None:
        """A 101 must accept exactly this handshake (RFC 6455 4.1)."""
        request = ResponseHead(101, "", "1.1", self.request.headers)  # only to look headers up by lower-case name
        keys = request.get("sec-websocket-key")
        if self.request.upgrade != "websocket" or len(keys) != 1:
            raise HeadRefused("upstream-protocol", "101 without a request for it")
        check_accept(
            head,
            key=keys[0],
            protocols=request.get("sec-websocket-protocol"),
            extensions=request.get("sec-websocket-extensions"),
        )

    # --- end ---

    def fail(self, reason: str, detail: str) -> None:
        """Record how it failed; cut the upstream, and the client where it has part of an answer."""
        self.error, self.detail = reason, detail
        self.completed = False
        self.upstream.abort()
        if self.head_sent or reason == "client-gone":
            self.server.abort()

    def result(self) -> ExchangeResult:
        return ExchangeResult(
            status=self.status,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            completed=self.completed,
            error=self.error,
            detail=self.detail,
            head_sent=self.head_sent,
            upgraded=self.upgraded,
            answered=self.upstream.answered,
            interims=self.interims,
        )


def _downwards(framing: Framing) -> Framing:
    """The framing towards the client: an end that only the closing marked becomes chunks, so that a cut shows."""
    match framing:
        case UntilClose() | Chunked():
            return CHUNKED
        case Length() | NoBody():
            return framing


class _client_side:
    """In this block a broken stream is the client's."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StreamBroken):
            raise _ClientFailed("client-gone", error.kind) from None
