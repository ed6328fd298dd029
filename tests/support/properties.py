"""How many examples a property test plays: all of them, or a quarter where a person waits for the answer."""

from __future__ import annotations

import os

from hypothesis import settings

QUICK = os.environ.get("HYPOTHESIS_PROFILE") == "quick"
"""`make check` says so by itself; a CI that sets another profile, `make test` and plain pytest play all."""


def tried(examples: int = 100) -> settings:
    """The same examples in every run, at most `examples` of them and no bound on a single one's time."""
    return settings(derandomize=True, deadline=None, max_examples=max(10, examples // 4) if QUICK else examples)
