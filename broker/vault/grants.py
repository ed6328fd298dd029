"""`GrantOffice`: which addresses redirects opened, for whom, and how often each may still be used (decision 14).

    ask(call, addresses)   an executor saw where an answer leads: checked here, on record, pushed, taken up by everybody
    use(owner, grant)      one use, counted before the intent; False where it is over
    policy / cut / forget  what ends grants

An address is checked against the declaration of the very call that the vault opened, by the vault's own policy. In
memory only: a gateway that starts again has granted nothing. Times of a grant are counted on the boot clock.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.vault.clock import Clock
from broker.vault.fleet import Fleet
from broker.vault.records import Fields
from rules.decision import Permit
from rules.grants import LIFE_SECONDS, USES, Grant, GrantBook, address_digest, rule_of
from rules.names import Owner
from rules.policy import Policy, RedirectSpec, Rule
from rules.redirects import declared, place_of
from wire.control import Grants

KEY_BYTES = 32


@dataclass(slots=True, kw_only=True)
class _Left:
    """What the vault alone knows of a grant. `ends` is boot-clock seconds."""

    uses: int
    ends: float
    then: tuple[RedirectSpec, ...]
    rule: Rule | None
    """As it was when the grant was made."""


class GrantOffice:
    """One per vault; used from its loop only, so a use is counted by exactly one call."""

    def __init__(
        self, *, clock: Clock, fleet: Fleet, journal: Journal, random: Callable[[int], bytes], within: float
    ) -> None:
        """`within`: seconds that processes have to take a grant up."""
        self._clock = clock
        self._fleet = fleet
        self._journal = journal
        self._random = random
        self._within = within
        self._left: dict[str, _Left] = {}
        self.book = GrantBook(random(KEY_BYTES))

    async def ask(
        self,
        permit: Permit,
        policy: Policy,
        record: Fields,
        addresses: Sequence[str],
        still: Callable[[], bool],
    ) -> tuple[bool, ...]:
        """Grant those of `addresses` that the call of `permit` declares; return which, in order.

        `record` are the fields of that call, `still` says whether it may yet be answered. Never raises but
        CancelledError.
        """
        owner = (permit.sandbox.tenant, permit.sandbox.id)
        alternatives = permit.restrictions.redirects
        if permit.grant is not None:
            left = self._left.get(permit.grant.id)
            alternatives = (left.then,) if left is not None else ()
        found = [declared(alternatives, address) if permit.effect == "read" else None for address in addresses]
        rule = rule_of(policy, permit.rule)
        made: dict[str, Grant] = {}
        for address, spec in zip(addresses, found, strict=True):
            if spec is not None and address not in made:
                made[address] = self._made(permit, owner, address, again=bool(spec.then))
        if not made or not still():
            return (False,) * len(addresses)
        try:
            await asyncio.gather(
                *(
                    self._journal.append(Event("redirect.granted", {**record, **self._said(grant)}), durable=True)
                    for grant in made.values()
                )
            )
        except AuditUnavailable:
            return (False,) * len(addresses)
        if not still():
            return (False,) * len(addresses)
        for address, spec in zip(addresses, found, strict=True):
            if spec is not None:
                ends = self._clock.boot() + LIFE_SECONDS
                self._left[made[address].id] = _Left(uses=USES, ends=ends, then=spec.then, rule=rule)
        before = {grant.digest: grant for grant in self.book.of(owner)}
        for gone in self.book.put(owner, made.values(), self._clock.wall()):
            self._left.pop(gone.id, None)
        for grant in made.values():
            if (replaced := before.get(grant.digest)) is not None:
                self._left.pop(replaced.id, None)
        tenant, sandbox = owner
        # Whoever is late has not got it yet, and refuses: nothing is open that is not known.
        await self._fleet.tell(
            lambda number: Grants(
                id=number, key=self.book.key, tenant=tenant, sandbox=sandbox, grants=tuple(made.values())
            ),
            self._within,
        )
        return tuple(spec is not None for spec in found)

    def known(self) -> tuple[Grants, ...]:
        """What a process that joins now has to know."""
        return tuple(
            Grants(id=0, key=self.book.key, tenant=owner[0], sandbox=owner[1], grants=grants)
            for owner in self.book.owners()
            if (grants := self.book.of(owner))
        )

    def use(self, owner: Owner, grant: Grant) -> bool:
        """Count one use. False: it is over, and nothing may be fetched by it."""
        left = self._left.get(grant.id)
        if left is None or left.uses <= 0 or left.ends <= self._clock.boot() or grant not in self.book.of(owner):
            return False
        left.uses -= 1
        return True

    def lives(self, grant: Grant) -> bool:
        """True if `grant`, of which a use was counted, was not ended since."""
        return grant.id in self._left

    def policy(self, policy: Policy) -> None:
        """A policy came into force: a grant goes on where the rule that it was made by is the same as it was."""
        for owner in self.book.owners():
            for grant in self.book.of(owner):
                left = self._left.get(grant.id)
                if left is None or left.rule is None or rule_of(policy, grant.rule) != left.rule:
                    self._end(owner, grant)

    def forget(self, owner: Owner) -> None:
        """The sandbox ended, or its boundary broke."""
        for grant in self.book.drop(owner):
            self._left.pop(grant.id, None)

    def revoke(self, credential: str, tenant: str = "") -> None:
        """A credential was rotated, removed or bound anew."""
        for owner in self.book.owners():
            for grant in self.book.of(owner) if tenant in ("", owner[0]) else ():
                if grant.credential == credential:
                    self._end(owner, grant)

    def _end(self, owner: Owner, grant: Grant) -> None:
        self._left.pop(grant.id, None)
        self.book.end(owner, grant, self._clock.wall())

    def _made(self, permit: Permit, owner: Owner, address: str, *, again: bool) -> Grant:
        host, target = place_of(address)
        return Grant(
            id="gr_" + base64.b32encode(self._random(10)).decode("ascii").lower(),
            host=host.text,
            digest=address_digest(self.book.key, owner, host.text, target),
            rule=permit.rule,
            operation=permit.operation,
            expires_at=self._clock.wall() + LIFE_SECONDS,
            credential=permit.credential if permit.grant is None else permit.grant.credential,
            takes=permit.takes if permit.grant is None else permit.grant.takes,
            response_bytes=permit.restrictions.response_bytes,
            protocol=permit.restrictions.protocol,
            again=again,
        )

    def _said(self, grant: Grant) -> Fields:
        return {"grant": grant.id, "redirect_host": grant.host, "ttl_s": int(LIFE_SECONDS)}
