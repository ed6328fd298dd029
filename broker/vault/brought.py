"""`Brought`: what calls brought their sandboxes beyond the answer itself: opened addresses and kept tokens.

What ends the one ends the other: the sandbox, the credential of the call, the rule that permitted it.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.vault.grants import GrantOffice
from broker.vault.tokens import TokenBox
from rules.names import Owner
from rules.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """One per vault."""

    grants: GrantOffice
    tokens: TokenBox

    def forget(self, owner: Owner) -> None:
        """The sandbox ended, or its boundary broke."""
        self.grants.forget(owner)
        self.tokens.forget(owner)

    def revoke(self, credential: str, tenant: str = "") -> None:
        """A credential was rotated, removed or bound anew."""
        self.grants.revoke(credential, tenant)
        self.tokens.revoke(credential, tenant)

    def policy(self, policy: Policy) -> None:
        """A policy came into force."""
        self.grants.policy(policy)
        self.tokens.policy(policy)
