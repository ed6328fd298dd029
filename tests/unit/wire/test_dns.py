"""Stub DNS answers: one synthetic address per name, nothing else, whatever the bytes are."""

from __future__ import annotations

import struct

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.names import Host
from tests.support.properties import tried
from wire.dns import MAX_QUERY, answer


def never(_host: Host) -> str | None:
    raise AssertionError("the table must not be asked")


def table(host: Host) -> str | None:
    return None if host.text.startswith("unknown.") else "198.18.0.7"


def ask(name: str, kind: str = "A") -> dns.message.Message:
    raw = answer(dns.message.make_query(name, kind).to_wire(), table)
    assert raw is not None
    return dns.message.from_wire(raw)


def test_bytes_that_are_no_query_are_not_answered() -> None:
    """Short, long and answering messages get silence; the table is not asked."""
    assert answer(b"", never) is None
    assert answer(bytes(11), never) is None
    assert answer(bytes(MAX_QUERY + 1), never) is None
    reply = dns.message.make_response(dns.message.make_query("api.test", "A"))
    assert answer(reply.to_wire(), never) is None


@pytest.mark.parametrize(("opcode", "code"), [(4, dns.rcode.NOTIMP), (5, dns.rcode.NOTIMP)], ids=["notify", "update"])
def test_other_operations_are_not_implemented(opcode: int, code: int) -> None:
    """NOTIFY and UPDATE change somebody's data: NOTIMP, without the question."""
    query = bytearray(dns.message.make_query("api.test", "A").to_wire())
    query[2] = (query[2] & 0x87) | (opcode << 3)
    raw = answer(bytes(query), never)
    assert raw is not None
    assert len(raw) == 12
    assert raw[3] & 0x0F == code


@pytest.mark.parametrize(
    "name",
    ["localhost", "unknown.test", "a_b c.test", "xn--a.test"],
    ids=["single label", "refused", "space", "bad idn"],
)
def test_names_that_are_no_hosts_do_not_exist(name: str) -> None:
    """NXDOMAIN for what no request could name."""
    assert ask(name.replace(" ", "\\032")).rcode() == dns.rcode.NXDOMAIN


def asked(question: bytes, *counts: int, behind: bytes = b"") -> bytes:
    """A query: id 1, RD, the four counts, the question and what stands behind it."""
    return struct.pack("!HHHHHH", 1, 0x0100, *(counts or (1, 0, 0, 0))) + question + behind


API = b"\x03api\x04test\x00\x00\x01\x00\x01"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        (asked(b"\xc0\x0c\x00\x01\x00\x01"), dns.rcode.FORMERR),
        (asked(b"\x03api\xc0\x0c\x00\x01\x00\x01"), dns.rcode.FORMERR),
        (asked(b"\x01a" * 127 + b"\x01a\x00\x00\x01\x00\x01"), dns.rcode.FORMERR),
        (asked(API[:-1]), dns.rcode.FORMERR),
        (asked(b"\x3fapi"), dns.rcode.FORMERR),
        (asked(API, 0, 0, 0, 0), dns.rcode.REFUSED),
        (asked(API, 2, 0, 0, 0, behind=b"\xc0\x0c\x00\x01\x00\x01"), dns.rcode.REFUSED),
        (asked(API, 1, 1, 0, 0), dns.rcode.REFUSED),
        (asked(API, 1, 0, 1, 0), dns.rcode.REFUSED),
        (asked(API[:-1] + b"\x03"), dns.rcode.REFUSED),
    ],
    ids=[
        "a pointer", "a pointer in a name", "a long name", "cut", "a cut label",
        "no question", "two", "an answer", "an authority", "another class",
    ],
)  # fmt: skip
def test_what_is_not_one_plain_question_gets_a_bare_error(query: bytes, code: int) -> None:
    """Twelve bytes with the code; the table is not asked."""
    raw = answer(query, never)
    assert raw is not None
    assert (len(raw), raw[:2], raw[3] & 0x0F) == (12, query[:2], code)


@pytest.mark.parametrize("label", [b"api.test", b"ok.test\x00", b"\xc3\xa9", b"a%b", b"*"])
def test_a_label_that_no_host_has_never_spells_another_name(label: bytes) -> None:
    """A dot, a zero or a byte beyond ASCII inside a label: NXDOMAIN, and the table is not asked."""
    raw = answer(asked(bytes([len(label)]) + label + b"\x04test\x00\x00\x01\x00\x01"), never)
    assert raw is not None
    assert raw[3] & 0x0F == dns.rcode.NXDOMAIN


def test_what_stands_behind_the_question_is_not_read() -> None:
    """A hundred records that all point at one name cost what one question costs (and a library's reader 60 ms)."""
    many = b"\xc0\x0c\x00\x10\x00\x01\x00\x00\x00\x00\x00\x01\x00" * 70 + b"\xff"
    plain, stuffed = asked(API), asked(API, 1, 0, 0, 70, behind=many)
    assert answer(stuffed, table) == answer(plain, table)


@pytest.mark.parametrize("kind", ["AAAA", "TXT", "MX", "HTTPS", "SVCB", "ANY", "NS"])
def test_every_other_type_has_no_data(kind: str) -> None:
    """NOERROR without an answer: clients go on to A; no ECH keys, no text that could carry anything."""
    reply = ask("api.test", kind)
    assert reply.rcode() == dns.rcode.NOERROR
    assert reply.answer == []


def test_an_address_query_gets_the_synthetic_address() -> None:
    """Whatever the case and the final dot, the same name gets the table's address with a short life."""
    for name in ("api.test", "API.Test."):
        reply = ask(name)
        assert [record.to_text() for rrset in reply.answer for record in rrset] == ["198.18.0.7"]
        assert reply.answer[0].ttl <= 60
        assert not reply.flags & dns.flags.AA


@tried(400)
@given(st.binary(max_size=600))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    """Hostile bytes get an answer with the same id, or none."""
    raw = answer(data, lambda host: "198.18.0.1")
    assert raw is None or raw[:2] == data[:2]
