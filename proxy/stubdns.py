"""The names a sandbox asked for, and the stub resolver that answers it (RULINGS 5.7). No query ever leaves.

Every name gets an address of 198.18.0.0/15 (RFC 2544, never routed) that means something in that sandbox alone. A
captured connection to such an address is a connection to that name; one to any other address is to a bare address,
and refused. So the front door judges a name that the client really looked up, and a denied name still gets its
refusal in words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from ipaddress import IPv4Address
from typing import Final

from rules.names import Host
from wire.dns import MAX_QUERY, answer

FIRST: Final = int(IPv4Address("198.18.0.1"))
ADDRESSES: Final = 65_534
"""The first half of the range: the other one holds an address of our own (capture/inside.py)."""
NAMES: Final = 4096
"""Names per sandbox; the one not used for longest makes room, and its address then stands for nothing."""
SANDBOXES: Final = 4096
QUERIES_PER_SECOND: Final = 300
"""Of one sandbox. What is beyond gets silence before it is parsed: its neighbours share the event loop."""
QUERY_BYTES: Final = 64
"""Of a query that counts as one; ordinary ones have 30 to 60."""


class StubNames:
    """Name <-> synthetic address, apart for each admitted sandbox. Bounded; pure but for its own memory.

    Where in the range a name stands depends on sandbox and name alone. So a worker that was started again, and has
    forgotten every name, gives a name its old address; an address that a client kept stands for nothing until then.
    """

    def __init__(self, *, names: int = NAMES, sandboxes: int = SANDBOXES) -> None:
        self._names = names
        self._sandboxes = sandboxes
        self._tables: dict[str, _Table] = {}

    def admit(self, sandbox: str) -> bool:
        """Names may be given out in `sandbox` from now on; False where there are too many sandboxes."""
        if sandbox not in self._tables:
            if len(self._tables) >= self._sandboxes:
                return False
            self._tables[sandbox] = _Table(sandbox, self._names)
        return True

    def address_of(self, sandbox: str, host: Host) -> str | None:
        """The address that stands for `host` in `sandbox`, the same while the name is in use; None: not admitted."""
        table = self._tables.get(sandbox)
        return table.address_of(host) if table is not None else None

    def host_of(self, sandbox: str, address: str) -> Host | None:
        """The name that `address` stands for in `sandbox`, or None: nobody was given it."""
        table = self._tables.get(sandbox)
        return table.host_of(address) if table is not None else None

    def within(self, sandbox: str, now: float, size: int = 0) -> bool:
        """Count one query of `size` bytes; False beyond the pace, or where `sandbox` was not admitted.

        `now` is in seconds. Each further QUERY_BYTES count as one query more: what a name costs grows with its length.
        """
        table = self._tables.get(sandbox)
        return table is not None and table.within(int(now), 1 + size // QUERY_BYTES)

    def forget(self, sandbox: str) -> None:
        """The sandbox ended."""
        self._tables.pop(sandbox, None)


class _Table:
    def __init__(self, sandbox: str, size: int) -> None:
        self._sandbox = sandbox
        self._size = size
        self._by_name: OrderedDict[str, str] = OrderedDict()
        self._by_address: dict[str, Host] = {}
        self._second = 0
        self._queries = 0

    def address_of(self, host: Host) -> str:
        known = self._by_name.get(host.text)
        if known is not None:
            self._by_name.move_to_end(host.text)
            return known
        if len(self._by_name) >= self._size:
            _, freed = self._by_name.popitem(last=False)
            del self._by_address[freed]
        digest = blake2b(f"{self._sandbox}\0{host.text}".encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big") % ADDRESSES
        while (address := str(IPv4Address(FIRST + place))) in self._by_address:  # ends: there are more than names
            place = (place + 1) % ADDRESSES
        self._by_name[host.text] = address
        self._by_address[address] = host
        return address

    def host_of(self, address: str) -> Host | None:
        host = self._by_address.get(address)
        if host is not None:
            self._by_name.move_to_end(host.text)
        return host

    def within(self, second: int, count: int) -> bool:
        if second != self._second:
            self._second, self._queries = second, 0
        self._queries += count
        return self._queries <= QUERIES_PER_SECOND


def answerer(
    names: StubNames, sandbox: str, seconds: Callable[[], float], exists: Callable[[Host], bool]
) -> Callable[[bytes], bytes | None]:
    """The stub resolver of one sandbox: query bytes in, answer bytes out, or None for silence.

    `seconds` is a clock that never goes back. `exists` says whether there is such a name in that sandbox (the role's
    `dns:`); it may raise wire.dns.Unknown.
    """

    def address_of(host: Host) -> str | None:
        return names.address_of(sandbox, host) if exists(host) else None

    def reply(query: bytes) -> bytes | None:
        # What is too long is not read: it counts as one.
        if not names.within(sandbox, seconds(), len(query) if len(query) <= MAX_QUERY else 0):
            return None
        return answer(query, address_of)

    return reply
