"""TLS as a layer over any ByteStream: ssl.SSLObject between two MemoryBIOs, not start_tls (RULINGS 11.1).

Map: `server_side` and `client_side` shake hands and return a `TlsStream`; below them the stream itself.

Rules kept here: bytes already read (the ClientHello) are fed in; a close_notify ends one direction only, so that the
answer to a half-closed request still leaves; an end of the inner stream without close_notify is truncation and
raises; nothing is decrypted ahead of its reader, so back-pressure is the inner stream's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any

from net.stream import READ_SIZE, ByteStream, StreamBroken
from net.turns import Share

HANDSHAKE_TIMEOUT = 10.0
_RECORD = 16 * 1024

# What a client says when it does not accept our certificate (RFC 8446 6.2), as OpenSSL names a received alert.
_DISTRUST = (
    "ALERT_UNKNOWN_CA",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_CERTIFICATE_UNKNOWN",
    "ALERT_UNSUPPORTED_CERTIFICATE",
    "ALERT_CERTIFICATE_EXPIRED",
    "ALERT_CERTIFICATE_REVOKED",
)


class ClientDistrustsCa(StreamBroken):
    """The client refused our certificate with a TLS alert (RULINGS 5.8): reason `client-distrusts-ca`."""

    def __init__(self, detail: str) -> None:
        super().__init__("handshake", detail)


class NoApplicationProtocol(StreamBroken):
    """No protocol in common (ALPN), e.g. a client that speaks only h2: reason `no-application-protocol`."""

    def __init__(self, detail: str) -> None:
        super().__init__("handshake", detail)


class PeerCertificateRefused(StreamBroken):
    """The server's certificate does not verify for the name asked for: reason `upstream-certificate`."""

    def __init__(self, detail: str) -> None:
        super().__init__("handshake", detail)


async def server_side(
    inner: ByteStream, context: ssl.SSLContext, initial: bytes = b"", timeout: float = HANDSHAKE_TIMEOUT
) -> TlsStream:
    """Shake hands as the server. `initial` are bytes of the client that were already read.

    Where `context` has an ALPN list and the client offers none of it, OpenSSL goes on without one as Python sets it
    up; `require_alpn()` on the result refuses that. Raises StreamBroken (ClientDistrustsCa, handshake-timeout, ...);
    the inner stream is then aborted.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    stream = TlsStream(inner, context.wrap_bio(incoming, outgoing, server_side=True), incoming, outgoing)
    if initial:
        incoming.write(initial)
    await stream._handshake(timeout)
    return stream


async def client_side(
    inner: ByteStream, context: ssl.SSLContext, server_hostname: str, timeout: float = HANDSHAKE_TIMEOUT
) -> TlsStream:
    """Shake hands as the client, verifying for `server_hostname` as the context says.

    Raises StreamBroken (PeerCertificateRefused, handshake-timeout, ...); the inner stream is then aborted.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=False, server_hostname=server_hostname)
    stream = TlsStream(inner, tls, incoming, outgoing)
    await stream._handshake(timeout)
    return stream


class TlsStream:
    """A ByteStream whose bytes are TLS application data. Counts are of plain text."""

    def __init__(self, inner: ByteStream, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        self.inner = inner
        self.bytes_in = 0
        self.bytes_out = 0
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._unread = b""
        self._eof = False  # the peer's close_notify came
        self._inner_eof = False
        self._eof_sent = False
        self._error: StreamBroken | None = None

    # --- what the handshake settled ---

    @property
    def selected_alpn(self) -> str | None:
        """The protocol agreed on, or None."""
        return self._tls.selected_alpn_protocol()

    @property
    def peer_cert(self) -> bytes | None:
        """The peer's certificate (DER), or None."""
        return self._tls.getpeercert(True)

    @property
    def version(self) -> str:
        """`TLSv1.3` and the like."""
        return self._tls.version() or ""

    @property
    def peer(self) -> str:
        return self.inner.peer

    @property
    def share(self) -> Share | None:
        return self.inner.share

    @share.setter
    def share(self, share: Share | None) -> None:
        self.inner.share = share

    @property
    def read_timeout(self) -> float | None:
        return self.inner.read_timeout

    @read_timeout.setter
    def read_timeout(self, seconds: float | None) -> None:
        self.inner.read_timeout = seconds

    @property
    def write_timeout(self) -> float | None:
        return self.inner.write_timeout

    @write_timeout.setter
    def write_timeout(self, seconds: float | None) -> None:
        self.inner.write_timeout = seconds

    async def _handshake(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        before = self.inner.read_timeout
        done = False
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError as error:
                    self._push()  # our alert, so that the peer learns why
                    raise _handshake_error(error) from None
                self._push()
                await self.inner.drain()
                self.inner.read_timeout = max(deadline - loop.time(), 0.001)
                data = await self.inner.receive()
                if not data:
                    raise StreamBroken("handshake", "the peer left during the handshake")
                self._incoming.write(data)
            self._push()
            done = True
        except StreamBroken as error:
            if error.kind == "idle-timeout":
                raise StreamBroken("handshake-timeout") from None
            raise
        finally:
            self.inner.read_timeout = before
            if not done:
                # Closing gently lets a queued alert out; it is bounded and the stream is of no more use.
                await _end(self.inner)

    # --- receiving ---

    def receive_nowait(self, max_bytes: int = READ_SIZE) -> bytes | None:
        if self._unread:
            data = self._unread[:max_bytes]
            self._unread = self._unread[max_bytes:]
            return data
        if self._error is not None:
            raise self._error
        while True:
            data = self._decrypt(max_bytes)
            if data:
                return data
            if self._eof:
                return b""
            if self._inner_eof:
                # No close_notify came: the message may have been cut by anyone on the way.
                raise self._fail(StreamBroken("truncated"))
            chunk = self.inner.receive_nowait()
            if chunk is None:
                return None
            if chunk:
                self._incoming.write(chunk)
            else:
                self._inner_eof = True

    def _decrypt(self, max_bytes: int) -> bytes:
        """Plain text out of what arrived, at most max_bytes; empty when more cipher text is needed or at the end."""
        pieces: list[bytes] = []
        room = max_bytes
        try:
            while room > 0:
                piece = self._tls.read(room if room < _RECORD else _RECORD)
                if not piece:
                    self._eof = True
                    break
                pieces.append(piece)
                room -= len(piece)
                if not self._incoming.pending and not self._tls.pending():
                    break
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._eof = True
        except ssl.SSLError as error:
            self._push()
            broken = self._fail(_handshake_error(error, "reset"))
            if not pieces:
                raise broken from None
        if self._outgoing.pending:
            self._push()  # key updates and the like
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.bytes_in += len(data)
        return data

    async def receive(self, max_bytes: int = READ_SIZE) -> bytes:
        while True:
            data = self.receive_nowait(max_bytes)
            if data is not None:
                return data
            chunk = await self.inner.receive()
            if chunk:
                self._incoming.write(chunk)
            else:
                self._inner_eof = True

    def unread(self, data: bytes) -> None:
        self._unread = data + self._unread

    def pause_reading(self) -> None:
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        self.inner.resume_reading()

    def silent(self) -> bool:
        here = self._unread or self._eof or self._inner_eof or self._incoming.pending or self._tls.pending()
        return not here and self._error is None and self.inner.silent()

    def on_broken(self, callback: Callable[[], None] | None) -> None:
        """An end without close_notify is a break too: a client that was killed leaves nothing but a FIN."""
        self.inner.on_broken(callback)
        self.inner.on_end(None if callback is None else lambda: self._ended_below(callback))

    def on_end(self, callback: Callable[[], None] | None) -> None:
        self.inner.on_end(callback)

    def _ended_below(self, callback: Callable[[], None]) -> None:
        """The transport ended: look whether the peer's close_notify is in what came. Bounded by its HIGH_WATER."""
        try:
            while chunk := self.inner.receive_nowait():
                self._incoming.write(chunk)
            while not self._eof and (data := self._decrypt(READ_SIZE)):
                self._unread += data
        except StreamBroken:
            pass  # kept: the next receive() raises it
        if self._eof:
            return  # a half-closed request, whose answer is still awaited
        self._inner_eof = True
        self._fail(StreamBroken("truncated"))
        self.inner.on_broken(None)
        callback()

    # --- sending ---

    def write(self, data: bytes) -> None:
        if not data or self._error is not None or self._eof_sent:
            return
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            self._fail(StreamBroken("reset", error.reason or "TLS write"))
            return
        self.bytes_out += len(data)
        self._push()

    async def drain(self) -> None:
        if self._error is not None:
            raise self._error
        await self.inner.drain()

    async def send_eof(self) -> None:
        """Send close_notify: ends our direction, the other stays open."""
        self._notify()

    def _notify(self) -> None:
        if self._eof_sent or self._error is not None:
            return
        # OpenSSL's second step of a shutdown reads; whatever arrived is taken out first so that it cannot be lost.
        if not self._eof:
            try:
                while self._incoming.pending and not self._eof:
                    waiting = self._incoming.pending
                    self._unread += self._decrypt(READ_SIZE)
                    if self._incoming.pending == waiting:
                        break
            except StreamBroken:
                return
        self._eof_sent = True
        with contextlib.suppress(ssl.SSLError):  # "want read": the peer's own close_notify need not have come
            self._tls.unwrap()
        self._push()

    def abort(self) -> None:
        self._fail(StreamBroken("closed"))
        self.inner.abort()

    async def close(self) -> None:
        self._notify()
        await self.inner.close()

    def _push(self) -> None:
        data = self._outgoing.read()
        if data:
            self.inner.write(data)

    def _fail(self, error: StreamBroken) -> StreamBroken:
        if self._error is None:
            self._error = error
        return self._error

    def require_alpn(self, protocol: str, *, offered: tuple[str, ...]) -> None:
        """Refuse a client that offered protocols (`offered`, from its ClientHello) without `protocol`.

        Raises NoApplicationProtocol. A client without ALPN speaks HTTP/1.1.
        """
        if offered and self.selected_alpn != protocol:
            raise NoApplicationProtocol("the client offers no protocol that is spoken here")


async def _end(inner: ByteStream) -> None:
    try:
        async with asyncio.timeout(1.0):
            await inner.close()
    except TimeoutError:
        pass
    finally:
        inner.abort()


def _handshake_error(error: ssl.SSLError, kind: str = "handshake") -> StreamBroken:
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerCertificateRefused(error.verify_message or "certificate verify failed")
    reason: Any = error.reason or ""
    if any(alert in reason for alert in _DISTRUST):
        return ClientDistrustsCa(reason)
    if "NO_APPLICATION_PROTOCOL" in reason or "NO_PROTOCOLS" in reason:
        return NoApplicationProtocol(reason)
    return StreamBroken(kind, str(reason))
