"""`Shaping`: an upstream's answer on its way to a sandbox: head allowlist, coding undone, pruned, scrubbed.

    head    -> response_head (allowlist, masked values, standard phrase)
    body    -> decode within caps -> tools that are not granted out (whole, or event by event), signed URLs of LFS out
               (whole) -> `result.keep` (whole) -> scrub (streaming)

Long work is done in slices, with a rest between two, and what cannot be sliced in a thread: another sandbox's request
on the same executor does not wait for it.

It is the BodyTransform of net.exchange. An answer that cannot be shown clean raises AnswerRefused: before the head
went out that is a fixed 502, after it an abort (RULINGS 7.1-7.3, I33).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final, Protocol

from broker.capture import Found, look, replaced
from broker.codings import CodingRefused, Decoder, coding_of, decoder_for
from broker.headers import response_head
from broker.leads import Leads
from broker.lfs import elsewhere, without_authority
from broker.result import KeepInvalid, ResultRefused, prune
from broker.scrub import Patterns, Scrubber, slices
from broker.tools import Event, Events, only_granted
from net.aside import Busy
from net.exchange import AnswerRefused
from rules.decision import AnswerSpec, Restrictions
from rules.operations.media import media_type
from wire.heads import ResponseHead

RESULT_SECONDS: Final = 5.0
"""For pruning one answer, with waiting for its turn in the thread."""


class Aside(Protocol):
    """Where whole answers are parsed; net.aside.Aside of one sandbox."""

    def __call__(self, work: Callable[[], bytes]) -> Awaitable[bytes]:
        """What `work` returns or raises; TimeoutError."""
        ...


Keep = Callable[[tuple[bytes, ...], int], Awaitable[tuple[str, ...]]]
"""Have tokens kept that are good for so many seconds (0: unsaid); a placeholder for each, or none."""


def _bytes(token: str) -> bytes:
    return token.encode("ascii")


def _nothing(name: str) -> bool:
    return False


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
        granted: Callable[[str], bool] | None = None,
        here: str = "",
        leads: Leads | None = None,
        keep: Keep | None = None,
    ) -> None:
        """`rest` is awaited between two slices of work; `aside` runs what cannot be sliced.

        `granted` says of a tool's name whether it may be shown; it is used where `restrictions.answer` is set.
        `here` is the authority that answers (Destination.authority), `leads` where it leads; `keep` has tokens kept.
        """
        self._leads = leads
        self._keep_tokens = keep
        self._here = here
        self._granted = granted
        self._events: Events | None = None
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
        """True if the answer was cut to its kept fields, or its list of tools to those that are granted."""
        return self.holds_head or self._events is not None

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
        spec = self._restrictions.answer
        if spec is not None and spec.name == "capture" and not bodiless:
            # What else such a place answers nobody has named: only the status is told.
            self._dropped = not 200 <= head.status < 300
            self._pruned = None if self._dropped else bytearray()
            self._keeps_length = False
        elif self._restrictions.answer is not None and not bodiless and 200 <= head.status < 300:
            self._keeps_length = False
            kind = media_type("".join(head.get("content-type")[:1]))
            if kind == "text/event-stream" and self._pruned is None:
                self._events = Events(self._restrictions.answer.bound)
            else:
                self._pruned = self._pruned if self._pruned is not None else bytearray()
        self._keeps_length = self._keeps_length and coding == "identity" and keep is None
        shaped, self._head_hits = response_head(
            head,
            self._restrictions,
            self._patterns,
            body_changes=not self._keeps_length or (bodiless and bool(head.get("content-encoding"))),
            here=self._here,
            granted=self._leads.granted if self._leads is not None else frozenset(),
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
                    if self._events is not None:
                        async for event in self._shown(self._events.feed(part)):
                            yield self._scrubber.feed(event)
                    elif self._pruned is None:
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

    async def _shown(self, events: Iterable[Event]) -> AsyncIterator[bytes]:
        """Events of a stream, each whole and cut. Raises AnswerRefused."""
        try:
            for event in events:
                data = await self._cut(event.data) if event.data else b""
                for part in slices(event.written(data)):
                    await self._rest()
                    yield part
        except ResultRefused as error:
            raise AnswerRefused("answer-withheld", str(error)) from None

    async def _prune(self, whole: bytes) -> bytes:
        keep = self._restrictions.result
        shown = await self._cut(whole) if whole else whole
        return shown if keep is None else await self._beside(lambda: prune(shown, keep))

    async def _cut(self, message: bytes) -> bytes:
        """`message` without what `restrictions.answer` keeps from the sandbox. Raises AnswerRefused."""
        answer, fits = self._restrictions.answer, self._granted
        if answer is None:
            return message
        if answer.name == "capture":
            return await self._captured(message, answer)
        if answer.name == "lfs_batch":
            return await self._hrefs(message, answer)
        return await self._beside(lambda: only_granted(message, answer.bound, fits or _nothing))

    async def _captured(self, message: bytes, answer: AnswerSpec) -> bytes:
        """A mint operation's answer: the vault keeps its tokens, placeholders stand in their places."""
        found: list[Found] = []

        def see() -> bytes:
            found.append(look(message, answer.bound, answer.fields))
            return b""

        await self._beside(see)
        tokens = found[0].tokens
        kept = (
            () if self._keep_tokens is None else await self._keep_tokens(tuple(map(_bytes, tokens)), found[0].seconds)
        )
        if len(kept) != len(tokens):
            raise AnswerRefused("answer-withheld", "the tokens of the answer were not kept")
        names = dict(zip(tokens, kept, strict=True))
        return await self._beside(lambda: replaced(message, answer.bound, answer.fields, names))

    async def _hrefs(self, message: bytes, answer: AnswerSpec) -> bytes:
        """An LFS batch answer: what it names elsewhere is asked about, what nobody granted is not shown."""
        granted: frozenset[str] = frozenset()
        if self._leads is not None:
            named = await self._beside(lambda: elsewhere(message, answer.bound, self._here))
            granted = await self._leads.addresses(line for line in named.decode().split("\n") if line)
        if not answer.strip:
            return message
        return await self._beside(lambda: without_authority(message, answer.bound, self._here, granted))

    async def _beside(self, work: Callable[[], bytes]) -> bytes:
        """Run `work` where whole answers are parsed. Raises AnswerRefused."""
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                return await self._aside(work)
        except (ResultRefused, KeepInvalid) as error:
            raise AnswerRefused("answer-withheld", str(error)) from None
        except TimeoutError:
            raise AnswerRefused("answer-withheld", "the answer was not pruned in time") from None
        except Busy:
            raise AnswerRefused("answer-withheld", "too many answers of this sandbox are being pruned") from None

    def _keep(self, pruned: bytearray, part: bytes) -> None:
        bounds = [spec.bound for spec in (self._restrictions.result, self._restrictions.answer) if spec is not None]
        if len(pruned) + len(part) > min(bounds):
            raise AnswerRefused("answer-withheld", "the answer is larger than result: allows")
        pruned += part

    def _count(self, plain: bytes) -> None:
        self._size += len(plain)
        bound = self._restrictions.response_bytes
        if bound is not None and self._size > bound:
            raise AnswerRefused("response-too-large", "the decoded answer is over its bound")
