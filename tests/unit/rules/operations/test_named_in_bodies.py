"""What a body names: recipients and projects in JSON, the crate or project of a publication."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import RequestFacts
from rules.operations import EVALUATORS, check_params
from tests.support.properties import tried
from tests.support.rows import every_row

MAIL = {
    "arguments": {"to": ["people[].to[].email", "people[].bcc[].email"], "project": ["fields.project.key"]},
    "required": ["to"],
    "sole": ["fields.project"],
    "absent": ["update.project"],
}
ONE = {"people": [{"to": [{"email": "a@example.com"}]}]}
PARENT = {
    "arguments": {"parent": ["parent.page", "parent.database"]},
    "single": ["parent"],
    "shapes": {"parent": "uuid"},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["people", "to", "email", "x", "bcc"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def facts(*headers: tuple[str, str]) -> RequestFacts:
    return RequestFacts.build(
        method="POST",
        scheme="https",
        tunnel=None,
        target="https://a.example/x",
        headers=(("host", "a.example"), *(headers or (("content-type", "application/json"),))),
        has_body=True,
    )


def picked(params: dict[str, Any], value: Any, *headers: tuple[str, str]) -> object:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return EVALUATORS["json_pick"](params, body, facts(*headers))


@every_row(
    ("value", "why"),
    [
        (b'{"people":[],"people":[{"to":[{"email":"a@example.com"}]}]}', "a duplicate key"),
        ([ONE], "a list"),
        ({}, "nobody"),
        ({"people": []}, "an empty list"),
        ({"people": [{"to": None}]}, "null"),
        ({"people": {"to": []}}, "an object where a list belongs"),
        ({"people": [{"to": [{"email": 1}]}]}, "a number"),
        ({"people": [{"to": [{"email": ""}]}]}, "an empty address"),
        ({"people": [{"to": [{"email": "a@example.com, x@attacker.example"}]}]}, "two addresses in one"),
        ({"people": [{"to": [{"email": "x@attacker.example;a@example.com"}]}]}, "two addresses with a semicolon"),
        ({"people": [{"to": [{"email": "<x@attacker.example>a@example.com"}]}]}, "angle brackets"),
        ({"people": [{"to": [{"email": "x@attacker.example\r\na@example.com"}]}]}, "a line break"),
        ({"people": [{"to": [{"email": "\u0430@example.com"}]}]}, "a letter that only looks like one"),
        ({**ONE, "People": []}, "another case"),
        ({"people": [{"to": [{"email": "a@example.com", "Email": "x@attacker.example"}]}]}, "another case below"),
        ({**ONE, "fields": {"project": {"key": "SHOP", "id": "1"}}}, "two names of one project"),
        ({**ONE, "fields": {"project": "SHOP"}}, "a project that is no object"),
        ({**ONE, "update": {"project": [{"set": "PAY"}]}}, "the project once more"),
    ],
)
def test_a_body_that_names_in_two_ways_is_refused(value: Any, why: str) -> None:
    """Expect None: what a server could read otherwise is no operation."""
    assert picked(MAIL, value) is None, why


def test_every_place_that_names_someone_counts() -> None:
    """Expect all recipients of all lists, and what was not asked for to be left alone."""
    both = {"people": [{"to": [{"email": "b@example.com"}]}, {"bcc": [{"email": "a@example.com"}]}], "text": {"x": [1]}}
    assert picked(MAIL, both) == {"to": ("b@example.com", "a@example.com")}
    assert picked(MAIL, {**ONE, "fields": {"project": {"key": "SHOP"}}}) == {
        "to": ("a@example.com",),
        "project": ("SHOP",),
    }
    assert picked(MAIL, ONE, ("content-type", "text/plain")) is None
    assert picked(MAIL, ONE, ("content-type", "application/json"), ("content-encoding", "gzip")) is None


def test_alternatives_are_not_a_list() -> None:
    """Expect one of the places, in its canonical spelling; both are refused."""
    page = "1f2e3d4c-5b6a-7980-1a2b-3c4d5e6f7a8b"
    assert picked(PARENT, {"parent": {"page": page}}) == {"parent": (page.replace("-", ""),)}
    assert picked(PARENT, {"parent": {"page": page, "database": page}}) is None
    assert picked(PARENT, {"parent": {"page": "roadmap"}}) is None
    assert picked(PARENT, {}) == {}


@tried(200)
@given(VALUES)
def test_nothing_is_bound_that_was_not_said(value: Any) -> None:
    """Expect None, or arguments whose values all stand in the body; never an exception."""
    found = EVALUATORS["json_pick"](MAIL, json.dumps(value).encode(), facts())
    if found is not None:
        assert all(word in json.dumps(value) for word in found["to"])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"arguments": {}},
        {"arguments": {"a": "x"}},
        {"arguments": {"a": ["x..y"]}},
        {"arguments": {"a": ["x[0]"]}},
        {"arguments": {"a": ["x"]}, "required": ["b"]},
        {"arguments": {"a": ["x"]}, "single": "a"},
        {"arguments": {"a": ["x"]}, "shapes": {"a": "nothing"}},
        {"arguments": {"a": ["x"]}, "shapes": {"b": "uuid"}},
        {"arguments": {"a": ["x"]}, "sole": []},
        {"arguments": {"a": ["x"]}, "more": 1},
    ],
)
def test_parameters_that_mean_nothing_are_refused(params: dict[str, Any]) -> None:
    """Expect a mistake in a service file to be told when it is loaded."""
    with pytest.raises(ValueError, match=r"."):
        check_params("json_pick", params)


def publication(value: Any, *, length: int | None = None, rest: bytes = b"\x03\0\0\0abc") -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return (len(body) if length is None else length).to_bytes(4, "little") + body + rest


HELLO = {"name": "exeat_hello", "vers": "1.0.0", "deps": []}


@every_row(
    ("body", "why"),
    [
        (b"", "nothing"),
        (b"\0\0\0\0", "no second length"),
        (b"\0\0\0\0\0\0\0\0", "no JSON"),
        (publication(HELLO, length=2**32 - 1), "a length beyond the body"),
        (publication(HELLO, length=3), "a length within the JSON"),
        (publication(HELLO, rest=b""), "no file behind it"),
        (publication(b'{"name":"a","name":"b","vers":"1.0.0"}'), "a duplicate key"),
        (publication([HELLO]), "a list"),
        (publication({**HELLO, "name": "a/b"}), "not a name"),
        (publication({**HELLO, "name": 1}), "a number"),
        (publication({**HELLO, "vers": "latest"}), "not a version"),
        (publication({"vers": "1.0.0"}), "no name"),
    ],
)
def test_what_is_no_publication_is_refused(body: bytes, why: str) -> None:
    """Expect None: a rule that binds the crate must see it."""
    assert EVALUATORS["cargo_publish"]({}, body, facts()) is None, why


def test_a_publication_names_its_crate() -> None:
    """Expect crate and version, however much of the file is there; a coded body is not read."""
    found = {"crate": "exeat-hello", "version": "1.0.0"}
    assert EVALUATORS["cargo_publish"]({}, publication(HELLO), facts()) == found
    assert EVALUATORS["cargo_publish"]({}, publication(HELLO, rest=b"\0\0\0\x7f"), facts()) == found
    coded = facts(("content-encoding", "gzip"))
    assert EVALUATORS["cargo_publish"]({}, publication(HELLO), coded) is None


UPLOAD = [(":action", "file_upload"), ("name", "Exeat_Hello"), ("version", "1.0"), ("description", "x\r\n\r\n--y")]
WHEEL = "exeat_hello-1.0-py3-none-any.whl"
FORM = ("content-type", "multipart/form-data; boundary=mark")


def upload(fields: list[tuple[str, str]], file: str = WHEEL, *, part: str = "content", extra: str = "") -> bytes:
    parts = [f'--mark\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields]
    head = f'Content-Disposition: form-data; name="{part}"; filename="{file}"\r\n{extra}'
    return ("".join(parts) + f"--mark\r\n{head}Content-Type: application/octet-stream\r\n\r\nPK").encode()


@every_row(
    ("body", "why"),
    [
        (b"", "nothing"),
        (upload(UPLOAD)[2:], "no boundary at its beginning"),
        (upload(UPLOAD).replace(b"\r\n", b"\n"), "bare line feeds"),
        (upload(UPLOAD)[:200], "no file within the beginning"),
        (upload([("name", "other"), *UPLOAD]), "two names"),
        (upload([*UPLOAD, ("version", "2.0")]), "two versions"),
        (upload(UPLOAD[1:]), "no action"),
        (upload([(":action", "remove_pkg"), *UPLOAD[1:]]), "another action"),
        (upload([UPLOAD[0], ("name", "requests"), UPLOAD[2]]), "a file of another project"),
        (upload([UPLOAD[0], UPLOAD[2]]), "no name"),
        (upload([UPLOAD[0], ("name", "\u0435xeat-hello"), UPLOAD[2]]), "a letter that only looks like one"),
        (upload(UPLOAD, "exeat_hello.exe"), "not a distribution"),
        (upload(UPLOAD, part="other"), "another file first"),
        (upload(UPLOAD, extra='Content-Disposition: form-data; name="x"\r\n'), "two dispositions"),
        (upload(UPLOAD, extra="X-Other: 1\r\n"), "a header that no client sends"),
    ],
)
def test_an_upload_that_names_in_two_ways_is_refused(body: bytes, why: str) -> None:
    """Expect None: fields and file have to agree, and each to stand once."""
    assert EVALUATORS["pypi_upload"]({}, body, facts(FORM)) is None, why


def test_an_upload_names_its_project() -> None:
    """Expect the normal form of the project, whatever the file holds; other media types and codings are not read."""
    found = {"package": "exeat-hello", "version": "1.0"}
    assert EVALUATORS["pypi_upload"]({}, upload(UPLOAD) + b"\0" * 1000, facts(FORM)) == found
    assert EVALUATORS["pypi_upload"]({}, upload(UPLOAD), facts(("content-type", "multipart/form-data"))) is None
    assert EVALUATORS["pypi_upload"]({}, upload(UPLOAD), facts(FORM, FORM)) is None
    assert EVALUATORS["pypi_upload"]({}, upload(UPLOAD), facts(FORM, ("content-encoding", "gzip"))) is None
