"""What the fuzz targets share: their list, their seeds, and how an input is cut into reads.

A target is a module in tests/fuzz/targets/ with `check(data)`: any exception it lets through is a finding, and it says
whether the input was accepted by what it feeds, so that a corpus that went stale is noticed. `WORDS`
(optional) are byte strings that the fuzzer should know, `MAX_BYTES` bounds inputs that cost much. Its seeds are the
lines of tests/fuzz/corpus/NAME.txt, each bytes as a bytes literal spells them, so that a change of the corpus can be
read; `#` starts a comment.
"""

from __future__ import annotations

import importlib
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fuzz"

NAMES = tuple(sorted(path.stem for path in (FOLDER / "targets").glob("*.py")))
"""Every target."""

MAX_BYTES = 4096
"""Longer inputs find the same things more slowly; bounds above this have unit tests."""

ROOMS = ("rules", "wire", "net", "audit", "state", "broker", "proxy", "capture")
"""What is instrumented: our own code, so that coverage means ours."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to feed hostile bytes to. `check` raises where a promise is broken; True: the input was accepted."""

    name: str
    check: Callable[[bytes], bool]
    words: tuple[bytes, ...]
    max_bytes: int


def load(name: str) -> Target:
    """The target `name`, its module imported now (so that a caller can instrument what it imports)."""
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    return Target(name, module.check, tuple(getattr(module, "WORDS", ())), getattr(module, "MAX_BYTES", MAX_BYTES))


def corpus_file(name: str) -> Path:
    """Where the seeds of `name` are."""
    return FOLDER / "corpus" / f"{name}.txt"


def seeds(name: str) -> list[bytes]:
    """The committed inputs of `name`, in order."""
    lines = corpus_file(name).read_text(encoding="ascii").splitlines()
    return [unspelled(line) for line in lines if line and not line.startswith("#")]


def spelled(data: bytes) -> str:
    """`data` (not empty) as a line of a corpus file: as in a bytes literal, quotes as they are."""
    assert data
    text = repr(data)
    line = text[2:-1].replace("\\'", "'") if text[1] == "'" else text[2:-1]
    return "\\x23" + line[1:] if line.startswith("#") else line


def unspelled(line: str) -> bytes:
    """The bytes that `spelled` wrote."""
    return line.encode("ascii").decode("unicode_escape").encode("latin-1")


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """Three ways to cut `data` into reads, the same ones each time: byte by byte, and two by chance."""
    yield [data[at : at + 1] for at in range(len(data))]
    chance = random.Random(zlib.crc32(data))
    for most in (3, 40):
        pieces: list[bytes] = []
        at = 0
        while at < len(data):
            size = chance.randint(1, most)
            pieces.append(data[at : at + size])
            at += size
        yield pieces
