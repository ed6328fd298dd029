"""Body matchers: not this operation, or an operation whose body every JSON parser reads alike; closed to the unknown.

The first byte picks the matcher, the rest is the body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rules.facts import RequestFacts
from rules.matching import Matched, match_operation, parse_path
from rules.operations.strict_json import InvalidJson, load
from rules.policy import BodySpec, HostPattern, Operation

WORDS = (
    b'"model":', b'"messages":', b'"role":"user"', b'"content":', b'"stream":true', b'"store":false', b'"input":',
    b'"tools":[', b'"type":"text"', b'"max_tokens":', b'"item":', b'"count":', b"\\u0061", b"\\ud800", b"1e999",
    b"NaN", b'{"a":1,"a":2}', b"\xef\xbb\xbf", b"[[[[", b'"image_url":', b'"data:image/png;base64,', b"null",
    b'"system":',
)  # fmt: skip

MATCHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("json_fields", {"item": ["a", "b"], "count": "integer"}),
    ("llm_anthropic", {}),
    ("llm_openai_chat", {}),
    ("llm_openai_responses", {}),
    ("llm_openai_embeddings", {}),
)


def check(data: bytes) -> bool:
    """See above."""
    if not data:
        return False
    name, params = MATCHERS[data[0] % len(MATCHERS)]
    operation = Operation(
        id="a/b",
        effect="write",
        hosts=(HostPattern(kind="exact", suffix="a.test"),),
        port=443,
        scheme="https",
        methods=("POST",),
        paths=(parse_path("/x"),),
        body=BodySpec(matcher=name, bound=1 << 20, params=params),
    )
    body = data[1:]
    found = _judged(operation, body)
    value = _json(body)
    if found is None:
        return False
    assert isinstance(value, dict), "what is no object was recognised"
    # Another spelling of the same value is the same operation with the same arguments.
    assert _judged(operation, json.dumps(value).encode()) == found
    assert _judged(operation, json.dumps({**value, "exeat-unknown": 1}).encode()) is None, "open to unknown keys"
    return True


def _judged(operation: Operation, body: bytes) -> Mapping[str, Any] | None:
    """The arguments of the operation that `body` states, or None."""
    facts = RequestFacts.build(
        method="POST",
        scheme="https",
        tunnel=None,
        target="https://a.test/x",
        headers=(("host", "a.test"), ("content-type", "application/json"), ("anthropic-version", "2023-06-01")),
        has_body=True,
    )
    verdict = match_operation(operation, replace(facts, body=body))
    return verdict.arguments if isinstance(verdict, Matched) else None


def _json(body: bytes) -> Any:
    """The strict value; the standard parser, which is laxer, reads the same one."""
    try:
        value = load(body)
    except InvalidJson:
        return None
    assert json.loads(body, object_pairs_hook=_each_once) == value
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key that stands twice was taken"
    return dict(pairs)
