"""A sample of tests/cases/operations/*.yaml through every live lane; `make corpus` plays all of it.

Expect the verdict of the pure decision, exactly the permitted requests upstream, and one decision on record for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.operationcases import Vector, corpus
from tests.support.operationlanes import LANES, Stand, why_apart, why_not_here

pytestmark = [
    pytest.mark.xdist_group("operations"),
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "-"),
]

STEP = {"explicit": 29, "captured": 11, "h2": 7, "broker": 5}
ROLES = {
    "captured": ("registry-reads", "git-reads"),
    "h2": ("git-reads", "graphql-bound", "llm-asks", "work-bound", "aws-works"),
    "broker": ("git-agent", "graphql-reads", "llm-models", "infra-works", "hosting-works", "aws-buckets"),
}
"""A sandbox for each role takes longer than what is played in it."""


def sample() -> Iterator[tuple[Vector, str]]:
    """Every trick once and each n-th of the rest; elsewhere than at the shared listener fewer, of some roles."""
    for lane in LANES:
        playable = [vector for vector in corpus().vectors if not why_apart(vector, lane)]
        playable = [vector for vector in playable if vector.role in ROLES.get(lane, (vector.role,))]
        for number, vector in enumerate(playable):
            trick = lane == "explicit" and vector.trick and vector.name.partition(".")[2] in ("", "1")
            if trick or number % STEP[lane] == 0:
                yield vector, lane


SAMPLE = list(sample())


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """One gateway and one origin for all of them."""
    with Stand(tmp_path_factory.mktemp("operations")) as made:
        yield made
        made.verify()


@pytest.mark.parametrize(("vector", "lane"), SAMPLE, ids=[f"{lane}-{vector.name}" for vector, lane in SAMPLE])
def test_a_live_lane_decides_as_the_rules_do(vector: Vector, lane: str, stand: Stand) -> None:
    """The vector's sentence holds in this lane."""
    stand.play(vector, lane)


def test_every_lane_is_in_the_sample_with_both_verdicts() -> None:
    """Expect permits and denials everywhere, so that neither a closed nor an open gate could pass."""
    for lane in {lane for _, lane in SAMPLE}:
        assert {"deny", "permit"} <= {vector.verdict for vector, played in SAMPLE if played == lane}, lane
