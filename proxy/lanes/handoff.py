"""The broker's side of a lane: one permitted request handed off, its answer relayed to the client.

    open -> Continue | Refusal -> body up and answer down at once -> AnswerEnd

Rules (RULINGS 2.4, 11.5): what the broker refuses comes as a frame and is told as a refusal; what comes from upstream
is relayed as it is. An answer without its end reaches the client as an aborted message. No executor, or none that
answers in time: broker-unavailable, and nothing is ever sent without the credential.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, assert_never

from net.few import Busy, Few
from net.http1 import ServerConnection
from net.stream import ByteStream, StreamBroken
from proxy.answers import refuse_with
from proxy.brokerlink import BrokerLink, BrokerUnavailable, HandoffBroken, HandoffExchange, HandoffRequest
from proxy.gate import Gate, Handoff, Refuse, reply_to
from proxy.lanes.judged import Judged, Watched
from proxy.liveset import live_key
from proxy.ports import LiveHandle, LiveSet
from proxy.records import Outcome
from wire.handoff import (
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    AnswerHead,
    BodyPlan,
    Continue,
    Refusal,
    Upgraded,
)
from wire.heads import (
    CHUNKED,
    NO_BODY,
    Chunked,
    Framing,
    HeadRefused,
    Length,
    RequestHead,
    ResponseHead,
    request_framing,
)

OPEN_SECONDS: Final = 5.0
VERDICT_SECONDS: Final = 20.0
"""From the statement to Continue or Refusal: the vault decides, asks the secret's source and writes durably."""
ANSWER_SECONDS: Final = 610.0
"""From Continue, or from one piece of the answer, to the next: a little over the engine's own answer timeout."""
OPENING_OF_ONE: Final = 8
"""Hand-offs of one sandbox that have no verdict yet: broker and vault answer in order, and others wait behind them."""
WAITING_OF_ONE: Final = 256
"""More of them that wait here; one more is refused `too-many-requests`."""


class BrokerLane:
    """One per worker."""

    def __init__(
        self,
        *,
        gate: Gate,
        link: BrokerLink,
        live: LiveSet,
        open_seconds: float = OPEN_SECONDS,
        verdict_seconds: float = VERDICT_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._gate = gate
        self._link = link
        self._live = live
        self._open_seconds = open_seconds
        self._verdict_seconds = verdict_seconds
        self._answer_seconds = answer_seconds
        self._opening = Few(OPENING_OF_ONE, waiting=WAITING_OF_ONE)

    async def hand_off(
        self, connection: ServerConnection, head: RequestHead, passage: Handoff, judged: Judged | None
    ) -> bool:
        """Hand one request off; True: the connection can carry another. Writes passage's end, always."""
        error = "internal-error"
        exchange: HandoffExchange | None = None
        run = _Run(connection)
        handle: LiveHandle | None = None
        try:
            handle = self._live.add(live_key(passage), run.cut, lambda new: self._gate.still_allowed(passage, new))
            async with self._opening.place((passage.sandbox.tenant, passage.sandbox.id)):
                async with asyncio.timeout(self._open_seconds):
                    exchange = await self._link.open(request_of(head, passage, judged), judged.data if judged else None)
                run.exchange = exchange
                async with asyncio.timeout(self._verdict_seconds):
                    verdict = await exchange.receive()
            if run.reason:
                raise HandoffBroken(run.reason)
            error = ""  # from here on the broker has recorded what it decided
            match verdict:
                case Refusal():
                    return await self._told(connection, passage, _refuse(passage, verdict))
                case AnswerAbort():
                    return await self._told(connection, passage, _aborted(passage, verdict.reason))
                case Continue():
                    return await self._relay(connection, head, passage, exchange, run, judged)
                case _:
                    return await self._told(connection, passage, _aborted(passage, "broker-unavailable"))
        except Busy:
            error = "too-many-requests"
            return await refuse_with(connection, self._gate.failed(passage, error), close=True)
        except (BrokerUnavailable, HandoffBroken, TimeoutError):
            # Before the verdict: the worker records it. After it: the broker did, with its own outcome.
            reason = run.reason or run.client_failed or "broker-unavailable"
            error = error and reason
            if run.answered:
                connection.abort()
                return False
            return await refuse_with(connection, self._gate.failed(passage, reason), close=True)
        except StreamBroken:
            connection.abort()
            return False
        finally:
            if handle is not None:
                handle.close()
            if exchange is not None:
                await exchange.close()
            await self._gate.done(passage, Outcome(error=error))

    async def _told(self, connection: ServerConnection, passage: Handoff, refuse: Refuse) -> bool:
        return await refuse_with(connection, self._gate.told_by_broker(passage, refuse))

    async def _relay(
        self,
        connection: ServerConnection,
        head: RequestHead,
        passage: Handoff,
        exchange: HandoffExchange,
        run: _Run,
        judged: Judged | None,
    ) -> bool:
        """Body up and answer down at once. Raises HandoffBroken, TimeoutError, StreamBroken."""
        uploading: asyncio.Task[None] | None = None
        if (judged is None or judged.whole is None) and request_framing(head) != NO_BODY:
            await connection.send_continue()
            uploading = asyncio.ensure_future(self._upload(connection, passage, exchange, judged, run))
        connection.on_broken(exchange.cancel)
        try:
            while True:
                async with asyncio.timeout(self._answer_seconds):
                    answer = await exchange.receive()
                match answer:
                    case Continue():
                        raise HandoffBroken("a second verdict")
                    case Refusal() | AnswerAbort():
                        if run.answered:
                            connection.abort()
                            return False
                        refuse = (
                            _refuse(passage, answer)
                            if isinstance(answer, Refusal)
                            else _aborted(passage, answer.reason)
                        )
                        return await self._told(connection, passage, refuse)
                    case AnswerHead():
                        run.answered = True
                        if answer.status == 404:
                            self._gate.missed(passage)
                        framing = framing_of(answer, head.method)
                        await connection.send_head(_head(answer), framing)
                        if framing not in (NO_BODY, Length(0)):
                            await connection.flush()  # the first event of a stream may be a minute away (T14)
                    case AnswerData(data):
                        await connection.send_data(data)
                        await connection.flush()
                    case AnswerEnd():
                        await connection.finish()
                        break
                    case Upgraded():
                        run.answered = True
                        await self._raw(connection, answer, exchange, head)
                        return False
                    case _:
                        assert_never(answer)
        finally:
            connection.on_broken(None)
            if uploading is not None:
                uploading.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await uploading
        return not connection.must_close

    async def _upload(
        self,
        connection: ServerConnection,
        passage: Handoff,
        exchange: HandoffExchange,
        judged: Judged | None,
        run: _Run,
    ) -> None:
        """The request body, piece by piece, without what was sent to be judged; what breaks cancels the call."""
        counted = "content-length" in {name for name, _ in passage.facts.headers}
        client = Watched(connection, b"" if judged is None else judged.behind or b"")
        told = False
        try:
            if judged is not None and not counted and not self._gate.charge_upload(passage, len(judged.data)):
                raise HeadRefused("body-too-large", "the hour's upload is used up")
            while (piece := await client.read_body()) is not None:
                if not counted and not self._gate.charge_upload(passage, len(piece)):
                    raise HeadRefused("body-too-large", "the hour's upload is used up")
                if client.found and not told:
                    told = True
                    await self._gate.alarm(passage)
                await exchange.send_body(piece)
            await exchange.finish_body()
        except HeadRefused as refused:
            run.client_failed = refused.reason
            connection.must_close = True
            exchange.cancel()
        except StreamBroken as broken:
            run.client_failed = "client-timeout" if broken.kind == "idle-timeout" else ""
            exchange.cancel()
        except HandoffBroken:
            exchange.cancel()

    async def _raw(
        self, connection: ServerConnection, answer: Upgraded, exchange: HandoffExchange, head: RequestHead
    ) -> None:
        """After 101: bytes both ways, which the executor frames, bounds and scans."""
        headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers)
        await connection.send_head(ResponseHead(101, "Switching Protocols", "1.1", headers), NO_BODY)
        await connection.flush()
        stream = connection.detach()
        stream.read_timeout = None  # the executor bounds silence and length of life
        up = asyncio.ensure_future(_pump_up(stream, exchange))
        try:
            while isinstance(piece := await exchange.receive(), AnswerData):
                stream.write(piece.data)
                await stream.drain()
            if isinstance(piece, AnswerEnd):
                await stream.close()
        finally:
            up.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await up
            stream.abort()


class _Run:
    """What a cut needs of one hand-off in progress."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self.exchange: HandoffExchange | None = None
        self.answered = False
        self.reason = ""
        self.client_failed = ""
        """Why the rest of the request could not be taken: the client's own fault, and what it is told."""

    def cut(self, reason: str) -> None:
        self.reason = "sandbox-ended" if reason == "sandbox-ended" else "policy-changing"
        if self.exchange is not None:
            self.exchange.cancel()
        self._connection.abort()


async def _pump_up(stream: ByteStream, exchange: HandoffExchange) -> None:
    try:
        while data := await stream.receive():
            await exchange.send_body(data)
        await exchange.finish_body()
    except (StreamBroken, HandoffBroken):
        exchange.cancel()


def request_of(head: RequestHead, passage: Handoff, judged: Judged | None) -> HandoffRequest:
    """What the worker says of the request it judged. The slot's header goes along: the broker checks it itself."""
    facts, permit = passage.facts, passage.permit
    destination = permit.destination
    headers = [("Host", destination.authority)]
    headers += [
        (raw.decode("latin-1"), value)
        for (raw, _), (name, value) in zip(head.headers, head.lower, strict=True)
        # The broker's Continue is our 100: nothing is left for the origin to say.
        if name not in ("host", "expect") and name not in passage.dropped
    ]
    return HandoffRequest(
        request_id=passage.request_id,
        tenant=passage.sandbox.tenant,
        sandbox=passage.sandbox.id,
        epoch=passage.sandbox.epoch,
        evidence=passage.who.evidence,
        policy_digest=passage.policy_digest,
        method=facts.method,
        scheme=destination.scheme,
        host=destination.host.text,
        port=destination.port,
        target=facts.target,
        headers=tuple(headers),
        body=plan_of(request_framing(head), judged),
        upgrade=facts.upgrade or "",
        rule=permit.rule,
        operation=permit.operation,
        arguments=permit.arguments,
        credential=permit.credential or "",
    )


def plan_of(framing: Framing, judged: Judged | None) -> BodyPlan:
    """How the body travels: judged whole, or streamed as the client frames it, its beginning judged or not."""
    if judged is not None and judged.whole is not None:
        return BodyPlan.judged(judged.whole)
    if judged is not None:
        return BodyPlan.begun(judged.data, framing.size if isinstance(framing, Length) else None)
    match framing:
        case Length(size):
            return BodyPlan(kind="length", length=size)
        case Chunked():
            return BodyPlan(kind="chunked")
        case _:
            return BodyPlan()


def framing_of(answer: AnswerHead, method: str) -> Framing:
    """How the answer's body is framed towards the client."""
    if method == "HEAD" or answer.status in (204, 304):
        return NO_BODY
    return CHUNKED if answer.length is None else Length(answer.length)


def _head(answer: AnswerHead) -> ResponseHead:
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers)
    return ResponseHead(answer.status, answer.reason, "1.1", headers)


def _refuse(passage: Handoff, told: Refusal) -> Refuse:
    return Refuse(
        request_id=passage.request_id,
        reason=told.reason,
        rule=told.rule,
        remedy=told.remedy,
        message=told.message,
        ticket=told.ticket,
        retry_after=told.retry_after,
        native=passage.native,
        reply_to=reply_to(passage.native, passage.facts),
    )


def _aborted(passage: Handoff, reason: str) -> Refuse:
    return Refuse(
        request_id=passage.request_id,
        reason=reason,
        native=passage.native,
        reply_to=reply_to(passage.native, passage.facts),
    )
