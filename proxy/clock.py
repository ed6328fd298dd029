"""`SystemClock`: the machine's clocks, with the vault's floor under wall time (RULINGS 9.6)."""

from __future__ import annotations

import time


class SystemClock:
    """A proxy.ports.Clock. The floor only grows: a clock set back revives no sandbox."""

    def __init__(self) -> None:
        self._floor = 0.0

    def wall(self) -> float:
        return max(time.time(), self._floor)

    def boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def raise_floor(self, floor: float) -> None:
        """Take over the highest wall time that the vault recorded."""
        self._floor = max(self._floor, floor)
