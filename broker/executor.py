"""One credentialed call, top to bottom. The procedure, tagged in `Executor._call`:

  1 statement    one sealed frame within 5 s, from a worker of this boot, fresh
  2 snapshot     one policy version and the sandbox as it is known here
  3 facts        built anew from the statement, as every entry point builds them
  4 body         where it was judged, whole or its beginning: read, its digest equal to the statement's
  5 decide       decide_request on our own policy; what the worker said is compared, never used
  6 open         the vault's last word, after its durable intent; the material of this one call comes with it
  7 apply        the kind's injection: every known auth slot removed, then ours set
  8 continue     the worker may send a streamed body
  9 send         dial or reuse, verified TLS for the name, exchange; redirects are answers, never followed
 10 shape        head allowlist, decoded, pruned, scrubbed as it streams; a WebSocket's messages likewise, both ways
 11 outcome      always recorded once 6 said yes; the material is dropped

Before 6 nothing is dialled and no secret is here. Whatever is raised anywhere is a refusal or an aborted answer, and
an outcome (I09, I21). Refusals up to 5 are recorded here, those of 6 by the vault.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final
from weakref import WeakValueDictionary

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.credentials import Outgoing, apply, inject
from broker.errors import BrokerError
from broker.handoffside import HandoffSide
from broker.headers import request_headers, spelled
from broker.leads import Leads
from broker.material import guard_other, guards_of, material
from broker.scrub import Guarded, Patterns, ScrubError
from broker.shaping import RESULT_SECONDS, Shaping, from_origin
from broker.vault.clock import Clock
from broker.vault.records import Fields, attempt, shown, who
from broker.vaultlink import ExecutorSnapshot, Vault, VaultUnavailable
from broker.websocket import CredentialedSocket, Waiting
from net.aside import Aside
from net.dial import DialError, DialTarget
from net.exchange import AnswerRefused, ExchangeResult, OutgoingRequest, exchange
from net.few import Busy, Few
from net.framing import FrameStream
from net.pool import Lease, Pool, PoolKey
from net.process import complain
from net.stream import StreamBroken
from net.trust import SYSTEM_TRUST, ClientProof, TrustKey
from net.turns import Share, Turns
from rules.answers import granted
from rules.arguments import pairs
from rules.captured import captured_form
from rules.decide import decide_request, decide_with_grant
from rules.decision import Decision, Denied, Held, NeedsBody, Permit
from rules.denials import readings, widened
from rules.facts import BodyAttested, FactsRefused, RequestFacts, Sandbox
from rules.grants import Grant, rule_of
from rules.matching import Matched, attestation, match_operation
from rules.names import Owner
from rules.policy import CredentialDef, DestinationDef, Policy
from rules.service import head_arguments
from wire.control import Cut, Done, Echo, Opened, OpenRefused
from wire.frames import Frame, WireError
from wire.handoff import (
    SELF_CHECK,
    SELF_CHECK_SEAL,
    SELF_CHECK_TENANT,
    AnswerAbort,
    Continue,
    FrameType,
    Refusal,
    Statement,
    check_fresh,
    claimed_worker,
    facts_of,
    open_sealed,
)
from wire.heads import CHUNKED, NO_BODY, Framing, HeadRefused, Length, ResponseHead

STATEMENT_SECONDS: Final = 5.0
BODY_SECONDS: Final = 30.0
"""Longest wait for a judged body: the worker has it already."""
JUDGED_BYTES: Final = 8 << 20
"""No operation judges more of a body than this, whatever its bound."""
THREAD_BODY_BYTES: Final = 2 * 1024
"""Larger bodies are judged in a thread: a hostile kilobyte takes a millisecond (RULINGS 3.5 asks for 256 KiB)."""
THREAD_SECRET_BYTES: Final = 1024
"""Larger scrub sets are compiled in a thread: they cost milliseconds."""
DECIDE_SECONDS: Final = 5.0
REJUDGING_SECONDS: Final = 1.0
"""For all calls together when the policy changed: what then remains is cut, well within the 2 s of RULINGS 9.5."""
RUNNING_OF_ONE: Final = 128
"""Calls of one sandbox at a time: a quarter of what an executor runs (broker/executor_process.py)."""
OPENING_OF_ONE: Final = 8
"""Calls of one sandbox that the vault is asked about at a time: it answers in order, and others wait behind them."""
UNAUTHORIZED: Final = 401
REFUSED_UPSTREAM: Final = "credential-refused"
"""Error class of a first attempt whose material the upstream refused."""
REUSED_METHODS: Final = frozenset({"GET", "HEAD"})
"""Only these go over a kept connection: it may be stale, and nothing else may be sent twice (RULINGS 9.7)."""


class _Refused(Exception):
    """Leaves the procedure with a refusal. `recorded`: the vault did that already."""

    def __init__(self, refusal: Refusal, record: Fields | None = None, *, recorded: bool = False) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal
        self.record: Fields = record or {}
        self.recorded = recorded


@dataclass(eq=False, slots=True, kw_only=True)
class _Call:
    """One running hand-off: what a cut is matched against."""

    task: asyncio.Task[None]
    tenant: str = ""
    sandbox: str = ""
    credential: str = ""
    digest: str = ""
    still: Callable[[Policy, Sandbox], Awaitable[bool]] | None = None
    """Whether another policy permits the same call in the same way; None until it was permitted."""
    cut_reason: str = ""
    so_far: Callable[[], _Ended] | None = None
    """What an upgraded call did until now, for the outcome of one that is cut."""
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Executor:
    """Runs hand-offs. One per process."""

    def __init__(
        self,
        *,
        vault: Vault,
        pool: Pool,
        journal: Journal,
        clock: Clock,
        random: Callable[[int], bytes] = secrets.token_bytes,
        running_of_one: int = RUNNING_OF_ONE,
        turns: Turns | None = None,
        judging: Aside | None = None,
    ) -> None:
        """`random` gives the masking keys of WebSocket frames."""
        self._turns = turns or Turns()
        self._judging = judging or Aside("judging", turns=self._turns)
        self._opening = Few(OPENING_OF_ONE)
        self._vault = vault
        self._pool = pool
        self._journal = journal
        self._clock = clock
        self._random = random
        self._running_of_one = running_of_one
        self._waiting = Waiting()
        self._calls: set[_Call] = set()
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self._calls)

    async def serve(self, frames: FrameStream) -> None:
        """Run the one hand-off of this socket and close it. Never raises but CancelledError."""
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task=task)
        self._calls.add(call)
        try:
            await self._serve(frames, call)
        except asyncio.CancelledError:
            if not call.cut_reason:
                raise
        finally:
            self._calls.discard(call)
            call.over.set()
            frames.abort()

    async def cut(self, message: Cut) -> int:
        """Close every call and kept connection that `message` matches; returns how many, after they are closed."""
        going_on = await self._going_on(message) if message.kind == "policy" else set()
        matching = [call for call in self._calls if _cuts(message, call) and call not in going_on]
        reason = "sandbox-ended" if message.kind == "sandbox" else "policy-changing"
        for call in matching:
            call.cut_reason = call.cut_reason or reason
            call.task.cancel()
        # A call that goes on keeps its connection; one that does not gives its own up as it ends.
        closed = self._pool.cut(lambda key, address: _cuts_connection(message, key), idle_only=bool(going_on))
        for call in matching:
            await call.over.wait()
        return len(matching) + closed

    async def _going_on(self, message: Cut) -> set[_Call]:
        """The calls that the new policy permits as they were permitted (I27): an edit elsewhere cuts none of them.

        What was not judged anew in time is not among them.
        """
        found: set[_Call] = set()
        with contextlib.suppress(VaultUnavailable, TimeoutError):
            policy = self._vault.snapshot().policy
            if policy.digest != message.subject:
                return found
            async with asyncio.timeout(REJUDGING_SECONDS):
                for call in tuple(self._calls):
                    if _cuts(message, call) and await self._goes_on(call, policy):
                        found.add(call)
        for call in found:
            call.digest = message.subject
        return found

    async def _goes_on(self, call: _Call, policy: Policy) -> bool:
        try:
            sandbox = self._vault.snapshot().sandboxes[call.tenant, call.sandbox]
            return call.still is not None and await call.still(policy, sandbox)
        except Exception:  # whatever goes wrong in judging is a no
            return False

    async def settle(self) -> None:
        """Wait until the outcome records of ended calls are written."""
        while self._endings:
            await asyncio.wait(set(self._endings))

    async def _serve(self, frames: FrameStream, call: _Call) -> None:
        last: Refusal | AnswerAbort | None = None
        side: HandoffSide | None = None
        try:
            statement, sealed = await self._statement(frames)  # 1
            side = HandoffSide(frames, has_body=statement.body.kind != "none", length=_announced(statement))
            side.start()
            last = await self._call(side, statement, sealed, call)
        except _Refused as refused:
            last = await self._record_refusal(refused)
        except StreamBroken:
            last = None  # the worker left before any verdict; nothing was done, nobody is there to be told
        except asyncio.CancelledError:
            last = AnswerAbort(reason=call.cut_reason or "shutting-down")
            raise
        except Exception as error:
            complain("executor", "a hand-off failed", error)
            last = await self._record_refusal(
                _Refused(Refusal(reason="internal-error"), {"error": type(error).__name__})
            )
        finally:
            if side is None:
                side = HandoffSide(frames, has_body=False, length=0)
            if isinstance(last, Refusal) and side.head_sent:
                last = AnswerAbort(reason=last.reason)
            closing = asyncio.get_running_loop().create_task(side.close(last))
            self._keep(closing)
            await asyncio.shield(closing)

    async def _call(
        self, side: HandoffSide, statement: Statement, sealed: bytes, call: _Call
    ) -> Refusal | AnswerAbort | None:
        """Steps 2 to 11. Returns the last word to the worker, None where the answer ended well."""
        record: Fields = {"request_id": statement.request_id, "lane": "executor"}
        if statement.sandbox == SELF_CHECK:
            return await self._probed(sealed, record)
        snapshot, sandbox = self._known(statement, record)  # 2
        policy = snapshot.policy
        call.tenant, call.sandbox, call.digest = sandbox.tenant, sandbox.id, policy.digest
        share = self._turns.share((sandbox.tenant, sandbox.id))
        side.take_turns(share)
        if sum((one.tenant, one.sandbox) == (call.tenant, call.sandbox) for one in self._calls) > self._running_of_one:
            raise _Refused(Refusal(reason="too-many-requests"), record)  # others' calls wait for this executor as well
        facts = _facts(statement, record)  # 3
        body, attested = await self._judged_body(side, statement, facts, policy, sandbox, record)  # 4
        if body is not None:
            facts = facts_of(statement, body)
        record |= attempt(facts)
        grant = snapshot.grants.find((sandbox.tenant, sandbox.id), facts)
        permit = await self._decide(statement, policy, sandbox, facts, grant, record)  # 5
        if isinstance(permit, Held):
            raise await self._held(sealed, attested, record)
        call.credential = permit.credential or ""
        if permit.credential is not None:
            record |= attempt(facts, policy.credentials[permit.credential])

        async def still(other: Policy, who_now: Sandbox) -> bool:
            # The call was opened, dialled and is scrubbed by these; a change of any of them ends it.
            mine, theirs = ((one.credentials, one.destinations, _usable(one, sandbox.role)) for one in (policy, other))
            if who_now != sandbox or mine != theirs:
                return False
            if permit.grant is not None and rule_of(other, permit.rule) != rule_of(policy, permit.rule):
                return False
            size, now = len(body or b""), self._clock.wall()
            # A grant that is over by now was not when it was used.
            used = permit.grant and replace(permit.grant, expires_at=now + 1)
            again = await self._aside(sandbox, size, lambda: _judged(other, sandbox, facts, used, now), {})
            return permit == (replace(again, grant=permit.grant) if isinstance(again, Permit) else again)

        call.still = still

        async def once(before: Opened | None) -> _Ended:
            """One attempt, with its own intent and outcome. `before`: what was opened for the first one."""
            opened = await self._open(sealed, attested, permit, policy, record, before)  # 6
            used = None if permit.credential is None else policy.credentials[permit.credential]
            started = self._clock.boot()
            ended = _Ended(error="internal-error")
            echoes = 0
            try:
                ended, echoes = await self._carry_out(
                    side, statement, permit, policy, facts, body, opened, call, share, first=before is None
                )
            except asyncio.CancelledError:
                ended = call.so_far() if call.so_far is not None else _Ended(sent=True)
                ended = replace(ended, error=call.cut_reason or "shutting-down", completed=False)
                raise
            except Exception as error:
                complain("executor", "an opened call failed", error)
                ended = _Ended(error="internal-error", detail=type(error).__name__)
            finally:
                number: Fields = (
                    {} if before is None and ended.again is None else {"attempt": 1 if before is None else 2}
                )
                duration = int((self._clock.boot() - started) * 1_000_000)  # 11
                ending = self._outcome(
                    opened, permit, used, sandbox, ended, echoes, {**record, **number, "duration_us": duration}
                )
                task = asyncio.get_running_loop().create_task(ending)
                self._keep(task)
                await asyncio.shield(task)
            return ended

        ended = await once(None)
        if ended.again is not None:
            ended = await once(ended.again)
        return ended.last(head_sent=side.head_sent)

    async def _statement(self, frames: FrameStream) -> tuple[Statement, bytes]:
        """1: the sealed statement, verified and fresh."""
        frames.stream.read_timeout = STATEMENT_SECONDS
        frame: Frame | None = None
        try:
            frame = await frames.receive()
            frames.stream.read_timeout = None
            if frame is None:
                raise StreamBroken("closed", "no statement came")
            if frame.type != FrameType.STATEMENT:
                raise WireError("the first frame is not a statement")
            worker = claimed_worker(frame.payload)
            key = self._vault.worker_key(worker)
            if key is None:
                raise _Refused(Refusal(reason="broker-unavailable"), {"error": "worker-unknown"})
            statement = open_sealed(frame.payload, key)
            if statement.worker != worker:
                raise WireError("the statement names two workers")
        except WireError:
            forgery: Fields = {"error": "statement-forged"}
            if frame is not None and frame.payload.startswith(SELF_CHECK_SEAL):
                forgery |= {"tenant": SELF_CHECK_TENANT, "sandbox": SELF_CHECK}
            raise _Refused(Refusal(reason="internal-error"), forgery) from None
        try:
            check_fresh(statement, self._clock.wall())
        except WireError:
            record: Fields = {"request_id": statement.request_id, "error": "statement-stale"}
            raise _Refused(Refusal(reason="internal-error"), record) from None
        return statement, frame.payload

    def _known(self, statement: Statement, record: Fields) -> tuple[ExecutorSnapshot, Sandbox]:
        """2: the snapshot, and the sandbox that the statement names. Its evidence is the vault's to check."""
        try:
            snapshot = self._vault.snapshot()
        except VaultUnavailable:
            raise _Refused(Refusal(reason="broker-unavailable"), record) from None
        sandbox = snapshot.sandboxes.get((statement.tenant, statement.sandbox))
        if sandbox is None or sandbox.epoch != statement.epoch:
            raise _Refused(Refusal(reason="sandbox-ended"), record)
        record |= who(sandbox) | {"policy": snapshot.policy.digest}
        return snapshot, sandbox

    async def _probed(self, sealed: bytes, record: Fields) -> Refusal | AnswerAbort:
        """A worker's self-check: the vault is asked as for any other, and must say no."""
        try:
            answer = await self._vault.open(sealed, None)
        except VaultUnavailable:
            raise _Refused(Refusal(reason="broker-unavailable"), record) from None
        if isinstance(answer, OpenRefused):
            raise _Refused(_refusal(answer), recorded=True)
        self._vault.done(Done(id=answer.id, sent=False))
        return AnswerAbort(reason="internal-error")

    async def _judged_body(
        self,
        side: HandoffSide,
        statement: Statement,
        facts: RequestFacts,
        policy: Policy,
        sandbox: Sandbox,
        record: Fields,
    ) -> tuple[bytes | None, BodyAttested | None]:
        """4: the body where the statement says that it was judged, and what of it we attest to the vault."""
        plan = statement.body
        if not plan.judges:
            return None, None
        before = decide_request(policy, sandbox, facts, self._clock.wall())
        bound = min(before.bound, JUDGED_BYTES) if isinstance(before, NeedsBody) else JUDGED_BYTES
        if isinstance(before, Denied):
            return None, None  # 5 refuses it, without a byte of body held here
        if plan.prefix and not isinstance(before, NeedsBody):
            return None, None  # ours does not look at it: it streams from its first byte
        if plan.prefix and not (isinstance(before, NeedsBody) and before.prefix and plan.prefix == before.bound):
            same = statement.policy_digest == policy.digest
            raise _Refused(Refusal(reason="body-not-judged" if same else "policy-changing"), record)
        if plan.kind == "sha256" and plan.length > bound:
            raise _Refused(Refusal(reason="body-not-judged"), record)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await (side.read_ahead(plan.prefix) if plan.prefix else side.read_whole(bound))
        except HeadRefused as error:
            raise _Refused(Refusal(reason=error.reason), record) from None
        except TimeoutError:
            raise _Refused(Refusal(reason="client-timeout"), record) from None
        digest = sha256(body).digest()
        if not hmac.compare_digest(digest, plan.sha256):
            raise _Refused(Refusal(reason="body-not-judged"), {**record, "error": "body-differs"})
        with_body = facts_of(statement, body)
        found = await self._aside(sandbox, len(body), lambda: _attest(policy, sandbox, with_body), record)
        return body, BodyAttested(operations=found, sha256=digest)

    async def _decide(
        self,
        statement: Statement,
        policy: Policy,
        sandbox: Sandbox,
        facts: RequestFacts,
        grant: Grant | None,
        record: Fields,
    ) -> Permit | Held:
        """5: our own verdict. Where two policies are at work, ours counts and the client may try again (2.4)."""
        same = statement.policy_digest == policy.digest
        size = len(facts.body) if isinstance(facts.body, bytes) else 0
        now = self._clock.wall()
        decision = await self._aside(sandbox, size, lambda: _judged(policy, sandbox, facts, grant, now), record)
        match decision:
            case Denied():
                refusal = Refusal(
                    reason=decision.reason if same else "policy-changing",
                    rule=decision.rule or "",
                    remedy=decision.remedy if same else "",
                    message=decision.message if same else "",
                )
                quiet = decision.quiet or None
                raise _Refused(refusal, {**record, "rule": decision.rule, "quiet": quiet})
            case Held():
                return decision
            case NeedsBody():
                raise _Refused(Refusal(reason="body-not-judged" if same else "policy-changing"), record)
            case Permit():
                pass
        if decision.restrictions.websocket and decision.restrictions.result is not None:
            # `result:` promises that only named fields come back; a conversation has none.
            raise _Refused(Refusal(reason="websocket-refused", rule=decision.rule), record)
        said = (statement.rule, statement.operation, statement.credential)
        if same and said != (decision.rule, decision.operation, decision.credential or ""):
            raise _Refused(Refusal(reason="policy-changing"), {**record, "error": "verdicts-differ"})
        return decision

    async def _held(self, sealed: bytes, attested: BodyAttested | None, record: Fields) -> _Refused:
        """5: an approval is needed. The vault issues the ticket, asked with what it would be asked for a yes."""
        try:
            answer = await self._vault.open(sealed, attested)
        except VaultUnavailable:
            return _Refused(Refusal(reason="broker-unavailable"), record)
        if isinstance(answer, OpenRefused):
            return _Refused(_refusal(answer), recorded=True)
        self._vault.done(Done(id=answer.id, sent=False))
        return _Refused(Refusal(reason="policy-changing"), {**record, "error": "verdicts-differ"})

    async def _open(
        self,
        sealed: bytes,
        attested: BodyAttested | None,
        permit: Permit,
        policy: Policy,
        record: Fields,
        before: Opened | None,
    ) -> Opened:
        """6: the vault's yes, for exactly what we judged. `before`: what it gave us, and the upstream refused."""
        sandbox = permit.sandbox
        try:
            async with self._opening.place((sandbox.tenant, sandbox.id)):
                answer = await self._vault.open(sealed, attested, 0 if before is None else before.id)
        except VaultUnavailable:
            raise _Refused(Refusal(reason="broker-unavailable"), record) from None
        except Busy:
            raise _Refused(Refusal(reason="too-many-requests"), record) from None
        if isinstance(answer, OpenRefused):
            raise _Refused(_refusal(answer), recorded=True)
        ours = (permit.rule, permit.operation, permit.credential or "", policy.digest)
        if ours != (answer.rule, answer.operation, answer.credential, answer.policy_digest):
            self._vault.done(Done(id=answer.id, sent=False))
            raise _Refused(Refusal(reason="policy-changing"), {**record, "error": "verdicts-differ"})
        return answer

    async def _carry_out(
        self,
        side: HandoffSide,
        statement: Statement,
        permit: Permit,
        policy: Policy,
        facts: RequestFacts,
        body: bytes | None,
        opened: Opened,
        call: _Call,
        share: Share,
        *,
        first: bool,
    ) -> tuple[_Ended, int]:
        """7 to 10. Never raises for what peers do. Returns how it ended and the number of masked places.

        An upstream that refuses the material of a first attempt, where the vault may find another, is not heard:
        nothing of that answer goes on, and `again` of what is returned asks for the second (RULINGS 9.7).
        """
        definition = policy.credentials[permit.credential] if permit.credential is not None else None
        if definition is not None and permit.takes:
            definition = captured_form(definition, permit.destination, permit.takes)
        if definition is not None and not (
            permit.destination.scheme == "https" and definition.binds(permit.destination)
        ):
            return _Ended(error="clear-text-refused"), 0
        headers, dropped = request_headers(facts.headers, permit.restrictions, credentialed=definition is not None)
        headers = (("host", permit.destination.authority), *(pair for pair in headers if pair[0] != "host"))
        ours = frozenset({"host"})
        outgoing = Outgoing(
            method=facts.method,
            authority=permit.destination.authority,
            target=facts.target,
            headers=headers,
            sent=facts.headers,
            body=body if statement.body.kind == "sha256" else None,
            has_body=statement.body.kind != "none",
            now=self._clock.wall(),
        )
        guarded = [guard for value in opened.scrub for guard in guard_other(policy, value)]
        proof: ClientProof | None = None
        if definition is not None:  # 7
            try:
                parts = material(definition, opened.parts, opened.version)
                injection = apply(definition, parts, outgoing)
                outgoing = inject(outgoing, injection)
            except BrokerError as error:
                return _Ended(error="credential-unavailable", detail=error.code, dropped=dropped), 0
            ours |= {name for name, _ in injection.set_headers}
            if injection.set_cookies:
                ours |= {"cookie"}
            if injection.certificate is not None:
                key = injection.certificate.key.reveal()
                proof = ClientProof.of(key, injection.certificate.chain_pem)
            guarded += guards_of(definition, parts, injection.forms)
        try:
            patterns = await self._patterns(share.owner, guarded)
            if first:
                await side.answer(Continue())  # 8
            lease = await self._pool.acquire(
                PoolKey(
                    target=replace(_target(permit, policy.destinations), proof=proof),
                    credential=_credential_key(opened),
                ),
                fresh=facts.method not in REUSED_METHODS or facts.upgrade is not None or proof is not None,
            )
        except ScrubError as error:
            return _Ended(error="answer-withheld", detail=str(error), dropped=dropped), 0
        except DialError as error:
            return _Ended(error=error.reason, detail=error.detail_for_log, address=error.address, dropped=dropped), 0
        except StreamBroken:
            return _Ended(error="client-gone", dropped=dropped), 0
        leads = Leads(
            ask=lambda addresses: self._vault.grant(opened.id, addresses),
            permit=permit,
            method=facts.method,
            patterns=patterns,
        )
        transform = Shaping(
            patterns=patterns,
            restrictions=permit.restrictions,
            method=facts.method,
            rest=share.rest,
            aside=lambda work: self._judging.run(share.owner, work, RESULT_SECONDS),
            granted=_tools(permit),
            here=permit.destination.authority,
            leads=leads,
            keep=lambda tokens, seconds: self._vault.keep(opened.id, tokens, seconds),
        )
        restrictions = permit.restrictions
        shaped = definition is not None or restrictions.result is not None or restrictions.answer is not None
        shape = transform.on_response if shaped else from_origin

        def on_response(answered: ResponseHead) -> ResponseHead:
            if first and opened.renewable and answered.status == UNAUTHORIZED:
                raise AnswerRefused(REFUSED_UPSTREAM)
            return shape(answered)

        request = OutgoingRequest(
            method=facts.method,
            target=outgoing.target,
            headers=spelled(outgoing.headers, statement.headers, ours),
            framing=_framing(statement, outgoing.body),
            body=outgoing.body,
            request_limit=permit.restrictions.request_bytes,
            response_limit=permit.restrictions.response_bytes,
            drop_trailers=True,
            upgrade=facts.upgrade,
        )
        try:
            result = await exchange(  # 9, 10
                side,
                lease.connection,
                request,
                on_response=on_response,
                transform=transform if shaped else None,
                relay_interim=False,
                consider=leads.consider,
            )
        except BaseException:
            self._pool.discard(lease)
            raise
        ended = _Ended.of(result, lease, dropped=dropped, kept=shaped and transform.kept)
        ended = replace(ended, redirect=leads.said, redirect_host=leads.host)
        if result.error == REFUSED_UPSTREAM:
            ended = replace(ended, again=opened, status=UNAUTHORIZED)
        if result.upgraded:
            return await self._messages(side, lease, patterns, permit, opened, ended, call, share), transform.hits
        self._give_back(lease, result)
        return ended, transform.hits

    async def _messages(
        self,
        side: HandoffSide,
        lease: Lease,
        patterns: Patterns,
        permit: Permit,
        opened: Opened,
        ended: _Ended,
        call: _Call,
        share: Share,
    ) -> _Ended:
        """10 for a WebSocket: its messages both ways, to the end. The connection is nobody else's afterwards."""
        talk = CredentialedSocket(
            side,
            lease.connection.detach(),
            patterns=patterns,
            restrictions=permit.restrictions,
            random=self._random,
            waiting=self._waiting,
            owner=share.owner,
            rest=share.rest,
            # At once, not at the end: a conversation can last an hour.
            on_echo=lambda hits: self._vault.echoed(Echo(id=opened.id, credential=opened.credential, hits=hits)),
        )

        def so_far() -> _Ended:
            return replace(
                ended,
                bytes_up=ended.bytes_up + talk.bytes_up,
                bytes_down=ended.bytes_down + talk.bytes_down,
                told=talk.told,
                masked=talk.hits,
            )

        call.so_far = so_far
        try:
            result = await talk.run()
        finally:
            self._pool.discard(lease)
        return replace(so_far(), error=result.error or "", detail=result.detail, completed=result.error is None)

    def _give_back(self, lease: Lease, result: ExchangeResult) -> None:
        # A connection that proved itself with a key holds that key: it ends with its call.
        if result.completed and not result.error and lease.key.target.proof is None:
            self._pool.release(lease)
        else:
            self._pool.discard(lease)

    async def _outcome(
        self,
        opened: Opened,
        permit: Permit,
        definition: CredentialDef | None,
        sandbox: Sandbox,
        ended: _Ended,
        echoes: int,
        record: Fields,
    ) -> None:
        """11: the outcome, whatever happened, and the end of the material. An echo is recorded by the vault."""
        judged: Fields = {
            "rule": permit.rule,
            "rules": permit.rules,
            "operation": permit.operation,
            "effect": permit.effect,
            "arguments": tuple(f"{name}={shown(value, definition)}" for name, value in permit.arguments),
            "credential": permit.credential,
            "grant": None if permit.grant is None else permit.grant.id,
            "credential_version": opened.version or None,
            "credential_owner": opened.owner or None,
        }
        if echoes:
            self._vault.echoed(Echo(id=opened.id, credential=opened.credential, hits=echoes))
        try:
            if ended.error == "placeholder-misuse":  # in a message, after the intent: an alarm beside the outcome
                alarm: Fields = {**record, **judged, "reason": ended.error, "place": "websocket"}
                await self._journal.append(Event("placeholder.misused", alarm))
            fields: Fields = {**record, **judged, **ended.fields(), "redacted": echoes + ended.masked or None}
            await self._journal.append(Event("broker.outcome", fields))
        except AuditUnavailable as error:
            complain("executor", "an outcome could not be recorded", error)
        finally:
            self._vault.done(
                Done(
                    id=opened.id,
                    sent=ended.sent,
                    status=ended.status,
                    bytes_up=ended.bytes_up,
                    bytes_down=ended.bytes_down,
                )
            )

    async def _record_refusal(self, refused: _Refused) -> Refusal:
        refusal = refused.refusal
        if not refused.recorded:
            fields: Fields = {"decision": "deny", **refused.record, "reason": refusal.reason}
            name = "selfcheck.refused" if fields.get("sandbox") == SELF_CHECK else "broker.refused"
            try:
                await self._journal.append(Event(name, fields))
            except AuditUnavailable:
                return Refusal(reason="audit-unavailable")
        return refusal

    async def _aside[T](self, sandbox: Sandbox, size: int, work: Callable[[], T], record: Fields) -> T:
        """Run `work` here, or in a thread with a deadline where a body of more than a few lines is judged."""
        if size <= THREAD_BODY_BYTES:
            return work()
        try:
            return await self._judging.run((sandbox.tenant, sandbox.id), work, DECIDE_SECONDS)
        except TimeoutError:
            raise _Refused(Refusal(reason="body-not-judged"), {**record, "error": "judged-too-long"}) from None
        except Busy:
            raise _Refused(Refusal(reason="too-many-requests"), record) from None

    async def _patterns(self, owner: Owner, guarded: list[Guarded]) -> Patterns:
        """The scrub set: that of another call in flight with the same material, or compiled. Raises ScrubError."""
        key = frozenset(guarded)
        patterns = _COMPILED.get(key)
        if patterns is None:
            if sum(len(item.value) for item in guarded) <= THREAD_SECRET_BYTES:
                patterns = Patterns(guarded)
            else:
                try:
                    patterns = await self._judging.run(owner, lambda: Patterns(guarded), DECIDE_SECONDS)
                except (TimeoutError, Busy):
                    raise ScrubError("the scrub set was not compiled in time") from None
            _COMPILED[key] = patterns
        return patterns

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task that must end although the call that made it may be cancelled."""
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """What came of an opened call."""

    error: str = ""
    detail: str = ""
    status: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    completed: bool = False
    sent: bool = False
    address: str = ""
    tls: str = ""
    kept: bool = False
    dropped: tuple[str, ...] = ()
    redirect: str = ""
    redirect_host: str = ""
    told: bool = False
    """The worker has the last word already (a WebSocket's Close)."""
    again: Opened | None = None
    """The material was refused, and the vault may find another: a second attempt follows, and nobody was answered."""
    masked: int = 0
    """Places of a WebSocket's messages, which the vault was told of as they came."""

    @classmethod
    def of(cls, result: ExchangeResult, lease: Lease, *, dropped: tuple[str, ...], kept: bool) -> _Ended:
        return cls(
            error=result.error or "",
            detail=result.detail,
            status=result.status or 0,
            bytes_up=result.bytes_up,
            bytes_down=result.bytes_down,
            completed=result.completed,
            sent=True,
            address=lease.address,
            tls=lease.tls_version or "",
            kept=kept,
            dropped=dropped,
        )

    def fields(self) -> Fields:
        return {
            "error": self.error or None,
            "detail": self.detail or None,
            "upstream_status": self.status or None,
            "status": self.status if self.completed else None,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "completed": self.completed,
            "address": self.address or None,
            "tls": self.tls or None,
            "kept": self.kept or None,
            "redirect": self.redirect or None,
            "redirect_host": self.redirect_host or None,
            "dropped_headers": self.dropped or None,
        }

    def last(self, *, head_sent: bool) -> Refusal | AnswerAbort | None:
        if not self.error or self.told:
            return None
        return AnswerAbort(reason=self.error) if head_sent else Refusal(reason=self.error)


# --- helpers ---


def _judged(policy: Policy, sandbox: Sandbox, facts: RequestFacts, grant: Grant | None, now: float) -> Decision:
    """The decision on a request, which may be a use of `grant`."""
    if grant is None:
        return decide_request(policy, sandbox, facts, now)
    return decide_with_grant(policy, sandbox, facts, grant, now)


def _facts(statement: Statement, record: Fields) -> RequestFacts:
    try:
        return facts_of(statement)
    except FactsRefused as error:
        raise _Refused(Refusal(reason=error.reason), record) from None
    except WireError:
        raise _Refused(Refusal(reason="internal-error"), {**record, "error": "statement-malformed"}) from None


def _attest(policy: Policy, sandbox: Sandbox, facts: RequestFacts) -> frozenset[str]:
    """What the body states, for every operation of the role that lies in a body. The vault parses none (1.1)."""
    role = policy.roles.get(sandbox.role)
    found: set[str] = set()
    for rule in role.rules if role is not None else ():
        for op in rule.operations:
            if op.body is None:
                continue
            answer = match_operation(op, facts)
            if rule.action == "deny" and not isinstance(answer, Matched):
                # As the rule will read it at the vault; what permits is judged there by its whole head again.
                wide = widened(op, facts.method)
                found_so = (match_operation(wide, read) for read in readings(op, facts))
                answer = next((one for one in found_so if isinstance(one, Matched)), answer)
            if isinstance(answer, Matched):
                # What the head states the vault computes itself; only the body's own arguments are attested.
                head = op.arguments.keys() | head_arguments(op)
                stated = {name: value for name, value in answer.arguments.items() if name not in head}
                found.add(attestation(op.id, pairs(stated)))
    return frozenset(found)


def _tools(permit: Permit) -> Callable[[str], bool] | None:
    """Which tools of a server's list the sandbox may see, or None where no list is cut."""
    spec = permit.restrictions.answer
    return None if spec is None else lambda name: granted(spec, name, permit.sandbox)


def _announced(statement: Statement) -> int | None:
    return statement.body.length if statement.body.kind in ("length", "sha256") else None


def _framing(statement: Statement, body: bytes | None) -> Framing:
    if body is not None:
        return Length(len(body)) if body else NO_BODY
    match statement.body.kind:
        case "none":
            return NO_BODY
        case "chunked":
            return CHUNKED
        case "length" | "sha256":
            return Length(statement.body.length) if statement.body.length else NO_BODY


def _target(permit: Permit, destinations: Mapping[str, DestinationDef]) -> DialTarget:
    known = destinations.get(permit.destination.host.text)
    return DialTarget(
        tenant=permit.sandbox.tenant,
        sandbox=permit.sandbox.id,
        destination=permit.destination,
        want_tls=permit.destination.scheme == "https",
        addresses_allowed=known.addresses if known is not None else (),
        static=known.static if known is not None else (),
        trust=TrustKey(ca_pem=known.ca_pem) if known is not None and known.ca_pem is not None else SYSTEM_TRUST,
    )


def _credential_key(opened: Opened) -> str | None:
    return f"{opened.credential}@{opened.version}" if opened.credential else None


_COMPILED: WeakValueDictionary[frozenset[Guarded], Patterns] = WeakValueDictionary()
"""Scrub sets of calls in flight. An entry, its key included, goes with the last call that uses it: nothing of a secret
stays here longer than with one set for each call."""


def _refusal(answer: OpenRefused) -> Refusal:
    return Refusal(
        reason=answer.reason,
        rule=answer.rule,
        remedy=answer.remedy,
        message=answer.message,
        ticket=answer.ticket,
        retry_after=answer.retry_after,
    )


def _usable(policy: Policy, role: str) -> frozenset[str]:
    """The credentials that a role can use, which the scrub set of its calls follows (RULINGS 7.1)."""
    return frozenset(str(rule.credential) for rule in policy.roles[role].rules if rule.credential)


def _cuts(message: Cut, call: _Call) -> bool:
    match message.kind:
        case "all":
            return True
        case "sandbox":
            return (call.tenant, call.sandbox) == (message.tenant, message.subject)
        case "thaw":
            return False  # budgets are the workers'
        case "credential":
            return call.credential == message.subject and message.tenant in ("", call.tenant)
        case "policy":
            return call.digest != "" and call.digest != message.subject


def _cuts_connection(message: Cut, key: PoolKey) -> bool:
    match message.kind:
        case "all" | "policy":
            return True
        case "sandbox":
            return (key.target.tenant, key.target.sandbox) == (message.tenant, message.subject)
        case "thaw":
            return False
        case "credential":
            named = (key.credential or "").rpartition("@")[0] == message.subject
            return named and message.tenant in ("", key.target.tenant)
