"""A resolver of the tests' own: answers from a table, remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from net.resolve import ResolveFailed
from rules.names import Host

Answer = Sequence[str] | Exception


class StaticResolver:
    """Answers from `answers`. A list of lists is played in order, its last entry staying.

    `queries` holds every (name, port) asked, in order: "the resolver saw nothing" is `queries == []`. While `hold()`
    is in force, lookups wait until `let_go()`.
    """

    def __init__(self, answers: Mapping[str, Answer | Sequence[Answer]] | None = None) -> None:
        self.queries: list[tuple[str, int]] = []
        self._answers: dict[str, list[Answer]] = {}
        self._go = asyncio.Event()
        self._go.set()
        for name, answer in (answers or {}).items():
            self.answer(name, answer)

    def answer(self, name: str, answer: Answer | Sequence[Answer]) -> None:
        """Set what `name` resolves to from now on."""
        if isinstance(answer, Exception) or all(isinstance(each, str) for each in answer):
            self._answers[name] = [answer]  # type: ignore[list-item]
        else:
            self._answers[name] = list(answer)  # type: ignore[arg-type]

    def hold(self) -> None:
        self._go.clear()

    def let_go(self) -> None:
        self._go.set()

    async def resolve(self, host: Host, port: int) -> tuple[str, ...]:
        self.queries.append((host.text, port))
        await self._go.wait()
        script = self._answers.get(host.text)
        if not script:
            raise ResolveFailed("no answer")
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, Exception):
            raise answer
        return tuple(answer)
