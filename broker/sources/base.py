"""The contract of a source: a reference's name in, a `Secret` out, or SourceError with a fixed code."""

from __future__ import annotations

from typing import Protocol

from broker.errors import BrokerError
from broker.vault.secret import Secret


class SourceError(BrokerError):
    """The value cannot be had now. `code`: source-unknown, source-missing, source-unreadable, source-refused."""


class Source(Protocol):
    """One kind of reference. `fetch` may block; the vault then calls it off the loop."""

    blocks: bool
    """False only where `fetch` touches nothing but memory."""

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        """The secret that `name` (what follows `scheme:`) refers to, read now. Raises SourceError."""
        ...
