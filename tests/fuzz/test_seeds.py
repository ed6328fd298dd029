"""Every committed input of every fuzz target, once, without the fuzzer: what it found stays found."""

from __future__ import annotations

import pytest

from tests.support import fuzzing


@pytest.mark.parametrize("name", fuzzing.NAMES)
def test_every_seed_keeps_what_its_target_promises(name: str) -> None:
    """No input of the corpus, whole or cut short anywhere, breaks the target's property."""
    target = fuzzing.load(name)
    for seed in fuzzing.seeds(name):
        target.check(seed)
        for end in {len(seed) // 3, len(seed) // 2, len(seed) - 1}:
            target.check(seed[:end])


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
