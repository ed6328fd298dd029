"""TLS contexts: one server context per host for this worker's leaf key, one client context per trust set.

    ServerContexts(leaf_key, fetch_chain).get(host)   towards sandboxes: a leaf for `host`, asked of the vault once
    ClientContexts().get(trust)                       towards upstreams: verified, strict X.509, never switched off

Building costs 1.4 ms for a server and 26 ms for a client context (E13, E14), so both happen in a thread, once per
key, and every waiter shares the result. Keys reach OpenSSL through a memfd: there is no file with a private key.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from net.aside import Aside, Busy
from net.stream import NetError
from net.trust import ClientProof, TrustKey, TrustUnusable, system_bundle
from rules.names import Host, Owner

ChainSource = Callable[[Host, Owner | None], Awaitable[str]]
"""Asks the vault for the chain of a host (leaf first, then the node intermediate) for this worker's key, as PEM.

The owner is the sandbox whose connection needs it: the vault counts and records leaves per sandbox.
"""

MAX_SERVER_CONTEXTS = 1000
HTTP1_ONLY = ("http/1.1",)
_RENEW_BEFORE = datetime.timedelta(hours=24).total_seconds()


class ContextUnavailable(NetError):
    """No TLS context can be made for this host: the chain is missing, late, or not for the leaf key."""


@dataclass(frozen=True, slots=True)
class _Made:
    context: ssl.SSLContext
    until: float


class ServerContexts:
    """Contexts for TLS towards sandboxes, least recently used first out.

    Instantiate a second, smaller one for refusal leaves: denied names must not push out those in use (RULINGS 5.6).
    """

    def __init__(
        self,
        leaf_key: ec.EllipticCurvePrivateKey,
        fetch_chain: ChainSource,
        *,
        now: Callable[[], float],
        capacity: int = MAX_SERVER_CONTEXTS,
        seconds: float = 5.0,
    ) -> None:
        """`leaf_key` is the worker's own, made at its start. `now` gives Unix time. `seconds` bounds one build."""
        self._key_pem = leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._fetch_chain = fetch_chain
        self._now = now
        self._capacity = capacity
        self._seconds = seconds
        self._made: OrderedDict[tuple[Host, tuple[str, ...]], _Made] = OrderedDict()
        self._being_made: dict[tuple[Owner | None, Host, tuple[str, ...]], asyncio.Future[ssl.SSLContext]] = {}
        self._epoch = 0
        self._threads = Aside("certificates", threads=2)

    async def get(
        self, host: Host, alpn: tuple[str, ...] = HTTP1_ONLY, *, owner: Owner | None = None
    ) -> ssl.SSLContext:
        """The context that serves `host` and offers `alpn`. Raises ContextUnavailable.

        Finished contexts are shared by all sandboxes (a leaf says nothing about who asked first). One being made is
        shared only within a sandbox, so that a refusal of one sandbox's request is not another's (I19).
        """
        made = self._made.get((host, alpn))
        if made is not None and self._now() < made.until:
            self._made.move_to_end((host, alpn))
            return made.context
        key = (owner, host, alpn)
        being_made = self._being_made.get(key)
        if being_made is None:
            being_made = asyncio.ensure_future(self._make(host, alpn, owner))
            self._being_made[key] = being_made
            being_made.add_done_callback(lambda done: self._finished(key, done))
        # Shielded: one waiter that gives up must not take the context from the others.
        return await asyncio.shield(being_made)

    def clear(self) -> None:
        """Forget every context: the authority was rotated. Connections in progress keep theirs."""
        self._made.clear()
        self._epoch += 1

    def __len__(self) -> int:
        return len(self._made)

    async def _make(self, host: Host, alpn: tuple[str, ...], owner: Owner | None) -> ssl.SSLContext:
        epoch = self._epoch
        try:
            async with asyncio.timeout(self._seconds):
                chain = await self._fetch_chain(host, owner)
                work = partial(_server_context, self._key_pem, chain, alpn)
                made = await self._threads.run(owner or ("", ""), work, self._seconds)
        except (TimeoutError, Busy, OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ContextUnavailable(f"no certificate for the host ({type(error).__name__})") from None
        if epoch == self._epoch:
            self._made[host, alpn] = made
            while len(self._made) > self._capacity:
                self._made.popitem(last=False)
        return made.context

    def _finished(self, key: tuple[Owner | None, Host, tuple[str, ...]], done: asyncio.Future[ssl.SSLContext]) -> None:
        del self._being_made[key]
        if not done.cancelled():
            done.exception()  # taken: every waiter may have given up


def _server_context(key_pem: bytes, chain_pem: str, alpn: tuple[str, ...]) -> _Made:
    """Runs in a thread. Raises ssl.SSLError where chain and key do not belong together, ValueError for no PEM."""
    leaf = x509.load_pem_x509_certificate(chain_pem.encode())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(list(alpn))
    load_chain(context, key_pem + b"\n" + chain_pem.encode())
    return _Made(context, leaf.not_valid_after_utc.timestamp() - _RENEW_BEFORE)


def load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """load_cert_chain from memory: through a memfd, because the ssl module takes paths only (E13).

    Works with PR_SET_DUMPABLE 0 as an unprivileged user too: the kernel lets a thread group into its own /proc.
    Raises ssl.SSLError, OSError.
    """
    fd = os.memfd_create("chain", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        view = memoryview(pem)
        while view:
            view = view[os.write(fd, view) :]
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


class ClientContexts:
    """Contexts for TLS towards upstreams, shared by trust set. `prepare` at policy load, `get` at each dial."""

    def __init__(self, *, capacity: int = 256) -> None:
        self._capacity = capacity
        self._made: OrderedDict[TrustKey, asyncio.Future[ssl.SSLContext]] = OrderedDict()

    async def get(self, trust: TrustKey, proof: ClientProof | None = None) -> ssl.SSLContext:
        """The context that trusts exactly `trust`. Raises TrustUnusable (empty or unreadable CA, no system store).

        One that proves itself with `proof` is made for one connection and not kept: it holds a key.
        """
        if proof is not None:
            return await asyncio.to_thread(client_context, trust, proof)
        making = self._made.get(trust)
        if making is None:
            making = asyncio.ensure_future(asyncio.to_thread(client_context, trust))
            self._made[trust] = making
            making.add_done_callback(lambda done: self._finished(trust, done))
            while len(self._made) > self._capacity:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(trust)
        return await asyncio.shield(making)

    async def prepare(self, trusts: frozenset[TrustKey]) -> None:
        """Build what a new policy needs, and drop what it does not. Raises TrustUnusable before anything is dropped."""
        for trust in trusts:
            await self.get(trust)
        for trust in [trust for trust in self._made if trust not in trusts]:
            del self._made[trust]

    def _finished(self, trust: TrustKey, done: asyncio.Future[ssl.SSLContext]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._made.get(trust) is done:
            del self._made[trust]  # the next dial tries again


def client_context(trust: TrustKey, proof: ClientProof | None = None) -> ssl.SSLContext:
    """A verifying context for one trust set; blocking (26 ms for the system store). Raises TrustUnusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies chain and name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    context.hostname_checks_common_name = False
    context.set_alpn_protocols(list(HTTP1_ONLY))
    try:
        if trust.ca_pem is None:
            context.load_verify_locations(cafile=system_bundle())
        else:
            # A destination may pin an intermediate of its own; the system store holds roots only.
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(cadata=trust.ca_pem)
        if trust.added_pem is not None:
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN  # an operator may name an intermediate
            context.load_verify_locations(cadata=trust.added_pem)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise TrustUnusable(f"the certificate authorities cannot be read ({type(error).__name__})") from None
    if not context.cert_store_stats()["x509"]:
        raise TrustUnusable("there is no certificate in the certificate authorities")
    if proof is not None:
        try:
            load_chain(context, proof.pem)
        except (OSError, ValueError):
            raise TrustUnusable("the client certificate and its key cannot be used together") from None
    return context
