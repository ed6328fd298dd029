"""A Docker network as an interface to capture: what `docker network inspect NAME` says, read and judged.

A network is one sandbox: containers on one bridge reach each other, and take each other's addresses, without passing
any rule of ours. So a network of several containers is one identity, and Docker's default network is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Final

from capture.plan import Interface, PlanError, parse_interface

_BRIDGE_NAME: Final = "com.docker.network.bridge.name"
_DEFAULT: Final = "com.docker.network.bridge.default_bridge"


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerNetwork:
    """A network that can be captured. `notes` are sentences about what would not work as it stands."""

    name: str
    interface: Interface
    notes: tuple[str, ...] = ()


def read_network(inspected: Any) -> DockerNetwork:
    """Read the parsed JSON of `docker network inspect` of one network. Raises PlanError."""
    if not isinstance(inspected, list) or len(inspected) != 1 or not isinstance(inspected[0], dict):
        raise PlanError("this is not what 'docker network inspect' prints for one network")
    network = inspected[0]
    try:
        name, driver = str(network["Name"]), str(network["Driver"])
        options: dict[str, str] = dict(network.get("Options") or {})
        ranges = [dict(one) for one in network["IPAM"]["Config"] or ()]
        identifier = str(network["Id"])
    except (KeyError, TypeError, ValueError):
        raise PlanError("this is not what 'docker network inspect' prints: Name, Driver, Id, IPAM.Config") from None
    if driver != "bridge":
        raise PlanError(f"{name} is a network of the driver {driver}; only bridge networks can be captured")
    if name == "bridge" or options.get(_DEFAULT) == "true":
        raise PlanError(
            f"{name} is the network that containers share by default", f"make one for each sandbox: {CREATE}"
        )
    bridge = options.get(_BRIDGE_NAME) or f"br-{identifier[:12]}"
    addresses = []
    for one in ranges:
        if not one.get("Gateway"):
            raise PlanError(f"{name} has a subnet without a gateway", f"make one that has: {CREATE}")
        try:
            addresses.append(f"{str(one['Gateway']).partition('/')[0]}/{ip_network(str(one['Subnet'])).prefixlen}")
        except (KeyError, ValueError):
            raise PlanError(f"{name} has a subnet that cannot be read") from None
    interface = parse_interface(f"{bridge}={','.join(addresses)}", "bridge")
    notes = []
    if network.get("Internal"):
        notes.append("an internal network has no default route: only clients that use the proxy variables get out")
    count = len(network.get("Containers") or ())
    if count > 1:
        notes.append(f"{count} containers are on it; to the gateway they are one sandbox")
    return DockerNetwork(name=name, interface=interface, notes=tuple(notes))


CREATE: Final = (
    "docker network create --driver bridge --subnet 198.19.0.0/30 --gateway 198.19.0.1 "
    "-o com.docker.network.bridge.name=exeat-a -o com.docker.network.bridge.enable_ip_masquerade=false exeat-a"
)
"""A network for one sandbox."""
