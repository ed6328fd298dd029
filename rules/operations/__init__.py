"""Matchers by protocol: how an operation is recognised in a head or in the bytes of a body.

EVALUATORS is the registry for bodies. An evaluator gets the operation's own parameters, the body (already within
the operation's bound) and the facts of the head. It returns the arguments that it found, or None: not this
operation. It never repairs and never guesses; what it raises counts as None (rules/matching.py). Of an operation
with `prefix` it gets the first bytes, and `facts.partial` says whether more follow.

HEAD_MATCHERS is the registry for what a path pattern cannot say (image names with slashes, AWS actions). A head
matcher gets parameters and facts, in which the path lies below the service's base, and answers in the same way.

An argument is a text, or a tuple of texts where the request names several. ARGUMENTS says which a matcher may state,
so that a rule that binds another is refused when it is loaded. A streamed body that no evaluator judges (git packs,
uploads) is recognised by its head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations import anthropic, json_fields, openai

Evaluator = Callable[[Mapping[str, Any], bytes, RequestFacts], Mapping[str, Value] | None]
HeadMatcher = Callable[[Mapping[str, Any], RequestFacts], Mapping[str, Value] | None]

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

_MODEL = frozenset({"model"})

HEAD_MATCHERS: Mapping[str, HeadMatcher] = {}
"""Matcher name -> head matcher. The names of both registries differ."""

ARGUMENTS: Mapping[str, Callable[[Mapping[str, Any]], frozenset[str]]] = {
    "json_fields": json_fields.arguments,
    "llm_anthropic": lambda params: _MODEL,
    "llm_openai_chat": lambda params: _MODEL,
    "llm_openai_responses": lambda params: _MODEL,
    "llm_openai_embeddings": lambda params: _MODEL,
}
"""Matcher name -> the arguments that it may state under these parameters."""

_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {"json_fields": json_fields.check}
"""Matchers whose parameters need more than names; each raises ValueError with a fixed sentence."""

_PARAMS: Mapping[str, frozenset[str]] = {
    LATER: frozenset(),
    "llm_anthropic": frozenset({"betas", "count"}),
    "llm_openai_chat": frozenset({"betas"}),
    "llm_openai_responses": frozenset({"betas"}),
    "llm_openai_embeddings": frozenset({"betas"}),
}


def check_params(matcher: str, params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless the body matcher `matcher` exists and `params` suit it."""
    _check(EVALUATORS, matcher, params)


def check_head_params(matcher: str, params: Mapping[str, Any]) -> None:
    """The same for a head matcher."""
    _check(HEAD_MATCHERS, matcher, params)


def arguments_of(matcher: str, params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that a matcher of either registry may state."""
    stated = ARGUMENTS.get(matcher)
    return frozenset() if stated is None else stated(params)


def _check(registry: Mapping[str, object], matcher: str, params: Mapping[str, Any]) -> None:
    if matcher not in registry:
        raise ValueError("unknown matcher")
    if matcher in _CHECKS:
        _CHECKS[matcher](params)
    elif not params.keys() <= _PARAMS.get(matcher, frozenset()):
        raise ValueError("unknown parameter of a matcher")
