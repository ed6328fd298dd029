"""A vault in a temporary folder, and a process that speaks the control protocol to it over a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from broker.admin.server import serve_admin
from broker.vault.boot import Boot
from broker.vault.clock import SystemClock
from broker.vault.sandboxes import Created, Request
from broker.vault.service import Vault
from broker.vault.start import open_vault
from tests.support.journal import MemoryJournal
from wire.control import (
    MAX_FROM_VAULT,
    Ack,
    Cut,
    CutDone,
    FromVault,
    Grants,
    GrantsTaken,
    Hello,
    ProcessKind,
    Snapshot,
    ToVault,
    Welcome,
    decode_from_vault,
    encode,
)
from wire.frames import FrameReader
from wire.handoff import BodyPlan, Evidence, Statement, seal

NOW = 1_800_000_000.0
SECRET = b"canary-orders-0123456789"
OTHER_SECRET = b"canary-other-9876543210"

CREDENTIALS = """\
version: 1
credentials:
  shop-orders:
    kind: header
    header: X-Api-Key
    secret: store:shop/orders
    hosts: [orders.shop.example]
    owner: team-orders
    placeholder: {env: SHOP_API_KEY, shape: "sk_live_{24}"}
  shop-stock:
    kind: bearer
    secret: store:shop/stock
    hosts: [orders.shop.example]
    owner: team-stock
    placeholder: {env: STOCK_TOKEN, shape: "st_{32}"}
"""

POLICY = """\
version: 1
roles:
  agent:
    boundary: {external: tests, reason: the tests confine nothing}
    allow:
      - name: orders.read
        host: orders.shop.example
        methods: [GET]
        paths: ["/v1/orders/{id}"]
        credential: shop-orders
        limits: {requests: 3/minute}
      - name: stock.read
        host: orders.shop.example
        methods: [GET]
        paths: ["/v1/stock/{id}"]
        credential: shop-stock
      - name: release
        host: orders.shop.example
        methods: [POST]
        paths: [/release]
        credential: shop-orders
        approval: {from: release-managers}
  launched:
    allow:
      - name: orders.read
        host: orders.shop.example
        methods: [GET]
        paths: ["/v1/orders/{id}"]
        credential: shop-orders
      - {name: docs, host: docs.shop.example, methods: [GET], paths: ["/**"]}
  idle:
    allow:
      - name: docs
        host: docs.shop.example
        methods: [GET]
        paths: ["/**"]
tests:
  - {role: agent, allow: "GET https://orders.shop.example/v1/orders/7", rule: orders.read}
  - {role: agent, deny: "POST https://orders.shop.example/v1/orders", reason: no-rule}
"""


class ManualClock(SystemClock):
    """The vault's clock, moved by hand. `set_back` is a machine clock behind the floor."""

    def __init__(self) -> None:
        self.now = NOW
        self.since_boot = 1000.0
        self.set_back = False
        super().__init__(NOW)

    def wall(self) -> float:
        return self.now

    def boot(self) -> float:
        return self.since_boot

    def behind(self) -> bool:
        return self.set_back

    def machine(self) -> float:
        return self.now

    def jump(self) -> float:
        return 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.since_boot += seconds


class Rig:
    """A started vault with its journal, clock and files."""

    def __init__(
        self,
        directory: Path,
        *,
        write: bool = True,
        policy: str = POLICY,
        credentials: str = CREDENTIALS,
        **boot: object,
    ) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.state.mkdir(0o700, exist_ok=True)
        self.policy_path = directory / "policy.yaml"
        self.credentials_path = directory / "credentials.yaml"
        self.key_path = directory / "store.key"
        for path, text in (
            (self.policy_path, policy),
            (self.credentials_path, credentials),
            (self.key_path, "11" * 32),
        ):
            if write and not path.exists():
                path.write_text(text)
                path.chmod(0o600)
        self.journal = MemoryJournal()
        self.clock = ManualClock()
        values: dict[str, object] = {
            "state_dir": str(self.state),
            "policy_path": str(self.policy_path),
            "credentials_path": str(self.credentials_path),
            "key_file": str(self.key_path),
            "admin_path": str(directory / "admin.sock"),
            "auditor_path": str(directory / "none.sock"),
            "digest_key": b"d" * 32,
            "acknowledge_within": 0.2,
            **boot,
        }
        self.boot = Boot(**values)  # type: ignore[arg-type]  # a table of keyword arguments
        self.vault: Vault

    async def start(self, *, secrets: bool = True) -> Rig:
        """Open and start; with `secrets` the two of CREDENTIALS are in the store."""
        self.vault = open_vault(self.boot, self.journal)
        self.vault.clock = self.clock
        vault = self.vault
        for holder in (vault.opener, vault.desk, vault.grants, vault.tokens, vault._leaves, vault.supply):
            holder._clock = self.clock
        await self.vault.start()
        if secrets and not self.vault.desk.secrets():
            await self.vault.desk.add_secret("shop/orders", SECRET, owner="team-orders", scrub=True, actor="test")
            await self.vault.desk.add_secret("shop/stock", OTHER_SECRET, owner="team-stock", scrub=True, actor="test")
        return self

    async def stop(self) -> None:
        await self.vault._close()

    async def sandbox(self, role: str = "agent", **changes: object) -> Created:
        values: dict[str, object] = {
            "tenant": "default",
            "role": role,
            "ttl": 600,
            "owner": "o",
            "agent": "a",
            **changes,
        }
        created, _ = await self.vault.desk.create(Request(**values), "test")  # type: ignore[arg-type]
        return created

    async def process(self, kind: ProcessKind, name: str, *, answers: bool = True) -> FakeProcess:
        """A connected process that said hello. `answers` False: it acknowledges nothing."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        await self.vault.adopt(theirs, name, kind)
        made = FakeProcess(kind, name, answers=answers)
        ours.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: made, ours)
        made.say(Hello(kind=kind, name=name, spki=b""))
        await made.seen(lambda message: isinstance(message, Welcome))
        return made


class FakeProcess(asyncio.Protocol):
    """The process's end: keeps what the vault said, acknowledges when told to."""

    def __init__(self, kind: ProcessKind, name: str, *, answers: bool) -> None:
        self.kind = kind
        self.name = name
        self.answers = answers
        self.messages: list[FromVault] = []
        self.closed = asyncio.Event()
        self._reader = FrameReader(MAX_FROM_VAULT)
        self._news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            message = decode_from_vault(frame)
            self.messages.append(message)
            if self.answers and isinstance(message, Snapshot):
                self.say(Ack(generation=message.generation))
            if self.answers and isinstance(message, Cut):
                self.say(CutDone(id=message.id))
            if self.answers and isinstance(message, Grants):
                self.say(GrantsTaken(id=message.id))
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._news.set()

    def say(self, message: ToVault) -> None:
        self._transport.write(encode(message))

    def raw(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.abort()

    def named[M](self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    async def seen(self, wanted: Callable[[FromVault], bool]) -> FromVault:
        """Wait for a message; already received ones count."""
        async with asyncio.timeout(60):
            while True:
                for message in self.messages:
                    if wanted(message):
                        return message
                self._news.clear()
                await self._news.wait()

    @property
    def key(self) -> bytes:
        return self.named(Welcome)[0].key


def statement(rig: Rig, created: Created, **changes: object) -> Statement:
    """A statement that a sound worker would make for GET /v1/orders/7; `changes` make it something else."""
    active = rig.vault.desk.active()
    assert active is not None
    box = created.record.sandbox
    values: dict[str, object] = {
        "worker": "worker-1",
        "nonce": os.urandom(16),
        "issued_at": rig.clock.wall(),
        "request_id": "req_aaaaaaaaaaaaaaaaaaaa",
        "tenant": box.tenant,
        "sandbox": box.id,
        "epoch": box.epoch,
        "evidence": Evidence(token=created.token),
        "policy_digest": active.digest,
        "method": "GET",
        "scheme": "https",
        "host": "orders.shop.example",
        "port": 443,
        "target": "/v1/orders/7",
        "headers": (("Host", "orders.shop.example"), ("X-Api-Key", created.environment.get("SHOP_API_KEY", ""))),
        "body": BodyPlan(),
        "rule": "agent/orders.read",
        "operation": "agent/orders.read",
        "arguments": (("id", "7"),),
        "credential": "shop-orders",
        **changes,
    }
    return Statement(**values)  # type: ignore[arg-type]  # a table of keyword arguments


def sealed(worker: FakeProcess, made: Statement) -> bytes:
    return seal(made, worker.key)


__all__ = ["FakeProcess", "ManualClock", "Rig", "sealed", "serve_admin", "statement"]
