"""`Secret` gives its value through one door only."""

from __future__ import annotations

import copy
import pickle
import traceback

import pytest

from broker.vault.secret import Secret, SecretRefused

CANARY = b"canary-0123456789"


@pytest.fixture
def secret() -> Secret:
    return Secret(CANARY, name="a", owner="o")


def test_nothing_renders_it(secret: Secret) -> None:
    """str, repr, format, f-strings, % and lists show a fixed word."""
    shown = [str(secret), repr(secret), f"{secret}", f"{secret!r}", f"{secret:>20}", "%s" % secret, str([secret])]  # noqa: UP031
    assert all("canary" not in text for text in shown)


@pytest.mark.parametrize(
    ("sentence", "use"),
    [
        ("comparing", lambda secret: secret == secret),
        ("hashing", hash),
        ("pickling", pickle.dumps),
        ("copying", copy.copy),
        ("deep copying", copy.deepcopy),
        ("asking its length", len),
        ("iterating", list),
        ("asking its truth", bool),
        ("reading its attributes", vars),
        ("bytes()", bytes),
    ],
)
def test_everything_else_is_refused(secret: Secret, sentence: str, use) -> None:
    """What could compare, copy or store the value raises TypeError without it."""
    with pytest.raises(TypeError) as caught:
        use(secret)
    assert "canary" not in str(caught.value), sentence


@pytest.mark.parametrize(
    ("value", "scrub", "code"),
    [
        (b"", True, "secret-empty"),
        (b"a\r\nX: y-0123456789", True, "secret-control"),
        (b"tab\tinside-0123456789", True, "secret-control"),
        (b"elevenbytes", True, "secret-short"),
        (b"x" * 65537, True, "secret-long"),
        (b"a\nb", False, "secret-control"),
    ],
)
def test_bytes_that_cannot_be_a_secret_are_refused(value: bytes, scrub: bool, code: str) -> None:
    """Empty, control bytes (B098), short without `scrub: false`, and long values are refused by code."""
    with pytest.raises(SecretRefused) as caught:
        Secret(value, name="a", scrub=scrub)
    assert caught.value.code == code
    if value:
        assert value.decode() not in str(caught.value)


def test_twelve_bytes_pass_and_short_ones_with_scrub_false() -> None:
    """The bound is 12 bytes; `scrub: false` lifts it."""
    assert Secret(b"x" * 12, name="a").reveal() == b"x" * 12
    assert Secret(b"pin1", name="a", scrub=False).reveal() == b"pin1"


def test_a_traceback_with_locals_does_not_show_it(secret: Secret) -> None:
    """Even a renderer that prints locals, and walks slots of what it finds, shows no value."""

    def fail(held: Secret) -> None:
        raise ValueError("fixed")

    try:
        fail(secret)
    except ValueError as error:
        shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    assert "canary" not in shown
    assert all("canary" not in repr(getattr(secret, name)) for name in Secret.__slots__ if not name.startswith("__"))
