"""The front door in memory with a witness behind it: what left the gateway, and what was on record when it did.

    seen = await play([b"GET http://plain.test/v1/x HTTP/1.1\\r\\n...", ...])
    seen.check()          # no byte upstream without a permit whose intent was written before

A sandbox's own listener is used, so that requests need no token. RULES permit clear text to plain.test, TLS to api.test
and a tunnel to raw.test, each under /v1/ and for GET and POST.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from net.dial import Connected, DialTarget
from net.stream import StreamBroken
from proxy.ports import Channel
from rules.names import Host, SandboxId
from tests.support.fakes import registered, sandbox
from tests.support.journal import MemoryJournal
from tests.support.rooms import OPENED, Client, House, NoDialer, op, policy, rule, tunnel_rule
from tests.support.streams import MemoryStream

KEY = b"k" * 32
OWN = Channel(listener="sb_own", kind="sandbox", sandbox=SandboxId("sb_own"), key=KEY)
METHODS = ("GET", "POST")
RULES = policy(
    rule(
        "dev/clear", op("dev/clear", "plain.test", ["/v1/**"], port=80, scheme="http", methods=METHODS, effect="write")
    ),
    rule("dev/api", op("dev/api", "api.test", ["/v1/**"], methods=METHODS, effect="write")),
    tunnel_rule("dev/raw", "raw.test"),
)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
END_SECONDS = 30.0
"""When a connection that its client has ended is given up: a fault, far above what one takes."""


@dataclass(slots=True)
class Request:
    """One request that the origin read. `body` is None until it was read whole."""

    method: str
    target: str
    intents_before: int
    """How many intents were on record when its first byte left."""
    body: bytes | None = None


@dataclass(slots=True)
class Seen:
    """What one connection led to."""

    requests: list[Request] = field(default_factory=list)
    intents: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) of request.intent records, in order."""
    dials: int = 0
    dials_too_early: int = 0
    """Dials at a moment when no intent was on record that had not been dialled or reused for yet."""
    tunnels: int = 0
    strange: bytes = b""
    """Bytes at the origin that are no request."""
    answers: bytes = b""
    """What the client was told."""
    faults: list[BaseException] = field(default_factory=list)

    @property
    def whole(self) -> list[tuple[str, str, bytes]]:
        """(method, target, body) of the requests that came to their end; of others it depends on the reads how far."""
        return [(one.method, one.target, one.body) for one in self.requests if one.body is not None]

    @property
    def told(self) -> bytes:
        """The answers without what differs each time."""
        return re.sub(rb"req_[a-z2-7]{20}", b"req_", self.answers)

    def agrees_with(self, other: Seen) -> bool:
        """Equal, or one goes on where the other was closed: a request that is refused before its body came ends the
        connection, which depends on the reads."""
        return _one_begins_the_other(self.whole, other.whole) and _one_begins_the_other(self.intents, other.intents)

    def check(self) -> None:
        """Raise AssertionError unless exactly what was permitted and on record left, and nothing else."""
        assert not self.faults, self.faults
        assert not self.strange, self.strange
        assert self.dials_too_early == 0
        for number, request in enumerate(self.requests, 1):
            assert request.intents_before >= number, "a byte left before its intent was written"
            assert (request.method, request.target.partition("?")[0]) == self.intents[number - 1]
            assert request.target.startswith("/v1/")
            assert request.method in (*METHODS, "HEAD"), "GET permits HEAD, and nothing else is permitted"


def _one_begins_the_other(one: Sequence[object], other: Sequence[object]) -> bool:
    common = min(len(one), len(other))
    return one[:common] == other[:common]


class Witness:
    """A Dialer whose far end is a strict origin. Every byte is noted with the intents on record at that moment."""

    def __init__(self, seen: Seen, journal: MemoryJournal) -> None:
        self._seen = seen
        self._journal = journal
        self._tasks: list[asyncio.Task[None]] = []

    def via(self, target: DialTarget) -> str:
        return ""

    def intents(self) -> int:
        return len(self._journal.named("request.intent"))

    async def dial(self, target: DialTarget) -> Connected:
        seen = self._seen
        seen.dials += 1
        permits = self.intents() + len(self._journal.named("tunnel.intent"))
        seen.dials_too_early += permits < seen.dials
        ours, theirs = _Noted.pair_for(self)
        work = _swallow(theirs) if target.destination.host.text == "raw.test" else self._serve(ours, theirs)
        self._tasks.append(asyncio.ensure_future(work))
        tls = "TLSv1.3" if target.want_tls else None
        return Connected(stream=ours, address="192.0.2.7", tls_version=tls)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, ours: _Noted, theirs: MemoryStream) -> None:
        """Requests in, ANSWER out; a body by its one length or in chunks, as any strict server reads it."""
        with contextlib.suppress(StreamBroken):
            while head := await theirs.read_until(b"\r\n\r\n"):
                start = ours.position
                ours.position += len(head)
                lines = head.split(b"\r\n")
                parts = lines[0].split(b" ")
                fields = [line.partition(b": ") for line in lines[1:-2]]
                lengths = [value for name, _, value in fields if name.lower() == b"content-length"]
                codings = [value for name, _, value in fields if name.lower() == b"transfer-encoding"]
                if len(parts) != 3 or len(lengths) + len(codings) > 1 or not head.endswith(b"\r\n\r\n"):
                    self._seen.strange += head
                    break
                request = Request(parts[0].decode(), parts[1].decode(), ours.intents_at(start))
                self._seen.requests.append(request)
                request.body = await self._body(ours, theirs, lengths, codings)
                theirs.write(ANSWER.removesuffix(b"ok") if request.method == "HEAD" else ANSWER)
        await theirs.close()

    async def _body(
        self, ours: _Noted, theirs: MemoryStream, lengths: list[bytes], codings: list[bytes]
    ) -> bytes | None:
        """The body, or None where it ends early."""
        if lengths:
            data = await theirs.read_exactly(int(lengths[0]))
            ours.position += len(data)
            return data if len(data) == int(lengths[0]) else None
        body = b""
        while codings:
            line = await theirs.read_until(b"\r\n")
            if not line.endswith(b"\r\n"):
                return None
            ours.position += len(line)
            if not (size := int(line, 16)):
                break
            data = await theirs.read_exactly(size + 2)
            ours.position += len(data)
            if len(data) != size + 2:
                return None
            body += data[:-2]
        while codings:  # trailers, then an empty line
            line = await theirs.read_until(b"\r\n")
            ours.position += len(line)
            if line == b"\r\n":
                break
            if not line.endswith(b"\r\n"):
                return None
        return body


class _Noted(MemoryStream):
    """The gateway's end: each write is noted with the intents on record then."""

    def __init__(self) -> None:
        super().__init__()
        self.witness: Witness | None = None
        self.position = 0
        self._written = 0
        self._notes: list[tuple[int, int]] = []

    @classmethod
    def pair_for(cls, witness: Witness) -> tuple[_Noted, MemoryStream]:
        ours, theirs = cls(), MemoryStream()
        ours.other, theirs.other = theirs, ours
        ours.witness = witness
        return ours, theirs

    def write(self, data: bytes) -> None:
        assert self.witness is not None
        self._notes.append((self._written, self.witness.intents()))
        self._written += len(data)
        super().write(data)

    def intents_at(self, position: int) -> int:
        """How many intents were on record when the byte at `position` was written."""
        return max((count for start, count in self._notes if start <= position), default=0)


async def _swallow(stream: MemoryStream) -> None:
    with contextlib.suppress(StreamBroken):
        await stream.read_all()
    await stream.close()


def _caught(house: House, name: str, port: int) -> Client:
    """A connection that the redirect caught."""
    house.room.names.admit("sb_own")
    address = house.room.names.address_of("sb_own", Host(name))
    assert address is not None
    ours, theirs = MemoryStream.pair()
    serving = asyncio.ensure_future(house.room.front.serve_captured(theirs, OWN, (address, port)))
    return Client(ours, serving)


async def play(pieces: Iterable[bytes], *, unwritable: bool = False, captured: tuple[str, int] | None = None) -> Seen:
    """Write `pieces` to a new connection, the gateway running in between; end it; say what was seen.

    `unwritable`: no record can be written. `captured`: no proxy is spoken to, a redirect caught the connection to this
    (name, port), whose address the stub resolver gave before.
    """
    seen = Seen()
    journal = MemoryJournal()
    journal.failing = unwritable
    witness = Witness(seen, journal)
    boxes = [registered(sandbox("sb_own"), channel_key=KEY)]
    house = House(RULES, entries=boxes, dialer=witness, journal=journal)  # type: ignore[arg-type]
    client = house.connect(OWN) if captured is None else _caught(house, *captured)
    try:
        async with asyncio.timeout(END_SECONDS):
            for piece in pieces:
                client.stream.write(piece)
                for _ in range(4):
                    await asyncio.sleep(0)
            await client.stream.send_eof()
            with contextlib.suppress(StreamBroken):
                seen.answers = await client.rest()
            await client.serving
    finally:
        await house.close()
        await witness.close()
        OPENED.remove(house)
    seen.intents = [(str(e.fields["method"]), str(e.fields["path"])) for e in journal.named("request.intent")]
    seen.tunnels = len(journal.named("tunnel.intent"))
    seen.faults += house.faults
    return seen


CLEAN = b"clean"
AGAIN = b"{again}"
TURNS = 40
"""Passes of the loop in which everything in memory has happened."""


async def two_answers(data: bytes) -> tuple[bytes, bytes, list[BaseException]]:
    """What two clients of one sandbox get, and faults: an origin answers the first with `data`, the second with CLEAN.

    What stands behind AGAIN in `data` is sent once the first client has its answer, while the connection is idle.
    """
    data, _, later = data.partition(AGAIN)
    tasks: list[asyncio.Task[None]] = []
    far: list[MemoryStream] = []

    async def serve(stream: MemoryStream) -> None:
        with contextlib.suppress(StreamBroken):
            while head := await stream.read_until(b"\r\n\r\n"):
                if head.startswith(b"GET /v1/a "):
                    stream.write(data)
                else:
                    stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(CLEAN), CLEAN))
        await stream.close()

    class Origin(NoDialer):
        async def dial(self, target: DialTarget) -> Connected:
            ours, theirs = MemoryStream.pair()
            far.append(theirs)
            tasks.append(asyncio.ensure_future(serve(theirs)))
            return Connected(stream=ours, address="192.0.2.7", tls_version=None)

    house = House(RULES, entries=[registered(sandbox("sb_own"), channel_key=KEY)], dialer=Origin())
    try:
        answers = []
        for path in ("a", "b"):
            client = house.connect(OWN)
            client.send(f"GET http://plain.test/v1/{path} HTTP/1.1\r\nHost: plain.test\r\n\r\n")
            for _ in range(TURNS):
                await asyncio.sleep(0)
            raw = b""
            with contextlib.suppress(StreamBroken):
                while piece := client.stream.receive_nowait():
                    raw += piece
            answers.append(raw)
            client.stream.abort()  # an answer that is not whole is not waited for
            if path == "a" and later and far:
                far[0].write(later)
        return answers[0], answers[1], list(house.faults)
    finally:
        await house.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        OPENED.remove(house)
