"""docs/sources.md has every kind of source, with an example that loads (test_docs.py) and the keys that open it."""

from __future__ import annotations

import re
from pathlib import Path

from rules.reader import Node, Problems
from rules.secret_references import AT_HAND, KINDS
from rules.secret_sources import DEFAULT_FAILURE_TTL, DEFAULT_STALE, DEFAULT_TTL, read_sources

PAGE = (Path(__file__).parents[2] / "docs/sources.md").read_text("utf-8")


def test_every_source_is_described_and_shown() -> None:
    """A row and an example for each kind, a row for each that is at hand; no kind that does not exist."""
    assert {kind for kind in KINDS if f"| `{kind}` |" not in PAGE} == set()
    assert {name for name in AT_HAND if f"| `{name}:" not in PAGE} == set()
    for kind in KINDS:
        assert re.search(rf"kind: {kind}(?![\w-])", PAGE), kind


def test_the_defaults_are_the_real_ones() -> None:
    """What the page says of ttl, failure_ttl and stale."""
    problems = Problems()
    node = Node.load("s: {kind: exec, program: /bin/x, ttl: 5m, failure_ttl: 5s}", "credentials.yaml", problems)
    found = read_sources(node, {})["s"]
    assert (found.ttl, found.failure_ttl) == (DEFAULT_TTL, DEFAULT_FAILURE_TTL)
    assert DEFAULT_STALE == 0
    for text in ("`ttl:` (5m)", "`failure_ttl:` (5s)", "`stale:` (0s)"):
        assert text in PAGE
