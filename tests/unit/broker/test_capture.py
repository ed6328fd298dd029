"""Tokens in an answer: what is found, what withholds it, and what the sandbox sees instead (RULINGS 7.2)."""

from __future__ import annotations

import json

import pytest

from broker.capture import look, replaced
from broker.result import ResultRefused

TOKEN = "canary-token-0123456789abcdef"
OTHER = "canary-other-fedcba9876543210"
FIELDS = ("token", "access_token", "session.key")


def raw(value: object) -> bytes:
    return json.dumps(value).encode()


WITHHELD = [
    (raw({}), "none of the fields"),
    (raw({"token": None}), "a field without a value"),
    (raw({"token": "short"}), "what cannot be told from other text"),
    (raw({"token": 7}), "no text"),
    (raw({"token": [TOKEN]}), "a list"),
    (raw({"token": "caf\u00e9" * 9}), "what cannot stand in a header"),
    (raw([{"token": TOKEN}]), "a list of answers"),
    (raw(TOKEN), "a text alone"),
    (b"", "nothing"),
    (b"{", "no JSON"),
    (b'{"token": "' + TOKEN.encode() + b'", "token": "x"}', "a name twice"),
    (raw({"token": TOKEN, "refresh_token": OTHER}), "a refresh token"),
    (raw({"token": TOKEN, "a": {"b": [{"clientSecret": OTHER}]}}), "a secret further down"),
    (raw({"token": TOKEN, "id_token": OTHER}), "an identity token"),
    (raw({"token": TOKEN, "api-key": OTHER}), "a key"),
    (raw({"token": TOKEN, "set_cookie": OTHER}), "a cookie"),
    (raw({"token": TOKEN, "message": f"use {TOKEN}"}), "the token in a message"),
    (raw({"token": TOKEN, "list": [TOKEN]}), "the token in a list"),
]


@pytest.mark.parametrize(("answer", "why"), WITHHELD, ids=[row[1] for row in WITHHELD])
def test_what_could_hold_authority_unnamed_is_withheld(answer: bytes, why: str) -> None:
    """Expect no part of it, and no word of it in what is said."""
    with pytest.raises(ResultRefused) as caught:
        look(answer, 1 << 16, FIELDS)
    assert "canary" not in str(caught.value), why


def test_an_answer_over_its_bound_is_withheld() -> None:
    """Expect the bound to hold before anything is parsed."""
    with pytest.raises(ResultRefused):
        look(raw({"token": TOKEN, "x": "y" * 2000}), 1000, FIELDS)


def test_a_token_that_was_not_kept_is_not_shown() -> None:
    """Expect a refusal where the vault gave no placeholder for it."""
    with pytest.raises(ResultRefused):
        replaced(raw({"token": TOKEN}), 1 << 16, FIELDS, {OTHER: "x"})


def test_escapes_do_not_hide_a_token_from_the_last_look() -> None:
    """Expect the answer as it would be sent to be searched once more."""
    with pytest.raises(ResultRefused):
        replaced(raw({"token": TOKEN, "x": TOKEN}), 1 << 16, FIELDS, {TOKEN: "placeholder"})


def test_named_tokens_are_found_once_with_their_time() -> None:
    """Expect two names for one token to be one, nested ones to be found, and the seconds as they are said."""
    found = look(
        raw(
            {
                "token": TOKEN,
                "access_token": TOKEN,
                "session": {"key": OTHER},
                "expires_in": 300,
                "token_type": "Bearer",
            }
        ),
        1 << 16,
        FIELDS,
    )
    assert found.tokens == (TOKEN, OTHER)
    assert found.seconds == 300
    for said in ("soon", -1, 1.5, None, True, {"x": 1}):
        assert look(raw({"token": TOKEN, "expires_in": said}), 1 << 16, FIELDS).seconds == 0


def test_placeholders_stand_where_tokens_stood_and_the_rest_is_as_it_was() -> None:
    """Expect the vendor's shape, numbers digit by digit."""
    answer = (
        b'{"token": "' + TOKEN.encode() + b'", "n": 1.50, "session": {"key": "' + OTHER.encode() + b'"}, "ok": true}'
    )
    made = replaced(answer, 1 << 16, FIELDS, {TOKEN: "one", OTHER: "two"})
    assert made == b'{"token":"one","n":1.50,"session":{"key":"two"},"ok":true}'
