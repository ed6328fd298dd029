"""The ledger counts once, per sandbox, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.vault import ledger as ledger_module
from broker.vault.ledger import Ledger
from rules.names import RuleId
from tests.support.properties import tried

ONE, TWO = ("t", "one"), ("t", "two")
RULE, OTHER = RuleId("r/a"), RuleId("r/b")


def test_a_nonce_counts_once_within_its_life() -> None:
    """Twice is refused; after its life it is forgotten, when its statement is stale anyway."""
    ledger = Ledger()
    assert ledger.take_nonce(b"n" * 16, 0.0)
    assert not ledger.take_nonce(b"n" * 16, 5.0)
    assert not ledger.take_nonce(b"n" * 16, 10.0)
    assert ledger.take_nonce(b"n" * 16, 10.1)


def test_a_full_table_refuses(monkeypatch) -> None:
    """More nonces than can be remembered: refuse rather than forget one that still counts."""
    monkeypatch.setattr(ledger_module, "MAX_NONCES", 2)
    ledger = Ledger()
    assert ledger.take_nonce(b"a", 0.0)
    assert ledger.take_nonce(b"b", 0.0)
    assert not ledger.take_nonce(b"c", 0.0)
    assert ledger.take_nonce(b"c", 11.0)


def test_all_limits_or_none_are_charged() -> None:
    """A request that one of two limits refuses does not use up the other."""
    ledger = Ledger()
    limits = [(RULE, 1, 60), (OTHER, 5, 60)]
    assert ledger.charge(ONE, limits, 0.0) is None
    for _ in range(10):
        assert ledger.charge(ONE, limits, 1.0) == (RULE, 60)
    assert [ledger.charge(ONE, [(OTHER, 5, 60)], 1.0) for _ in range(4)] == [None] * 4
    assert ledger.charge(ONE, [(OTHER, 5, 60)], 1.0) is not None
    assert ledger.charge(TWO, limits, 1.0) is None


@tried()
@given(st.lists(st.floats(min_value=0, max_value=20), max_size=60), st.integers(1, 5), st.integers(1, 30))
def test_no_window_ever_holds_more_than_its_count(steps, count, seconds) -> None:
    """Whatever the spacing, at most `count` requests pass in any `seconds`."""
    ledger, now, passed = Ledger(), 0.0, []
    for step in steps:
        now += step
        if ledger.charge(ONE, [(RULE, count, seconds)], now) is None:
            passed.append(now)
    for start in passed:
        assert sum(start <= at < start + seconds for at in passed) <= count


def test_three_echoes_in_an_hour_disarm() -> None:
    """The third disarms, once; older ones do not count; other sandboxes and credentials are untouched."""
    ledger = Ledger()
    assert not ledger.note_echo(ONE, "c", 0.0)
    assert not ledger.note_echo(ONE, "c", 3601.0)
    assert not ledger.note_echo(ONE, "c", 3602.0)
    assert ledger.note_echo(ONE, "c", 3603.0)
    assert not ledger.note_echo(ONE, "c", 3604.0)
    assert ledger.is_disarmed(ONE, "c")
    assert not ledger.is_disarmed(TWO, "c")
    assert not ledger.is_disarmed(ONE, "d")


def test_an_end_forgets_everything_of_that_sandbox() -> None:
    """After the end nothing is kept of it, and the others keep theirs."""
    ledger = Ledger()
    ledger.restore_disarmed({(*ONE, "c"), (*TWO, "c")})
    ledger.charge(TWO, [(RULE, 1, 60)], 0.0)
    ledger.forget(ONE)
    assert not ledger.is_disarmed(ONE, "c")
    assert ledger.is_disarmed(TWO, "c")
    assert ledger.charge(TWO, [(RULE, 1, 60)], 1.0) is not None


@pytest.mark.parametrize("count", [0])
def test_a_limit_of_nothing_permits_nothing(count) -> None:
    """A count of zero is a no, with a bound to wait."""
    assert Ledger().charge(ONE, [(RULE, count, 60)], 0.0) == (RULE, 60)
