"""`SystemClock`: the machine's clocks, with the vault's floor under wall time (RULINGS 9.6)."""

from __future__ import annotations

import time


class SystemClock:
    """A proxy.ports.Clock. The floor is the vault's: a clock set back revives no sandbox."""

    def __init__(self) -> None:
        self._floor = 0.0

    def wall(self) -> float:
        return max(time.time(), self._floor)

    def boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def follow(self, floor: float) -> None:
        """Take over the highest wall time that the vault recorded. It is a lower one only after an operator's reset."""
        self._floor = floor
