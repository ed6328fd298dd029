"""Waiting for a condition of other processes, with a deadline. In one process use tests/support/signals.py instead."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 0.02
LIMIT = 60.0
"""Seconds that whatever will come is waited for: far more than it takes, also on a machine that does much else."""


def until[T](condition: Callable[[], T], seconds: float = LIMIT, what: str = "the condition") -> T:
    """Return the first true value of `condition()`. Raises AssertionError, with what was last seen, at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds} s; last seen: {found!r}"
        time.sleep(POLL_SECONDS)
