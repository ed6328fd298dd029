"""Stub DNS: one query in, one answer out. No query ever leaves; every A query is answered by a synthetic address.

Rules (RULINGS 5.7):
- Exactly one question of class IN, opcode QUERY; anything else is answered FORMERR, NOTIMP or not at all.
- A gets the address that the caller's table gives for that name; AAAA and every other type get NODATA (NOERROR and
  no answer), so that clients fall back to A at once.
- A name that is not a canonical host name gets NXDOMAIN; so does every name that the table refuses, whatever the type.
- Where the table cannot say (Unknown), SERVFAIL: clients ask again, and nobody remembers an answer.
- Answers are built here; nothing of the query but its id, its RD flag and its question comes back (I29).
"""

from __future__ import annotations

from collections.abc import Callable

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from rules.names import Host, InvalidName

MAX_QUERY = 1232
"""Bytes of a query that are looked at; longer ones are not answered (a query fits in one small datagram)."""
TTL = 30
"""Seconds; short, because an address belongs to a name only while the table remembers it."""


class Unknown(Exception):
    """Whether a name exists cannot be said now."""


def answer(query: bytes, address_of: Callable[[Host], str | None]) -> bytes | None:
    """Return the answer to `query` in wire form, or None when there is nothing to say. Never raises.

    `address_of` gives the synthetic IPv4 address of a name, or None for NXDOMAIN. It may raise Unknown.
    """
    if not 12 <= len(query) <= MAX_QUERY:
        return None
    if query[2] >> 3 & 0x0F != dns.opcode.QUERY and not query[2] & 0x80:
        return _refuse(query, dns.rcode.NOTIMP)
    try:
        asked = dns.message.from_wire(query, ignore_trailing=False)
    except dns.exception.DNSException:
        return _refuse(query, dns.rcode.FORMERR)
    except Exception:  # a parser of hostile bytes: whatever it stumbles over is not answered
        return None
    if asked.flags & dns.flags.QR:
        return None
    if len(asked.question) != 1 or asked.question[0].rdclass != dns.rdataclass.IN:
        return _refuse(query, dns.rcode.REFUSED)
    question = asked.question[0]
    reply = dns.message.make_response(asked, recursion_available=True)
    reply.use_edns(False)
    try:
        host = Host.parse(question.name.to_text(omit_final_dot=True))
        address = None if host.is_literal else address_of(host)
    except (InvalidName, UnicodeError):
        address = None
    except Unknown:
        reply.set_rcode(dns.rcode.SERVFAIL)
        return reply.to_wire()
    if address is None:
        reply.set_rcode(dns.rcode.NXDOMAIN)
    elif question.rdtype == dns.rdatatype.A:
        reply.answer.append(dns.rrset.from_text(question.name, TTL, dns.rdataclass.IN, dns.rdatatype.A, address))
    return reply.to_wire()


def _refuse(query: bytes, code: dns.rcode.Rcode) -> bytes:
    """A header alone: the id, QR set, RD copied, no question."""
    flags = 0x8000 | (query[2] << 8 & 0x0100) | (query[2] << 8 & 0x7800) | int(code)
    return query[:2] + flags.to_bytes(2, "big") + bytes(8)
