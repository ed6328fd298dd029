"""`result: {keep}`: what is not named never comes back."""

from __future__ import annotations

import json

import pytest

from broker.result import KeepInvalid, ResultRefused, check_keep, prune
from rules.decision import ResultSpec
from tests.support.rows import every_row


def kept(document: object, *paths: str) -> object:
    """Prune `document` (a value, or raw JSON)."""
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return json.loads(prune(raw, ResultSpec(keep=paths)))


@every_row(
    ("sentence", "document", "paths"),
    [
        ("not JSON", b"oops", ("id",)),
        ("not UTF-8", b'{"id":"\xff"}', ("id",)),
        ("a byte order mark", b"\xef\xbb\xbf{}", ("id",)),
        ("a repeated key", b'{"id":1,"id":2}', ("id",)),
        ("NaN", b'{"id":NaN}', ("id",)),
        ("two documents", b'{"id":1}{"id":2}', ("id",)),
        ("endless nesting", b"[" * 200_000, ("id",)),
        ("deep kept nesting", b'{"id":' + b"[" * 100 + b"]" * 100 + b"}", ("id.**",)),
        ("a missing field", {"x": 1}, ("id",)),
        ("a missing field in one item", {"items": [{"sku": 1}, {}]}, ("items[].sku",)),
        ("an object where a scalar is promised", {"id": {"secret": 1}}, ("id",)),
        ("a list of objects where scalars are promised", {"id": [{"secret": 1}]}, ("id",)),
        ("a list where an object is promised", {"owner": ["x"]}, ("owner.login",)),
        ("a scalar where a list is promised", {"items": "x"}, ("items[].sku",)),
        ("an object where a list is promised", {"items": {"sku": 1}}, ("items[].sku",)),
        ("null where an object is promised", {"owner": None}, ("owner.login",)),
        ("a scalar as the whole answer", b'"text"', ("id",)),
    ],
)
def test_an_answer_of_another_shape_is_refused(sentence: str, document: object, paths: tuple[str, ...]) -> None:
    """Nothing is guessed: a fixed 502 instead."""
    with pytest.raises(ResultRefused):
        kept(document, *paths)


def test_an_answer_over_its_bound_is_refused() -> None:
    """The bound is on the answer as it came."""
    with pytest.raises(ResultRefused):
        prune(b'{"id":1}', ResultSpec(keep=("id",), bound=7))


@every_row("path", ["", "**", "a..b", ".a", "a.", "a[0]", "a[].", "[]?", "a*", "a.**.b", "a b", "??"])
def test_a_path_that_cannot_be_read_is_refused(path: str) -> None:
    """The grammar is small and closed."""
    with pytest.raises(KeepInvalid):
        check_keep((path,))


def test_an_empty_list_is_refused() -> None:
    """Keeping nothing is no result."""
    with pytest.raises(KeepInvalid):
        check_keep(())


@every_row(
    ("document", "paths", "want"),
    [
        ({"id": 1, "secret": "x"}, ("id",), {"id": 1}),
        ({"id": 1}, ("id", "note?"), {"id": 1}),
        ({"id": 1, "note": None}, ("id", "note?"), {"id": 1, "note": None}),
        ({"tags": ["a", 1, True, None]}, ("tags",), {"tags": ["a", 1, True, None]}),
        ({"items": [{"sku": 1, "p": 2}, {"sku": 3}]}, ("items[].sku",), {"items": [{"sku": 1}, {"sku": 3}]}),
        ([{"id": 1, "x": 1}], ("[].id",), [{"id": 1}]),
        ([[{"id": 1, "x": 1}]], ("[][].id",), [[{"id": 1}]]),
        ({"a": {"b": 1, "c": 2}}, ("a.b",), {"a": {"b": 1}}),
        ({"a": {"b": 1, "c": 2}}, ("a.b", "a.c"), {"a": {"b": 1, "c": 2}}),
        ({"meta": {"x": {"y": [1]}}, "z": 1}, ("meta.**",), {"meta": {"x": {"y": [1]}}}),
        ({"owner": None}, ("owner?.login?",), {"owner": None}),
        ({}, ("owner?.login",), {}),
        ({"items": []}, ("items[].sku",), {"items": []}),
    ],
)
def test_only_named_fields_remain(document: object, paths: tuple[str, ...], want: object) -> None:
    """The vendor's shape, without everything that was not named."""
    assert kept(document, *paths) == want


def test_numbers_and_text_come_back_as_they_were() -> None:
    """Digits are not rounded, text is not changed."""
    raw = '{"a":1.10,"b":123456789012345678901234567890,"c":1e400,"d":"ü\\ud800","x":0}'.encode()
    assert prune(raw, ResultSpec(keep=("a", "b", "c", "d"))) == (
        b'{"a":1.10,"b":123456789012345678901234567890,"c":1e400,"d":"\\u00fc\\ud800"}'
    )
