"""Live lanes for the corpus of operations: one gateway whose policy holds every role, one origin that is every host.

    explicit   the shared listener with a token: CONNECT and TLS inside, or absolute-form where a URL is in clear text
    captured   a program in an `exeat run` without proxy variables, one run for each role in turn
    h2         HTTP/2 inside the tunnel, served by the adapter: the same roles with `protocol: h2`
    broker     as explicit, under the same roles with a credential bound: worker, executor and vault judge

A vector is played as a client would send it. What must come of it is the pure decision's word under that very role.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from audit.verify import verify
from exeat.boundary import find_capture_tools
from rules.catalogue import builtin_services
from rules.decide import decide_tunnel
from rules.decision import Decision, Denied, Held, NeedsBody
from rules.facts import FactsRefused, TunnelFacts
from rules.names import Host, InvalidName
from rules.policy import Operation, Policy
from tests.support.attacker import Plan, Seen, play, play_http2
from tests.support.attempts import INTENTS, OUTCOMES, REFUSALS, judge
from tests.support.entries import Inside, bundle_of, inside_of
from tests.support.entry_gateway import authorization
from tests.support.gateway import Box, TestGateway
from tests.support.ground import Tail
from tests.support.operationcases import Corpus, Vector, corpus, decide, policy_of, policy_text
from tests.support.origins import Exchange, Origin
from tests.support.policies import NOW, sandbox
from tests.support.waiting import until

ADDRESS = f"127.31.{os.getpid() >> 8 & 255}.{os.getpid() & 255 | 1}"
"""Of this process alone: ports are fixed, and two may play at once."""
LANES = ("explicit", "captured", "h2", "broker")
SUFFIX = {"explicit": "", "captured": "", "h2": "-h2", "broker": "-credential"}
AHEAD = 2
"""Runs at a time, one of them played: each tries every way out for seconds before it begins."""
STARTS = 4
"""Tries to start one: on a machine that is too busy to see its own probes a boundary is not proven."""
LARGEST_HTTP2 = 60_000
"""Bytes of a body that fit a stream's first window; the client here knows no other."""
ROWS_A_SANDBOX = 40
"""Refusals that come faster than a sandbox's budget are counted together, not one by one (RULINGS 9.2)."""
_BOUNDARY = {"external": "tests", "reason": "the tests confine nothing"}
_CREDENTIAL = "corpus"
_BOUND = {"credential": _CREDENTIAL, "shared": True}


def why_not_here() -> str:
    """Why the lanes cannot be had on this machine, or ""."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ADDRESS, 443))
        except OSError:
            return "services stand at port 443, which needs root here"
    return ""


def why_apart(vector: Vector, lane: str) -> str:
    """Why `vector` is not played in `lane`, or ""."""
    if lane in vector.apart:
        return vector.apart[lane]
    if lane == "captured" and find_capture_tools() is None:
        return "no capture on this machine"
    if lane == "captured" and ":" in vector.authority:
        return "what is captured has the ports of the web"
    if lane == "h2" and vector.scheme == "http":
        return "HTTP/2 is spoken inside TLS"
    if lane == "h2" and vector.body is not None and len(vector.body) > LARGEST_HTTP2:
        return "more than one window"
    return ""


class Stand:
    """A context manager: origins and, from the first use on, a gateway."""

    def __init__(self, folder: Path) -> None:
        self.corpus: Corpus = corpus()
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.hosts = _hosts(self.corpus)
        self.tls = Origin(*self.hosts, address=ADDRESS, port=443, handler=_answer)
        self.clear = Origin(*self.hosts, address=ADDRESS, port=80, tls=False, handler=_answer)
        self.coming: list[str] = []
        """Roles that will be played captured, in order: their sandboxes are made ahead."""
        self._insides: dict[str, Future[Inside]] = {}
        self._inside_stacks: dict[str, contextlib.ExitStack] = {}
        self._starting = ThreadPoolExecutor(AHEAD)
        self._boxes: dict[str, tuple[Box, int]] = {}

    def __enter__(self) -> Stand:
        for origin in (self.tls, self.clear):
            self._stack.enter_context(origin.run_in_thread())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._starting.shutdown()
        self._leave(self._insides)
        self._stack.close()

    def _leave(self, roles: Iterable[str]) -> None:
        for role in tuple(roles):
            self._insides.pop(role).exception()  # waits until it is here, or failed to come
            self._inside_stacks.pop(role).close()

    @cached_property
    def roles(self) -> Mapping[str, Any]:
        """Every role in each of its variants."""
        made: dict[str, Any] = {}
        for name, role in self.corpus.roles.items():
            made[name] = role
            made[name + SUFFIX["h2"]] = {**role, "allow": [{**rule, "protocol": "h2"} for rule in role["allow"]]}
            bound = [{**rule, **_BOUND} if _can_be_bound(rule) else rule for rule in role["allow"]]
            made[name + SUFFIX["broker"]] = {**role, "boundary": _BOUNDARY, "allow": bound}
        return made

    @cached_property
    def policy_text(self) -> str:
        entry = {"addresses": [f"{ADDRESS}/32"], "resolve": [ADDRESS], "ca": "file:corpus.pem"}
        return policy_text(self.roles, destinations=dict.fromkeys(self.hosts, entry))

    @cached_property
    def credentials_text(self) -> str:
        credential = {
            "kind": "bearer",
            "secret": f"store:{_CREDENTIAL}",
            "hosts": self._bound_hosts(),
            "owner": "team",
            "placeholder": {"env": "CORPUS_KEY", "shape": "tok_{32}"},
        }
        return json.dumps({"version": 1, "credentials": {_CREDENTIAL: credential}})

    def _bound_hosts(self) -> list[str]:
        """Every host of every rule that has the credential; of a template those of the corpus, or an example."""
        rules = [rule for role in self.corpus.roles.values() for rule in role["allow"] if _can_be_bound(rule)]
        found: set[str] = set()
        for pattern in {pattern for rule in rules for op in _operations(rule) for pattern in op.hosts}:
            fitting = [host for host in self.hosts if pattern.matches(Host.parse(host))]
            found.update(fitting or [re.sub(r"\{[^}]*\}", "example", pattern.text)])
        return sorted(found)

    @cached_property
    def policy(self) -> Policy:
        """As the gateway's processes have it."""
        return policy_of(self.policy_text, self.credentials_text, self.tls.ca_pem)

    @cached_property
    def gateway(self) -> TestGateway:
        folder = Path(tempfile.mkdtemp(prefix="gateway-", dir=self._folder))
        made = TestGateway(
            folder,
            policy=self.policy_text,
            credentials=self.credentials_text,
            secrets={_CREDENTIAL: "canary-9fQ2hLx7VbT4mKz1RwN8sDc3"},
            confined=True,  # the policy stays as it is
        )
        (made.config / "policy.yaml").write_text(self.policy_text)
        (made.config / "corpus.pem").write_text(self.tls.ca_pem)
        return self._stack.enter_context(made)

    @cached_property
    def tail(self) -> Tail:
        return Tail(self.gateway.log)

    def verify(self) -> None:
        """The log, where one was written, verifies. AssertionError naming the first bad record otherwise."""
        if "gateway" in self.__dict__:
            report = verify([self.gateway.log])
            assert report.bad is None, report.bad

    def expected(self, vector: Vector, lane: str) -> Decision:
        """The pure decision under the lane's variant of the role."""
        box = sandbox(vector.role + SUFFIX[lane])
        if lane == "captured" and vector.scheme == "http":
            # What is captured is a connection to a port first, and only then a request.
            connection = decide_tunnel(self.policy, box, TunnelFacts.build(f"{vector.authority}:80"), NOW)
            if isinstance(connection, Denied):
                return connection
        return decide(self.policy, box, vector)

    def box(self, role: str) -> Box:
        box, left = self._boxes.get(role, (None, 0))
        if box is None or left == 0:
            box, left = self.gateway.sandbox(role), ROWS_A_SANDBOX
        self._boxes[role] = (box, left - 1)
        return box

    def inside(self, role: str) -> Inside:
        """The sandbox of a run. A role's vectors are played together: those that were here before are over."""
        if role not in self._insides or role in self.coming:
            at = self.coming.index(role) if role in self.coming else -1
            self.coming = self.coming[at + 1 :]
            wanted = (role, *self.coming[: AHEAD - 1])
            self._leave(self._insides.keys() - set(wanted))
            for one in wanted:
                if one not in self._insides:
                    self._inside_stacks[one] = stack = contextlib.ExitStack()
                    self._insides[one] = self._starting.submit(self._started, one, stack)
        return self._insides[role].result()

    def _started(self, role: str, stack: contextlib.ExitStack) -> Inside:
        for last in (*[False] * (STARTS - 1), True):
            try:
                return stack.enter_context(inside_of(self.gateway, role))
            except AssertionError as error:
                if last or "could not be proven" not in str(error):
                    raise
        raise AssertionError("no start was tried")

    def play(self, vector: Vector, lane: str) -> None:
        """Play it and compare. AssertionError with the vector's sentence where anything differs."""
        expected = self.expected(vector, lane)
        before = Before(self)
        seen = _PLAYERS[lane](self, vector)
        observed = judge(seen, 1)
        permitted = not isinstance(expected, Denied | Held | NeedsBody)
        records = self._records(before.records, vector.role + SUFFIX[lane], settled=1)
        told = f"{vector.name}: {vector.why}\nexpected {expected}\nobserved {observed}\nrecords {records}"
        match expected:
            case Denied(reason=reason):
                wanted = reason
            case Held():
                wanted = "approval-required"
            case _:
                wanted = None
        assert observed.reason == wanted, told
        assert (observed.verdict == "allowed") == permitted, told
        self._upstream(vector, before, permitted, told)
        decisions = [record["event"] for record in records if record["event"] in INTENTS | REFUSALS]
        assert len(decisions) == 1, told
        assert (decisions[0] in INTENTS) == permitted, told
        if not permitted and decisions[0] != "approval.requested":
            assert wanted in [record.get("reason") for record in records], told

    def _upstream(self, vector: Vector, before: Before, permitted: bool, told: str) -> None:
        received = [*self.tls.received[before.tls :], *self.clear.received[before.clear :]]
        if not permitted:
            assert not received, told
            assert self.tls.bytes_in + self.clear.bytes_in == before.size, told
            return
        assert len(received) == 1, told
        request = received[0]
        assert (request.method, request.target) == (vector.method, vector.sent or vector.target), told
        assert request.complete, told
        assert (request.header("host") or "").lower() == vector.authority.lower(), told
        assert bytes(request.body) == (vector.body or b""), told
        assert self.tls.faults == self.clear.faults == [], told

    def _records(self, before: int, role: str, *, settled: int) -> list[dict[str, Any]]:
        """What was recorded of `role` since, once there is a decision and every intent has its outcome."""

        def since() -> list[dict[str, Any]]:
            # Sandboxes of other roles are being made meanwhile, and prove that nothing leaves them.
            return [record for record in self.tail.read()[before:] if record.get("role") == role]

        def done() -> bool:
            names = [record["event"] for record in since()]
            intents, outcomes = (sum(name in kind for name in names) for kind in (INTENTS, OUTCOMES))
            return intents == outcomes and intents + sum(name in REFUSALS for name in names) >= settled

        with suppress(AssertionError):  # the caller compares, and says what is there
            until(done)
        return since()


class Before:
    """What origins and log had seen before a vector was played."""

    def __init__(self, stand: Stand) -> None:
        self.records = len(stand.tail.read())
        self.tls, self.clear = len(stand.tls.received), len(stand.clear.received)
        self.size = stand.tls.bytes_in + stand.clear.bytes_in


def bytes_of(vector: Vector, target: str, extra: bytes = b"") -> bytes:
    """The request in HTTP/1.1."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in vector.all_headers).encode()
    return f"{vector.method} {target} HTTP/1.1\r\n".encode() + lines + extra + b"\r\n" + (vector.body or b"")


def _explicit(stand: Stand, vector: Vector, suffix: str = "") -> Seen:
    box = stand.box(vector.role + suffix)
    return play(box.connect(), _plan(stand, vector, authorization(box.token)))


def _broker(stand: Stand, vector: Vector) -> Seen:
    return _explicit(stand, vector, SUFFIX["broker"])


def _http2(stand: Stand, vector: Vector) -> Seen:
    box = stand.box(vector.role + SUFFIX["h2"])
    with suppress(FactsRefused):
        place = TunnelFacts.build(vector.authority if ":" in vector.authority else f"{vector.authority}:443")
        if isinstance(decide_tunnel(stand.policy, sandbox(vector.role + SUFFIX["h2"]), place, NOW), Denied):
            # A client offers both; what refuses a whole host speaks HTTP/1.1.
            return play(box.connect(), _plan(stand, vector, authorization(box.token)))
    plan = _plan(stand, vector, authorization(box.token))
    plan.alpn, plan.send = ("h2",), ()
    fields = [(":method", vector.method), (":scheme", "https"), (":authority", vector.authority)]
    fields += [(":path", vector.target), *vector.headers]
    raw = [(name.encode(), value.encode()) for name, value in fields]
    return play_http2(box.connect(), plan, raw, vector.body)


def _captured(stand: Stand, vector: Vector) -> Seen:
    inside = stand.inside(vector.role)
    plan = _plan(stand, vector, b"")
    plan.first, plan.tunnel = (), False
    plan.trusted = bundle_of(inside)
    plan.send = (bytes_of(vector, vector.target),)
    return play(inside.reach(vector.authority, 443 if vector.scheme == "https" else 80), plan)


_PLAYERS = {"explicit": _explicit, "captured": _captured, "h2": _http2, "broker": _broker}


def _plan(stand: Stand, vector: Vector, auth: bytes) -> Plan:
    plan = Plan(alpn=("http/1.1",), trusted=(stand.gateway.client_files / "ca.pem").read_text())
    plan.heads = vector.method == "HEAD"
    if vector.scheme == "http":
        plan.send = (bytes_of(vector, vector.url, auth),)
        return plan
    authority = vector.authority.encode()
    connect = authority if b":" in authority else authority + b":443"
    plan.first = (b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (connect, connect, auth),)
    plan.tunnel, plan.tls, plan.sni = True, True, vector.authority.partition(":")[0]
    plan.send = (bytes_of(vector, vector.target),)
    return plan


async def _answer(exchange: Exchange) -> None:
    await exchange.read_body()
    # Answers of batches are shaped where a credential was used: what is none would be withheld.
    batch = exchange.request.path.endswith("/info/lfs/objects/batch")
    kind = "application/vnd.git-lfs+json" if batch else "application/json"
    body = b'{"transfer": "basic", "objects": []}' if batch else b"{}"
    await exchange.answer(200, body, (("Content-Type", kind),))


def _hosts(whole: Corpus) -> tuple[str, ...]:
    """Every host of the corpus, those that only look like one too."""
    found: set[str] = set()
    for vector in whole.vectors:
        with suppress(InvalidName):
            found.add(Host.parse(vector.authority.partition(":")[0]).text)
    return tuple(sorted(found))


def _operations(rule: Mapping[str, Any]) -> list[Operation]:
    service = builtin_services()[rule["service"]]
    return [op for word in rule["operations"] for op in service.select(word)]


def _can_be_bound(rule: Mapping[str, Any]) -> bool:
    """Whether a rule may go with a credential: nothing that it grants is minted or in clear text."""
    return all(op.effect != "mint" and op.scheme == "https" for op in _operations(rule))


__all__ = ["ADDRESS", "LANES", "Stand", "why_apart", "why_not_here"]
