"""Scrubbing: every promised form, at every split, and nothing held that need not be."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.scrub import (
    MASK,
    MAX_MATERIAL,
    RUN,
    STREAM_BYTES,
    Guarded,
    Patterns,
    Scrubber,
    ScrubError,
    scrub_whole,
)
from tests.support.properties import tried
from tests.support.rows import every_row
from tests.support.scrubbing import FORMS, PATTERNS, PLAIN, SECRET, UNPREDICTABLE, forms, shows


def masked(data: bytes, *cuts: int) -> bytes:
    """Feed `data` cut at `cuts`."""
    scrubber = Scrubber(PATTERNS)
    out = b""
    start = 0
    for cut in (*cuts, len(data)):
        out += scrubber.feed(data[start:cut])
        start = cut
    return out + scrubber.finish()


@every_row(("name", "form"), FORMS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(FORMS)])
def test_a_promised_form_never_passes_at_any_split(name: str, form: bytes) -> None:
    """Every form of a secret is masked, at the same length, wherever the stream is cut."""
    data = b'{"a":"' + form + b'","b":1}\n'
    assert shows(data), "the form must show the secret, or the test proves nothing"
    for cut in range(len(data) + 1):
        out = masked(data, cut)
        assert len(out) == len(data)
        assert not shows(out), (name, cut, out)
        assert MASK * 8 in out


@every_row(("name", "form"), FORMS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(FORMS)])
def test_a_promised_form_never_passes_byte_by_byte(name: str, form: bytes) -> None:
    """One byte a read shows nothing more."""
    data = b"x=" + form + b" y"
    out = masked(data, *range(1, len(data)))
    assert len(out) == len(data)
    assert not shows(out)


@pytest.mark.parametrize("lost", [1, 5, 12])
def test_a_long_run_of_a_secret_is_a_hit_without_the_rest(lost: int) -> None:
    """Twelve bytes of the unpredictable part are enough, wherever in it they are."""
    for part in (PLAIN[lost:], PLAIN[:-lost]):
        out = masked(b"<" + part + b">")
        assert out == b"<" + MASK * len(part) + b">"


def test_a_hit_that_ends_with_the_read_stays_masked_when_the_secret_does_not_go_on() -> None:
    """Bytes held because the run could go on keep their mask when it does not."""
    head = PLAIN[:RUN]
    for cut in range(1, len(head) + 2):
        assert masked(b"a" + head + b"!!", cut) == b"a" + MASK * RUN + b"!!"


def test_the_same_echo_twice_counts_twice_and_split_counts_once() -> None:
    """`hits` counts masked places, not pieces."""
    scrubber = Scrubber(PATTERNS)
    data = PLAIN + b" and " + PLAIN
    for byte in data:
        scrubber.feed(bytes((byte,)))
    scrubber.finish()
    assert scrubber.hits == 2


@tried(200)
@given(st.data())
def test_no_mixture_of_forms_and_splits_shows_a_secret(data: st.DataObject) -> None:
    """Forms, noise and cuts in any order: nothing can be read back and no length changes."""
    pieces = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from([form for _, form in FORMS]), st.binary(max_size=12), st.sampled_from([b"\\", b"%"])
            ),
            max_size=4,
        )
    )
    text = b" ".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    out = masked(text, *cuts)
    assert len(out) == len(text)
    assert not shows(out)


@tried(200)
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_what_holds_no_secret_passes_unchanged(text: bytes, cuts: list[int]) -> None:
    """Other bytes come out as they went in."""
    places = sorted(min(cut, len(text)) for cut in cuts)
    if not shows(text):
        assert masked(text, *places) == text


@pytest.mark.parametrize(
    "event",
    [b"data: hello\n\n", b'data: {"a":"b\\n"}\n\n', b"id: 1%20\r\n\r\n", b"data: caf\xc3\xa9\n\n"],
)
def test_an_event_leaves_with_the_read_that_brought_it(event: bytes) -> None:
    """Nothing is held back when the tail starts no secret: events do not wait for the next one (T14)."""
    scrubber = Scrubber(PATTERNS)
    for _ in range(3):
        assert scrubber.feed(event) == event


def test_only_a_proper_prefix_is_held() -> None:
    """A tail that starts a secret waits, all before it does not."""
    scrubber = Scrubber(PATTERNS)
    assert scrubber.feed(b"text, then " + PLAIN[:7]) == b"text, then "
    assert scrubber.feed(b". ") == PLAIN[:7] + b". "
    assert scrubber.feed(b"5!%") == b"5!"
    assert scrubber.feed(b"4") == b""
    assert scrubber.feed(b"!") == b"%4!"


def test_the_public_prefix_alone_is_no_secret() -> None:
    """What everyone knows of a token's shape may be said."""
    text = b"tokens look like sk_live_XXXXXXXXXXXXXXXX"
    assert masked(text) == text


def test_repeated_symbols_are_no_hit() -> None:
    """A window of one symbol belongs to nobody."""
    patterns = Patterns([Guarded(value=b"Kq3" + b"A" * 20 + b"z9")])
    assert scrub_whole(b"A" * 40, patterns) == (b"A" * 40, 0)
    assert scrub_whole(b"Kq3" + b"A" * 20 + b"z9", patterns)[1] == 1


def test_unicode_secrets_are_found_in_json_escapes() -> None:
    """A secret outside ASCII is compared as UTF-8, surrogate pairs included."""
    secret = "pässwört-\U0001f511-long"
    patterns = Patterns([Guarded(value=secret.encode())])
    text = json.dumps(secret).encode()
    for cut in range(len(text)):
        scrubber = Scrubber(patterns)
        out = scrubber.feed(text[:cut]) + scrubber.feed(text[cut:]) + scrubber.finish()
        assert out == b'"' + MASK * (len(text) - 2) + b'"'


def test_a_set_too_large_to_search_for_is_refused() -> None:
    """More material than the cap makes no scrubber: the call is not made."""
    values = [Guarded(value=random.Random(n).randbytes(MAX_MATERIAL // 4)) for n in range(5)]
    with pytest.raises(ScrubError):
        Patterns(values)


def test_no_secret_means_nothing_is_looked_at() -> None:
    """An empty set passes everything at once."""
    scrubber = Scrubber(Patterns([]))
    assert scrubber.feed(PLAIN + b"%") == PLAIN + b"%"
    assert scrubber.finish() == b""


@pytest.mark.parametrize("escape", [b"\\u0021", b"%21"])
def test_an_escape_is_never_cut_in_two(escape: bytes) -> None:
    """Where one reading wants the end of an escape held, the whole escape is: the other readings stay in step."""
    scrubber = Scrubber(Patterns([Guarded(value=b"0021xyzQW9rT-7")]))
    assert scrubber.feed(b"a" + escape) == b"a"
    assert scrubber.feed(b" ") == escape + b" "


SPARSE = b'{"text": "' + b"nothing to see here, " * 400 + b'"}'
"""A text so long that views of it are searched only where an escape was undone."""


@every_row("escape", ["%{:02x}", "\\u{:04X}", "\\u0025{:02x}"], ids=["percent", "json", "percent in json"])
@every_row("place", [0, 1, len(SPARSE) // 2, len(SPARSE)])
def test_few_escapes_in_a_long_text_are_undone(escape: str, place: int) -> None:
    """A secret of which no run is left plain is found by its two escapes, wherever in the text they are."""
    hidden = b"".join(
        escape.format(byte).encode() if index in (8, 16) else bytes((byte,)) for index, byte in enumerate(PLAIN)
    )
    text = SPARSE[:place] + hidden + SPARSE[place:]
    for cut in (0, place + 5, place + len(hidden) // 2, place + len(hidden) - 1):
        out = masked(text, cut)
        assert MASK * len(hidden) in out
        assert len(out) == len(text)


def test_a_long_stream_is_searched_as_well_as_a_short_one() -> None:
    """The automaton that takes over in a long stream finds what the first one found."""
    patterns = Patterns([Guarded(value=PLAIN), Guarded(value=SECRET, public_prefix=b"sk_live_")])
    scrubber = Scrubber(patterns)
    piece = b"harmless " * 4096
    sent = 0
    while sent <= STREAM_BYTES + 2 * len(piece):
        assert MASK not in scrubber.feed(piece)
        sent += len(piece)
    for name, form in forms(SECRET):
        before = scrubber.hits
        out = scrubber.feed(b" " + form + b" ") + scrubber.feed(b"tail tail tail tail tail")
        assert scrubber.hits > before, name
        assert UNPREDICTABLE not in out
