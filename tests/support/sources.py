"""The source of the product, for tests that look at how it is written: each file is parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("rules", "wire", "net", "audit", "state", "broker", "proxy", "capture", "exeat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the tests ask of one file."""

    docstring: str
    functions: frozenset[str]
    """What is called by its bare name."""
    methods: frozenset[str]
    """What is called as an attribute of something."""
    imports: frozenset[str]
    """The modules that are imported, or imported from, anywhere in it."""

    @property
    def calls(self) -> frozenset[str]:
        return self.functions | self.methods


def modules(*rooms: str) -> list[Path]:
    """The files of these rooms, or of all."""
    return sorted(path for room in rooms or ROOMS for path in (ROOT / room).rglob("*.py"))


def short(path: Path) -> str:
    """The path from the project's root."""
    return str(path.relative_to(ROOT))


@cache
def source(path: Path) -> Source:
    """Read a file. Raises SyntaxError."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions, methods, imports = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                functions.add(name)
            case ast.Call(func=ast.Attribute(attr=name)):
                methods.add(name)
            case ast.Import(names=names):
                imports.update(alias.name for alias in names)
            case ast.ImportFrom(module=str(module)):
                imports.add(module)
            case _:
                pass
    return Source(
        docstring=ast.get_docstring(tree) or "",
        functions=frozenset(functions),
        methods=frozenset(methods),
        imports=frozenset(imports),
    )
