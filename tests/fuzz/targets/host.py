"""Host names and authorities: refused, or one spelling that nothing else reads as another place (I02)."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from rules.names import Host, InvalidName, parse_authority

WORDS = (
    b"xn--", b"[::1]", b"[::ffff:127.0.0.1]", b"127.0.0.1", b"0x7f.1", b"2130706433", b"0177.0.0.1", b"127.1",
    b":443", b"@", b"%", b".", b"\xe3\x80\x82", b"\xef\xbc\x8e", b"\xe2\x84\xaa", b"\xc3\x9f", b"\xc2\xad",
    b"localhost", b"a.test", b"[fe80::1%25eth0]", b"\x00", b"\xe2\x80\x8d",
)  # fmt: skip

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._")


def check(data: bytes) -> bool:
    """See above."""
    text = data.decode("utf-8", "surrogateescape")
    _authority(text)
    try:
        host = Host.parse(text)
    except InvalidName:
        return False
    assert Host.parse(host.authority) == host, "not a fixed point"
    assert Host.parse(host.text.upper() if not host.is_literal else host.authority) == host
    assert urlsplit(f"http://{host.authority}/").hostname == host.text
    if host.is_literal:
        assert str(ipaddress.ip_address(host.text)) == host.text
        return True
    assert set(host.text) <= _PLAIN
    assert 0 < len(host.text) <= 253
    assert "." in host.text
    assert all(0 < len(label) <= 63 for label in host.text.split("."))
    try:
        socket.inet_aton(host.text)
    except OSError:
        return True
    raise AssertionError("the C library reads this name as an address")


def _authority(text: str) -> None:
    for default in (None, 443):
        try:
            host, port = parse_authority(text, default)
        except InvalidName:
            continue
        assert 0 < port < 65536
        assert parse_authority(f"{host.authority}:{port}", None) == (host, port)
        assert "@" not in text
        assert "/" not in text
