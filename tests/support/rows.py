"""Tables in one test: every row is played, and every row that fails is named.

A row that is a test of its own costs some milliseconds before it has asked anything; a table of hundreds belongs here,
and a row that needs fixtures of its own under `pytest.mark.parametrize`.
"""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from textwrap import indent
from typing import Any

import pytest

SHOWN = 160
"""Characters of a row that has no name."""


def every(rows: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Play all rows, each (name, check).

    Raises AssertionError after the last one, with name, place and message of each that failed and caused by the first;
    and where there are none, or one would skip what it should check.
    """
    played, failed = 0, []
    for name, check in rows:
        played += 1
        try:
            check()
        except pytest.skip.Exception as error:
            raise AssertionError(f"{name}: a row is not skipped") from error
        except (Exception, pytest.fail.Exception) as error:
            failed.append((name, error))
    assert played, "no rows"
    if failed:
        told = "\n".join(f"- {name}: {_told(error)}" for name, error in failed)
        raise AssertionError(f"{len(failed)} of {played} rows failed:\n{told}") from failed[0][1]


def every_row(
    names: str | Sequence[str], rows: Iterable[Any], ids: Iterable[object] | Callable[[Any], object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, for a check that keeps nothing: one test for all rows.

    What it takes besides the row are fixtures, which all rows share. Another may stand above it: each row with each.
    """
    words = [word.strip() for word in names.split(",")] if isinstance(names, str) else list(names)
    table = [_row(row, len(words)) for row in rows]
    named = [_name(row, id_) for row, id_ in zip(table, _ids(table, ids), strict=True)]

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        if inspect.iscoroutinefunction(check):
            raise TypeError(f"{check.__name__} is not awaited here")
        signature = inspect.signature(check)
        if not set(words) <= signature.parameters.keys():
            raise TypeError(f"{check.__name__} does not take {words}")

        @wraps(check)
        def played(**shared: Any) -> None:
            def bound(values: tuple[Any, ...]) -> Callable[[], None]:
                return lambda: check(**dict(zip(words, values, strict=True)), **shared)

            every((name, bound(values)) for name, (values, _) in zip(named, table, strict=True))

        left = [one for name, one in signature.parameters.items() if name not in words]
        played.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return played

    return decorate


def _row(row: Any, width: int) -> tuple[tuple[Any, ...], str | None]:
    """Values and own id of a row, which may be a `pytest.param` without marks."""
    own = None
    if hasattr(row, "values") and hasattr(row, "marks"):
        if row.marks:
            raise TypeError("a row has no marks")
        row, own = row.values, row.id
    elif width == 1:
        row = (row,)
    if len(row) != width:
        raise TypeError(f"{width} values, not {row!r}")
    return tuple(row), own


def _ids(
    table: Sequence[tuple[tuple[Any, ...], str | None]], ids: Iterable[object] | Callable[[Any], object] | None
) -> Iterable[object]:
    if ids is None:
        return itertools.repeat(None, len(table))
    if callable(ids):
        return ["-".join(str(ids(value) or repr(value)) for value in values) for values, _ in table]
    return ids


def _name(row: tuple[tuple[Any, ...], str | None], id_: object) -> str:
    values, own = row
    if own is not None or id_ is not None:
        return str(own if own is not None else id_)
    text = ", ".join(map(repr, values))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _told(error: BaseException) -> str:
    """The message, with the line of the check that it stopped at."""
    steps = [step for step in traceback.extract_tb(error.__traceback__) if step.filename != __file__]
    place = f"line {steps[0].lineno}" if steps else "?"
    return indent(f"{type(error).__name__} ({place}): {error}", "  ").lstrip()
