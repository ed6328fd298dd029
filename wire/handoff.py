"""The hand-off between a worker and an executor: one stream socket per request, framed end to end (not HTTP).

    worker -> executor   STATEMENT, then BODY* BODY_END; CANCEL at any time
    executor -> worker   REFUSED, or CONTINUE and then REFUSED | HEAD DATA* END; ABORT instead of any after HEAD

REFUSED after CONTINUE is our own fixed answer in place of the upstream's (unreachable, withheld).

Rules (RULINGS 2.1-2.4, decision record 0003):

1. The first frame is the sealed statement, and nothing is acted on before its seal is verified.
2. A judged body (plan `sha256`) follows the statement at once and ends with BODY_END, before the verdict: the
   executor judges those very bytes. A streamed body is sent after CONTINUE. Where only its beginning was judged
   (`prefix`, decision 10), those bytes follow the statement at once, and the rest goes after CONTINUE.
3. REFUSED exists only as a frame, so that no upstream can forge one: what came from upstream is HEAD and DATA.
4. An answer without END is cut short: the worker aborts its client's message, never ends it well-formed.
5. One request per socket. Bytes after END or REFUSED, or an unknown frame type, close it.

`Statement` says what the worker judged. What it says of rule, operation and credential is compared by the broker
with what it computed itself, never used. The seal is HMAC-SHA256 under a key that is per worker and per boot.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from rules.facts import BodyAttested, RequestFacts, TunnelFacts
from rules.names import Host, InvalidName, Scheme
from wire.fields import FieldReader, FieldWriter
from wire.frames import Frame, WireError, encode_frame

VERSION = 2
AUDIENCE = "exeat-broker"
LIFE_SECONDS = 5.0
"""A statement is refused later than this after its issue time (RULINGS 2.3)."""
SKEW_SECONDS = 1.0
"""How far in the future an issue time may lie: one clock on one machine, read by two processes."""
HANDOFF_MESSAGE = b"handoff 1"
"""What a worker writes on an executor's channel beside the socket that it passes."""
KEY_BYTES = 32
NONCE_BYTES = 16
MAC_BYTES = 32
DATA_CHUNK = 64 * 1024
"""Bytes of body in one frame that we send."""

MAX_HEAD_FIELD = 64 * 1024
MAX_HEADERS = 128
MAX_SHORT = 512
MAX_TARGET = 16 * 1024
MAX_PREFIX = 1 << 20
"""Bytes at the beginning of a body that may be judged alone."""

_SEAL_CONTEXT = b"exeat hand-off statement 1\x00"

BodyKind = Literal["none", "length", "chunked", "sha256"]
_BODY_KINDS: tuple[BodyKind, ...] = ("none", "length", "chunked", "sha256")


class FrameType(IntEnum):
    """The closed table of hand-off frames."""

    STATEMENT = 1
    BODY = 2
    BODY_END = 3
    CANCEL = 4
    CONTINUE = 16
    REFUSED = 17
    HEAD = 18
    DATA = 19
    END = 20
    ABORT = 21
    UPGRADED = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the sandbox itself showed. `token` as presented ("" where none came); `channel_key` is the key that the
    supervisor gave only to the listener that serves this sandbox (b"" on shared listeners); `peer` the source address.

    Both, where both exist, must lead to the same sandbox (RULINGS 2.5). Never logged.
    """

    token: str = ""
    channel_key: bytes = b""
    peer: str = ""

    def __repr__(self) -> str:
        return "Evidence(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyPlan:
    """How the request body travels. `length` is set for `length` and `sha256`; `sha256` holds the judged bytes' digest.

    `prefix` is how many bytes at the beginning of a streamed body were judged; there are more behind them. Raises
    WireError at construction where the parts do not fit together.
    """

    kind: BodyKind = "none"
    length: int = 0
    sha256: bytes = b""
    prefix: int = 0

    def __post_init__(self) -> None:
        sized = self.kind in ("length", "sha256")
        if self.kind not in _BODY_KINDS or self.length < 0 or (self.length and not sized):
            raise WireError("the body plan contradicts itself")
        if not 0 <= self.prefix <= MAX_PREFIX or (self.prefix and self.kind not in ("length", "chunked")):
            raise WireError("the body plan contradicts itself")
        if self.kind == "length" and self.prefix and self.prefix >= self.length:
            raise WireError("the body plan contradicts itself")
        if len(self.sha256) != (32 if self.judges else 0):
            raise WireError("the body plan contradicts itself")

    @property
    def judges(self) -> bool:
        """Some bytes of the body, or all, were judged and travel before the verdict."""
        return self.kind == "sha256" or self.prefix > 0

    @classmethod
    def judged(cls, body: bytes) -> BodyPlan:
        """The plan for a body that was read and judged whole."""
        return cls(kind="sha256", length=len(body), sha256=hashlib.sha256(body).digest())

    @classmethod
    def begun(cls, judged: bytes, length: int | None) -> BodyPlan:
        """The plan for a streamed body of `length` bytes (None: chunked) that was judged by its first bytes."""
        kind: BodyKind = "chunked" if length is None else "length"
        return cls(kind=kind, length=length or 0, sha256=hashlib.sha256(judged).digest(), prefix=len(judged))


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What one worker says of one request it judged. Sealed; valid once, for LIFE_SECONDS.

    `target` is path and query exactly as sent, in origin form. `headers` are (name as received, value) in order,
    including Host, as the gate let them through. `rule`, `rules`, `operation`, `arguments` and `credential` are the
    worker's own verdict, to be compared. `issued_at` is wall time in seconds.
    """

    worker: str
    nonce: bytes
    issued_at: float
    request_id: str
    tenant: str
    sandbox: str
    epoch: int
    evidence: Evidence
    policy_digest: str
    method: str
    scheme: Scheme
    host: str
    port: int
    target: str
    headers: tuple[tuple[str, str], ...]
    body: BodyPlan
    upgrade: str = ""
    rule: str
    operation: str
    arguments: tuple[tuple[str, str], ...] = ()
    credential: str = ""
    audience: str = AUDIENCE
    version: int = VERSION

    @property
    def lower_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers as facts want them: lower-case names, order and duplicates kept."""
        return tuple((name.lower(), value) for name, value in self.headers)


def facts_of(statement: Statement, body: bytes | BodyAttested | None = None) -> RequestFacts:
    """Return the facts that the statement's request gives, built anew as every entry point builds them.

    `body` is the judged bytes (executor) or what an executor attested of them (vault). Raises
    rules.facts.FactsRefused as RequestFacts.build does, and WireError where the host is not canonical.
    """
    try:
        host = Host.of(statement.host)
    except InvalidName:
        raise WireError("the statement's host is not canonical") from None
    if host.text != statement.host or not 0 < statement.port < 65536:
        raise WireError("the statement's host is not canonical")
    if not statement.target.startswith("/"):
        raise WireError("the statement's target is not in origin form")
    facts = RequestFacts.build(
        method=statement.method,
        scheme=statement.scheme,
        tunnel=TunnelFacts(host=host, port=statement.port),
        target=statement.target,
        headers=statement.lower_headers,
        has_body=statement.body.kind != "none",
        upgrade=statement.upgrade or None,
    )
    if body is None:
        return facts
    return RequestFacts(
        method=facts.method,
        destination=facts.destination,
        path=facts.path,
        query=facts.query,
        headers=facts.headers,
        body=body,
        has_body=facts.has_body,
        upgrade=facts.upgrade,
        partial=statement.body.prefix > 0,
    )


SELF_CHECK_TENANT = "exeat"
SELF_CHECK = "self-check"
"""The sandbox of a worker's self-check. No sandbox has this id, so nothing is ever opened for it."""
SELF_CHECK_SEAL = hashlib.sha256(b"exeat self-check: no seal").digest()[:MAC_BYTES]
"""Stands where the MAC should, in the self-check's forged statement: refused like any other, and known on record."""


def forged(statement: Statement) -> bytes:
    """`statement` under a seal that is none, for the self-check: whoever takes it checks no seals."""
    return SELF_CHECK_SEAL + _encode(statement)


def seal(statement: Statement, key: bytes) -> bytes:
    """Return MAC and encoded statement, ready to be the payload of a STATEMENT frame. Raises WireError over bounds."""
    encoded = _encode(statement)
    return _mac(encoded, key) + encoded


def claimed_worker(sealed: bytes) -> str:
    """Return the worker that the sealed statement names, unverified: only to look its key up. Raises WireError."""
    reader = FieldReader(sealed[MAC_BYTES:])
    if reader.number(1) != VERSION:
        raise WireError("the statement has an unknown version")
    reader.text(MAX_SHORT)
    return reader.text(MAX_SHORT)


def open_sealed(sealed: bytes, key: bytes) -> Statement:
    """Return the statement in `sealed` after verifying its seal; nothing is parsed before. Raises WireError.

    Freshness and the nonce are the caller's to check, with its own clock: see `check_fresh`.
    """
    if len(sealed) <= MAC_BYTES or not hmac.compare_digest(sealed[:MAC_BYTES], _mac(sealed[MAC_BYTES:], key)):
        raise WireError("the statement's seal does not match")
    return _decode(sealed[MAC_BYTES:])


def check_fresh(statement: Statement, now: float) -> None:
    """Raise WireError unless the statement was issued within LIFE_SECONDS before `now` for this audience."""
    if statement.audience != AUDIENCE:
        raise WireError("the statement is for another audience")
    if not -SKEW_SECONDS <= now - statement.issued_at <= LIFE_SECONDS:
        raise WireError("the statement is too old or from the future")


def _mac(encoded: bytes, key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise WireError("a hand-off key has a wrong length")
    return hmac.digest(key, _SEAL_CONTEXT + encoded, "sha256")


def _encode(statement: Statement) -> bytes:
    if len(statement.nonce) != NONCE_BYTES:
        raise WireError("a nonce has a wrong length")
    writer = FieldWriter()
    writer.number(statement.version, 1).text(statement.audience, MAX_SHORT).text(statement.worker, MAX_SHORT)
    writer.data(statement.nonce, NONCE_BYTES).real(statement.issued_at).text(statement.request_id, MAX_SHORT)
    writer.text(statement.tenant, MAX_SHORT).text(statement.sandbox, MAX_SHORT).number(statement.epoch)
    evidence = statement.evidence
    writer.text(evidence.token, MAX_SHORT).data(evidence.channel_key, MAX_SHORT).text(evidence.peer, MAX_SHORT)
    writer.text(statement.policy_digest, MAX_SHORT).text(statement.method, MAX_SHORT)
    writer.flag(statement.scheme == "https").text(statement.host, MAX_SHORT).number(statement.port, 2)
    writer.text(statement.target, MAX_TARGET).pairs(statement.headers, MAX_HEADERS, MAX_HEAD_FIELD)
    writer.number(_BODY_KINDS.index(statement.body.kind), 1).number(statement.body.length)
    writer.data(statement.body.sha256, 32).number(statement.body.prefix).text(statement.upgrade, MAX_SHORT)
    writer.text(statement.rule, MAX_SHORT).text(statement.operation, MAX_SHORT)
    writer.pairs(statement.arguments, MAX_HEADERS, MAX_TARGET).text(statement.credential, MAX_SHORT)
    return writer.finish()


def _decode(encoded: bytes) -> Statement:
    reader = FieldReader(encoded)
    version = reader.number(1)
    if version != VERSION:
        raise WireError("the statement has an unknown version")
    audience, worker = reader.text(MAX_SHORT), reader.text(MAX_SHORT)
    nonce, issued_at, request_id = reader.data(NONCE_BYTES), reader.real(), reader.text(MAX_SHORT)
    if len(nonce) != NONCE_BYTES:
        raise WireError("a nonce has a wrong length")
    tenant, sandbox, epoch = reader.text(MAX_SHORT), reader.text(MAX_SHORT), reader.number()
    evidence = Evidence(token=reader.text(MAX_SHORT), channel_key=reader.data(MAX_SHORT), peer=reader.text(MAX_SHORT))
    policy_digest, method = reader.text(MAX_SHORT), reader.text(MAX_SHORT)
    scheme: Scheme = "https" if reader.flag() else "http"
    host, port = reader.text(MAX_SHORT), reader.number(2)
    target, headers = reader.text(MAX_TARGET), reader.pairs(MAX_HEADERS, MAX_HEAD_FIELD)
    kind = reader.number(1)
    if kind >= len(_BODY_KINDS):
        raise WireError("the body plan is unknown")
    length, judged, prefix = reader.number(), reader.data(32), reader.number()
    body = BodyPlan(kind=_BODY_KINDS[kind], length=length, sha256=judged, prefix=prefix)
    upgrade, rule, operation = reader.text(MAX_SHORT), reader.text(MAX_SHORT), reader.text(MAX_SHORT)
    arguments, credential = reader.pairs(MAX_HEADERS, MAX_TARGET), reader.text(MAX_SHORT)
    reader.finish()
    return Statement(
        version=version,
        audience=audience,
        worker=worker,
        nonce=nonce,
        issued_at=issued_at,
        request_id=request_id,
        tenant=tenant,
        sandbox=sandbox,
        epoch=epoch,
        evidence=evidence,
        policy_digest=policy_digest,
        method=method,
        scheme=scheme,
        host=host,
        port=port,
        target=target,
        headers=headers,
        body=body,
        upgrade=upgrade,
        rule=rule,
        operation=operation,
        arguments=arguments,
        credential=credential,
    )


# The executor's answers, and how each is framed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The broker's own no. `reason` is a code of rules.reasons; the rest is as in rules.decision.Denied.

    `ticket` is set where an approval is needed. `retry_after` in seconds, 0 where none is known.
    """

    reason: str
    rule: str = ""
    remedy: str = ""
    message: str = ""
    ticket: str = ""
    retry_after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """The broker permitted the call and recorded its intent: a streamed body may be sent now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The head of the upstream's answer after shaping. `length` is None where the body's size is not known before."""

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    length: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerData:
    """A piece of the answer's body."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """The answer is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAbort:
    """The answer was cut short, for `reason` (a code of rules.reasons)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """The upstream switched protocols; AnswerData and BODY frames carry raw bytes from here on."""

    headers: tuple[tuple[str, str], ...]


Answer = Refusal | AnswerAbort | Continue | AnswerHead | AnswerData | AnswerEnd | Upgraded


def encode_answer(answer: Answer) -> bytes:
    """Return the frame for `answer`. Raises WireError over bounds."""
    writer = FieldWriter()
    match answer:
        case Refusal():
            writer.text(answer.reason, MAX_SHORT).text(answer.rule, MAX_SHORT).text(answer.remedy, MAX_TARGET)
            writer.text(answer.message, MAX_TARGET).text(answer.ticket, MAX_SHORT).number(answer.retry_after, 4)
            return encode_frame(FrameType.REFUSED, writer.finish())
        case AnswerAbort():
            return encode_frame(FrameType.ABORT, writer.text(answer.reason, MAX_SHORT).finish())
        case Continue():
            return encode_frame(FrameType.CONTINUE, b"")
        case AnswerHead():
            writer.number(answer.status, 2).text(answer.reason, MAX_HEAD_FIELD)
            writer.pairs(answer.headers, MAX_HEADERS, MAX_HEAD_FIELD)
            writer.flag(answer.length is not None).number(answer.length or 0)
            return encode_frame(FrameType.HEAD, writer.finish())
        case AnswerData():
            return encode_frame(FrameType.DATA, answer.data)
        case AnswerEnd():
            return encode_frame(FrameType.END, b"")
        case Upgraded():
            writer.pairs(answer.headers, MAX_HEADERS, MAX_HEAD_FIELD)
            return encode_frame(FrameType.UPGRADED, writer.finish())


def decode_answer(frame: Frame) -> Answer:
    """Return the answer in `frame`. Raises WireError for any other frame or layout."""
    reader = FieldReader(frame.payload)
    answer: Answer
    match frame.type:
        case FrameType.REFUSED:
            answer = Refusal(
                reason=reader.text(MAX_SHORT),
                rule=reader.text(MAX_SHORT),
                remedy=reader.text(MAX_TARGET),
                message=reader.text(MAX_TARGET),
                ticket=reader.text(MAX_SHORT),
                retry_after=reader.number(4),
            )
        case FrameType.ABORT:
            answer = AnswerAbort(reason=reader.text(MAX_SHORT))
        case FrameType.CONTINUE:
            answer = Continue()
        case FrameType.HEAD:
            status, reason = reader.number(2), reader.text(MAX_HEAD_FIELD)
            headers = reader.pairs(MAX_HEADERS, MAX_HEAD_FIELD)
            known, length = reader.flag(), reader.number()
            answer = AnswerHead(status=status, reason=reason, headers=headers, length=length if known else None)
        case FrameType.DATA:
            return AnswerData(frame.payload)
        case FrameType.END:
            answer = AnswerEnd()
        case FrameType.UPGRADED:
            answer = Upgraded(headers=reader.pairs(MAX_HEADERS, MAX_HEAD_FIELD))
        case _:
            raise WireError("a frame of an unknown type")
    reader.finish()
    return answer


def body_frame(data: bytes) -> bytes:
    """A piece of the request's body."""
    return encode_frame(FrameType.BODY, data)


BODY_END_FRAME = encode_frame(FrameType.BODY_END, b"")
CANCEL_FRAME = encode_frame(FrameType.CANCEL, b"")


def statement_frame(sealed: bytes) -> bytes:
    """The first frame of a hand-off."""
    return encode_frame(FrameType.STATEMENT, sealed)


def frame_type(frame: Frame) -> FrameType:
    """Return the frame's type. Raises WireError for one that is not in the table."""
    try:
        return FrameType(frame.type)
    except ValueError:
        raise WireError("a frame of an unknown type") from None
