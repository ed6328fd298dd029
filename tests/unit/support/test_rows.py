"""Tables in one test: no row is left out, and a failure says which rows and why."""

from __future__ import annotations

import pytest

from tests.support.rows import every, every_row


def fails_when_odd(number: int) -> None:
    assert number % 2 == 0, f"{number} is odd"


def test_every_failing_row_is_named_after_the_last_one() -> None:
    """The rows after a failing one are played too; name, line and message of each failure are told."""
    seen: list[int] = []

    @every_row("number", [1, 2, 3, pytest.param(5, id="five")])
    def check(number: int) -> None:
        seen.append(number)
        fails_when_odd(number)

    with pytest.raises(AssertionError) as caught:
        check()
    assert seen == [1, 2, 3, 5]
    first, *failed = str(caught.value).splitlines()
    assert first == "3 of 4 rows failed:"
    told = [line for line in failed if line.startswith("- ")]
    assert [line.partition(":")[0] for line in told] == ["- 1", "- 3", "- five"]
    assert "AssertionError (line " in told[0]
    assert "1 is odd" in told[0]
    assert "1 is odd" in str(caught.value.__cause__)


def test_what_did_not_raise_is_a_failure() -> None:
    """`pytest.raises` without an exception fails a row like an assertion, and the next row is played."""
    seen: list[str] = []

    def check(text: str) -> None:
        seen.append(text)
        with pytest.raises(ValueError, match="invalid literal"):
            int(text)

    with pytest.raises(AssertionError, match="1 of 2 rows failed"):
        every((text, lambda text=text: check(text)) for text in ("1", "x"))
    assert seen == ["1", "x"]


def test_a_table_that_checks_nothing_fails() -> None:
    """No rows, a row that is skipped, and marks that nobody would heed."""
    with pytest.raises(AssertionError, match="no rows"):
        every([])
    with pytest.raises(AssertionError, match="not skipped"):
        every([("a", lambda: pytest.skip("no"))])
    with pytest.raises(TypeError, match="no marks"):
        every_row("number", [pytest.param(1, marks=pytest.mark.slow)])


def test_a_table_that_does_not_fit_its_check_is_refused_at_once() -> None:
    """Too few values or names, an argument that the check has not, and a check that nobody would await."""
    with pytest.raises(TypeError, match="2 values"):
        every_row(("a", "b"), [(1,)])
    with pytest.raises(ValueError, match="zip"):
        every_row("a", [1, 2], ids=["one"])
    with pytest.raises(TypeError, match="does not take"):
        every_row("other", [1])(fails_when_odd)

    async def later(number: int) -> None:
        fails_when_odd(number)

    with pytest.raises(TypeError, match="not awaited"):
        every_row("number", [2])(later)


def test_two_tables_are_played_each_with_each() -> None:
    """As many checks as their product, and what stands in neither is left for fixtures."""
    seen: list[tuple[int, str, str]] = []

    @every_row("number", [1, 2], ids=lambda number: f"n{number}")
    @every_row(("text", "more"), [("a", "x"), ("b", "y")])
    def check(number: int, text: str, more: str, fixture: str) -> None:
        seen.append((number, text, more))
        assert fixture == "f"
        assert (number, text) != (2, "b")

    with pytest.raises(AssertionError, match="- n2: AssertionError"):
        check(fixture="f")
    assert seen == [(1, "a", "x"), (1, "b", "y"), (2, "a", "x"), (2, "b", "y")]


@every_row("word", ["a", "b"])
def test_fixtures_are_given_to_every_row(word: str, request: pytest.FixtureRequest) -> None:
    """pytest sees the arguments that no table gives."""
    assert request.node.name == "test_fixtures_are_given_to_every_row"
    assert word
