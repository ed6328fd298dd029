"""The guard of a connection: whatever is raised in its task, every side is cut and the fault is reported.

"Closed on exception" holds by itself only for some loop callbacks (RULINGS 11.3). So the work of a connection
runs inside `Guard.run()`, which knows all of its streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol


class Abortable(Protocol):
    def abort(self) -> None:
        """Drop at once; idempotent."""
        ...


class Guard:
    """One per connection. `on_fault(error)` records the outcome; it runs after everything was cut, exactly once."""

    __slots__ = ("_fault", "_on_fault", "_sides", "tripped")

    def __init__(self, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._sides: list[Abortable] = []
        self._fault: BaseException | None = None
        self.tripped = False

    def watch[S: Abortable](self, side: S) -> S:
        """Cut `side` too when something goes wrong; at once when it already did. Returns it."""
        if self.tripped:
            side.abort()
        else:
            self._sides.append(side)
        return side

    def forget(self, side: Abortable) -> None:
        """`side` goes on without this guard (a connection given back to the pool)."""
        self._sides = [one for one in self._sides if one is not side]

    async def run(self, work: Awaitable[None]) -> None:
        """Await `work`. A fault is reported and ends here; cancellation is reported and goes on."""
        try:
            await work
        except asyncio.CancelledError as error:
            self.trip(error)
            raise
        except Exception as error:
            self.trip(error)
        except BaseException as error:
            self.trip(error)
            raise
        finally:
            self._cut()

    def trip(self, error: BaseException) -> None:
        """Cut every side and report `error`; for callbacks that run outside the task. Later calls do nothing."""
        if self.tripped:
            return
        self.tripped = True
        self._cut()
        self._on_fault(error)

    def _cut(self) -> None:
        sides, self._sides = self._sides, []
        for side in sides:
            try:
                side.abort()
            except Exception as error:
                # One side that cannot be cut must not keep the others open.
                if not self.tripped:
                    self.tripped = True
                    self._on_fault(error)
