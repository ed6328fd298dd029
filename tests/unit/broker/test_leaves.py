"""Leaves are minted within budgets of each sandbox: by the minute, by the hour, and in all for refusals (B175)."""

from __future__ import annotations

import pytest

from broker.vault.leaves import (
    HOUR,
    LEAVES_PER_HOUR,
    LEAVES_PER_MINUTE,
    MINUTE,
    REFUSAL_LEAVES,
    REFUSAL_LEAVES_PER_MINUTE,
    LeafOffice,
)
from tests.support.fakes import ManualClock

ONE, TWO = ("default", "sb_one"), ("default", "sb_two")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def office(clock: ManualClock) -> LeafOffice:
    """An office that is only asked for its budgets."""
    return LeafOffice(None, clock, None, None)  # type: ignore[arg-type]


def granted(office: LeafOffice, owner: tuple[str, str], asked: int, *, refusal: bool = False) -> int:
    return sum(office.charge(owner, refusal=refusal) for _ in range(asked))


def test_names_beyond_the_minutes_budget_get_no_leaf(office: LeafOffice, clock: ManualClock) -> None:
    """Five thousand names at once: a minute's worth is minted, and a neighbour still gets its own."""
    assert granted(office, ONE, 5000) == LEAVES_PER_MINUTE
    assert granted(office, TWO, 1) == 1
    clock.advance(MINUTE + 1)
    assert granted(office, ONE, 5000) == LEAVES_PER_MINUTE


def test_names_beyond_the_hours_budget_get_no_leaf(office: LeafOffice, clock: ManualClock) -> None:
    """A patient flood gets no more than the hour's worth; the next hour starts anew."""
    total = 0
    for _ in range(30):
        total += granted(office, ONE, 5000)
        clock.advance(MINUTE + 1)
    assert total == LEAVES_PER_HOUR
    clock.advance(HOUR)
    assert granted(office, ONE, 1) == 1


def test_refusal_leaves_have_budgets_of_their_own(office: LeafOffice, clock: ManualClock) -> None:
    """Few a minute and few in all, for the life of the sandbox; they use up nothing of the others."""
    total = granted(office, ONE, 100, refusal=True)
    assert total == REFUSAL_LEAVES_PER_MINUTE
    for _ in range(30):
        clock.advance(MINUTE + 1)
        total += granted(office, ONE, 100, refusal=True)
    clock.advance(2 * HOUR)
    assert granted(office, ONE, 100, refusal=True) == 0
    assert total == REFUSAL_LEAVES
    assert granted(office, ONE, 1) == 1
