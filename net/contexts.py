"""TLS contexts: one server context per host for this worker's leaf key, one client context per trust set.

Signatures first. `ServerContexts(leaf_key, fetch_chain, capacity=1000)`, `await .get(host, alpn=("http/1.1",))`;
`ClientContexts()`, `await .get(trust)`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rules.names import Host

ChainSource = Callable[[Host], Awaitable[str]]
"""Asks the vault for a chain (leaf first, then the node intermediate) for this worker's leaf key, as PEM."""
