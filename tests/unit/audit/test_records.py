"""What becomes of values on their way into a line: escaped, cut, digested, canonical."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from audit.chain import Head, link
from audit.events import MAX_LIST, MAX_STRING, Event, EventInvalid
from audit.records import MAX_ITEM, Renderer, accept, canonical, escape
from tests.support.properties import tried
from tests.support.rows import every_row

KEY = bytes(range(32))
RENDERER = Renderer(KEY)

HOSTILE = [
    ('x\n{"verdict":"allow"}', "A line feed cannot begin a record of its own."),
    ("x\r\ny", "Carriage returns are escaped."),
    ("\x1b[2J\x1b]0;title\x07", "Terminal sequences are escaped."),
    ("a\u2028b\u2029c", "Unicode line separators are escaped."),
    ("a\u202eb\u2066c", "Bidirectional controls are escaped."),
    ("a\u200bb\ufeff", "Zero-width characters are escaped."),
    (b"\xff\xfe".decode("utf-8", "surrogateescape"), "Invalid UTF-8 is escaped."),
    ("\x00\x7f\x85", "NUL, DEL and C1 controls are escaped."),
    ("back\\slash", "A backslash is escaped, so that escapes can be told from text."),
    ("x" * (1 << 20), "A megabyte is cut, with length and keyed digest."),
    ("\x00" * (1 << 20), "A megabyte of controls is cut after escaping."),
    ("\U000e0001" * 1_024, "Escapes that grow tenfold still fit."),
]


@every_row(("value", "sentence"), HOSTILE, ids=[row[1] for row in HOSTILE])
@every_row("field", ["host", "path", "user_agent", "sni", "reason"])
def test_hostile_strings_stay_one_escaped_capped_line(field: str, value: str, sentence: str) -> None:
    """B156: one line, printable, capped; the auditor accepts it and nothing but the field changed."""
    fields = RENDERER.fields(Event("request.refused", {field: value}))
    line, _head = link(Head(), node="n", process="p", name="request.refused", fields=fields, now_ns=1)
    text = line.decode()
    assert text.isprintable()
    assert len(fields[field]) <= MAX_STRING
    assert accept("request.refused", fields) == fields
    assert set(json.loads(line)) == {"at", "code", "event", "node", "prev", "process", "seq", "v", field}


def test_a_long_value_says_its_length_and_keyed_digest() -> None:
    """What was cut can be compared with another record, but not guessed without the key."""
    shown = RENDERER.fields(Event("request.refused", {"path": "/" + "a" * 5_000}))["path"]
    assert isinstance(shown, str)
    assert re.fullmatch(r"/a{900,1000}\[5001 characters, hmac:[0-9a-f]{32}\]", shown)
    other = Renderer(b"k" * 32).fields(Event("request.refused", {"path": "/" + "a" * 5_000}))["path"]
    assert shown != other


def test_a_sensitive_value_appears_only_as_a_keyed_digest() -> None:
    """The same agent string gives the same digest under one key and another under the next."""
    event = Event("request.refused", {"user_agent": "curl/8 secret-build"})
    shown = RENDERER.fields(event)["user_agent"]
    assert isinstance(shown, str)
    assert re.fullmatch(r"hmac:[0-9a-f]{32}", shown)
    assert shown == RENDERER.fields(event)["user_agent"]
    assert shown != Renderer(b"k" * 32).fields(event)["user_agent"]


@pytest.mark.parametrize("field", ["path", "host", "remedy", "query_keys"])
def test_a_placeholder_never_enters_whatever_field_it_came_in(field: str) -> None:
    """Anything shaped like a placeholder's core is masked, even with a wrong checksum."""
    core = "Xeat" + "0123456789abcdefABCD"
    value: Any = [f"sk_{core}_x"] if field == "query_keys" else f"sk_{core}_x"
    shown = RENDERER.fields(Event("request.refused", {field: value}))[field]
    assert shown in ("sk_{placeholder}_x", ["sk_{placeholder}_x"])


def test_long_lists_are_cut_and_say_by_how_much() -> None:
    """At most MAX_LIST items, each at most MAX_ITEM characters."""
    shown = RENDERER.fields(Event("request.refused", {"query_keys": ["k" * 1_000] * 500}))["query_keys"]
    assert isinstance(shown, list)
    assert len(shown) == MAX_LIST
    assert shown[-1] == f"[{500 - MAX_LIST + 1} more]"
    assert all(len(item) <= MAX_ITEM for item in shown)


UNRENDERED = [
    ({"host": "a\nb"}, "A raw control character shows that the client did not render."),
    ({"host": "x" * (MAX_STRING + 1)}, "So does a value that was not cut."),
    ({"user_agent": "curl/8"}, "So does a sensitive value in clear."),
    ({"path": "/Xeat0123456789abcdefABCD"}, "So does a placeholder."),
    ({"query_keys": ["x"] * (MAX_LIST + 1)}, "So does a list that was not cut."),
]


@pytest.mark.parametrize(("fields", "sentence"), UNRENDERED, ids=[row[1] for row in UNRENDERED])
def test_the_auditor_accepts_nothing_that_was_not_rendered(fields: dict, sentence: str) -> None:
    """A broken client cannot write what this module would not have written."""
    with pytest.raises(EventInvalid):
        accept("request.refused", fields)


@given(st.text())
@tried()
def test_escaping_is_reversible(text: str) -> None:
    """Two different texts never look alike."""
    shown = escape(text)
    assert shown.isprintable()
    pattern = re.compile(r"\\(?:\\|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
    back = pattern.sub(lambda m: "\\" if m[0] == "\\\\" else chr(int(m[1] or m[2] or m[3], 16)), shown)
    assert back == text


VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(-(2**53) + 1, 2**53 - 1),
    st.booleans(),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=20)


@given(st.dictionaries(NAMES, VALUES))
@tried()
def test_our_bytes_are_the_bytes_of_rfc_8785(record: dict) -> None:
    """orjson with sorted keys writes exactly what the rfc8785 library writes, on every value that we allow."""
    assert canonical(record) == rfc8785.dumps(record)


def test_a_short_digest_key_is_refused() -> None:
    """A key that could be guessed makes digests that can be guessed."""
    with pytest.raises(ValueError, match="32 bytes"):
        Renderer(b"short")
