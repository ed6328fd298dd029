"""Plays every case of tests/attacks/*.yaml at every entry point that it applies to (format: support/attackdata.py).

An attack counts as stopped only if all of these hold:
 a. verdict, reason and status are the expected ones, at each entry point the same; upstream saw nothing, or exactly
    what the case says
 b. no byte that was delivered holds a secret in a promised form
 c. exactly the expected records exist, one with the expected reason; the log verifies at the end
 d. a request of a second sandbox still succeeds
The controls (controls.yaml) must pass, so that a gateway that denies everything fails here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from rules.reasons import reason
from tests.support.answers import answered
from tests.support.attackdata import Case, load, render
from tests.support.attempts import INTENTS, OUTCOMES, EntryPoint, Observed, host_names, secret_names
from tests.support.canary import found
from tests.support.entrypoints import ENTRY_POINTS, available
from tests.support.ground import CAN, OTHER_CAN, Ground, Witness

pytestmark = pytest.mark.xdist_group("attacks")

CASES = load()
PLAYED = [(case, entry) for case in CASES for entry in case.at if available(entry)]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Origins, policy and, for those who ask, a gateway."""
    with Ground(tmp_path_factory.mktemp("attacks")) as made:
        yield made
        made.verify()


@pytest.fixture(scope="module")
def entries(ground: Ground) -> dict[str, EntryPoint]:
    """Entry points that were started, by name."""
    return {}


@pytest.mark.parametrize(("case", "entry"), PLAYED, ids=[f"{case.name}-{entry}" for case, entry in PLAYED])
def test_attack(case: Case, entry: str, ground: Ground, entries: dict[str, EntryPoint]) -> None:
    """The case's sentence holds at this entry point."""
    point = entries.get(entry) or _start(entry, ground, entries)
    with answered(ground, case):
        witness = ground.witness()
        observed = point.attempt(case)
    try:
        _verdict(case, entry, observed)
        _upstream(case, entry, observed, witness, ground)
        _canary(observed)
        _records(case, observed)
        _answer(case, entry, observed, ground)
    except AssertionError as failure:
        raise AssertionError(f"{case.sentence}\n{failure}\nobserved: {observed}") from None
    point.control()


def _start(entry: str, ground: Ground, entries: dict[str, EntryPoint]) -> EntryPoint:
    start = ENTRY_POINTS[entry]
    assert start is not None
    if entry in ground.broken:  # each further case would only wait for the same
        pytest.fail(f"{entry} did not start: {ground.broken[entry]}")
    try:
        entries[entry] = start(ground)
    except Exception as error:
        ground.broken[entry] = repr(error)
        raise
    return entries[entry]


def _verdict(case: Case, entry: str, observed: Observed) -> None:
    expect = case.expect
    if expect.verdict == "cut":
        # Whether the head had left when the rest broke, and whether a reset overtook it, is a matter of timing.
        assert observed.verdict in ("cut", "closed", "bad-upstream")
        assert observed.reason in (None, expect.reason)
        return
    assert observed.verdict == expect.verdict
    if expect.verdict == "closed":
        return
    assert observed.reason == expect.reason
    if expect.reason is not None:
        assert observed.status == (expect.status or reason(expect.reason).status)
    elif expect.status is not None and entry != "decide":
        assert observed.status == expect.status


def _upstream(case: Case, entry: str, observed: Observed, witness: Witness, ground: Ground) -> None:
    if entry == "decide":
        assert witness.touched() == []
        return
    expect = case.expect.upstream
    if expect == "nothing":
        assert witness.touched() == []
        assert observed.handed == 0
        return
    if observed.handed:  # the broker is a double here
        assert observed.handed == 1
        return
    requests = list(witness.received())
    if isinstance(expect, str):
        assert len(requests) == {"once": 1, "twice": 2}[expect], requests
        return
    assert len(requests) == 1, requests
    _, request = requests[0]
    names = host_names(ground) | secret_names("can", CAN)
    if "target" in expect:
        assert request.target == render(expect["target"], names).decode("latin-1")
    if "method" in expect:
        assert request.method == expect["method"]
    for line in expect.get("has", ()):
        name, _, value = render(line, names).decode("latin-1").partition(":")
        assert request.values(name) == [value.strip()], line
    for name in expect.get("lacks", ()):
        assert request.values(name) == [], name


def _canary(observed: Observed) -> None:
    for secret in (CAN, OTHER_CAN):
        assert found(secret, observed.delivered) == []


def _records(case: Case, observed: Observed) -> None:
    if observed.records is None:
        return
    expect = case.expect
    refusals, intents, outcomes = observed.refusals(), observed.named(INTENTS), observed.named(OUTCOMES)
    handed = observed.handed  # its intent is the broker's, and that is a double
    assert len(refusals) + len(intents) + handed == expect.records, observed.records
    assert Counter(r["request_id"] for r in intents) == Counter(r["request_id"] for r in outcomes)
    if expect.reason is not None:
        said = [r.get("reason") for r in refusals] + [r.get("error") for r in outcomes]
        if case.expect.reason == "approval-required":
            assert len(refusals) == 1
        else:
            assert said.count(expect.reason) == 1, said


def _answer(case: Case, entry: str, observed: Observed, ground: Ground) -> None:
    expect = case.expect
    if entry == "decide" or observed.handed:
        return
    names = host_names(ground)
    if case.echoes is not None:
        assert observed.echoed == render(case.echoes, names)
    if expect.body is not None:
        assert observed.answer is not None
        assert render(expect.body, names) in bytes(observed.answer.body)
    if expect.size is not None:
        assert observed.answer is not None
        assert observed.answer.size == expect.size
    for name, value in expect.headers.items():
        assert observed.answer is not None
        if value == "none":
            assert name not in observed.answer.headers
        else:
            assert observed.answer.headers.get(name) == value
