"""The entry point `broker`: a hand-off to a real executor and vault in this process."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Coroutine
from hashlib import sha256
from typing import Any

from broker.executor import Executor
from broker.vault.sandboxes import Created
from broker.vaultlink import VaultLink
from net.addresses import AddressTable
from net.contexts import ClientContexts
from net.dial import SocketDialer
from net.fdchannel import FdChannel, channel_pair
from net.framing import FrameStream
from net.pool import Pool
from net.resolve import Lookups
from net.stream import open_socket_stream
from proxy.brokerlink import BrokerUnavailable, HandoffBroken, HandoffRequest, SocketBrokerLink
from rules.decision import Permit
from rules.facts import FactsRefused, RequestFacts
from rules.names import InvalidName, parse_authority
from tests.support.answers import SERVED
from tests.support.attackdata import Case
from tests.support.attacker import Answer
from tests.support.attempts import (
    CONTROL,
    Form,
    Observed,
    form,
    host_names,
    refused,
    secret_names,
)
from tests.support.entry_decide import judged
from tests.support.entry_http1 import LoopThread, closing, of_events
from tests.support.ground import ANSWERS, CAN, CREDENTIALS, OTHER_CAN, Ground
from tests.support.resolver import StaticResolver
from tests.support.vaults import Rig
from wire.control import MAX_FROM_VAULT, Cut
from wire.frames import WireError
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


class Broker:
    """A worker with a genuine key that judged nothing: executor and vault have to."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._loop = ground.enter(LoopThread())
        self._tasks: list[asyncio.Task[Any]] = []
        self._loop.run(self._start())
        ground.enter(closing(lambda: self._loop.run(self._stop())))

    async def _start(self) -> None:
        folder = self._ground.folder / "broker"
        folder.mkdir()
        for name, pem in self._ground.ca_files.items():
            (folder / name).write_text(pem)
        # Vault, origins and attacker share an interpreter: the rig's own bound is too short here.
        self._rig = Rig(folder, policy=self._ground.whole_policy, credentials=CREDENTIALS, acknowledge_within=10.0)
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
        assert observed.answer is not None
        assert observed.answer.body == SERVED, observed

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
