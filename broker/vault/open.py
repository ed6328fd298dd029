"""`Opener.open_handoff`: the last word. The procedure, numbered once; the code below is tagged with the numbers.

 1 seal           the statement was sealed by a worker of this boot
 2 fresh          issued at most 5 s ago, its nonce never seen before, our clock not set back
 3 evidence       the token or channel key names a live sandbox, and the one that the statement names
 4 facts          rebuilt from the statement; names agree, targets are canonical, the attested body is the one named
 5 decide         rules.decide.decide_request on our own policy and our own view of the sandbox
 6 compare        what the worker said of policy is compared, never used; holds get a ticket
 7 boundary       the sandbox's confinement is proven, or its role says what confines it
 8 budget         disarmed credentials stay shut, a use of a grant is counted, limits are charged
 9 placeholder    the one in the slot is this sandbox's and this credential's, or of a token that an answer brought it
10 secret         from its source, for a destination inside the credential's definition
11 intent         durable in the log
12 release        still the same sandbox, policy and arming: the material leaves

Any exception anywhere is `internal-error` (I09): never a secret, never its text. Every refusal is recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Protocol, assert_never

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.errors import BrokerError
from broker.sources.base import SourceError
from broker.vault.clock import Clock
from broker.vault.grants import GrantOffice
from broker.vault.ledger import Ledger
from broker.vault.opened import Answer, Material, Opened, Refused
from broker.vault.policies import ActivePolicy
from broker.vault.records import Fields, attempt, shown, who
from broker.vault.sandboxes import NotKnown, SandboxTable, armed, usable_credentials
from broker.vault.secret import Secret
from broker.vault.slot import placeholder_fits
from broker.vault.supply import Supply
from broker.vault.tokens import TokenBox
from net.process import complain
from rules.captured import captured_form
from rules.credential_kinds import is_public
from rules.decide import decide_request, decide_with_grant
from rules.decision import Denied, Held, NeedsBody, Permit
from rules.facts import BodyAttested, FactsRefused, RequestFacts, Sandbox
from rules.names import RequestId
from rules.policy import CredentialDef
from state.records import SandboxRecord
from wire.frames import WireError
from wire.handoff import SELF_CHECK, SELF_CHECK_TENANT, Statement, check_fresh, claimed_worker, facts_of, open_sealed

__all__ = ["Answer", "HandoffOpener", "Material", "Opened", "Opener", "Refused", "TicketBook"]

DEADLINE = 8.0
"""Seconds for one hand-off, source and log included; past it the answer is a refusal."""
AGAIN_SECONDS = 60.0
"""After its statement, a refused read is not sent a second time."""
RETRY_HELD = 30
"""Seconds that a held request is asked to wait before it tries again."""


class HandoffOpener(Protocol):
    """What the executor channel calls; fakes implement it too."""

    async def open_handoff(self, sealed: bytes, attested: BodyAttested | None, *, again: bool = False) -> Answer:
        """Judge one sealed statement. Never raises but CancelledError.

        `again`: it was opened before, its answer was `renewable`, and the upstream refused what it gave.
        """
        ...


class TicketBook(Protocol):
    """Where held requests are remembered. `issue` returns (ticket, new): an honest retry gets the same ticket."""

    async def issue(self, sandbox: Sandbox, held: Held, request_sha256: bytes, now: float) -> tuple[str, bool]: ...


class _Refuse(Exception):
    """Leaves the procedure with a refusal. Carries only codes."""

    def __init__(self, refused: Refused, record: Fields | None = None, event: str = "broker.refused") -> None:
        super().__init__(refused.reason)
        self.refused = refused
        self.record: Fields = record or {}
        self.event = event


class Opener:
    """One per vault. `keys` gives a worker's seal key of this boot, `active` the policy in force."""

    def __init__(
        self,
        *,
        clock: Clock,
        keys: Callable[[str], bytes | None],
        table: SandboxTable,
        ledger: Ledger,
        grants: GrantOffice,
        tokens: TokenBox,
        active: Callable[[], ActivePolicy | None],
        supply: Supply,
        journal: Journal,
        tickets: TicketBook,
    ) -> None:
        self._clock = clock
        self._keys = keys
        self._table = table
        self._ledger = ledger
        self._grants = grants
        self._tokens = tokens
        self._active = active
        self._supply = supply
        self._journal = journal
        self._tickets = tickets

    async def open_handoff(self, sealed: bytes, attested: BodyAttested | None, *, again: bool = False) -> Answer:
        """Judge one sealed statement. Never raises but CancelledError."""
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._procedure(sealed, attested, again=again)
        except _Refuse as refusal:
            return await self._record_refusal(refusal)
        except AuditUnavailable:
            return Refused(request_id=RequestId(""), reason="audit-unavailable")
        except Exception as error:
            complain("vault", "a hand-off failed", error)
            return await self._record_refusal(_Refuse(_no("", "internal-error"), {"error": type(error).__name__}))

    async def _procedure(self, sealed: bytes, attested: BodyAttested | None, *, again: bool) -> Opened:
        # 1 seal
        statement = self._unseal(sealed)
        request = statement.request_id
        record: Fields = {"request_id": request}
        if statement.sandbox == SELF_CHECK:  # a worker's own; nobody is in the table under this id
            record |= {"tenant": SELF_CHECK_TENANT, "sandbox": SELF_CHECK}
        # 2 fresh
        now = self._clock.wall()
        if again:
            record |= {"attempt": 2}
        try:
            # The second time it was fresh already, and its nonce is the one that was taken (session.py).
            check_fresh(statement, min(now, statement.issued_at) if again else now)
        except WireError:
            raise _Refuse(_no(request, "internal-error"), {**record, "error": "statement-stale"}) from None
        if again and now - statement.issued_at > AGAIN_SECONDS:
            raise _Refuse(_no(request, "credential-unavailable"), {**record, "error": "statement-stale"})
        if not again and not self._ledger.take_nonce(statement.nonce, self._clock.boot()):
            raise _Refuse(_no(request, "internal-error"), {**record, "error": "statement-replayed"})
        if self._clock.behind():
            raise _Refuse(_no(request, "credential-unavailable"), {**record, "error": "clock-behind"})
        # 3 evidence
        known = self._table.identify(statement.evidence, statement.tenant, statement.sandbox, statement.epoch, now)
        if isinstance(known, NotKnown):
            if known.other is not None:
                record |= who(known.other) | {"other_sandbox": known.other.id}
            raise _Refuse(_no(request, known.reason), record)
        sandbox = known.sandbox
        record |= who(sandbox)
        # 4 facts
        facts = _facts(statement, attested, record)
        record |= attempt(facts)
        # 5 decide
        active = self._active()
        if active is None:
            raise _Refuse(_no(request, "policy-unavailable"), record)
        record |= {"policy": active.digest}
        grant = self._grants.book.find((sandbox.tenant, sandbox.id), facts)
        decision = (
            decide_request(active.policy, sandbox, facts, now)
            if grant is None
            else decide_with_grant(active.policy, sandbox, facts, grant, now)
        )
        # 6 compare
        permit = await self._permit(statement, active, decision, sandbox, facts, record)
        definition = active.policy.credentials[permit.credential] if permit.credential is not None else None
        if definition is not None and permit.takes:
            definition = captured_form(definition, permit.destination, permit.takes)
        record |= attempt(facts, definition) | _judged(permit, definition)
        _check_inside(permit, definition, record, request)
        # 7 boundary
        if definition is not None and not armed(known, active.policy):
            raise _Refuse(_no(request, "boundary-unproven"), record)
        # 8 budget
        self._charge(permit, sandbox, record, request)
        if again:
            self._renew(statement, permit, sandbox, record)
        # 9 placeholder
        kept = self._tokens.find(permit, definition, facts) if definition is not None and permit.takes else None
        if kept is None and (permit.takes or not placeholder_fits(facts, definition, known.placeholders)):
            raise _Refuse(_no(request, "placeholder-misuse"), record, "placeholder.misused")
        # 10 secret
        material: Material | None = None
        if definition is not None and kept is not None:
            parts = {definition.slot.part: kept}
            material = Material(definition=definition, parts=parts, version=kept.version, owner=definition.owner)
        elif definition is not None:
            material = await self._material(active, definition, sandbox, record, request)
        scrub = await self._scrub(active, permit, sandbox, record, request)
        # 11 intent
        if material is not None:
            record |= {"credential_version": material.version, "credential_owner": material.owner}
            record |= {"fingerprint": self._supply.fingerprint(material.parts)}
        sequence = await self._journal.append(Event("broker.intent", {**record, "decision": "allow"}), durable=True)
        # 12 release
        self._still_so(known, active, permit, record, request)
        owner = (sandbox.tenant, sandbox.id)
        # A token that an answer brought has no source to be asked again: its client gets another.
        own = permit.credential is not None and not permit.takes
        renewable = own and not again and _repeatable(statement, permit)
        return Opened(
            request_id=RequestId(request),
            permit=permit,
            policy_digest=active.digest,
            material=material,
            scrub=scrub,
            sequence=sequence,
            renewable=renewable and self._supply.could_reject(str(permit.credential), owner),
        )

    def _renew(self, statement: Statement, permit: Permit, sandbox: Sandbox, record: Fields) -> None:
        """8, the second time: what the upstream refused is dropped, so that step 10 asks its source (RULINGS 9.7)."""
        if permit.credential is None or permit.takes or not _repeatable(statement, permit):
            raise _Refuse(_no(statement.request_id, "internal-error"), {**record, "error": "not-renewable"})
        self._supply.reject(permit.credential, (sandbox.tenant, sandbox.id))

    def _unseal(self, sealed: bytes) -> Statement:
        try:
            worker = claimed_worker(sealed)
            key = self._keys(worker)
            if key is None:
                raise _Refuse(_no("", "internal-error"), {"error": "worker-unknown"})
            statement = open_sealed(sealed, key)
            if statement.worker != worker:
                raise WireError("the statement names two workers")
        except WireError:
            raise _Refuse(_no("", "internal-error"), {"error": "statement-forged"}) from None
        return statement

    async def _permit(
        self,
        statement: Statement,
        active: ActivePolicy,
        decision: Denied | Held | NeedsBody | Permit,
        sandbox: Sandbox,
        facts: RequestFacts,
        record: Fields,
    ) -> Permit:
        request = statement.request_id
        same = statement.policy_digest == active.digest
        match decision:
            case Denied():
                # The worker allowed what we deny: two policies are at work, or the worker is not ours any more.
                reason = decision.reason if same else "policy-changing"
                refused = Refused(
                    request_id=RequestId(request),
                    reason=reason,
                    rule=decision.rule or "",
                    remedy=decision.remedy if same else "",
                    message=decision.message if same else "",
                )
                event = "placeholder.misused" if decision.reason == "placeholder-misuse" else "broker.refused"
                detail: Fields = {"decision": "deny", "rule": decision.rule, "quiet": decision.quiet or None}
                raise _Refuse(refused, {**record, **detail, "detail": None if same else decision.reason}, event)
            case Held():
                raise await self._hold(statement, decision, sandbox, facts, record)
            case NeedsBody():
                reason = "body-not-judged" if same else "policy-changing"
                raise _Refuse(_no(request, reason), {**record, "decision": "deny"})
            case Permit():
                said = (statement.rule, statement.operation, statement.credential)
                ours = (decision.rule, decision.operation, decision.credential or "")
                arguments = tuple(sorted(statement.arguments)) == tuple(sorted(decision.arguments))
                if same and (said != ours or not arguments):
                    raise _Refuse(_no(request, "policy-changing"), {**record, "error": "verdicts-differ"})
                return decision
        assert_never(decision)

    async def _hold(
        self, statement: Statement, held: Held, sandbox: Sandbox, facts: RequestFacts, record: Fields
    ) -> _Refuse:
        digest = _request_digest(statement, facts)
        ticket, new = await self._tickets.issue(sandbox, held, digest, self._clock.wall())
        fields: Fields = {
            **record,
            "decision": "hold",
            "rule": held.rule,
            "operation": held.operation,
            "approval": held.approval,
            "ticket": ticket,
        }
        if new:
            await self._journal.append(
                Event("approval.requested", {**fields, "reason": "approval-required"}), durable=True
            )
        refused = Refused(
            request_id=RequestId(statement.request_id),
            reason="approval-required",
            rule=held.rule,
            ticket=ticket,
            retry_after=RETRY_HELD,
        )
        return _Refuse(refused, fields)

    def _charge(self, permit: Permit, sandbox: Sandbox, record: Fields, request: str) -> None:
        owner = (sandbox.tenant, sandbox.id)
        if permit.credential is not None and self._ledger.is_disarmed(owner, permit.credential):
            raise _Refuse(_no(request, "secret-echoed"), record)
        grant = permit.grant
        if grant is not None and grant.credential is not None and self._ledger.is_disarmed(owner, grant.credential):
            raise _Refuse(_no(request, "redirect-ended"), record)
        if grant is not None and not self._grants.use(owner, grant):
            raise _Refuse(_no(request, "redirect-ended"), record)
        used_up = self._ledger.charge(owner, permit.restrictions.requests, self._clock.boot())
        if used_up is not None:
            rule, wait = used_up
            refused = Refused(request_id=RequestId(request), reason="limit-reached", rule=rule, retry_after=wait)
            raise _Refuse(refused, {**record, "rule": rule})

    async def _material(
        self, active: ActivePolicy, definition: CredentialDef, sandbox: Sandbox, record: Fields, request: str
    ) -> Material:
        try:
            parts = await self._supply.parts(active, definition.name, sandbox)
        except (BrokerError, TimeoutError) as error:
            code = error.code if isinstance(error, BrokerError) else "source-timeout"
            raise _Refuse(_no(request, "credential-unavailable"), {**record, "error": code}) from None
        return Material(definition=definition, parts=parts, version=_version(parts), owner=definition.owner)

    async def _scrub(
        self, active: ActivePolicy, permit: Permit, sandbox: Sandbox, record: Fields, request: str
    ) -> tuple[Secret, ...]:
        """The other secrets bound to this destination that the role can use (RULINGS 7.1).

        One whose source has nothing now was not sent by us now either, and is left out; one that cannot be read
        for another reason refuses, because the answer could not be shown clean.
        """
        found: list[Secret] = []
        if permit.credential is None:
            return ()
        for other in usable_credentials(active.policy, sandbox.role):
            if other.name == permit.credential and not permit.takes:
                continue  # it is the material itself; beside a token that it brought it is another one
            if not other.scrub or permit.destination.host not in other.hosts:
                continue
            try:
                parts = await self._supply.parts_in_use(active, other.name, sandbox)
                found += [secret for part, secret in parts.items() if not is_public(other.kind, part)]
            except SourceError as error:
                if error.code != "source-missing":
                    raise _Refuse(_no(request, "credential-unavailable"), {**record, "error": error.code}) from None
            except TimeoutError:
                raise _Refuse(_no(request, "credential-unavailable"), {**record, "error": "source-timeout"}) from None
        return tuple(found)

    def _still_so(
        self, known: SandboxRecord, active: ActivePolicy, permit: Permit, record: Fields, request: str
    ) -> None:
        """Between deciding and now we waited for a source and the log: what was revoked meanwhile stays shut (I27)."""
        box = known.sandbox
        if self._table.get(box.id, box.tenant) is not known or box.expires_at <= self._clock.wall():
            raise _Refuse(_no(request, "sandbox-ended"), record)
        current = self._active()
        if current is None or current.digest != active.digest:
            raise _Refuse(_no(request, "policy-changing"), record)
        if permit.grant is not None and not self._grants.lives(permit.grant):
            raise _Refuse(_no(request, "redirect-ended"), record)
        if permit.credential is not None and self._ledger.is_disarmed((box.tenant, box.id), permit.credential):
            raise _Refuse(_no(request, "secret-echoed"), record)

    async def _record_refusal(self, refusal: _Refuse) -> Refused:
        fields: Fields = {"decision": "deny", **refusal.record, "reason": refusal.refused.reason}
        if refusal.refused.request_id:
            fields["request_id"] = refusal.refused.request_id
        try:
            name = "selfcheck.refused" if fields.get("sandbox") == SELF_CHECK else refusal.event
            await self._journal.append(Event(name, fields))
        except AuditUnavailable:
            return Refused(request_id=refusal.refused.request_id, reason="audit-unavailable")
        except Exception as error:
            complain("vault", "a refusal could not be recorded", error)
        return refusal.refused


def _version(parts: Mapping[str, Secret]) -> str:
    """The version of what is used: the one part's own, or each part's by its name."""
    if len(parts) == 1:
        return next(iter(parts.values())).version
    return ",".join(f"{part}={secret.version}" for part, secret in parts.items())


def _repeatable(statement: Statement, permit: Permit) -> bool:
    """Only reads are sent twice, and only where the whole of them is known (RULINGS 9.7)."""
    whole = statement.body.kind == "sha256" or (statement.body.kind == "none" and statement.method in ("GET", "HEAD"))
    return permit.effect == "read" and whole and permit.grant is None and not permit.restrictions.websocket


def _no(request_id: str, reason: str) -> Refused:
    return Refused(request_id=RequestId(request_id), reason=reason)


def _facts(statement: Statement, attested: BodyAttested | None, record: Fields) -> RequestFacts:
    request = statement.request_id
    if attested is not None and (not statement.body.judges or attested.sha256 != statement.body.sha256):
        raise _Refuse(_no(request, "internal-error"), {**record, "error": "attestation-mismatch"})
    try:
        return facts_of(statement, attested)
    except FactsRefused as error:
        raise _Refuse(_no(request, error.reason), record) from None
    except WireError:
        raise _Refuse(_no(request, "internal-error"), {**record, "error": "statement-malformed"}) from None


def _judged(permit: Permit, definition: CredentialDef | None) -> Fields:
    return {
        "rule": permit.rule,
        "rules": permit.rules,
        "operation": permit.operation,
        "effect": permit.effect,
        "service": permit.operation.partition("/")[0],
        "arguments": tuple(f"{name}={shown(value, definition)}" for name, value in permit.arguments),
        "credential": permit.credential,
        "grant": None if permit.grant is None else permit.grant.id,
    }


def _check_inside(permit: Permit, definition: CredentialDef | None, record: Fields, request: str) -> None:
    """A permit whose destination lies outside the credential's definition opens nothing (RULINGS 3.6, I10)."""
    if definition is None:
        return
    record |= {"credential_owner": definition.owner, "credential_kind": definition.kind}
    if permit.destination.scheme != "https":
        raise _Refuse(_no(request, "clear-text-refused"), record)
    if not definition.binds(permit.destination):
        raise _Refuse(_no(request, "credential-unavailable"), {**record, "error": "outside-definition"})


def _request_digest(statement: Statement, facts: RequestFacts) -> bytes:
    """What makes a retry the same request: method, target and judged body; not date, trace or idempotency headers."""
    text = "\n".join((facts.method, str(facts.destination), facts.target))
    return sha256(text.encode() + b"\x00" + statement.body.sha256).digest()
