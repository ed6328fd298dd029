"""The entry points at which attack cases are played. Each makes the same attempt in its own form and says the same.

    decide     pure: head and facts as every entry point builds them, then rules.decide; no socket anywhere
    explicit   bytes on the shared listener of a real gateway, with a token: absolute-form, or CONNECT and TLS inside
    sandbox    the same bytes on the listener in the network namespace of an `exeat run`, where the channel identifies
    tunnel     as `explicit`, towards a host that has a tunnel rule: `{ok}` is then that host
    http1      the HTTP/1.1 lane of a proxy room by itself: what would stand inside TLS, without front door or TLS
    broker     a hand-off by a worker that judged nothing, to a real executor and vault
    mitm       as `explicit`, by HTTP/2 through the adapter: `{ok}` and `{pub}` are then hosts with `protocol: h2`

To add one: a class with `attempt` and `control`, and a row in ENTRY_POINTS.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, ClassVar, Protocol

import brotli
import zstandard

from broker.executor import Executor
from broker.vault.sandboxes import Created
from broker.vaultlink import VaultLink
from net.addresses import AddressTable
from net.contexts import ClientContexts
from net.dial import SocketDialer
from net.fdchannel import FdChannel, channel_pair
from net.framing import FrameStream
from net.http1 import ServerConnection
from net.pool import Pool
from net.resolve import Lookups
from net.stream import open_socket_stream
from proxy.brokerlink import BrokerUnavailable, HandoffBroken, HandoffRequest, SocketBrokerLink
from proxy.front import connect_facts
from proxy.identity import Identified
from proxy.lanes.http1 import Visit
from rules.decide import decide_request, decide_tunnel
from rules.decision import Decision, Denied, Held, NeedsBody, Permit, TunnelDecision
from rules.facts import FactsRefused, RequestFacts, TunnelFacts
from rules.names import InvalidName, parse_authority
from rules.placeholders import make
from rules.reasons import reason as reason_row
from tests.support.attackdata import Case, Request, render
from tests.support.attacker import Answer, Plan, Seen, play, play_http2
from tests.support.entries import entry_of
from tests.support.fakes import (
    OTHER_TOKEN,
    SHARED,
    TOKEN,
    MemoryExchange,
    registered,
    sandbox,
)
from tests.support.gateway import Box
from tests.support.ground import ANSWERS, CAN, CREDENTIALS, OTHER_CAN, SHAPE, Ground
from tests.support.origins import Exchange, Handler, head
from tests.support.resolver import StaticResolver
from tests.support.rooms import House, close_houses
from tests.support.scripts import CLOSE, READ, Step, script, sse, websocket_echo
from tests.support.signals import Gate
from tests.support.vaults import Rig
from tests.support.waiting import until
from wire.control import MAX_FROM_VAULT, Cut
from wire.frames import WireError
from wire.handoff import Answer as BrokerAnswer
from wire.handoff import (
    AnswerAbort,
    AnswerData,
    AnswerEnd,
    AnswerHead,
    BodyPlan,
    Continue,
    Evidence,
    Refusal,
)
from wire.heads import NO_BODY, HeadRefused, parse_request_head, request_framing, requested_upgrade

REFUSALS = frozenset({"request.refused", "connection.refused", "broker.refused", "approval.requested"})
ALARMS = frozenset({"placeholder.misused"})
INTENTS = frozenset({"request.intent", "tunnel.intent", "broker.intent"})
OUTCOMES = frozenset({"request.outcome", "tunnel.outcome", "broker.outcome"})

Names = Mapping[str, bytes]


@dataclass(kw_only=True)
class Observed:
    """What came of one attempt. `verdict` as in attackdata; `reason` from the answer, None where there was none."""

    verdict: str
    reason: str | None = None
    status: int | None = None
    answer: Answer | None = None
    delivered: bytes = b""
    echoed: bytes = b""
    records: list[dict[str, Any]] | None = None
    """The log of the attempt; None at the entry point that has none."""
    handed: int = 0
    """Hand-offs to a broker that is a double."""
    end: str = ""

    def refusals(self) -> list[dict[str, Any]]:
        """One for each refused request: an alarm counts where it is the refusal's only record."""
        refused = self.named(REFUSALS)
        known = {record.get("request_id") for record in refused}
        return refused + [r for r in self.named(ALARMS) if r.get("request_id") not in known]

    def named(self, names: frozenset[str]) -> list[dict[str, Any]]:
        return [record for record in self.records or () if record["event"] in names]


class EntryPoint(Protocol):
    """One way in."""

    def attempt(self, case: Case) -> Observed:
        """Play the case as the first sandbox."""
        ...

    def control(self) -> None:
        """A request of a second sandbox, which must succeed. AssertionError otherwise."""
        ...


CONTROL = Case(
    name="control",
    id="control",
    sentence="a second sandbox is served",
    at=(),
    expect=None,  # type: ignore[arg-type]  # never judged as a case
    request=Request(method="GET", url="https://{ok}/v1/read/control", headers=("Authorization: Bearer {ph}",)),
)


# --- names and forms ---------------------------------------------------------------------------------------------


def host_names(ground: Ground) -> dict[str, bytes]:
    """`{ok}` and the like: authorities with the ports that the origins got."""
    names = {"ok": "ok.test", "pub": "pub.test", "npm": "npm.test", "raw": "raw.test", "wild": "a.wild.test"}
    names |= {"h2": "h2.test", "h2ok": "h2ok.test"}
    names |= {"books": "xn--bcher-kva.test", "plain": "plain.test", "evil": "evil.test", "denied": "denied.test"}
    # Reserved for what is never dialled: there is no origin behind these.
    found = {"mixed": b"mixed.test:%d" % ground.pub.port, "mixedok": b"mixedok.test"}
    for name, host in names.items():
        port = next(origin.port for origin in ground.origins if host in origin.names)
        found[name] = f"{host}:{port}".encode()
        found[f"{name}.port"] = str(port).encode()
    return found


def secret_names(name: str, value: bytes) -> dict[str, bytes]:
    """`{name}` and its encodings."""
    return {
        name: value,
        f"{name}.b64": base64.b64encode(value),
        f"{name}.basic": base64.b64encode(b"x:" + value),
        f"{name}.hex": value.hex().encode(),
        f"{name}.percent": b"".join(b"%%%02X" % byte for byte in value),
        f"{name}.json": b"".join(b"\\u%04x" % byte for byte in value),
        f"{name}.half": value[: len(value) // 2],
        f"{name}.rest": value[len(value) // 2 :],
    }


@dataclass(kw_only=True)
class Form:
    """One request as bytes and parts."""

    method: bytes
    scheme: str
    authority: bytes
    path: bytes
    headers: list[bytes]
    body: bytes | None
    upgrade: str | None

    @property
    def connect(self) -> bytes:
        """The authority with its port, as a CONNECT needs it."""
        return self.authority if re.search(rb":[0-9]+\Z", self.authority) else self.authority + b":443"

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Headers as received: (name, value), text as heads are decoded."""
        split = (line.decode("latin-1").partition(":") for line in self.headers)
        return tuple((name, value.strip()) for name, _, value in split)

    def raw(self, target: bytes, extra: bytes = b"") -> bytes:
        """The bytes of the request with that target. `extra` are whole header lines."""
        lines = b"".join(line + b"\r\n" for line in self.headers)
        return b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (self.method, target, lines, extra, self.body or b"")


def form(request: Request, names: Names) -> Form:
    """The request with all names put in; Host, Content-Length and what an upgrade needs are added."""
    scheme, _, rest = render(request.url, names).partition(b"://")
    authority, slash, path = rest.partition(b"/")
    headers = [render(line, names) for line in request.headers]
    body = None if request.body is None else render(request.body, names)
    given = {line.partition(b":")[0].lower() for line in headers}
    if b"host" not in given:
        headers.insert(0, b"Host: " + authority)
    if body is not None and not given & {b"content-length", b"transfer-encoding"}:
        headers.append(b"Content-Length: %d" % len(body))
    if request.upgrade is not None:
        headers += [b"Connection: Upgrade", b"Upgrade: " + request.upgrade.encode()]
        headers += [b"Sec-WebSocket-Key: " + base64.b64encode(bytes(16)), b"Sec-WebSocket-Version: 13"]
    return Form(
        method=request.method.encode(),
        scheme=scheme.decode(),
        authority=authority,
        path=slash + path or b"/",
        headers=headers,
        body=body,
        upgrade=request.upgrade,
    )


def judge(seen: Seen, wanted: int) -> Observed:
    """What the client can tell from what it saw."""
    observed = Observed(verdict="closed", delivered=bytes(seen.delivered), echoed=seen.echoed, end=seen.end)
    if not seen.answers:
        return observed
    last = observed.answer = seen.answers[-1]
    code = own_reason(last)
    if code is not None:
        return replace(observed, verdict=verdict_of(last.status), reason=code, status=last.status)
    if len(seen.answers) < wanted:
        return observed
    return replace(observed, verdict="allowed" if last.complete else "cut", status=last.status)


def own_reason(answer: Answer) -> str | None:
    """The reason of a refusal that is ours; None for an upstream's answer."""
    status = answer.headers.get("proxy-status", "")
    return status.partition('details="')[2].rstrip('"') if status.startswith("exeat;") else None


def verdict_of(status: int) -> str:
    """The verdict that a refusal's status stands for."""
    match status:
        case 400 | 421 | 431:
            return "malformed"
        case 502:
            return "bad-upstream"
        case 503:
            return "unavailable"
        case _:
            return "denied"


def refused(code: str) -> Observed:
    row = reason_row(code)
    return Observed(verdict=verdict_of(row.status), reason=code, status=row.status)


# --- what origins answer -----------------------------------------------------------------------------------------

DOWNLOAD = bytes(range(256)) * (10 << 12)
"""10 MiB."""


async def served(exchange: Exchange) -> None:
    """What origins do where a case says nothing: a short answer that shows nothing of the request."""
    await exchange.read_body()
    await exchange.answer(200, b"served", (("Content-Type", "text/plain"),))


async def download(exchange: Exchange) -> None:
    """10 MiB, or the range of it that was asked for."""
    await exchange.read_body()
    asked = exchange.request.header("range")
    if asked is None:
        await exchange.answer(200, DOWNLOAD, (("Accept-Ranges", "bytes"),))
        return
    first, _, last = asked.removeprefix("bytes=").partition("-")
    piece = DOWNLOAD[int(first) : int(last) + 1]
    await exchange.answer(206, piece, (("Content-Range", f"bytes {first}-{last}/{len(DOWNLOAD)}"),))


async def reflect(exchange: Exchange) -> None:
    """Everything that was received, as body and as a header."""
    await exchange.read_body()
    seen = exchange.request.raw_head
    line = exchange.request.header("authorization") or "none"
    await exchange.answer(200, seen, (("X-Seen", line), ("Set-Cookie", f"k={line}"), ("Content-Type", "text/plain")))


async def interim_flood(exchange: Exchange) -> None:
    """A thousand interim answers before the final one."""
    await exchange.read_body()
    for _ in range(1000):
        await exchange.interim(103, (("Link", "</x>; rel=preload"),))
    await exchange.answer(200, b"late")


HANDLERS: Mapping[str, Handler] = {
    "sse": sse(["one", "two", "three"]),
    "download": download,
    "reflect": reflect,
    "interim-flood": interim_flood,
    "websocket": websocket_echo,
}


def _deflate(data: bytes) -> bytes:
    return zlib.compress(data)


CODINGS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": _deflate,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
}


def answering(case: Case, names: Names) -> Handler:
    """The handler that a case asks for."""
    match case.origin:
        case None:
            return served
        case str(name):
            return HANDLERS[name]
        case given:
            top, body = render(given.get("head", ""), names), render(given.get("body", ""), names)
            coding = given.get("coding")
            if coding is not None:
                body = CODINGS[coding](body)
            if "head" not in given:
                coding = given.get("label", coding)
                fields = [("Content-Length", str(len(body))), ("Content-Type", given.get("type", "text/plain"))]
                top = head(200, (*fields, *((("Content-Encoding", coding),) if coding else ())))
            steps: list[bytes | Gate | Step] = [READ, top + body, *([CLOSE] if given.get("close", True) else [])]
            return script(*steps)


@contextmanager
def answered(ground: Ground, case: Case) -> Iterator[None]:
    """All origins answer as the case says."""
    secrets = secret_names("can", CAN) | secret_names("can.other", OTHER_CAN)
    handler = answering(case, host_names(ground) | secrets)
    for origin in ground.origins:
        origin.on("/*", handler)
    try:
        yield
    finally:
        for origin in ground.origins:
            origin.on("/*", served)


# --- decide ------------------------------------------------------------------------------------------------------


class Decide:
    """rules alone."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._box = sandbox("sb_decide", role="agent")
        self._names = host_names(ground) | {"auth": b""}
        self._names |= secret_names("ph", make(SHAPE, bytes(64)).encode())
        self._names |= secret_names("ph.other", make(SHAPE, bytes(range(64))).encode())

    def attempt(self, case: Case) -> Observed:
        try:
            return self._attempt(case)
        except (FactsRefused, HeadRefused) as error:
            return refused(error.reason)

    def control(self) -> None:
        assert self._attempt(CONTROL).verdict == "allowed"

    def _attempt(self, case: Case) -> Observed:
        names = self._names
        if case.request is not None:
            made = form(case.request, names)
            connect = made.connect if made.scheme == "https" else None
            target = made.path if made.scheme == "https" else b"http://" + made.authority + made.path
            raw = made.raw(target)
        else:
            connect = None if case.connect is None else render(case.connect, names)
            raw = b"".join(render(piece, names) for piece in case.send)
        tunnel = None
        if connect is not None:
            tunnel = TunnelFacts.build(connect.decode("latin-1"))
            denied = self._verdict(decide_tunnel(self._ground.policy, self._box, tunnel, 0.0))
            if denied is not None or not raw:
                return denied or Observed(verdict="allowed")
        top, end, body = raw.partition(b"\r\n\r\n")
        parsed = parse_request_head(top + end)
        if parsed.method == "CONNECT" and tunnel is None:
            facts = connect_facts(parsed)
            return self._verdict(decide_tunnel(self._ground.policy, self._box, facts, 0.0)) or Observed(
                verdict="allowed"
            )
        request = RequestFacts.build(
            method=parsed.method,
            scheme="http" if tunnel is None or not case.tls else "https",
            tunnel=tunnel,
            target=parsed.target,
            headers=parsed.lower,
            has_body=request_framing(parsed) != NO_BODY,
            upgrade=requested_upgrade(parsed),
        )
        return self._verdict(judged(self._ground, self._box, request, body)[0]) or Observed(verdict="allowed")

    def _verdict(self, decision: Decision | TunnelDecision) -> Observed | None:
        match decision:
            case Denied():
                return refused(decision.reason)
            case Held():
                return refused("approval-required")
            case NeedsBody():
                return refused("body-not-judged")
            case _:
                return None


def judged(ground: Ground, box: Any, facts: RequestFacts, body: bytes) -> tuple[Decision, bool]:
    """The verdict, and whether the body had to be seen for it."""
    decision = decide_request(ground.policy, box, facts, 0.0)
    if not isinstance(decision, NeedsBody):
        return decision, False
    if len(body) > decision.bound:
        return decision, True
    return decide_request(ground.policy, box, replace(facts, body=body), 0.0), True


# --- explicit, sandbox, tunnel: a real gateway -------------------------------------------------------------------


class _OnGateway:
    """What the three have in common: bytes on a proxy's listener, a log on disk."""

    hosts: ClassVar[Mapping[str, str]] = {}
    """Hosts that stand for others here: name -> name of `host_names`."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._second = ground.second

    def attempt(self, case: Case) -> Observed:
        sock, names, _ = self._open(case)
        names |= {name: names[other] for name, other in self.hosts.items()}
        before = len(self._ground.tail.read())
        observed = self._play(case, sock, names)
        observed.records = self._records(before, case)
        self._close(case)
        return observed

    def control(self) -> None:
        observed = self._play(CONTROL, self._second.connect(), self._token_names(self._second))
        assert (observed.verdict, observed.status) == ("allowed", 200), observed

    def _open(self, case: Case) -> tuple[socket.socket, dict[str, bytes], str]:
        """A connection to the proxy as the case's sandbox, its names, its id."""
        raise NotImplementedError

    def _close(self, case: Case) -> None:
        """What `_open` made is not needed any more."""

    def _token_names(self, box: Box, token: str | None = None) -> dict[str, bytes]:
        names = self._sandbox_names(box.placeholders["OK_KEY"])
        return names | {"auth": authorization(box.token if token is None else token)}

    def _sandbox_names(self, placeholder: str) -> dict[str, bytes]:
        names = host_names(self._ground) | secret_names("ph", placeholder.encode())
        return names | secret_names("ph.other", self._second.placeholders["OK_KEY"].encode())

    def _play(self, case: Case, sock: socket.socket, names: Names) -> Observed:
        return judge(play(sock, self._plan(case, names)), case.answers)

    def _plan(self, case: Case, names: Names) -> Plan:
        auth = names["auth"]
        plan = Plan(answers=case.answers, alpn=case.alpn, trusted=self._trusted())
        if case.request is not None:
            made = form(case.request, names)
            plan.heads = made.method == b"HEAD"
            if case.then is not None:
                plan.then = render(case.then, names)
                plan.then_reads = len(render(case.echoes or "", names))
            if made.scheme == "http":
                plan.send = (made.raw(b"http://" + made.authority + made.path, auth),)
                return plan
            connect: bytes | None = made.connect
            plan.send = (made.raw(made.path),)
        else:
            connect = None if case.connect is None else render(case.connect, names)
            plan.send = tuple(render(piece, names) for piece in case.send)
        if connect is None:
            return plan
        plan.first = (b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (connect, connect, auth),)
        plan.tunnel, plan.tls = True, case.tls
        plan.sni = connect.decode("latin-1").rpartition(":")[0] if case.sni is None else case.sni
        if plan.sni == "none":
            plan.sni = None
        return plan

    def _trusted(self) -> str:
        return (self._ground.gateway.client_files / "ca.pem").read_text()

    def _records(self, before: int, case: Case) -> list[dict[str, Any]]:
        """What was recorded since, once every intent has its outcome and the expected number is there."""

        def since() -> list[dict[str, Any]]:
            return [record for record in self._ground.tail.read()[before:] if record.get("sandbox") != self._second.id]

        def settled() -> bool:
            names = [record["event"] for record in since()]
            intents, outcomes = (sum(name in kind for name in names) for kind in (INTENTS, OUTCOMES))
            refusals = sum(name in REFUSALS | ALARMS for name in names)
            return intents == outcomes and intents + refusals >= case.expect.records

        with suppress(AssertionError):  # the caller compares, and says what is there
            until(settled, 5)
        return since()


class Explicit(_OnGateway):
    """The shared listener, with a token; a sandbox of its own for each case."""

    def _open(self, case: Case) -> tuple[socket.socket, dict[str, bytes], str]:
        gateway = self._ground.gateway
        box = gateway.sandbox()
        names = self._token_names(box)
        match case.token:
            case "own":
                pass
            case "none":
                names["auth"] = b""
            case "wrong":
                names["auth"] = authorization(box.token[:-4] + "0000")
            case "other":  # one whose sandbox has a listener of its own
                names["auth"] = authorization(gateway.sandbox(channel={"kind": "namespace"}).token)
            case "ended":
                gateway.admin.end_sandbox(box.id)
            case _:
                raise AssertionError(case.token)
        self._box = box.id
        return box.connect(), names, box.id

    def _close(self, case: Case) -> None:
        if case.token != "ended":
            self._ground.gateway.admin.end_sandbox(self._box)


class Tunnel(Explicit):
    """A host with a tunnel rule: the TLS inside is the origin's own."""

    hosts: ClassVar = {"ok": "raw", "ok.port": "raw.port"}

    def _trusted(self) -> str:
        return super()._trusted() + self._ground.pub.ca_pem


class Mitm(Explicit):
    """HTTP/2 inside the tunnel, served by the adapter; requests only, in HTTP/2's own form."""

    hosts: ClassVar = {"ok": "h2ok", "ok.port": "h2ok.port", "pub": "h2", "pub.port": "h2.port"}

    def _play(self, case: Case, sock: socket.socket, names: Names) -> Observed:
        if case is CONTROL:
            return super()._play(case, sock, names)
        assert case.request is not None, "HTTP/2 has requests only"
        made = form(case.request, names)
        plan = self._plan(replace(case, alpn=("h2",)), names)
        plan.send = ()
        lines = [line.partition(b":") for line in made.headers]
        hosts = [value.strip() for name, _, value in lines if name.lower() == b"host"]
        fields = [(b":method", made.method), (b":scheme", b"https"), (b":authority", hosts[0]), (b":path", made.path)]
        # RFC 9113 8.2.2, 8.3.1: what an HTTP/1 connection says is not there, and the authority stands for Host.
        own = {b"host", b"connection", b"upgrade", b"proxy-connection", b"transfer-encoding"}
        fields += [(name.lower(), value.strip(b" ")) for name, _, value in lines if name.lower() not in own]
        return judge(play_http2(sock, plan, fields, made.body), case.answers)


class InSandbox(_OnGateway):
    """The listener inside an `exeat run`: the channel identifies, `{auth}` is empty."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._entry = ground.enter(entry_of("run", ground.gateway))

    def _open(self, case: Case) -> tuple[socket.socket, dict[str, bytes], str]:
        names = self._sandbox_names(self._entry.environment["OK_KEY"]) | {"auth": b""}
        match case.token:
            case "own":
                pass
            case "other":
                names["auth"] = authorization(self._second.token)
            case "wrong":
                names["auth"] = authorization("0" * 40)
            case _:
                raise AssertionError(f"token: {case.token} has no meaning where the channel identifies")
        return self._entry.connect(), names, self._entry.id


def authorization(token: str) -> bytes:
    """The header line that clients make from a proxy URL."""
    return b"Proxy-Authorization: Basic " + base64.b64encode(f"session:{token}".encode()) + b"\r\n"


# --- rooms in this process ---------------------------------------------------------------------------------------


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
        self._thread.join(10)
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
        ground.enter(_closing(lambda: self._loop.run(close_houses())))

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
def _closing(close: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:
        close()


class Broker:
    """A worker with a genuine key that judged nothing: executor and vault have to."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._loop = ground.enter(LoopThread())
        self._tasks: list[asyncio.Task[Any]] = []
        self._loop.run(self._start())
        ground.enter(_closing(lambda: self._loop.run(self._stop())))

    async def _start(self) -> None:
        folder = self._ground.folder / "broker"
        folder.mkdir()
        for name, pem in self._ground.ca_files.items():
            (folder / name).write_text(pem)
        self._rig = Rig(folder, policy=self._ground.whole_policy, credentials=CREDENTIALS)
        rig = await self._rig.start(secrets=False)
        await rig.vault.desk.add_secret("ok", CAN, owner="team-ok", scrub=True, actor="test")
        await rig.vault.desk.add_secret("npm", OTHER_CAN, owner="team-npm", scrub=True, actor="test")
        self._worker = await rig.process("worker", "worker-1")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        await rig.vault.adopt(theirs, "executor-1", "executor")
        ours.setblocking(False)
        self._journal = rig.journal
        self._control = await open_socket_stream(ours)
        link = VaultLink(
            FrameStream(self._control, MAX_FROM_VAULT),
            name="executor-1",
            clock=rig.clock,
            on_cut=self._cut,
            on_drain=lambda seconds: None,
        )
        lookups = Lookups(StaticResolver(ANSWERS), clock=time.monotonic)
        self._pool = Pool(SocketDialer(lookups, ClientContexts(), AddressTable), clock=time.monotonic)
        self._executor = Executor(vault=link, pool=self._pool, journal=rig.journal, clock=rig.clock)
        self._keep(link.run())
        near, far = channel_pair()
        self._link = SocketBrokerLink([FdChannel(near)], clock=rig.clock, random=os.urandom)
        self._link.arm("worker-1", self._worker.key)
        self._keep(self._accept(FdChannel(far)))
        self._second = await rig.sandbox()

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _cut(self, message: Cut) -> int:
        return await self._executor.cut(message)

    async def _accept(self, channel: FdChannel) -> None:
        try:
            while (passed := await channel.receive()) is not None:
                self._keep(self._executor.serve(FrameStream(await open_socket_stream(passed[1]))))
        finally:
            channel.close()

    async def _stop(self) -> None:
        await self._executor.cut(Cut(id=0, kind="all"))
        await self._executor.settle()
        await self._pool.close()
        for channel in self._link._channels:
            channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._worker.close()
        self._control.abort()
        await self._rig.stop()

    def attempt(self, case: Case) -> Observed:
        # A sandbox of its own: a credential that was echoed three times is disarmed for that sandbox.
        box = self._loop.run(self._rig.sandbox())
        before = len(self._journal.events)
        observed = self._loop.run(self._ask(case, box, self._second))
        observed.records = of_events(self._journal.events[before:])
        return observed

    def control(self) -> None:
        observed = self._loop.run(self._ask(CONTROL, self._second, self._second))
        assert observed.status == 200, observed

    async def _ask(self, case: Case, box: Created, other: Created) -> Observed:
        assert case.request is not None, "a hand-off is made of a request"
        names = host_names(self._ground) | {"auth": b""}
        names |= secret_names("ph", box.environment["OK_KEY"].encode())
        names |= secret_names("ph.other", other.environment["OK_KEY"].encode())
        made = form(case.request, names)
        request, body = self._request(made, box)
        try:
            exchange = await self._link.open(request, body if request.body.kind == "sha256" else None)
        except (BrokerUnavailable, WireError):
            return refused("broker-unavailable")
        observed = Observed(verdict="cut")
        answer = Answer(0, "", {})
        delivered = bytearray()
        try:
            while True:
                match await exchange.receive():
                    case Refusal() as refusal:
                        observed = refused(refusal.reason)
                        break
                    case Continue():
                        if request.body.kind in ("length", "chunked"):
                            await exchange.send_body(body)
                            await exchange.finish_body()
                    case AnswerHead() as top:
                        answer = Answer(top.status, top.reason, {k.lower(): v for k, v in top.headers})
                        delivered += repr(top).encode()
                    case AnswerData(data):
                        answer.body += data
                        answer.size += len(data)
                        delivered += data
                    case AnswerEnd():
                        observed = Observed(verdict="allowed", status=answer.status)
                        break
                    case AnswerAbort() as abort:
                        observed = Observed(verdict="cut", reason=abort.reason)
                        if not answer.status:
                            observed = refused(abort.reason)
                        break
                    case _:
                        break
        except HandoffBroken:
            pass
        finally:
            await exchange.close()
            await self._executor.settle()
        observed.answer = answer if answer.status else None
        observed.delivered = bytes(delivered)
        return observed

    def _request(self, made: Form, box: Created) -> tuple[HandoffRequest, bytes]:
        """A statement with whatever the attempt says; the worker claims what an allowed one would have been."""
        active = self._rig.vault.desk.active()
        assert active is not None
        host, port = self._place(made.authority)
        body = made.body or b""
        plan = BodyPlan() if made.body is None else BodyPlan(kind="length", length=len(body))
        rule, operation, credential = "agent/read", "agent/read", "ok"
        arguments: tuple[tuple[str, str], ...] = ()
        try:
            facts = RequestFacts.build(
                method=made.method.decode(),
                scheme="https",
                tunnel=None,
                target="https://" + (made.authority + made.path).decode("latin-1"),
                headers=tuple((name.lower(), value) for name, value in made.pairs),
                has_body=made.body is not None,
                upgrade=made.upgrade,
            )
        except FactsRefused:
            pass
        else:
            verdict, seen = judged(self._ground, box.record.sandbox, facts, body)
            if seen:
                plan = BodyPlan(kind="sha256", length=len(body), sha256=sha256(body).digest())
            if isinstance(verdict, Permit):
                rule, operation, credential = verdict.rule, verdict.operation, verdict.credential or ""
                arguments = verdict.arguments
        sandbox_of = box.record.sandbox
        request = HandoffRequest(
            request_id="req_" + os.urandom(10).hex(),
            tenant=sandbox_of.tenant,
            sandbox=sandbox_of.id,
            epoch=sandbox_of.epoch,
            evidence=Evidence(token=box.token),
            policy_digest=active.digest,
            method=made.method.decode(),
            scheme="https" if made.scheme == "https" else "http",
            host=host,
            port=port,
            target=made.path.decode("latin-1"),
            headers=made.pairs,
            body=plan,
            upgrade=made.upgrade or "",
            rule=rule,
            operation=operation,
            arguments=arguments,
            credential=credential,
        )
        return request, body

    def _place(self, authority: bytes) -> tuple[str, int]:
        try:
            host, port = parse_authority(authority.decode("latin-1"), 443)
        except InvalidName:
            return authority.decode("latin-1"), 443
        return host.text, port


# --- the registry ------------------------------------------------------------------------------------------------

ENTRY_POINTS: Mapping[str, Callable[[Ground], EntryPoint] | None] = {
    "decide": Decide,
    "explicit": Explicit,
    "sandbox": InSandbox,
    "tunnel": Tunnel,
    "http1": Http1,
    "broker": Broker,
    "mitm": Mitm,
}
"""None: declared, and not built yet."""


def available(name: str) -> bool:
    """Whether cases are played at that entry point."""
    return ENTRY_POINTS[name] is not None
