"""Tickets of held requests, in the state. Answering them comes with its own issue; until then they only name."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import Executor

from rules.decision import Held
from rules.facts import Sandbox
from state.records import Ticket
from state.store import StateStore

KEEP = 100
"""Per sandbox; the oldest go."""


class StateTickets:
    """broker.vault.open.TicketBook over the state database."""

    def __init__(self, state: StateStore, thread: Executor, random: Callable[[int], bytes]) -> None:
        self._state = state
        self._thread = thread
        self._random = random

    async def issue(self, sandbox: Sandbox, held: Held, request_sha256: bytes, now: float) -> tuple[str, bool]:
        """The ticket of this very request of this sandbox, and whether it is a new one. Durable when it returns."""
        fresh = "tk_" + base64.b32encode(self._random(10)).decode().lower()

        def find_or_add() -> tuple[str, bool]:
            for ticket in self._state.tickets(sandbox.tenant, sandbox.id):
                if ticket.rule == held.rule and ticket.request_sha256 == request_sha256:
                    return ticket.ticket, False
            ticket = Ticket(
                tenant=sandbox.tenant,
                sandbox=sandbox.id,
                ticket=fresh,
                rule=held.rule,
                operation=held.operation,
                approval=held.approval,
                request_sha256=request_sha256,
                created_at=now,
            )
            self._state.add_ticket(ticket, keep=KEEP)
            return fresh, True

        return await asyncio.get_running_loop().run_in_executor(self._thread, find_or_add)
