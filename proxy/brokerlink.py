"""The client side of the hand-off: what the gate and a lane call, and its implementation over passed sockets.

    link.open(request, judged_body)  -> HandoffExchange        the statement is sealed and sent
    exchange.receive()               -> Continue | Refusal     the verdict; nothing went upstream before
    exchange.send_body / finish_body                           a streamed body, after Continue
    exchange.receive()               -> AnswerHead, AnswerData*, AnswerEnd
    exchange.close()                                           always; before AnswerEnd it cancels the call

An answer that ends by AnswerAbort, or by HandoffBroken, reaches the client as an aborted message (RULINGS 2.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rules.names import Scheme
from wire.handoff import Answer, BodyPlan, Evidence


class BrokerUnavailable(Exception):
    """No executor can take the hand-off: refuse with `broker-unavailable`. Nothing was sent upstream."""


class HandoffBroken(Exception):
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
        """Seal and send the statement and, where one was judged, its body. Raises BrokerUnavailable."""
        ...
