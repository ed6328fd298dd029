"""Grants: the addresses that redirects opened, by sandbox (decision 14). Pure; each process that decides holds a book.

A grant is for one address, known by its keyed hash: a process that is broken into learns no signed URL from its book.
Times are wall-clock seconds. How often a grant may still be used is the vault's to count; a book only knows that one is
over when its time is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

from rules.facts import RequestFacts
from rules.names import CredentialRef, Host, Owner, RuleId
from rules.policy import Policy, Rule

USES: Final = 8
LIFE_SECONDS: Final = 300.0
MAX_GRANTS: Final = 1024
"""Of one sandbox: an LFS batch opens a hundred. The oldest goes, which only closes something."""
REMEMBERED_SECONDS: Final = 600.0
"""After its end a grant is still known, so that a late client hears that it is over."""
DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One address that one sandbox may fetch. `rule`, `operation` and `credential` are those of the call that made it.

    `digest` is `address_digest`; `response_bytes` and `protocol` as in that call's restrictions.
    """

    id: str
    host: str
    digest: bytes
    rule: RuleId
    operation: str
    expires_at: float
    credential: CredentialRef | None = None
    takes: str = ""
    """As of the call's operation: a captured token was its authority."""
    response_bytes: int | None = None
    protocol: str = "http1"
    again: bool = False
    """Its own answer may lead on (`then:`)."""


def address_digest(key: bytes, owner: Owner, host: str, target: str) -> bytes:
    """The hash by which the address `https://host` + `target` is known, of one sandbox and under one key."""
    tenant, sandbox = owner
    text = "\x00".join((tenant, sandbox, host, target))
    return blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=DIGEST_BYTES).digest()


def rule_of(policy: Policy, rule: RuleId) -> Rule | None:
    """The rule of this id, or None: a grant lives as long as the one that it was made by."""
    return next((one for role in policy.roles.values() for one in role.rules if one.id == rule), None)


class GrantBook:
    """What is granted to whom. Used from one loop only. `key` is empty until something was granted."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        self._owners: dict[Owner, OrderedDict[bytes, Grant]] = {}

    def put(self, owner: Owner, grants: Iterable[Grant], now: float) -> tuple[Grant, ...]:
        """Take up `grants`, each in place of an earlier one for the same address; return those that had to go."""
        mine = self._owners.setdefault(owner, OrderedDict())
        for grant in grants:
            mine.pop(grant.digest, None)
            mine[grant.digest] = grant
        gone = [one for one in mine.values() if one.expires_at + REMEMBERED_SECONDS <= now]
        gone += list(mine.values())[: max(0, len(mine) - MAX_GRANTS)]
        for grant in gone:
            mine.pop(grant.digest, None)
        return tuple(gone)

    def find(self, owner: Owner, facts: RequestFacts) -> Grant | None:
        """The grant for the very address that `facts` name, live or over; None where there never was one."""
        mine = self._owners.get(owner)
        there = facts.destination
        if not mine or there.scheme != "https" or there.port != 443:
            return None
        return mine.get(address_digest(self.key, owner, there.host.text, facts.target))

    def at(self, owner: Owner, host: Host, port: int, now: float) -> Grant | None:
        """Some live grant for an address at this host and port; one of an HTTP/2 rule before others."""
        if port != 443:
            return None
        live = [one for one in self._owners.get(owner, {}).values() if one.host == host.text and one.expires_at > now]
        return min(live, key=lambda one: (one.protocol == "http1", one.id), default=None)

    def of(self, owner: Owner) -> tuple[Grant, ...]:
        return tuple(self._owners.get(owner, {}).values())

    def owners(self) -> tuple[Owner, ...]:
        return tuple(self._owners)

    def drop(self, owner: Owner) -> tuple[Grant, ...]:
        """The sandbox ended: return what it had."""
        return tuple(self._owners.pop(owner, OrderedDict()).values())

    def end(self, owner: Owner, grant: Grant, now: float) -> None:
        """That one is over, and known as such for a while."""
        mine = self._owners.get(owner, OrderedDict())
        if grant.digest in mine:
            mine[grant.digest] = replace(grant, expires_at=min(grant.expires_at, now))
