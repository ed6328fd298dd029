"""Closes the houses that a test opened, so that no socket outlives it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.rooms import close_houses


@pytest_asyncio.fixture(autouse=True)
async def _houses_are_closed() -> AsyncIterator[None]:
    yield
    await close_houses()
