"""The format of attack cases, and that the runner's judges see what they must see."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.support.attackdata import CaseFault, load, render
from tests.support.attacker import Answer, Seen
from tests.support.attempts import judge
from tests.support.canary import forms, found
from tests.support.entrypoints import ENTRY_POINTS

SECRET = b"canary-0123456789-abcdef"
CASE = """
- id: B001
  sentence: something is refused
  each: [a, b]
  send: 'GET /{each} HTTP/1.1\\r\\n'
  at: [decide]
  expect: {verdict: denied, reason: no-rule}
"""

# (what is wrong, text to replace, by what)
FAULTS = [
    ("an unknown key", "at: [decide]", "att: [decide]"),
    ("an unknown verdict", "verdict: denied", "verdict: refused"),
    ("no reason", ", reason: no-rule", ""),
    ("a reason where it is allowed", "verdict: denied", "verdict: allowed"),
    ("nothing to send", "send: 'GET /{each} HTTP/1.1\\r\\n'", "token: none"),
    ("a difference where it is not played", "at: [decide]", "at: [decide]\n  differs: {broker: {verdict: closed}}"),
    ("an unknown expectation", "reason: no-rule", "reason: no-rule, record: 1"),
]


def cases(folder: Path, text: str) -> list[str]:
    (folder / "x.yaml").write_text(text)
    return [case.name for case in load(folder)]


@pytest.mark.parametrize(("sentence", "old", "new"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_case_that_is_not_as_documented_is_refused(tmp_path: Path, sentence: str, old: str, new: str) -> None:
    """A slip in the data is an error with its place, never a case that passes by not being played."""
    assert old in CASE
    with pytest.raises(CaseFault, match=r"x\.yaml: B001"):
        cases(tmp_path, CASE.replace(old, new))


def test_a_name_that_is_used_twice_is_refused(tmp_path: Path) -> None:
    """Two cases of one name would hide each other in a report."""
    with pytest.raises(CaseFault, match="used twice"):
        cases(tmp_path, CASE + CASE)


@pytest.mark.parametrize("text", ["{nobody}", "\\q", "x\\", "{2*{nobody}}"])
def test_a_text_that_is_not_as_documented_is_refused(text: str) -> None:
    """An unknown name or escape is an error, not itself."""
    with pytest.raises(CaseFault):
        render(text, {"ok": b"ok.test"})


def test_texts_become_bytes(tmp_path: Path) -> None:
    """Escapes, names and repetitions are bytes; every other brace is itself."""
    names = {"ok": b"ok.test:1"}
    assert render("\\x00\\r\\n\\t\\0\\\\", names) == b"\0\r\n\t\0\\"
    assert render("Host: {ok}, {3*ab}, {2*\\r}", names) == b"Host: ok.test:1, ababab, \r\r"
    assert render('{"a": {"b": []}} ü', names) == '{"a": {"b": []}} ü'.encode()
    assert cases(tmp_path, CASE) == ["B001.1", "B001.2"]


def test_every_case_of_the_project_loads_and_names_known_entry_points() -> None:
    """A case at an entry point that does not exist would never be played."""
    loaded = load()
    assert {entry for case in loaded for entry in case.at} <= ENTRY_POINTS.keys()
    assert all(case.at for case in loaded)


# --- the judges ---


def test_every_promised_form_of_a_secret_is_found() -> None:
    """In any surroundings, at any alignment, and in part."""
    for before in (b"", b"x", b"xy", b"xyz"):
        whole = before + SECRET + b" and more"
        assert found(SECRET, base64.b64encode(whole)), before
        assert found(SECRET, base64.urlsafe_b64encode(whole)), before
    for name, form in forms(SECRET):
        assert found(SECRET, b"<" + form + b">"), name
    assert found(SECRET, b"..." + SECRET[5:17] + b"...")


def test_what_is_no_secret_is_not_found() -> None:
    """A mask and a run that is too short are clean."""
    assert found(SECRET, b"*" * 64 + SECRET[:11] + b"-" + SECRET[12:]) == ["a run of it"]
    assert found(SECRET, b"*" * 64 + SECRET[:11]) == []


def test_a_forged_refusal_is_told_by_its_header_alone() -> None:
    """Our own Proxy-Status makes a refusal; without it an answer is an upstream's, whatever its status."""
    ours = {"proxy-status": 'exeat; error=http_request_denied; details="no-rule"'}
    assert judge(Seen(answers=[Answer(403, "", ours)]), 1).reason == "no-rule"
    assert judge(Seen(answers=[Answer(403, "", {})]), 1).verdict == "allowed"
    assert judge(Seen(answers=[Answer(200, "", {}, complete=False)]), 1).verdict == "cut"
    assert judge(Seen(answers=[Answer(200, "", {})]), 2).verdict == "closed"
    assert judge(Seen(end="reset"), 1).verdict == "closed"
