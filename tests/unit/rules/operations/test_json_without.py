"""JSON without certain keys: nowhere, in no case, behind no nesting."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.operations import json_without
from tests.support.judged import judged
from tests.support.properties import tried

PARAMS = {"refuse": ["script", "index"]}
JSON = judged(content_type="application/json")


@pytest.mark.parametrize(
    "body",
    [
        b'{"script":1}',
        b'{"SCRIPT":1}',
        b'{"\\u0073cript":1}',
        b'{"a":[{"b":{"index":null}}]}',
        b'{"a":1,"a":2}',
        b'[{"a":1}]',
        b'"script"',
        b"{",
        b'{"a":' * 41 + b"1" + b"}" * 41,
    ],
)
def test_a_refused_key_anywhere_is_no_match(body: bytes) -> None:
    """Expect None for the key at any depth, in any spelling, and for what is not one strict object."""
    assert json_without.evaluate(PARAMS, body, JSON) is None


def test_a_body_of_another_type_is_no_match() -> None:
    """What the head does not call JSON, or codes, is not read."""
    for facts in (judged(), judged(content_type="application/x-ndjson"),
                  judged("POST", "/", ("content-encoding", "gzip"), content_type="application/json")):  # fmt: skip
        assert json_without.evaluate(PARAMS, b"{}", facts) is None


def test_other_keys_and_values_pass() -> None:
    """The word as a value, or inside another key, is nothing; no body is nothing either."""
    assert json_without.evaluate(PARAMS, b'{"query":{"match":{"title":"script"}},"indexed":1}', JSON) == {}
    assert json_without.evaluate(PARAMS, b"", judged("GET")) == {}


@pytest.mark.parametrize(
    "params", [{}, {"refuse": []}, {"refuse": "script"}, {"refuse": [1]}, {"refuse": ["a"], "x": 1}]
)
def test_parameters_are_checked(params: dict[str, Any]) -> None:
    """Expect ValueError when the policy is loaded."""
    with pytest.raises(ValueError):
        json_without.check(params)


values = st.recursive(
    st.none() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@tried()
@given(values, st.lists(st.sampled_from(["list", "object"]), max_size=6))
def test_a_refused_key_is_found_at_every_depth(value: Any, path: list[str]) -> None:
    """Whatever stands around it."""
    whole: Any = {"script": value}
    for step in path:
        whole = [whole, value] if step == "list" else {"x": whole, "y": value}
    assert json_without.evaluate(PARAMS, json.dumps({"z": whole}).encode(), JSON) is None


@pytest.mark.parametrize(
    "text",
    ["/merge", "a\n/merge", "a\r/merge now", "a\r\n  /close\n", "\t/assign me", "a\u2028/merge", "/MERGE", "a\v/merge"],
)
def test_a_line_that_is_a_command_is_refused_where_commands_are(text: str) -> None:
    """Text that a forge would carry out is no text; slashes inside lines and paths of files are none of these."""
    params = {"refuse": ["x"], "commands": False}
    body = json.dumps({"notes": [{"body": text}]}).encode()
    assert json_without.evaluate(params, body, JSON) is None
    assert json_without.evaluate({"refuse": ["x"]}, body, JSON) == {}
    for plain in ("see /merge", "/usr/bin/env", "a/b", "//x", "/ x", "-/merge"):
        assert json_without.evaluate(params, json.dumps({"body": plain}).encode(), JSON) == {}
