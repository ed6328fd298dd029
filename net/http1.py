"""The HTTP/1.1 engine: one connection towards a client (`ServerConnection`), one towards an origin (`ClientConnection`).

Implementation follows; the signatures are settled.
"""

from __future__ import annotations

from net.stream import DEFAULT_LIMITS, Body, ByteStream, Headers, Limits
from wire.heads import Framing, RequestHead, ResponseHead


class ServerConnection:
    """Requests in, answers out, one exchange at a time. Also a `ClientSide` for net.exchange.exchange().

    A second request in the same read stays queued and is judged by itself, after the first was answered (RULINGS 11.2).
    """

    def __init__(self, stream: ByteStream, limits: Limits = DEFAULT_LIMITS) -> None:
        self.stream = stream
        self.limits = limits
        self.request: RequestHead | None = None
        self.must_close = False

    async def next_head(self) -> RequestHead | None:
        """The next request head; None when the client ended the connection cleanly or it must not be used again.

        Raises HeadRefused (answer it, then close: must_close is set) and StreamBroken. Reading pauses after a head
        with a body until the body is asked for.
        """
        raise NotImplementedError

    def body(self, limit: int | None = None) -> Body:
        """The current request's body; reading more than `limit` bytes raises HeadRefused(body-too-large)."""
        raise NotImplementedError

    async def read_body(self) -> bytes | None:
        """ClientSide: body().read()."""
        raise NotImplementedError

    async def send_interim(self, head: ResponseHead) -> None:
        """Send a 1xx answer (dropped for HTTP/1.0 clients)."""
        raise NotImplementedError

    async def send_head(self, head: ResponseHead, framing: Framing) -> None:
        """Queue the final head. We write framing and connection fields; for HTTP/1.0 clients Chunked becomes
        UntilClose. The bytes leave with the first data, finish() or flush()."""
        raise NotImplementedError

    async def send_data(self, data: bytes) -> None:
        raise NotImplementedError

    async def flush(self) -> None:
        raise NotImplementedError

    async def finish(self, trailers: Headers = ()) -> None:
        """End the answer. Raises ValueError when fewer bytes than announced were sent (and aborts)."""
        raise NotImplementedError

    async def respond(self, head: ResponseHead, body: bytes = b"") -> None:
        """A whole answer of our own (refusals, help host), in one write; body omitted for HEAD."""
        raise NotImplementedError

    async def discard_bounded(self) -> bool:
        """After an early answer: drop at most limits.discard_bytes of the rest of the request body.

        True when that was all of it: the connection can go on. Otherwise must_close is set.
        """
        raise NotImplementedError

    async def linger(self) -> None:
        """End our side, let the client read our last answer (bounded by discard_bytes, discard_timeout), close."""
        raise NotImplementedError

    def detach(self) -> ByteStream:
        """Give up the stream (CONNECT, 101): bytes read beyond the head are put back into it."""
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


class ClientConnection:
    """Requests out, answers in, one exchange at a time. Does not dial: give it a connected stream."""

    def __init__(self, stream: ByteStream, limits: Limits = DEFAULT_LIMITS) -> None:
        self.stream = stream
        self.limits = limits
        self.exchanges = 0

    @property
    def reusable(self) -> bool:
        """The last exchange ended cleanly on both sides, nothing is unread, both sides keep alive."""
        raise NotImplementedError

    def is_quiet(self) -> bool:
        """Nothing arrived while idle (no byte, no end, no error): ask before taking it from a pool."""
        raise NotImplementedError

    async def send_request(
        self, method: str, target: str, headers: Headers, framing: Framing, *, upgrade: str | None = None
    ) -> None:
        """Queue a request head (leaves with the first data, finish() or flush()).

        Raises HeadRefused(upstream-protocol) when the origin already sent something: an answer before its request.
        """
        raise NotImplementedError

    async def send_data(self, data: bytes) -> None:
        raise NotImplementedError

    async def flush(self) -> None:
        raise NotImplementedError

    async def finish(self, trailers: Headers = ()) -> None:
        raise NotImplementedError

    async def next_response(self) -> ResponseHead:
        """The next answer head, interim ones included (status < 200 other than an asked-for 101).

        Raises HeadRefused(upstream-protocol) for what is not one answer to this request, more than
        limits.interim_answers interim ones included; StreamBroken.
        """
        raise NotImplementedError

    def body(self, limit: int | None = None) -> Body:
        """The final answer's body; more than `limit` bytes raises HeadRefused(response-too-large)."""
        raise NotImplementedError

    def detach(self) -> ByteStream:
        """After a 101: give up the stream, unread bytes put back."""
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
