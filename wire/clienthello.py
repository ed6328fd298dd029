"""The first bytes of a tunnel: TLS or not, and what a ClientHello asks for. Any size to 16 KiB, any split (T06).

`ClientHelloReader.feed()` returns None until it knows. The bytes are only looked at; the caller feeds the same ones
(`reader.raw`) to whoever goes on. Sources: RFC 8446 4.1.2, 5.1; RFC 6066 3; RFC 7301 3.1; ECH extension 0xfe0d.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HELLO = 16 * 1024
_HANDSHAKE = 0x16
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_ALPN = 16
_ECH = 0xFE0D


class ClientHelloRefused(ValueError):
    """It began as TLS and is no ClientHello that we accept, or over the bound. str() is a fixed sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHello:
    """What the first bytes say. `is_tls` False: something else speaks, and the other fields are empty."""

    is_tls: bool
    sni: str | None = None
    """The server name as sent (ASCII); not normalised, not checked to be a host name."""
    alpn: tuple[str, ...] = ()
    has_ech: bool = False
    """An encrypted ClientHello is present (or greased): `sni` is the outer name."""


NOT_TLS = ClientHello(is_tls=False)


class ClientHelloReader:
    """One per connection."""

    __slots__ = ("_at", "_hello", "_message", "raw")

    def __init__(self) -> None:
        self.raw = bytearray()
        """Everything fed so far."""
        self._at = 0  # start of the first record that was not taken into _message yet
        self._message = bytearray()
        self._hello: ClientHello | None = None

    def feed(self, data: bytes) -> ClientHello | None:
        """Take the next bytes; the answer once it is known (bytes after the hello do not matter), else None.

        Raises ClientHelloRefused.
        """
        self.raw += data
        if self._hello is None and self.raw:
            self._hello = self._look()
        return self._hello

    def _look(self) -> ClientHello | None:
        raw, message = self.raw, self._message
        if raw[0] != _HANDSHAKE:
            return NOT_TLS
        while True:
            if len(raw) >= self._at + 2 and (raw[self._at] != _HANDSHAKE or raw[self._at + 1] != 3):
                raise ClientHelloRefused("not a TLS handshake record")
            if len(raw) < self._at + 5:
                return None
            length = int.from_bytes(raw[self._at + 3 : self._at + 5])
            if not 0 < length <= MAX_HELLO:
                raise ClientHelloRefused("a TLS record of an impossible length")
            if message and len(message) >= 4:
                _expected(message)
            if self._at + 5 + length > 2 * MAX_HELLO:
                # Told by the record's own head, so that the reads in which it came decide nothing.
                raise ClientHelloRefused("the ClientHello is too large")
            if len(raw) < self._at + 5 + length:
                # The first bytes of the message may already show that it is none.
                _expected(message + raw[self._at + 5 :])
                return None
            message += raw[self._at + 5 : self._at + 5 + length]
            self._at += 5 + length
            expected = _expected(message)
            if expected is not None and len(message) >= expected:
                if len(message) > expected:
                    raise ClientHelloRefused("another handshake message after the ClientHello")
                return _parse(bytes(message[4:expected]))


def _expected(message: bytes | bytearray) -> int | None:
    """Length of the whole message, once its head is here."""
    if message and message[0] != _CLIENT_HELLO:
        raise ClientHelloRefused("the first handshake message is no ClientHello")
    if len(message) < 4:
        return None
    size = 4 + int.from_bytes(message[1:4])
    if size > MAX_HELLO:
        raise ClientHelloRefused("the ClientHello is too large")
    return size


class _Cursor:
    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count:
            raise ClientHelloRefused("the ClientHello is cut short inside")
        self.at += count
        return piece

    def vector(self, length_bytes: int) -> bytes:
        return self.take(int.from_bytes(self.take(length_bytes)))

    def at_end(self) -> bool:
        return self.at == len(self.data)


def _parse(body: bytes) -> ClientHello:
    cursor = _Cursor(body)
    cursor.take(2 + 32)
    cursor.vector(1)  # session id
    cursor.vector(2)  # cipher suites
    cursor.vector(1)  # compression methods
    if cursor.at_end():
        return ClientHello(is_tls=True)
    extensions = _Cursor(cursor.vector(2))
    if not cursor.at_end():
        raise ClientHelloRefused("bytes after the extensions of the ClientHello")
    seen: set[int] = set()
    sni: str | None = None
    alpn: tuple[str, ...] = ()
    while not extensions.at_end():
        kind = int.from_bytes(extensions.take(2))
        value = extensions.vector(2)
        if kind in seen:
            raise ClientHelloRefused("an extension stands twice in the ClientHello")
        seen.add(kind)
        if kind == _SERVER_NAME:
            sni = _server_name(value)
        elif kind == _ALPN:
            alpn = _protocols(value)
    return ClientHello(is_tls=True, sni=sni, alpn=alpn, has_ech=_ECH in seen)


def _server_name(value: bytes) -> str:
    outer = _Cursor(value)
    names = _Cursor(outer.vector(2))
    kind, name = names.take(1), names.vector(2)
    # Exactly one host_name: with two, server and judge could each take another (I03).
    if not outer.at_end() or not names.at_end() or kind != b"\0" or not 0 < len(name) <= 255:
        raise ClientHelloRefused("not exactly one server name")
    if any(not 0x21 <= byte <= 0x7E for byte in name):
        raise ClientHelloRefused("a server name that is not plain ASCII")
    return name.decode("ascii")


def _protocols(value: bytes) -> tuple[str, ...]:
    outer = _Cursor(value)
    names = _Cursor(outer.vector(2))
    found: list[str] = []
    while not names.at_end():
        name = names.vector(1)
        if not name:
            raise ClientHelloRefused("an empty protocol name")
        found.append(name.decode("latin-1"))
    if not outer.at_end() or not found:
        raise ClientHelloRefused("an empty protocol list")
    return tuple(found)
