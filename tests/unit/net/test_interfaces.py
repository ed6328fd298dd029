"""The addresses of this machine, against what a second source says."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from net.interfaces import local_addresses


def test_every_interface_address_that_the_kernel_lists_is_found() -> None:
    """Netlink tells at least what /proc lists, loopback included."""
    found = local_addresses()
    assert ip_address("127.0.0.1") in found
    listed = {
        ip_address(int(line.split()[0], 16).to_bytes(16))
        for line in Path("/proc/net/if_inet6").read_text().splitlines()
    }
    assert listed <= found
