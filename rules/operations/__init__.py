"""Body evaluators: how an operation is recognised in the bytes of a body. See EVALUATORS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rules.facts import RequestFacts

Evaluator = Callable[[Mapping[str, Any], bytes, RequestFacts], Mapping[str, str] | None]


def _later(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """The matcher of this operation is not built yet: nothing matches, so the operation is denied (RULINGS 3.7)."""
    return None


EVALUATORS: Mapping[str, Evaluator] = {"later": _later}
"""Matcher name -> evaluator. An evaluator returns the arguments that it found, or None: not this operation."""
