"""docs/acceptance.md says which test shows which acceptance case: each one that it names exists and says so itself."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.rows import every_row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/acceptance.md").read_text("utf-8")
NAMED = re.compile(r"`((?:[\w/]+/)?test_\w+\.py)::(test_\w+)`")
ROWS = dict(re.findall(r"^\| (T\d\d) \| (.*) \|$", PAGE, re.M))


@cache
def docstrings(path: Path) -> dict[str, str]:
    """The tests of a file with what their docstrings say."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found[node.name] = ast.get_docstring(node) or ""
    return found


def place(file: str) -> Path:
    return ROOT / "tests" / (file if "/" in file else f"integration/{file}")


def test_there_is_one_row_for_each_case() -> None:
    """T01 to T30, in order; a case without a test says why."""
    assert list(ROWS) == [f"T{number:02}" for number in range(1, 31)]
    assert [case for case, row in ROWS.items() if not NAMED.search(row) and row.rstrip(" |").count("|") < 2] == []


@every_row(("file", "name"), NAMED.findall(PAGE))
def test_every_named_test_exists(file: str, name: str) -> None:
    """A page that names what is not there promises nothing."""
    assert name in docstrings(place(file))


@every_row("case", sorted(ROWS))
def test_a_test_says_which_case_it_shows(case: str) -> None:
    """Whoever changes the test sees what it is for."""
    silent = [name for file, name in NAMED.findall(ROWS[case]) if case not in docstrings(place(file))[name]]
    assert silent == []
