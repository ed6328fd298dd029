"""`TokenBox`: tokens that answers brought, kept for their sandboxes (decision 16). In memory, until they end.

Rules: a token is known by the hash of its placeholder, in the sandbox that got it alone. It serves the rule that it was
captured under. It ends with its own time, its sandbox, its credential and its rule. At most MAX_TOKENS of a sandbox;
the oldest goes, which only closes something.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from broker.errors import BrokerError
from broker.vault.clock import Clock
from broker.vault.secret import Secret
from rules.captured import SHAPE
from rules.decision import Permit
from rules.facts import RequestFacts
from rules.grants import rule_of
from rules.names import CredentialRef, Owner, RuleId
from rules.placeholders import make
from rules.policy import CredentialDef, Policy, Rule
from rules.slots import in_header

MAX_TOKENS = 256
"""Of one sandbox."""
LIFE_SECONDS = 3600
"""Of a token whose answer does not say."""
MAX_LIFE_SECONDS = 12 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    secret: Secret
    credential: CredentialRef
    rule: RuleId
    as_was: Rule | None
    ends: float
    """Boot-clock seconds."""


class TokenBox:
    """One per vault; used from its loop only."""

    def __init__(self, *, clock: Clock, random: Callable[[int], bytes]) -> None:
        self._clock = clock
        self._random = random
        self._owners: dict[Owner, OrderedDict[bytes, _Token]] = {}

    def keep(self, permit: Permit, policy: Policy, tokens: Sequence[bytes], seconds: int) -> tuple[str, ...]:
        """Keep what the answer to the call of `permit` brought; return a placeholder for each, () for none.

        `seconds`: how long the answer says that they are good for, 0 where it does not.
        """
        spec = permit.restrictions.answer
        if permit.credential is None or permit.takes or spec is None or spec.name != "capture":
            return ()
        mine = self._owners.setdefault((permit.sandbox.tenant, permit.sandbox.id), OrderedDict())
        now = self._clock.boot()
        ends = now + min(seconds or LIFE_SECONDS, MAX_LIFE_SECONDS)
        made: list[str] = []
        rule = rule_of(policy, permit.rule)
        try:
            for token in dict.fromkeys(tokens):
                placeholder = make(SHAPE, self._random(32))
                digest = sha256(placeholder.encode()).digest()
                # The digest says which one it was, and nothing of it.
                secret = Secret(token, name=str(permit.credential), version=f"captured:{digest.hex()[:12]}")
                mine[digest] = _Token(
                    secret=secret, credential=permit.credential, rule=permit.rule, as_was=rule, ends=ends
                )
                made.append(placeholder)
        except BrokerError:
            return ()
        for digest in [digest for digest, one in mine.items() if one.ends <= now]:
            del mine[digest]
        while len(mine) > MAX_TOKENS:
            mine.popitem(last=False)
        by_token = dict(zip(dict.fromkeys(tokens), made, strict=True))
        return tuple(by_token[token] for token in tokens)

    def find(self, permit: Permit, definition: CredentialDef, facts: RequestFacts) -> Secret | None:
        """The token whose placeholder stands in the slot of `definition`; None for every other thing there."""
        mine = self._owners.get((permit.sandbox.tenant, permit.sandbox.id), OrderedDict())
        name = definition.slot.name.lower()
        values = facts.header(name)
        spots = in_header(definition, name, values[0]) if len(values) == 1 else None
        if not spots or len(spots) != 1:
            return None
        found = mine.get(sha256(spots[0].text.encode()).digest())
        if found is None or found.ends <= self._clock.boot():
            return None
        return found.secret if (found.credential, found.rule) == (permit.credential, permit.rule) else None

    def forget(self, owner: Owner) -> None:
        """The sandbox ended, or its boundary broke."""
        self._owners.pop(owner, None)

    def revoke(self, credential: str, tenant: str = "") -> None:
        """A credential was rotated, removed or bound anew: what it brought ends."""
        for owner, mine in self._owners.items():
            for digest in [digest for digest, one in mine.items() if one.credential == credential]:
                if tenant in ("", owner[0]):
                    del mine[digest]

    def policy(self, policy: Policy) -> None:
        """A policy came into force: a token goes on where its rule is the same as it was."""
        for mine in self._owners.values():
            for digest in [digest for digest, one in mine.items() if rule_of(policy, one.rule) != one.as_was]:
                del mine[digest]
