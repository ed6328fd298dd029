"""The worker proves to itself that what must not pass does not (I28): real front door, gate and lanes, nothing real
around them.

Each probe is one request on a socket pair into a room of its own, whose dialer, broker and log are the Bench's: they
count and refuse. Nothing is resolved, dialled or recorded, and no budget of a real sandbox is touched.

    control        the one permitted request is dialled, or the probes would prove nothing
    refused        another host, path, method; a tunnel to elsewhere; no identity
    failing        an exception while judging, a log that cannot be written, no snapshot: the permitted request
    in force       every role of the policy in force, at a host that no rule can mean (RFC 6761: .invalid)

A probe that got through, or a control that did not, is a Failed: the worker must refuse everything and end. A probe
that did not finish is neither: a busy machine proves nothing, and the next check comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from ssl import SSLContext
from typing import Any, Final

from audit.events import Event
from audit.journal import AuditUnavailable
from net.contexts import ContextUnavailable
from net.dial import Connected, DialError, DialTarget
from net.fdchannel import socket_pair
from net.stream import ByteStream, StreamBroken, open_socket_stream
from proxy.brokerlink import BrokerUnavailable, HandoffExchange, HandoffRequest
from proxy.directory import SnapshotDirectory
from proxy.front import FrontDoor
from proxy.ports import Channel, Clock, ProxyError, Registered, Snapshot
from rules.facts import Sandbox
from rules.matching import parse_path
from rules.names import Host, RuleId, SandboxId
from rules.policy import HostPattern, Operation, Policy, Role, Rule

CHECK_SECONDS: Final = 180.0
"""Between two checks of a running worker."""
PROBE_SECONDS: Final = 10.0
MAX_ROLES: Final = 50
"""Roles of the policy in force that are tried, in order of name."""

HOST: Final = "permitted.self-check.invalid"
ELSEWHERE: Final = "elsewhere.self-check.invalid"
_ME: Final = Sandbox(
    tenant="exeat", id="self-check", epoch=1, role="self-check", owner="", agent="", task="", expires_at=4e9
)
_CHANNEL: Final = Channel(listener="self-check", kind="sandbox", sandbox=SandboxId(_ME.id), key=b"self-check")
_OPERATION: Final = Operation(
    id="self-check/permitted",
    effect="read",
    hosts=(HostPattern(kind="exact", suffix=HOST),),
    port=80,
    scheme="http",
    methods=("GET",),
    paths=(parse_path("/permitted"),),
)
_RULE: Final = Rule(id=RuleId("self-check/permitted"), action="allow", operations=(_OPERATION,))


class Failed(ProxyError):
    """Something passed that must not, or the control did not. str() names the probes."""


class Unfinished(ProxyError):
    """A probe did not end in time; what was seen until then was right. str() names the probe."""


class Bench:
    """Everything around the probed room: a Dialer, BrokerLink, Journal and LeafContexts that count and refuse."""

    def __init__(self, *, log_fails: bool = False) -> None:
        self.left = 0
        """Requests that would have left: dials and hand-offs."""
        self._log_fails = log_fails

    async def dial(self, target: DialTarget) -> Connected:
        self.left += 1
        raise DialError("upstream-unreachable", "the self-check dials nothing")

    def via(self, target: DialTarget) -> str:
        return ""

    async def open(self, request: HandoffRequest, judged_body: bytes | None = None) -> HandoffExchange:
        self.left += 1
        raise BrokerUnavailable("the self-check hands nothing over")

    async def append(self, event: Event, *, durable: bool = False) -> int:
        if self._log_fails:
            raise AuditUnavailable("the self-check's log is told to fail")
        return 1

    async def get(self, host: Host, alpn: tuple[str, ...] = (), *, owner: tuple[str, str] | None = None) -> SSLContext:
        raise ContextUnavailable("the self-check mints nothing")


MakeFront = Callable[[Bench, SnapshotDirectory], FrontDoor]
"""The room under test: the very classes that serve, over the bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    name: str
    request: bytes
    snapshot: Snapshot | None
    channel: Channel = _CHANNEL
    log_fails: bool = False
    leaves: bool = False
    """True for the control alone: it must leave, once."""


async def self_check(make: MakeFront, clock: Clock, in_force: Snapshot | None) -> int:
    """Try every probe; returns how many there were. Raises Failed, or Unfinished."""
    failed: list[str] = []
    unfinished: list[str] = []
    count = 0
    for probe in _probes(in_force):
        count += 1
        bench = Bench(log_fails=probe.log_fails)
        directory = SnapshotDirectory(clock, silence_seconds=2 * PROBE_SECONDS)
        if probe.snapshot is not None:
            directory.install(probe.snapshot)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                status = await _ask(make(bench, directory), probe)
        except TimeoutError:
            status = b""
            unfinished.append(probe.name)
        right = bench.left == 1 if probe.leaves else bench.left == 0 and not status.startswith(b"2")
        if not right and (probe.name not in unfinished or bench.left):
            failed.append(probe.name)
    if failed:
        raise Failed(", ".join(failed))
    if unfinished:
        raise Unfinished(", ".join(unfinished))
    return count


def _probes(in_force: Snapshot | None) -> Iterator[_Probe]:
    mine = _snapshot(_policy({_ME.role: Role(name=_ME.role, rules=(_RULE,))}))
    permitted = _get(HOST, "/permitted")
    yield _Probe(name="the permitted request", request=permitted, snapshot=mine, leaves=True)
    yield _Probe(name="a denied host", request=_get(ELSEWHERE, "/permitted"), snapshot=mine)
    yield _Probe(name="a denied path", request=_get(HOST, "/denied"), snapshot=mine)
    yield _Probe(name="a denied method", request=_get(HOST, "/permitted", "POST"), snapshot=mine)
    tunnel = f"{ELSEWHERE}:22"
    yield _Probe(name="a denied tunnel", request=_head("CONNECT", tunnel, tunnel), snapshot=mine)
    nobody = Channel(listener="self-check", kind="shared")
    yield _Probe(name="a request of nobody", request=permitted, snapshot=mine, channel=nobody)
    yield _Probe(name="an unwritable log", request=permitted, snapshot=mine, log_fails=True)
    broken = _snapshot(_policy(_Raising(mine.policy.roles)))
    yield _Probe(name="an exception in the gate", request=permitted, snapshot=broken)
    yield _Probe(name="no policy", request=permitted, snapshot=None)
    if in_force is None:
        return
    host = Host(ELSEWHERE)
    for name, role in sorted(in_force.policy.roles.items())[:MAX_ROLES]:
        if any(_means(rule, host) for rule in role.rules):
            continue  # the operator's wildcard covers even this host
        snapshot = _snapshot(in_force.policy, replace(_ME, role=name))
        yield _Probe(name=f"a denied host in role {name}", request=_get(ELSEWHERE, "/"), snapshot=snapshot)


def _policy(roles: Mapping[str, Role]) -> Policy:
    return Policy(digest="self-check", document={}, roles=roles, destinations={}, credentials={})


def _snapshot(policy: Policy, box: Sandbox = _ME) -> Snapshot:
    entry = Registered(sandbox=box, token_sha256=None, own_listener=True)
    return Snapshot(generation=1, policy=policy, sandboxes={SandboxId(box.id): entry}, by_token={})


def _means(rule: Rule, host: Host) -> bool:
    patterns = [*rule.hosts, *(pattern for operation in rule.operations for pattern in operation.hosts)]
    return any(pattern.matches(host) for pattern in patterns)


class _Raising(dict[str, Role]):
    """Roles that cannot be looked up: judging raises."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        super().__init__(roles)

    def get(self, *_: Any) -> Any:
        raise RuntimeError("the self-check")

    def __getitem__(self, _: str) -> Role:
        raise RuntimeError("the self-check")


def _get(host: str, path: str, method: str = "GET") -> bytes:
    return _head(method, f"http://{host}{path}", host)


def _head(method: str, target: str, host: str) -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()


async def _ask(front: FrontDoor, probe: _Probe) -> bytes:
    """The status of the answer, three digits; empty where the connection ended without one."""
    near, far = socket_pair()
    client = await open_socket_stream(near)
    served: ByteStream = await open_socket_stream(far)
    serving = asyncio.ensure_future(front.serve(served, probe.channel))
    seen = b""
    try:
        client.write(probe.request)
        while len(seen) < 12 and (piece := await client.receive()):
            seen += piece
        client.abort()
        await asyncio.wait({serving})  # what it does after its answer counts too
    except StreamBroken:
        pass
    finally:
        client.abort()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        served.abort()
    return seen[9:12]
