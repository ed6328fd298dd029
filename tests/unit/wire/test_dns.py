"""Stub DNS answers: one synthetic address per name, nothing else, whatever the bytes are."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rules.names import Host
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


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.binary(max_size=600))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    """Hostile bytes get an answer with the same id, or none."""
    raw = answer(data, lambda host: "198.18.0.1")
    assert raw is None or raw[:2] == data[:2]
