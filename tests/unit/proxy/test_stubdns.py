"""Names and their synthetic addresses: apart for each sandbox, bounded, and only what was really asked for."""

from __future__ import annotations

import dns.message

from proxy.stubdns import StubNames, answerer
from rules.names import Host

A, B = "sb_a", "sb_b"


def test_an_address_that_nobody_was_given_is_no_name() -> None:
    """A bare address, an address of another sandbox and one after the end mean nothing."""
    names = StubNames()
    address = names.address_of(A, Host("api.test"))
    assert address is not None
    assert names.host_of(A, "198.18.0.9") is None
    assert names.host_of(B, address) is None
    names.forget(A)
    assert names.host_of(A, address) is None


def test_a_name_keeps_its_address_and_gives_it_back_when_it_is_the_oldest() -> None:
    """Bounded: the name that was not used for longest makes room; its address then means the new name."""
    names = StubNames(names=2)
    first = names.address_of(A, Host("one.test"))
    second = names.address_of(A, Host("two.test"))
    assert first != second
    assert names.address_of(A, Host("one.test")) == first
    third = names.address_of(A, Host("three.test"))
    assert third == second
    assert names.host_of(A, str(third)) == Host("three.test")
    assert names.host_of(A, str(first)) == Host("one.test")


def test_more_sandboxes_than_bounded_get_no_address() -> None:
    """NXDOMAIN instead of memory without end."""
    names = StubNames(sandboxes=1)
    assert names.address_of(A, Host("api.test")) is not None
    assert names.address_of(B, Host("api.test")) is None


def test_the_stub_of_a_sandbox_answers_from_its_own_table() -> None:
    """The answer to a query is the address under which the same sandbox's connections are told the name."""
    names = StubNames()
    raw = answerer(names, A)(dns.message.make_query("api.test", "A").to_wire())
    assert raw is not None
    address = next(iter(dns.message.from_wire(raw).answer[0])).to_text()
    assert names.host_of(A, address) == Host("api.test")
