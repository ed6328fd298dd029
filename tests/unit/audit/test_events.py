"""The tables of events and fields, and what Event refuses."""

from __future__ import annotations

import dataclasses

import pytest

from audit.events import EVENTS, FIELDS, MAX_INTEGER, RESERVED, SPECS, Event, EventInvalid, Tag
from tests.support.events import WHO
from tests.support.rows import every_row

REFUSED = [
    ("request.vanished", {}, "no such event", "An event that the table does not have is refused."),
    ("request.refused", {"colour": "red"}, "unknown field", "A field that nobody tagged is refused."),
    ("request.refused", {"segment": "x"}, "not a field of this event", "A field of another event is refused."),
    ("request.refused", {"port": "443"}, "port takes int", "A number is a number."),
    ("request.refused", {"port": True}, "port takes int", "True is not 1."),
    ("request.refused", {"quiet": 1}, "quiet takes bool", "1 is not true."),
    ("request.refused", {"host": b"x"}, "host takes str", "Bytes are decoded by whoever knows how."),
    ("request.refused", {"query_keys": [1]}, "query_keys takes tuple", "Lists hold strings."),
    ("request.refused", {"status": MAX_INTEGER + 1}, "too large", "An integer that JSON readers round is refused."),
    ("request.refused", {"duration_us": 1.5}, "duration_us takes int", "There are no floats in the log."),
    ("request.intent", {}, "missing", "An intent without the names of its sandbox is refused."),
    ("request.intent", {**WHO, "policy": "p", "request_id": None}, "missing request_id", "None is absence."),
]


@every_row(("name", "fields", "problem", "sentence"), REFUSED, ids=[row[3] for row in REFUSED])
def test_an_event_outside_the_tables_cannot_be_made(name: str, fields: dict, problem: str, sentence: str) -> None:
    """Whatever the tables do not allow is an error that names the field and never the value."""
    with pytest.raises(EventInvalid, match=problem):
        Event(name, fields)


@every_row("field", sorted(name for name, tag in FIELDS.items() if tag is Tag.SECRET))
def test_a_secret_field_is_refused_by_name_in_every_event(field: str) -> None:
    """No event takes a field tagged secret, and the error does not hold the value."""
    for name in EVENTS:
        with pytest.raises(EventInvalid, match="is secret and never enters the log") as caught:
            Event(name, {field: "hunter2-hunter2"})
        assert "hunter2" not in str(caught.value)


def test_codes_are_unique_and_six_characters_long() -> None:
    """A code names one event for ever; its last letter is its severity."""
    codes = [spec.code for spec in EVENTS.values()]
    assert len(set(codes)) == len(codes)
    assert all(len(code) == 6 and code.isascii() and code[-1] in "IWE" for code in codes)


def test_the_tables_agree_with_each_other() -> None:
    """Every field of an event is tagged, required ones are allowed, and none has a name that the auditor uses."""
    for spec in EVENTS.values():
        assert spec.fields <= SPECS.keys()
        assert spec.required <= spec.fields
        assert not any(FIELDS[name] is Tag.SECRET for name in spec.fields)
        assert spec.writers
    assert not RESERVED & SPECS.keys()


def test_an_event_keeps_what_it_was_given_without_none() -> None:
    """None is left out, lists become tuples, and nothing can be changed afterwards."""
    event = Event("request.refused", {"host": "a.example", "rule": None, "query_keys": ["a", "b"], "port": 443})
    assert event.fields == {"host": "a.example", "query_keys": ("a", "b"), "port": 443}
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.name = "other"  # type: ignore[misc]
