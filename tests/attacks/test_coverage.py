"""Every attack of the list is played somewhere: by cases beside this file, or by tests that coverage.yaml names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.attackdata import load

ROOT = Path(__file__).parents[2]
COVERAGE = yaml.safe_load(Path(__file__).with_name("coverage.yaml").read_text("utf-8"))
TESTS: dict[str, list[str]] = COVERAGE["tests"]
LISTED = COVERAGE["listed"].split()
PLAYED = {case.id.partition("-")[0] for case in load()}


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of the tests of one module."""
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_list_is_a_list() -> None:
    """Numbers in order, each once."""
    assert sorted(set(LISTED)) == LISTED
    assert all(re.fullmatch(r"B[0-9]{3}", number) for number in LISTED)


@pytest.mark.parametrize("number", LISTED)
def test_a_listed_attack_is_played(number: str) -> None:
    """By a case or by a test."""
    assert number in PLAYED or TESTS.get(number)


def test_nothing_is_played_that_is_not_listed() -> None:
    """A slip in a number would leave another attack without its cases."""
    assert {number for number in PLAYED | set(TESTS) if number.startswith("B")} - set(LISTED) == set()


@pytest.mark.parametrize("node", sorted({node for nodes in TESTS.values() for node in nodes}))
def test_a_test_that_is_named_exists(node: str) -> None:
    """A renamed test must not leave an attack without anybody who plays it."""
    path, _, name = node.partition("::")
    assert (ROOT / path).is_file()
    assert name in functions(ROOT / path)
