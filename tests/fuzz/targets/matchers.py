"""Matchers by protocol: nothing that a client sends makes one raise, and what one states is what it may state.

The first byte picks a row; of a head matcher the rest is path and query, of a body matcher the body. What is recognised
in the beginning of a body is no other operation whatever comes behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rules.arguments import settled
from rules.facts import FactsRefused, RequestFacts
from rules.operations import EVALUATORS, HEAD_MATCHERS, arguments_of

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
PUSH = "application/x-git-receive-pack-request"
ID = b"0" * 39 + b"1"


@dataclass(frozen=True, slots=True)
class Row:
    """One matcher under parameters that policy may give it. `prefix`: it judges the beginning of a body."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = (("content-type", JSON),)
    prefix: bool = False
    target: str = "/x"
    method: str = "POST"


ROWS = (
    Row("graphql", {"type": "query", "introspection": True}),
    Row("git_push", headers=(("content-type", PUSH),), prefix=True, target="/o/r.git/git-receive-pack"),
    Row("git_push", {"options": True}, (("content-type", PUSH),), prefix=True, target="/o/r.git/git-receive-pack"),
    Row("git_flush", headers=(("content-type", PUSH),), prefix=True, target="/o/r.git/git-receive-pack"),
    Row("lfs_batch", {"operation": "upload"}, (("content-type", "application/vnd.git-lfs+json"),)),
    Row("lfs_lock", {"call": "create"}, (("content-type", "application/vnd.git-lfs+json"),)),
    Row("jsonrpc", {"methods": ["eth_call", "a"], "arguments": {"to": "0.to"}}),
    Row("mcp", {"methods": ["tools/call", "prompts/get", "ping"], "arguments": {"city": "city"}, "answers": True}),
    Row("form", {"arguments": {"amount": "amount"}, "required": ["amount"]}, (("content-type", FORM),)),
    Row("aws_action", {"actions": ["GetItem"], "version": ["2011-06-15"]}, (("content-type", FORM),)),
    Row(
        "aws_action",
        {
            "actions": ["GetItem"],
            "target": ["DynamoDB_20120810"],
            "arguments": {"table": "TableName"},
            "stated_by": {"table": ["GetItem"]},
        },
        (("content-type", "application/x-amz-json-1.0"), ("x-amz-target", "DynamoDB_20120810.GetItem")),
    ),
    Row("call", {"arguments": {"channel": "channel"}}),
    Row("call", {"arguments": {"channel": "channel"}}, (("content-type", FORM),)),
    Row("llm_cohere_chat"),
    Row("llm_cohere_embed"),
    Row("llm_cohere_rerank"),
    Row("llm_gemini_count"),
    Row("llm_gemini_embed"),
    Row("llm_gemini_generate"),
    Row("crates_index", headers=(), method="GET"),
    Row("git_repository", {"suffix": "info/refs"}, (), method="GET"),
    Row("go_module", headers=(), method="GET"),
    Row("path_unlike", {"paths": ["/orders/export", "/orders/*:cancel"]}, (), method="GET"),
    Row("maven", {"prefix": ["maven2"]}, (), method="GET"),
    Row("oci", {"action": "pull"}, (), method="GET"),
    Row("oci", {"action": "push"}, (), method="PUT"),
    Row("oci_token", {"actions": ["pull"], "service": "registry.test"}, (), method="GET"),
    Row("s3", {"operations": ["object.read"]}, (), method="GET"),
    Row("method_name", {"methods": ["chat.post"], "under": "/api"}, ()),
)

WORDS = (
    b"query", b"mutation{", b"...on X{", b"fragment a on B{", b'"variables":', b'"operationName":',
    b"@include(if:false)", b"0000", b"0000PACK", b"report-status", b"refs/heads/a", b"\x00", b'"jsonrpc":"2.0"',
    b'"method":"tools/call"', b'"params":{"name":', b"amount=1", b"Action=GetItem", b"Version=2011-06-15",
    b"%5B0%5D", b"a[0]=", b"&&", b"token=", b'"TableName":', b'"contents":[{"parts":', b'"texts":', b'"documents":',
    b"/v2/a/b/manifests/latest", b"/info/refs", b"?service=git-receive-pack", b"/@v/list", b"/@latest", b"!a",
    b"?scope=repository:a/b:pull", b"?list-type=2", b"maven-metadata.xml", b"sha256:", b"/api/chat.post",
    b'"objects":[{"oid":', b'"ref":{"name":', b"\\ud800",
)  # fmt: skip


def check(data: bytes) -> bool:
    """See above."""
    if not data:
        return False
    row = ROWS[data[0] % len(ROWS)]
    if row.name in HEAD_MATCHERS:
        return _head(row, data[1:].decode("latin-1"))
    return _body(row, data[1:])


def _facts(row: Row, target: str) -> RequestFacts:
    return RequestFacts.build(
        method=row.method,
        scheme="https",
        tunnel=None,
        target=f"https://a.test{target}",
        headers=(("host", "a.test"), *row.headers),
        has_body=row.method in ("POST", "PUT"),
    )


def _head(row: Row, target: str) -> bool:
    try:
        facts = _facts(row, target)
    except FactsRefused:
        return False
    return _stated(row, HEAD_MATCHERS[row.name](row.params, facts))


def _body(row: Row, body: bytes) -> bool:
    facts = _facts(row, row.target)
    judge = EVALUATORS[row.name]
    found = judge(row.params, body, replace(facts, body=body, partial=row.prefix))
    stated = _stated(row, found)
    if row.prefix and found is not None:
        more = body + b"PACK0000"
        again = judge(row.params, more, replace(facts, body=more, partial=True))
        assert again is None or again == found, "what follows makes it another operation"
    return stated


def _stated(row: Row, found: Mapping[str, Any] | None) -> bool:
    if found is None:
        return False
    may = arguments_of(row.name, row.params)
    assert found.keys() <= may, (found, may)
    for value in found.values():
        assert value if isinstance(value, tuple) else isinstance(value, str)
        assert all(isinstance(item, str) for item in value)
    settled(found)
    return True
