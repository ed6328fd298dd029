"""`Clock`: wall time with its floor, and the boot clock. Durations use the boot clock (RULINGS 9.6).

The floor is the highest wall time ever recorded. `wall()` never goes below it, so that a clock set back revives no
sandbox; `behind()` says that it was set back, and then no credential is opened until it has caught up.
"""

from __future__ import annotations

import time
from typing import Protocol

TOLERANCE = 1.0
"""Seconds that a clock may be behind the floor before it counts as set back (NTP slewing)."""
JUMP = 300.0
"""Seconds of a forward jump that is worth a record."""


class Clock(Protocol):
    def wall(self) -> float:
        """Seconds since the Unix epoch, never below the floor."""

    def boot(self) -> float:
        """Seconds on a clock that only goes forward."""

    def behind(self) -> bool:
        """True while the machine's clock is behind the floor."""

    def machine(self) -> float:
        """The machine's own wall time, whatever the floor."""

    def lower_floor(self, floor: float) -> None:
        """An operator said so, on record."""


class SystemClock:
    """The machine's clocks. `floor` is what the state remembers; `raise_floor` follows what was recorded."""

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._last = (time.time(), self.boot())

    def wall(self) -> float:
        return max(time.time(), self.floor)

    def boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def behind(self) -> bool:
        return time.time() < self.floor - TOLERANCE

    def machine(self) -> float:
        return time.time()

    def lower_floor(self, floor: float) -> None:
        self.floor = floor

    def raise_floor(self, floor: float) -> None:
        self.floor = max(self.floor, floor)

    def jump(self) -> float:
        """Seconds by which wall time moved against the boot clock since the last call."""
        wall, boot = time.time(), self.boot()
        moved = (wall - self._last[0]) - (boot - self._last[1])
        self._last = (wall, boot)
        return moved
