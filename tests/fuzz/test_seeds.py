"""The fuzz targets without the fuzzer: every committed input once, then damaged ones. What was found stays found."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import fuzzing

load = functools.cache(fuzzing.load)


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_every_seed_keeps_what_its_target_promises(name: str) -> None:
    """No input of the corpus, whole or cut short anywhere, breaks the target's property."""
    target = load(name)
    for seed in fuzzing.seeds(name):
        target.check(seed)
        for end in {len(seed) // 3, len(seed) // 2, len(seed) - 1}:
            target.check(seed[:end])


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """An input of the corpus with one to four changes: bytes lost, put in, exchanged, doubled, or another's end."""
    seeds = fuzzing.seeds(name)
    data = draw(st.sampled_from(seeds))
    words = st.one_of(st.sampled_from(load(name).words), st.binary(min_size=1, max_size=4))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 4, 16])))
        match draw(st.integers(0, 4)):
            case 0:
                data = data[:start] + data[end:]
            case 1:
                data = data[:start] + draw(words) + data[start:]
            case 2:
                data = data[:start] + draw(words) + data[end:]
            case 3:
                data = data[:end] + data[start:]
            case _:
                data = data[:start] + draw(st.sampled_from(seeds))[start:]
    return data[: load(name).max_bytes]


@settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("name", fuzzing.NAMES)
@given(data=st.data())
def test_a_damaged_seed_keeps_what_its_target_promises(name: str, data: st.DataObject) -> None:
    """Whatever is changed in an input: refused, or the same for everybody who reads it, in every cut."""
    load(name).check(data.draw(damaged(name)))


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_a_corpus_reaches_what_it_is_for(name: str) -> None:
    """At least a tenth of the seeds is accepted, and as many are refused: a stale corpus would show nothing."""
    accepted = [load(name).check(seed) for seed in fuzzing.seeds(name)]
    assert sum(accepted) * 10 >= len(accepted)
    assert name in ("handoff_frames", "scrubber") or sum(accepted) * 10 <= 9 * len(accepted)


def test_every_corpus_belongs_to_a_target_and_holds_several_inputs() -> None:
    """A corpus without a target would never be played; a target without one would start from nothing."""
    corpora = {path.stem for path in (fuzzing.FOLDER / "corpus").glob("*.txt")}
    assert corpora == set(fuzzing.NAMES)
    assert all(len(fuzzing.seeds(name)) >= 10 for name in fuzzing.NAMES)


@pytest.mark.parametrize("data", [b"#x", b'"', b"'", b"\\'\"", b"\\\"'", b"\\x00", b"\r\n\x00\xff", b'\\"'])
def test_a_line_of_a_corpus_file_says_its_bytes(data: bytes) -> None:
    """What is written is read back, and stays one line that is no comment."""
    line = fuzzing.spelled(data)
    assert fuzzing.unspelled(line) == data
    assert "\n" not in line
    assert not line.startswith("#")
