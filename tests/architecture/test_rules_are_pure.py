"""What the layout promises of `rules/` and `wire/`, read from the source: pure rooms, and one maker of permits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.rows import every_row

ROOT = Path(__file__).parents[2]
ROOMS = ("rules", "wire", "net", "audit", "state", "broker", "proxy", "capture", "exeat")
BANNED = frozenset(
    "socket os time asyncio random logging subprocess threading multiprocessing select selectors ssl "
    "pathlib shutil tempfile secrets uuid http.client http.server urllib.request signal io".split()
)
BANNED_CALLS = frozenset({"open", "exec", "eval", "compile", "__import__", "print", "input", "breakpoint"})
PURE = sorted(path for room in ("rules", "wire") for path in (ROOT / room).rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module
            case _:
                continue


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr


@every_row("path", PURE, ids=_name)
def test_a_pure_room_touches_nothing(path: Path) -> None:
    """No sockets, files, clocks, environment, randomness or event loop in rules/ and wire/: they are passed in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {module for module in _imports(tree) if module in BANNED or module.partition(".")[0] in BANNED}
    assert not found
    named = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not named & BANNED_CALLS


def test_permits_are_made_in_one_place() -> None:
    """`Permit` and `TunnelPermit` are the proof that a request was judged, so only rules/decide.py makes them."""
    makers = {
        _name(path)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if {"Permit", "TunnelPermit"} & set(_calls(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert makers == {"rules/decide.py"}
