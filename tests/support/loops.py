"""Run a coroutine on each event loop that we support: asyncio's own and uvloop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run_on(loop: str, main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` to its end on a fresh loop of that name."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main)
