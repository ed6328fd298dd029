"""`StubHost`: answers token and metadata endpoints for the sandbox that asks, before policy and before any dial.

What is answered, and to whom, is rules/stubs.py (pure); here is who asks: an identified, live sandbox, and the
placeholders that the vault pushed for it as hashes. Without a current snapshot there is no stub. Decision 15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.identity import Identified, current
from proxy.ports import Clock, Directory, DirectoryUnavailable
from rules.facts import RequestFacts, Sandbox
from rules.names import Host
from rules.policy import Policy
from rules.stubs import CONTAINER, LINK_LOCAL, Stub, StubAnswer, answer, find_stub, leads_to_stub
from wire.refusals import Rendered

PHRASES = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Not Allowed"}
METADATA_ADDRESSES = frozenset({LINK_LOCAL, CONTAINER})
"""Literal addresses at which a captured connection may be for a stub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A request that is for a stub, and whose it is."""

    stubs: tuple[Stub, ...]
    sandbox: Sandbox
    names: Mapping[str, bytes] = field(repr=False)

    @property
    def credential(self) -> str:
        return str(self.stubs[0].credential.name)


class StubHost:
    """One per worker. `key` is the installation's (the vault derives the same placeholders from it)."""

    def __init__(self, *, directory: Directory, clock: Clock, key: bytes) -> None:
        self._directory = directory
        self._clock = clock
        self._key = key

    def leads(self, who: Identified, host: Host, port: int) -> bool:
        """Whether a connection to `host` may exist for a stub's sake, whatever policy says of the host."""
        found = self._known(who)
        return found is not None and leads_to_stub(found[0], found[2], host, port)

    def match(self, who: Identified, facts: RequestFacts) -> Matched | None:
        """The stubs that this request is for; None: it goes its ordinary way."""
        found = self._known(who)
        if found is None:
            return None
        stubs = find_stub(found[0], found[2], facts)
        return Matched(stubs=stubs, sandbox=found[1], names=found[2]) if stubs else None

    def answer(self, matched: Matched, facts: RequestFacts) -> tuple[Rendered, StubAnswer]:
        """The answer, ready to send, and what it is for the record."""
        made = answer(matched.stubs, facts, matched.sandbox, self._key, matched.names, self._clock.wall())
        headers = (
            ("content-type", made.content_type),
            ("content-length", str(len(made.body))),
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            *made.headers,
        )
        return Rendered(status=made.status, phrase=PHRASES[made.status], headers=headers, body=made.body), made

    def _known(self, who: Identified) -> tuple[Policy, Sandbox, Mapping[str, bytes]] | None:
        try:
            snapshot = self._directory.snapshot()
        except DirectoryUnavailable:
            return None
        registered = current(who, snapshot, self._clock.wall())
        return None if registered is None else (snapshot.policy, registered.sandbox, registered.placeholders)
