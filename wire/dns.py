"""Stub DNS: one query in, one answer out. No query ever leaves; every A query is answered by a synthetic address.

Rules (RULINGS 5.7):
- Exactly one question of class IN, opcode QUERY; anything else is answered FORMERR, NOTIMP, REFUSED or not at all.
- A gets the address that the caller's table gives for that name; AAAA and every other type get NODATA (NOERROR and
  no answer), so that clients fall back to A at once.
- A name that is not a canonical host name gets NXDOMAIN; so does every name that the table refuses, whatever the type.
- Where the table cannot say (Unknown), SERVFAIL: clients ask again, and nobody remembers an answer.
- Answers are built here; nothing of the query but its id, its RD flag and its question comes back (I29).

The question is read here and nothing behind it: a library that reads whole messages takes 60 ms for one of 1,200 bytes
whose records all point at one long name, and every sandbox of the worker waits as long. Format: RFC 1035 4.1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Final

from rules.names import Host, InvalidName

MAX_QUERY = 1232
"""Bytes of a query that are looked at; longer ones are not answered (a query fits in one small datagram)."""
TTL = 30
"""Seconds; short, because an address belongs to a name only while the table remembers it."""

_QR, _RD, _RA, _OPCODE = 0x8000, 0x0100, 0x0080, 0x7800
_NOERROR, _FORMERR, _SERVFAIL, _NXDOMAIN, _NOTIMP, _REFUSED = range(6)
_A: Final = 1
_IN: Final = 1
_MAX_NAME: Final = 255
_FIRST_NAME: Final = 0xC00C
"""A pointer to the question's name, which stands right behind the header (RFC 1035 4.1.4)."""


class Unknown(Exception):
    """Whether a name exists cannot be said now."""


def answer(query: bytes, address_of: Callable[[Host], str | None]) -> bytes | None:
    """Return the answer to `query` in wire form, or None when there is nothing to say. Never raises.

    `address_of` gives the synthetic IPv4 address of a name, or None for NXDOMAIN. It may raise Unknown.
    """
    if not 12 <= len(query) <= MAX_QUERY:
        return None
    flags, questions, answers, authorities = struct.unpack_from("!HHHH", query, 2)
    if flags & _QR:
        return None
    if flags & _OPCODE:
        return _header(query, flags, _NOTIMP)
    if questions != 1 or answers or authorities:
        return _header(query, flags, _REFUSED)
    end = _end_of_name(query)
    if end is None or len(query) < end + 4:
        return _header(query, flags, _FORMERR)
    kind, group = struct.unpack_from("!HH", query, end)
    if group != _IN:
        return _header(query, flags, _REFUSED)
    try:
        host = Host.parse(_text(query[12 : end - 1]))
        address = None if host.is_literal else address_of(host)
    except InvalidName:
        address = None
    except Unknown:
        return _header(query, flags, _SERVFAIL, question=query[12 : end + 4])
    if address is None:
        return _header(query, flags, _NXDOMAIN, question=query[12 : end + 4])
    record = b""
    if kind == _A:
        record = struct.pack("!HHHIH", _FIRST_NAME, _A, _IN, TTL, 4) + IPv4Address(address).packed
    return _header(query, flags, _NOERROR, question=query[12 : end + 4], record=record)


def _header(query: bytes, flags: int, code: int, *, question: bytes = b"", record: bytes = b"") -> bytes:
    """An answer: the id, QR and RA set, opcode and RD copied; without a question it is a header alone."""
    said = _QR | _RA | flags & (_OPCODE | _RD) | code
    return query[:2] + struct.pack("!HHHHH", said, bool(question), bool(record), 0, 0) + question + record


def _end_of_name(query: bytes) -> int | None:
    """Where the name behind the header ends, its zero byte included; None for what is no name. No pointers: there is
    nothing before the first name that one could point at."""
    place = 12
    while place < len(query):
        length = query[place]
        if length == 0:
            return place + 1 if place + 1 - 12 <= _MAX_NAME else None
        if length > 63:
            return None
        place += 1 + length
    return None


def _text(labels: bytes) -> str:
    """The name that `labels` spell. Raises InvalidName where a label holds a dot, or a byte that no host name has."""
    found: list[str] = []
    place = 0
    while place < len(labels):
        label = labels[place + 1 : place + 1 + labels[place]]
        if b"." in label or not label.isascii():
            raise InvalidName("not a host name")
        found.append(label.decode("ascii"))
        place += 1 + len(label)
    return ".".join(found)
