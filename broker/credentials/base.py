"""The contract of a credential kind: pure, one file each, one registry entry in __init__.py.

A kind says what it wants done to a request as an `Injection`; `inject` does it, always in the same order: every
auth slot that any provider knows is removed first, then ours is set (I11). The client can neither add, override
nor strip it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from broker.vault.secret import Secret
from rules.policy import CredentialDef

Headers = tuple[tuple[str, str], ...]
"""(lower-case name, value) in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What a kind asks for. `forms` are all byte strings that carry the secret: the answer is scrubbed of them."""

    remove_headers: frozenset[str] = frozenset()
    set_headers: Headers = field(default=(), repr=False)
    remove_query: frozenset[str] = frozenset()
    set_query: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    forms: tuple[bytes, ...] = field(default=(), repr=False)


class Kind(Protocol):
    """One kind: `apply(definition, secret, target, headers)`.

    `target` is the origin-form path and query as the client sent it, `headers` the request's. Raises
    KindFault where the secret or the request does not fit; its text is fixed.
    """

    def __call__(self, definition: CredentialDef, secret: Secret, target: str, headers: Headers) -> Injection: ...
