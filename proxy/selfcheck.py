"""The worker proves to itself that what must not pass does not (I28): real front door, gate and lanes, nothing real
around them.

Each probe is one connection on a socket pair into a room of its own, whose dialer, broker and log are the Bench's: they
count and refuse. Nothing is resolved, dialled or recorded, and no budget of a real sandbox is touched.

    controls       what is permitted is dialled or handed over, after its intent: or the probes would prove nothing
    refused        another host, path, method; a tunnel to elsewhere; no identity; a captured bare address or denied
                   name; inside TLS another path or name; in a credential's lane another method, a foreign placeholder,
                   a key of the client's own
    failing        an exception while judging, a log that cannot be written, no snapshot: the permitted request
    in force       every role of the policy in force, at a host that no rule can mean (RFC 6761: .invalid)

TLS is the gateway's own: a leaf that the vault mints for the self-check's name, verified against the root that clients
are given. And two hand-offs go to the real broker (`check_broker`): of a sandbox that nobody created, and with a seal
that is none. Both must be refused; the broker records them as `selfcheck.refused`.

A probe that got through, or a control that did not, is a Failed: the worker must refuse everything and end. A probe
that did not finish is neither: a busy machine proves nothing, and the next check comes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from ssl import SSLContext
from typing import Any, Final, Protocol

from audit.events import Event
from audit.journal import AuditUnavailable
from net.contexts import ContextUnavailable
from net.dial import Connected, DialError, DialTarget
from net.fdchannel import socket_pair
from net.stream import ByteStream, StreamBroken, open_socket_stream
from net.tls import client_side
from proxy.brokerlink import BrokerUnavailable, HandoffBroken, HandoffExchange, HandoffRequest
from proxy.directory import SnapshotDirectory
from proxy.front import FrontDoor, LeafContexts
from proxy.ports import Channel, Clock, ProxyError, Registered, Snapshot
from rules.facts import Sandbox
from rules.matching import parse_path
from rules.names import CredentialRef, Host, Owner, RuleId, SandboxId
from rules.placeholders import make as make_placeholder
from rules.policy import CredentialDef, HostPattern, Operation, PlaceholderSpec, Policy, Role, Rule, Slot
from wire.handoff import SELF_CHECK, SELF_CHECK_TENANT, BodyPlan, Evidence, Refusal

CHECK_SECONDS: Final = 180.0
"""Between two checks of a running worker."""
PROBE_SECONDS: Final = 10.0
LATE_SECONDS: Final = 3.0
"""After which a refused control proves nothing: the room itself gives up after 5 s, and a process can be held up."""
MAX_ROLES: Final = 50
"""Roles of the policy in force that are tried, in order of name."""

HOST: Final = "permitted.self-check.invalid"
ELSEWHERE: Final = "elsewhere.self-check.invalid"
_ME: Final = Sandbox(
    tenant=SELF_CHECK_TENANT, id=SELF_CHECK, epoch=1, role=SELF_CHECK, owner="", agent="", task="", expires_at=4e9
)
_CHANNEL: Final = Channel(listener=SELF_CHECK, kind="sandbox", sandbox=SandboxId(_ME.id), key=b"self-check")
_OPERATION: Final = Operation(
    id="self-check/permitted",
    effect="read",
    hosts=(HostPattern(kind="exact", suffix=HOST),),
    port=80,
    scheme="http",
    methods=("GET",),
    paths=(parse_path("/permitted"),),
)
_RULE: Final = Rule(
    id=RuleId("self-check/permitted"),
    action="allow",
    operations=(_OPERATION, replace(_OPERATION, id="self-check/secure", port=443, scheme="https")),
)
_CREDENTIAL: Final = CredentialDef(
    name=CredentialRef(SELF_CHECK),
    kind="bearer",
    slot=Slot(where="bearer"),
    hosts=(Host(HOST),),
    owner="",
    placeholder=PlaceholderSpec(env="SELF_CHECK", shape="sc_{32}"),
)
_KEYED: Final = Rule(
    id=RuleId("self-check/keyed"),
    action="allow",
    operations=(replace(_OPERATION, id="self-check/keyed", port=443, scheme="https", paths=(parse_path("/keyed"),)),),
    credential=_CREDENTIAL.name,
)


class Failed(ProxyError):
    """Something passed that must not, or the control did not. str() names the probes."""


class Unfinished(ProxyError):
    """A probe did not end in time; what was seen until then was right. str() names the probe."""


class Bench:
    """Everything around the probed room: a Dialer, BrokerLink, Journal and LeafContexts that count and refuse."""

    def __init__(self, *, log_fails: bool = False, leaves: LeafContexts | None = None) -> None:
        """`leaves` make the room's certificates; None: it has none."""
        self.left = 0
        """Requests that would have left: dials and hand-offs."""
        self.unrecorded = 0
        """Those of them whose intent was not in the log before."""
        self._intents = 0
        self._log_fails = log_fails
        self._leaves = leaves

    async def dial(self, target: DialTarget) -> Connected:
        self._leave()
        raise DialError("upstream-unreachable", "the self-check dials nothing")

    def via(self, target: DialTarget) -> str:
        return ""

    async def open(self, request: HandoffRequest, judged_body: bytes | None = None) -> HandoffExchange:
        self._leave()
        raise BrokerUnavailable("the self-check hands nothing over")

    async def append(self, event: Event, *, durable: bool = False) -> int:
        if self._log_fails:
            raise AuditUnavailable("the self-check's log is told to fail")
        self._intents += event.name in ("request.intent", "request.handoff")
        return 1

    async def get(self, host: Host, alpn: tuple[str, ...] = (), *, owner: Owner | None = None) -> SSLContext:
        if self._leaves is None:
            raise ContextUnavailable("the self-check mints nothing")
        return await self._leaves.get(host, alpn, owner=owner)

    def _leave(self) -> None:
        self.left += 1
        self.unrecorded += self.left > self._intents


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTls:
    """The gateway's own TLS for the probes inside a tunnel: its leaves, and a client's context that trusts its root."""

    leaves: LeafContexts
    trust: SSLContext


class ProbedLink(Protocol):
    """The worker's link to the broker, as far as the self-check uses it."""

    async def open(self, request: HandoffRequest, judged_body: bytes | None = None) -> HandoffExchange: ...

    async def open_forged(self, request: HandoffRequest) -> HandoffExchange:
        """As `open`, under a seal that is none."""
        ...


MakeFront = Callable[[Bench, SnapshotDirectory], FrontDoor]
"""The room under test: the very classes that serve, over the bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    name: str
    request: bytes
    snapshot: Snapshot | None
    channel: Channel = _CHANNEL
    log_fails: bool = False
    captured: tuple[str, int] | None = None
    """A captured connection to (name or address, port) instead of one to the proxy."""
    tunnel: str = ""
    """The authority of a CONNECT that must succeed, before anything else."""
    server_name: str = ""
    """A TLS handshake under this name, before the request."""
    leaves: bool = False
    """True for controls alone: it must leave, once, after its intent."""


async def self_check(make: MakeFront, clock: Clock, in_force: Snapshot | None, tls: OwnTls | None = None) -> int:
    """Try every probe, inside TLS only with `tls`; returns how many there were. Raises Failed, or Unfinished."""
    failed: list[str] = []
    unfinished: list[str] = []
    count = 0
    if tls is not None:
        try:
            await tls.leaves.get(Host(HOST), owner=(_ME.tenant, _ME.id))
        except ContextUnavailable:  # a vault that is busy, or a log that is: what needs no certificate is tried
            unfinished.append("the gateway's own certificate")
            tls = None
    for probe in _probes(in_force, secure=tls is not None):
        count += 1
        bench = Bench(log_fails=probe.log_fails, leaves=tls.leaves if tls else None)
        directory = SnapshotDirectory(clock, silence_seconds=2 * PROBE_SECONDS)
        if probe.snapshot is not None:
            directory.install(probe.snapshot)
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                status = await _ask(make(bench, directory), probe, tls)
        except TimeoutError:
            status = b""
            unfinished.append(probe.name)
        else:
            if probe.leaves and not bench.left and asyncio.get_running_loop().time() - begun >= LATE_SECONDS:
                unfinished.append(probe.name)  # the room's own deadlines may have ended it
        right = bench.left == 1 if probe.leaves else bench.left == 0 and not status.startswith(b"2")
        if bench.unrecorded or (not right and (probe.name not in unfinished or bench.left)):
            failed.append(probe.name + (" (not in the log first)" if bench.unrecorded else ""))
    if failed:
        raise Failed(", ".join(failed))
    if unfinished:
        raise Unfinished(", ".join(unfinished))
    return count


async def check_broker(link: ProbedLink, policy_digest: str, random: Callable[[int], bytes] = os.urandom) -> int:
    """Hand over what the broker must refuse; returns how many there were. Raises Failed, or Unfinished."""
    opens = (("a hand-off of nobody", link.open), ("a hand-off with a forged seal", link.open_forged))
    for name, open_ in opens:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                exchange = await open_(_handed_over(policy_digest, random))
                try:
                    answer = await exchange.receive()
                finally:
                    await exchange.close()
        except (BrokerUnavailable, HandoffBroken, TimeoutError):
            raise Unfinished(name) from None
        if not isinstance(answer, Refusal):
            raise Failed(name)
        if answer.reason in ("broker-unavailable", "policy-unavailable", "audit-unavailable"):
            raise Unfinished(name)  # turned away at the door: not judged
    return len(opens)


def _handed_over(policy_digest: str, random: Callable[[int], bytes]) -> HandoffRequest:
    return HandoffRequest(
        request_id=f"req_{random(10).hex()}",
        tenant=_ME.tenant,
        sandbox=_ME.id,
        epoch=_ME.epoch,
        evidence=Evidence(channel_key=random(32)),
        policy_digest=policy_digest,
        method="GET",
        scheme="https",
        host=HOST,
        port=443,
        target="/keyed",
        headers=(("Host", HOST),),
        body=BodyPlan(),
        rule=_KEYED.id,
        operation=_KEYED.operations[0].id,
        credential=SELF_CHECK,
    )


def _probes(in_force: Snapshot | None, *, secure: bool) -> Iterator[_Probe]:
    mine = _snapshot(_policy({_ME.role: Role(name=_ME.role, rules=(_RULE, _KEYED))}))
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
    inside = _inside(HOST, "/permitted")
    yield _Probe(name="the captured request", request=inside, snapshot=mine, captured=(HOST, 80), leaves=True)
    yield _Probe(name="a captured bare address", request=inside, snapshot=mine, captured=("192.0.2.1", 80))
    elsewhere = _inside(ELSEWHERE, "/permitted")
    yield _Probe(name="a captured denied name", request=elsewhere, snapshot=mine, captured=(ELSEWHERE, 80))
    yield _Probe(name="a captured name under another Host", request=elsewhere, snapshot=mine, captured=(HOST, 80))
    if secure:
        yield from _inside_tls(mine)
    if in_force is None:
        return
    host = Host(ELSEWHERE)
    for name, role in sorted(in_force.policy.roles.items())[:MAX_ROLES]:
        if any(_means(rule, host) for rule in role.rules):
            continue  # the operator's wildcard covers even this host
        snapshot = _snapshot(in_force.policy, replace(_ME, role=name))
        yield _Probe(name=f"a denied host in role {name}", request=_get(ELSEWHERE, "/"), snapshot=snapshot)


def _inside_tls(mine: Snapshot) -> Iterator[_Probe]:
    """Through a CONNECT and a handshake with the gateway's own certificate, in the plain lane and a credential's."""
    placeholder = make_placeholder(_CREDENTIAL.placeholder.shape, b"\x5c" * 32)

    def probe(name: str, request: bytes, *, server_name: str = HOST, leaves: bool = False) -> _Probe:
        tunnel = f"{HOST}:443"
        return _Probe(name=name, request=request, snapshot=mine, tunnel=tunnel, server_name=server_name, leaves=leaves)

    yield probe("the permitted request inside TLS", _inside(HOST, "/permitted"), leaves=True)
    yield probe("a denied path inside TLS", _inside(HOST, "/denied"))
    yield probe("another Host inside TLS", _inside(ELSEWHERE, "/permitted"))
    yield probe("another server name", _inside(HOST, "/permitted"), server_name=ELSEWHERE)
    yield probe("the permitted hand-off", _inside(HOST, "/keyed"), leaves=True)
    yield probe("a denied method with a credential", _inside(HOST, "/keyed", "POST"))
    own = "Authorization: Bearer of-the-client"
    yield probe("a key of the client's own", _inside(HOST, "/keyed", more=own))
    foreign = f"Authorization: Bearer {placeholder}"
    yield probe("a foreign placeholder", _inside(HOST, "/keyed", more=foreign))
    yield probe("a placeholder without a credential", _inside(HOST, "/permitted", more=foreign))


def _policy(roles: Mapping[str, Role]) -> Policy:
    return Policy(
        digest="self-check", document={}, roles=roles, destinations={}, credentials={_CREDENTIAL.name: _CREDENTIAL}
    )


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


def _inside(host: str, path: str, method: str = "GET", more: str = "") -> bytes:
    return _head(method, path, host, more)


def _head(method: str, target: str, host: str, more: str = "") -> bytes:
    extra = f"{more}\r\n" if more else ""
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{extra}Connection: close\r\n\r\n".encode()


async def _ask(front: FrontDoor, probe: _Probe, tls: OwnTls | None) -> bytes:
    """The status of the answer, three digits; empty where the connection ended without one."""
    near, far = socket_pair()
    client: ByteStream = await open_socket_stream(near)
    served: ByteStream = await open_socket_stream(far)
    serving = asyncio.ensure_future(_serve(front, served, probe))
    try:
        stream = client
        if probe.tunnel:
            client.write(_head("CONNECT", probe.tunnel, probe.tunnel))
            status = await _status(client)
            if status != b"200":
                return status if not probe.leaves else b""
        if probe.server_name:
            if tls is None:
                raise ValueError("a probe inside TLS without the gateway's own")
            stream = await client_side(client, tls.trust, probe.server_name)
        stream.write(probe.request)
        status = await _status(stream)
        stream.abort()
        await asyncio.wait({serving})  # what it does after its answer counts too
        return status
    except StreamBroken:
        await asyncio.wait({serving}, timeout=PROBE_SECONDS)
        return b""
    finally:
        client.abort()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        served.abort()


async def _serve(front: FrontDoor, served: ByteStream, probe: _Probe) -> None:
    try:
        if probe.captured is None:
            await front.serve(served, probe.channel)
            return
        name, port = probe.captured
        front.names.admit(SELF_CHECK)
        address = name if name[0].isdigit() else front.names.address_of(SELF_CHECK, Host(name))
        await front.serve_captured(served, probe.channel, (address or "", port))
    finally:
        served.abort()


async def _status(stream: ByteStream) -> bytes:
    """Of one head, which is read to its end."""
    seen = b""
    while b"\r\n\r\n" not in seen and len(seen) < 16_384 and (piece := await stream.receive(1)):
        seen += piece
    return seen[9:12]
