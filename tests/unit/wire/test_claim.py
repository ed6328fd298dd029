"""The doctor's claim: fixed words in, or nothing. The inside is hostile and may say anything."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeat import doctor
from tests.support.rows import every_row
from wire.doctor import CHECKS, CLIENTS, MAX_CLAIM_BYTES, ClaimInvalid, known, parse_claim

GOOD = {"check": "direct", "state": "holds"}


def document(*findings: object, version: object = 1) -> bytes:
    return json.dumps({"version": version, "findings": list(findings)}).encode()


@every_row(
    ("sentence", "raw"),
    [
        ("nothing", b""),
        ("not JSON", b"all is well"),
        ("deep nesting", b"[" * 5000),
        ("a list", b"[]"),
        ("another version", document(GOOD, version=2)),
        ("a version that only looks like one", document(GOOD, version="1")),
        ("no findings", document()),
        ("findings that are no list", b'{"version": 1, "findings": {"check": "direct"}}'),
        ("more keys", b'{"version": 1, "findings": [{"check": "direct", "state": "holds"}], "armed": true}'),
        ("more keys in a finding", document({**GOOD, "why": "text\nof the sandbox"})),
        ("a check of its own", document({"check": "armed", "state": "holds"})),
        ("text for the log", document({"check": 'x","event":"boundary.proven', "state": "holds"})),
        ("a state of its own", document({"check": "direct", "state": "proven"})),
        ("a state that is no text", document({"check": "direct", "state": ["holds"]})),
        ("a client of its own", document({"check": "client-evil", "state": "holds"})),
        ("a variable in the check", document({"check": "client-git:GIT_SSL_CAINFO", "state": "fails"})),
        ("another client's variable", document({"check": "client-git", "state": "fails", "lacks": ["PIP_CERT"]})),
        ("a variable of its own", document({"check": "client-git", "state": "fails", "lacks": ["A\x1b[2J"]})),
        ("a variable that is no text", document({"check": "client-git", "state": "fails", "lacks": [None]})),
        ("something lacking that holds", document({"check": "client-git", "state": "holds", "lacks": ["https_proxy"]})),
        ("one variable twice", document({"check": "client-git", "state": "fails", "lacks": ["https_proxy"] * 2})),
        ("one check twice", document(GOOD, {"check": "direct", "state": "fails"})),
        ("too many", document(*[GOOD] * 65)),
        ("too long", document({**GOOD, "lacks": ["x" * MAX_CLAIM_BYTES]})),
    ],
)
def test_what_is_not_in_the_tables_refuses_the_whole(sentence: str, raw: bytes) -> None:
    """One wrong word and nothing of the claim is taken; the error holds no word of the sandbox."""
    with pytest.raises(ClaimInvalid) as refused:
        parse_claim(raw)
    assert "\x1b" not in str(refused.value), sentence
    assert "evil" not in str(refused.value), sentence


@given(st.binary(max_size=400))
def test_no_bytes_get_anything_else_through(raw: bytes) -> None:
    """Whatever the bytes, what comes out is codes of ours."""
    try:
        said = parse_claim(raw)
    except ClaimInvalid:
        return
    assert all(map(known, (*said.holds, *said.fails, *said.unknown)))


def test_the_doctors_own_words_are_taken() -> None:
    """Every check and every first variable that exeat/doctor.py can name is in the tables, and nothing more is."""
    checks = {check for check, *_ in (*doctor.STREAMS, *doctor.DATAGRAMS)} | {"interfaces", "gateway"}
    assert checks == CHECKS
    assert {name: frozenset(group[0] for group in groups) for name, groups in doctor.CLIENTS.items()} == dict(CLIENTS)
    found = list(doctor.clients({}, "", lambda _: "/bin/x"))
    said = parse_claim(doctor.claim([doctor.interfaces(), *found]))
    assert "client-git:GIT_SSL_CAINFO" in said.fails
    assert len(said.fails) == sum(1 + len(groups) for groups in doctor.CLIENTS.values())
