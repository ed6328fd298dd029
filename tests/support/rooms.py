"""The proxy's room on in-memory streams: real gate, lanes, directory and dialer; journal, broker and clock are fakes.

house = House(policy(rule("dev/read", op("dev/read", "api.test", ["/v1/read/**"]))), origins=[origin])
client = house.connect()
client.send(b"GET http://api.test/ HTTP/1.1\\r\\n...")
answer = await client.answer()
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from broker.vault.ca import CertificateAuthority
from net.addresses import AddressTable
from net.contexts import ClientContexts, ServerContexts
from net.dial import Dialer, SocketDialer
from net.resolve import Lookups
from net.tls import client_side
from proxy.directory import SnapshotDirectory
from proxy.help import HelpTexts
from proxy.limits import LimitTable
from proxy.ports import Channel, Registered
from proxy.worker import Ports, Room
from rules.matching import parse_path
from rules.names import CredentialRef, Host, RuleId
from rules.policy import (
    BodySpec,
    CredentialDef,
    DestinationDef,
    HostPattern,
    Operation,
    PlaceholderSpec,
    Policy,
    Role,
    Rule,
    Slot,
)
from tests.support.fakes import (
    OTHER_TOKEN,
    SHARED,
    TOKEN,
    CountingRandom,
    ManualClock,
    MemoryBroker,
    registered,
    sandbox,
    snapshot,
)
from tests.support.journal import MemoryJournal
from tests.support.origins import Origin
from tests.support.resolver import StaticResolver
from tests.support.streams import MemoryStream

NOW = time.time()
"""Certificates are checked by real clients against the real clock."""
_CA = CertificateAuthority.create(now=NOW, installation="test", node="node")


def host_pattern(text: str) -> HostPattern:
    """`a.test`, `*.a.test` or `**.a.test`."""
    if text.startswith("**."):
        return HostPattern(kind="many", suffix=text[3:])
    if text.startswith("*."):
        return HostPattern(kind="one", suffix=text[2:])
    return HostPattern(kind="exact", suffix=text)


def op(
    name: str,
    host: str,
    paths: Sequence[str] = ("/**",),
    *,
    methods: Sequence[str] = ("GET",),
    effect: str = "read",
    port: int = 443,
    scheme: str = "https",
    **more: Any,
) -> Operation:
    """A hand-written operation."""
    return Operation(
        id=name,
        effect=effect,  # type: ignore[arg-type]
        hosts=(host_pattern(host),),
        port=port,
        scheme=scheme,  # type: ignore[arg-type]
        methods=tuple(methods),
        paths=tuple(parse_path(path) for path in paths),
        **more,
    )


def json_body(fields: dict[str, Any], bound: int = 4096) -> BodySpec:
    """`body: {json: ...}`."""
    return BodySpec(matcher="json_fields", bound=bound, params=fields)


def rule(name: str, *operations: Operation, **more: Any) -> Rule:
    """An allow rule; `action="deny"` and the like go into `more`."""
    return Rule(id=RuleId(name), action=more.pop("action", "allow"), operations=operations, **more)


def tunnel_rule(name: str, host: str, port: int = 443, **more: Any) -> Rule:
    """A rule with `tunnel: true`."""
    return Rule(
        id=RuleId(name),
        action="allow",
        operations=(),
        hosts=(host_pattern(host),),
        port=port,
        tunnel=True,
        tunnel_reason="a test",
        **more,
    )


def credential(name: str, host: str, env: str = "API_KEY", shape: str = "sk_{24}") -> CredentialDef:
    """A header credential for one host."""
    return CredentialDef(
        name=CredentialRef(name),
        kind="header",
        slot=Slot(where="header", name="x-api-key"),
        hosts=(Host(host),),
        owner="team",
        placeholder=PlaceholderSpec(env=env, shape=shape),
    )


def policy(
    *rules: Rule,
    digest: str = "d1",
    destinations: Iterable[DestinationDef] = (),
    credentials: Iterable[CredentialDef] = (),
) -> Policy:
    """One role `dev` with these rules."""
    return Policy(
        digest=digest,
        document={},
        roles={"dev": Role(name="dev", rules=rules)},
        destinations={destination.host.text: destination for destination in destinations},
        credentials={definition.name: definition for definition in credentials},
    )


def destination(origin: Origin, name: str | None = None) -> DestinationDef:
    """`destinations:` for a loopback origin: its address and CA, as a user would write them."""
    return DestinationDef(
        host=Host(name or origin.names[0]),
        port=origin.port,
        scheme="https" if origin.tls else "http",
        addresses=(ip_network(f"{origin.address}/32"),),
        ca_pem=origin.ca_pem if origin.tls else None,
    )


def basic(token: str = TOKEN) -> str:
    """The value of Proxy-Authorization as clients make it from a proxy URL."""
    return "Basic " + base64.b64encode(f"session:{token}".encode()).decode()


@dataclass
class Answer:
    """One HTTP answer as the client saw it."""

    status: int
    phrase: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return str(self.json["reason"])


@dataclass
class Client:
    """The sandbox's side of one connection."""

    stream: Any
    serving: asyncio.Task[None]
    raw: Any = None
    _buffer: bytearray = field(default_factory=bytearray)

    def send(self, data: bytes | str) -> None:
        self.stream.write(data.encode("latin-1") if isinstance(data, str) else data)

    async def answer(self, *, head: bool = False) -> Answer:
        """The next whole answer. `head`: it answers a HEAD."""
        raw = await self._until(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        _, status, phrase = lines[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        answer = Answer(int(status), phrase, headers)
        if head or answer.status < 200 or answer.status in (204, 304):
            return answer
        if "content-length" in headers:
            answer.body = await self._exactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(await self._until(b"\r\n"), 16):
                answer.body += (await self._exactly(size + 2))[:-2]
            await self._exactly(2)
        return answer

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        while data := await self.stream.receive():
            self._buffer += data
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    async def start_tls(self, context: ssl.SSLContext, name: str) -> None:
        """Go on inside TLS."""
        self.raw = self.stream
        self.stream.unread(bytes(self._buffer))
        self._buffer.clear()
        self.stream = await client_side(self.stream, context, name)

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            await self._more()
        end = self._buffer.index(mark) + len(mark)
        data = bytes(self._buffer[:end])
        del self._buffer[:end]
        return data

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _more(self) -> None:
        data = await self.stream.receive()
        assert data, f"the connection ended after {bytes(self._buffer)!r}"
        self._buffer += data


class NoDialer:
    """A dialer that counts what it was asked and never connects: "zero dial" is `asked == []`."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def via(self, target: Any) -> str:
        return ""

    async def dial(self, target: Any) -> Any:
        self.asked.append(target)
        raise AssertionError("dialled")


OPENED: list[House] = []
"""Every house of the running test; tests/unit/proxy/conftest.py closes them."""


async def close_houses() -> None:
    """Close what the houses of the running test left open."""
    while OPENED:
        await OPENED.pop().close()


class House:
    """A Room with everything around it. `names` maps host names to the loopback address of its origin."""

    def __init__(
        self,
        rules: Policy,
        *,
        entries: Iterable[Registered] | None = None,
        origins: Sequence[Origin] = (),
        dialer: Dialer | None = None,
        table: LimitTable | None = None,
        journal: Any = None,
        lookup_seconds: float = 3.0,
    ) -> None:
        OPENED.append(self)
        self._serving: list[asyncio.Task[None]] = []
        self.clock = ManualClock(NOW)
        self.journal = journal if journal is not None else MemoryJournal()
        self.broker = MemoryBroker()
        self.resolver = StaticResolver({name: [origin.address] for origin in origins for name in origin.names})
        self.faults: list[BaseException] = []
        self.dialer: Any = dialer or SocketDialer(
            Lookups(self.resolver, clock=self.clock.boot, seconds=lookup_seconds),
            ClientContexts(),
            AddressTable,
            interfaces=frozenset,
        )
        key = ec.generate_private_key(ec.SECP256R1())

        async def chain(host: Host, owner: tuple[str, str] | None) -> str:
            self.leaves.append(host.text)
            return _CA.mint(host, key.public_key(), NOW)

        self.leaves: list[str] = []
        contexts = ServerContexts(key, chain, now=self.clock.wall)
        self.directory = SnapshotDirectory(self.clock)
        self.boxes = [registered(sandbox("sb_one"), TOKEN), registered(sandbox("sb_two"), OTHER_TOKEN)]
        self.install(rules, entries)
        self.room = Room(
            Ports(
                clock=self.clock,
                random=CountingRandom(),
                journal=self.journal,
                broker=self.broker,
                dialer=self.dialer,
                leaves=contexts,
                refusal_leaves=contexts,
            ),
            self.directory,
            HelpTexts(ca_pem=_CA.root_pem, bundle_pem="bundle", environment={"SSL_CERT_FILE": "{bundle}"}),
            # This clock stands still: what is spaced by it would come later and later.
            table=table or LimitTable(latest_seconds=0.0),
            on_fault=self.faults.append,
        )

    def install(self, rules: Policy, entries: Iterable[Registered] | None = None) -> None:
        """Put a snapshot in force."""
        if entries is not None:
            self.boxes = list(entries)
        self.directory.install(snapshot(rules, self.boxes, self.directory.generation + 1))

    def connect(self, channel: Channel = SHARED) -> Client:
        """A new connection from a sandbox."""
        ours, theirs = MemoryStream.pair()
        serving = asyncio.ensure_future(self.room.front.serve(theirs, channel))
        self._serving.append(serving)
        return Client(ours, serving)

    async def close(self) -> None:
        """Cut everything and wait for it."""
        self.room.cut_all("shutting-down")
        await self.room.pool.close()
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0)

    async def tunnel(self, target: str, *, tls: str | None = None, alpn: Sequence[str] = ("http/1.1",)) -> Client:
        """An open CONNECT; with `tls` inside TLS for that name, trusting our CA."""
        client = self.connect()
        client.send(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nProxy-Authorization: {basic()}\r\n\r\n")
        answer = await client.answer()
        assert answer.status == 200, answer
        if tls is not None:
            context = ssl.create_default_context(cadata=_CA.root_pem)
            context.set_alpn_protocols(list(alpn))
            await client.start_tls(context, tls)
        return client

    def records(self, name: str) -> list[dict[str, Any]]:
        """The fields of all records of that name."""
        return [dict(event.fields) for event in self.journal.named(name)]


def get(target: str, host: str, *headers: str, method: str = "GET", token: str | None = TOKEN) -> str:
    """A request head; `token` None leaves Proxy-Authorization out."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    if token is not None:
        lines.append(f"Proxy-Authorization: {basic(token)}")
    return "\r\n".join([*lines, *headers]) + "\r\n\r\n"
