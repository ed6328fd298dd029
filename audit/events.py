"""What can be said: every event with its stable code, and every field with its tag.

The map of this module:
    FIELDS, SPECS   field name -> tag (public, sensitive, secret), type and meaning
    EVENTS          event name -> code, severity, who may write it, fields it may and must carry
    Event           one thing that happened, checked against the two tables when it is made

Rules: an unknown event or field is an error, so nothing enters the log that nobody tagged. Fields tagged
secret exist only to be refused by name. Strings of sensitive fields leave the process as keyed digests
(records.Renderer). A field whose value is None is left out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

type Value = str | int | bool | tuple[str, ...]

MAX_INTEGER: Final = 2**53 - 1
"""RFC 8785 §3.2.2.3: larger integers do not survive an IEEE 754 reader."""
MAX_LIST: Final = 64
"""Items of one list; a longer one is cut by the renderer, which says how much is missing."""
MAX_STRING: Final = 1_024
"""Characters of one string as written; a longer one is cut by the renderer with its length and keyed digest."""


class AuditError(Exception):
    """The base error of this room."""


class EventInvalid(AuditError, ValueError):
    """An event that the tables do not allow. The text names event and field, never a value."""


class Tag(enum.Enum):
    """How a field may appear in the log."""

    PUBLIC = "public"
    SENSITIVE = "sensitive"
    SECRET = "secret"  # noqa: S105 - the name of a tag, not a password


class Severity(enum.Enum):
    """The last letter of a code: information, warning (somebody should look), error."""

    INFO = "I"
    WARNING = "W"
    ERROR = "E"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One field: its tag, the type of its values and what it means (docs are made from this)."""

    tag: Tag
    type: type
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSpec:
    """One kind of event. `writers` are kinds of process; the auditor refuses it from any other channel."""

    code: str
    severity: Severity
    meaning: str
    fields: frozenset[str]
    required: frozenset[str]
    writers: frozenset[str]


def _field(tag: Tag, kind: type, meaning: str) -> FieldSpec:
    return FieldSpec(tag=tag, type=kind, meaning=meaning)


_P, _S, _X = Tag.PUBLIC, Tag.SENSITIVE, Tag.SECRET

SPECS: Final[Mapping[str, FieldSpec]] = {
    # Who.
    "tenant": _field(_P, str, "tenant the sandbox belongs to"),
    "sandbox": _field(_P, str, "sandbox id"),
    "owner": _field(_P, str, "who answers for the sandbox"),
    "agent": _field(_P, str, "the program in the sandbox, as its creator named it"),
    "task": _field(_P, str, "what the sandbox was made for, as its creator named it"),
    "role": _field(_P, str, "role of the sandbox"),
    "epoch": _field(_P, int, "epoch of the sandbox's channels"),
    "actor": _field(_P, str, "who did an administrative thing (uid or name)"),
    "other_sandbox": _field(_P, str, "the sandbox that presented evidence really belongs to (B143)"),
    # Judged.
    "decision": _field(_P, str, "allow, deny, hold"),
    "rule": _field(_P, str, "rule that decided, as role/name"),
    "rules": _field(_P, tuple, "all rules that matched"),
    "operation": _field(_P, str, "operation of the service"),
    "effect": _field(_P, str, "effect of the operation"),
    "service": _field(_P, str, "service of the catalogue"),
    "policy": _field(_P, str, "digest of the policy that judged"),
    "policy_before": _field(_P, str, "digest of the policy that was replaced"),
    "generation": _field(_P, int, "generation of the snapshot or store"),
    "reason": _field(_P, str, "stable reason code"),
    "remedy": _field(_P, str, "what would help, from the reasons table"),
    "approval": _field(_P, str, "group that would have to approve"),
    "ticket": _field(_P, str, "ticket of a held request"),
    "quiet": _field(_P, bool, "denied by a rule marked quiet"),
    "arguments": _field(_P, tuple, "judged arguments as name=value"),
    "grant": _field(_P, str, "the grant that a redirect made, and that this request made or used"),
    # Credential.
    "credential": _field(_P, str, "credential name"),
    "credential_version": _field(_P, str, "version of the secret used"),
    "credential_owner": _field(_P, str, "owner of the credential"),
    "credential_kind": _field(_P, str, "kind of the credential"),
    "source": _field(_P, str, "scheme of the secret's source, without its argument"),
    "fingerprint": _field(_P, str, "keyed digest of a secret: equal for equal values, and of no use to anybody else"),
    # The attempt.
    "request_id": _field(_P, str, "request id shared by all records of one request"),
    "connection_id": _field(_P, str, "connection the request came on"),
    "lane": _field(_P, str, "http1, tunnel, mitm, executor, help, explicit"),
    "channel": _field(_P, str, "listener the connection came in by"),
    "protocol": _field(_P, str, "protocol towards the sandbox"),
    "method": _field(_P, str, "method"),
    "scheme": _field(_P, str, "http or https"),
    "host": _field(_P, str, "canonical host"),
    "port": _field(_P, int, "port"),
    "path": _field(_P, str, "canonical raw path, credential slots as {credential:NAME}"),
    "path_template": _field(_P, str, "the path pattern that matched"),
    "query_keys": _field(_P, tuple, "names of the query parameters, never values"),
    "asked": _field(_P, tuple, "scopes of a token call of which fewer were granted"),
    "granted": _field(_P, tuple, "the scopes of it that left"),
    "sni": _field(_P, str, "TLS server name offered by the client"),
    "connect_host": _field(_P, str, "host of the CONNECT or the captured connection"),
    "host_header": _field(_P, str, "host of the Host header where it differs"),
    "user_agent": _field(_S, str, "User-Agent header"),
    "peer": _field(_P, str, "address or socket the client came from"),
    "upgrade": _field(_P, str, "protocol asked for by Upgrade"),
    "dropped_headers": _field(_P, tuple, "names of headers that were not forwarded"),
    "body_bytes": _field(_P, int, "bytes of the body that was judged"),
    "attempt": _field(_P, int, "number of this attempt of a read operation"),
    # What came of it.
    "status": _field(_P, int, "HTTP status sent to the client"),
    "redirect_host": _field(_P, str, "host that the answer leads to, where it is another"),
    "redirect": _field(_P, str, "granted, or why not: undeclared, not granted"),
    "upstream_status": _field(_P, int, "HTTP status that the upstream answered"),
    "bytes_up": _field(_P, int, "bytes sent upstream"),
    "bytes_down": _field(_P, int, "bytes sent to the client"),
    "duration_us": _field(_P, int, "microseconds from head to end"),
    "error": _field(_P, str, "error class, empty when none"),
    "detail": _field(_P, str, "a fixed sentence of ours; never text from a peer"),
    "completed": _field(_P, bool, "the exchange came to its proper end"),
    "address": _field(_P, str, "upstream address that was dialled, or `delegated`"),
    "tls": _field(_P, str, "TLS version upstream"),
    "uninspected": _field(_P, bool, "bytes were relayed without being read"),
    "redacted": _field(_P, int, "occurrences masked in the answer"),
    "kept": _field(_P, bool, "the answer was cut to its kept fields"),
    # Refusals in bulk.
    "count": _field(_P, int, "how many"),
    "reasons": _field(_P, tuple, "reason=count"),
    "targets": _field(_S, tuple, "targets of refusals, as keyed digests"),
    "missing": _field(_P, int, "records not written singly"),
    "drops": _field(_P, tuple, "packets that the kernel dropped, as class=count"),
    "interface": _field(_P, str, "interface of this machine that leads to the sandbox"),
    "frozen": _field(_P, bool, "the sandbox is frozen"),
    # Processes and the log itself.
    "program": _field(_P, str, "kind of process"),
    "instance": _field(_P, str, "name of one process"),
    "pid": _field(_P, int, "process id"),
    "uid": _field(_P, int, "user id"),
    "version": _field(_P, str, "version of Exeat"),
    "exit_code": _field(_P, int, "exit code, negative for a signal"),
    "shared_uid": _field(_P, bool, "principals share one uid (--danger-shared-uid)"),
    "segment": _field(_P, str, "segment file"),
    "segment_before": _field(_P, str, "segment that this one follows"),
    "records": _field(_P, int, "records in the segment"),
    "bytes": _field(_P, int, "bytes"),
    "torn_bytes": _field(_P, int, "bytes of an unfinished last line, left where they were"),
    "torn_sha256": _field(_P, str, "SHA-256 of those bytes"),
    "suspect": _field(_P, bool, "a write or fsync failed in this segment"),
    "jump_ms": _field(_P, int, "how far the wall clock moved against the boot clock"),
    # Policy, secrets, certificates, boundary, administration.
    "file": _field(_P, str, "file name without directories"),
    "line": _field(_P, int, "line"),
    "problems": _field(_P, int, "number of problems"),
    "rule_count": _field(_P, int, "rules in the policy"),
    "secret_name": _field(_P, str, "name of a stored secret, never its value"),
    "store_digest": _field(_P, str, "digest of the store generation"),
    "certificate_serial": _field(_P, str, "serial number of a certificate"),
    "not_after": _field(_P, str, "end of a certificate's life"),
    "boundary": _field(_P, str, "which boundary"),
    "claimed": _field(_P, bool, "only claimed by the sandbox itself"),
    "ways": _field(_P, tuple, "ways by which a probe of ours got out, by their codes"),
    "holds": _field(_P, tuple, "what a sandbox says holds in it, by codes of ours"),
    "fails": _field(_P, tuple, "what a sandbox says does not hold in it, by codes of ours"),
    "unknown": _field(_P, tuple, "what a sandbox says it cannot tell, by codes of ours"),
    "action": _field(_P, str, "administrative action"),
    "subject": _field(_P, str, "what it was done to"),
    "outcome": _field(_P, str, "done, refused, failed"),
    "ttl_s": _field(_P, int, "seconds of life given"),
    "why": _field(_P, str, "reason text given by a person"),
    "slot": _field(_P, str, "where something was found: header, query, path, body"),
    "place": _field(_P, str, "header name or field where something was found"),
    # These names exist so that a mistake is refused by name instead of by luck.
    "secret": _field(_X, str, "never in the log"),
    "token": _field(_X, str, "never in the log"),
    "placeholder": _field(_X, str, "never in the log"),
    "password": _field(_X, str, "never in the log"),
    "authorization": _field(_X, str, "never in the log"),
    "proxy_authorization": _field(_X, str, "never in the log"),
    "cookie": _field(_X, str, "never in the log"),
    "set_cookie": _field(_X, str, "never in the log"),
    "location": _field(_X, str, "never in the log"),
    "userinfo": _field(_X, str, "never in the log"),
    "query": _field(_X, str, "never in the log: query_keys"),
    "url": _field(_X, str, "never in the log: scheme, host, port, path"),
    "headers": _field(_X, tuple, "never in the log"),
    "body": _field(_X, str, "never in the log"),
}

FIELDS: Final[Mapping[str, Tag]] = {name: spec.tag for name, spec in SPECS.items()}
TYPES: Final[Mapping[str, type]] = {name: spec.type for name, spec in SPECS.items()}
SENSITIVE: Final = frozenset(name for name, tag in FIELDS.items() if tag is Tag.SENSITIVE)

RESERVED: Final = frozenset({"at", "code", "event", "node", "prev", "process", "seq", "v"})
"""Keys of a record that the auditor writes; no field has one of these names."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WHO = frozenset({"tenant", "sandbox", "owner", "agent", "task", "role", "epoch"})
_JUDGED = _names(
    "decision rule rules operation effect service policy generation reason remedy approval ticket quiet arguments "
    "grant credential credential_version credential_owner credential_kind source fingerprint"
)
_ATTEMPT = _names(
    "request_id connection_id lane channel protocol method scheme host port path path_template query_keys asked "
    "granted sni connect_host host_header user_agent peer upgrade dropped_headers body_bytes attempt slot place "
    "other_sandbox"
)
_RESULT = _names(
    "status upstream_status bytes_up bytes_down duration_us error detail completed address tls uninspected "
    "redacted kept redirect redirect_host"
)
_REQUEST = _WHO | _JUDGED | _ATTEMPT | _RESULT
_PROCESS = _names("program instance pid uid version exit_code shared_uid detail error reason duration_us")
_LOG = _names(
    "segment segment_before records bytes torn_bytes torn_sha256 suspect missing count tenant sandbox detail error "
    "reason version"
)
_ADMIN = _WHO | _names(
    "actor uid action subject outcome reason detail error ttl_s why policy policy_before generation file line problems "
    "rule_count rules secret_name store_digest credential credential_version credential_owner credential_kind source "
    "certificate_serial not_after host boundary claimed channel count request_id version ways holds fails unknown "
    "duration_us"
)
_SOURCE = _names("tenant sandbox credential credential_version source fingerprint action outcome reason ttl_s")
_NAMED = frozenset({"tenant", "sandbox", "owner", "agent", "task", "role"})
_JUDGED_REQUEST = _NAMED | {"request_id", "policy"}
_NOTHING: frozenset[str] = frozenset()

_ANY = frozenset({"worker", "executor", "vault", "supervisor", "console", "auditor"})
_FACE = frozenset({"worker"})
_BROKER = frozenset({"vault", "executor"})
_VAULT = frozenset({"vault", "supervisor"})
_JUDGES = _FACE | _BROKER
_SELF = frozenset({"auditor"})


def _event(
    code: str, meaning: str, fields: frozenset[str], required: frozenset[str], writers: frozenset[str]
) -> EventSpec:
    return EventSpec(
        code=code, severity=Severity(code[-1]), meaning=meaning, fields=fields, required=required, writers=writers
    )


EVENTS: Final[Mapping[str, EventSpec]] = {
    # Plain traffic: one intent, one outcome, or one refusal (RULINGS 9.1).
    "request.intent": _event("XR001I", "a plain request is about to leave", _REQUEST, _JUDGED_REQUEST, _FACE),
    "request.outcome": _event("XR002I", "what came of a plain request", _REQUEST, _JUDGED_REQUEST, _FACE),
    "request.refused": _event("XR003W", "a request was refused", _REQUEST, _NOTHING, _JUDGES),
    "request.handoff": _event("XR004I", "a request was handed to the broker", _REQUEST, _JUDGED_REQUEST, _FACE),
    "approval.requested": _event("XR005I", "a request is held for an approval", _REQUEST, _NAMED, _JUDGES),
    "access.requested": _event("XR007I", "a sandbox asks for what it was refused", _REQUEST, _NAMED, _FACE),
    "stub.answered": _event(
        "XR008I",
        "a stub endpoint answered; nothing was sent to anybody",
        _REQUEST | {"action"},
        _NAMED | {"credential", "action"},
        _FACE,
    ),
    "placeholder.misused": _event("XR006W", "a placeholder outside its slot", _REQUEST, _NOTHING, _JUDGES),
    # Credentialed operations: the broker's own two records.
    "broker.intent": _event("XB001I", "a credentialed call is about to be made", _REQUEST, _JUDGED_REQUEST, _BROKER),
    "broker.outcome": _event("XB002I", "what came of a credentialed call", _REQUEST, _JUDGED_REQUEST, _BROKER),
    "broker.refused": _event("XB003W", "the broker refused a hand-off", _REQUEST, _NOTHING, _BROKER),
    "redirect.granted": _event(
        "XB006I", "a declared redirect opened one address", _REQUEST | {"ttl_s"}, _NAMED | {"grant"}, _BROKER
    ),
    "token.kept": _event(
        "XB007I", "an answer brought tokens; the sandbox got placeholders", _REQUEST | {"count"}, _NAMED, _BROKER
    ),
    "secret.echoed": _event("XB004W", "an answer held a secret; it was masked", _REQUEST, _NOTHING, _BROKER),
    "credential.disarmed": _event(
        "XB005W", "a credential is no longer used for a sandbox", _REQUEST | {"count", "why"}, _NOTHING, _BROKER
    ),
    # Connections.
    "tunnel.intent": _event("XT001I", "a tunnel is about to be opened", _REQUEST, _NAMED | {"policy"}, _FACE),
    "tunnel.outcome": _event("XT002I", "what came of a tunnel", _REQUEST, _NAMED | {"policy"}, _FACE),
    "connection.refused": _event("XT003W", "a connection was refused before a request", _REQUEST, _NOTHING, _FACE),
    "client.distrusts-ca": _event("XT004W", "a client rejected our certificate", _REQUEST, _NOTHING, _FACE),
    "refusals.summarised": _event(
        "XT005W",
        "refusals beyond the budget, counted",
        _WHO | {"count", "reasons", "targets", "missing", "frozen", "duration_us"},
        _NOTHING,
        _FACE | _SELF,
    ),
    "drops.counted": _event(
        "XT006W",
        "packets of a sandbox that did not go to the gateway, dropped by the kernel",
        _WHO | {"count", "drops", "interface", "error"},
        frozenset({"tenant", "sandbox", "count"}),
        _VAULT,
    ),
    # Sandboxes, policy, secrets, administration: the vault's.
    "sandbox.created": _event("XS001I", "a sandbox was created", _ADMIN, _NAMED, _VAULT),
    "sandbox.ended": _event("XS002I", "a sandbox was ended", _ADMIN, frozenset({"tenant", "sandbox"}), _VAULT),
    "sandbox.frozen": _event(
        "XS005W",
        "a sandbox used up a budget: an operation, or everything, is refused it for a while",
        _WHO | {"operation", "reason", "detail", "ttl_s"},
        frozenset({"tenant", "sandbox", "reason"}),
        _FACE,
    ),
    "boundary.claimed": _event("XS003I", "a boundary was claimed; it arms nothing", _ADMIN, _NOTHING, _VAULT),
    "boundary.proven": _event("XS004I", "a boundary was observed by our own process", _ADMIN, _NOTHING, _VAULT),
    "boundary.broken": _event(
        "XS005E", "a probe of ours got out of a sandbox; its credentials are disarmed", _ADMIN, _NAMED, _VAULT
    ),
    "boundary.lapsed": _event(
        "XS006W",
        "a boundary was not proven again in time; credentials are disarmed until it is",
        _ADMIN,
        _NAMED,
        _VAULT,
    ),
    "policy.loaded": _event("XP001I", "a policy is in force", _ADMIN, frozenset({"policy"}), _VAULT),
    "policy.rejected": _event("XP002W", "a policy was not taken; the last one stays", _ADMIN, _NOTHING, _VAULT),
    "secret.added": _event("XC001I", "a secret was added", _ADMIN, frozenset({"secret_name"}), _VAULT),
    "secret.rotated": _event("XC002I", "a secret was replaced", _ADMIN, frozenset({"secret_name"}), _VAULT),
    "secret.removed": _event("XC003I", "a secret was removed", _ADMIN, frozenset({"secret_name"}), _VAULT),
    "secret.fetched": _event(
        "XC005I",
        "a source gave a secret, or more time for one",
        _SOURCE,
        frozenset({"credential", "source", "fingerprint"}),
        _VAULT,
    ),
    "secret.unavailable": _event(
        "XC006W",
        "a source does not give a secret any more; said once until it does",
        _SOURCE,
        frozenset({"credential", "source", "reason"}),
        _VAULT,
    ),
    "lease.returned": _event(
        "XC007I", "a secret made for one use was given back to its source", _SOURCE, frozenset({"source"}), _VAULT
    ),
    "certificate.minted": _event("XC004I", "a certificate was made", _ADMIN, _NOTHING, _VAULT),
    "admin.action": _event("XA001I", "something was done through the admin API", _ADMIN, frozenset({"action"}), _VAULT),
    # Processes and the log.
    "process.started": _event("XO001I", "a process started", _PROCESS, _NOTHING, _ANY),
    "process.stopped": _event("XO002I", "a process stopped", _PROCESS, _NOTHING, _ANY),
    "process.lost": _event("XO003E", "a process ended without saying so", _PROCESS, _NOTHING, _VAULT | _SELF),
    "selfcheck.passed": _event("XO005I", "what must not pass does not", _PROCESS | {"count"}, _NOTHING, _FACE),
    "selfcheck.failed": _event("XO006E", "something passed that must not", _PROCESS, _NOTHING, _FACE),
    "selfcheck.refused": _event(
        "XO007I", "a hand-off of a worker's self-check was refused, as it must be", _REQUEST, _NOTHING, _BROKER
    ),
    "clock.jumped": _event("XO004W", "wall time moved against the boot clock", frozenset({"jump_ms"}), _NOTHING, _ANY),
    "log.opened": _event("XL001I", "a segment was opened", _LOG, _NOTHING, _SELF),
    "log.sealed": _event("XL002I", "a segment was closed", _LOG, _NOTHING, _SELF),
    "log.recovered": _event("XL003W", "a segment that was not sealed was taken up again", _LOG, _NOTHING, _SELF),
    "log.quota-reached": _event("XL004W", "a sandbox used up its log bytes", _LOG, _NOTHING, _SELF),
}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: `Event("request.refused", {"reason": "no-rule", "host": "x.example"})`.

    Values are str, int, bool or a list/tuple of str; None is left out. Raises EventInvalid for an event or field
    that the tables do not have or do not allow together, for a missing required field, a wrong type, an integer
    beyond ±(2^53-1), and for every field tagged secret.
    """

    name: str
    fields: Mapping[str, Value]

    def __init__(self, name: str, fields: Mapping[str, Value | list[str] | None] | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "fields", check(name, fields or {}))

    @property
    def spec(self) -> EventSpec:
        """The row of EVENTS."""
        return EVENTS[self.name]


def check(name: str, fields: Mapping[str, object]) -> dict[str, Value]:
    """Return `fields` without None, checked against the tables. Raises EventInvalid (used again by the auditor)."""
    spec = EVENTS.get(name)
    if spec is None:
        raise EventInvalid("no such event")
    if not fields.keys() <= spec.fields:
        raise EventInvalid(_why_not(name, next(key for key in fields if key not in spec.fields)))
    kept: dict[str, Value] = {}
    for key, value in fields.items():
        if value is None:
            continue
        kind = TYPES[key]
        # Exact types first: this runs for every field of every record.
        if type(value) is kind and kind is not int and kind is not tuple:
            kept[key] = value  # type: ignore[assignment]  # str or bool, by the line above
        elif kind is int and type(value) is int:
            if not -MAX_INTEGER <= value <= MAX_INTEGER:
                raise EventInvalid(f"{name}: the integer in {key} is too large")
            kept[key] = value
        elif kind is tuple and isinstance(value, tuple | list) and all(type(item) is str for item in value):
            kept[key] = tuple(value)
        elif kind is str and isinstance(value, str):
            kept[key] = str(value)
        else:
            raise EventInvalid(f"{name}: {key} takes {kind.__name__}")
    if not spec.required <= kept.keys():
        missing = ", ".join(sorted(spec.required - kept.keys()))
        raise EventInvalid(f"{name}: missing {missing}")
    return kept


def _why_not(name: str, key: str) -> str:
    if FIELDS.get(key) is Tag.SECRET:
        return f"{name}: {key} is secret and never enters the log"
    if key in FIELDS:
        return f"{name}: {key} is not a field of this event"
    return f"{name}: unknown field"
