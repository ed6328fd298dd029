"""Whatever stands in a file: a document, or complaints with places. Never another exception, never half a policy."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rules.compile import compile_policy
from rules.parse import PolicyError, Sources, parse_sources
from rules.policytests import run_tests
from rules.yaml12 import load
from tests.support.properties import tried

CASES = Path(__file__).parents[2] / "cases" / "policy"
PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"


def _texts() -> list[tuple[Any, Any]]:
    found = []
    for name in ("shop.yaml", "injection.yaml", "protocols.yaml"):
        value, _ = load((CASES / name).read_text(encoding="utf-8"), name)
        credentials = load(value["credentials"], "c")[0] if "credentials" in value else None
        found.append((load(value["policy"], "p")[0], credentials))
    return found


TEXTS = _texts()
JUNK: list[Any] = [
    None, True, 0, -1, 1.5, "", "*", "**", "*.com", "x", "a/b", "/", "/**", "${sandbox.x}", "any", "exeat.internal",
    [], [None], [[]], ["x", "x"], {}, {"x": 1}, {"json": {}}, {"from": []}, {"keep": {}}, "GET", ["GET"], "\u2028",
]  # fmt: skip


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(path for key, item in items for path in _paths(item, (*prefix, key)))]


def _changed(data: st.DataObject, value: Any) -> Any:
    path = data.draw(st.sampled_from(_paths(value)))
    new = data.draw(st.sampled_from(JUNK))
    if not path:
        return new
    whole = copy.deepcopy(value)
    parent = whole
    for key in path[:-1]:
        parent = parent[key]
    if isinstance(parent, dict) and data.draw(st.booleans()):
        parent[data.draw(st.sampled_from(["x", "name", "with", "tunnel", "credential", "host", "body"]))] = new
    else:
        parent[path[-1]] = new
    return whole


@tried(250)
@given(data=st.data(), pair=st.sampled_from(TEXTS), operator=st.booleans())
def test_a_changed_policy_loads_or_is_refused_with_places(
    data: st.DataObject, pair: tuple[Any, Any], operator: bool
) -> None:
    """JSON is YAML, so any JSON value is a policy text. What loads also runs its tests without a fault."""
    policy, credentials = copy.deepcopy(pair)
    if operator and credentials is not None:
        credentials = _changed(data, credentials)
    else:
        policy = _changed(data, policy)
    sources = Sources(
        policy={"policy.yaml": json.dumps(policy, indent=1, ensure_ascii=False)},
        credentials=None if credentials is None else ("credentials.yaml", json.dumps(credentials, indent=1)),
        ca_files=lambda path: PEM,
    )
    refused: PolicyError | None = None
    try:
        parsed = parse_sources(sources)
    except PolicyError as error:
        refused = error
    if refused is not None:
        assert refused.problems
        assert all(problem.line >= 1 and problem.column >= 1 for problem in refused.problems)
        return
    run_tests(compile_policy(parsed.document), parsed.tests)
