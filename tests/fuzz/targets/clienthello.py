"""The first bytes of a tunnel: the same answer in any cut, and OpenSSL sees the server name that we judge (I03)."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterable

from tests.support.authority import Authority
from tests.support.fuzzing import cuts
from wire.clienthello import ClientHello, ClientHelloReader, ClientHelloRefused

WORDS = (
    b"\x16\x03\x01", b"\x16\x03\x03", b"\x01\x00", b"\x00\x00", b"\x00\x10", b"\xfe\x0d", b"a.test", b"\x00\x0b",
    b"\x08http/1.1", b"\x02h2", b"\x15\x03", b"GET ",
)  # fmt: skip

_CONTEXT = Authority().server_context(("a.test",))


def check(data: bytes) -> bool:
    """See above."""
    whole = _read([data])
    for pieces in cuts(data):
        assert _read(pieces) == whole, "the cut decides"
    if isinstance(whole, ClientHello) and whole.is_tls:
        names = _openssl_names(data)
        # OpenSSL may refuse what we let pass (it then ends the handshake); what it takes, it takes alike.
        assert not names or names == [whole.sni], (names, whole.sni)
        return bool(names)
    return False


def _read(pieces: Iterable[bytes]) -> ClientHello | str | None:
    reader = ClientHelloReader()
    found: ClientHello | None = None
    try:
        for piece in pieces:
            found = reader.feed(piece)
            if found is not None:
                return found
    except ClientHelloRefused:
        return "refused"
    return found


def _openssl_names(data: bytes) -> list[str | None]:
    names: list[str | None] = []

    def note(tls: object, name: str | None, context: object) -> int:
        names.append(name)
        return ssl.ALERT_DESCRIPTION_ACCESS_DENIED  # enough was seen: no keys are made

    _CONTEXT.set_servername_callback(note)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(data)
    with contextlib.suppress(ssl.SSLError):
        _CONTEXT.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
    return names
