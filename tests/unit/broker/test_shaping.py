"""Shaping does its work in slices: a hostile answer of one sandbox holds up no other call of the executor."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable

import pytest

from broker.result import MAX_NODES, ResultRefused, prune
from broker.scrub import SLICE_ESCAPES, Guarded, Patterns, slices
from broker.shaping import Shaping
from net.aside import Busy
from net.exchange import AnswerRefused
from rules.decision import Restrictions, ResultSpec
from wire.heads import ResponseHead

SECRET = b"tok-4mVZx81LrQwS0pEyUb7N"
READ = 64 * 1024
HOSTILE = {
    "percent": b"%41" * 21_845,
    "unicode": b"\\u0041" * 10_922,
    "both": b"\\u002541" * 8_192,
    "slashes": b"\\/" * 32_768,
    "escapes first": b"%41" * 10_000 + b"x" * 35_000,
}


class Rests:
    """Counts the rests."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> None:
        self.count += 1


def shaping(rests: Rests, restrictions: Restrictions | None = None, coding: str = "identity") -> Shaping:
    made = Shaping(
        patterns=Patterns([Guarded(value=SECRET)]),
        restrictions=restrictions or Restrictions(),
        method="GET",
        rest=rests,
    )
    fields = ((b"Content-Type", b"application/json"), (b"Content-Encoding", coding.encode()))
    made.on_response(ResponseHead(200, "OK", "1.1", fields))
    return made


async def everything(made: Shaping, data: bytes) -> bytes:
    out = [part async for part in made.feed(data)]
    return b"".join(out + [part async for part in made.finish()])


@pytest.mark.parametrize("name", sorted(HOSTILE))
async def test_an_answer_of_nothing_but_escapes_is_searched_with_rests(name: str) -> None:
    """64 KiB of escapes, tens of milliseconds of work, are not searched in one piece; a secret at the end is found."""
    rests = Rests()
    data = HOSTILE[name][: READ - len(SECRET)] + SECRET
    made = shaping(rests)
    out = await everything(made, data)
    assert rests.count >= 7
    assert out == data[: -len(SECRET)] + b"*" * len(SECRET)
    assert made.hits == 1


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_slice_has_more_than_its_part_of_escapes(name: str) -> None:
    """However escapes are spread, each slice holds few, and the slices are the whole."""
    parts = list(slices(HOSTILE[name]))
    assert b"".join(parts) == HOSTILE[name]
    assert max(part.count(b"%") + part.count(b"\\") for part in parts) <= SLICE_ESCAPES


async def test_what_a_few_bytes_unpack_to_is_searched_with_rests() -> None:
    """A small compressed answer that becomes megabytes leaves the loop to others in between."""
    rests = Rests()
    data = b"".join(b"%d," % number for number in range(400_000))
    assert await everything(shaping(rests, coding="gzip"), gzip.compress(data)) == data
    assert rests.count >= 32


async def test_an_ordinary_answer_needs_no_rest() -> None:
    """One piece of ordinary JSON passes in one step."""
    rests = Rests()
    text = json.dumps({"data": "x" * 1000, "more": [1, 2, 3]}).encode()
    assert await everything(shaping(rests), text) == text
    assert rests.count == 0


@pytest.mark.parametrize("value", [b"1,", b'"",', b"{},", b"[],"])
def test_more_values_than_may_be_are_refused_before_they_are_built(value: bytes) -> None:
    """A kept answer of hundreds of thousands of values is withheld, whatever they are."""
    raw = b'{"a":[' + value * (MAX_NODES + 10) + value[:-1] + b"]}"
    with pytest.raises(ResultRefused):
        prune(raw, ResultSpec(keep=("a",), bound=4 << 20))


async def test_a_kept_answer_that_finds_no_thread_is_withheld() -> None:
    """Where a sandbox has too many answers waiting to be pruned, the next one is refused, not passed as it is."""

    def busy(work: Callable[[], bytes]) -> Awaitable[bytes]:
        raise Busy

    made = Shaping(
        patterns=Patterns([]),
        restrictions=Restrictions(result=ResultSpec(keep=("id",))),
        method="GET",
        rest=Rests(),
        aside=busy,
    )
    made.on_response(ResponseHead(200, "OK", "1.1", ()))
    with pytest.raises(AnswerRefused) as caught:
        await everything(made, b'{"id": 1, "more": 2}')
    assert caught.value.reason == "answer-withheld"


async def test_a_kept_answer_is_pruned_and_then_searched_with_rests() -> None:
    """What is kept of a large answer of escapes is scrubbed in slices too."""
    rests = Rests()
    restrictions = Restrictions(result=ResultSpec(keep=("a",)))
    raw = b'{"a":"' + b"%41" * 60_000 + SECRET + b'","b":1}'
    out = await everything(shaping(rests, restrictions), raw)
    assert out == b'{"a":"' + b"%41" * 60_000 + b"*" * len(SECRET) + b'"}'
    assert rests.count >= 40
