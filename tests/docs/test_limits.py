"""docs/limits.md gives the figures of the code: what has a bound is in it, and what remains is computed from it."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from audit.auditor import _OVERHEAD
from net.stream import Limits
from net.websocket import WebSocketLimits
from proxy.limits import LimitTable

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "docs" / "limits_tables.py"
IN_WORDS = {"discard_bytes", "discard_timeout", "answer_timeout", "up_bytes", "down_bytes", "total_bytes"}
"""Bounds that rules set, or of what happens after an answer: nothing that a reader plans with."""
SAME_AS = {
    "refusal_leaves_per_minute": "REFUSAL_LEAVES_PER_MINUTE",
    "refusal_leaves_total": "REFUSAL_LEAVES",
}
"""Counted in the worker and in the vault: the page names the vault's."""


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The module behind the page."""
    spec = importlib.util.spec_from_file_location("limits_tables", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", [LimitTable, Limits, WebSocketLimits])
def test_every_bound_of_the_code_is_in_the_page(kind: type) -> None:
    """A limit that somebody adds has to be documented."""
    source = SOURCE.read_text("utf-8")
    names = {field.name for field in fields(kind)} - IN_WORDS
    assert {name for name in names if f".{SAME_AS.get(name, name)}" not in source} == set()


def test_both_counts_of_refusal_leaves_are_the_same(tables: ModuleType) -> None:
    """What the worker allows itself is what the vault allows it."""
    table = LimitTable()
    assert table.refusal_leaves_per_minute == tables.leaves.REFUSAL_LEAVES_PER_MINUTE
    assert table.refusal_leaves_total == tables.leaves.REFUSAL_LEAVES


def test_no_record_is_smaller_than_the_page_reckons(tables: ModuleType) -> None:
    """The number of requests that a log quota allows is not understated."""
    assert tables.RECORD_BYTES <= _OVERHEAD


def test_what_remains_follows_the_budget(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the names are twice the bits, and fifty names of 253 characters out of 38 are 66 kbit."""

    def names() -> float:
        return float(next(c for c in tables.channels() if c.name.startswith("new names")).bits)

    before = names()
    assert before == pytest.approx(50 * 253 * math.log2(38))
    monkeypatch.setattr(tables, "TABLE", replace(LimitTable(), names_under_wildcard=100))
    assert names() == pytest.approx(2 * before)


def test_every_budgeted_channel_is_finite(tables: ModuleType) -> None:
    """A budget without a number would be none; only what a rule itself allows to be written has no default one."""
    unbounded = {channel.name for channel in tables.channels() if channel.bits is None}
    assert unbounded == {"request bodies of other operations", "a WebSocket's messages"}
    assert all(math.isfinite(channel.bits) for channel in tables.channels() if channel.bits is not None)


def test_a_page_without_its_marks_is_refused(tables: ModuleType) -> None:
    """The tables cannot be lost by an edit that removes where they go."""
    with pytest.raises(ValueError, match="no marks"):
        tables.filled("# Limits\n")


@pytest.mark.parametrize(
    ("bits", "said"), [(0, "0 bit"), (66_390, "67 kbit"), (4_190_000, "4.2 Mbit"), (None, "not bounded by us")]
)
def test_bits_are_rounded_up(tables: ModuleType, bits: float | None, said: str) -> None:
    """What is said is a bound."""
    assert tables.words(bits) == said
