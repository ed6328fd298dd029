"""The main lane: HTTP/1.1 requests of one identified sandbox, judged one by one, relayed as the gate says.

`Visit` is one connection (or the inside of one tunnel); `Http1Lane.serve` runs its requests; `Http1Lane.one` handles
one request and says whether the connection can go on. Per request:

    head -> facts -> help host, stub endpoint?
                     gate.head -> Refuse     answered at once, reading paused, discard bounded
                                              -> NeedsBody  100 Continue by us, at most the bound, gate.body; or its
                                                            first bytes (`prefix`), and the rest streams behind them
                                              -> Forward    pool and dialer, net.exchange, WebSocket where permitted
                                              -> Handoff    lanes/handoff.py
    gate.done(outcome)                                      always, whatever was raised

Rules: a pipelined request is judged by itself, after the one before it was answered. What is sent upstream is written
anew from what was judged. A cut (sandbox ended, policy tightened) aborts both sides of the exchange in progress.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from net.dial import DialError, DialTarget
from net.exchange import AnswerRefused, ExchangeResult, OutgoingRequest, exchange
from net.few import Busy
from net.http1 import ServerConnection
from net.pool import Lease, Pool, PoolKey
from net.stream import ByteStream, Headers, StreamBroken
from net.trust import TrustKey
from net.websocket import relay as relay_websocket
from proxy.answers import answer, page, refuse_with
from proxy.explicit import as_request
from proxy.gate import Forward, Gate, Handoff, NeedsBody, Refuse
from proxy.help import HelpHost, HelpRefused, is_help
from proxy.identity import Identified, same_identity
from proxy.lanes.handoff import BrokerLane
from proxy.lanes.judged import Judged, Watched
from proxy.lanes.tools import Tools
from proxy.limits import BodyShare, RefusalPace
from proxy.liveset import live_key
from proxy.ports import LiveHandle, LiveSet
from proxy.records import Outcome, Seen
from proxy.stubs import Matched, StubHost
from rules.explicit import Stated
from rules.facts import FactsRefused, RequestFacts, TunnelFacts
from rules.names import OWN_NAME, Host, Scheme
from rules.placeholders import find
from rules.reasons import reason
from rules.redirects import STATUSES, host_of
from rules.stubs import MAX_BODY
from wire.heads import (
    NO_BODY,
    Chunked,
    Framing,
    HeadRefused,
    RequestHead,
    ResponseHead,
    request_framing,
    requested_upgrade,
)
from wire.refusals import Rendered

COLLECT_SECONDS: Final = 120.0
"""For a whole body that has to be judged."""
RETRY_METHODS: Final = frozenset({"GET", "HEAD"})
"""Without a body, and only where a reused connection died before a byte of answer (RULINGS 9.7)."""

_ANSWER_DROPPED: Final = frozenset({b"alt-svc", b"proxy-connection"})
_ANSWER_DROPPED_PREFIXES: Final = (b"proxy-", b"exeat-")


_EXPLICIT: Final = Seen(lane="explicit")
_FAULT: Final = Outcome(error="internal-error")
"""What became of a passage whose lane raised before it could say so; a second `done` changes nothing."""


@dataclass(slots=True, kw_only=True)
class Visit:
    """One connection of one sandbox, or the inside of one of its tunnels. `tunnel` None: the proxy itself is asked."""

    who: Identified
    connection: ServerConnection
    scheme: Scheme
    tunnel: TunnelFacts | None = None
    sni: str | None = None
    seen: Seen = field(default_factory=lambda: Seen(lane="http1"))


class Http1Lane:
    """One per worker."""

    def __init__(
        self,
        *,
        gate: Gate,
        pool: Pool,
        broker: BrokerLane,
        live: LiveSet,
        help_host: HelpHost,
        pace: RefusalPace,
        stubs: StubHost | None = None,
        collect_seconds: float = COLLECT_SECONDS,
    ) -> None:
        self._gate = gate
        self._pool = pool
        self._broker = broker
        self._live = live
        self._help = help_host
        self._stubs = stubs
        self._tools = Tools(help_host=help_host, serve=self._serve_inside, wish=self._wish)
        self._pace = pace
        self._collect_seconds = collect_seconds
        self.draining = False
        """True: connections end after the request in progress."""

    async def serve(self, visit: Visit) -> None:
        """Handle requests until the connection ends. The stream is closed when this returns."""
        connection = visit.connection
        while True:
            head = await self.next_head(visit)
            if head is None or not await self.one(visit, head) or self.draining:
                break
        await connection.close()

    async def _serve_inside(self, who: Identified, stream: ByteStream) -> None:
        """Requests of `who` to the help host over a stream of our own."""
        tunnel = TunnelFacts(host=Host(OWN_NAME), port=80)
        await self.serve(Visit(who=who, connection=ServerConnection(stream), scheme="http", tunnel=tunnel))

    async def refuse_one(self, visit: Visit, code: str) -> None:
        """Read one request, refuse it with `code`, and end the connection."""
        head = await self.next_head(visit)
        if head is not None:
            await self._refuse(visit, code, head=head, close=True)
        await visit.connection.close()

    async def next_head(self, visit: Visit) -> RequestHead | None:
        """The next head, or None when there is none; what is no head is refused and recorded here."""
        try:
            return await visit.connection.next_head()
        except HeadRefused as error:
            await self._refuse(visit, error.reason, detail=error.detail, close=True)
        except StreamBroken:
            visit.connection.abort()
        return None

    async def one(self, visit: Visit, head: RequestHead) -> bool:
        """Handle one request; True: the connection can carry another."""
        if visit.tunnel is None and not same_identity(visit.who, head.get("proxy-authorization")):
            # RULINGS 2.5: the first head fixed who this is.
            return await self._refuse(visit, "auth-required", detail="another identity on one connection", close=True)
        try:
            facts = make_facts(visit, head)
        except (FactsRefused, HeadRefused) as error:
            return await self._refuse(visit, error.reason, head=head, detail=error.detail, close=True)
        if is_help(facts):
            return await self._answer_help(visit, facts)
        if self._stubs is not None and (matched := self._stubs.match(visit.who, facts)) is not None:
            return await self._answer_stub(visit, facts, matched)
        asked = await self._gate.head(visit.who, facts, visit.seen)
        if not isinstance(asked, NeedsBody):
            return await self._carry_out(visit, head, asked, None)
        share = self._gate.body_share(visit.who)
        try:
            verdict, judged = await self._judge_body(visit, asked, share)
            return await self._carry_out(visit, head, verdict, judged)
        finally:
            share.close()

    async def _carry_out(
        self, visit: Visit, head: RequestHead, verdict: Refuse | Handoff | Forward, judged: Judged | None
    ) -> bool:
        match verdict:
            case Refuse():
                return await self._tell(visit, verdict)
            case Handoff():
                try:
                    return await self._broker.hand_off(visit.connection, head, verdict, judged)
                finally:
                    await self._gate.done(verdict, _FAULT)
            case Forward():
                try:
                    return await self._forward(visit, head, verdict, judged)
                finally:
                    await self._gate.done(verdict, _FAULT)
            case _:
                assert_never(verdict)

    # --- refusals and help ---

    async def _refuse(
        self, visit: Visit, code: str, *, head: RequestHead | None = None, detail: str = "", close: bool
    ) -> bool:
        seen = replace(visit.seen, host_header=plain_host(head)) if head is not None else visit.seen
        refuse = await self._gate.refuse(code, who=visit.who, tunnel=visit.tunnel, seen=seen, detail=detail)
        return await self._tell(visit, refuse, close=close)

    async def _tell(self, visit: Visit, refuse: Refuse, *, close: bool = False) -> bool:
        sandbox = visit.who.sandbox
        paced = self._pace.within((sandbox.tenant, sandbox.id))
        return await refuse_with(visit.connection, refuse, close=close or not paced or refuse.reason in _CLOSING)

    async def _answer_help(self, visit: Visit, facts: RequestFacts) -> bool:
        share = self._gate.body_share(visit.who)
        try:
            page = await self._posted(visit, facts, share) if facts.method == "POST" else await self._page(visit, facts)
            if isinstance(page, Rendered) and not share.take(len(page.body)):
                page = HelpRefused(reason="too-many-requests")  # pages that nobody reads are held until they are sent
            match page:
                case HelpRefused():
                    refuse = await self._gate.refuse(page.reason, who=visit.who, facts=facts)
                    return await self._tell(visit, replace(refuse, remedy=page.remedy))
                case Stated():
                    return await self._explicit(visit, page)
                case Rendered():
                    return await answer(visit.connection, page)
                case _:
                    assert_never(page)
        finally:
            share.close()

    async def _answer_stub(self, visit: Visit, facts: RequestFacts, matched: Matched) -> bool:
        """A token or metadata endpoint of ours. What the client presents is read to its end and dropped."""
        assert self._stubs is not None
        connection, box = visit.connection, visit.who.sandbox
        if not self._pace.within((box.tenant, box.id)):
            return await self._refuse(visit, "too-many-requests", close=True)
        try:
            async with asyncio.timeout(self._collect_seconds):
                await connection.send_continue()
                incoming = connection.body(limit=MAX_BODY)
                while await incoming.read() is not None:
                    pass
        except HeadRefused as error:
            return await self._refuse(visit, error.reason, close=True)
        except (TimeoutError, StreamBroken):
            return await self._refuse(visit, "client-timeout", close=True)
        made, said = self._stubs.answer(matched, facts)
        credential, kind = str(said.stub.credential.name), said.stub.kind
        if not await self._gate.stubbed(visit.who, facts, visit.seen, credential, kind, said.status):
            return await self._refuse(visit, "audit-unavailable", close=False)
        return await answer(connection, made)

    async def _page(self, visit: Visit, facts: RequestFacts) -> Rendered | HelpRefused:
        if facts.path.segments[0] != "operations":
            return self._help.answer(visit.who, facts)
        return await self._aside(visit.who, lambda: self._help.answer(visit.who, facts))  # schemas of a whole role

    async def _aside[T](self, who: Identified, work: Callable[[], T]) -> T | HelpRefused:
        try:
            return await self._gate.aside(who, work)
        except (Busy, TimeoutError):
            return HelpRefused(reason="too-many-requests")

    async def _explicit(self, visit: Visit, made: Stated) -> bool:
        """Judge and carry out the request that an input stated, as if this connection had sent it."""
        head, facts = as_request(made)
        visit = replace(
            visit, scheme=made.scheme, tunnel=TunnelFacts(host=made.host, port=made.port), sni=None, seen=_EXPLICIT
        )
        verdict = await self._gate.head(visit.who, facts, visit.seen)
        if isinstance(verdict, NeedsBody):
            body = made.body or b""
            if len(body) > verdict.bound:
                verdict = await self._gate.refuse_waiting(verdict, "body-not-judged")
            else:
                verdict = await self._gate.body(verdict, body)
        elif not isinstance(verdict, Refuse) and find((made.body or b"").decode("latin-1")):
            await self._gate.alarm(verdict)  # as in a body that streams
        # Who asks like this reads our own form of a refusal, not the service's.
        judged = None if made.body is None else Judged(data=made.body)
        return await self._carry_out(visit, head, replace(verdict, native="problem"), judged)

    async def _posted(self, visit: Visit, facts: RequestFacts, share: BodyShare) -> Rendered | Stated | HelpRefused:
        """A POST to the help host: its head is judged before a byte of its body is asked for."""
        bound = self._help.takes(facts)
        if isinstance(bound, HelpRefused):
            return bound
        connection, collected = visit.connection, bytearray()
        try:
            async with asyncio.timeout(self._collect_seconds):
                await connection.send_continue()
                incoming = connection.body(limit=bound)
                while (piece := await incoming.read()) is not None:
                    if not share.take(len(piece)):
                        connection.must_close = True
                        return HelpRefused(reason="too-many-requests")
                    collected += piece
        except HeadRefused as error:
            connection.must_close = True
            return HelpRefused(reason=error.reason)
        except (TimeoutError, StreamBroken):
            connection.must_close = True
            return HelpRefused(reason="client-timeout")
        who, raw = visit.who, bytes(collected)
        match facts.path.segments:
            case ("operations", name):
                return await self._aside(who, lambda: self._help.stated(who, name, raw))
            case ("mcp",):
                read = await self._aside(who, lambda: self._tools.read(who, facts, raw))
                return read if isinstance(read, HelpRefused) else await self._tools.answer(who, read, connection, share)
            case ("access",):
                return await self._wish(who, raw)
            case _:
                return self._help.posted(who, raw)

    async def _wish(self, who: Identified, raw: bytes) -> Rendered | HelpRefused:
        """Put a request for access on record. Nothing is granted."""
        note = self._help.wished(who, raw)
        if isinstance(note, HelpRefused):
            return note
        if not await self._gate.wish(who, note):
            return HelpRefused(reason="audit-unavailable")
        said = {"asked": note.request_id, "granted": False, "next": "A person decides; ask again after that."}
        return page(json.dumps(said).encode() + b"\n", "application/json")

    # --- a body that is judged ---

    async def _judge_body(
        self, visit: Visit, waiting: NeedsBody, share: BodyShare
    ) -> tuple[Refuse | Handoff | Forward, Judged | None]:
        """Collect at most the bound and ask again (RULINGS 11.4); with `prefix` a piece more."""
        gate, connection = self._gate, visit.connection
        collected = bytearray()
        try:
            async with asyncio.timeout(self._collect_seconds):
                await connection.send_continue()
                incoming = connection.body(limit=None if waiting.prefix else waiting.bound)
                while (piece := await incoming.read()) is not None:
                    if not share.take(len(piece)):
                        return await self._unjudged(visit, waiting, "too-many-requests"), None
                    collected += piece
                    if len(collected) > waiting.bound:
                        if waiting.prefix:
                            break
                        return await self._unjudged(visit, waiting, "body-not-judged"), None
        except HeadRefused as error:
            code = "body-not-judged" if error.reason == "body-too-large" else error.reason
            return await self._unjudged(visit, waiting, code), None
        except TimeoutError:
            return await self._unjudged(visit, waiting, "client-timeout"), None
        except StreamBroken:
            return await self._unjudged(visit, waiting, "client-timeout"), None
        body, behind = bytes(collected[: waiting.bound]), bytes(collected[waiting.bound :])
        if not behind:
            return await gate.body(waiting, body), Judged(data=body)
        return await gate.body(waiting, body, partial=True), Judged(data=body, behind=behind)

    async def _unjudged(self, visit: Visit, waiting: NeedsBody, code: str) -> Refuse:
        visit.connection.must_close = True
        return await self._gate.refuse_waiting(waiting, code)

    # --- plain allowed traffic ---

    async def _forward(self, visit: Visit, head: RequestHead, passage: Forward, judged: Judged | None) -> bool:
        first, again = await self._attempt(visit, head, passage, judged, fresh=False)
        if not again:
            return first
        verdict = await self._gate.head(visit.who, passage.facts, passage.seen)
        match verdict:
            case Forward():
                try:
                    second, _ = await self._attempt(visit, head, verdict, judged, fresh=True)
                    return second
                finally:
                    await self._gate.done(verdict, _FAULT)
            case Refuse():
                return await self._tell(visit, verdict)
            case Handoff():
                # The policy changed between two attempts: what was written as a hand-off ends as a refusal.
                await self._gate.done(verdict, Outcome(error="policy-changing"))
                return await self._tell(visit, self._gate.failed(verdict, "policy-changing"), close=True)
            case NeedsBody():
                return await self._tell(visit, await self._gate.refuse_waiting(verdict, "policy-changing"), close=True)
            case _:
                assert_never(verdict)

    async def _attempt(
        self, visit: Visit, head: RequestHead, passage: Forward, judged: Judged | None, *, fresh: bool
    ) -> tuple[bool, bool]:
        """(the connection goes on, try once more): one dial or pooled connection, one intent, one outcome."""
        gate, connection = self._gate, visit.connection
        outcome = Outcome(error="internal-error")
        cut = _Cut()
        handle: LiveHandle | None = None
        lease: Lease | None = None
        reserved = 0
        try:
            handle = self._live.add(live_key(passage), cut, lambda new: gate.still_allowed(passage, new))
            lease = await self._pool.acquire(PoolKey(target=dial_target(passage)), fresh=fresh)
            cut.arm(connection.abort, lease.connection.abort)
            limit = passage.permit.restrictions.request_bytes
            framing = NO_BODY if judged is not None and judged.whole is not None else request_framing(head)
            if isinstance(framing, Chunked):
                reserved, limit = self._reserve(passage, limit)
            request = outgoing(head, passage, framing, judged, limit)
            shaped = _PlainAnswer()
            client = Watched(
                connection, b"" if judged is None or judged.behind is None else judged.data + judged.behind
            )
            result = await exchange(client, lease.connection, request, on_response=shaped)
            if client.found:
                await gate.alarm(passage)
            outcome = outcome_of(result, lease, cut)
            if shaped.leads != passage.permit.destination.host.text:
                outcome = replace(outcome, redirect_host=shaped.leads)
            again = (
                not fresh
                and lease.reused
                and bool(result.error)
                and not (result.answered or result.head_sent or cut.reason)
                and result.error != "client-gone"
                and head.method in RETRY_METHODS
                and framing == NO_BODY
            )
            if again:
                return False, True
            if result.upgraded:
                outcome = await self._websocket(visit, lease, outcome, cut, compressed=shaped.deflated)
                lease = None
                return False, False
            if result.error == "client-gone":
                connection.abort()
                return False, False
            if result.error and not result.head_sent:
                refuse = gate.failed(passage, cut.reason or result.error)
                outcome = replace(outcome, status=await self._status(visit, refuse))
                return not connection.must_close, False
            if result.error:
                connection.abort()
                return False, False
            self._pool.release(lease)
            lease = None
            return not connection.must_close, False
        except DialError as error:
            refuse = gate.failed(passage, cut.reason or error.reason)
            outcome = Outcome(error=error.reason, detail=error.detail_for_log, address=error.address)
            outcome = replace(outcome, status=await self._status(visit, refuse))
            return not connection.must_close, False
        finally:
            if handle is not None:
                handle.close()
            if lease is not None:
                self._pool.discard(lease)
            if reserved:
                gate.refund_upload(passage, reserved - outcome.bytes_up)
            await gate.done(passage, outcome)

    def _reserve(self, passage: Forward, limit: int | None) -> tuple[int, int | None]:
        """Take from the upload budget what a chunked body may use; the rest is given back."""
        left = self._gate.reserve_upload(passage)
        if left is None:
            return 0, limit
        return left, left if limit is None else min(left, limit)

    async def _status(self, visit: Visit, refuse: Refuse) -> int:
        """Tell the client, and return the status it was told."""
        if not await self._tell(visit, refuse):
            visit.connection.must_close = True
        return reason(refuse.reason).status

    async def _websocket(self, visit: Visit, lease: Lease, outcome: Outcome, cut: _Cut, *, compressed: bool) -> Outcome:
        """After a valid 101: frames both ways, bounded and counted."""
        client, origin = visit.connection.detach(), lease.connection.detach()
        self._pool.detach(lease)
        cut.arm(client.abort, origin.abort)
        result = await relay_websocket(client, origin, compressed=compressed)
        return replace(
            outcome,
            bytes_up=outcome.bytes_up + result.bytes_up,
            bytes_down=outcome.bytes_down + result.bytes_down,
            completed=result.error is None and not cut.reason,
            error=cut.reason or result.error or "",
        )


_CLOSING: Final = frozenset(
    {"bad-framing", "bad-head", "bad-version", "head-too-large", "authority-mismatch", "sni-mismatch"}
    | {"bad-token", "sandbox-ended", "shutting-down", "client-timeout", "body-too-large", "body-not-judged"}
)
"""After these the connection is not used again: what follows on it cannot be trusted to be a request, or nobody's."""


class _Cut:
    """The cut of one exchange: remembers why, and aborts what was armed, now or later."""

    def __init__(self) -> None:
        self.reason = ""
        self._aborts: tuple[Callable[[], None], ...] = ()

    def arm(self, *aborts: Callable[[], None]) -> None:
        self._aborts = aborts
        if self.reason:
            self._run()

    def __call__(self, reason: str) -> None:
        self.reason = "sandbox-ended" if reason == "sandbox-ended" else "policy-changing"
        self._run()

    def _run(self) -> None:
        for abort in self._aborts:
            abort()


def make_facts(visit: Visit, head: RequestHead) -> RequestFacts:
    """The facts of one request on this visit. Raises FactsRefused and HeadRefused."""
    tunnel = visit.tunnel
    if tunnel is None and head.target.startswith("/") and plain_host(head) == OWN_NAME:
        # Clients that reach the help host by a route of its own send origin-form (RULINGS 8.2).
        tunnel = TunnelFacts(host=Host(OWN_NAME), port=80)
    return RequestFacts.build(
        method=head.method,
        scheme=visit.scheme,
        tunnel=tunnel,
        sni=visit.sni,
        target=head.target,
        headers=head.lower,
        has_body=request_framing(head) != NO_BODY,
        upgrade=requested_upgrade(head),
    )


def plain_host(head: RequestHead | None) -> str:
    """The Host header's name for records, canonical; empty where it is not one."""
    values = head.get("host") if head is not None else ()
    try:
        name, _, _port = values[0].partition(":")
        return Host.parse(name).text
    except (IndexError, ValueError):
        return ""


def dial_target(passage: Forward) -> DialTarget:
    """Where to connect, from the permit and the destination's definition, never from the client's bytes."""
    destination = passage.permit.destination
    route = passage.route
    return DialTarget(
        tenant=passage.sandbox.tenant,
        sandbox=passage.sandbox.id,
        destination=destination,
        want_tls=destination.scheme == "https",
        addresses_allowed=route.addresses if route else (),
        static=route.static if route else (),
        trust=TrustKey(ca_pem=route.ca_pem if route else None),
    )


def outgoing(
    head: RequestHead, passage: Forward, framing: Framing, judged: Judged | None, limit: int | None
) -> OutgoingRequest:
    """The request as it is sent: judged target, Host from the destination, headers that may go on, in their order."""
    facts = passage.facts
    host = (b"Host", facts.destination.authority.encode("ascii"))
    return OutgoingRequest(
        method=facts.method,
        target=facts.target,
        # A judged body is here already: nothing is left to expect (we sent the 100 ourselves).
        headers=(host, *kept_headers(head, passage.dropped if judged is None else passage.dropped | {"expect"})),
        framing=framing,
        body=judged.whole if judged is not None else None,
        upgrade=facts.upgrade,
        request_limit=limit,
        response_limit=passage.permit.restrictions.response_bytes,
    )


def kept_headers(head: RequestHead, dropped: frozenset[str]) -> Headers:
    """The client's headers that go on, names as sent; Host is written by us."""
    return tuple(
        pair for pair, (name, _) in zip(head.headers, head.lower, strict=True) if name != "host" and name not in dropped
    )


class _PlainAnswer:
    """`plain_answer`, remembering whether an upgraded connection agreed on compressed messages, and where it leads."""

    deflated = False
    leads = ""

    def __call__(self, head: ResponseHead) -> ResponseHead:
        self.leads = host_of("".join(head.get("location")[:1])) if head.status in STATUSES else ""
        self.deflated = any("permessage-deflate" in value for value in head.get("sec-websocket-extensions"))
        return plain_answer(head)


def plain_answer(head: ResponseHead) -> ResponseHead:
    """What of a plain origin's head reaches the sandbox: nothing that speaks to or for the proxy (B201)."""
    if head.status == 407:
        raise AnswerRefused("upstream-protocol", "an origin asked for proxy credentials")
    kept = tuple(
        (name, value)
        for name, value in head.headers
        if (lower := name.lower()) not in _ANSWER_DROPPED and not lower.startswith(_ANSWER_DROPPED_PREFIXES)
    )
    return ResponseHead(head.status, head.reason, head.version, kept)


def outcome_of(result: ExchangeResult, lease: Lease, cut: _Cut) -> Outcome:
    """The outcome record's values for one exchange."""
    return Outcome(
        status=result.status or 0 if result.head_sent else 0,
        upstream_status=result.status or 0,
        bytes_up=result.bytes_up,
        bytes_down=result.bytes_down,
        completed=result.completed,
        error=cut.reason or result.error or "",
        address=lease.address,
        tls=lease.tls_version or "",
    )
