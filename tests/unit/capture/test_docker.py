"""What `docker network inspect` says, read as a plan of one interface."""

from __future__ import annotations

from typing import Any

import pytest

from capture.docker import CREATE, read_network
from capture.plan import PlanError
from tests.support.rows import every_row

NETWORK: dict[str, Any] = {
    "Name": "exeat-a",
    "Id": "0123456789abcdef0123456789abcdef",
    "Driver": "bridge",
    "Internal": False,
    "IPAM": {"Driver": "default", "Config": [{"Subnet": "198.19.0.0/30", "Gateway": "198.19.0.1"}]},
    "Containers": {},
    "Options": {},
}


def inspected(**changes: Any) -> list[dict[str, Any]]:
    return [NETWORK | changes]


@every_row(
    ("value", "why", "sentence"),
    [
        ({}, "not what", "an object and no list"),
        ([], "not what", "no network of that name"),
        ([NETWORK, NETWORK], "not what", "two networks"),
        ([{"Name": "x"}], "Driver", "not Docker's format"),
        (inspected(Driver="overlay"), "overlay", "its traffic does not come by one interface of this machine"),
        (inspected(Driver="host"), "host", "no interface of its own at all"),
        (inspected(Name="bridge"), "by default", "every container lands there"),
        (
            inspected(Options={"com.docker.network.bridge.default_bridge": "true"}),
            "by default",
            "the same under another name",
        ),
        (inspected(IPAM={"Config": [{"Subnet": "198.19.0.0/30"}]}), "without a gateway", "we would have no address"),
        (inspected(IPAM={"Config": [{"Subnet": "x", "Gateway": "198.19.0.1"}]}), "cannot be read", "no subnet"),
        (inspected(IPAM={"Config": None}), "no prefix length", "no address at all"),
        (inspected(IPAM={"Config": [{"Subnet": "198.18.0.0/24", "Gateway": "198.18.0.1"}]}), "overlaps", "stub range"),
    ],
)
def test_a_network_that_is_not_one_sandboxs_is_refused(value: Any, why: str, sentence: str) -> None:
    """Each row says what is wrong with it."""
    with pytest.raises(PlanError, match=why):
        read_network(value)


def test_a_network_of_its_own_is_a_bridge_in_the_plan() -> None:
    """The bridge's name is the option's, or made of the id; both families are read."""
    six = {"Subnet": "fd65::/64", "Gateway": "fd65::1/64"}
    found = read_network(inspected(IPAM={"Config": [*NETWORK["IPAM"]["Config"], six]}))
    assert found.interface.option == "--bridge br-0123456789ab=198.19.0.1/30,fd65::1/64"
    named = read_network(inspected(Options={"com.docker.network.bridge.name": "exeat-a"}))
    assert named.interface.option == "--bridge exeat-a=198.19.0.1/30"
    assert not named.notes


def test_what_would_not_work_is_said() -> None:
    """An internal network has no route to be captured; several containers are one sandbox."""
    found = read_network(inspected(Internal=True, Containers={"a": {}, "b": {}}))
    assert [note.split(":")[0].split(";")[0] for note in found.notes] == [
        "an internal network has no default route",
        "2 containers are on it",
    ]


def test_the_command_that_we_suggest_makes_such_a_network() -> None:
    """Its subnet and gateway are a valid plan."""
    words = CREATE.split()
    subnet, gateway = words[words.index("--subnet") + 1], words[words.index("--gateway") + 1]
    read_network(inspected(IPAM={"Config": [{"Subnet": subnet, "Gateway": gateway}]}))
