"""Control messages between the vault and its workers and executors, over one inherited stream each.

    vault -> process   Welcome WorkerKey WorkerGone Snapshot Heartbeat Cut Drain Leaf LeafRefused Opened OpenRefused
                       Granted Grants Kept
    process -> vault   Hello Ack LeafRequest CutDone Open Done Echo Checked Frozen Claim GrantAsk GrantsTaken Keep

Rules: frames of wire/frames.py, fixed layouts of wire/fields.py. What the vault reads is only the second line: no
JSON, no nesting (RULINGS 1.1). What it sends may hold one JSON document (the snapshot), bounded by MAX_FROM_VAULT.
Order on a stream: Hello first, answered by Welcome, then a Snapshot; Heartbeat every 500 ms (RULINGS 9.5).

`encode(message)` and `decode_to_vault` / `decode_from_vault` are one table in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rules.facts import BodyAttested
from rules.grants import DIGEST_BYTES, MAX_GRANTS, Grant
from rules.names import CredentialRef, RuleId
from rules.redirects import MAX_URL
from wire.doctor import MAX_CODES
from wire.fields import FieldReader, FieldWriter
from wire.frames import Frame, WireError, encode_frame

MAX_TO_VAULT = 1 << 20
MAX_FROM_VAULT = 64 << 20
"""A snapshot holds the whole policy document and every live sandbox."""
HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.0
"""A process that hears nothing from the vault for this long stops accepting and cuts everything."""

MAX_ADDRESSES = 128
"""Addresses of one answer; an LFS batch names a hundred objects at most."""
MAX_TOKENS = 16
MAX_TOKEN = 16 << 10
"""Tokens that one answer may bring, and bytes of each."""
_SHORT = 512
_ATTESTED = 128 << 10
"""Bytes of one attested operation with its arguments, percent-encoded (rules.arguments.MAX_CHARACTERS)."""
_SENTENCE = 16 * 1024
_PEM = 64 * 1024
_SECRET = 64 * 1024
_PARTS = 16
"""More than any credential has (rules.credential_kinds.MAX_PARTS)."""

ProcessKind = Literal["worker", "executor"]
CutKind = Literal["all", "sandbox", "credential", "policy", "thaw"]
"""`thaw` cuts nothing: what is frozen for that sandbox goes on, with new budgets."""
_CUT_KINDS: tuple[CutKind, ...] = ("all", "sandbox", "credential", "policy", "thaw")


# vault -> process


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to Hello: the process's name and, for a worker, its hand-off key of this boot (else b"")."""

    name: str
    key: bytes = b""

    def __repr__(self) -> str:
        return f"Welcome(name={self.name!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKey:
    """To executors: the key that verifies statements of `worker`. Replaces an earlier one."""

    worker: str
    key: bytes

    def __repr__(self) -> str:
        return f"WorkerKey(worker={self.worker!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """To executors: statements of `worker` are no longer accepted."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a process decides from: `document` is the JSON of broker/vault/snapshot.py, as bytes."""

    generation: int
    document: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The vault lives; `generation` is the newest, `now_floor` the highest wall time ever recorded (seconds)."""

    generation: int
    now_floor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Close what matches and answer CutDone after it is closed. The new snapshot was sent before.

    `all`: everything; `sandbox`: `subject` is the sandbox id of `tenant`; `credential`: `subject` its name;
    `policy`: whatever was permitted under a digest other than `subject`.
    """

    id: int
    kind: CutKind
    tenant: str = ""
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Accept nothing new; end what runs within `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The certificate chain (PEM) for the key that this worker named in Hello."""

    id: int
    chain_pem: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRefused:
    id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The vault's yes to Open `id`, after the durable intent. The material of exactly this call.

    `credential` is "" where the call carries none, and `parts` then empty: (part, value) in order. `scrub` are
    further byte strings that must not come back: secrets bound to this destination that the sandbox's role can use
    (RULINGS 7.1). `rule` is the vault's own verdict.
    """

    id: int
    rule: str
    operation: str
    policy_digest: str
    credential: str = ""
    version: str = ""
    owner: str = ""
    parts: tuple[tuple[str, bytes], ...] = ()
    scrub: tuple[bytes, ...] = ()
    renewable: bool = False
    """A read whose material may be another one at its source by now: refused upstream, it may be asked for again."""

    def __repr__(self) -> str:
        return f"Opened(id={self.id}, credential={self.credential!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The answer to GrantAsk `id`: for each of its addresses, in order, whether it is granted; everybody knows it."""

    id: int
    made: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The answer to Keep `id`: a placeholder for each token, in order; none where nothing is kept."""

    id: int
    placeholders: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Kept(id={self.id}, {len(self.placeholders)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """What redirects opened for one sandbox (rules.grants.Grant), to be added; answered by GrantsTaken `id`.

    `key` is that of the addresses' hashes, of this boot.
    """

    id: int
    key: bytes
    tenant: str
    sandbox: str
    grants: tuple[Grant, ...]

    def __repr__(self) -> str:
        return f"Grants(id={self.id}, sandbox={self.sandbox!r}, {len(self.grants)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRefused:
    """The vault's no to Open `id`, already recorded by the vault. Fields as wire.handoff.Refusal.

    Where the vault's own policy would need a body that was not attested, the reason is `policy-changing`.
    """

    id: int
    reason: str
    rule: str = ""
    remedy: str = ""
    message: str = ""
    ticket: str = ""
    retry_after: int = 0


FromVault = (
    Welcome
    | WorkerKey
    | WorkerGone
    | Snapshot
    | Heartbeat
    | Cut
    | Drain
    | Leaf
    | LeafRefused
    | Opened
    | OpenRefused
    | Granted
    | Grants
    | Kept
)


# process -> vault


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a process. `spki` is the worker's leaf public key (DER SubjectPublicKeyInfo), else b""."""

    kind: ProcessKind
    name: str
    spki: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The snapshot of `generation` is in force here."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRequest:
    """A leaf for `host`. `refusal` True: it only carries a refusal and draws on the sandbox's small budget."""

    id: int
    host: str
    tenant: str = ""
    sandbox: str = ""
    refusal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CutDone:
    """Everything that Cut `id` matched is closed; `closed` counts it."""

    id: int
    closed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """From an executor: open the credential for this sealed statement. `attested` where it judged the body."""

    id: int
    sealed: bytes
    attested: BodyAttested | None = None
    again: int = 0
    """The same statement once more: the Open whose material the upstream refused, and whose answer said `renewable`."""

    def __repr__(self) -> str:
        return f"Open(id={self.id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantAsk:
    """From an executor: the answer to Open `call` leads to `addresses`, as written there. May the sandbox go there?"""

    id: int
    call: int
    addresses: tuple[str, ...]

    def __repr__(self) -> str:
        return f"GrantAsk(id={self.id}, call={self.call}, {len(self.addresses)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """From an executor: the answer to Open `call` brought these tokens, each good for `seconds` (0: unsaid)."""

    id: int
    call: int
    tokens: tuple[bytes, ...]
    seconds: int = 0

    def __repr__(self) -> str:
        return f"Keep(id={self.id}, call={self.call}, {len(self.tokens)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantsTaken:
    """What Grants `id` said is in force here."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From an executor: the call of Open `id` is over and its material dropped. `sent`: bytes went upstream."""

    id: int
    sent: bool
    status: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """From an executor: the answer to Open `id` held the secret, in `hits` places, which were masked."""

    id: int
    credential: str
    hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """From a worker: its self-check of just now. `passed` False: it refuses everything and ends."""

    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """From a worker: what a sandbox says of itself (wire/doctor.py), with its own evidence. Arms nothing.

    `token`, `channel_key` and `peer` as wire.handoff.Evidence. Never logged.
    """

    tenant: str
    sandbox: str
    epoch: int
    token: str
    channel_key: bytes
    peer: str
    holds: tuple[str, ...]
    fails: tuple[str, ...]
    unknown: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Claim(sandbox={self.sandbox!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """From a worker: a sandbox used up `budget`; `operation` ("" for all of them) is refused for `seconds`."""

    tenant: str
    sandbox: str
    operation: str
    budget: str
    seconds: int


ToVault = (
    Hello | Ack | LeafRequest | CutDone | Open | Done | Echo | Checked | Frozen | Claim | GrantAsk | GrantsTaken | Keep
)
Message = FromVault | ToVault


def encode(message: Message) -> bytes:
    """Return the frame for `message`. Raises WireError over bounds."""
    w = FieldWriter()
    match message:
        case Welcome():
            kind = 1
            w.text(message.name, _SHORT).data(message.key, 32)
        case WorkerKey():
            kind = 2
            w.text(message.worker, _SHORT).data(message.key, 32)
        case WorkerGone():
            kind = 3
            w.text(message.worker, _SHORT)
        case Snapshot():
            kind = 4
            w.number(message.generation).data(message.document, MAX_FROM_VAULT)
        case Heartbeat():
            kind = 5
            w.number(message.generation).real(message.now_floor)
        case Cut():
            kind = 6
            w.number(message.id).number(_CUT_KINDS.index(message.kind), 1)
            w.text(message.tenant, _SHORT).text(message.subject, _SHORT)
        case Drain():
            kind = 7
            w.real(message.seconds)
        case Leaf():
            kind = 8
            w.number(message.id).data(message.chain_pem, _PEM)
        case LeafRefused():
            kind = 9
            w.number(message.id).text(message.reason, _SHORT)
        case Opened():
            kind = 10
            w.number(message.id).text(message.rule, _SHORT).text(message.operation, _SHORT)
            w.text(message.policy_digest, _SHORT).text(message.credential, _SHORT)
            w.text(message.version, _SHORT).text(message.owner, _SHORT)
            w.texts([part for part, _ in message.parts], _PARTS, _SHORT)
            w.datas([value for _, value in message.parts], _PARTS, _SECRET).datas(message.scrub, 1024, _SECRET)
            w.flag(message.renewable)
        case OpenRefused():
            kind = 11
            w.number(message.id).text(message.reason, _SHORT).text(message.rule, _SHORT)
            w.text(message.remedy, _SENTENCE).text(message.message, _SENTENCE)
            w.text(message.ticket, _SHORT).number(message.retry_after, 4)
        case Granted():
            kind = 20
            w.number(message.id).data(bytes(message.made), MAX_ADDRESSES)
        case Grants():
            kind = 21
            w.number(message.id).data(message.key, 32).text(message.tenant, _SHORT).text(message.sandbox, _SHORT)
            w.number(len(message.grants), 4)
            for grant in message.grants:
                _put_grant(w, grant)
        case Kept():
            kind = 22
            w.number(message.id).texts(message.placeholders, MAX_TOKENS, _SHORT)
        case Hello():
            kind = 65
            w.flag(message.kind == "executor").text(message.name, _SHORT).data(message.spki, _SHORT)
        case Ack():
            kind = 66
            w.number(message.generation)
        case LeafRequest():
            kind = 67
            w.number(message.id).text(message.host, _SHORT).text(message.tenant, _SHORT)
            w.text(message.sandbox, _SHORT).flag(message.refusal)
        case CutDone():
            kind = 68
            w.number(message.id).number(message.closed)
        case Open():
            kind = 69
            w.number(message.id).number(message.again)
            w.data(message.sealed, MAX_TO_VAULT).flag(message.attested is not None)
            if message.attested is not None:
                w.texts(sorted(message.attested.operations), 256, _ATTESTED).data(message.attested.sha256, 32)
        case GrantAsk():
            kind = 80
            w.number(message.id).number(message.call).texts(message.addresses, MAX_ADDRESSES, MAX_URL)
        case GrantsTaken():
            kind = 81
            w.number(message.id)
        case Keep():
            kind = 82
            w.number(message.id).number(message.call).datas(message.tokens, MAX_TOKENS, MAX_TOKEN)
            w.number(message.seconds, 4)
        case Done():
            kind = 70
            w.number(message.id).flag(message.sent).number(message.status, 2)
            w.number(message.bytes_up).number(message.bytes_down)
        case Echo():
            kind = 71
            w.number(message.id).text(message.credential, _SHORT).number(message.hits)
        case Checked():
            kind = 72
            w.flag(message.passed)
        case Claim():
            kind = 74
            w.text(message.tenant, _SHORT).text(message.sandbox, _SHORT).number(message.epoch)
            w.text(message.token, _SHORT).data(message.channel_key, 32).text(message.peer, _SHORT)
            for codes in (message.holds, message.fails, message.unknown):
                w.texts(codes, MAX_CODES, _SHORT)
        case Frozen():
            kind = 73
            w.text(message.tenant, _SHORT).text(message.sandbox, _SHORT)
            w.text(message.operation, _SHORT).text(message.budget, _SHORT).number(message.seconds)
    return encode_frame(kind, w.finish(), MAX_FROM_VAULT if kind < 64 else MAX_TO_VAULT)


def decode_to_vault(frame: Frame) -> ToVault:
    """Return the message that a process sent. Raises WireError for any other frame or layout."""
    r = FieldReader(frame.payload)
    message: ToVault
    match frame.type:
        case 65:
            kind: ProcessKind = "executor" if r.flag() else "worker"
            message = Hello(kind=kind, name=r.text(_SHORT), spki=r.data(_SHORT))
        case 66:
            message = Ack(generation=r.number())
        case 67:
            message = LeafRequest(
                id=r.number(), host=r.text(_SHORT), tenant=r.text(_SHORT), sandbox=r.text(_SHORT), refusal=r.flag()
            )
        case 68:
            message = CutDone(id=r.number(), closed=r.number())
        case 69:
            number, again, sealed, attested = r.number(), r.number(), r.data(MAX_TO_VAULT), None
            if r.flag():
                attested = BodyAttested(operations=frozenset(r.texts(256, _ATTESTED)), sha256=r.data(32))
                if len(attested.sha256) != 32:
                    raise WireError("a digest has a wrong length")
            message = Open(id=number, sealed=sealed, attested=attested, again=again)
        case 80:
            message = GrantAsk(id=r.number(), call=r.number(), addresses=tuple(r.texts(MAX_ADDRESSES, MAX_URL)))
        case 81:
            message = GrantsTaken(id=r.number())
        case 82:
            number, call, tokens = r.number(), r.number(), tuple(r.datas(MAX_TOKENS, MAX_TOKEN))
            message = Keep(id=number, call=call, tokens=tokens, seconds=r.number(4))
        case 70:
            message = Done(id=r.number(), sent=r.flag(), status=r.number(2), bytes_up=r.number(), bytes_down=r.number())
        case 71:
            message = Echo(id=r.number(), credential=r.text(_SHORT), hits=r.number())
        case 72:
            message = Checked(passed=r.flag())
        case 74:
            message = Claim(
                tenant=r.text(_SHORT),
                sandbox=r.text(_SHORT),
                epoch=r.number(),
                token=r.text(_SHORT),
                channel_key=r.data(32),
                peer=r.text(_SHORT),
                holds=tuple(r.texts(MAX_CODES, _SHORT)),
                fails=tuple(r.texts(MAX_CODES, _SHORT)),
                unknown=tuple(r.texts(MAX_CODES, _SHORT)),
            )
        case 73:
            message = Frozen(
                tenant=r.text(_SHORT),
                sandbox=r.text(_SHORT),
                operation=r.text(_SHORT),
                budget=r.text(_SHORT),
                seconds=r.number(),
            )
        case _:
            raise WireError("a frame of an unknown type")
    r.finish()
    return message


def decode_from_vault(frame: Frame) -> FromVault:
    """Return the message that the vault sent. Raises WireError for any other frame or layout."""
    r = FieldReader(frame.payload)
    message: FromVault
    match frame.type:
        case 1:
            message = Welcome(name=r.text(_SHORT), key=r.data(32))
        case 2:
            message = WorkerKey(worker=r.text(_SHORT), key=r.data(32))
        case 3:
            message = WorkerGone(worker=r.text(_SHORT))
        case 4:
            message = Snapshot(generation=r.number(), document=r.data(MAX_FROM_VAULT))
        case 5:
            message = Heartbeat(generation=r.number(), now_floor=r.real())
        case 6:
            number, kind = r.number(), r.number(1)
            if kind >= len(_CUT_KINDS):
                raise WireError("a cut of an unknown kind")
            message = Cut(id=number, kind=_CUT_KINDS[kind], tenant=r.text(_SHORT), subject=r.text(_SHORT))
        case 7:
            message = Drain(seconds=r.real())
        case 8:
            message = Leaf(id=r.number(), chain_pem=r.data(_PEM))
        case 9:
            message = LeafRefused(id=r.number(), reason=r.text(_SHORT))
        case 10:
            message = Opened(
                id=r.number(),
                rule=r.text(_SHORT),
                operation=r.text(_SHORT),
                policy_digest=r.text(_SHORT),
                credential=r.text(_SHORT),
                version=r.text(_SHORT),
                owner=r.text(_SHORT),
                parts=_parts(r),
                scrub=r.datas(1024, _SECRET),
                renewable=r.flag(),
            )
        case 11:
            message = OpenRefused(
                id=r.number(),
                reason=r.text(_SHORT),
                rule=r.text(_SHORT),
                remedy=r.text(_SENTENCE),
                message=r.text(_SENTENCE),
                ticket=r.text(_SHORT),
                retry_after=r.number(4),
            )
        case 20:
            number, made = r.number(), r.data(MAX_ADDRESSES)
            message = Granted(id=number, made=tuple(byte == 1 for byte in made))
        case 22:
            message = Kept(id=r.number(), placeholders=tuple(r.texts(MAX_TOKENS, _SHORT)))
        case 21:
            number, key, tenant, sandbox = r.number(), r.data(32), r.text(_SHORT), r.text(_SHORT)
            count = r.number(4)
            if len(key) != 32 or count > MAX_GRANTS:
                raise WireError("grants have a wrong key or are too many")
            grants = tuple(_take_grant(r) for _ in range(count))
            message = Grants(id=number, key=key, tenant=tenant, sandbox=sandbox, grants=grants)
        case _:
            raise WireError("a frame of an unknown type")
    r.finish()
    return message


def _parts(r: FieldReader) -> tuple[tuple[str, bytes], ...]:
    names, values = r.texts(_PARTS, _SHORT), r.datas(_PARTS, _SECRET)
    if len(names) != len(values) or len(set(names)) != len(names):
        raise WireError("parts without a name, or with one name twice")
    return tuple(zip(names, values, strict=True))


def _put_grant(w: FieldWriter, grant: Grant) -> None:
    w.text(grant.id, _SHORT).text(grant.host, _SHORT).data(grant.digest, DIGEST_BYTES)
    w.text(grant.rule, _SHORT).text(grant.operation, _SHORT).real(grant.expires_at)
    w.text(grant.credential or "", _SHORT).flag(grant.response_bytes is not None).number(grant.response_bytes or 0)
    w.text(grant.protocol, _SHORT).flag(grant.again).text(grant.takes, _SHORT)


def _take_grant(r: FieldReader) -> Grant:
    number, host, digest = r.text(_SHORT), r.text(_SHORT), r.data(DIGEST_BYTES)
    if len(digest) != DIGEST_BYTES:
        raise WireError("a digest has a wrong length")
    rule, operation, expires_at = RuleId(r.text(_SHORT)), r.text(_SHORT), r.real()
    credential, bounded, bound = r.text(_SHORT), r.flag(), r.number()
    return Grant(
        id=number,
        host=host,
        digest=digest,
        rule=rule,
        operation=operation,
        expires_at=expires_at,
        credential=CredentialRef(credential) if credential else None,
        response_bytes=bound if bounded else None,
        protocol=r.text(_SHORT),
        again=r.flag(),
        takes=r.text(_SHORT),
    )
