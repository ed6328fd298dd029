"""`Session`: one control stream of a worker or an executor, and the calls in flight on it.

Order: Hello first, once, of the kind that the supervisor said; then only messages of that kind's side. Anything else
raises, and channel.py closes the stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, assert_never

from broker.errors import BrokerError
from broker.vault.channel import ControlChannel
from broker.vault.fleet import Member
from broker.vault.opened import Opened, Refused
from broker.vault.records import Fields, who
from rules.decision import Permit
from rules.facts import Sandbox
from wire.control import (
    Ack,
    Checked,
    Claim,
    CutDone,
    Done,
    Echo,
    Frozen,
    GrantAsk,
    Granted,
    GrantsTaken,
    Hello,
    Keep,
    Kept,
    LeafRequest,
    Open,
    OpenRefused,
    ToVault,
    encode,
)
from wire.control import Opened as OpenedMessage

if TYPE_CHECKING:
    from broker.vault.service import Vault

MAX_IN_FLIGHT = 4096
"""Calls of one executor whose end was not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the vault remembers of a call whose material it released."""

    sandbox: Sandbox
    credential: str
    record: Fields
    permit: Permit


class Session:
    """One control stream and what belongs to it."""

    def __init__(self, vault: Vault, name: str, kind: str) -> None:
        self._vault = vault
        self.name = name
        self.kind = kind
        self.member: Member | None = None
        self._spki = b""
        self._open: dict[int, Call] = {}
        """By Open id: calls in flight."""
        self._done: OrderedDict[int, Call] = OrderedDict()
        """Calls that just ended: the report of an echo comes after the end."""
        self._renewable: OrderedDict[int, bytes] = OrderedDict()
        """By Open id: the digest of the statement that may be opened once more, because its answer said `renewable`."""
        self.channel = ControlChannel(self._on_message, self._on_lost)

    def _on_message(self, message: ToVault) -> None:
        if self.member is None and not isinstance(message, Hello):
            raise BrokerError("hello-first")
        match message:
            case Hello():
                self._hello(message)
            case Ack():
                assert self.member is not None
                self._vault.fleet.on_ack(self.member, message)
            case CutDone():
                assert self.member is not None
                self._vault.fleet.on_cut_done(self.member, message)
            case LeafRequest():
                self._only("worker")
                self._work(self._leaf(message))
            case Open():
                self._only("executor")
                if message.again and self._renewable.pop(message.again, b"") != sha256(message.sealed).digest():
                    raise BrokerError("not-renewable")
                self._work(self._answer(message))
            case Done():
                self._only("executor")
                call = self._open.pop(message.id, None)
                if call is not None:
                    self._done[message.id] = call
                if len(self._done) > MAX_IN_FLIGHT:
                    self._done.popitem(last=False)
            case Echo():
                self._only("executor")
                call = self._open.get(message.id) or self._done.get(message.id)
                if call is not None and call.credential == message.credential:
                    self._work(self._vault.echoed(call, message.hits))
            case GrantAsk():
                self._only("executor")
                self._work(self._grant(message))
            case Keep():
                self._only("executor")
                self._work(self._keep(message))
            case GrantsTaken():
                assert self.member is not None
                self._vault.fleet.on_taken(self.member, message.id)
            case Checked():
                self._only("worker")
                assert self.member is not None
                self.member.checked = (message.passed, self._vault.clock.wall())
            case Claim():
                self._only("worker")
                self._work(self._vault.desk.claim(message))
            case Frozen():
                self._only("worker")
                self._vault.frozen_by(message)
            case _:
                assert_never(message)

    def _hello(self, message: Hello) -> None:
        # The name is ours to give: a process that claims another's would be sent that one's key.
        if self.member is not None or message.kind != self.kind:
            raise BrokerError("hello-mismatch")
        self._spki = message.spki
        channel = self.channel
        self.member = Member(
            name=self.name, kind=self.kind, send=channel.send, close=channel.close, unsent=channel.unsent
        )
        self._vault.fleet.join(self.member)
        self._vault.welcome(self)

    def _only(self, kind: str) -> None:
        if self.kind != kind:
            raise BrokerError("message-of-another-kind")

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        self.channel.hold()

        async def held() -> None:
            try:
                await work
            finally:
                self.channel.release()

        self._vault.spawn(held())

    async def _leaf(self, message: LeafRequest) -> None:
        self.channel.send(await self._vault.leaf(message, self._spki, self.name))

    async def _answer(self, message: Open) -> None:
        if len(self._open) >= MAX_IN_FLIGHT:
            self.channel.send(encode(OpenRefused(id=message.id, reason="broker-unavailable")))
            return
        answer = await self._vault.opener.open_handoff(message.sealed, message.attested, again=message.again != 0)
        match answer:
            case Refused():
                self.channel.send(
                    encode(
                        OpenRefused(
                            id=message.id,
                            reason=answer.reason,
                            rule=answer.rule,
                            remedy=answer.remedy,
                            message=answer.message,
                            ticket=answer.ticket,
                            retry_after=answer.retry_after,
                        )
                    )
                )
            case Opened():
                permit, material = answer.permit, answer.material
                credential = "" if material is None else str(material.definition.name)
                if answer.renewable:
                    self._renewable[message.id] = sha256(message.sealed).digest()
                    if len(self._renewable) > MAX_IN_FLIGHT:
                        self._renewable.popitem(last=False)
                self._open[message.id] = Call(
                    sandbox=permit.sandbox,
                    credential=credential,
                    record=_record(answer, credential),
                    permit=permit,
                )
                self.channel.send(
                    encode(
                        OpenedMessage(
                            id=message.id,
                            rule=permit.rule,
                            operation=permit.operation,
                            policy_digest=answer.policy_digest,
                            credential=credential,
                            version="" if material is None else material.version,
                            owner="" if material is None else material.owner,
                            parts=()
                            if material is None
                            else tuple((part, secret.reveal()) for part, secret in material.parts.items()),
                            scrub=tuple(secret.reveal() for secret in answer.scrub),
                            renewable=answer.renewable,
                        )
                    )
                )
            case _:
                assert_never(answer)

    async def _grant(self, message: GrantAsk) -> None:
        """Where the answer to a call in flight leads. What is no call of this executor's is granted nothing."""
        call = self._open.get(message.call)
        made: tuple[bool, ...] = (False,) * len(message.addresses)
        if call is not None:
            made = await self._vault.grant(call, message.addresses, lambda: self._open.get(message.call) is call)
        self.channel.send(encode(Granted(id=message.id, made=made)))

    async def _keep(self, message: Keep) -> None:
        """Tokens that the answer to a call in flight brought."""
        call = self._open.get(message.call)
        made = await self._vault.keep(call, message.tokens, message.seconds) if call is not None else ()
        self.channel.send(encode(Kept(id=message.id, placeholders=made)))

    def _on_lost(self) -> None:
        for call in self._open.values():
            self._vault.spawn(self._vault.orphaned(call))
        self._open.clear()
        self._done.clear()
        self._vault.goodbye(self)


def _record(answer: Opened, credential: str) -> Fields:
    permit = answer.permit
    return {
        **who(permit.sandbox),
        "request_id": answer.request_id,
        "policy": answer.policy_digest,
        "rule": permit.rule,
        "operation": permit.operation,
        "credential": credential or None,
    }
