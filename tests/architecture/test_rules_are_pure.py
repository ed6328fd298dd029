"""What the layout promises of `rules/` and `wire/`, read from the source: pure rooms, and one maker of permits."""

from __future__ import annotations

from pathlib import Path

from tests.support.rows import every_row
from tests.support.sourcecode import modules, short, source

BANNED = frozenset(
    "socket os time asyncio random logging subprocess threading multiprocessing select selectors ssl "
    "pathlib shutil tempfile secrets uuid http.client http.server urllib.request signal io".split()
)
BANNED_CALLS = frozenset({"open", "exec", "eval", "compile", "__import__", "print", "input", "breakpoint"})


@every_row("path", modules("rules", "wire"), ids=short)
def test_a_pure_room_touches_nothing(path: Path) -> None:
    """No sockets, files, clocks, environment, randomness or event loop in rules/ and wire/: they are passed in."""
    found = {module for module in source(path).imports if module in BANNED or module.partition(".")[0] in BANNED}
    assert not found
    assert not source(path).functions & BANNED_CALLS


def test_permits_are_made_in_one_place() -> None:
    """`Permit` and `TunnelPermit` are the proof that a request was judged, so only rules/decide.py makes them."""
    makers = {short(path) for path in modules() if {"Permit", "TunnelPermit"} & source(path).calls}
    assert makers == {"rules/decide.py"}
