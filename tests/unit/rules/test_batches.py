"""Requests that hold several: refused as a whole, and told to come singly; what only looks like one is told nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rules.batches import ALONE
from rules.decide import decide_request
from rules.decision import Denied, NeedsBody, Permit
from tests.support.operationcases import policy_of
from tests.support.policies import NOW, request, sandbox

SERVICES = {"tracker": {"like": "mcp", "base": "https://tracker.test/mcp"}}
ALLOW = [
    {"service": "msgraph", "operations": ["read"]},
    {"service": "google-drive", "operations": ["read"]},
    {"service": "azure-blob", "operations": ["read"], "with": {"account": "mine"}},
    {"service": "github", "operations": ["graphql.query"]},
    {"service": "tracker", "operations": ["read", "tools.call"]},
]
POLICY = policy_of(json.dumps({"version": 1, "services": SERVICES, "roles": {"dev": {"allow": ALLOW}}}))
MIXED = "multipart/mixed; boundary=x"
PARTS = b"--x\r\nContent-Type: application/http\r\n\r\nGET /drive/v3/files/a HTTP/1.1\r\n\r\n--x--"
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


def verdict(line: str, kind: str, body: bytes) -> Denied | Permit:
    facts = request(line, ("content-type", kind), has_body=True)
    decision = decide_request(POLICY, sandbox(), facts, NOW)
    if isinstance(decision, NeedsBody):
        decision = decide_request(POLICY, sandbox(), replace(facts, body=body), NOW)
    assert isinstance(decision, Denied | Permit)
    return decision


@pytest.mark.parametrize(
    ("line", "kind", "body"),
    [
        ("POST https://graph.microsoft.com/v1.0/$batch", "application/json", b'{"requests": []}'),
        ("POST https://www.googleapis.com/batch/drive/v3", MIXED, PARTS),
        ("POST https://mine.blob.core.windows.net/c?restype=container&comp=batch", MIXED, PARTS),
        ("POST https://api.github.com/graphql", "application/json", b' [{"query": "{viewer{login}}"}]'),
        ("POST https://tracker.test/mcp", "application/json", json.dumps([LIST]).encode()),
    ],
)
def test_a_batch_is_refused_whole_and_told_to_come_singly(line: str, kind: str, body: bytes) -> None:
    """Expect a denial, also of a batch in which each part would be permitted alone, with that sentence first."""
    denied = verdict(line, kind, body)
    assert isinstance(denied, Denied)
    assert denied.remedy.startswith(ALONE), denied


@pytest.mark.parametrize(
    ("line", "kind", "body"),
    [
        ("POST https://graph.microsoft.com/v1.0/me/$batches", "application/json", b"{}"),
        ("POST https://www.googleapis.com/batch/drive/v3", "application/json", b"{}"),
        ("POST https://api.github.com/graphql", "application/json", b'{"query": "mutation {a}"}'),
        ("POST https://api.github.com/graphql", "text/plain", b"[]"),
    ],
)
def test_another_refusal_says_nothing_of_batches(line: str, kind: str, body: bytes) -> None:
    """Expect the nearest rule alone."""
    denied = verdict(line, kind, body)
    assert isinstance(denied, Denied)
    assert ALONE not in denied.remedy


def test_its_parts_are_permitted_alone() -> None:
    """Expect each of the two that are refused in an array to pass by itself."""
    assert isinstance(verdict("POST https://tracker.test/mcp", "application/json", json.dumps(LIST).encode()), Permit)
    document = b'{"query": "{viewer{login}}"}'
    assert isinstance(verdict("POST https://api.github.com/graphql", "application/json", document), Permit)
