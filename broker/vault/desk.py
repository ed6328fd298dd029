"""`Desk`: what an administrator can have done: sandboxes, policy, secrets. The admin API is a thin layer over it.

Order of every change (RULINGS 9.1, 9.5): durable in the state, recorded durably in the log, in force here, pushed to
executors, then workers, acknowledged; and for a tightening: everything that it ends reported closed. A process that
does not acknowledge within the bound is given up: its stream is closed, so it denies and cuts by itself, and it is
named in the answer and to the supervisor, to be killed.

One change at a time (`_turn`), so that generations reach every process in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_bytes

from audit.events import Event
from audit.journal import Journal
from broker.errors import BrokerError
from broker.sources.registry import expand
from broker.vault.backup import make as make_backup
from broker.vault.brought import Brought
from broker.vault.clock import Clock
from broker.vault.fleet import Fleet
from broker.vault.frozen import FrozenTable
from broker.vault.leaves import LeafOffice
from broker.vault.ledger import Ledger
from broker.vault.policies import ActivePolicy, PolicyRejected, Rejection, load_policy
from broker.vault.records import Fields, who
from broker.vault.sandboxes import BROKEN, SEEN, Created, NotKnown, Request, SandboxTable
from broker.vault.secret import Secret
from broker.vault.snapshot import render_snapshot
from broker.vault.store import OWN_SECRETS, SecretInfo, SecretStore, StoreError
from broker.vault.store_key import StoreKey
from broker.vault.supply import Row, Supply
from net.process import complain
from rules.names import Owner
from state.errors import StateError
from state.records import Removed, SandboxRecord
from state.store import StateStore
from wire.control import Claim, CutKind, Snapshot
from wire.doctor import CLAIM_SECONDS, known
from wire.handoff import Evidence
from wire.marks import KEY_BYTES as MARKS_KEY
from wire.marks import Mark, marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the desk needs from the boot document."""

    store_path: Path
    policy_path: Path
    credentials_path: Path | None
    listener_ports: tuple[int, ...]
    self_addresses: tuple[str, ...]
    internal_ranges: tuple[str, ...]
    acknowledge_within: float
    proof_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What ending a sandbox did."""

    sandbox: str
    ended_at: float
    deleted: tuple[str, ...]
    remains: tuple[str, ...]
    unacknowledged: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxClaim:
    """What a sandbox said of itself at `at` (wall) and `boot` (boot clock). Codes of wire/doctor.py."""

    at: float
    boot: float
    holds: tuple[str, ...]
    fails: tuple[str, ...]
    unknown: tuple[str, ...]


class Desk:
    """One per vault. Methods raise BrokerError (refusals of an administrator's wish) or AuditUnavailable."""

    def __init__(
        self,
        *,
        settings: Settings,
        state: StateStore,
        store: SecretStore,
        key: StoreKey,
        table: SandboxTable,
        ledger: Ledger,
        leaves: LeafOffice,
        supply: Supply,
        frozen: FrozenTable,
        brought: Brought,
        fleet: Fleet,
        journal: Journal,
        clock: Clock,
        thread: Executor,
        on_lost: Callable[[str], None],
        on_policy: Callable[[ActivePolicy], None],
    ) -> None:
        """`on_policy` hears of each policy once it is in force.

        `thread` runs everything that touches the database or the store, one thing at a time.
        """
        self._settings = settings
        self._state = state
        self._store = store
        self._key = key
        self._table = table
        self._ledger = ledger
        self._leaves = leaves
        self._supply = supply
        self._frozen = frozen
        self._brought = brought
        self._fleet = fleet
        self._journal = journal
        self._clock = clock
        self._thread = thread
        self._on_lost = on_lost
        self._on_policy = on_policy
        self._turn = asyncio.Lock()
        self._proven_at: dict[Owner, float] = {}
        """Boot-clock time of each sandbox's last proof."""
        self._claims: dict[Owner, SandboxClaim] = {}
        self._policy: ActivePolicy | None = None
        self.rejection: Rejection | None = None
        self.generation = 0
        self.snapshot: Snapshot | None = None

    def active(self) -> ActivePolicy | None:
        return self._policy

    # policy

    async def load_first(self) -> ActivePolicy:
        """At start: there is no last good policy, so PolicyRejected stops the vault."""
        active = await self._blocking(self._load)
        await self._journal.append(Event("policy.loaded", self._policy_fields(active)), durable=True)
        self._policy = active
        await self._supply.configure(active)
        self._on_policy(active)
        return active

    async def reload(self, actor: str) -> tuple[ActivePolicy, bool, tuple[str, ...]]:
        """Read the files again. Returns (active, changed, unacknowledged). Raises PolicyRejected: nothing changed."""
        async with self._turn:
            try:
                fresh = await self._blocking(self._load)
            except PolicyRejected as error:
                self.rejection = Rejection(
                    code=error.code,
                    detail=error.detail,
                    remedy=error.remedy,
                    problems=error.problems,
                    at=self._clock.wall(),
                )
                fields: Fields = {"actor": actor, "reason": error.code, "problems": len(error.problems)}
                if self._policy is not None:
                    fields["policy"] = self._policy.digest
                await self._journal.append(Event("policy.rejected", fields), durable=True)
                raise
            before = self._policy
            changed = before is None or before.digest != fresh.digest or before.secrets != fresh.secrets
            loaded: Fields = {**self._policy_fields(fresh), "actor": actor}
            if before is not None:
                loaded["policy_before"] = before.digest
            await self._journal.append(Event("policy.loaded", loaded), durable=True)
            self._policy, self.rejection = fresh, None
            moved = await self._supply.configure(fresh)
            self._brought.policy(fresh.policy)
            self._on_policy(fresh)
            late = await self._publish()
            if before is None or before.digest != fresh.digest:
                late += await self._cut("policy", "", fresh.digest)
            for credential, binding in (before.secrets if before else {}).items():
                if fresh.secrets.get(credential) != binding or credential in moved:
                    self._supply.invalidate(credential)
                    late += await self._cut("credential", "", credential)
            return fresh, changed or bool(moved), _names(late)

    def _load(self) -> ActivePolicy:
        return load_policy(self._settings.policy_path, self._settings.credentials_path, self._clock.wall())

    def _policy_fields(self, active: ActivePolicy) -> Fields:
        rules = sum(len(role.rules) for role in active.policy.roles.values())
        return {"policy": active.digest, "rule_count": rules}

    # sandboxes

    async def create(self, request: Request, actor: str) -> tuple[Created, tuple[str, ...]]:
        """Make a sandbox; returns once every process knows it, with those that did not say so."""
        async with self._turn:
            if self._policy is None:
                raise BrokerError("policy-unavailable", "no policy is in force")
            created = self._table.make(request, self._policy.policy, self._clock.wall())
            await self._blocking(lambda: self._state.add_sandbox(created.record))
            external = self._policy.policy.roles[request.role].boundary_external
            fields: Fields = {
                **who(created.record.sandbox),
                "actor": actor,
                "policy": self._policy.digest,
                "ttl_s": request.ttl,
                "channel": created.record.channel["kind"],
                "boundary": f"external: {external}" if external else None,
            }
            try:
                await self._journal.append(Event("sandbox.created", fields), durable=True)
            except BaseException:
                # Not on record, so it never was: its hashes go again.
                box = created.record.sandbox
                await self._blocking(lambda: self._state.end_sandbox(box.tenant, box.id, self._clock.wall()))
                raise
            self._table.put(created.record)
            return created, _names(await self._publish())

    async def prove_boundary(self, sandbox: str, how: str, actor: str) -> SandboxRecord:
        """Our own process has seen that no way leads out of `sandbox`: its credentials are armed (RULINGS 6.2).

        To be said again within `proof_seconds`, or `lapse` takes it back. Only for a channel inside namespaces, or
        behind an interface, which nobody else can use. Raises BrokerError.
        """
        async with self._turn:
            record = self._known(sandbox)
            if record.boundary == BROKEN:
                raise BrokerError(
                    "boundary-broken", "a probe got out of this sandbox; it is not armed again", "end it, make another"
                )
            kind = record.channel["kind"]
            if SEEN.get(how) != kind:
                raise BrokerError(
                    "bad-boundary",
                    "only the namespaces of `exeat run`, or those behind a captured interface, can be proven",
                    "state `boundary: external` in the role where something else confines its sandboxes",
                )
            # The log first, unlike elsewhere: nothing is armed, after a crash either, that is not on record.
            fields: Fields = {**who(record.sandbox), "actor": actor, "boundary": how, "channel": kind}
            await self._journal.append(Event("boundary.proven", fields), durable=True)
            box = record.sandbox
            if record.boundary != how:  # said again, it stays the same record: hand-offs in progress compare it
                await self._blocking(lambda: self._state.set_boundary(box.tenant, box.id, how))
                record = replace(record, boundary=how)
                self._table.put(record)
            self._proven_at[record.key] = self._clock.boot()
            return record

    async def break_boundary(self, sandbox: str, ways: tuple[str, ...], actor: str) -> tuple[str, ...]:
        """A probe of ours got out of `sandbox` by `ways`: nothing is armed there again, and what runs is cut.

        In force before it is on record, unlike a proof. Returns the processes that did not say that they cut; raises
        BrokerError, and AuditUnavailable where it is in force but not on record.
        """
        async with self._turn:
            return await self._withdraw(self._known(sandbox), BROKEN, "boundary.broken", {"actor": actor, "ways": ways})

    async def claim(self, message: Claim) -> None:
        """Keep what a sandbox says of itself, for people to see. It arms nothing, whatever it says (RULINGS 6.2).

        Silence for what carries no evidence of the sandbox, for words that are not ours, and for the next one that
        comes within CLAIM_SECONDS: the worker refuses those already.
        """
        evidence = Evidence(token=message.token, channel_key=message.channel_key, peer=message.peer)
        now = self._clock.wall()
        found = self._table.identify(evidence, message.tenant, message.sandbox, message.epoch, now)
        codes = (*message.holds, *message.fails, *message.unknown)
        if isinstance(found, NotKnown) or not codes or not all(map(known, codes)):
            return
        last = self._claims.get(found.key)
        if last is not None and self._clock.boot() - last.boot < CLAIM_SECONDS:
            return
        said = SandboxClaim(
            at=now, boot=self._clock.boot(), holds=message.holds, fails=message.fails, unknown=message.unknown
        )
        self._claims[found.key] = said
        fields: Fields = {
            **who(found.sandbox),
            "claimed": True,
            "holds": said.holds,
            "fails": said.fails,
            "unknown": said.unknown,
            "boundary": found.boundary or None,
        }
        await self._journal.append(Event("boundary.claimed", fields))

    def claim_of(self, tenant: str, sandbox: str) -> SandboxClaim | None:
        """The newest claim of a live sandbox since our start; older ones are in the log."""
        return self._claims.get((tenant, sandbox))

    async def lapse(self) -> None:
        """Disarm every sandbox whose proof was not repeated in time; the next proof arms it again."""
        now = self._clock.boot()
        async with self._turn:
            for record in self._table.live():
                if record.boundary not in SEEN:
                    continue
                since = now - self._proven_at.setdefault(record.key, now)  # from before our start: as if proven then
                if since > self._settings.proof_seconds:
                    await self._withdraw(record, "", "boundary.lapsed", {"duration_us": int(since * 1e6)})

    async def _withdraw(self, record: SandboxRecord, boundary: str, event: str, more: Fields) -> tuple[str, ...]:
        box = record.sandbox
        self._proven_at.pop(record.key, None)
        self._table.put(replace(record, boundary=boundary))
        fault: StateError | None = None
        try:
            await self._blocking(lambda: self._state.set_boundary(box.tenant, box.id, boundary))
        except StateError as error:
            fault = error  # it holds in memory all the same
        late = await self._cut("sandbox", box.tenant, box.id)
        fields: Fields = {**who(box), "boundary": record.boundary, "channel": record.channel["kind"], **more}
        await self._journal.append(Event(event, fields), durable=True)
        if fault is not None:
            raise fault
        return _names(late)

    def _known(self, sandbox: str) -> SandboxRecord:
        record = self._table.get(sandbox)
        if record is None:
            raise BrokerError("no-such-sandbox", "no live sandbox has this id", "see `exeat sandbox list`")
        return record

    async def count_drops(self, sandbox: str, counts: Mapping[str, int], *, interface: str, error: str) -> int:
        """Record what the kernel dropped of the packets of `sandbox`, live or ended; returns how many.

        `error`: why nothing could be read. Raises BrokerError(`no-such-sandbox`).
        """
        record = self._table.get(sandbox)
        if record is None:
            record = next((one for one in await self.history() if one.sandbox.id == sandbox), None)
        if record is None:
            raise BrokerError("no-such-sandbox", "no sandbox has this id", "see `exeat sandbox list --all`")
        total = sum(counts.values())
        fields: Fields = {
            **who(record.sandbox),
            "count": total,
            "drops": tuple(f"{name}={count}" for name, count in sorted(counts.items())),
            "interface": interface or None,
            "error": error or None,
        }
        await self._journal.append(Event("drops.counted", fields))
        return total

    async def end(self, sandbox: str, actor: str, reason: str = "asked") -> Ended:
        """End it. Returns once everything of it is closed everywhere. Raises BrokerError(`no-such-sandbox`)."""
        async with self._turn:
            return await self._end(self._known(sandbox), actor, reason)

    async def thaw(self, sandbox: str, actor: str) -> int:
        """Give a live sandbox its budgets anew, in every worker; returns how many operations were frozen.

        On record, durably, before it happens. Raises BrokerError(`no-such-sandbox`).
        """
        async with self._turn:
            record = self._table.get(sandbox)
            if record is None:
                raise BrokerError("no-such-sandbox", "no live sandbox has this id", "see `exeat sandbox list`")
            box = record.sandbox
            owner = (box.tenant, box.id)
            count = len(self._frozen.of(owner, self._clock.boot()))
            fields: Fields = {**who(box), "action": "sandbox.thawed", "actor": actor, "count": count, "outcome": "done"}
            await self._journal.append(Event("admin.action", fields), durable=True)
            self._frozen.forget(owner)
            await self._cut("thaw", box.tenant, box.id)
            return count

    async def end_expired(self) -> tuple[str, ...]:
        """End every sandbox whose time is over; returns their ids."""
        async with self._turn:
            over = self._table.expired(self._clock.wall())
            for record in over:
                await self._end(record, "vault", "expired")
            return tuple(record.sandbox.id for record in over)

    async def _end(self, record: SandboxRecord, actor: str, reason: str) -> Ended:
        box, now = record.sandbox, self._clock.wall()
        fault: StateError | None = None
        removed = Removed(placeholders=0, tickets=0, disarmed=0)
        try:
            removed = await self._blocking(lambda: self._state.end_sandbox(box.tenant, box.id, now))
        except StateError as error:
            fault = error  # it ends in memory and everywhere all the same; the caller hears of it below
        self._table.drop(box.tenant, box.id)
        self._proven_at.pop(record.key, None)
        self._claims.pop(record.key, None)
        self._ledger.forget((box.tenant, box.id))
        self._supply.ended((box.tenant, box.id))
        self._leaves.forget((box.tenant, box.id))
        self._frozen.forget((box.tenant, box.id))
        late = await self._publish()
        late += await self._cut("sandbox", box.tenant, box.id)
        outcome = "failed" if fault else "unacknowledged" if late else "done"
        fields: Fields = {**who(box), "actor": actor, "reason": reason, "outcome": outcome}
        await self._journal.append(Event("sandbox.ended", fields), durable=True)
        if fault is not None:
            raise fault
        return Ended(
            sandbox=box.id,
            ended_at=now,
            deleted=(
                "token (its hash stays in memory, to be answered sandbox-ended)",
                f"{removed.placeholders} placeholder(s)",
                f"{removed.tickets} ticket(s)",
                "counters, connections, pooled connections, tunnels, cached material and leases",
            ),
            remains=(
                "its row (id, role, owner, times) in the state",
                "its records in the log, for the log's retention",
            ),
            unacknowledged=_names(late),
        )

    async def history(self) -> tuple[SandboxRecord, ...]:
        """Every sandbox that the state remembers, ended ones too."""
        return await self._blocking(lambda: self._state.sandboxes(ended=True))

    # secrets

    def secrets(self) -> tuple[SecretInfo, ...]:
        return tuple(info for info in self._store.names() if not info.name.startswith(OWN_SECRETS))

    async def ask_sources(
        self, credential: str | None, sandbox: str | None, actor: str, *, renew: bool
    ) -> tuple[Row, ...]:
        """Ask the sources of one credential, or of all, now; on record. With `renew` uses get what comes.

        `sandbox`: the id of the one that `${sandbox.x}` and leases are for. Raises BrokerError.
        """
        if self._policy is None:
            raise BrokerError("policy-unavailable", "no policy is in force", "run `exeat init`")
        box = None if sandbox is None else self._known(sandbox).sandbox
        fields: Fields = {
            "action": "secret.synced" if renew else "secret.checked",
            "actor": actor,
            "subject": credential or "all",
            "sandbox": sandbox,
        }
        work = self._supply.sync if renew else self._supply.check
        try:
            rows = await work(self._policy, credential, box)
        except BrokerError as error:
            await self._journal.append(
                Event("admin.action", {**fields, "outcome": "refused", "reason": error.code}), durable=True
            )
            raise
        failed = sum(bool(row.error) for row in rows)
        outcome: Fields = {"outcome": "failed" if failed else "done", "count": len(rows), "problems": failed}
        await self._journal.append(Event("admin.action", {**fields, **outcome}), durable=True)
        return rows

    async def add_secret(self, name: str, value: bytes, *, owner: str, scrub: bool, actor: str) -> SecretInfo:
        async with self._turn:
            _not_ours(name)
            info = await self._blocking(
                lambda: self._store.add(name, value, owner=owner, now=self._clock.wall(), scrub=scrub)
            )
            await self._stored("secret.added", info.name, str(info.version), actor)
            return info

    async def rotate_secret(
        self, name: str, value: bytes, *, scrub: bool | None, actor: str
    ) -> tuple[SecretInfo, tuple[str, ...]]:
        async with self._turn:
            _not_ours(name)
            info = await self._blocking(lambda: self._store.rotate(name, value, now=self._clock.wall(), scrub=scrub))
            late = await self._cut_users(name)
            await self._stored("secret.rotated", info.name, str(info.version), actor)
            return info, late

    async def write_back(self, name: str, value: bytes, credential: str) -> str:
        """The next value of a secret that its own use replaced (a refresh token); returns its version.

        Nothing is cut: what was obtained with the last value stays good.
        """
        async with self._turn:
            _not_ours(name)
            info = await self._blocking(lambda: self._store.rotate(name, value, now=self._clock.wall()))
            await self._stored("secret.rotated", info.name, str(info.version), f"exchange:{credential}")
            return str(info.version)

    async def remove_secret(self, name: str, actor: str) -> tuple[str, ...]:
        async with self._turn:
            _not_ours(name)
            await self._blocking(lambda: self._store.remove(name))
            late = await self._cut_users(name)
            await self._stored("secret.removed", name, "", actor)
            return late

    async def rotate_key(self, given: bytes | None, actor: str) -> int:
        """Seal the store with another key (broker/vault/store_key.py); how many records. Raises KeyRefused."""
        async with self._turn:
            made = await self._key.made() if given is None else None
            count = await self._blocking(lambda: self._key.rotate(self._store, given, made))
            generation, digest = self._store.generation, self._store.digest
            await self._blocking(lambda: self._state.record_store_generation(generation, digest))
            fields: Fields = {"action": "store.key-rotated", "actor": actor, "count": count}
            await self._journal.append(
                Event("admin.action", {**fields, "generation": generation, "store_digest": digest}), durable=True
            )
            return count

    async def backup(self, actor: str) -> bytes:
        """Store and state of this moment in one file (broker/vault/backup.py). On record."""
        async with self._turn:
            path, now = self._settings.store_path, self._clock.wall()
            raw = await self._blocking(lambda: make_backup(path, self._store, self._state, now))
            fields: Fields = {"action": "store.backed-up", "actor": actor, "generation": self._store.generation}
            await self._journal.append(Event("admin.action", fields), durable=True)
            return raw

    async def marks(self, actor: str) -> tuple[bytes, tuple[Mark, ...], tuple[str, ...]]:
        """What `exeat scan` looks for (wire/marks.py): a key, marks of every form of every secret, and what is missing.

        Secrets of the store, and those of credentials that need no sandbox to be named. On record.
        """
        key, found, missing = token_bytes(MARKS_KEY), dict[bytes, Mark](), list[str]()

        def see(name: str, secret: Secret) -> None:
            made = {mark.digest: mark for mark in marks(name, secret.reveal(), key)}
            if not made:
                missing.append(f"{name}: too short to be told from chance")
            found.update({digest: mark for digest, mark in made.items() if digest not in found})

        for info in self.secrets():
            see(f"store:{info.name}", self._store.read(info.name))
        if self._policy is not None:
            for row in await self._supply.visit(self._policy, see):
                if row.error or row.needs_sandbox:
                    missing.append(f"{row.credential}: {row.error or 'differs between sandboxes'}")
        fields: Fields = {"action": "secrets.marked", "actor": actor, "count": len(found)}
        await self._journal.append(Event("admin.action", fields), durable=True)
        return key, tuple(found.values()), tuple(dict.fromkeys(missing))

    async def _stored(self, event: str, name: str, version: str, actor: str) -> None:
        generation, digest = self._store.generation, self._store.digest
        await self._blocking(lambda: self._state.record_store_generation(generation, digest))
        fields: Fields = {"secret_name": name, "generation": generation, "store_digest": digest, "actor": actor}
        if version:
            fields["version"] = version
        await self._journal.append(Event(event, fields), durable=True)

    async def _cut_users(self, name: str) -> tuple[str, ...]:
        """Close what runs on credentials that read this secret, for any sandbox."""
        if self._policy is None:
            return ()
        await self._supply.reopen(f"store:{name}")
        boxes = [record.sandbox for record in self._table.live()]
        late: tuple[str, ...] = ()
        for credential, binding in self._policy.secrets.items():
            references = set(binding.references.values())
            for written, box in itertools.product(binding.references.values(), boxes):
                with contextlib.suppress(BrokerError):
                    references.add(expand(written, box))
            if f"store:{name}" in references:
                late += await self._cut("credential", "", credential)
        return _names(late)

    # the clock

    async def reset_clock(self, why: str, actor: str) -> float:
        """Take the machine's clock as right although it is behind the floor (RULINGS 9.6). On record, durably."""
        async with self._turn:
            now = self._clock.machine()
            await self._journal.append(
                Event("admin.action", {"action": "clock.reset", "actor": actor, "why": why, "outcome": "done"}),
                durable=True,
            )
            await self._blocking(lambda: self._state.reset_clock_floor(now))
            self._clock.lower_floor(now)
            return now

    # pushing

    async def _publish(self) -> tuple[str, ...]:
        """The next generation, to everybody; those that did not acknowledge are given up."""
        if self._policy is None:
            return ()
        self.generation += 1
        snapshot = self.snapshot = self._render()
        late = await self._fleet.push(snapshot, self._settings.acknowledge_within)
        self._give_up(late)
        return late

    async def refresh(self) -> None:
        """A first snapshot after start. Processes that join later are sent `snapshot` as it stands."""
        async with self._turn:
            await self._publish()

    async def _cut(self, kind: CutKind, tenant: str, subject: str) -> tuple[str, ...]:
        match kind:
            case "sandbox":
                self._brought.forget((tenant, subject))
            case "credential":
                self._brought.revoke(subject, tenant)
            case _:
                pass  # a policy's are looked through where it comes into force
        late = await self._fleet.cut(kind, tenant, subject, self._settings.acknowledge_within)
        self._give_up(late)
        return late

    def _give_up(self, names: tuple[str, ...]) -> None:
        for member in self._fleet.members():
            if member.name in names:
                complain("vault", f"{member.name} did not acknowledge in time; its stream is closed")
                self._fleet.leave(member)
                member.close()
                self._on_lost(member.name)

    def _render(self) -> Snapshot:
        assert self._policy is not None
        document = render_snapshot(
            generation=self.generation,
            now_floor=self._clock.wall(),
            policy=self._policy.policy,
            sandboxes=self._table.live(),
            ended_tokens=self._table.ended_tokens(),
            listener_ports=self._settings.listener_ports,
            addresses=self._settings.self_addresses,
            internal_ranges=self._settings.internal_ranges,
        )
        return Snapshot(generation=self.generation, document=document)

    async def _blocking[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _names(late: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(late))


def _not_ours(name: str) -> None:
    if name.startswith(OWN_SECRETS):
        raise StoreError("secret-name", f"names below {OWN_SECRETS} are the gateway's own")
