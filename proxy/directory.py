"""`SnapshotDirectory`: the newest snapshot that the vault pushed, while the vault is heard (RULINGS 9.3, 9.5).

Rules: no snapshot, or 2 s without a heartbeat: every question raises DirectoryUnavailable. A snapshot is read whole
or not at all; one that cannot be read leaves none in force. Generations only grow.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from ipaddress import ip_network
from typing import Any, Final

from net.addresses import AddressTable
from proxy.ports import Clock, DirectoryUnavailable, ProxyError, Registered, Snapshot
from rules.compile import compile_policy
from rules.facts import Sandbox
from rules.grants import GrantBook
from rules.names import SandboxId
from rules.policy import Policy
from wire.control import SILENCE_SECONDS

ENDED_TOKENS: Final = 10_000
"""Hashes of ended tokens remembered, newest first, for `sandbox-ended` instead of `bad-token`."""

OWN_LISTENER_KINDS: Final = frozenset({"port", "unix", "namespace"})
SHARED_KINDS: Final = frozenset({"shared", "address"})


class SnapshotInvalid(ProxyError):
    """The vault's document cannot be read. str() is a fixed sentence."""


class SnapshotDirectory:
    """The Directory of a worker. `install` and `beat` come from the vault's channel, `snapshot` from everywhere."""

    def __init__(self, clock: Clock, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._clock = clock
        self._silence = silence_seconds
        self._snapshot: Snapshot | None = None
        self._heard = clock.boot()
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._lost = False
        self.grants = GrantBook()
        """What redirects opened. Whoever has ended, or was not heard of yet, is refused whatever stands here."""

    def snapshot(self) -> Snapshot:
        """See proxy.ports.Directory."""
        if self._snapshot is None or self.silent:
            raise DirectoryUnavailable("no current snapshot")
        return self._snapshot

    @property
    def silent(self) -> bool:
        """True when the vault was not heard for too long or its channel is gone."""
        return self._lost or self._clock.boot() - self._heard > self._silence

    @property
    def generation(self) -> int:
        """Generation in force; 0 before the first."""
        return self._snapshot.generation if self._snapshot else 0

    @property
    def policy(self) -> Policy | None:
        """The policy in force, to save compiling it again."""
        return self._snapshot.policy if self._snapshot else None

    def withdraw(self) -> None:
        """The vault's newest snapshot cannot be read: the former one no longer says what is true."""
        self._snapshot = None

    def beat(self) -> None:
        """The vault was heard."""
        self._heard = self._clock.boot()

    def lose(self) -> None:
        """The channel to the vault is gone: deny everything from now on."""
        self._lost = True

    def install(self, snapshot: Snapshot) -> Snapshot:
        """Put `snapshot` in force; older generations than the one in force are ignored. Returns what is in force."""
        former = self._snapshot
        if former is not None and snapshot.generation < former.generation:
            return former
        if former is not None:
            for digest in former.by_token.keys() - snapshot.by_token.keys():
                self._ended[digest] = None
            while len(self._ended) > ENDED_TOKENS:
                self._ended.popitem(last=False)
        for digest in snapshot.by_token:
            self._ended.pop(digest, None)
        ended = snapshot.ended_tokens | frozenset(self._ended)
        self._snapshot = replace(snapshot, ended_tokens=ended, grants=self.grants)
        self.beat()
        return self._snapshot


def read_snapshot(generation: int, document: bytes, known: Policy | None = None) -> Snapshot:
    """Return the snapshot in the vault's JSON. `known` is reused where its digest is the document's (no compile).

    Raises SnapshotInvalid for anything that is not wholly as expected; CPU-bound: call it in a thread.
    """
    try:
        value = json.loads(document)
        if value["generation"] != generation:
            raise SnapshotInvalid("the snapshot names another generation")
        policy = _policy(value, known)
        entries = [_registered(item) for item in value["sandboxes"]]
        sandboxes = {SandboxId(entry.sandbox.id): entry for entry in entries}
        if len(sandboxes) != len(entries):
            raise SnapshotInvalid("a sandbox occurs twice")
        by_token: dict[bytes, SandboxId] = {}
        for entry in entries:
            if entry.token_sha256 is not None:
                if entry.token_sha256 in by_token:
                    raise SnapshotInvalid("two sandboxes share a token")
                by_token[entry.token_sha256] = SandboxId(entry.sandbox.id)
        own = value.get("self") or {}
        addresses = AddressTable(
            internal_ranges=tuple(ip_network(text) for text in own.get("internal_ranges", ())),
            self_addresses=tuple(ip_network(text) for text in own.get("addresses", ())),
            listener_ports=frozenset(_number(port) for port in own.get("listener_ports", ())),
        )
        ended = frozenset(bytes.fromhex(item) for item in value.get("ended_tokens", ()))
    except SnapshotInvalid:
        raise
    except Exception as error:
        raise SnapshotInvalid("the snapshot is not one of ours") from error
    return Snapshot(
        generation=generation,
        policy=policy,
        sandboxes=sandboxes,
        by_token=by_token,
        ended_tokens=ended,
        inspected_ports=inspected_ports(policy),
        addresses=addresses,
    )


def inspected_ports(policy: Policy) -> frozenset[int]:
    """443 and every port that some rule inspects inside TLS: there a refusal can be told inside TLS (RULINGS 5.6)."""
    ports = {443}
    for role in policy.roles.values():
        for rule in role.rules:
            if rule.action == "allow" and not rule.tunnel:
                ports.update(op.port for op in rule.operations if op.scheme == "https")
    return frozenset(ports)


def _policy(value: Mapping[str, Any], known: Policy | None) -> Policy:
    if known is not None and value["digest"] == known.digest:
        return known
    policy = compile_policy(value["document"])
    if policy.digest != value["digest"]:
        raise SnapshotInvalid("the policy is not the one that the vault named")
    return policy


def _registered(item: Mapping[str, Any]) -> Registered:
    channel = item["channel"]
    kind = channel["kind"]
    if kind not in OWN_LISTENER_KINDS | SHARED_KINDS:
        raise SnapshotInvalid("a channel of an unknown kind")
    token = item.get("token_sha256")
    key = channel.get("key_sha256")
    attributes = item.get("attributes") or {}
    if not all(isinstance(part, str) for pair in attributes.items() for part in pair):
        raise SnapshotInvalid("an attribute is not text")
    sandbox = Sandbox(
        tenant=_text(item["tenant"]),
        id=_text(item["id"]),
        epoch=_number(item["epoch"]),
        role=_text(item["role"]),
        owner=_text(item["owner"]),
        agent=_text(item["agent"]),
        task=_text(item["task"]),
        attributes=dict(attributes),
        expires_at=float(item["expires_at"]),
    )
    return Registered(
        sandbox=sandbox,
        token_sha256=_digest(token) if token else None,
        own_listener=kind in OWN_LISTENER_KINDS,
        address=_text(channel["address"]) if kind == "address" else channel.get("address"),
        channel_key_sha256=_digest(key) if key else None,
        placeholders={name: _digest(digest) for name, digest in (item.get("placeholders") or {}).items()},
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SnapshotInvalid("a field is not text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int:
        raise SnapshotInvalid("a field is not a number")
    return value


def _digest(value: str) -> bytes:
    digest = bytes.fromhex(value)
    if len(digest) != sha256().digest_size:
        raise SnapshotInvalid("a digest has a wrong length")
    return digest
