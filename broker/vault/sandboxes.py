"""`SandboxTable`: who exists. Creates, ends, and checks the evidence of a hand-off against its own table.

Rules:
- Ids are never reused; a token is shown once and kept as a SHA-256; so are channel keys and placeholders.
- Evidence (RULINGS 2.1, 2.5): a token on a shared or address channel; on a channel that identifies alone its key,
  and a token that came along must be that same sandbox's. Token and channel that disagree: bad-token.
- A sandbox whose time is over is ended, whether or not the sweep has come by.
- Credentials are armed by what our launcher built or our probe saw, or by its role's `boundary: external`, then and now
  (RULINGS 6.2).
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from broker.errors import BrokerError
from rules.facts import Sandbox
from rules.grammar import ATTRIBUTE_NAME, valid_attribute
from rules.names import Owner
from rules.placeholders import make
from rules.policy import CredentialDef, Policy
from rules.stubs import account_endpoint, is_derived, seed
from rules.stubs import environment as stub_environment
from state.records import SandboxRecord
from wire.handoff import Evidence

CHANNELS = ("shared", "address", "port", "unix", "namespace")
ALONE = frozenset({"port", "unix", "namespace"})
"""Channels that identify by themselves, because the kernel lets nobody else use them."""
PROVEN = "namespaces"
"""The boundary that our launcher built: namespaces of its own, the listeners in them the only way out."""
PROBED = "probed"
"""A boundary that something else built, and out of which a probe of ours found no way (docs/capture.md)."""
BROKEN = "broken"
"""A probe of ours got out. Nothing arms such a sandbox again."""
SEEN = {PROVEN: "namespace", PROBED: "port"}
"""What our own process can have observed -> the channel kind of which that can be said."""
EXTERNAL = "external"
"""The boundary that the operator's policy says something else holds."""
MAX_ENDED_TOKENS = 4096
MAX_SANDBOXES = 10_000
MAX_ATTRIBUTES = 32

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
_WORDS = re.compile(r"[^\x00-\x1f\x7f]{0,200}\Z")

Random = Callable[[int], bytes]


class SandboxRefused(BrokerError):
    """The sandbox cannot be made. `code` is stable, `detail` a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a creator asks for, already of the right types; `check` judges the values."""

    tenant: str
    role: str
    ttl: int
    owner: str = ""
    agent: str = ""
    task: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    channel: Mapping[str, str] = field(default_factory=lambda: {"kind": "shared"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """A new sandbox with what is shown once."""

    record: SandboxRecord
    token: str = field(repr=False)
    channel_key: bytes = field(repr=False)
    """b"" where the channel does not identify alone."""
    environment: Mapping[str, str] = field(repr=False)
    """variable -> placeholder; and the variables that lead SDKs to stub endpoints."""
    variables: Mapping[str, str]
    """credential, or credential#part -> variable."""
    account_endpoint: str = ""
    """Where a key file of Google's form has to lead, where a stub wants one (exeat/google_account.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotKnown:
    """The evidence names no live sandbox. `reason` is bad-token, auth-required or sandbox-ended."""

    reason: str
    other: Sandbox | None = None
    """The sandbox that the evidence belongs to, where it is another one (B143)."""


class SandboxTable:
    """The live sandboxes in memory; the state database is written by the caller before `put`."""

    def __init__(self, random: Random, stub_key: bytes = b"") -> None:
        """`stub_key`: what derived placeholders are made with (rules/stubs.py); workers have it too."""
        self._random = random
        self._stub_key = stub_key
        self._live: dict[Owner, SandboxRecord] = {}
        self._by_token: dict[bytes, Owner] = {}
        self._by_channel: dict[bytes, Owner] = {}
        self._ended_tokens: OrderedDict[bytes, None] = OrderedDict()

    def make(self, request: Request, policy: Policy, now: float) -> Created:
        """Make a sandbox without putting it in the table. Raises SandboxRefused."""
        check(request, policy)
        if len(self._live) >= MAX_SANDBOXES:
            raise SandboxRefused("too-many-sandboxes", f"{MAX_SANDBOXES} sandboxes are live", "end some")
        token = "xt_" + _text(self._random(32))
        channel = dict(request.channel)
        key = self._random(32) if channel["kind"] in ALONE else b""
        sandbox = Sandbox(
            tenant=request.tenant,
            id="sb_" + base64.b32encode(self._random(10)).decode().lower(),
            epoch=1,
            role=request.role,
            owner=request.owner,
            agent=request.agent,
            task=request.task,
            attributes=dict(request.attributes),
            expires_at=now + request.ttl,
        )
        variables: dict[str, str] = {}
        values: dict[str, str] = {}
        leading: dict[str, str] = {}
        endpoint = ""
        for definition in usable_credentials(policy, request.role):
            for part, spec in definition.placeholders:
                name = definition.placeholder_name(part)
                variables[name] = spec.env
                derived = is_derived(definition) and self._stub_key
                values[name] = make(spec.shape, seed(self._stub_key, sandbox, name) if derived else self._random(32))
            leading |= stub_environment(definition)
            endpoint = endpoint or account_endpoint(definition) or ""
        record = SandboxRecord(
            sandbox=sandbox,
            token_sha256=_digest(token),
            channel=channel,
            channel_key_sha256=sha256(key).digest() if key else None,
            created_at=now,
            placeholders={name: _digest(value) for name, value in values.items()},
            boundary=EXTERNAL if policy.roles[request.role].boundary_external is not None else "",
        )
        return Created(
            record=record,
            token=token,
            channel_key=key,
            environment=leading | {variables[name]: value for name, value in values.items()},
            variables=variables,
            account_endpoint=endpoint,
        )

    def put(self, record: SandboxRecord) -> None:
        """Make it live."""
        self._live[record.key] = record
        self._by_token[record.token_sha256] = record.key
        if record.channel_key_sha256 is not None:
            self._by_channel[record.channel_key_sha256] = record.key

    def drop(self, tenant: str, sandbox: str) -> SandboxRecord | None:
        """It ended: its token from now on answers sandbox-ended. Returns what it was."""
        record = self._live.pop((tenant, sandbox), None)
        if record is None:
            return None
        self._by_token.pop(record.token_sha256, None)
        if record.channel_key_sha256 is not None:
            self._by_channel.pop(record.channel_key_sha256, None)
        self.remember_ended(record.token_sha256)
        return record

    def remember_ended(self, token_sha256: bytes) -> None:
        self._ended_tokens[token_sha256] = None
        while len(self._ended_tokens) > MAX_ENDED_TOKENS:
            self._ended_tokens.popitem(last=False)

    def get(self, sandbox: str, tenant: str | None = None) -> SandboxRecord | None:
        """The live sandbox with this id; ids are unique across tenants."""
        if tenant is not None:
            return self._live.get((tenant, sandbox))
        return next((record for (_, name), record in self._live.items() if name == sandbox), None)

    def live(self) -> tuple[SandboxRecord, ...]:
        return tuple(self._live.values())

    def ended_tokens(self) -> tuple[bytes, ...]:
        return tuple(self._ended_tokens)

    def expired(self, now: float) -> tuple[SandboxRecord, ...]:
        return tuple(record for record in self._live.values() if record.sandbox.expires_at <= now)

    def identify(
        self, evidence: Evidence, tenant: str, sandbox: str, epoch: int, now: float
    ) -> SandboxRecord | NotKnown:
        """The live sandbox that `evidence` proves, if it is the one that the statement names."""
        found: set[Owner] = set()
        if evidence.token:
            digest = _digest(evidence.token)
            key = self._by_token.get(digest)
            if key is None:
                return NotKnown(reason="sandbox-ended" if digest in self._ended_tokens else "bad-token")
            found.add(key)
        if evidence.channel_key:
            key = self._by_channel.get(sha256(evidence.channel_key).digest())
            if key is None:
                # A listener that outlived its sandbox: the channel's epoch is over (RULINGS 2.5).
                return NotKnown(reason="sandbox-ended")
            found.add(key)
        if not found:
            return NotKnown(reason="auth-required")
        record = self._live[sorted(found)[0]]
        if len(found) != 1 or record.key != (tenant, sandbox):
            return NotKnown(reason="bad-token", other=record.sandbox)
        if record.sandbox.epoch != epoch or record.sandbox.expires_at <= now:
            return NotKnown(reason="sandbox-ended")
        kind = record.channel["kind"]
        if kind in ALONE and not evidence.channel_key:
            return NotKnown(reason="bad-token", other=record.sandbox)
        if kind == "address" and not _same_address(evidence.peer, record.channel.get("address", "")):
            return NotKnown(reason="bad-token", other=record.sandbox)
        return record


def armed(record: SandboxRecord, policy: Policy) -> bool:
    """Whether a credential may be used for this sandbox at all. `policy` is the one in force.

    A role that lost its `boundary: external` arms nobody any more; one that got it arms those created from then on.
    """
    if record.boundary in SEEN:
        return record.channel["kind"] == SEEN[record.boundary]
    role = policy.roles.get(record.sandbox.role)
    return record.boundary == EXTERNAL and role is not None and role.boundary_external is not None


def check(request: Request, policy: Policy) -> None:
    """Raise SandboxRefused unless every value may stand in a sandbox (attributes: rules.grammar)."""
    if request.role not in policy.roles:
        raise SandboxRefused("unknown-role", "the policy has no such role", "see `exeat policy explain`")
    if not _PLAIN.match(request.tenant):
        raise SandboxRefused("bad-tenant", "a tenant is one word of [A-Za-z0-9_-]")
    for name, text in (("owner", request.owner), ("agent", request.agent), ("task", request.task)):
        if not _WORDS.match(text):
            raise SandboxRefused("bad-value", f"{name} is too long or holds a control character")
    if len(request.attributes) > MAX_ATTRIBUTES:
        raise SandboxRefused("bad-attribute", f"at most {MAX_ATTRIBUTES} attributes")
    for name, value in request.attributes.items():
        if not ATTRIBUTE_NAME.match(name) or not valid_attribute(value):
            raise SandboxRefused("bad-attribute", "an attribute is words of [A-Za-z0-9_-] joined by single . or /")
    kind = request.channel.get("kind", "")
    if kind not in CHANNELS or set(request.channel) - {"kind", "address"}:
        raise SandboxRefused("bad-channel", f"a channel's kind is one of {', '.join(CHANNELS)}")
    if (kind == "address") != ("address" in request.channel):
        raise SandboxRefused("bad-channel", "an address belongs to the channel kind address, and to no other")
    if kind == "address":
        try:
            ipaddress.ip_address(request.channel["address"])
        except ValueError:
            raise SandboxRefused("bad-channel", "the channel's address is not an IP address") from None
    if request.ttl <= 0:
        raise SandboxRefused("bad-ttl", "a sandbox lives for a positive number of seconds")


def usable_credentials(policy: Policy, role: str) -> tuple[CredentialDef, ...]:
    """The credentials that the rules of `role` name, each once, in order of name."""
    names = {rule.credential for rule in policy.roles[role].rules if rule.action == "allow" and rule.credential}
    return tuple(policy.credentials[name] for name in sorted(names) if name in policy.credentials)


def _same_address(left: str, right: str) -> bool:
    try:
        return ipaddress.ip_address(left) == ipaddress.ip_address(right)
    except ValueError:
        return False


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogatepass")).digest()
