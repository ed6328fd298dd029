"""Plays a sample of tests/attacks/*.yaml at every entry point that a case applies to (format: support/attackdata.py).

Of cases that differ in one input only, the first is played here; `make attacks` (tests/attacks/table.py) plays all.
How an attempt is scored stands in support/scoring.py. The controls (z_controls.yaml) must pass, so that a gateway
that denies everything fails here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.attackdata import Case, load
from tests.support.entrypoints import available
from tests.support.ground import Ground
from tests.support.scoring import Field

pytestmark = pytest.mark.xdist_group("attacks")

SAMPLE = [case for case in load() if case.name.partition(".")[2] in ("", "1")]
PLAYED = [(case, entry) for case in SAMPLE for entry in case.at if available(entry)]


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """Origins, policy and, for those who ask, a gateway."""
    with Ground(tmp_path_factory.mktemp("attacks")) as made:
        yield Field(made)
        made.verify()


@pytest.mark.parametrize(("case", "entry"), PLAYED, ids=[f"{case.name}-{entry}" for case, entry in PLAYED])
def test_attack(case: Case, entry: str, field: Field) -> None:
    """The case's sentence holds at this entry point."""
    field.play(case, entry)
