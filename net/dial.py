"""One connection to one permitted destination (I04, I05).

The procedure, tagged in the code:

  1  own names are never dialled;
  2  addresses: the literal itself, the destination's static ones, or one lookup of the absolute name;
  3  every answer is vetted against the address table, with interfaces read at this dial; one bad answer refuses all;
  4  connect to those very addresses, numerically, next one after 250 ms (RFC 8305) or a failure; 10 s in all;
  5  the peer's address is the one asked for, and not our own socket;
  6  TLS verified for the name, inside the same 10 s.

Nothing is sent upstream before 6 is done. There is no proxy variable, no fallback and no retry here.

Where the operator set an upstream proxy (net/upstream.py), a destination that it carries goes another way:

  p1  own names, literals, special-use names and destinations tied to addresses are refused, and nothing is looked up;
  p2  the proxy's own address: the operator's, so it may be private, but it is never one of our listeners;
  p3  connect to it as in 4 and 5, and CONNECT by name; only 200 goes on;
  p4  TLS verified for the destination's name through the tunnel, inside the same 10 s.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network
from typing import Literal, Protocol

from net.addresses import Address, AddressRefused, AddressTable
from net.contexts import ClientContexts
from net.interfaces import InterfacesUnreadable, local_addresses
from net.resolve import Lookups, ResolveFailed
from net.stream import ByteStream, NetError, StreamBroken, open_socket_stream
from net.tls import PeerCertificateRefused, client_side
from net.trust import SYSTEM_TRUST, ClientProof, TrustKey, TrustUnusable
from net.turns import Turns
from net.upstream import DELEGATED, ProxyRefused, UpstreamProxy, ask_for_tunnel, why_not_by_name
from rules.names import OWN_NAME, Destination

CONNECT_SECONDS = 10.0
STAGGER_SECONDS = 0.25

DialReason = Literal[
    "dns-failed",
    "address-refused",
    "upstream-unreachable",
    "upstream-certificate",
    "upstream-timeout",
    "upstream-protocol",
    "policy-changing",
    "internal-error",
]


class DialError(NetError):
    """No connection. `reason` is a code of rules.reasons, `detail_for_log` a sentence, `address` the offending one."""

    def __init__(self, reason: DialReason, detail_for_log: str, address: str = "") -> None:
        super().__init__(f"{reason}: {detail_for_log}")
        self.reason: DialReason = reason
        self.detail_for_log = detail_for_log
        self.address = address


@dataclass(frozen=True, slots=True, kw_only=True)
class DialTarget:
    """Where to connect, for whom, and what may be believed there. Made from a Permit, never from client bytes.

    `addresses_allowed` and `static` are the destination's `addresses:` and `resolve:`.
    """

    tenant: str
    sandbox: str
    destination: Destination
    want_tls: bool
    addresses_allowed: tuple[IPv4Network | IPv6Network, ...] = ()
    static: tuple[str, ...] = ()
    trust: TrustKey = SYSTEM_TRUST
    proof: ClientProof | None = None
    """What the connection proves itself with, where the upstream asks for a client certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """An open connection. `address` is the numeric one dialled, or `delegated`; `tls_version` None: clear text."""

    stream: ByteStream
    address: str
    tls_version: str | None


class Dialer(Protocol):
    """Port: makes connections."""

    async def dial(self, target: DialTarget) -> Connected:
        """Raises DialError; within 3 s for the name and 10 s for connecting and TLS together."""
        ...

    def via(self, target: DialTarget) -> str:
        """The upstream proxy that `target` would be dialled through, as `host:port`; empty: none."""
        ...


class SocketDialer:
    """The Dialer of real sockets. One per process."""

    def __init__(
        self,
        lookups: Lookups,
        contexts: ClientContexts,
        table: Callable[[], AddressTable],
        *,
        interfaces: Callable[[], frozenset[Address]] = local_addresses,
        seconds: float = CONNECT_SECONDS,
        stagger: float = STAGGER_SECONDS,
        upstream: UpstreamProxy | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`turns` are the process's: connections take those of their sandboxes.

        `table` is asked at each dial, so that new listeners count at once; `interfaces` is added to its `own`."""
        self._lookups = lookups
        self._contexts = contexts
        self._table = table
        self._interfaces = interfaces
        self._seconds = seconds
        self._stagger = stagger
        self._upstream = upstream
        self._turns = turns
        self._finding_proxy: asyncio.Future[tuple[str, ...]] | None = None

    def via(self, target: DialTarget) -> str:
        proxy = self._upstream
        return proxy.name if proxy is not None and proxy.carries(target.destination.host) else ""

    async def dial(self, target: DialTarget) -> Connected:
        host, port = target.destination.host, target.destination.port
        if host.text == OWN_NAME or host.text.endswith("." + OWN_NAME):  # 1
            raise DialError("address-refused", "an own name is never dialled")
        if target.want_tls != (target.destination.scheme == "https"):
            raise DialError("internal-error", "scheme and TLS disagree")
        if self._upstream is not None and self._upstream.carries(host):
            return await self._delegate(target, self._upstream)
        addresses = await self._addresses(target)  # 2
        vetted = self._vet(target, addresses)  # 3
        if not host.is_literal and not target.static:
            self._lookups.keep(target.tenant, target.sandbox, host, addresses)
        try:
            async with asyncio.timeout(self._seconds):
                context = await self._contexts.get(target.trust, target.proof) if target.want_tls else None
                connection, address = await self._connect(vetted, port)  # 4, 5
                stream = await self._stream(target, connection)
                if context is None:
                    return Connected(stream=stream, address=address, tls_version=None)
                return await self._verify(stream, context, host.text, address)  # 6
        except TimeoutError:
            raise DialError("upstream-timeout", f"not connected within {self._seconds:g} s", vetted[0]) from None
        except TrustUnusable as error:
            raise DialError("upstream-certificate", str(error)) from None

    async def _addresses(self, target: DialTarget) -> tuple[str, ...]:
        host = target.destination.host
        if host.is_literal:
            return (host.text,)
        if target.static:
            return target.static
        try:
            return await self._lookups.addresses(target.tenant, target.sandbox, host, target.destination.port)
        except ResolveFailed as error:
            raise DialError("dns-failed", str(error)) from None

    async def _delegate(self, target: DialTarget, proxy: UpstreamProxy) -> Connected:
        """The way through the upstream proxy. There is no other one for this target, whatever happens here."""
        destination = target.destination
        if (why := why_not_by_name(destination.host)) is not None:  # p1
            raise DialError("address-refused", why, DELEGATED)
        if target.static or target.addresses_allowed:
            detail = (
                "addresses: and resolve: cannot be kept behind the upstream proxy; list the host in upstream.except"
            )
            raise DialError("address-refused", detail, DELEGATED)
        trust = replace(target.trust, added_pem=proxy.ca_pem) if proxy.ca_pem is not None else target.trust
        try:
            addresses = await self._proxy_addresses(proxy)  # p2
            async with asyncio.timeout(self._seconds):
                context = await self._contexts.get(trust, target.proof) if target.want_tls else None
                connection, _ = await self._connect(addresses, proxy.port)  # p3
                stream = await self._stream(target, connection)
                try:
                    await ask_for_tunnel(stream, destination, proxy.authorization)
                except BaseException:
                    stream.abort()
                    raise
                if context is None:
                    return Connected(stream=stream, address=DELEGATED, tls_version=None)
                return await self._verify(stream, context, destination.host.text, DELEGATED)  # p4
        except DialError as error:
            detail = error.detail_for_log
            if error.address != DELEGATED:  # it is about the connection to the proxy, not about what lies behind it
                detail = f"the upstream proxy: {detail}"
            raise DialError(error.reason, detail, DELEGATED) from None
        except ProxyRefused as error:
            raise DialError("upstream-unreachable", str(error), DELEGATED) from None
        except StreamBroken as error:
            raise DialError("upstream-unreachable", f"the upstream proxy: {error.kind}", DELEGATED) from None
        except TimeoutError:
            detail = f"not connected through the upstream proxy within {self._seconds:g} s"
            raise DialError("upstream-timeout", detail, DELEGATED) from None
        except TrustUnusable as error:
            raise DialError("upstream-certificate", str(error), DELEGATED) from None

    async def _proxy_addresses(self, proxy: UpstreamProxy) -> tuple[str, ...]:
        """Where the proxy is. One lookup for all who wait, so that no sandbox uses up another's."""
        host = proxy.place
        if host.is_literal:
            addresses: tuple[str, ...] = (host.text,)
        else:
            finding = self._finding_proxy
            if finding is None or finding.done():
                finding = asyncio.ensure_future(self._lookups.addresses(*_NOBODY, host, proxy.port))
                finding.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._finding_proxy = finding
            try:
                addresses = await asyncio.shield(finding)
            except ResolveFailed as error:
                raise DialError("upstream-unreachable", f"its name: {error}") from None
        verdict = self._current_table("upstream-unreachable").vet_operators(addresses, proxy.port)
        if isinstance(verdict, AddressRefused):
            raise DialError("upstream-unreachable", f"its address: {verdict.why}", verdict.address)
        if not host.is_literal:
            self._lookups.keep(*_NOBODY, host, addresses)
        return verdict.addresses

    def _current_table(self, reason: DialReason) -> AddressTable:
        """The address table with the interfaces of this moment."""
        table = self._table()
        try:
            return replace(table, own=table.own | self._interfaces())
        except InterfacesUnreadable as error:
            raise DialError(reason, str(error)) from None

    def _vet(self, target: DialTarget, addresses: tuple[str, ...]) -> tuple[str, ...]:
        table = self._current_table("address-refused")
        verdict = table.vet(addresses, target.destination.port, target.addresses_allowed)
        if isinstance(verdict, AddressRefused):
            raise DialError("address-refused", verdict.why, verdict.address)
        return verdict.addresses

    async def _connect(self, addresses: tuple[str, ...], port: int) -> tuple[socket.socket, str]:
        """The first address that answers. Attempts overlap; whatever loses is closed."""
        attempts: dict[asyncio.Task[socket.socket], str] = {}
        waiting = list(addresses)
        faults: list[str] = []
        try:
            while waiting or attempts:
                if waiting:
                    address = waiting.pop(0)
                    attempts[asyncio.ensure_future(_attempt(address, port))] = address
                done, _ = await asyncio.wait(
                    attempts,
                    timeout=self._stagger if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    if task.exception() is None:
                        return task.result(), attempts.pop(task)
                    faults.append(f"{attempts.pop(task)}: {_errno(task.exception())}")
        finally:
            for task in attempts:
                task.cancel()
                task.add_done_callback(_close_late)
        raise DialError("upstream-unreachable", "; ".join(faults)[:512], addresses[0])

    async def _stream(self, target: DialTarget, connection: socket.socket) -> ByteStream:
        stream = await _open_stream(connection)
        if self._turns is not None:
            stream.share = self._turns.share((target.tenant, target.sandbox))
        return stream

    async def _verify(self, stream: ByteStream, context: ssl.SSLContext, name: str, address: str) -> Connected:
        try:
            tls = await client_side(stream, context, name, self._seconds)
        except PeerCertificateRefused as error:
            raise DialError("upstream-certificate", error.detail, address) from None
        except StreamBroken as error:
            detail = f"TLS: {error.kind} {error.detail}".strip()
            raise DialError(_HANDSHAKE_FAULTS.get(error.kind, "upstream-unreachable"), detail, address) from None
        except BaseException:
            stream.abort()
            raise
        return Connected(stream=tls, address=address, tls_version=tls.version)


_NOBODY = ("", "")
"""The owner of lookups that are the operator's and no sandbox's."""

_HANDSHAKE_FAULTS: dict[str, DialReason] = {"handshake-timeout": "upstream-timeout", "handshake": "upstream-protocol"}


async def _attempt(address: str, port: int) -> socket.socket:
    """A connected, non-blocking socket to exactly this numeric address. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # IPPROTO_TCP is named, or asyncio skips TCP_NODELAY: 44 ms a request (RULINGS 11.8).
    connection = socket.socket(
        family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP
    )
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
        peer = connection.getpeername()[:2]
        if (_canonical(peer[0]), peer[1]) != (_canonical(address), port):  # 5
            raise OSError("connected to another address")
        if connection.getsockname() == connection.getpeername():
            # Linux lets a socket connect to itself when the ephemeral port equals the target's.
            raise OSError("connected to itself")
    except BaseException:
        connection.close()
        raise
    return connection


async def _open_stream(connection: socket.socket) -> ByteStream:
    try:
        return await open_socket_stream(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise DialError("upstream-unreachable", "the connection closed at once") from None
        raise


def _close_late(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _canonical(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address.partition("%")[0])


def _errno(error: BaseException | None) -> str:
    """A short word for a connect failure, for the log."""
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, str(error.errno))
    return str(error) if isinstance(error, OSError) else type(error).__name__
