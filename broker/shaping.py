"""`Shaping`: an upstream's answer on its way to a sandbox: head allowlist, coding undone, pruned, scrubbed.

    head    -> response_head (allowlist, masked values, standard phrase)
    body    -> decode within caps -> `result.keep` (whole) or nothing -> scrub (streaming)

Long work is done in slices, with a rest between two, and what cannot be sliced in a thread: another sandbox's request
on the same executor does not wait for it.

It is the BodyTransform of net.exchange. An answer that cannot be shown clean raises AnswerRefused: before the head
went out that is a fixed 502, after it an abort (RULINGS 7.1-7.3, I33).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

from broker.codings import CodingRefused, Decoder, coding_of, decoder_for
from broker.headers import response_head
from broker.result import KeepInvalid, ResultRefused, prune
from broker.scrub import Patterns, Scrubber, slices
from net.aside import Busy
from net.exchange import AnswerRefused
from rules.decision import Restrictions
from wire.heads import ResponseHead

RESULT_SECONDS: Final = 5.0
"""For pruning one answer, with waiting for its turn in the thread."""


class Aside(Protocol):
    """Where whole answers are parsed; net.aside.Aside of one sandbox."""

    def __call__(self, work: Callable[[], bytes]) -> Awaitable[bytes]:
        """What `work` returns or raises; TimeoutError."""
        ...


async def _rest() -> None:
    await asyncio.sleep(0)


def _in_a_thread(work: Callable[[], bytes]) -> Awaitable[bytes]:
    return asyncio.to_thread(work)


def from_origin(head: ResponseHead) -> ResponseHead:
    """`head`, unless it speaks for a proxy: a client would take that for our word (B201). Raises AnswerRefused."""
    if head.status == 407:
        raise AnswerRefused("upstream-protocol", "an origin asked for proxy credentials")
    return head


class Shaping:
    """The transform of one credentialed call. `hits` counts masked places in head and body."""

    def __init__(
        self,
        *,
        patterns: Patterns,
        restrictions: Restrictions,
        method: str,
        rest: Callable[[], Awaitable[None]] = _rest,
        aside: Aside = _in_a_thread,
    ) -> None:
        """`rest` is awaited between two slices of work; `aside` runs what cannot be sliced."""
        self._rest = rest
        self._aside = aside
        self._patterns = patterns
        self._restrictions = restrictions
        self._method = method
        self._decoder: Decoder | None = None
        self._scrubber = Scrubber(patterns)
        self._head_hits = 0
        self._size = 0
        self._pruned: bytearray | None = None
        self._dropped = False
        self._keeps_length = True

    @property
    def hits(self) -> int:
        return self._head_hits + self._scrubber.hits

    @property
    def keeps_length(self) -> bool:
        return self._keeps_length

    @property
    def holds_head(self) -> bool:
        return self._pruned is not None or self._dropped

    @property
    def kept(self) -> bool:
        """True if the answer was cut to its kept fields."""
        return self.holds_head

    def on_response(self, head: ResponseHead) -> ResponseHead:
        """Return the head to send. Raises AnswerRefused."""
        from_origin(head)
        bodiless = self._method == "HEAD" or head.status in (204, 304)
        coding = "identity"
        if not bodiless:
            try:
                coding = coding_of(head.get("content-encoding"))
            except CodingRefused as error:
                raise AnswerRefused("answer-withheld", str(error)) from None
            self._decoder = decoder_for(coding, "".join(head.get("content-type")[:1]))
        keep = self._restrictions.result
        if keep is not None and not bodiless:
            # Fields are promised of successful answers; of others only the status is told.
            self._dropped = not 200 <= head.status < 300
            self._pruned = None if self._dropped else bytearray()
        self._keeps_length = coding == "identity" and keep is None
        shaped, self._head_hits = response_head(
            head,
            self._restrictions,
            self._patterns,
            body_changes=not self._keeps_length or (bodiless and bool(head.get("content-encoding"))),
        )
        return shaped

    async def feed(self, data: bytes) -> AsyncIterator[bytes]:
        """What may be sent now. Raises AnswerRefused."""
        if self._dropped:
            return
        busy = False
        try:
            for plain in self._decoder.feed(data) if self._decoder is not None else (data,):
                self._count(plain)
                for part in slices(plain):
                    if busy:
                        await self._rest()
                    busy = True
                    if self._pruned is None:
                        yield self._scrubber.feed(part)
                    else:
                        self._keep(self._pruned, part)
        except CodingRefused as error:
            raise AnswerRefused("answer-withheld", str(error)) from None

    async def finish(self) -> AsyncIterator[bytes]:
        """The rest. Raises AnswerRefused."""
        if self._dropped or self._decoder is None:
            return
        try:
            self._decoder.finish()
        except CodingRefused as error:
            raise AnswerRefused("answer-withheld", str(error)) from None
        if self._pruned is not None:
            for part in slices(await self._prune(bytes(self._pruned))):
                await self._rest()
                yield self._scrubber.feed(part)
        yield self._scrubber.finish()

    async def _prune(self, whole: bytes) -> bytes:
        keep = self._restrictions.result
        assert keep is not None
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                return await self._aside(lambda: prune(whole, keep))
        except (ResultRefused, KeepInvalid) as error:
            raise AnswerRefused("answer-withheld", str(error)) from None
        except TimeoutError:
            raise AnswerRefused("answer-withheld", "the answer was not pruned in time") from None
        except Busy:
            raise AnswerRefused("answer-withheld", "too many answers of this sandbox are being pruned") from None

    def _keep(self, pruned: bytearray, part: bytes) -> None:
        keep = self._restrictions.result
        assert keep is not None
        if len(pruned) + len(part) > keep.bound:
            raise AnswerRefused("answer-withheld", "the answer is larger than result: allows")
        pruned += part

    def _count(self, plain: bytes) -> None:
        self._size += len(plain)
        bound = self._restrictions.response_bytes
        if bound is not None and self._size > bound:
            raise AnswerRefused("response-too-large", "the decoded answer is over its bound")
