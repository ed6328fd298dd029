"""Scores one attempt against its case. An attack counts as stopped only if all of these hold:

a. verdict, reason and status are the expected ones, at each entry point the same; upstream saw nothing, or exactly
   what the case says
b. no byte that was delivered holds a secret in a promised form
c. exactly the expected records exist, one with the expected reason; the log verifies at the end
d. a request of a second sandbox still succeeds
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rules.reasons import reason
from tests.support.answers import answered
from tests.support.attackdata import Case, render
from tests.support.attempts import INTENTS, OUTCOMES, EntryPoint, Observed, host_names, secret_names
from tests.support.canary import found
from tests.support.entrypoints import ENTRY_POINTS
from tests.support.ground import CAN, OTHER_CAN, Ground, Witness


class Field:
    """A ground with the entry points that were started on it."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self._entries: dict[str, EntryPoint] = {}

    def play(self, case: Case, entry: str) -> None:
        """Play `case` at `entry` and score it. AssertionError with the case's sentence where it is not stopped."""
        point = self._entries.get(entry) or self._start(entry)
        case = replace(case, expect=case.differs.get(entry, case.expect))
        with answered(self.ground, case):
            witness = self.ground.witness()
            observed = point.attempt(case)
        try:
            _verdict(case, entry, observed)
            _upstream(case, entry, observed, witness, self.ground)
            _canary(observed)
            _records(case, observed)
            _answer(case, entry, observed, self.ground)
        except AssertionError as failure:
            raise AssertionError(f"{case.sentence}\n{failure}\nobserved: {observed}") from None
        point.control()

    def _start(self, entry: str) -> EntryPoint:
        start = ENTRY_POINTS[entry]
        assert start is not None
        if entry in self.ground.broken:  # each further case would only wait for the same
            raise AssertionError(f"{entry} did not start: {self.ground.broken[entry]}")
        try:
            self._entries[entry] = start(self.ground)
        except Exception as error:
            self.ground.broken[entry] = repr(error)
            raise
        return self._entries[entry]


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
