"""The guard: whatever happens, all sides are cut and the fault is reported once."""

import asyncio

import pytest

from net.guard import Guard
from tests.support.streams import MemoryStream


def pair_under(faults: list[BaseException]) -> tuple[Guard, MemoryStream, MemoryStream]:
    guard = Guard(faults.append)
    return guard, guard.watch(MemoryStream.pair()[0]), guard.watch(MemoryStream.pair()[0])


async def test_a_fault_in_the_task_cuts_both_sides_and_is_reported():
    """The task's exception ends in on_fault, not in the loop."""
    faults: list[BaseException] = []
    guard, left, right = pair_under(faults)

    async def work() -> None:
        raise ZeroDivisionError

    await guard.run(work())
    assert (left.aborted, right.aborted) == (True, True)
    assert [type(fault) for fault in faults] == [ZeroDivisionError]


async def test_cancellation_cuts_both_sides_and_goes_on():
    """A cancelled connection leaves nothing open, and the canceller sees its cancellation."""
    faults: list[BaseException] = []
    guard, left, right = pair_under(faults)
    task = asyncio.create_task(guard.run(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (left.aborted, right.aborted, len(faults)) == (True, True, 1)


async def test_one_side_that_cannot_be_cut_does_not_save_the_other():
    """abort() of the first raises; the second is cut all the same."""
    faults: list[BaseException] = []
    guard = Guard(faults.append)

    class Stuck:
        def abort(self) -> None:
            raise ZeroDivisionError

    guard.watch(Stuck())
    other = guard.watch(MemoryStream.pair()[0])

    async def work() -> None:
        return

    await guard.run(work())
    assert other.aborted
    assert len(faults) == 1


async def test_a_side_that_joins_after_the_fault_is_cut_at_once():
    """A dial that returns late is not left open; faults after the first are not reported again."""
    faults: list[BaseException] = []
    guard, _, _ = pair_under(faults)
    guard.trip(ZeroDivisionError())
    guard.trip(ValueError())
    assert guard.watch(MemoryStream.pair()[0]).aborted
    assert len(faults) == 1


async def test_work_that_ends_well_reports_nothing_and_leaves_nothing_open():
    """Sides that were given away stay open."""
    faults: list[BaseException] = []
    guard, left, right = pair_under(faults)
    guard.forget(left)

    async def work() -> None:
        return

    await guard.run(work())
    assert (left.aborted, right.aborted, faults) == (False, True, [])
