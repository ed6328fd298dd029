"""The front door: one accepted connection, from its first byte to the lane that serves it. Strict, and ours.

    accept -> counted -> first bytes -> head -> identity -> absolute-form   one request of lanes/http1.py, and again
                                                         -> CONNECT         gate.tunnel, 200, first bytes, lane
                                                         -> anything else   400
    capture -> counted -> identity -> looked-up name                        gate.tunnel, first bytes, lane

Rules:
1. Not HTTP (SOCKS, TLS, a PROXY preface, HTTP/2) on the proxy's port: closed and recorded (bad-protocol).
2. No identity: 407 with a challenge where no token came, 403 otherwise; nothing else is looked at before (RULINGS 2.6).
3. A CONNECT's target and Host agree, or it is refused. Nothing is dialled for an inspected tunnel.
4. A denied CONNECT is answered at CONNECT, or inside TLS where only that can be read (RULINGS 5.6), once.
5. After 200 the client speaks first, within seconds: TLS whose server name is the tunnel's host, or clear HTTP where
   a rule says so for that very host and port. Anything else is closed and recorded (B076, B080).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from ssl import SSLContext
from typing import Final, Protocol

from net.contexts import HTTP1_ONLY, ContextUnavailable
from net.guard import Guard
from net.http1 import ServerConnection
from net.stream import DEFAULT_LIMITS, ByteStream, Limits, StreamBroken
from net.tls import ClientDistrustsCa, TlsStream, server_side
from net.turns import Turns
from proxy.answers import refuse_with
from proxy.gate import Admitted, Gate, Refuse
from proxy.identity import Identified, NotIdentified, identify, same_identity
from proxy.lanes.http1 import Http1Lane, Visit
from proxy.lanes.mitm import MitmLane
from proxy.lanes.tunnel import TunnelLane
from proxy.limits import Connections, LimitTable, RefusalLeaves, RefusalPace, Slot, Spaced
from proxy.liveset import connection_key, tunnel_key
from proxy.ports import Channel, Clock, Directory, DirectoryUnavailable, LiveSet
from proxy.records import Seen
from proxy.stubdns import StubNames
from proxy.stubs import METADATA_ADDRESSES, StubHost
from rules.facts import FactsRefused, TunnelFacts
from rules.names import OWN_NAME, Host, InvalidName, Owner, parse_authority
from wire.clienthello import ClientHello, ClientHelloReader, ClientHelloRefused
from wire.heads import HeadRefused, RequestHead

CHALLENGES: Final = 3
"""407s on one connection: a client that waits for a challenge asks again on it."""

ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
"""RFC 9110 9.3.6: an answer to CONNECT has no framing fields."""

H2_RULE: Final = "h2"
"""TunnelPermit.protocol where a rule says `protocol: h2`."""

_ALERT: Final = {"handshake_failure": 40, "unrecognized_name": 112, "no_application_protocol": 120}


class LeafContexts(Protocol):
    """TLS contexts towards sandboxes; net.contexts.ServerContexts is one."""

    async def get(self, host: Host, alpn: tuple[str, ...] = ..., *, owner: Owner | None = ...) -> SSLContext:
        """`owner` is the (tenant, sandbox) that it is for. Raises net.contexts.ContextUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class _Hello:
    """TLS: its ClientHello, and every byte read so far."""

    hello: ClientHello
    initial: bytes


@dataclass(frozen=True, slots=True)
class _Clear:
    """Not TLS; the bytes were put back."""

    looks_like_http: bool


@dataclass(frozen=True, slots=True)
class _Bad:
    """Nothing that may go on."""

    reason: str
    detail: str


class FrontDoor:
    """One per worker; `serve` once per accepted connection."""

    def __init__(
        self,
        *,
        gate: Gate,
        directory: Directory,
        clock: Clock,
        lane: Http1Lane,
        tunnel_lane: TunnelLane,
        mitm_lane: MitmLane,
        leaves: LeafContexts,
        refusal_leaves: LeafContexts,
        leaf_budget: RefusalLeaves,
        connections: Connections,
        pace: RefusalPace,
        live: LiveSet,
        table: LimitTable,
        names: StubNames,
        turns: Turns,
        stubs: StubHost | None = None,
        http_limits: Limits = DEFAULT_LIMITS,
        on_fault: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._gate = gate
        self._directory = directory
        self._clock = clock
        self._lane = lane
        self._tunnel_lane = tunnel_lane
        self._mitm_lane = mitm_lane
        self._leaves = leaves
        self._refusal_leaves = refusal_leaves
        self._leaf_budget = leaf_budget
        self._connections = connections
        self._pace = pace
        self._unused = Spaced(table, clock)
        self._live = live
        self._table = table
        self.names = names
        self._turns = turns
        self._stubs = stubs
        self._http_limits = http_limits
        self._on_fault = on_fault
        self.draining = False
        """True: connections end after the request in progress."""

    async def serve(self, stream: ByteStream, channel: Channel) -> None:
        """Serve one connection to its end; the stream is closed when this returns, whatever was raised."""
        await self._guarded(stream, channel, lambda slot: self._connection(stream, channel, slot))

    async def serve_captured(self, stream: ByteStream, channel: Channel, wanted: tuple[str, int] | None) -> None:
        """The same for a connection that a redirect inside the sandbox's namespace caught (capture/inside.py).

        `wanted` is the address and port that the client dialled. The address must be the one that the stub resolver
        gave this sandbox for a name, and that name is what is judged (RULINGS 5.7).
        """
        await self._guarded(stream, channel, lambda slot: self._captured(stream, channel, slot, wanted))

    async def _guarded(
        self, stream: ByteStream, channel: Channel, work: Callable[[Slot], Coroutine[None, None, None]]
    ) -> None:
        slot = self._connections.arrive(channel.listener, channel.peer)
        if slot is None:
            stream.abort()
            # Also beyond the pace: the log counts what it does not write singly (RULINGS 9.2).
            await self._refuse_connection(channel, None, "too-many-requests", Seen())
            return
        stream.share = self._turns.share(("", channel.peer or channel.listener), known=False)
        guard = Guard(self._on_fault)
        guard.watch(stream)
        try:
            await guard.run(work(slot))
        finally:
            self._connections.leave(slot)

    # --- requests to the proxy itself ---

    async def _connection(self, stream: ByteStream, channel: Channel, slot: Slot) -> None:
        try:
            stream.read_timeout = self._table.first_head_seconds
            first = await stream.receive()
            stream.unread(first)
        except StreamBroken:
            return
        if first and (strange := foreign_protocol(first)) is not None:
            await self._refuse_connection(channel, None, "bad-protocol", Seen(), detail=strange.detail)
            stream.write(strange.answer)
            await stream.close()
            return
        connection = ServerConnection(stream, self._http_limits)
        visitor: Identified | None = None
        challenges = 0
        handle = None
        try:
            while (head := await self._next_head(connection, channel, visitor)) is not None:
                if visitor is None:
                    found = self._identify(channel, head.get("proxy-authorization"))
                    if not isinstance(found, Identified):
                        if not self._pace.within(("", channel.peer)):
                            await self._not_identified(channel, found)
                            break  # a flood: counted, and closed without a word (RULINGS 9.2)
                        challenges += 1
                        refuse = await self._not_identified(channel, found)
                        if not await refuse_with(
                            connection, refuse, close=refuse.reason != "auth-required" or challenges >= CHALLENGES
                        ):
                            break
                        continue
                    if not self._connections.identified(slot, found.sandbox):
                        refuse = await self._gate.refuse("too-many-requests", who=found, event="connection.refused")
                        await refuse_with(connection, refuse, close=True)
                        break
                    visitor = found
                    stream.share = self._turns.share((found.sandbox.tenant, found.sandbox.id))
                    handle = self._live.add(connection_key(visitor), lambda reason: stream.abort())
                if head.method == "CONNECT":
                    await self._connect(connection, head, visitor)
                    return
                visit = Visit(who=visitor, connection=connection, scheme="http")
                if not await self._lane.one(visit, head) or self.draining:
                    break
            await connection.close()
        finally:
            if handle is not None:
                handle.close()

    async def _next_head(
        self, connection: ServerConnection, channel: Channel, visitor: Identified | None
    ) -> RequestHead | None:
        try:
            return await connection.next_head()
        except HeadRefused as error:
            refuse = await self._refuse_connection(channel, visitor, error.reason, Seen(), detail=error.detail)
            await refuse_with(connection, refuse, close=True)
        except StreamBroken:
            connection.abort()
        return None

    def _identify(self, channel: Channel, presented: tuple[str, ...]) -> Identified | NotIdentified | str:
        try:
            snapshot = self._directory.snapshot()
        except DirectoryUnavailable:
            return "policy-unavailable"
        return identify(channel, presented, snapshot, self._clock.wall())

    async def _not_identified(self, channel: Channel, found: NotIdentified | str) -> Refuse:
        if isinstance(found, str):
            return await self._gate.refuse(found, channel=channel, event="connection.refused")
        return await self._gate.refuse(found.reason, channel=channel, sandbox=found.sandbox, event="connection.refused")

    async def _refuse_connection(
        self,
        channel: Channel,
        who: Identified | None,
        reason: str,
        seen: Seen,
        *,
        detail: str = "",
        tunnel: TunnelFacts | None = None,
    ) -> Refuse:
        return await self._gate.refuse(
            reason, channel=channel, who=who, seen=seen, detail=detail, tunnel=tunnel, event="connection.refused"
        )

    # --- captured connections: there is no CONNECT, the looked-up name takes its place ---

    async def _captured(self, stream: ByteStream, channel: Channel, slot: Slot, wanted: tuple[str, int] | None) -> None:
        found = self._identify(channel, ())
        if not isinstance(found, Identified):
            await self._not_identified(channel, found)
            stream.abort()
            return
        if not self._connections.identified(slot, found.sandbox):
            await self._gate.refuse("too-many-requests", who=found, event="connection.refused")
            stream.abort()
            return
        sandbox = found.sandbox
        stream.share = self._turns.share((sandbox.tenant, sandbox.id))
        address, port = wanted if wanted is not None else ("", 0)
        seen = Seen(lane="captured", connect_host=f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
        host = self.names.host_of(sandbox.id, address)
        if host is None and address in METADATA_ADDRESSES and self._stubs is not None:
            literal = Host.of(address)
            host = literal if self._stubs.leads(found, literal, port) else None
        if host is None:
            detail = "a captured connection to an address that no looked-up name has"
            await self._refuse_connection(channel, found, "address-literal-refused", seen, detail=detail)
            stream.abort()
            return
        facts = TunnelFacts(host=host, port=port)
        seen = replace(seen, connect_host=f"{host.authority}:{port}")
        connection = self._live.add(connection_key(found), lambda reason: stream.abort())
        try:
            if host.text == OWN_NAME and port in (80, 443):
                await self._ours_inside(stream, found, facts, replace(seen, lane="help"))
                return
            if self._for_a_stub(found, facts):
                await self._ours_inside(stream, found, facts, seen)
                return
            await self._wait_for_unused(found)
            verdict = await self._gate.tunnel(found, facts, seen)
            if isinstance(verdict, Refuse):
                await self._deny_inside(stream, found, facts, verdict, clear_too=True)
                return
            await self._open(stream, verdict, captured=True)
        finally:
            connection.close()

    # --- CONNECT ---

    async def _connect(self, connection: ServerConnection, head: RequestHead, who: Identified) -> None:
        if not same_identity(who, head.get("proxy-authorization")):
            refuse = await self._gate.refuse("auth-required", who=who, detail="another identity on one connection")
            await refuse_with(connection, refuse, close=True)
            await connection.close()
            return
        try:
            facts = connect_facts(head)
        except FactsRefused as error:
            refuse = await self._gate.refuse(error.reason, who=who, detail=error.detail)
            await refuse_with(connection, refuse, close=True)
            await connection.close()
            return
        seen = Seen(lane="tunnel", connect_host=f"{facts.host.authority}:{facts.port}")
        if facts.host.text == OWN_NAME and facts.port in (80, 443):
            stream = connection.detach()
            stream.write(ESTABLISHED)
            await self._ours_inside(stream, who, facts, replace(seen, lane="help"))
            return
        if self._for_a_stub(who, facts):
            stream = connection.detach()
            stream.write(ESTABLISHED)
            await self._ours_inside(stream, who, facts, seen)
            return
        await self._wait_for_unused(who)
        verdict = await self._gate.tunnel(who, facts, seen)
        if isinstance(verdict, Refuse):
            await self._deny(connection, who, facts, verdict)
            return
        stream = connection.detach()
        stream.write(ESTABLISHED)
        await self._open(stream, verdict)

    async def _wait_for_unused(self, who: Identified) -> None:
        """Who shook hands for nothing too often waits with the next tunnel: nobody else pays for handshakes."""
        if late := self._unused.behind((who.sandbox.tenant, who.sandbox.id)):
            await asyncio.sleep(late)

    async def _open(self, stream: ByteStream, verdict: Admitted, *, captured: bool = False) -> None:
        """Serve what may exist, and cut it when it no longer may."""
        handle = self._live.add(
            tunnel_key(verdict),
            lambda reason: stream.abort(),
            lambda snapshot: self._gate.tunnel_still_allowed(verdict, snapshot),
        )
        try:
            await self._inside(stream, verdict, captured)
        finally:
            handle.close()

    async def _inside(self, stream: ByteStream, admitted: Admitted, captured: bool) -> None:
        """An open tunnel: what the client says first picks the lane that the rule allows."""
        who, facts, permit = admitted.who, admitted.facts, admitted.permit
        peeked = await self._peek(stream)
        if peeked is None:
            return
        if isinstance(peeked, _Clear):
            if permit.inspected and permit.clear_text:
                seen = replace(admitted.seen, lane="http1")
                connection = ServerConnection(stream, self._http_limits)
                await self._lane.serve(Visit(who=who, connection=connection, scheme="http", tunnel=facts, seen=seen))
                return
            reason = "tls-required" if peeked.looks_like_http else "bad-protocol"
            if captured and peeked.looks_like_http:
                refuse = await self._refuse_connection(who.channel, who, reason, admitted.seen, tunnel=facts)
                await self._answer_once(stream, refuse)
                return
            peeked = _Bad(reason, "clear bytes where only TLS may be")
        if isinstance(peeked, _Bad):
            await self._refuse_connection(
                who.channel, who, peeked.reason, admitted.seen, detail=peeked.detail, tunnel=facts
            )
            stream.abort()
            return
        hello = peeked.hello
        seen = replace(admitted.seen, sni=canonical_name(hello.sni))
        # The rule opens this lane; a client that does not offer HTTP/2 is served by the main one (decision 0007).
        asked = permit.inspected and permit.protocol == H2_RULE and "h2" in hello.alpn
        http2 = asked and self._mitm_lane.reserve(who)
        wrong = wrong_hello(hello, facts, inspected=permit.inspected, http2=http2, name_required=permit.server_name)
        if wrong is not None:
            reason, detail, alert = wrong
            if asked and reason == "no-application-protocol":
                detail = "the HTTP/2 adapter is not ready, or serves as many connections as it may"
            await self._refuse_connection(who.channel, who, reason, seen, detail=detail, tunnel=facts)
            await send_alert(stream, alert)
            return
        if not permit.inspected:
            stream.unread(peeked.initial)
            await self._tunnel_lane.run(stream, admitted, seen)
            return
        tls = await self._handshake(stream, peeked, who, facts, seen, ("h2",) if http2 else HTTP1_ONLY)
        if tls is None:
            self._unused.count((who.sandbox.tenant, who.sandbox.id))
            return
        if http2:
            seen = replace(seen, lane="mitm")
            await self._mitm_lane.run(tls, who=who, tunnel=facts, sni=hello.sni, seen=seen)
            return
        visit = Visit(
            who=who,
            connection=ServerConnection(tls, self._http_limits),
            scheme="https",
            tunnel=facts,
            sni=hello.sni,
            seen=replace(seen, lane="http1"),
        )
        await self._lane.serve(visit)
        if not visit.connection.used:
            self._unused.count((who.sandbox.tenant, who.sandbox.id))

    def _for_a_stub(self, who: Identified, facts: TunnelFacts) -> bool:
        """Whether a connection may exist for a stub's sake alone: policy permits none of which we see the inside."""
        if self._stubs is None or not self._stubs.leads(who, facts.host, facts.port):
            return False
        return self._gate.only_for_a_stub(who, facts)

    async def _ours_inside(self, stream: ByteStream, who: Identified, facts: TunnelFacts, seen: Seen) -> None:
        """A tunnel to the help host or to a stub: TLS, but clear text on 80. The lane answers it before policy.

        What is for neither is judged as everywhere, and there is no rule for it.
        """
        peeked = await self._peek(stream)
        if isinstance(peeked, _Clear) and facts.port == 80:
            inner = ServerConnection(stream, self._http_limits)
            await self._lane.serve(Visit(who=who, connection=inner, scheme="http", tunnel=facts, seen=seen))
            return
        if peeked is None:
            return
        if isinstance(peeked, _Hello) and facts.port != 80:
            seen = replace(seen, sni=canonical_name(peeked.hello.sni))
            wrong = wrong_hello(peeked.hello, facts, inspected=True)
            if wrong is not None:
                reason, detail, alert = wrong
                await self._refuse_connection(who.channel, who, reason, seen, detail=detail, tunnel=facts)
                await send_alert(stream, alert)
                return
            tls = await self._handshake(stream, peeked, who, facts, seen)
            if tls is not None:
                inner = ServerConnection(tls, self._http_limits)
                visit = Visit(who=who, connection=inner, scheme="https", tunnel=facts, sni=peeked.hello.sni, seen=seen)
                await self._lane.serve(visit)
            return
        if not isinstance(peeked, _Bad):
            clear = isinstance(peeked, _Clear) and peeked.looks_like_http
            peeked = _Bad("tls-required" if clear else "bad-protocol", "another protocol than this port of ours has")
        await self._refuse_connection(who.channel, who, peeked.reason, seen, detail=peeked.detail, tunnel=facts)
        stream.abort()

    # --- a denied CONNECT (RULINGS 5.6) ---

    async def _deny(self, connection: ServerConnection, who: Identified, facts: TunnelFacts, refuse: Refuse) -> None:
        """Answer at CONNECT; or inside TLS where the client speaks TLS first and shows nothing of a CONNECT's answer.

        The refusal is recorded already: what happens here adds no record.
        """
        sandbox = who.sandbox
        paced = self._pace.within((sandbox.tenant, sandbox.id))
        if not (paced and self._tells_inside(who, facts)):
            await refuse_with(connection, refuse, close=True)
            await connection.close()
            return
        stream = connection.detach()
        stream.write(ESTABLISHED)
        await self._tell_inside(stream, who, facts, refuse, await self._peek(stream))

    async def _deny_inside(
        self, stream: ByteStream, who: Identified, facts: TunnelFacts, refuse: Refuse, *, clear_too: bool
    ) -> None:
        """The same where no CONNECT can be answered: in the protocol that the client speaks, or by silence."""
        sandbox = who.sandbox
        paced = self._pace.within((sandbox.tenant, sandbox.id))
        peeked = await self._peek(stream) if paced else None
        if isinstance(peeked, _Clear) and peeked.looks_like_http and clear_too:
            await self._answer_once(stream, refuse)
        elif isinstance(peeked, _Hello) and self._tells_inside(who, facts):
            await self._tell_inside(stream, who, facts, refuse, peeked)
        else:
            stream.abort()

    async def _answer_once(self, stream: ByteStream, refuse: Refuse) -> None:
        """Read one request and answer it with `refuse`, which is recorded already."""
        inner = ServerConnection(stream, self._http_limits)
        try:
            if await inner.next_head() is not None:
                await refuse_with(inner, refuse, close=True)
        except (HeadRefused, StreamBroken):
            inner.abort()
            return
        await inner.close()

    async def _tell_inside(
        self,
        stream: ByteStream,
        who: Identified,
        facts: TunnelFacts,
        refuse: Refuse,
        peeked: _Hello | _Clear | _Bad | None,
    ) -> None:
        """Answer with `refuse` inside TLS, under a refusal leaf for the denied name."""
        sandbox = who.sandbox
        told = (
            isinstance(peeked, _Hello) and wrong_hello(peeked.hello, facts, inspected=True, name_required=False) is None
        )
        if not isinstance(peeked, _Hello) or not told:
            stream.abort()
            return
        try:
            context = await self._refusal_leaves.get(facts.host, owner=(sandbox.tenant, sandbox.id))
            tls = await server_side(stream, context, peeked.initial, self._table.handshake_seconds)
        except ClientDistrustsCa:
            await self._gate.note("client.distrusts-ca", who, Seen(), reason="client-distrusts-ca")
            stream.abort()
            return
        except (ContextUnavailable, StreamBroken):
            stream.abort()
            return
        await self._answer_once(tls, refuse)

    def _tells_inside(self, who: Identified, facts: TunnelFacts) -> bool:
        if facts.host.is_literal:
            return False
        try:
            if facts.port not in self._directory.snapshot().inspected_ports:
                return False
        except DirectoryUnavailable:
            return False
        return self._leaf_budget.take(who.sandbox)

    # --- the client's first bytes ---

    async def _peek(self, stream: ByteStream) -> _Hello | _Clear | _Bad | None:
        """Look at the first bytes inside a tunnel. None: the client left without a word."""
        reader = ClientHelloReader()
        initial = b""
        stream.read_timeout = None  # the whole hello has one deadline
        try:
            async with asyncio.timeout(self._table.hello_seconds):
                await stream.drain()
                while True:
                    data = await stream.receive()
                    if not data:
                        return None if not initial else _Bad("bad-protocol", "the handshake ended early")
                    initial += data
                    if initial[:1] != b"\x16":
                        stream.unread(initial)
                        return _Clear(initial[:1].isalpha() and b" " in initial[:32])
                    hello = reader.feed(data)
                    if hello is not None:
                        return _Hello(hello, initial)
        except ClientHelloRefused as error:
            return _Bad("bad-protocol", str(error))
        except TimeoutError:
            return _Bad("client-timeout", "nothing, or no whole ClientHello, came in time")
        except StreamBroken:
            return None

    async def _handshake(
        self,
        stream: ByteStream,
        peeked: _Hello,
        who: Identified,
        facts: TunnelFacts,
        seen: Seen,
        alpn: tuple[str, ...] = HTTP1_ONLY,
    ) -> TlsStream | None:
        """TLS with a leaf for the tunnel's host. None: it failed, was recorded, and the stream is closed."""
        try:
            context = await self._leaves.get(facts.host, alpn, owner=(who.sandbox.tenant, who.sandbox.id))
            return await server_side(stream, context, peeked.initial, self._table.handshake_seconds)
        except ContextUnavailable:
            await self._refuse_connection(
                who.channel, who, "internal-error", seen, detail="no certificate for the host", tunnel=facts
            )
        except ClientDistrustsCa:
            await self._gate.note("client.distrusts-ca", who, seen, reason="client-distrusts-ca")
        except StreamBroken as error:
            reason = "client-timeout" if error.kind == "handshake-timeout" else "bad-protocol"
            await self._refuse_connection(
                who.channel, who, reason, seen, detail="the TLS handshake failed", tunnel=facts
            )
        stream.abort()
        return None


# --- helpers: pure looks at bytes and heads ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Foreign:
    """A protocol that is not served on the proxy's port, and the bytes that tell its client so."""

    detail: str
    answer: bytes = b""


def foreign_protocol(first: bytes) -> Foreign | None:
    """What the first bytes of a connection are, if certainly not HTTP/1."""
    if first[:1] == b"\x05":
        return Foreign("SOCKS 5 on the proxy port", b"\x05\xff")  # RFC 1928: no acceptable methods
    if first[:1] == b"\x04":
        return Foreign("SOCKS 4 on the proxy port", b"\x00\x5b" + bytes(6))
    if first[:1] == b"\x16":
        return Foreign("TLS on the proxy port", _alert("handshake_failure"))
    if first.startswith((b"PROXY ", b"\r\n\r\n\x00\r\nQUIT\n")):
        return Foreign("a PROXY protocol preface")
    if first.startswith(b"PRI * HTTP/2"):
        return Foreign("HTTP/2 on the proxy port")
    return None


def connect_facts(head: RequestHead) -> TunnelFacts:
    """The facts of a CONNECT. Raises FactsRefused: bad-target, bad-host-header, authority-mismatch."""
    facts = TunnelFacts.build(head.target)
    for value in head.get("host"):
        try:
            host, port = parse_authority(value, facts.port)
        except InvalidName:
            raise FactsRefused("bad-host-header", "the Host header names no canonical host") from None
        if (host, port) != (facts.host, facts.port):
            raise FactsRefused("authority-mismatch", "the CONNECT target and the Host header differ")
    return facts


def wrong_hello(
    hello: ClientHello, facts: TunnelFacts, *, inspected: bool, http2: bool = False, name_required: bool = True
) -> tuple[str, str, str] | None:
    """(reason, detail, alert) where this ClientHello may not go on in this tunnel, else None.

    `http2`: the tunnel goes to the HTTP/2 lane. `name_required`: TunnelPermit.server_name.
    """
    if hello.sni is not None and canonical_name(hello.sni) != facts.host.text:
        return "sni-mismatch", "the TLS server name is not the tunnel's host", "unrecognized_name"
    if hello.sni is None and name_required:
        return "sni-absent", "a TLS handshake without a server name", "unrecognized_name"
    if not inspected:
        if hello.has_ech:
            # The real name is hidden: nothing that can be checked would be true (RULINGS 5.7).
            return "sni-mismatch", "an encrypted ClientHello in an uninspected tunnel", "handshake_failure"
        return None
    if hello.alpn and not http2 and "http/1.1" not in hello.alpn:
        return "no-application-protocol", "the client does not offer http/1.1", "no_application_protocol"
    return None


def canonical_name(sni: str | None) -> str:
    """The server name as we compare it; empty where it is none."""
    if sni is None:
        return ""
    try:
        return Host.parse(sni).text
    except InvalidName:
        return ""


async def send_alert(stream: ByteStream, name: str) -> None:
    """A fatal TLS alert in clear (RFC 8446 section 6), then the end."""
    stream.write(_alert(name))
    await stream.close()


def _alert(name: str) -> bytes:
    return b"\x15\x03\x03\x00\x02\x02" + bytes((_ALERT[name],))
