"""ClientHello: refusals, other protocols, then hellos of any size and split (T06)."""

import ssl
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import tried
from tests.support.rows import every_row
from wire.clienthello import MAX_HELLO, ClientHello, ClientHelloReader, ClientHelloRefused


def hello(name: str | None = "api.test", alpn: tuple[str, ...] = ("h2", "http/1.1")) -> bytes:
    """What OpenSSL sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = name is not None
    context.verify_mode = ssl.CERT_NONE if name is None else ssl.CERT_REQUIRED
    if alpn:
        context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def extension(kind: int, value: bytes) -> bytes:
    return kind.to_bytes(2) + len(value).to_bytes(2) + value


def server_name(*names: bytes) -> bytes:
    entries = b"".join(b"\0" + len(name).to_bytes(2) + name for name in names)
    return extension(0, len(entries).to_bytes(2) + entries)


def record(data: bytes) -> bytes:
    return b"\x16\x03\x01" + len(data).to_bytes(2) + data


def made(extensions: bytes, kind: int = 1) -> bytes:
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\x01" + b"\1\0" + len(extensions).to_bytes(2) + extensions
    return bytes([kind]) + len(body).to_bytes(3) + body


BIG = extension(21, bytes(1400)) + server_name(b"api.test")

REFUSED = [
    (b"\x16\x02\x01", "another record version"),
    (record(made(b"", kind=2)), "a ServerHello"),
    (b"\x16\x03\x01\x00\x00", "an empty record"),
    (b"\x16\x03\x01\xff\xff", "a record over its bound"),
    (record(b"\x01" + (MAX_HELLO + 1).to_bytes(3)), "a hello over its bound"),
    (record(made(server_name(b"a.test", b"b.test"))), "two names"),
    (record(made(server_name())), "an empty name list"),
    (record(made(server_name(b"a\x00.test"))), "NUL in the name"),
    (record(made(server_name("bücher.test".encode()))), "a name outside ASCII"),
    (record(made(server_name(b"a.test") + server_name(b"b.test"))), "the extension twice"),
    (record(made(extension(16, b"\0\0"))), "an empty protocol list"),
    (record(made(b"\0\0\0\xff")), "an extension that is cut"),
    (record(made(b"") + b"x"), "another message behind it"),
    (record(made(BIG)[:100]) + b"\x17\x03\x03\x00\x01x", "another record type in between"),
]


@every_row("raw", [row[0] for row in REFUSED], ids=[row[1] for row in REFUSED])
def test_tls_that_begins_with_no_acceptable_hello_is_refused(raw):
    """Every row raises, never guesses a name."""
    with pytest.raises(ClientHelloRefused):
        ClientHelloReader().feed(raw)


def test_an_endless_hello_is_refused_within_its_bound():
    """Tiny records that promise more and more are cut off."""
    reader = ClientHelloReader()
    message = b"\x01" + (MAX_HELLO - 4).to_bytes(3) + bytes(MAX_HELLO)
    with pytest.raises(ClientHelloRefused):
        list(map(reader.feed, (record(bytes([byte])) for byte in message)))
    assert len(reader.raw) <= 2 * MAX_HELLO + 16


@pytest.mark.parametrize("raw", [b"G", b"SSH-2.0-x\r\n", b"\x80\x2e\x01", b"\0"])
def test_what_is_not_tls_is_told_by_its_first_byte(raw):
    """No waiting, no exception: the caller decides whether clear text is legal there."""
    assert ClientHelloReader().feed(raw) == ClientHello(is_tls=False)


def test_a_real_hello_is_read():
    """Name and protocols as OpenSSL sends them; none where none is sent."""
    assert ClientHelloReader().feed(hello()) == ClientHello(is_tls=True, sni="api.test", alpn=("h2", "http/1.1"))
    assert ClientHelloReader().feed(hello(None, ())) == ClientHello(is_tls=True)


def test_encrypted_hellos_are_told():
    """The outer name is what is judged; that there is an inner one shows."""
    found = ClientHelloReader().feed(record(made(server_name(b"outer.test") + extension(0xFE0D, b"x"))))
    assert found == ClientHello(is_tls=True, sni="outer.test", has_ech=True)


@tried(40)
@given(st.data())
def test_any_split_into_reads_and_records_gives_the_same_answer(data):
    """A name behind byte 1300, in up to ten records and any reads."""
    message = made(BIG)
    cuts = sorted({0, len(message), *data.draw(st.lists(st.integers(1, len(message) - 1), max_size=9))})
    raw = b"".join(record(message[a:b]) for a, b in pairwise(cuts)) + b"early"
    step = data.draw(st.sampled_from([1, 2, 5, 700, 5000]))
    reader = ClientHelloReader()
    answers = [reader.feed(raw[at : at + step]) for at in range(0, len(raw), step)]
    assert answers[-1] == ClientHello(is_tls=True, sni="api.test")
    assert bytes(reader.raw) == raw


@pytest.mark.parametrize("step", [1, 1000, 1 << 20])
@pytest.mark.parametrize(("last", "taken"), [(0, False), (11_500, False), (13_000, True)])
def test_the_bound_does_not_depend_on_the_reads(last: int, taken: bool, step: int) -> None:
    """A hello in thousands of one-byte records, then one of `last` bytes: its records decide, not how they came."""
    message = made(server_name(b"api.test") + extension(0xFA00, bytes(16_000)))
    small = len(message) - last
    raw = b"".join(record(message[at : at + 1]) for at in range(small)) + (record(message[small:]) if last else b"")
    reader = ClientHelloReader()
    found = None
    try:
        for at in range(0, len(raw), step):
            found = reader.feed(raw[at : at + step])
    except ClientHelloRefused:
        assert not taken
        return
    assert taken
    assert found is not None
    assert found.sni == "api.test"
