"""The names a sandbox asked for, and the stub resolver that answers it (RULINGS 5.7). No query ever leaves.

Every name gets an address of 198.18.0.0/15 (RFC 2544, never routed) that means something in that sandbox alone. A
captured connection to such an address is a connection to that name; one to any other address is to a bare address,
and refused. So the front door judges a name that the client really looked up, and a denied name still gets its
refusal in words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Final

from rules.names import Host
from wire.dns import answer

FIRST: Final = int(IPv4Address("198.18.0.1"))
NAMES: Final = 4096
"""Names per sandbox; the one not used for longest makes room. Its address is given out again last."""
SANDBOXES: Final = 4096


class StubNames:
    """Name <-> synthetic address, apart for each sandbox. Bounded; pure but for its own memory."""

    def __init__(self, *, names: int = NAMES, sandboxes: int = SANDBOXES) -> None:
        self._names = names
        self._sandboxes = sandboxes
        self._tables: OrderedDict[str, _Table] = OrderedDict()

    def address_of(self, sandbox: str, host: Host) -> str | None:
        """The address that stands for `host` in `sandbox`, the same while the name is in use."""
        table = self._tables.get(sandbox)
        if table is None:
            if len(self._tables) >= self._sandboxes:
                return None
            table = self._tables[sandbox] = _Table(self._names)
        return table.address_of(host)

    def host_of(self, sandbox: str, address: str) -> Host | None:
        """The name that `address` stands for in `sandbox`, or None: nobody was given it."""
        table = self._tables.get(sandbox)
        return table.host_of(address) if table is not None else None

    def forget(self, sandbox: str) -> None:
        """The sandbox ended."""
        self._tables.pop(sandbox, None)


class _Table:
    def __init__(self, size: int) -> None:
        self._size = size
        self._by_name: OrderedDict[str, str] = OrderedDict()
        self._by_address: dict[str, Host] = {}

    def address_of(self, host: Host) -> str:
        known = self._by_name.get(host.text)
        if known is not None:
            self._by_name.move_to_end(host.text)
            return known
        if len(self._by_name) >= self._size:
            oldest, address = self._by_name.popitem(last=False)
            del oldest
        else:
            address = str(IPv4Address(FIRST + len(self._by_name)))
        self._by_name[host.text] = address
        self._by_address[address] = host
        return address

    def host_of(self, address: str) -> Host | None:
        host = self._by_address.get(address)
        if host is not None:
            self._by_name.move_to_end(host.text)
        return host


def answerer(names: StubNames, sandbox: str) -> Callable[[bytes], bytes | None]:
    """The stub resolver of one sandbox: query bytes in, answer bytes out, or None for silence."""

    def reply(query: bytes) -> bytes | None:
        return answer(query, lambda host: names.address_of(sandbox, host))

    return reply
