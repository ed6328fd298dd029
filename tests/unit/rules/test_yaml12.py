"""Our part of YAML 1.2: what could be read in two ways is an error at its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.yaml12 import MAX_BYTES, Mark, YamlError, load
from tests.support.properties import tried
from tests.support.rows import every_row

ERRORS = [
    ("", 1, 1, "empty", "B013 an empty file is not an open policy"),
    ("# only a comment\n", 1, 1, "empty", "a comment is not a policy"),
    ("- a\n", 1, 1, "not a mapping", "a list is not a policy"),
    ("a: 1\nb: 2\na: 3\n", 3, 1, "duplicate key 'a', first on line 1", "B188 the later must not win silently"),
    ("a:\n  b: 1\n  b: 2\n", 3, 3, "duplicate key 'b'", "nested too"),
    ("a: yes\n", 1, 4, "boolean for some readers", "YAML 1.1 boolean"),
    ("a: [on, 'on']\n", 1, 5, "boolean for some readers", "YAML 1.1 boolean in a list"),
    ("no: 1\n", 1, 1, "boolean for some readers", "YAML 1.1 boolean as a key"),
    ("a: 0777\n", 1, 4, "another number", "octal for YAML 1.1"),
    ("a: 12:30\n", 1, 4, "another number", "sexagesimal for YAML 1.1"),
    ("a: 1_000\n", 1, 4, "another number", "underscores for YAML 1.1"),
    ("a: .inf\n", 1, 4, "another number", "no infinities"),
    ("a: 99999999999999999999\n", 1, 4, "too large", "numbers are bounded"),
    ("host: *.example.com\n", 1, 8, "quote this value", "an unquoted star is an alias"),
    ("host: **.example.com\n", 1, 8, "quote this value", "an unquoted star is an alias"),
    ("paths: [/v1/{id}]\n", 1, 13, "quote this value", "braces in a flow list"),
    ("keep: [items[].sku]\n", 1, 13, "quote this value", "brackets in a flow list"),
    ("a: @x\n", 1, 4, "quote this value", "a reserved indicator"),
    ("a: %x\n", 1, 4, "quote this value", "a directive indicator"),
    ("a: &x [1]\nb: *x\n", 1, 4, "anchors are not accepted", "no anchors, so no alias bombs"),
    ("a: *x\n", 1, 4, "aliases are not accepted", "no aliases"),
    ("<<: {a: 1}\n", 1, 1, "merge keys", "no merge keys"),
    ("a: !!python/object/apply:os.system [ls]\n", 1, 4, "tags are not accepted", "B188 Python tags"),
    ("a: !x y\n", 1, 4, "tags are not accepted", "any tag"),
    ("%TAG ! tag:x,2000:\n---\na: 1\n", 1, 1, "tag directives", "tag directives"),
    ("1: a\n", 1, 1, "a key is text", "numbers are not keys"),
    ("? [a]\n: 1\n", 1, 3, "a key is one word", "lists are not keys"),
    ("a: 1\n---\nb: 2\n", 2, 1, "more than one document", "the second document is not ignored"),
    ("a: {b: 1\n", 2, 1, "expected ',' or '}'", "B188 truncated"),
    ("a: 'b\n", 2, 1, "unexpected end of stream", "B188 truncated text"),
    ("a:\n\tb: 1\n", 2, 1, "indent with spaces", "tabs"),
    ("a: b\x00c\n", 1, 5, "does not take", "control characters"),
    ("a: " + "[" * 40 + "]" * 40 + "\n", 1, 35, "nested too deeply", "depth is bounded before recursion"),
]


@every_row(("text", "line", "column", "fragment", "why"), ERRORS)
def test_ambiguous_or_hostile_yaml_is_refused(text: str, line: int, column: int, fragment: str, why: str) -> None:
    """Each is one YamlError that names file, line and column and says what to do."""
    with pytest.raises(YamlError) as caught:
        load(text, "p.yaml")
    first = caught.value.problems[0]
    assert fragment in first.message, why
    assert (first.file, first.line, first.column) == ("p.yaml", line, column), why
    assert str(caught.value).startswith(f"p.yaml:{line}:{column}: ")


def test_size_and_count_are_bounded() -> None:
    """A file over 1 MiB, or with too many values, is refused before anything is built."""
    with pytest.raises(YamlError, match="larger than 1 MiB"):
        load("a: " + "x" * MAX_BYTES, "p")
    with pytest.raises(YamlError, match="more than 50,000 values; split it"):
        load("a: [" + "1," * 60_000 + "]", "p")


def test_several_problems_are_reported_together() -> None:
    """One run shows everything."""
    with pytest.raises(YamlError) as caught:
        load("a: yes\nb: 0777\na: 1\n", "p")
    assert [problem.line for problem in caught.value.problems] == [1, 2, 3]


def test_plain_values_follow_the_core_schema() -> None:
    """YAML 1.2.2 section 10.3.2; quoted scalars are text whatever they look like."""
    text = "a: true\nb: ~\nc: 12\nd: 1.5\ne: 0x10\nf: 'yes'\ng: \"0777\"\nh: 60/minute\ni: 2026-01-01\nj: [x, -1]\n"
    value, _ = load(text, "p")
    assert value == {
        "a": True, "b": None, "c": 12, "d": 1.5, "e": 16, "f": "yes", "g": "0777", "h": "60/minute",
        "i": "2026-01-01", "j": ["x", -1],
    }  # fmt: skip


def test_marks_know_every_place() -> None:
    """Values and keys are found by path; an unknown path gives its nearest parent."""
    _, marks = load("a:\n  - b: 1\n    cc: 2\n", "p")
    assert marks.value(("a", 0, "cc")) == Mark(3, 9)
    assert marks.key(("a", 0, "cc")) == Mark(3, 5)
    assert marks.value(("a", 0, "missing")) == Mark(2, 5)


@tried(300)
@given(st.text(alphabet="ab:,[]{}*&!-?|>'\"%@` \n\t#~0179yesno\x00\u2028é", max_size=40))
def test_any_text_is_a_mapping_or_one_error(text: str) -> None:
    """Whatever the file holds, the answer is a mapping or a YamlError with a place, never another exception."""
    refused: YamlError | None = None
    value: object = None
    try:
        value, _ = load(text, "p")
    except YamlError as error:
        refused = error
    if refused is None:
        assert isinstance(value, dict)
    else:
        assert all(problem.line >= 1 and problem.column >= 1 for problem in refused.problems)
