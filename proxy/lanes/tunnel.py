"""The tunnel lane: bytes of a rule with `tunnel: true`, relayed unseen. Counted, bounded, and cut when told.

The ClientHello was seen by the front door and its server name is the tunnel's host. Rules: the intent is written
before the dial; byte, time and idle limits end the tunnel (tunnel-limit); one side's end is passed on alone, so that
a half-closed request is still answered; every record says `uninspected`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from net.dial import Connected, Dialer, DialError, DialTarget
from net.stream import ByteStream, StreamBroken
from proxy.gate import Admitted, Gate, Refuse
from proxy.limits import LimitTable
from proxy.liveset import tunnel_key
from proxy.ports import LiveHandle, LiveSet
from proxy.records import Outcome, Seen
from rules.names import Destination


@dataclass(slots=True)
class _Counts:
    up: int = 0
    down: int = 0


class _Limit(Exception):
    """A byte or idle bound was reached."""


class TunnelLane:
    """One per worker."""

    def __init__(self, *, gate: Gate, dialer: Dialer, live: LiveSet, table: LimitTable) -> None:
        self._gate = gate
        self._dialer = dialer
        self._live = live
        self._table = table

    async def run(self, stream: ByteStream, admitted: Admitted, seen: Seen) -> None:
        """Relay one tunnel to its end. `stream` still holds the ClientHello. Both sides are closed afterwards."""
        entered = await self._gate.enter(admitted, seen)
        if isinstance(entered, Refuse):
            stream.abort()
            return
        counts = _Counts()
        outcome = Outcome(error="internal-error")
        work = asyncio.current_task()
        cut = [""]

        def on_cut(reason: str) -> None:
            cut[0] = "sandbox-ended" if reason == "sandbox-ended" else "policy-changing"
            stream.abort()
            if work is not None:
                work.cancel()

        handle: LiveHandle | None = None
        connected: Connected | None = None
        try:
            handle = self._live.add(
                tunnel_key(entered.admitted), on_cut, lambda new: self._gate.tunnel_still_allowed(entered.admitted, new)
            )
            connected = await self._dialer.dial(target_of(entered.admitted))
            outcome = Outcome(error="internal-error", address=connected.address)
            error = await self._relay(stream, connected.stream, entered.admitted, counts)
            outcome = Outcome(
                status=200,
                bytes_up=counts.up,
                bytes_down=counts.down,
                completed=not error,
                error=error,
                address=connected.address,
            )
        except DialError as failed:
            self._gate.failed(entered, failed.reason)
            outcome = Outcome(error=failed.reason, detail=failed.detail_for_log, address=failed.address)
        except asyncio.CancelledError:
            outcome = Outcome(
                bytes_up=counts.up,
                bytes_down=counts.down,
                error=cut[0] or "cancelled",
                address=connected.address if connected else "",
            )
            if not cut[0]:
                raise
            if work is not None:
                work.uncancel()
        finally:
            if handle is not None:
                handle.close()
            stream.abort()
            if connected is not None:
                connected.stream.abort()
            await self._gate.done(entered, outcome)

    async def _relay(self, client: ByteStream, origin: ByteStream, admitted: Admitted, counts: _Counts) -> str:
        """Both directions until both ended; "" or the reason why it ended otherwise."""
        permit, table = admitted.permit, self._table
        bound = permit.max_bytes if permit.max_bytes is not None else table.tunnel_bytes
        seconds = permit.max_seconds if permit.max_seconds is not None else table.tunnel_seconds
        client.read_timeout = origin.read_timeout = None
        last = [asyncio.get_running_loop().time()]
        error = ""

        async def pump(source: ByteStream, sink: ByteStream, *, up: bool) -> None:
            while data := await source.receive():
                last[0] = asyncio.get_running_loop().time()
                if up:
                    counts.up += len(data)
                else:
                    counts.down += len(data)
                if counts.up + counts.down > bound:
                    raise _Limit
                sink.write(data)
                await sink.drain()
            await sink.send_eof()

        async def watch_idle() -> None:
            while True:
                left = last[0] + table.tunnel_idle_seconds - asyncio.get_running_loop().time()
                if left <= 0:
                    raise _Limit
                await asyncio.sleep(left)

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(watch_idle())
                pumps = [
                    group.create_task(pump(client, origin, up=True)),
                    group.create_task(pump(origin, client, up=False)),
                ]
                await asyncio.wait(pumps)
                watcher.cancel()

        try:
            async with asyncio.timeout(seconds):
                await both()
            await client.close()
            await origin.close()
        except* (_Limit, TimeoutError):
            error = "tunnel-limit"
        except* StreamBroken as broken:
            error = f"stream-{_first(broken).kind}"
        return error


def _first(group: BaseExceptionGroup[StreamBroken]) -> StreamBroken:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def target_of(admitted: Admitted) -> DialTarget:
    """Where the tunnel goes: the very host and port of the CONNECT, through the same address table."""
    route = admitted.route
    return DialTarget(
        tenant=admitted.sandbox.tenant,
        sandbox=admitted.sandbox.id,
        # The TLS inside is the client's own: for the dialer this is a clear connection.
        destination=Destination("http", admitted.facts.host, admitted.facts.port),
        want_tls=False,
        addresses_allowed=route.addresses if route else (),
        static=route.static if route else (),
    )
