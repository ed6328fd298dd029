"""The executor's bench, for every test of this room that makes a call, and folders that no disk is waited for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.benches import Bench, running
from tests.support.calls import policy


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """One of everything."""
    async with running(policy()) as made:
        yield made


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory where programs may lie there too: stores and logs sync hundreds of times."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and os.access(memory, os.W_OK) and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    with tempfile.TemporaryDirectory(prefix="exeat-", dir=memory if fits else None) as folder:
        yield Path(folder)
