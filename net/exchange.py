"""One exchange relayed: request up, answer down, both at once, through `exchange()`. Used by the lane and the executor.

Implementation follows; the signatures are settled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from net.http1 import ClientConnection
from net.stream import Headers
from wire.heads import Framing, ResponseHead


class AnswerRefused(Exception):  # noqa: N818 - a refusal, said so in its name
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

    def feed(self, data: bytes) -> bytes:
        """What may be sent now. Raises AnswerRefused."""
        ...

    def finish(self) -> bytes:
        """The rest. Raises AnswerRefused."""
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
    """How it ended. `error` is None or a reason code (or `client-gone`); with it and not `head_sent`, answer a refusal."""

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
) -> ExchangeResult:
    """Relay one exchange and return how it ended; never raises for what peers do.

    `on_response` gets the final head without hop-by-hop fields and returns the one to send; it may raise
    AnswerRefused. After an error with the head already sent, `server` was aborted; the upstream connection is aborted
    after any error. After an early answer upstream.reusable is False and the server connection has body left: call
    discard_bounded().
    """
    raise NotImplementedError
