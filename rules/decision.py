"""The answers of a decision: a closed union, the safe ones first. Match them all and end with assert_never.

`Permit` and `TunnelPermit` are made only in rules/decide.py (an architecture test checks): holding one is the
proof that the request was judged.
"""

from __future__ import annotations

from dataclasses import dataclass

from rules.facts import Sandbox
from rules.grants import Grant
from rules.names import CredentialRef, Destination, RuleId
from rules.policy import RedirectSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """No. `reason` is a code of rules.reasons; `rule` the rule that denied, if one did; `remedy` what would help."""

    reason: str
    rule: RuleId | None = None
    remedy: str = ""
    message: str = ""
    """The operator's own sentence (`message:` on a rule or role), shown to the agent."""
    quiet: bool = False
    arguments: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Not without a person's word: the rule asks for an approval (`approval` is its group)."""

    rule: RuleId
    operation: str
    approval: str
    arguments: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsBody:
    """The operation is in the body: read at most `bound` bytes and ask again with `facts.body` set.

    With `prefix` a longer body is fine: its first `bound` bytes are asked with (`facts.partial`), the rest streams
    behind them. Without it a longer body is refused.
    """

    bound: int
    prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSpec:
    """`result: {keep: [...]}`: the only fields of a JSON answer that come back (RULINGS 7.3)."""

    keep: tuple[str, ...]
    bound: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """What is done to an answer. `patterns` are the granted names, as `with:` writes them; None grants every name."""

    name: str
    patterns: tuple[str, ...] | None
    bound: int = 4 << 20
    """Bytes of one message of the answer, after decoding."""
    fields: tuple[str, ...] = ()
    """`capture`: what is kept, as a placeholder goes to the sandbox in its place."""
    strip: bool = True
    """`lfs_batch`: what was made from a credential of ours stays out. False: the answer is only looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restrictions:
    """Everything the matching rules ask for, merged; no later code looks at rules again (RULINGS 3.1)."""

    request_headers: frozenset[str] | None = None
    """Lower-case names that may pass; None means every header that the gate lets through."""
    response_headers: frozenset[str] = frozenset()
    """Lower-case names that may come back besides the base list, where an answer is shaped."""
    request_bytes: int | None = None
    response_bytes: int | None = None
    requests: tuple[tuple[RuleId, int, int], ...] = ()
    """(rule, count, seconds): every one is charged."""
    result: ResultSpec | None = None
    answer: AnswerSpec | None = None
    client_auth: bool = False
    """True only with `client_auth: pass`: the client's own authority may travel."""
    placeholders_inert: bool = False
    websocket: bool = False
    redirects: tuple[tuple[RedirectSpec, ...], ...] = ()
    """Where the answer may lead, of each operation that the request is; () where one of them declares nothing."""
    download: bool = False
    protocol: str = "http1"
    """`http1` or `h2`: the lane."""
    challenge: bool = False
    """`WWW-Authenticate: Bearer ...` may come back: it says where a token is to be had."""

    @property
    def redirects_declared(self) -> bool:
        return bool(self.redirects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Yes, for exactly this destination, operation and credential. Made only by rules.decide."""

    sandbox: Sandbox
    rule: RuleId
    rules: tuple[RuleId, ...]
    operation: str
    effect: str
    destination: Destination
    credential: CredentialRef | None
    restrictions: Restrictions
    arguments: tuple[tuple[str, str], ...] = ()
    needs_state: bool = False
    """True where counting, approval or a one-shot grant makes the broker decide (RULINGS 9.3)."""
    takes: str = ""
    """The authority is a token that was captured under this rule (Operation.takes); never the credential itself."""
    grant: Grant | None = None
    """The address was opened by a redirect: this is a use of that grant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelPermit:
    """The tunnel may exist. `inspected` False: bytes are relayed unseen (`tunnel: true`)."""

    sandbox: Sandbox
    rule: RuleId | None
    destination_host: str
    port: int
    inspected: bool
    clear_text: bool
    """A rule for this host:port says `scheme: http`: HTTP without TLS may run inside the tunnel."""
    protocol: str = "http1"
    """`http1` or `h2`: what is offered in ALPN, and the lane that serves it."""
    server_name: bool = True
    """The TLS handshake in it must name the host; False for an address, and where `destinations:` says so."""
    max_bytes: int | None = None
    max_seconds: float | None = None
    reason: str = ""


Decision = Denied | Held | NeedsBody | Permit
TunnelDecision = Denied | TunnelPermit
