"""Body evaluators: how an operation is recognised in the bytes of a body.

EVALUATORS is the one registry. An evaluator gets the operation's own parameters, the whole body (already
within the operation's bound) and the facts of the head. It returns the arguments that it found, or None: not
this operation. It never repairs and never guesses; what it raises counts as None (rules/matching.py).

A streamed body that no evaluator judges (git packs, uploads) is recognised by its head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations import anthropic, json_fields, openai

Evaluator = Callable[[Mapping[str, Any], bytes, RequestFacts], Mapping[str, str] | None]

LATER = "later"
"""The matcher of an operation that is known but not recognised yet: denied, never a host rule (RULINGS 3.7)."""


def _later(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    return None


EVALUATORS: Mapping[str, Evaluator] = {
    LATER: _later,
    "json_fields": json_fields.evaluate,
    "llm_anthropic": anthropic.evaluate,
    "llm_openai_chat": openai.evaluate_chat,
    "llm_openai_responses": openai.evaluate_responses,
    "llm_openai_embeddings": openai.evaluate_embeddings,
}
"""Matcher name -> evaluator."""

_PARAMS: Mapping[str, frozenset[str]] = {
    LATER: frozenset(),
    "llm_anthropic": frozenset({"betas", "count"}),
    "llm_openai_chat": frozenset({"betas"}),
    "llm_openai_responses": frozenset({"betas"}),
    "llm_openai_embeddings": frozenset({"betas"}),
}


def check_params(matcher: str, params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `matcher` exists and `params` suit it."""
    if matcher not in EVALUATORS:
        raise ValueError("unknown body matcher")
    if matcher == "json_fields":
        json_fields.check(params)
    elif not params.keys() <= _PARAMS[matcher]:
        raise ValueError("unknown parameter of a body matcher")
