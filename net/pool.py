"""Upstream connections kept for the next request of the same sandbox to the same place. Signatures first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from net.dial import DialTarget
from net.stream import ByteStream


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKey:
    """Two requests may share a connection only if their keys are equal (RULINGS 5.3).

    `target` holds tenant, sandbox, scheme, host, port, allowed and static addresses, trust set, TLS or not.
    """

    target: DialTarget
    credential: str | None = None


class Lease(Protocol):
    """A connection in use. Hand it back with Pool.release."""

    key: PoolKey
    stream: ByteStream
    address: str
    tls_version: str | None
    reused: bool


class ConnectionPool(Protocol):
    async def acquire(self, key: PoolKey, *, fresh: bool = False) -> Lease: ...
    def release(self, lease: Lease, *, reusable: bool) -> None: ...
    def cut(self, predicate: Callable[[PoolKey, str], bool]) -> int: ...
    async def close(self) -> None: ...
