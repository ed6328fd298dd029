"""One contract for the in-memory journal and for the auditor's link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from audit.journal import AuditUnavailable, Journal
from tests.support.auditors import RunningAuditor
from tests.support.events import intent, outcome
from tests.support.journal import MemoryJournal


@dataclass
class Subject:
    """A journal, how to break it, and the names that it holds."""

    journal: Journal
    break_it: Callable[[], None]
    names: Callable[[], Awaitable[list[str]]]


@pytest.fixture(params=["memory", "auditor"])
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """The fake, then the real one."""
    if request.param == "memory":
        fake = MemoryJournal()

        async def fake_names() -> list[str]:
            return fake.names()

        yield Subject(fake, lambda: setattr(fake, "failing", True), fake_names)
        return
    async with RunningAuditor(tmp_path / "log") as auditor:

        async def real_names() -> list[str]:
            return [record["event"] for record in auditor.records() if record["process"] == "worker-1"]

        yield Subject(auditor.links[0], auditor.process.kill, real_names)


async def test_a_broken_journal_refuses_every_append(subject: Subject) -> None:
    """Once it cannot write, append raises AuditUnavailable, durable or not."""
    await subject.journal.append(intent())
    subject.break_it()
    for durable in (True, False):
        with pytest.raises(AuditUnavailable):
            await subject.journal.append(outcome(), durable=durable)
    assert await subject.names() == ["request.intent"]


async def test_sequence_numbers_grow(subject: Subject) -> None:
    """Each append gets a number above the one before, from 1 on."""
    numbers = [await subject.journal.append(intent(f"req_{n}"), durable=n % 2 == 0) for n in range(6)]
    assert numbers[0] >= 1
    assert numbers == sorted(set(numbers))


async def test_concurrent_appends_are_all_kept_in_order(subject: Subject) -> None:
    """Appends started in one order are numbered in that order."""
    numbers = await asyncio.gather(*(subject.journal.append(intent(f"req_{n}")) for n in range(200)))
    assert list(numbers) == sorted(set(numbers))
    assert await subject.names() == ["request.intent"] * 200


async def test_an_abandoned_append_does_not_disturb_the_next(subject: Subject) -> None:
    """A caller that is cancelled leaves nothing behind that a later append would trip over."""
    task = asyncio.ensure_future(subject.journal.append(intent("req_1"), durable=True))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await subject.journal.append(intent("req_2"), durable=True) > 0
