"""The contract of a source: a reference's name in, a `Secret` out, or SourceError with a fixed code."""

from __future__ import annotations

from typing import Protocol

from broker.errors import BrokerError
from broker.vault.secret import Secret


class SourceError(BrokerError):
    """The value cannot be had now. `code`: source-unknown, source-missing, source-unreadable, source-refused."""


class Source(Protocol):
    """One kind of reference. `fetch` blocks; the registry calls it off the loop."""

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        """The secret that `name` (what follows `scheme:`) refers to, read now. Raises SourceError."""
        ...
