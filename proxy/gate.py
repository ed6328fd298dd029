"""The gate: one attempt in, one of four answers out, and nothing passes before it is written down.

    facts -> current sandbox and policy -> narrow -> decide -> bounds and budgets -> record (written) -> answer

    head(who, facts, seen)  -> Refuse | NeedsBody | Handoff | Forward
    body(waiting, body)     -> Refuse | Handoff | Forward
    tunnel(who, facts, seen)-> Refuse | Admitted        a CONNECT; nothing is dialled for an inspected one
    enter(admitted, seen)   -> Refuse | Tunnelled       the intent of an uninspected tunnel
    refuse(code, ...)       -> Refuse                   what front door, lanes and limits refuse themselves
    done(passage, outcome)                              always, once per Forward, Handoff and Tunnelled

Rules:
1. Any exception, and any deadline missed in policy, directory or journal, is a Refuse (I09). Upstream saw nothing.
2. An intent is written before Forward, Handoff or Tunnelled is returned (I21); without it: audit-unavailable.
3. A refusal is one record. A passage is one intent and one outcome, also when its lane dies or the worker drains
   (`abandon`). A hand-off is one `request.handoff`; its outcome is the broker's (RULINGS 9.1).
4. Every verdict is made under one snapshot (I27), on the sandbox as that snapshot knows it.
5. No lane's types come in here, and no opinion is elsewhere: a lane does what the answer says.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Final, assert_never

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from net.aside import Aside, Busy
from proxy import records
from proxy.identity import Identified, current
from proxy.limits import BodyShare, Budgets, HeldBodies, LimitTable, RefusalPace, Spaced
from proxy.ports import Channel, Clock, Directory, DirectoryUnavailable, RandomBytes, Registered, Snapshot
from proxy.recent import RecentRefusals, RefusalNote
from proxy.records import Outcome, Seen
from rules import decision as ruling
from rules.decide import decide_granted_tunnel, decide_request, decide_tunnel, decide_with_grant
from rules.decision import Decision, Denied, Held, Permit, TunnelDecision, TunnelPermit
from rules.facts import RequestFacts, Sandbox, TunnelFacts
from rules.matching import match_path
from rules.names import OWN_NAME, RequestId
from rules.narrowing import narrowed
from rules.operations.jsonrpc import request_id_of
from rules.paths import CanonicalPath
from rules.placeholders import find_in_head
from rules.policy import CredentialDef, DestinationDef, PathPattern, Policy
from rules.slots import fits, in_body, in_head
from wire.heads import strip_never_forwarded

JOURNAL_SECONDS: Final = 2.5
"""A little over the journal's own deadline (RULINGS 9.1), for a journal that forgets it."""
DECIDE_SECONDS: Final = 5.0
"""For verdicts on big bodies, which are made in a thread (RULINGS 3.5)."""
THREAD_BODY_BYTES: Final = 2 * 1024
"""Bodies of a few lines are judged at once; a hostile kilobyte takes a millisecond (RULINGS 3.5 asks for 256 KiB)."""
HELD_RETRY_SECONDS: Final = 30

DecideRequest = Callable[[Policy, Sandbox, RequestFacts, float], Decision]
DecideTunnel = Callable[[Policy, Sandbox, TunnelFacts, float], TunnelDecision]


# --- the answers, the safe one first -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """No. Already recorded, except where the record is what failed. `native` is the shape to tell it in."""

    request_id: RequestId
    reason: str
    rule: str = ""
    remedy: str = ""
    message: str = ""
    ticket: str = ""
    retry_after: int = 0
    native: str = "problem"
    reply_to: str | int | None = None
    """The id of the JSON-RPC request, where that is the shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsBody:
    """Not yet: read at most `bound` bytes of body and ask `body`. More bytes: refuse `body-not-judged`.

    With `prefix` more bytes are fine: ask with the first `bound` of them, and stream all of them if it passes.
    """

    request_id: RequestId
    bound: int
    prefix: bool = False
    who: Identified
    facts: RequestFacts
    seen: Seen
    started: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    """What every yes holds. `dropped` are lower-case names of headers that must not go on."""

    request_id: RequestId
    who: Identified
    sandbox: Sandbox
    facts: RequestFacts
    permit: Permit
    policy_digest: str
    dropped: frozenset[str]
    seen: Seen
    started: float
    route: DestinationDef | None = None
    """What `destinations:` says of the host, under the same policy as the permit."""
    native: str = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff(_Passage):
    """Yes, through the broker, which decides again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(_Passage):
    """Yes: plain allowed traffic to `permit.destination`, through the dialer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The tunnel may exist. Nothing was dialled or recorded yet."""

    request_id: RequestId
    who: Identified
    sandbox: Sandbox
    facts: TunnelFacts
    permit: TunnelPermit
    policy_digest: str
    seen: Seen
    started: float
    route: DestinationDef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunnelled:
    """The intent of an uninspected tunnel is written: dial and relay."""

    admitted: Admitted
    seen: Seen

    @property
    def request_id(self) -> RequestId:
        """The tunnel's id, shared by its records."""
        return self.admitted.request_id


Verdict = Refuse | NeedsBody | Handoff | Forward
Passage = Forward | Handoff | Tunnelled


@dataclass(frozen=True, slots=True, kw_only=True)
class _No:
    """A refusal before it is recorded."""

    reason: str
    rule: str = ""
    remedy: str = ""
    message: str = ""
    ticket: str = ""
    retry_after: int = 0
    quiet: bool = False
    approval: str = ""
    operation: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    digest: str = ""
    native: str = "problem"


_Tunnel = tuple[TunnelPermit, str, DestinationDef | None]
"""Permit, policy digest, what `destinations:` says of the host."""


@dataclass(slots=True)
class _Judged:
    """What thinking found: the snapshot and the sandbox as it knows it, beside the verdict itself."""

    verdict: _No | ruling.NeedsBody | Permit
    sandbox: Sandbox
    facts: RequestFacts
    """What was judged, and may leave: the facts that were given, or what is granted of them (decision 13)."""
    digest: str = ""
    native: str = "problem"
    route: DestinationDef | None = None


class Gate:
    """One per worker. Its collaborators are ports; none of them can open it by failing."""

    def __init__(
        self,
        *,
        directory: Directory,
        journal: Journal,
        clock: Clock,
        random: RandomBytes,
        budgets: Budgets,
        recent: RecentRefusals,
        table: LimitTable,
        decide: DecideRequest = decide_request,
        decide_connect: DecideTunnel = decide_tunnel,
        journal_seconds: float = JOURNAL_SECONDS,
        decide_seconds: float = DECIDE_SECONDS,
        judging: Aside | None = None,
        pace: RefusalPace | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`judging` is where bodies are judged; by default threads of this gate's own.

        `pace` says who is frozen; who is refused too often is answered late, after `sleep`.
        """
        self._sleep = sleep
        self._refused = Spaced(table, clock)
        self._pace = pace or RefusalPace(table, clock)
        self._judging = judging or Aside("judging")
        self._directory = directory
        self._journal = journal
        self._clock = clock
        self._random = random
        self._budgets = budgets
        self._recent = recent
        self._table = table
        self._held = HeldBodies(table)
        self._decide = decide
        self._decide_connect = decide_connect
        self._journal_seconds = journal_seconds
        self._decide_seconds = decide_seconds
        self._open: dict[RequestId, tuple[Passage, records.Fields]] = {}
        """What is owed an outcome, with the fields of its intent."""
        self._finishing: set[asyncio.Task[None]] = set()
        self._finished = asyncio.Event()
        self.lost_outcomes = 0
        """Outcomes that could not be written; status shows it."""

    # --- requests ---

    async def head(self, who: Identified, facts: RequestFacts, seen: Seen) -> Verdict:
        """Judge a request at header time. Never raises but CancelledError."""
        return await self._pass(self.new_id(), who, facts, seen, self._clock.boot())

    async def body(self, waiting: NeedsBody, body: bytes, *, partial: bool = False) -> Refuse | Handoff | Forward:
        """Judge the same request with its body, or with its beginning (`partial`). Never raises but CancelledError."""
        facts = replace(waiting.facts, body=body, partial=partial)
        verdict = await self._pass(waiting.request_id, waiting.who, facts, waiting.seen, waiting.started)
        if isinstance(verdict, NeedsBody):
            return await self.refuse_waiting(waiting, "internal-error")
        return verdict

    def body_share(self, who: Identified) -> BodyShare:
        """What a request of `who` may hold in memory: the lane asks for each piece, and closes it with the request."""
        return self._held.share(who.sandbox)

    async def aside[T](self, who: Identified, work: Callable[[], T]) -> T:
        """What `work` returns, in the threads that judge. Raises Busy, and TimeoutError where that takes too long."""
        return await self._judging.run((who.sandbox.tenant, who.sandbox.id), work, self._decide_seconds)

    async def refuse_waiting(self, waiting: NeedsBody, reason: str) -> Refuse:
        """The body did not come, or not within its bound. Same request id, one record."""
        return await self.refuse(
            reason,
            who=waiting.who,
            facts=waiting.facts,
            seen=waiting.seen,
            request_id=waiting.request_id,
        )

    async def _pass(
        self, request_id: RequestId, who: Identified, facts: RequestFacts, seen: Seen, started: float
    ) -> Verdict:
        judged = await self._think(request_id, who, facts)
        verdict, facts = judged.verdict, judged.facts
        match verdict:
            case _No():
                return await self._no(request_id, verdict, judged.sandbox, who.channel, facts, seen)
            case ruling.NeedsBody():
                return NeedsBody(
                    request_id=request_id,
                    bound=verdict.bound,
                    prefix=verdict.prefix,
                    who=who,
                    facts=facts,
                    seen=seen,
                    started=started,
                )
            case Permit():
                pass
            case _:
                assert_never(verdict)
        make = Handoff if verdict.credential is not None or verdict.needs_state else Forward
        passage: Handoff | Forward = make(
            request_id=request_id,
            who=who,
            sandbox=judged.sandbox,
            facts=facts,
            permit=verdict,
            policy_digest=judged.digest,
            dropped=dropped_headers(facts, verdict),
            seen=seen,
            started=started,
            route=judged.route,
            native=judged.native,
        )
        name = "request.handoff" if isinstance(passage, Handoff) else "request.intent"
        refused = await self._record_intent(passage, name)
        if refused is not None:
            return await self._no(request_id, refused, judged.sandbox, who.channel, facts, seen)
        return passage

    async def _think(self, request_id: RequestId, who: Identified, facts: RequestFacts) -> _Judged:
        """Everything that only looks: no record, no byte. Every failure becomes a _No here."""
        sandbox = who.sandbox
        digest = ""
        native = "problem"
        try:
            snapshot = self._directory.snapshot()
            digest = snapshot.policy.digest
            now = self._clock.wall()
            registered = current(who, snapshot, now)
            if registered is None:
                gone = _No(reason="sandbox-ended", digest=digest)
                return _Judged(verdict=gone, sandbox=sandbox, facts=facts, digest=digest)
            sandbox = registered.sandbox
            if self._pace.frozen((sandbox.tenant, sandbox.id)):
                frozen = _No(reason="limit-reached", digest=digest)
                return _Judged(verdict=frozen, sandbox=sandbox, facts=facts, digest=digest)
            native = native_shape(snapshot.policy, sandbox, facts)
            facts = narrowed(snapshot.policy, sandbox, facts, now)
            answer = await self._decision(snapshot, sandbox, facts, now)
            verdict = self._bounded(request_id, snapshot, registered, answer, facts)
            if isinstance(verdict, _No):
                verdict = replace(verdict, digest=digest, native=native)
            route = snapshot.policy.destinations.get(facts.destination.host.text)
            return _Judged(verdict=verdict, sandbox=sandbox, facts=facts, digest=digest, native=native, route=route)
        except DirectoryUnavailable:
            reason = "policy-unavailable"
        except TimeoutError:
            reason = "policy-unavailable"
        except Busy:
            reason = "too-many-requests"
        except Exception:  # whatever went wrong while judging is a denial (I09)
            reason = "internal-error"
        verdict = _No(reason=reason, digest=digest, native=native)
        return _Judged(verdict=verdict, sandbox=sandbox, facts=facts, digest=digest, native=native)

    async def _decision(self, snapshot: Snapshot, sandbox: Sandbox, facts: RequestFacts, now: float) -> Decision:
        policy = snapshot.policy
        grant = snapshot.grants.find((sandbox.tenant, sandbox.id), facts)
        if grant is not None and not isinstance(facts.body, bytes):
            return decide_with_grant(policy, sandbox, facts, grant, now)
        if isinstance(facts.body, bytes) and len(facts.body) > THREAD_BODY_BYTES:
            owner = (sandbox.tenant, sandbox.id)
            work = partial(self._decide, policy, sandbox, facts, now)
            return await self._judging.run(owner, work, self._decide_seconds)
        return self._decide(policy, sandbox, facts, now)

    def _bounded(
        self, request_id: RequestId, snapshot: Snapshot, registered: Registered, answer: Decision, facts: RequestFacts
    ) -> _No | ruling.NeedsBody | Permit:
        """Turn the decision into a verdict, with the bounds that only the gate can check."""
        match answer:
            case Denied():
                return _No(
                    reason=answer.reason,
                    rule=answer.rule or "",
                    remedy=answer.remedy,
                    message=answer.message,
                    quiet=answer.quiet,
                    arguments=answer.arguments,
                )
            case Held():
                return _No(
                    reason="approval-required",
                    rule=answer.rule,
                    ticket=request_id,
                    retry_after=HELD_RETRY_SECONDS,
                    approval=answer.approval,
                    operation=answer.operation,
                    arguments=answer.arguments,
                )
            case ruling.NeedsBody():
                if facts.body is not None:
                    return _No(reason="body-not-judged")
                if not facts.has_body:
                    # Nothing will come that could state the operation.
                    return ruling.NeedsBody(bound=0)
                return answer
            case Permit():
                return self._checked(snapshot, registered, answer, facts)
            case _:
                assert_never(answer)

    def _checked(self, snapshot: Snapshot, registered: Registered, permit: Permit, facts: RequestFacts) -> _No | Permit:
        rule = permit.rule
        if permit.credential is not None:
            definition = snapshot.policy.credentials.get(permit.credential)
            if definition is None:
                return _No(reason="internal-error", rule=rule)
            # Whose a captured token's is, only the vault knows.
            if not permit.takes and not own_placeholder(definition, registered, facts):
                return _No(reason="placeholder-misuse", rule=rule)
        kept = permit.grant.credential if permit.grant and not permit.grant.takes else None
        if kept and not own_placeholder(snapshot.policy.credentials[kept], registered, facts):
            return _No(reason="placeholder-misuse", rule=rule)  # it is dropped, and not even so another's
        dropped = dropped_headers(facts, permit)
        size = sum(len(name) + len(value) + 4 for name, value in facts.headers if name not in dropped)
        if size > self._table.forwarded_header_bytes:
            return _No(reason="head-too-large", rule=rule)
        length = declared_length(facts)
        bound = permit.restrictions.request_bytes
        if bound is not None and length > bound:
            return _No(reason="body-too-large", rule=rule)
        if permit.grant is not None:
            return permit  # nothing of the address is the sandbox's own; the vault counts the uses
        over = self._budgets.charge(snapshot.policy, permit, facts)
        if over is not None:
            return _No(reason=over, rule=rule)
        if length and not self._budgets.upload(permit, length):
            return _No(reason="limit-reached", rule=rule)
        return permit

    def reserve_upload(self, passage: Forward | Handoff) -> int | None:
        """Take what is left for a body of unknown length; None: this operation's uploads are not budgeted."""
        return self._budgets.reserve_upload(passage.permit)

    def refund_upload(self, passage: Forward | Handoff, count: int) -> None:
        """Give back what a reservation did not use."""
        self._budgets.refund_upload(passage.permit, count)

    def charge_upload(self, passage: Forward | Handoff, count: int) -> bool:
        """Charge bytes of a body whose length was not declared; False: cut it (`limit-reached`)."""
        return self._budgets.upload(passage.permit, count)

    def still_allowed(self, passage: Forward | Handoff, snapshot: Snapshot) -> bool:
        """Judge a running exchange anew under `snapshot` (I27). Anything but the same permit is a no."""
        registered = current(passage.who, snapshot, self._clock.wall())
        if registered is None:
            return False
        now, used = self._clock.wall(), passage.permit.grant
        if used is not None:  # one that is over by now was not when it was used; the broker has the last word
            used = replace(used, expires_at=now + 1)
            answer: Decision = decide_with_grant(snapshot.policy, registered.sandbox, passage.facts, used, now)
        else:
            answer = self._decide(snapshot.policy, registered.sandbox, passage.facts, now)
        return (
            isinstance(answer, Permit)
            and answer.destination == passage.permit.destination
            and answer.credential == passage.permit.credential
            and answer.restrictions == passage.permit.restrictions
        )

    # --- tunnels ---

    async def tunnel(self, who: Identified, facts: TunnelFacts, seen: Seen) -> Refuse | Admitted:
        """Judge a CONNECT. Never raises but CancelledError."""
        request_id, started = self.new_id(), self._clock.boot()
        verdict = self._think_tunnel(who, facts)
        if isinstance(verdict, _No):
            return await self._no(request_id, verdict, who.sandbox, who.channel, None, seen, facts)
        permit, digest, route = verdict
        return Admitted(
            request_id=request_id,
            who=who,
            sandbox=permit.sandbox,
            facts=facts,
            permit=permit,
            policy_digest=digest,
            seen=seen,
            started=started,
            route=route,
        )

    async def enter(self, admitted: Admitted, seen: Seen) -> Refuse | Tunnelled:
        """Write the intent of an uninspected tunnel, once its server name was seen. Judged anew: time has passed."""
        verdict = self._think_tunnel(admitted.who, admitted.facts)
        if not isinstance(verdict, _No) and verdict[0].inspected:
            verdict = _No(reason="policy-changing", digest=verdict[1])
        if not isinstance(verdict, _No):
            passage = Tunnelled(
                admitted=replace(admitted, permit=verdict[0], policy_digest=verdict[1], route=verdict[2]), seen=seen
            )
            refused = await self._record_intent(passage, "tunnel.intent")
            if refused is None:
                return passage
            verdict = refused
        who = admitted.who
        return await self._no(admitted.request_id, verdict, who.sandbox, who.channel, None, seen, admitted.facts)

    def only_for_a_stub(self, who: Identified, facts: TunnelFacts) -> bool:
        """Whether only a stub endpoint can be meant by this CONNECT: no rule opens it, or none that looks inside.

        A sandbox that ended or is frozen is refused as everywhere.
        """
        verdict = self._think_tunnel(who, facts)
        if isinstance(verdict, _No):
            return verdict.reason not in ("limit-reached", "sandbox-ended", "policy-unavailable", "internal-error")
        return not verdict[0].inspected

    def tunnel_still_allowed(self, admitted: Admitted, snapshot: Snapshot) -> bool:
        """Judge an open CONNECT anew under `snapshot`; a change of lane is a no."""
        registered = current(admitted.who, snapshot, self._clock.wall())
        if registered is None:
            return False
        answer = self._tunnel_decision(snapshot, registered.sandbox, admitted.facts, self._clock.wall())
        return (
            isinstance(answer, TunnelPermit)
            and answer.inspected == admitted.permit.inspected
            and answer.clear_text == admitted.permit.clear_text
            and answer.protocol == admitted.permit.protocol
        )

    def _think_tunnel(self, who: Identified, facts: TunnelFacts) -> _No | _Tunnel:
        digest = ""
        try:
            snapshot = self._directory.snapshot()
            digest = snapshot.policy.digest
            now = self._clock.wall()
            registered = current(who, snapshot, now)
            if registered is None:
                return _No(reason="sandbox-ended", digest=digest)
            if self._pace.frozen((registered.sandbox.tenant, registered.sandbox.id)):
                return _No(reason="limit-reached", digest=digest)
            answer = self._tunnel_decision(snapshot, registered.sandbox, facts, now)
            match answer:
                case Denied():
                    return _No(
                        reason=answer.reason,
                        rule=answer.rule or "",
                        remedy=answer.remedy,
                        message=answer.message,
                        quiet=answer.quiet,
                        digest=digest,
                    )
                case TunnelPermit():
                    return answer, digest, snapshot.policy.destinations.get(facts.host.text)
                case _:
                    assert_never(answer)
        except DirectoryUnavailable:
            return _No(reason="policy-unavailable", digest=digest)
        except Exception:  # whatever went wrong while judging is a denial (I09)
            return _No(reason="internal-error", digest=digest)

    def _tunnel_decision(self, snapshot: Snapshot, sandbox: Sandbox, facts: TunnelFacts, now: float) -> TunnelDecision:
        answer = self._decide_connect(snapshot.policy, sandbox, facts, now)
        if isinstance(answer, Denied) and answer.reason == "no-rule":
            grant = snapshot.grants.at((sandbox.tenant, sandbox.id), facts.host, facts.port, now)
            if grant is not None:
                return decide_granted_tunnel(snapshot.policy, sandbox, facts, grant, now)
        return answer

    # --- refusals ---

    async def refuse(
        self,
        reason: str,
        *,
        channel: Channel | None = None,
        who: Identified | None = None,
        sandbox: Sandbox | None = None,
        facts: RequestFacts | None = None,
        tunnel: TunnelFacts | None = None,
        seen: Seen | None = None,
        detail: str = "",
        event: str = "request.refused",
        request_id: RequestId | None = None,
    ) -> Refuse:
        """Record and return a refusal that was decided before or beside policy. `detail` is a fixed sentence of ours.

        Where the record cannot be written the answer is audit-unavailable. Never raises but CancelledError.
        """
        return await self._no(
            request_id or self.new_id(),
            _No(reason=reason),
            who.sandbox if who else sandbox,
            who.channel if who else channel,
            facts,
            seen or Seen(),
            tunnel,
            event=event,
            detail=detail,
        )

    async def note(self, event: str, who: Identified, seen: Seen, *, reason: str, detail: str = "") -> None:
        """Write a connection event that is no refusal by us (client.distrusts-ca). Never raises but CancelledError."""
        fields: records.Fields = {"reason": reason, "detail": detail or None, "channel": who.channel.listener}
        try:
            await self._write(records.event(event, records.who(who.sandbox), records.seen(seen), fields))
        except AuditUnavailable:
            self.lost_outcomes += 1

    async def stubbed(
        self, who: Identified, facts: RequestFacts, seen: Seen, credential: str, stub: str, status: int
    ) -> bool:
        """Put on record that a stub endpoint answers; False where that cannot be written.

        Never raises but CancelledError.
        """
        fields: records.Fields = {
            "request_id": self.new_id(),
            "credential": credential,
            "action": stub,
            "status": status,
            "channel": who.channel.listener,
        }
        try:
            await self._write(
                records.event(
                    "stub.answered", records.who(who.sandbox), records.attempt(facts), records.seen(seen), fields
                )
            )
        except AuditUnavailable:
            return False
        return True

    async def wish(self, who: Identified, note: RefusalNote) -> bool:
        """Put on record that a sandbox asks for what it was refused; False where that cannot be written.

        Nothing is granted, and nothing of the sandbox's own words is in it. Never raises but CancelledError.
        """
        attempt: records.Fields = {
            "request_id": note.request_id,
            "reason": note.reason,
            "rule": note.rule or None,
            "method": note.method or None,
            "scheme": note.scheme or None,
            "host": note.host or None,
            "port": note.port or None,
            "path": note.path or None,
        }
        try:
            await self._write(records.event("access.requested", records.who(who.sandbox), attempt))
        except AuditUnavailable:
            return False
        return True

    async def _no(
        self,
        request_id: RequestId,
        no: _No,
        sandbox: Sandbox | None,
        channel: Channel | None,
        facts: RequestFacts | None,
        seen: Seen,
        tunnel: TunnelFacts | None = None,
        *,
        event: str = "request.refused",
        detail: str = "",
    ) -> Refuse:
        native = no.native
        if no.approval:
            event = "approval.requested"
        fields: records.Fields = {
            "request_id": request_id,
            "decision": "hold" if no.approval else "deny",
            "reason": no.reason,
            "rule": no.rule or None,
            "ticket": no.ticket or None,
            "approval": no.approval or None,
            "operation": no.operation or None,
            "quiet": True if no.quiet else None,
            "policy": no.digest or None,
            "detail": detail or None,
            "arguments": [f"{name}={records.mask(value)}" for name, value in no.arguments] or None,
            "channel": channel.listener if channel else None,
            "peer": (channel.peer or None) if channel else None,
        }
        if tunnel is not None:
            fields |= {"host": tunnel.host.text, "port": tunnel.port, "method": "CONNECT"}
        try:
            parts = (records.who(sandbox), records.attempt(facts) if facts else {}, records.seen(seen), fields)
            await self._write(records.event(event, *parts))
        except AuditUnavailable:
            no = _No(reason="audit-unavailable", native=native)
        except Exception:  # a record that cannot even be made is no reason to answer otherwise than no
            no = _No(reason="internal-error", native=native)
        refuse = Refuse(
            request_id=request_id,
            reason=no.reason,
            rule=no.rule,
            remedy=no.remedy,
            message=no.message,
            ticket=no.ticket,
            retry_after=no.retry_after,
            native=native,
            reply_to=reply_to(native, facts),
        )
        if sandbox is not None:
            self._remember(sandbox, refuse, facts, tunnel)
            if event == "request.refused" and (late := self._refused.count((sandbox.tenant, sandbox.id))):
                await self._sleep(late)
        return refuse

    def failed(self, passage: Forward | Handoff | Tunnelled, reason: str) -> Refuse:
        """How to tell the client that a permitted request failed. Its record is the outcome: `done(error=reason)`."""
        facts = None if isinstance(passage, Tunnelled) else passage.facts
        sandbox = passage.admitted.sandbox if isinstance(passage, Tunnelled) else passage.sandbox
        native = "problem" if isinstance(passage, Tunnelled) else passage.native
        tunnel = passage.admitted.facts if isinstance(passage, Tunnelled) else None
        refuse = Refuse(request_id=passage.request_id, reason=reason, native=native, reply_to=reply_to(native, facts))
        self._remember(sandbox, refuse, facts, tunnel)
        return refuse

    def told_by_broker(self, passage: Handoff, refuse: Refuse) -> Refuse:
        """The broker refused and recorded it; remember it for `why`."""
        self._remember(passage.sandbox, refuse, passage.facts, None)
        return replace(refuse, native=passage.native)

    def _remember(
        self, sandbox: Sandbox, refuse: Refuse, facts: RequestFacts | None, tunnel: TunnelFacts | None
    ) -> None:
        destination = facts.destination if facts else None
        note = RefusalNote(
            request_id=refuse.request_id,
            at=self._clock.wall(),
            reason=refuse.reason,
            rule=refuse.rule,
            remedy=refuse.remedy,
            message=refuse.message,
            ticket=refuse.ticket,
            method=facts.method if facts else "CONNECT" if tunnel else "",
            scheme=destination.scheme if destination else "",
            host=destination.host.text if destination else tunnel.host.text if tunnel else "",
            port=destination.port if destination else tunnel.port if tunnel else 0,
            path=records.mask(facts.path.raw) if facts else "",
        )
        self._recent.note(sandbox.tenant, sandbox.id, note)

    # --- outcomes ---

    async def done(self, passage: Passage, outcome: Outcome) -> None:
        """The passage is over. Idempotent; survives the cancellation of its caller; never raises but CancelledError.

        For a Handoff the broker writes the outcome; only a failure before the broker took it is recorded here.
        """
        owed = self._open.pop(passage.request_id, None)
        if owed is None:
            return
        if outcome.status == 404:
            self._missed(owed[0])
        task = asyncio.ensure_future(self._finish(passage, owed[1], outcome))
        self._finishing.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    async def alarm(self, passage: Forward | Handoff) -> None:
        """A placeholder was seen in a body that no operation judges: on record beside the intent (RULINGS 4.4).

        Never raises but CancelledError.
        """
        owed = self._open.get(passage.request_id)
        if owed is None or passage.permit.restrictions.placeholders_inert:
            return
        fields: records.Fields = {**owed[1], "reason": "placeholder-misuse", "place": "body"}
        try:
            await self._write(records.event("placeholder.misused", fields))
        except AuditUnavailable:
            self.lost_outcomes += 1

    def missed(self, passage: Handoff) -> None:
        """The broker's answer to `passage`, which is still open, is a 404."""
        if (owed := self._open.get(passage.request_id)) is not None:
            self._missed(owed[0])

    def _missed(self, passage: Passage) -> None:
        """Count by the shape of the service, whatever shape this very client is answered in."""
        if not isinstance(passage, Tunnelled):
            self._budgets.missed(passage.permit, passage.native)

    async def settled(self, seconds: float) -> bool:
        """Wait at most `seconds` until no outcome is owed any more; False: some still is."""
        try:
            async with asyncio.timeout(seconds):
                while self._open or self._finishing:
                    self._finished.clear()
                    await self._finished.wait()
        except TimeoutError:
            return False
        return True

    async def abandon(self, error: str) -> int:
        """Write an outcome for every passage that is still open (drain, fault); return how many there were."""
        left = tuple(passage for passage, _ in self._open.values())
        for passage in left:
            await self.done(passage, Outcome(error=error))
        if self._finishing:
            await asyncio.wait(tuple(self._finishing), timeout=self._journal_seconds)
        return len(left)

    @property
    def open_passages(self) -> int:
        """Passages whose outcome is still to come."""
        return len(self._open)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._finishing.discard(task)
        self._finished.set()

    async def _finish(self, passage: Passage, fields: records.Fields, outcome: Outcome) -> None:
        try:
            match passage:
                case Handoff():
                    if not outcome.error:
                        return
                    fields = {**fields, "decision": "deny", "reason": outcome.error}
                    name = "request.refused"
                case Forward():
                    name = "request.outcome"
                case Tunnelled():
                    name = "tunnel.outcome"
                case _:
                    assert_never(passage)
            started = passage.admitted.started if isinstance(passage, Tunnelled) else passage.started
            duration = int((self._clock.boot() - started) * 1_000_000)
            await self._write(records.event(name, fields, records.outcome(outcome, max(duration, 0))))
        except Exception:  # nobody is left to tell; the count is shown by status
            self.lost_outcomes += 1

    async def _record_intent(self, passage: Passage, name: str) -> _No | None:
        """Write the intent. From the moment that it may have been written its outcome is owed."""
        try:
            fields = self._tunnel_fields(passage) if isinstance(passage, Tunnelled) else self._request_fields(passage)
        except Exception:  # a record that cannot be made is one that was not written
            return _No(reason="internal-error")
        self._open[passage.request_id] = (passage, fields)
        try:
            await self._write(records.event(name, fields))
        except asyncio.CancelledError:
            # It may have reached the log: an outcome follows, though the caller is gone.
            self._open.pop(passage.request_id, None)
            task = asyncio.ensure_future(self._finish(passage, fields, Outcome(error="cancelled")))
            self._finishing.add(task)
            task.add_done_callback(self._ended)
            raise
        except AuditUnavailable:
            self._open.pop(passage.request_id, None)
            return _No(reason="audit-unavailable")
        except Exception:  # a record that cannot be made is one that was not written
            self._open.pop(passage.request_id, None)
            return _No(reason="internal-error")
        return None

    async def _write(self, event: Event) -> None:
        try:
            async with asyncio.timeout(self._journal_seconds):
                await self._journal.append(event)
        except AuditUnavailable:
            raise
        except TimeoutError:
            raise AuditUnavailable("the journal did not answer in time") from None
        except Exception as error:
            raise AuditUnavailable("the journal failed") from error

    # --- helpers ---

    def new_id(self) -> RequestId:
        """A request id: `req_` and 20 characters, 100 random bits."""
        return RequestId("req_" + base64.b32encode(self._random(13)).decode("ascii")[:20].lower())

    def _definition(self, permit: Permit) -> CredentialDef | None:
        """The credential of a permit, as the policy in force has it."""
        try:
            policy = self._directory.snapshot().policy
        except DirectoryUnavailable:
            return None
        return None if permit.credential is None else policy.credentials.get(permit.credential)

    def _request_fields(self, passage: Forward | Handoff) -> records.Fields:
        permit = passage.permit
        used = self._definition(permit)
        fields: records.Fields = {
            "request_id": passage.request_id,
            "decision": "allow",
            "rule": permit.rule,
            "rules": list(permit.rules),
            "operation": permit.operation,
            "effect": permit.effect,
            "policy": passage.policy_digest,
            "credential": permit.credential,
            "grant": permit.grant.id if permit.grant else None,
            "arguments": [f"{name}={records.mask(value, used)}" for name, value in permit.arguments] or None,
            "dropped_headers": sorted({n for n, _ in passage.facts.headers} & passage.dropped) or None,
            "channel": passage.who.channel.listener,
            "peer": passage.who.channel.peer or None,
        }
        attempt = records.attempt(passage.facts, used)
        return {**records.who(passage.sandbox), **attempt, **records.seen(passage.seen), **fields}

    def _tunnel_fields(self, passage: Tunnelled) -> records.Fields:
        admitted = passage.admitted
        fields: records.Fields = {
            "request_id": admitted.request_id,
            "decision": "allow",
            "rule": admitted.permit.rule,
            "policy": admitted.policy_digest,
            "method": "CONNECT",
            "host": admitted.facts.host.text,
            "port": admitted.facts.port,
            "uninspected": True,
            "channel": admitted.who.channel.listener,
            "peer": admitted.who.channel.peer or None,
        }
        return {**records.who(admitted.sandbox), **records.seen(passage.seen), **fields}


# --- what may pass in a head (RULINGS 4.1, 4.3, 4.4) -------------------------------------------------------------


def dropped_headers(facts: RequestFacts, permit: Permit) -> frozenset[str]:
    """The lower-case names that do not go on: never forwarded, hop-by-hop, nominated, outside the allowlist.

    On a hand-off the broker applies the allowlist: it needs to see the slot. Framing fields, Expect and Host are
    the lane's and the engine's own business and are written anew there.
    """
    names = {name for name, _ in facts.headers}
    sent = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in facts.headers)
    kept = {name.decode("latin-1") for name, _ in strip_never_forwarded(sent)}
    allowed = permit.restrictions.request_headers if permit.credential is None else None
    if allowed is not None:
        kept &= allowed | {"host", "content-length", "expect"}
    return frozenset(names - kept)


def declared_length(facts: RequestFacts) -> int:
    """The Content-Length, 0 where none is declared (its form was checked by the head's parser)."""
    if isinstance(facts.body, bytes) and not facts.partial:
        return len(facts.body)
    values = facts.header("content-length")
    return int(values[0]) if len(values) == 1 and values[0].isdigit() else 0


def own_placeholder(definition: CredentialDef, registered: Registered, facts: RequestFacts) -> bool:
    """True unless a slot of the credential holds a placeholder that is not this sandbox's for this very credential.

    Unknown, foreign and ended ones look alike from outside (I13). An empty slot is fine: nothing is claimed.
    """
    found = find_in_head(facts)
    spots = in_head(definition, facts, found) if found else ()
    if spots is None:
        return False
    return fits(definition, (*spots, *(in_body(definition, facts) or ())), registered.placeholders)


def spoken_shape(native: str, facts: RequestFacts) -> str:
    """`native`, or what this very request's client reads.

    `lfs` for git-lfs; `git-push` for a whole push that asks for a report: of a failed status git shows the number only.
    """
    if any(value.startswith("application/vnd.git-lfs+json") for value in facts.header("accept")):
        return "lfs"
    pushes = native == "git" and facts.header("content-type") == ("application/x-git-receive-pack-request",)
    held = isinstance(facts.body, bytes) and not facts.partial and b"side-band-64k" in facts.body[:1024]
    return "git-push" if pushes and held else native


def native_shape(policy: Policy, sandbox: Sandbox, facts: RequestFacts) -> str:
    """The refusal shape of the service that the sandbox's role knows at this host."""
    host = facts.destination.host
    if host.text == OWN_NAME:
        return "problem"
    role = policy.roles.get(sandbox.role)
    here = [
        operation
        for rule in (role.rules_for(host) if role else ())
        for operation in rule.operations
        if operation.native != "problem" and any(pattern.matches(host) for pattern in operation.hosts)
    ]
    for operation in here:
        if any(match_path(pattern, facts.path) is not None for pattern in operation.paths):
            return spoken_shape(operation.native, facts)
    # git and GraphQL are some URLs among others of their host; elsewhere their clients are not the ones that ask. Where
    # one host serves several registries, each below a prefix, the nearest is meant; near none, what the client reads.
    others = [operation for operation in here if operation.native not in ("git", "graphql")]
    if len({operation.native for operation in others}) > 1:
        shared = [max((_shared(pattern, facts.path) for pattern in one.paths), default=0) for one in others]
        most = max(shared)
        others = [one for one, count in zip(others, shared, strict=True) if count == most]
    natives = {operation.native for operation in others}
    return natives.pop() if len(natives) == 1 else "problem"


def _shared(pattern: PathPattern, path: CanonicalPath) -> int:
    """How many segments `path` has in common with the beginning of `pattern`."""
    pairs = zip(pattern.segments, path.segments, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def reply_to(native: str, facts: RequestFacts | None) -> str | int | None:
    """The id that a refusal of this request answers, where its client speaks JSON-RPC and its body was read."""
    if native != "jsonrpc" or facts is None or not isinstance(facts.body, bytes):
        return None
    return request_id_of(facts.body)
