"""The worker's self-check (I28): what an unsound room does to it, and that a sound one passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy import selfcheck
from proxy.help import HelpTexts
from proxy.selfcheck import Bench, Failed, Unfinished, self_check
from proxy.worker import Ports, Room
from rules.decision import Denied
from rules.policy import Role
from tests.support.fakes import CountingRandom, ManualClock, snapshot
from tests.support.policies import request
from tests.support.rooms import op, policy, rule

CLOCK = ManualClock()
TEXTS = HelpTexts(ca_pem="", bundle_pem="", environment={})


def room(bench: Bench, directory: Any) -> Room:
    ports = Ports(
        clock=CLOCK,
        random=CountingRandom(),
        journal=bench,
        broker=bench,
        dialer=bench,
        leaves=bench,
        refusal_leaves=bench,
    )
    return Room(ports, directory, TEXTS)


def broken(change: Callable[[Room], None]) -> Any:
    """A maker of rooms that `change` made unsound."""

    def make(bench: Bench, directory: Any) -> Any:
        made = room(bench, directory)
        change(made)
        return made.front

    return make


def denies_nothing(made: Room) -> None:
    decide = made.gate._decide

    def blind(policy: Any, box: Any, facts: Any, now: float) -> Any:
        answer = decide(policy, box, facts, now)
        return decide(CONTROL, selfcheck._ME, PERMITTED, now) if isinstance(answer, Denied) else answer

    made.gate._decide = blind


def denies_nothing_in_force(made: Room) -> None:
    decide = made.gate._decide

    def blind(policy: Any, box: Any, facts: Any, now: float) -> Any:
        if box.role == selfcheck._ME.role:
            return decide(policy, box, facts, now)
        return decide(CONTROL, selfcheck._ME, PERMITTED, now)

    made.gate._decide = blind


def forgets_the_log(made: Room) -> None:
    async def nothing(event: Any) -> None:
        return None

    made.gate._write = nothing  # type: ignore[method-assign]


def ignores_who_asks(made: Room) -> None:
    made.front.serve = _passes(made)  # type: ignore[method-assign]


def _passes(made: Room) -> Any:
    bench = made.gate._journal

    async def serve(stream: Any, channel: Any) -> None:
        assert isinstance(bench, Bench)
        bench.left += 1
        stream.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await stream.drain()
        stream.abort()

    return serve


def refuses_all(made: Room) -> None:
    made.gate._decide = lambda *_: Denied(reason="no-rule", remedy="")


PERMITTED = request(f"GET http://{selfcheck.HOST}/permitted")
CONTROL = selfcheck._policy({selfcheck._ME.role: Role(name=selfcheck._ME.role, rules=(selfcheck._RULE,))})


@pytest.mark.parametrize(
    ("sentence", "change", "named"),
    [
        ("a gate that denies nothing", denies_nothing, ("a denied host", "a denied path", "a denied method")),
        ("a gate that forgets the log", forgets_the_log, ("an unwritable log",)),
        (
            "a front door that lets everything through",
            ignores_who_asks,
            ("a denied tunnel", "a request of nobody", "an exception in the gate", "no policy"),
        ),
        ("a gate that denies everything: the probes prove nothing", refuses_all, ("the permitted request",)),
    ],
)
async def test_an_unsound_room_fails(sentence: str, change: Callable[[Room], None], named: tuple[str, ...]) -> None:
    """Each way to be unsound is found, and the probes that found it are named."""
    with pytest.raises(Failed) as failed:
        await self_check(broken(change), CLOCK, None)
    for name in named:
        assert name in str(failed.value), sentence


async def test_a_role_in_force_that_lets_everything_through_fails() -> None:
    """The policy of the moment is tried with every role, though the fixed one is judged well."""
    mine = policy(rule("dev/read", op("dev/read", "api.test")))
    with pytest.raises(Failed, match="a denied host in role dev"):
        await self_check(broken(denies_nothing_in_force), CLOCK, snapshot(mine, []))


async def test_a_room_that_hangs_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer in time is neither a pass nor a hole."""
    monkeypatch.setattr(selfcheck, "PROBE_SECONDS", 0.05)

    async def hang(stream: Any, channel: Any) -> None:
        await asyncio.Event().wait()

    def hangs(made: Room) -> None:
        made.front.serve = hang  # type: ignore[method-assign]

    with pytest.raises(Unfinished, match="a denied host"):
        await self_check(broken(hangs), CLOCK, None)


async def test_a_sound_room_passes_with_the_policy_in_force() -> None:
    """Nothing left but the control; roles whose rules mean even a host that cannot exist are left out."""
    rules = policy(rule("dev/read", op("dev/read", "api.test")))
    alone = await self_check(broken(lambda _: None), CLOCK, None)
    assert await self_check(broken(lambda _: None), CLOCK, snapshot(rules, [])) == alone + 1
    every = policy(rule("dev/read", op("dev/read", "**.self-check.invalid")))
    assert await self_check(broken(lambda _: None), CLOCK, snapshot(every, [])) == alone
