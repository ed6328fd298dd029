"""Where the answer of one call leads: the vault is asked before anything of that answer goes on (decision 14).

Rules: nothing is followed. Only what the operation declares is asked about, only for a read, and never an address that
holds a secret. What is not granted is treated as if nothing had been declared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from broker.scrub import Patterns, scrub_whole
from rules.decision import Permit
from rules.redirects import STATUSES, declared, host_of
from wire.control import MAX_ADDRESSES
from wire.heads import ResponseHead

FETCHES: Final = frozenset({"GET", "HEAD"})

Ask = Callable[[tuple[str, ...]], Awaitable[tuple[bool, ...]]]
"""Which of these addresses the vault granted, in order; all False where it does not answer."""


class Leads:
    """Of one call. `granted` are the addresses of its answer that the sandbox may now fetch, as written there."""

    def __init__(self, *, ask: Ask, permit: Permit, method: str, patterns: Patterns) -> None:
        self._ask = ask
        self._permit = permit
        self._method = method
        self._patterns = patterns
        self.granted: frozenset[str] = frozenset()
        self.host = ""
        """The other host that a redirect leads to, for the record."""
        self.said = ""
        """`granted`, `undeclared` or `not granted`, for the record of a redirect to another host."""

    async def consider(self, head: ResponseHead) -> None:
        """Look at an answer's head before it is sent on."""
        values = head.get("location")
        if head.status not in STATUSES or len(values) != 1:
            return
        location = values[0]
        if self._method in FETCHES and self._may_ask(location):
            await self.addresses((location,))
            self.said = "granted" if location in self.granted else "not granted"
        host = host_of(location)
        if host and host != self._permit.destination.host.text:
            self.host, self.said = host, self.said or "undeclared"

    async def addresses(self, found: Iterable[str]) -> frozenset[str]:
        """Ask for those of `found` that the operation declares; return what is granted by now."""
        wanted = tuple(dict.fromkeys(address for address in found if self._may_ask(address)))[:MAX_ADDRESSES]
        if wanted:
            made = await self._ask(wanted)
            self.granted |= {address for address, yes in zip(wanted, made, strict=False) if yes}
        return self.granted

    def _may_ask(self, address: str) -> bool:
        permit = self._permit
        # Where a grant may lead in its turn only the vault knows.
        again = permit.grant is not None and permit.grant.again
        if permit.effect != "read" or not (again or declared(permit.restrictions.redirects, address) is not None):
            return False
        return address.isascii() and not scrub_whole(address.encode("ascii"), self._patterns)[1]
