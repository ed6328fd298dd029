"""Names and their synthetic addresses: apart for each sandbox, bounded, and only what was really asked for."""

from __future__ import annotations

import dns.message
import dns.rcode

from proxy.stubdns import QUERIES_PER_SECOND, StubNames, answerer
from rules.names import Host
from wire.dns import Unknown

A, B = "sb_a", "sb_b"


def admitted(*sandboxes: str, names: int = 16) -> StubNames:
    made = StubNames(names=names)
    for sandbox in sandboxes:
        assert made.admit(sandbox)
    return made


def given(names: StubNames, sandbox: str, name: str) -> str:
    address = names.address_of(sandbox, Host(name))
    assert address is not None
    return address


def every(_host: Host) -> bool:
    """As in a role that does not say `dns: strict`."""
    return True


def test_a_name_that_does_not_exist_gets_no_address_and_no_place() -> None:
    """NXDOMAIN for every type, and nothing stands for it afterwards."""
    names = admitted(A)
    stub = answerer(names, A, lambda: 0.0, lambda host: host.text == "api.test")
    for kind in ("A", "AAAA", "HTTPS"):
        raw = stub(dns.message.make_query("evil.test", kind).to_wire())
        assert raw is not None
        assert (dns.message.from_wire(raw).rcode(), dns.message.from_wire(raw).answer) == (dns.rcode.NXDOMAIN, [])
    assert not names._tables[A]._by_name
    raw = stub(dns.message.make_query("api.test", "A").to_wire())
    assert raw is not None
    assert dns.message.from_wire(raw).answer


def test_without_a_policy_in_force_nothing_is_said_of_a_name() -> None:
    """SERVFAIL, so that clients ask again; a strict role's names are not given out by accident."""

    def unknown(_host: Host) -> bool:
        raise Unknown

    raw = answerer(admitted(A), A, lambda: 0.0, unknown)(dns.message.make_query("api.test", "A").to_wire())
    assert raw is not None
    assert (dns.message.from_wire(raw).rcode(), dns.message.from_wire(raw).answer) == (dns.rcode.SERVFAIL, [])


def test_an_address_that_nobody_was_given_is_no_name() -> None:
    """A bare address, an address of another sandbox and one after the end mean nothing."""
    names = admitted(A, B)
    address = given(names, A, "api.test")
    assert names.host_of(A, "198.18.255.254") is None
    assert names.host_of(B, address) is None
    names.forget(A)
    assert names.host_of(A, address) is None
    assert names.address_of(A, Host("api.test")) is None, "an ended sandbox gets no new table"


def test_the_name_that_was_not_used_for_longest_makes_room_and_its_address_stands_for_nothing() -> None:
    """Bounded; a client that kept the address of the forgotten name reaches nobody instead of the newcomer."""
    names = admitted(A, names=2)
    first, second = given(names, A, "one.test"), given(names, A, "two.test")
    assert first != second
    assert given(names, A, "one.test") == first
    third = given(names, A, "three.test")
    assert third not in (first, second)
    assert names.host_of(A, second) is None
    assert names.host_of(A, third) == Host("three.test")
    assert names.host_of(A, first) == Host("one.test")


def test_a_stub_without_memory_gives_a_name_the_address_it_had() -> None:
    """A worker that starts again: a kept address is no other name's, whatever is asked for first."""
    before, after = admitted(A, names=64), admitted(A, names=64)
    kept = {f"n{number}.test": given(before, A, f"n{number}.test") for number in range(64)}
    for name in reversed(kept):
        assert after.host_of(A, kept[name]) is None
        assert given(after, A, name) == kept[name]


def test_a_full_table_holds_as_many_addresses_as_names() -> None:
    """Four times as many names as there is room for: distinct addresses of 198.18.0.0/16, each for the right name."""
    names = admitted(A, names=64)
    for number in range(256):
        given(names, A, f"n{number}.test")
    last = {f"n{number}.test": given(names, A, f"n{number}.test") for number in range(192, 256)}
    assert len(set(last.values())) == 64
    for name, address in last.items():
        assert address.startswith("198.18.")
        assert names.host_of(A, address) == Host(name)
    assert len(names._tables[A]._by_address) == 64


def test_more_sandboxes_than_bounded_get_no_address() -> None:
    """NXDOMAIN instead of memory without end."""
    names = StubNames(sandboxes=1)
    assert names.admit(A)
    assert not names.admit(B)
    assert names.address_of(B, Host("api.test")) is None


def test_the_stub_of_a_sandbox_answers_from_its_own_table() -> None:
    """The answer to a query is the address under which the same sandbox's connections are told the name."""
    names = admitted(A)
    raw = answerer(names, A, lambda: 0.0, every)(dns.message.make_query("api.test", "A").to_wire())
    assert raw is not None
    address = next(iter(dns.message.from_wire(raw).answer[0])).to_text()
    assert names.host_of(A, address) == Host("api.test")


def test_a_flood_of_queries_gets_silence_until_the_next_second_and_a_neighbour_none_of_it() -> None:
    """The event loop is everybody's: beyond the pace a query is not even parsed."""
    names, now = admitted(A, B), [7.0]
    query = dns.message.make_query("api.test", "A").to_wire()
    flooded, neighbour = answerer(names, A, lambda: now[0], every), answerer(names, B, lambda: now[0], every)
    answers = [flooded(query) for _ in range(QUERIES_PER_SECOND + 50)]
    assert all(answers[:QUERIES_PER_SECOND])
    assert not any(answers[QUERIES_PER_SECOND:])
    assert neighbour(query)
    now[0] = 8.0
    assert flooded(query)


def test_a_long_query_counts_as_several() -> None:
    """What a name costs grows with its length: a sandbox that asks for long ones gets fewer answers in a second."""
    names = admitted(A)
    assert all(names.within(A, 1.0, 250) for _ in range(QUERIES_PER_SECOND // 4))
    assert not names.within(A, 1.0, 250)
    assert names.within(A, 2.0, 250)
