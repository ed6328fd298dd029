"""The client side of the hand-off: what the gate and a lane call, and its implementation over passed sockets.

    link.open(request, judged_body)  -> HandoffExchange        the statement is sealed and sent
    exchange.receive()               -> Continue | Refusal     the verdict; nothing went upstream before
    exchange.send_body / finish_body                           a streamed body, after Continue
    exchange.receive()               -> AnswerHead, AnswerData*, AnswerEnd
    exchange.close()                                           always; before AnswerEnd it cancels the call

An answer that ends by AnswerAbort, or by HandoffBroken, reaches the client as an aborted message (RULINGS 2.4).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from net.fdchannel import ChannelBroken, FdChannel, socket_pair
from net.framing import FrameStream
from net.stream import StreamBroken, open_socket_stream
from net.turns import Turns
from proxy.ports import Clock, ProxyError, RandomBytes
from rules.names import Scheme
from wire.frames import WireError
from wire.handoff import (
    BODY_END_FRAME,
    CANCEL_FRAME,
    DATA_CHUNK,
    HANDOFF_MESSAGE,
    KEY_BYTES,
    NONCE_BYTES,
    Answer,
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    AnswerHead,
    BodyPlan,
    Continue,
    Evidence,
    Refusal,
    Statement,
    Upgraded,
    body_frame,
    decode_answer,
    forged,
    seal,
    statement_frame,
)

SEND_SECONDS = 1.0
"""Longest wait for one executor's channel to take a hand-off; then the next one is asked."""
VERDICT_SECONDS = 12.0
"""Longest wait for the broker's verdict: its own deadline and some."""
ANSWER_SECONDS = 630.0
"""Longest silence of an executor after that: the engine's own answer timeout and some."""
UPGRADED_SECONDS = 3700.0
"""The same of an upgraded connection: where only the client speaks, longer than the executor lets it live."""


class BrokerUnavailable(ProxyError):
    """No executor can take the hand-off: refuse with `broker-unavailable`. Nothing was sent upstream."""


class HandoffBroken(ProxyError):
    """The executor went away or broke the protocol in the middle of an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRequest:
    """What the worker says of the request that it judged; the link adds worker, nonce, issue time and seal.

    Fields as in wire.handoff.Statement.
    """

    request_id: str
    tenant: str
    sandbox: str
    epoch: int
    evidence: Evidence
    policy_digest: str
    method: str
    scheme: Scheme
    host: str
    port: int
    target: str
    headers: tuple[tuple[str, str], ...]
    body: BodyPlan
    upgrade: str = ""
    rule: str
    operation: str
    arguments: tuple[tuple[str, str], ...] = ()
    credential: str = ""


class HandoffExchange(Protocol):
    """One request at the broker. `send_body` and `receive` may run in two tasks; neither is re-entrant."""

    async def send_body(self, data: bytes) -> None:
        """Send a piece of a streamed body, waiting while the executor does not read. Raises HandoffBroken."""
        ...

    async def finish_body(self) -> None:
        """The body is whole. Raises HandoffBroken."""
        ...

    async def receive(self) -> Answer:
        """Return the next answer. Raises HandoffBroken, also where the stream ends before AnswerEnd."""
        ...

    def cancel(self) -> None:
        """The client is gone: the executor aborts the call. Idempotent; never raises."""
        ...

    async def close(self) -> None:
        """Release the socket; before the exchange's end this cancels it. Idempotent; never raises."""
        ...


class BrokerLink(Protocol):
    """The port to the broker. One hand-off is one exchange; nothing is shared between two."""

    async def open(self, request: HandoffRequest, judged_body: bytes | None = None) -> HandoffExchange:
        """Seal and send the statement and, where one was judged, its body or beginning. Raises BrokerUnavailable."""
        ...


class SocketBrokerLink:
    """The BrokerLink over passed sockets: one SEQPACKET channel per executor (or shared by all of them).

    Refuses everything until `arm` was called with what the vault's Welcome said, and again after `disarm`.
    """

    def __init__(
        self, channels: Sequence[FdChannel], *, clock: Clock, random: RandomBytes, turns: Turns | None = None
    ) -> None:
        """`turns` are the worker's."""
        self._turns = turns or Turns()
        self._channels = list(channels)
        self._clock = clock
        self._random = random
        self._worker = ""
        self._key = b""
        self._next = 0

    def arm(self, worker: str, key: bytes) -> None:
        """Seal statements as `worker` under its key of this boot."""
        if len(key) == KEY_BYTES:
            self._worker, self._key = worker, key

    def disarm(self) -> None:
        """Forget the key: the vault is gone."""
        self._worker, self._key = "", b""

    async def open(self, request: HandoffRequest, judged_body: bytes | None = None) -> HandoffExchange:
        return await self._open(request, judged_body, lambda statement: seal(statement, self._key))

    async def open_forged(self, request: HandoffRequest) -> HandoffExchange:
        """As `open` without a body, under a seal that is none: for the self-check."""
        return await self._open(request, None, forged)

    async def _open(
        self, request: HandoffRequest, judged_body: bytes | None, sealed: Callable[[Statement], bytes]
    ) -> HandoffExchange:
        if not self._key:
            raise BrokerUnavailable("no key for hand-offs yet")
        if (judged_body is not None) != request.body.judges:
            raise BrokerUnavailable("the body plan and the judged body do not fit")
        ours, theirs = socket_pair()
        try:
            await self._pass_on(theirs)
            stream = await open_socket_stream(ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        stream.share = self._turns.share((request.tenant, request.sandbox))
        frames = FrameStream(stream)
        exchange = _SocketExchange(frames)
        try:
            frames.send(statement_frame(sealed(self._statement(request))))
            if judged_body is not None:
                for start in range(0, len(judged_body), DATA_CHUNK):
                    frames.send(body_frame(judged_body[start : start + DATA_CHUNK]))
                if not request.body.prefix:
                    frames.send(BODY_END_FRAME)
            await frames.drain()
        except (StreamBroken, WireError):
            frames.abort()
            raise BrokerUnavailable("the executor did not take the hand-off") from None
        except BaseException:
            frames.abort()
            raise
        return exchange

    def _statement(self, request: HandoffRequest) -> Statement:
        return Statement(
            worker=self._worker,
            nonce=self._random(NONCE_BYTES),
            issued_at=self._clock.wall(),
            request_id=request.request_id,
            tenant=request.tenant,
            sandbox=request.sandbox,
            epoch=request.epoch,
            evidence=request.evidence,
            policy_digest=request.policy_digest,
            method=request.method,
            scheme=request.scheme,
            host=request.host,
            port=request.port,
            target=request.target,
            headers=request.headers,
            body=request.body,
            upgrade=request.upgrade,
            rule=request.rule,
            operation=request.operation,
            arguments=request.arguments,
            credential=request.credential,
        )

    async def _pass_on(self, theirs: socket.socket) -> None:
        """Give the socket to the next executor that takes it; one that is gone is not asked again."""
        for _ in range(len(self._channels)):
            if not self._channels:
                break
            self._next = (self._next + 1) % len(self._channels)
            channel = self._channels[self._next]
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await channel.send(HANDOFF_MESSAGE, theirs)
            except ChannelBroken:
                channel.close()
                self._channels.remove(channel)
            except TimeoutError:
                continue
            else:
                return
        raise BrokerUnavailable("no executor takes hand-offs")


class _SocketExchange:
    """One hand-off over its own socket."""

    def __init__(self, frames: FrameStream) -> None:
        self._frames = frames
        self._over = False
        self._closed = False
        frames.stream.read_timeout = VERDICT_SECONDS

    async def send_body(self, data: bytes) -> None:
        for start in range(0, len(data), DATA_CHUNK):
            self._frames.send(body_frame(data[start : start + DATA_CHUNK]))
            await self._drain()

    async def finish_body(self) -> None:
        self._frames.send(BODY_END_FRAME)
        await self._drain()

    async def receive(self) -> Answer:
        try:
            frame = await self._frames.receive()
            if frame is None:
                raise HandoffBroken("the executor ended the hand-off")
            answer = decode_answer(frame)
        except (StreamBroken, WireError):
            self._frames.abort()
            raise HandoffBroken("the hand-off broke") from None
        match answer:
            case Continue():
                self._frames.stream.read_timeout = ANSWER_SECONDS
            case Upgraded():
                self._frames.stream.read_timeout = UPGRADED_SECONDS
            case AnswerEnd() | Refusal() | AnswerAbort():
                self._over = True
                if self._frames.leftover:
                    # Bytes after the end belong to nobody's answer: the socket dies with them (RULINGS 2.4).
                    self._frames.abort()
            case AnswerHead() | AnswerData():
                pass
        return answer

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            self._frames.send(CANCEL_FRAME)
            self._frames.abort()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._over:
                await self._frames.close()
            else:
                self.cancel()

    async def _drain(self) -> None:
        try:
            await self._frames.drain()
        except StreamBroken:
            raise HandoffBroken("the executor no longer reads") from None
