"""The executor's bench, for every test of this room that makes a call."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.benches import Bench, running
from tests.support.calls import policy


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """One of everything."""
    async with running(policy()) as made:
        yield made
