"""The stub's DNS: silence, or one well-formed answer to that very question with at most our one address (I29)."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdatatype

from rules.names import Host
from wire.dns import MAX_QUERY, answer

WORDS = (
    b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00", b"\x03api\x04test\x00", b"\x00\x01\x00\x01", b"\x00\x1c\x00\x01",
    b"\xc0\x0c", b"\x00\x00\x29\x10\x00", b"\x00\xff\x00\x01", b"\x00\x10\x00\x03", b"\x3f",
)  # fmt: skip

ADDRESS = "198.18.0.7"


def check(data: bytes) -> bool:
    """See above."""
    asked: list[Host] = []

    def table(host: Host) -> str | None:
        asked.append(host)
        return None if host.text.startswith("unknown.") else ADDRESS

    raw = answer(data, table)
    if raw is None:
        return False
    assert 12 <= len(data) <= MAX_QUERY
    assert raw[:2] == data[:2], "an answer to another query"
    assert raw[2] & 0x80, "an answer that says it is a query"
    assert len(raw) <= len(data) + 64, "an answer much larger than its query"
    assert len(asked) <= 1
    if len(raw) == 12:
        assert raw[3] & 0x0F, "an empty answer that is no error"
        return False
    reply = dns.message.from_wire(raw)
    query = dns.message.from_wire(data, question_only=True)  # what is behind it is not read
    assert len(query.question) == 1
    assert reply.question == query.question
    assert not reply.authority
    assert not reply.additional
    addresses = [item.to_text() for rrset in reply.answer for item in rrset]
    assert addresses in ([], [ADDRESS])
    if addresses:
        assert reply.rcode() == dns.rcode.NOERROR
        assert query.question[0].rdtype == dns.rdatatype.A
        assert len(asked) == 1
    return bool(addresses)
