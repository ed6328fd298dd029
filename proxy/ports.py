"""The proxy's ports: what the front door, the gate and the lanes need from elsewhere, as small interfaces.

Each has an in-memory fake in tests/support/fakes.py and one contract suite for fake and real. `Journal` is
audit.journal's, `BrokerLink` is proxy.brokerlink's, `Dialer` and `Resolver` are net's; they are not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from net.addresses import AddressTable
from rules.facts import Sandbox
from rules.grants import GrantBook
from rules.names import SandboxId
from rules.policy import Policy


class ProxyError(Exception):
    """Base of the faults of this room. Refusals are values (gate.Refuse), never exceptions."""


class DirectoryUnavailable(ProxyError):
    """There is no snapshot, or it is older than its bound: everything is denied (RULINGS 9.3, 9.5)."""


class Clock(Protocol):
    """Time, passed in. `wall` never goes below the vault's floor; `boot` never goes back (RULINGS 9.6)."""

    def wall(self) -> float:
        """Seconds since the Unix epoch."""

    def boot(self) -> float:
        """Seconds on the boot clock: for durations and deadlines."""


RandomBytes = Callable[[int], bytes]
"""`os.urandom` in production; a fixed source in tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """How a connection reached us: the listener's own facts, known before any byte is read.

    `kind` "sandbox": the listener is reachable by that one sandbox only, so the channel identifies alone; `key`
    is its evidence towards the broker. "shared": a token is required and `peer` only narrows (RULINGS 2.5).
    """

    listener: str
    kind: Literal["shared", "sandbox"]
    sandbox: SandboxId | None = None
    key: bytes = field(default=b"", repr=False)
    peer: str = ""
    """Source IP address; empty on a Unix socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """One live sandbox as the vault pushed it: what policy may know, and how it proves itself."""

    sandbox: Sandbox
    token_sha256: bytes | None
    own_listener: bool
    """True: it has a listener of its own; its token is refused on a shared one."""
    address: str | None = None
    """The only source address from which its token counts, where one is bound."""
    channel_key_sha256: bytes | None = None
    placeholders: Mapping[str, bytes] = field(default_factory=dict)
    """Credential name -> SHA-256 of this sandbox's whole placeholder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything one decision looks at, frozen: one policy version, one set of sandboxes (I27)."""

    generation: int
    policy: Policy
    sandboxes: Mapping[SandboxId, Registered]
    by_token: Mapping[bytes, SandboxId]
    ended_tokens: frozenset[bytes] = frozenset()
    """Hashes of tokens that were valid once: 403 sandbox-ended instead of bad-token. Bounded."""
    inspected_ports: frozenset[int] = frozenset({443})
    """Ports on which a TLS client speaks first because some rule inspects them (RULINGS 5.6)."""
    addresses: AddressTable = field(default_factory=AddressTable)
    """What counts as "inside" on this node, as the vault knows it; the dialer adds the interfaces."""
    grants: GrantBook = field(default_factory=GrantBook)
    """What redirects opened: the worker's one book, in every snapshot."""


class Directory(Protocol):
    """The snapshot in force."""

    def snapshot(self) -> Snapshot:
        """The snapshot to judge by now. Raises DirectoryUnavailable without one or beyond its age bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveKey:
    """What a live tunnel, stream or connection belongs to. Starts with (tenant, sandbox) like every key of ours."""

    tenant: str
    sandbox: str
    epoch: int
    host: str
    port: int
    rule: str
    digest: str
    """The policy digest under which it was admitted."""
    kind: Literal["connection", "tunnel", "exchange"]
    credential: str = ""


class LiveHandle(Protocol):
    """One entry of the live set."""

    def close(self) -> None:
        """Take the entry out: it ended by itself. Harmless when repeated."""


class LiveSet(Protocol):
    """What can be cut. Every open connection, tunnel and exchange of a sandbox is in it while it lives."""

    def add(
        self, key: LiveKey, cut: Callable[[str], None], still_allowed: Callable[[Snapshot], bool] | None = None
    ) -> LiveHandle:
        """Register. `cut(reason)` must abort both sides at once and not raise.

        `still_allowed` judges the entry anew under a new snapshot; None: it lives as long as its sandbox.
        """

    def cut(self, matches: Callable[[LiveKey], bool], reason: str) -> int:
        """Cut and remove every matching entry; return how many."""

    def rejudge(self, snapshot: Snapshot) -> int:
        """Cut what `snapshot` no longer allows: ended sandboxes, other epochs, refused entries. Faults cut too."""

    def count(self, matches: Callable[[LiveKey], bool] | None = None) -> int:
        """How many entries match."""
