"""Matchers by protocol: how an operation is recognised in a head or in the bytes of a body.

EVALUATORS is the registry for bodies. An evaluator gets the operation's own parameters, the body (already within
the operation's bound) and the facts of the head. It returns the arguments that it found, or None: not this
operation. It never repairs and never guesses; what it raises counts as None (rules/matching.py). Of an operation
with `prefix` it gets the first bytes, and `facts.partial` says whether more follow.

HEAD_MATCHERS is the registry for what a path pattern cannot say (image names with slashes, AWS actions). A head
matcher gets parameters and facts, in which the path lies below the service's base, and answers in the same way.

SCOPED is the registry of head matchers whose operations may be narrowed (rules/narrowing.py, decision 13).

An argument is a text, or a tuple of texts where the request names several. ARGUMENTS says which a matcher may state,
so that a rule that binds another is refused when it is loaded. A streamed body that no evaluator judges (git packs,
uploads) is recognised by its head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations import (
    anthropic,
    aws,
    cargo_publish,
    cohere,
    crates_index,
    forms,
    gemini,
    git,
    go_module,
    graphql,
    json_fields,
    json_pick,
    json_without,
    jsonrpc,
    lfs,
    maven,
    mcp,
    method_name,
    oci,
    openai,
    path_unlike,
    pypi_upload,
    s3,
)
from rules.paths import Query

Evaluator = Callable[[Mapping[str, Any], bytes, RequestFacts], Mapping[str, Value] | None]
HeadMatcher = Callable[[Mapping[str, Any], RequestFacts], Mapping[str, Value] | None]

LATER = "later"
"""The matcher of an operation that is known but not recognised yet: denied, never a host rule (RULINGS 3.7)."""


def _later(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    return None


EVALUATORS: Mapping[str, Evaluator] = {
    "pypi_upload": pypi_upload.evaluate,
    "cargo_publish": cargo_publish.evaluate,
    "json_pick": json_pick.evaluate,
    LATER: _later,
    "aws_action": aws.evaluate,
    "call": method_name.evaluate,
    "form": forms.evaluate,
    "git_flush": git.flush,
    "git_push": git.push,
    "graphql": graphql.evaluate,
    "json_fields": json_fields.evaluate,
    "json_without": json_without.evaluate,
    "lfs_batch": lfs.batch,
    "lfs_lock": lfs.lock,
    "jsonrpc": jsonrpc.evaluate,
    "llm_anthropic": anthropic.evaluate,
    "llm_cohere_chat": cohere.evaluate_chat,
    "llm_cohere_embed": cohere.evaluate_embed,
    "llm_cohere_rerank": cohere.evaluate_rerank,
    "llm_gemini_count": gemini.evaluate_count,
    "llm_gemini_embed": gemini.evaluate_embed,
    "llm_gemini_generate": gemini.evaluate_generate,
    "llm_openai_chat": openai.evaluate_chat,
    "llm_openai_responses": openai.evaluate_responses,
    "llm_openai_embeddings": openai.evaluate_embeddings,
    "mcp": mcp.evaluate,
}
"""Matcher name -> evaluator."""

_MODEL = frozenset({"model"})

HEAD_MATCHERS: Mapping[str, HeadMatcher] = {
    "method_name": method_name.match,
    "crates_index": crates_index.head,
    "git_repository": git.repository,
    "go_module": go_module.head,
    "maven": maven.head,
    "oci": oci.head,
    "oci_token": oci.token,
    "path_unlike": path_unlike.head,
    "s3": s3.match,
}
"""Matcher name -> head matcher. The names of both registries differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoped:
    """How a query that asks for several things at once is read in parts, and written anew with fewer.

    `parts` gives each alone, with the arguments that it states. `narrow` gives the query with those that are granted
    (asked with the values of `arguments`, in that order) and how many they are, or None where none is left.
    """

    parameter: str
    arguments: tuple[str, ...]
    parts: Callable[[Query], Iterator[tuple[Mapping[str, str], Query]]]
    narrow: Callable[[Mapping[str, Any], Query, Callable[[str, str], bool]], tuple[Query, int] | None]


SCOPED: Mapping[str, Scoped] = {
    "oci_token": Scoped(parameter="scope", arguments=("repository", "action"), parts=oci.parts, narrow=oci.narrow),
}
"""Head matcher name -> how its scopes are narrowed."""

ARGUMENTS: Mapping[str, Callable[[Mapping[str, Any]], frozenset[str]]] = {
    "pypi_upload": lambda params: pypi_upload.ARGUMENTS,
    "cargo_publish": lambda params: cargo_publish.ARGUMENTS,
    "json_pick": json_pick.arguments,
    "aws_action": aws.arguments,
    "call": method_name.call_arguments,
    "form": forms.arguments,
    "crates_index": lambda params: frozenset({"crate"}),
    "git_push": git.push_arguments,
    "git_repository": lambda params: frozenset({"repository"}),
    "go_module": lambda params: frozenset({"module", "version"}),
    "graphql": graphql.arguments,
    "json_fields": json_fields.arguments,
    "jsonrpc": jsonrpc.arguments,
    "llm_anthropic": lambda params: _MODEL,
    "llm_cohere_chat": lambda params: _MODEL,
    "llm_cohere_embed": lambda params: _MODEL,
    "llm_cohere_rerank": lambda params: _MODEL,
    "llm_openai_chat": openai.arguments,
    "llm_openai_responses": openai.arguments,
    "llm_openai_embeddings": openai.arguments,
    "lfs_batch": lambda params: frozenset({"ref"}),
    "lfs_lock": lfs.lock_arguments,
    "maven": lambda params: frozenset({"package", "version"}),
    "oci": oci.arguments,
    "oci_token": lambda params: frozenset({"repository", "action"}),
    "mcp": mcp.arguments,
    "method_name": method_name.arguments,
    "s3": s3.arguments,
}
"""Matcher name -> the arguments that it may state under these parameters."""

_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "json_pick": json_pick.check,
    "aws_action": aws.check,
    "call": method_name.check_call,
    "form": forms.check,
    "git_push": git.check_push,
    "git_repository": git.check_repository,
    "go_module": go_module.check,
    "graphql": graphql.check,
    "json_fields": json_fields.check,
    "json_without": json_without.check,
    "llm_openai_chat": openai.check,
    "llm_openai_responses": openai.check,
    "llm_openai_embeddings": openai.check,
    "lfs_batch": lfs.check_batch,
    "lfs_lock": lfs.check_lock,
    "maven": maven.check,
    "oci": oci.check_head,
    "oci_token": oci.check_token,
    "path_unlike": path_unlike.check,
    "jsonrpc": jsonrpc.check,
    "mcp": mcp.check,
    "method_name": method_name.check,
    "s3": s3.check,
}
"""Matchers whose parameters need more than names; each raises ValueError with a fixed sentence."""

_PARAMS: Mapping[str, frozenset[str]] = {
    LATER: frozenset(),
    "llm_anthropic": frozenset({"betas", "count"}),
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


def prepare(matcher: str) -> None:
    """Load what `matcher` needs, so that the first request does not wait for it. Called when a policy is compiled."""
    if matcher == "graphql":
        graphql.prepare()


def _check(registry: Mapping[str, object], matcher: str, params: Mapping[str, Any]) -> None:
    if matcher not in registry:
        raise ValueError("unknown matcher")
    if matcher in _CHECKS:
        _CHECKS[matcher](params)
    elif not params.keys() <= _PARAMS.get(matcher, frozenset()):
        raise ValueError("unknown parameter of a matcher")
