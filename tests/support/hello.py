"""TLS 1.2 ClientHellos of any size and split, and what the server's first flight says (RFC 5246 7.4).

TLS 1.2 because there the certificate comes in the clear: no handshake has to be finished to see whom it names.
"""

from __future__ import annotations

import secrets
import socket
import struct

from cryptography import x509

_CIPHERS = (0xC02B, 0xC02C, 0xCCA9)
"""ECDHE-ECDSA with AES-GCM and ChaCha20: what fits our EC certificates."""


def client_hello(name: str, *, padding: int = 0, alpn: tuple[bytes, ...] = (b"http/1.1",)) -> bytes:
    """The handshake message (without record heads) of a hello in which `padding` bytes stand before the server name."""
    encoded = name.encode()
    extensions = b""
    left = padding
    number = 0xFA00
    while left > 0:  # an unknown extension holds at most 65,535 bytes; a server ignores it
        size = min(left, 60_000)
        extensions += _extension(number, bytes(size))
        left -= size
        number += 1
    extensions += _extension(0, struct.pack("!HBH", len(encoded) + 3, 0, len(encoded)) + encoded)
    extensions += _extension(10, struct.pack("!HHH", 4, 0x001D, 0x0017))  # supported groups: x25519, secp256r1
    extensions += _extension(11, b"\x01\x00")  # point formats
    extensions += _extension(13, struct.pack("!HHHH", 6, 0x0403, 0x0804, 0x0401))  # signature algorithms
    extensions += _extension(23, b"")  # extended master secret
    names = b"".join(struct.pack("!B", len(item)) + item for item in alpn)
    extensions += _extension(16, struct.pack("!H", len(names)) + names)
    ciphers = b"".join(struct.pack("!H", cipher) for cipher in _CIPHERS)
    body = b"\x03\x03" + secrets.token_bytes(32) + b"\x00"
    body += struct.pack("!H", len(ciphers)) + ciphers + b"\x01\x00"
    body += struct.pack("!H", len(extensions)) + extensions
    return b"\x01" + len(body).to_bytes(3) + body


def records(message: bytes, count: int = 1) -> bytes:
    """`message` in `count` TLS records of about the same size (each at most 16 KiB)."""
    size = min(-(-len(message) // count), 16_384)
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(piece)) + piece for piece in pieces)


def served_certificate(connection: socket.socket) -> x509.Certificate:
    """Read the server's first flight up to its Certificate message. AssertionError where an alert or an end comes."""
    handshake = b""
    while True:
        while len(handshake) >= 4:
            size = int.from_bytes(handshake[1:4])
            if len(handshake) < 4 + size:
                break
            if handshake[0] == 11:
                first = int.from_bytes(handshake[7:10])
                return x509.load_der_x509_certificate(handshake[10 : 10 + first])
            handshake = handshake[4 + size :]
        kind, _, length = struct.unpack("!BHH", _exactly(connection, 5))
        piece = _exactly(connection, length)
        assert kind == 22, f"no handshake record but {kind}: {piece!r}"
        handshake += piece


def names_of(certificate: x509.Certificate) -> list[str]:
    """The DNS names in the certificate."""
    value = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return value.get_values_for_type(x509.DNSName)


def _extension(number: int, data: bytes) -> bytes:
    return struct.pack("!HH", number, len(data)) + data


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, "the connection ended"
        data += piece
    return data
