"""What the kernel dropped of each sandbox's packets, brought into the log (RULINGS 9.9).

    exeat run         the counters in its namespace, by the socket that the launcher passed out (exeat/counters.py)
    exeat capture     those of its interface, in the host's rules (capture/gateway.py), as root

Rules: at most one record a minute for a sandbox, and only where something was dropped; one more when it ends. A count
that could not be handed over is handed over with the next one. What the kernel counted before the sandbox was here,
behind an interface that was there before, is not its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from capture import inside
from exeat.counters import read_counters
from exeat.netfilter import Netfilter, NetfilterError

EVERY_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 5.0

Counts = Mapping[str, int]
"""Packets by class: quic, datagrams, pings and the like."""


class Unreadable(Exception):
    """The kernel does not tell these counters to us."""


class Report(Protocol):
    """Takes one record to the vault. Blocks. Raises BrokerError where it was not taken."""

    def __call__(self, sandbox: str, counts: Counts, *, interface: str, error: str) -> object: ...


@dataclass(slots=True)
class _Watched:
    read: Callable[[], Counts]
    close: Callable[[], None]
    interface: str = ""
    told: dict[str, int] = field(default_factory=dict)
    """What the kernel had counted at the last record."""
    unreadable: bool = False


class Drops:
    """One per supervisor; one event loop."""

    def __init__(self, report: Report, *, every: float = EVERY_SECONDS) -> None:
        self._report = report
        self._every = every
        self._watched: dict[str, _Watched] = {}
        self._turn = asyncio.Lock()
        self._pending: set[asyncio.Task[None]] = set()

    def watch_namespace(self, sandbox: str, counters: socket.socket) -> None:
        """`counters` speaks of the namespace of `sandbox`; ours to close."""
        self._replace(sandbox, _Watched(lambda: _namespace(counters), counters.close))

    def watch_interface(self, sandbox: str, interface: str) -> None:
        """`sandbox` is behind `interface` of this machine."""
        if sandbox not in self._watched:
            self._replace(sandbox, _Watched(lambda: _interface(interface), lambda: None, interface))
            with contextlib.suppress(Unreadable):
                self._watched[sandbox].told = dict(_interface(interface))

    def end(self, sandbox: str) -> None:
        """The last record of `sandbox`, soon; `settle` waits for it."""
        if (watched := self._watched.pop(sandbox, None)) is not None:
            task = asyncio.get_running_loop().create_task(self._last(sandbox, watched))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def run(self) -> None:
        """Read and report for as long as it runs."""
        while True:
            await asyncio.sleep(self._every)
            await self.report()

    async def report(self) -> None:
        """One record for each sandbox of which more was dropped since the last one."""
        for sandbox, watched in tuple(self._watched.items()):
            await self._tell(sandbox, watched)

    async def settle(self, seconds: float = SETTLE_SECONDS) -> None:
        """Report once more, end all, and wait for what is on its way, but not for a vault that does not answer."""
        for sandbox in tuple(self._watched):
            self.end(sandbox)
        if self._pending:
            await asyncio.wait(self._pending, timeout=seconds)

    def _replace(self, sandbox: str, watched: _Watched) -> None:
        if (before := self._watched.pop(sandbox, None)) is not None:
            before.close()
        self._watched[sandbox] = watched

    async def _last(self, sandbox: str, watched: _Watched) -> None:
        try:
            await self._tell(sandbox, watched)
        finally:
            watched.close()

    async def _tell(self, sandbox: str, watched: _Watched) -> None:
        async with self._turn:
            try:
                now = await asyncio.to_thread(watched.read)
            except Unreadable:
                if not watched.unreadable:
                    watched.unreadable = await self._send(sandbox, {}, watched.interface, "unreadable")
                return
            # Fewer than before: the rules were put in force anew, and count from zero.
            fresh = {name: count - before if count >= before else count
                     for name, count in now.items() for before in (watched.told.get(name, 0),)}  # fmt: skip
            fresh = {name: count for name, count in fresh.items() if count}
            if not fresh or await self._send(sandbox, fresh, watched.interface, ""):
                watched.told = dict(now)

    async def _send(self, sandbox: str, counts: Counts, interface: str, error: str) -> bool:
        from broker.errors import BrokerError

        try:
            await asyncio.to_thread(self._report, sandbox, counts, interface=interface, error=error)
        except BrokerError:
            return False  # the vault is starting anew; the next one says it
        return True


def _namespace(counters: socket.socket) -> Counts:
    try:
        found = read_counters(counters, inside.TABLE)
    except OSError as error:
        raise Unreadable from error
    return {name: found.get(name, 0) for name in inside.CLASSES}


def _interface(name: str) -> Counts:
    try:
        return Netfilter().drops().get(name, {})
    except NetfilterError as error:
        raise Unreadable from error
