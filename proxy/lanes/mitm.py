"""The HTTP/2 lane: rules with `protocol: h2`. TLS and everything that decides stay here; HTTP/2 is another process's.

    TLS ended here (ALPN h2) -> plain bytes -> adapter process (proxy/mitm_process.py) -> one stream per request
                                                   -> lanes/http1.py, as this sandbox, in this tunnel, scheme https

Each client connection gets a random id; the adapter names it with every stream that it opens, and all such streams
are served as the sandbox and the tunnel of that connection. So decision, dial, credentials, records and refusals are
the http1 lane's; the adapter never learns a name, a token or a secret's place. mitmproxy is not imported here.

Rules: without a ready adapter, or beyond the bounds, nothing is served over HTTP/2; the end of one side ends the other
and cuts every request in progress; interim answers and trailers stay here, because the adapter cannot carry them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from net.fdchannel import ChannelBroken, FdChannel, socket_pair
from net.guard import Guard
from net.http1 import ServerConnection
from net.stream import ByteStream, Headers, Limits, StreamBroken, open_socket_stream
from net.turns import Turns
from proxy.identity import Identified
from proxy.lanes.http1 import Http1Lane, Visit
from proxy.limits import LimitTable
from proxy.ports import RandomBytes
from proxy.records import Seen
from rules.facts import TunnelFacts
from rules.names import Owner
from wire.heads import ResponseHead

MAX_CONNECTIONS: Final = 64
"""HTTP/2 connections of one worker."""
SANDBOX_CONNECTIONS: Final = 4
MAX_STREAMS: Final = 128
"""Requests of one connection at a time: what the adapter lets a client open, and some that are ending."""
SANDBOX_STREAMS: Final = 256
"""Requests of all connections of one sandbox at a time; one more is answered 429."""
ID_BYTES: Final = 16
LAST_WORDS_SECONDS: Final = 2.0
PLACE_SECONDS: Final = 30.0
"""How long a place is kept for a connection whose handshake is not over: longer than a leaf and a handshake take."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Guest:
    """One client connection and the requests in progress on it."""

    who: Identified
    tunnel: TunnelFacts
    sni: str | None
    seen: Seen
    channel: FdChannel
    plain: ByteStream
    """Our end of the decrypted bytes."""
    requests: dict[asyncio.Task[None], ByteStream] = field(default_factory=dict)

    def ended(self, request: asyncio.Task[None]) -> None:
        """A request's task is done."""
        self.requests.pop(request, None)


class MitmLane:
    """One per worker."""

    def __init__(
        self,
        *,
        lane: Http1Lane,
        random: RandomBytes,
        table: LimitTable,
        http_limits: Limits,
        turns: Turns,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._lane = lane
        self._random = random
        self._table = table
        self._http_limits = http_limits
        self._turns = turns
        self._on_fault = on_fault
        self._channel: FdChannel | None = None
        self._taking: set[asyncio.Task[None]] = set()
        self._guests: dict[bytes, _Guest] = {}
        self._places: list[tuple[tuple[str, str], float]] = []
        """Reserved and not used yet: (tenant, sandbox), and the time when the place lapses."""

    def attach(self, sock: socket.socket) -> None:
        """Use the adapter at the other end of `sock` (SEQPACKET) from now on; one from before ends."""
        before, self._channel = self._channel, FdChannel(sock)
        if before is not None:
            self._lose(before)
        task = asyncio.ensure_future(self._take(self._channel))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    def reserve(self, who: Identified) -> bool:
        """Take a place for a connection of this sandbox whose handshake begins now; False: it is not served here.

        `run` uses it, or it lapses: connections that shake hands at the same time count as those that are served.
        """
        now = asyncio.get_running_loop().time()
        self._places = [(owner, until) for owner, until in self._places if until > now]
        owners = [_owner(guest.who) for guest in self._guests.values()] + [owner for owner, _ in self._places]
        mine = _owner(who)
        if self._channel is None or owners.count(mine) >= SANDBOX_CONNECTIONS or len(owners) >= MAX_CONNECTIONS:
            return False
        self._places.append((mine, now + PLACE_SECONDS))
        return True

    def _use_place(self, who: Identified) -> bool:
        mine = _owner(who)
        place = next((place for place in self._places if place[0] == mine), None)
        if place is None:
            return False
        self._places.remove(place)
        return True

    async def run(
        self, stream: ByteStream, *, who: Identified, tunnel: TunnelFacts, sni: str | None, seen: Seen
    ) -> None:
        """Serve one client with a reserved place, whose TLS ended here and that speaks HTTP/2.

        The stream is closed when this returns.
        """
        channel = self._channel
        if channel is None:
            stream.abort()
            return
        number = self._random(ID_BYTES)
        ours, theirs = socket_pair()
        guest = _Guest(
            who=who, tunnel=tunnel, sni=sni, seen=seen, channel=channel, plain=await open_socket_stream(ours)
        )
        if not self._use_place(who):
            theirs.close()
            guest.plain.abort()
            stream.abort()
            return
        guest.plain.share = self._turns.share(_owner(who))
        self._guests[number] = guest
        try:
            try:
                await channel.send(number, theirs)
            finally:
                theirs.close()
            await self._relay(stream, guest.plain)
        except (ChannelBroken, StreamBroken):
            pass
        finally:
            del self._guests[number]
            stream.abort()
            self._cut(guest)
            if guest.requests:
                await asyncio.wait(guest.requests)

    async def close(self) -> None:
        """End everything."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._lose(channel)
        for task in self._taking:
            task.cancel()
        await asyncio.gather(*self._taking, return_exceptions=True)

    async def _relay(self, client: ByteStream, plain: ByteStream) -> None:
        """Both directions, until either ends or nothing moved for the idle bound."""
        client.read_timeout = plain.read_timeout = None
        loop = asyncio.get_running_loop()
        last = loop.time()

        async def pump(source: ByteStream, sink: ByteStream) -> None:
            nonlocal last
            while data := await source.receive():
                last = loop.time()
                sink.write(data)
                try:
                    await sink.drain()
                except StreamBroken:
                    if sink is plain:
                        raise
                    # The client is gone, and `up` tells: the adapter's end is awaited all the same.

        async def idle() -> None:
            while True:
                left = last + self._table.tunnel_idle_seconds - loop.time()
                if left <= 0:
                    return
                await asyncio.sleep(left)

        up, down = asyncio.ensure_future(pump(client, plain)), asyncio.ensure_future(pump(plain, client))
        watch = asyncio.ensure_future(idle())
        try:
            await asyncio.wait({up, down, watch}, return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                # The client left, by a reset or not: what it sent last may still have to be judged and recorded.
                with contextlib.suppress(StreamBroken):
                    await plain.send_eof()
                await asyncio.wait({down}, timeout=LAST_WORDS_SECONDS)
            if down.done() and down.exception() is None:
                await client.close()  # the adapter said its last word, a GOAWAY for instance
        finally:
            for task in (up, down, watch):
                task.cancel()
            await asyncio.gather(up, down, watch, return_exceptions=True)

    # --- the adapter's streams ---

    async def _take(self, channel: FdChannel) -> None:
        try:
            while (taken := await channel.receive()) is not None:
                number, sock = taken
                guest = self._guests.get(number)
                # An id counts on the channel that it was sent on, while its connection lives.
                if guest is None or guest.channel is not channel or len(guest.requests) >= MAX_STREAMS:
                    sock.close()
                    continue
                stream = await open_socket_stream(sock)
                stream.share = self._turns.share(_owner(guest.who))
                task = asyncio.ensure_future(self._request(guest, stream, crowded=self._crowded(guest)))
                guest.requests[task] = stream
                task.add_done_callback(guest.ended)
        except (ChannelBroken, OSError):
            pass
        finally:
            self._lose(channel)

    def _crowded(self, guest: _Guest) -> bool:
        mine = _owner(guest.who)
        running = sum(len(other.requests) for other in self._guests.values() if _owner(other.who) == mine)
        return running >= SANDBOX_STREAMS

    async def _request(self, guest: _Guest, stream: ByteStream, *, crowded: bool) -> None:
        """`crowded`: the sandbox has as many requests as it may, and this one is refused."""
        guard = Guard(self._on_fault)
        guard.watch(stream)
        visit = Visit(
            who=guest.who,
            connection=AdapterConnection(stream, self._http_limits),
            scheme="https",
            tunnel=guest.tunnel,
            sni=guest.sni,
            seen=guest.seen,
        )
        await guard.run(self._lane.refuse_one(visit, "too-many-requests") if crowded else self._lane.serve(visit))

    def _lose(self, channel: FdChannel) -> None:
        """The adapter behind `channel` is gone or replaced: end what it served."""
        if self._channel is channel:
            self._channel = None
        with contextlib.suppress(OSError):
            channel.close()
        for guest in tuple(self._guests.values()):
            if guest.channel is channel:
                self._cut(guest)

    @staticmethod
    def _cut(guest: _Guest) -> None:
        guest.plain.abort()
        for request in tuple(guest.requests.values()):
            request.abort()


def _owner(who: Identified) -> Owner:
    return (who.sandbox.tenant, who.sandbox.id)


class AdapterConnection(ServerConnection):
    """A connection whose other end is mitmproxy's HTTP/1.1: it takes an interim answer for the final one, and fails on
    trailers. It answers `Expect: 100-continue` itself, so nobody waits for what is left out here."""

    async def send_interim(self, head: ResponseHead) -> None:
        """Left out."""

    async def finish(self, trailers: Headers = ()) -> None:
        """End the answer without its trailers (RFC 9110 6.5.1 permits that)."""
        await super().finish()
