"""`Ledger`: what is counted once per node: nonces, request limits, echoes. In memory, keyed by (tenant, sandbox).

Times are boot-clock seconds, passed in. Every table is bounded; a full one refuses instead of forgetting what a
refusal rests on. What must outlive a restart (disarmed credentials, tickets) is in the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rules.names import Owner, RuleId

NONCE_LIFE = 10.0
"""Seconds; longer than a statement can be fresh (life 5 s, skew 1 s), so a forgotten nonce is a stale statement."""
MAX_NONCES = 200_000
ECHO_LIMIT = 3
ECHO_WINDOW = 3600.0
"""Three in an hour disarm a credential for a sandbox (RULINGS 7.1)."""


class Ledger:
    """One per vault; used from its loop only, so every method is atomic."""

    def __init__(self) -> None:
        self._nonces: dict[bytes, float] = {}
        self._order: deque[tuple[float, bytes]] = deque()
        self._requests: dict[tuple[str, str, str], deque[float]] = {}
        self._echoes: dict[tuple[str, str, str], deque[float]] = {}
        self._disarmed: set[tuple[str, str, str]] = set()

    def take_nonce(self, nonce: bytes, now: float) -> bool:
        """True the first time `nonce` is seen; False again, or where too many are remembered to be sure."""
        while self._order and self._order[0][0] < now - NONCE_LIFE:
            self._nonces.pop(self._order.popleft()[1], None)
        if nonce in self._nonces or len(self._nonces) >= MAX_NONCES:
            return False
        self._nonces[nonce] = now
        self._order.append((now, nonce))
        return True

    def charge(self, owner: Owner, limits: Iterable[tuple[RuleId, int, int]], now: float) -> tuple[RuleId, int] | None:
        """Charge every (rule, count, seconds) or none. Returns (rule, seconds to wait) when one is used up."""
        windows: list[tuple[deque[float], float]] = []
        for rule, count, seconds in limits:
            window = self._requests.setdefault((*owner, rule), deque())
            while window and window[0] <= now - seconds:
                window.popleft()
            if len(window) >= count:
                return rule, (max(1, int(window[0] + seconds - now) + 1) if window else seconds)
            windows.append((window, now))
        for window, at in windows:
            window.append(at)
        return None

    def note_echo(self, owner: Owner, credential: str, now: float) -> bool:
        """Count one answer that held a secret. True when this one disarms the credential for the sandbox."""
        key = (*owner, credential)
        window = self._echoes.setdefault(key, deque(maxlen=ECHO_LIMIT))
        while window and window[0] <= now - ECHO_WINDOW:
            window.popleft()
        window.append(now)
        if len(window) >= ECHO_LIMIT and key not in self._disarmed:
            self._disarmed.add(key)
            return True
        return False

    def restore_disarmed(self, keys: Iterable[tuple[str, str, str]]) -> None:
        """What the state remembers from before a restart."""
        self._disarmed.update(keys)

    def is_disarmed(self, owner: Owner, credential: str) -> bool:
        return (*owner, credential) in self._disarmed

    def forget(self, owner: Owner) -> None:
        """The sandbox ended: drop its counters."""
        for table in (self._requests, self._echoes):
            for key in [key for key in table if key[:2] == owner]:
                del table[key]
        self._disarmed = {key for key in self._disarmed if key[:2] != owner}
