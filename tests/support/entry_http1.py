"""The entry point `http1`: the lane of a proxy room in this process, visited directly."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from net.http1 import ServerConnection
from net.stream import open_socket_stream
from proxy.identity import Identified
from proxy.lanes.http1 import Visit
from rules.facts import TunnelFacts
from rules.names import parse_authority
from rules.placeholders import make
from tests.support.attackdata import Case, render
from tests.support.attacker import Plan, play
from tests.support.attempts import (
    CONTROL,
    Observed,
    form,
    host_names,
    judge,
    secret_names,
)
from tests.support.fakes import (
    OTHER_TOKEN,
    SHARED,
    TOKEN,
    MemoryExchange,
    registered,
    sandbox,
)
from tests.support.ground import ANSWERS, SHAPE, Ground
from tests.support.rooms import House, close_houses
from wire.handoff import Answer as BrokerAnswer
from wire.handoff import (
    AnswerEnd,
    AnswerHead,
    Continue,
)


class LoopThread:
    """An event loop in a thread of its own. A context manager."""

    def __enter__(self) -> LoopThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.run(self._settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _settle(self) -> None:
        """Let every task and every transport that is closing come to its end."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for _ in range(20):
            await asyncio.sleep(0)

    def run[T](self, work: Coroutine[Any, Any, T], seconds: float = 30) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


def of_events(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Records of a memory journal."""
    return [{"event": event.name, **event.fields} for event, _durable in events]


class Http1:
    """The lane of a proxy room, visited directly. Credentialed requests end at a broker that is a double."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._loop = ground.enter(LoopThread())
        self._holders = [make(SHAPE, bytes([number]) * 64) for number in (1, 2)]
        self._boxes = [sandbox(name, role="agent") for name in ("sb_one", "sb_two")]
        self._house = self._loop.run(self._start())
        ground.enter(closing(lambda: self._loop.run(close_houses())))

    async def _start(self) -> House:
        entries = [
            registered(box, token, placeholders={"ok": holder})
            for box, token, holder in zip(self._boxes, (TOKEN, OTHER_TOKEN), self._holders, strict=True)
        ]
        house = House(self._ground.policy, entries=entries)
        for name, found in ANSWERS.items():
            house.resolver.answer(name, found)
        top = AnswerHead(status=200, reason="OK", headers=(), length=0)
        answers: list[BrokerAnswer] = [Continue(), top, AnswerEnd()]
        house.broker.answer = lambda request: MemoryExchange(answers)
        return house

    def attempt(self, case: Case) -> Observed:
        journal, broker = self._house.journal, self._house.broker
        before, handed = len(journal.events), len(broker.requests)
        observed = self._visit(case, 0)
        observed.records = of_events(journal.events[before:])
        observed.handed = len(broker.requests) - handed
        return observed

    def control(self) -> None:
        assert self._visit(CONTROL, 1).status == 200

    def _visit(self, case: Case, number: int) -> Observed:
        names: dict[str, bytes] = host_names(self._ground) | {"auth": b""}
        names |= secret_names("ph", self._holders[number].encode())
        names |= secret_names("ph.other", self._holders[1 - number].encode())
        plan = Plan(answers=case.answers)
        if case.request is not None:
            made = form(case.request, names)
            connect, plan.heads = made.connect, made.method == b"HEAD"
            plan.send = (made.raw(made.path),)
            if case.then is not None:
                plan.then = render(case.then, names)
                plan.then_reads = len(render(case.echoes or "", names))
        else:
            assert case.connect is not None
            connect = render(case.connect, names)
            plan.send = tuple(render(piece, names) for piece in case.send)
        ours, theirs = socket.socketpair()
        served = asyncio.run_coroutine_threadsafe(self._serve(theirs, connect, number), self._loop._loop)
        seen = play(ours, plan)
        served.result(30)
        return judge(seen, case.answers)

    async def _serve(self, sock: socket.socket, connect: bytes, number: int) -> None:
        host, port = parse_authority(connect.decode("latin-1"), None)
        token = (TOKEN, OTHER_TOKEN)[number]
        visit = Visit(
            who=Identified(sandbox=self._boxes[number], channel=SHARED, token=token),
            connection=ServerConnection(await open_socket_stream(sock)),
            scheme="https",
            tunnel=TunnelFacts(host=host, port=port),
        )
        await self._house.room.lane.serve(visit)


@contextmanager
def closing(close: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:
        close()
