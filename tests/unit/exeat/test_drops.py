"""Kernel drops on their way to the log: how often, what exactly, and what becomes of a count that was not taken."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from broker.errors import BrokerError
from capture import inside
from capture.plan import Plan, parse_interface
from exeat.boundary import find_capture_tools
from exeat.counters import NETLINK_NETFILTER, _take, read_counters
from exeat.drops import Drops, Unreadable, _Watched
from exeat.netfilter import Netfilter
from tests.support.machines import can_capture, ip, machine, own_network
from wire.probe import MARK


class Kernel:
    """Counters that a test sets, and the vault's ear."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.readable = True
        self.deaf = False
        self.closed = 0
        self.heard: list[tuple[str, dict[str, int], str]] = []
        self.drops = Drops(self.report)

    def watch(self, sandbox: str = "sb_a") -> None:
        self.drops._replace(sandbox, _Watched(self.read, self.close))

    def read(self) -> Mapping[str, int]:
        if not self.readable:
            raise Unreadable
        return dict(self.counts)

    def close(self) -> None:
        self.closed += 1

    def report(self, sandbox: str, counts: Mapping[str, int], *, interface: str, error: str) -> None:
        if self.deaf:
            raise BrokerError("admin-unavailable")
        self.heard.append((sandbox, dict(counts), error))


async def test_nothing_is_said_where_nothing_was_dropped() -> None:
    """Neither at the minute nor at the end; the counters are given back."""
    kernel = Kernel()
    kernel.counts = {"quic": 0}
    kernel.watch()
    await kernel.drops.report()
    kernel.drops.end("sb_a")
    await kernel.drops.settle()
    assert (kernel.heard, kernel.closed) == ([], 1)


async def test_a_record_says_what_was_dropped_since_the_last_one() -> None:
    """One a minute where there is more, and one at the end; together they say what the kernel counted."""
    kernel = Kernel()
    kernel.watch()
    kernel.counts = {"quic": 3, "pings": 0}
    await kernel.drops.report()
    await kernel.drops.report()
    kernel.counts = {"quic": 5, "pings": 1}
    await kernel.drops.report()
    kernel.counts = {"quic": 6, "pings": 1}
    kernel.drops.end("sb_a")
    kernel.drops.end("sb_a")
    await kernel.drops.settle()
    assert kernel.heard == [
        ("sb_a", {"quic": 3}, ""),
        ("sb_a", {"quic": 2, "pings": 1}, ""),
        ("sb_a", {"quic": 1}, ""),
    ]


async def test_a_count_that_was_not_taken_is_said_again() -> None:
    """A vault that starts anew costs no packet."""
    kernel = Kernel()
    kernel.watch()
    kernel.counts, kernel.deaf = {"quic": 3}, True
    await kernel.drops.report()
    kernel.counts, kernel.deaf = {"quic": 4}, False
    await kernel.drops.report()
    assert kernel.heard == [("sb_a", {"quic": 4}, "")]


async def test_rules_that_were_put_in_force_anew_count_from_zero() -> None:
    """What is less than before is all new."""
    kernel = Kernel()
    kernel.watch()
    for counts in ({"quic": 9}, {"quic": 2}):
        kernel.counts = dict(counts)
        await kernel.drops.report()
    assert kernel.heard == [("sb_a", {"quic": 9}, ""), ("sb_a", {"quic": 2}, "")]


async def test_counters_that_cannot_be_read_are_said_to_be_so_once() -> None:
    """An auditor must not take silence for nothing."""
    kernel = Kernel()
    kernel.watch()
    kernel.readable = False
    await kernel.drops.report()
    await kernel.drops.report()
    kernel.drops.end("sb_a")
    await kernel.drops.settle()
    assert kernel.heard == [("sb_a", {}, "unreadable")]


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 15, b"\xff" * 64, b"\x10\0\0\0" + b"\0" * 12, b"\x18\0\0\0\x12\x0a" + b"\x03" * 18]
)
def test_bytes_that_are_no_counters_say_nothing(data: bytes) -> None:
    """Short, torn and foreign messages are passed over, and reading goes on to its bound."""
    found: dict[str, int] = {}
    assert _take(data, "exeat", found)
    assert found == {}


def test_an_error_of_the_kernel_is_one_of_ours() -> None:
    """NLMSG_ERROR with EPERM."""
    with pytest.raises(PermissionError):
        _take(b"\x14\0\0\0\x02\0\0\0" + bytes(8) + (-1).to_bytes(4, "little", signed=True), "exeat", {})


# --- the kernel itself --------------------------------------------------------------------------------------------

needs_kernel = pytest.mark.skipif(
    not can_capture(), reason="rules and interfaces are root's, with nftables and iproute2"
)


@pytest.fixture
def network() -> Iterator[None]:
    with own_network():
        yield


@needs_kernel
@pytest.mark.slow
def test_counters_of_a_namespace_are_read_from_outside_and_after_everybody_left(network: None) -> None:
    """As under `exeat run`: a socket made inside tells what was dropped there, by kind; probes and neighbours apart."""
    tools = find_capture_tools()
    assert tools is not None
    outer = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    os.unshare(os.CLONE_NEWNET)
    try:
        ip("link", "set", "lo", "up")
        for argv in inside.commands(tools.ip):
            subprocess.run(argv, check=True)
        subprocess.run([tools.nft, "-f", "-"], input=inside.ruleset(MARK).encode(), check=True)
        counters = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        for mark in (0, MARK):
            for port, times in ((443, 3), (5000, 2)):
                for _ in range(times):
                    send(socket.AF_INET, ("192.0.2.1", port), mark)
            send(socket.AF_INET6, ("2001:db8::1", 443), mark)
    finally:
        os.setns(outer, os.CLONE_NEWNET)
        os.close(outer)
    with counters:
        assert read_counters(counters, inside.TABLE) == {
            "refused": 6,
            "quic": 4,
            "datagrams": 2,
            "pings": 0,
            "other": 0,
        }
        assert read_counters(counters, "other") == {}
        counters.send(struct.pack("=IHHII", 20, 10 << 8 | 99, 1, 7, 0) + struct.pack("=BBH", 1, 0, 0))
        assert read_counters(counters, "other") == {}, "an answer to an earlier question is none to this one"


def send(family: int, target: tuple[str, int], mark: int) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, 36, mark)  # SO_MARK
        with pytest.raises(PermissionError):
            sock.sendto(b"x", target)


@needs_kernel
@pytest.mark.slow
def test_drops_of_the_hosts_rules_are_told_by_interface(network: None) -> None:
    """Two machines: each one's packets count for its own interface, also in the kernel's other hooks."""
    netfilter = Netfilter()
    with machine(1) as one, machine(2) as two:
        netfilter.put(Plan.of(parse_interface(made.option) for made in (one, two)))
        for made in (one, two):
            made.connect_link()
        before = netfilter.drops()
        assert set(before) == {one.link, two.link}
        text = "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        one.python(text + "for _ in range(3): s.sendto(b'x', ('192.0.2.1', 443))")
        two.python(text + "s.sendto(b'x', ('192.0.2.1', 5000))")
        after = netfilter.drops()
        grown = {
            link: {kind: after[link][kind] - before[link][kind] for kind in after[link]}
            for link in (one.link, two.link)
        }
        assert (grown[one.link]["quic"], grown[one.link]["datagrams"]) == (3, 0)
        assert (grown[two.link]["quic"], grown[two.link]["datagrams"]) == (0, 1)
        netfilter.put(Plan())
        assert netfilter.drops() == {}
