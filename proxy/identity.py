"""Who is asking: (channel, optional token) against the snapshot. A header alone never selects policy.

Rules (RULINGS 2.5, 2.6), the refusing ones first:
    more than one Proxy-Authorization, or one that is no Basic or Bearer       bad-token
    shared listener, no token                                                  auth-required (407)
    a token that was valid once, or a sandbox whose time is over               sandbox-ended
    an unknown token; a token that belongs to another channel or address       bad-token
    own listener: the channel identifies; a token that came along must be that sandbox's own
Identity is fixed at the first head of a connection (`same_identity`); another token later is auth-required.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from typing import Literal

from proxy.ports import Channel, Registered, Snapshot
from rules.facts import Sandbox
from rules.names import SandboxId
from wire.handoff import Evidence

MAX_TOKEN = 512
"""Bytes; ours are far shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """A sandbox that proved itself on this connection, and the evidence it proved itself with (RULINGS 2.1)."""

    sandbox: Sandbox
    channel: Channel
    token: str | None = field(default=None, repr=False)

    @property
    def evidence(self) -> Evidence:
        """What the broker checks against its own table: the token as presented, and the channel's key."""
        return Evidence(token=self.token or "", channel_key=self.channel.key, peer=self.channel.peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotIdentified:
    """No. `reason` is auth-required, bad-token or sandbox-ended; `sandbox` whose evidence it was, if anybody's."""

    reason: Literal["auth-required", "bad-token", "sandbox-ended"]
    sandbox: Sandbox | None = None


def identify(
    channel: Channel, presented: tuple[str, ...], snapshot: Snapshot, now: float
) -> Identified | NotIdentified:
    """Return who speaks on `channel`. `presented` holds every Proxy-Authorization value; `now` is wall time."""
    tokens = _tokens(presented)
    if tokens is None:
        return NotIdentified(reason="bad-token")
    if channel.kind == "sandbox":
        return _by_channel(channel, tokens, snapshot, now)
    if not presented:
        return NotIdentified(reason="auth-required")
    found, ended = _lookup(tokens, snapshot)
    if found is None:
        return NotIdentified(reason="sandbox-ended" if ended else "bad-token")
    registered, token = found
    sandbox = registered.sandbox
    if registered.own_listener or (registered.address is not None and registered.address != channel.peer):
        return NotIdentified(reason="bad-token", sandbox=sandbox)
    if sandbox.expires_at <= now:
        return NotIdentified(reason="sandbox-ended", sandbox=sandbox)
    return Identified(sandbox=sandbox, channel=channel, token=token)


def same_identity(who: Identified, presented: tuple[str, ...]) -> bool:
    """True where a later head on the same connection presents the same evidence as the first one did."""
    if not presented:
        return who.token is None
    tokens = _tokens(presented)
    return tokens is not None and who.token is not None and who.token in tokens


def current(who: Identified, snapshot: Snapshot, now: float) -> Registered | None:
    """The sandbox's entry in `snapshot` while it is still the one that was identified, else None (ended)."""
    registered = snapshot.sandboxes.get(SandboxId(who.sandbox.id))
    if registered is None or registered.sandbox.epoch != who.sandbox.epoch or registered.sandbox.expires_at <= now:
        return None
    if who.token is not None and registered.token_sha256 != _digest(who.token):
        return None
    return registered


def _by_channel(
    channel: Channel, tokens: tuple[str, ...], snapshot: Snapshot, now: float
) -> Identified | NotIdentified:
    registered = snapshot.sandboxes.get(channel.sandbox) if channel.sandbox is not None else None
    if registered is None or registered.sandbox.expires_at <= now:
        return NotIdentified(reason="sandbox-ended", sandbox=registered.sandbox if registered else None)
    known_key = registered.channel_key_sha256
    if known_key is not None and not compare_digest(known_key, sha256(channel.key).digest()):
        # The listener outlived its sandbox's epoch: the address was reused (RULINGS 2.5).
        return NotIdentified(reason="sandbox-ended", sandbox=registered.sandbox)
    if not tokens:
        return Identified(sandbox=registered.sandbox, channel=channel)
    for token in tokens:
        if registered.token_sha256 is not None and compare_digest(registered.token_sha256, _digest(token)):
            return Identified(sandbox=registered.sandbox, channel=channel, token=token)
    return NotIdentified(reason="bad-token", sandbox=registered.sandbox)


def _lookup(tokens: tuple[str, ...], snapshot: Snapshot) -> tuple[tuple[Registered, str] | None, bool]:
    """The one sandbox that the tokens belong to. Two different ones are nobody. Second: any was valid once."""
    matches: dict[str, tuple[Registered, str]] = {}
    ended = False
    for token in tokens:
        digest = _digest(token)
        owner = snapshot.by_token.get(digest)
        registered = snapshot.sandboxes.get(owner) if owner is not None else None
        if registered is not None:
            matches[registered.sandbox.id] = (registered, token)
        ended = ended or digest in snapshot.ended_tokens
    if len(matches) == 1:
        return next(iter(matches.values())), ended
    return None, ended and not matches


def _tokens(presented: tuple[str, ...]) -> tuple[str, ...] | None:
    """Candidate tokens of one Proxy-Authorization: Bearer's value, or either part of Basic. None: unreadable."""
    if not presented:
        return ()
    if len(presented) > 1:
        return None
    scheme, _, rest = presented[0].partition(" ")
    reader = _SCHEMES.get(scheme.lower())
    if reader is None or len(rest) > 2 * MAX_TOKEN:
        return None
    candidates = tuple(part for part in reader(rest.strip(" ")) if part)
    if not candidates or any(len(part) > MAX_TOKEN or not part.isascii() for part in candidates):
        return None
    return candidates


def _basic(value: str) -> tuple[str, ...]:
    # RFC 7617: user-id may not hold a colon; the password may.
    try:
        user, _, password = b64decode(value, validate=True).decode("utf-8").partition(":")
    except (binascii.Error, ValueError):
        return ()
    return (password, user)


def _bearer(value: str) -> tuple[str, ...]:
    return (value,)


_SCHEMES: dict[str, Callable[[str], tuple[str, ...]]] = {"basic": _basic, "bearer": _bearer}


def _digest(token: str) -> bytes:
    return sha256(token.encode("ascii")).digest()
