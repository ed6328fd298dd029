"""Captured interfaces whose namespace a process of ours can enter: proven, proven again, and broken (I28)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway import Completed, TestGateway
from tests.support.machines import Machine, can_capture, exeat, ip, kernel, machine, own_network

pytestmark = [
    pytest.mark.xdist_group("capture-host"),
    pytest.mark.root,
    pytest.mark.skipif(not can_capture(), reason="interfaces and rules of a host are root's, with their tools"),
]

POLICY = """
roles:
  agent:
    allow:
      - {name: read, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}
"""
CREDENTIALS = """
version: 1
credentials:
  api:
    {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests, placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""


@dataclass(frozen=True)
class Place:
    gateway: TestGateway
    machine: Machine

    @property
    def netns(self) -> str:
        return f"/run/netns/{self.machine.name}"

    def sandbox(self, *words: str) -> Completed:
        command, *rest = words
        return exeat("sandbox", command, *rest, "--config", str(self.gateway.settings_file))

    def create(self, *more: str) -> Completed:
        return self.sandbox("create", "--capture", self.machine.link, "--netns", self.netns, "-o", "json", *more)

    def prove(self, sandbox: str) -> Completed:
        return self.sandbox("prove", sandbox, "--capture", self.machine.link, "--netns", self.netns)

    def end(self, sandbox: str) -> None:
        assert self.sandbox("end", sandbox).code == 0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        stack.enter_context(own_network())
        gateway = TestGateway(
            tmp_path / "gateway", policy=POLICY, credentials=CREDENTIALS, secrets={"api": "x" * 24}, confined=True
        )
        stack.enter_context(gateway)
        stack.callback(Path("/run/exeat-capture.lock").unlink, missing_ok=True)
        made = stack.enter_context(machine(7))
        applied = kernel("apply", "--interface", made.option)
        assert applied.code == 0, applied
        made.connect_link()
        yield Place(gateway, made)


def test_a_way_past_the_interface_is_found_before_anything_is_armed(place: Place) -> None:
    """A second way out, with somebody who answers there: the sandbox is ended unarmed, and the log names the ways."""
    name = place.machine.name
    ip("link", "add", "past0", "type", "veth", "peer", "name", "past1", "netns", name)
    ip("addr", "add", "192.0.2.1/24", "dev", "past0")
    ip("link", "set", "past0", "up")
    ip("-n", name, "addr", "add", "192.0.2.9/24", "dev", "past1")
    ip("-n", name, "link", "set", "past1", "up")
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", LISTEN], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as somebody:
        assert somebody.stdout is not None
        assert somebody.stdout.readline() == b"ready\n"
        done = place.create()
        somebody.kill()
    assert done.code == 125, done
    assert "direct" in done.err
    (record,) = place.gateway.awaited(event="boundary.broken")
    assert "direct" in record["ways"]
    assert place.gateway.admin.sandboxes() == []
    assert place.gateway.records(event="boundary.proven") == []


LISTEN = """
import socket
service = socket.create_server(("192.0.2.1", 443))
print("ready", flush=True)
while True:
    stream, _ = service.accept()
    stream.sendall(b"hello")
"""


def test_a_second_interface_is_not_proven_whatever_lies_behind_it(place: Place) -> None:
    """A network beside the captured one, to which no tried address leads: nothing is armed, until it is gone."""
    name = place.machine.name
    ip("link", "add", "beside0", "type", "veth", "peer", "name", "beside1", "netns", name)
    ip("link", "set", "beside0", "up")
    ip("-n", name, "addr", "add", "10.77.0.9/24", "dev", "beside1")
    ip("-n", name, "link", "set", "beside1", "up")
    done = place.create()
    assert done.code == 0, done
    assert "interfaces" in done.err
    answer = done.json()
    assert not answer.get("armed")
    box = str(answer["id"])
    assert place.prove(box).code == 1
    assert place.gateway.records(event="boundary.proven") == []
    ip("link", "del", "beside0")
    assert place.prove(box).code == 0
    assert place.gateway.admin.sandbox(box)["armed"] is True


def test_a_proven_one_is_armed_and_disarmed_when_the_rules_go(place: Place) -> None:
    """Created with its namespace it is armed; said again it stays so; without the kernel's rules it is broken."""
    done = place.create()
    assert done.code == 0, done
    answer = done.json()
    box = str(answer["id"])
    assert (answer["boundary"], answer["armed"]) == ("probed", True)
    assert place.gateway.admin.sandbox(box)["armed"] is True
    again = place.prove(box)
    assert (again.code, again.out) == (0, f"{box}: proven\n"), again
    assert len(place.gateway.awaited(2, event="boundary.proven", sandbox=box)) == 2
    assert place.gateway.records(refused=True, sandbox=box) == [], "probes are no part of the sandbox's record"
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    broken = place.prove(box)
    assert broken.code == 125, broken
    assert place.gateway.admin.sandbox(box)["armed"] is False
    (record,) = place.gateway.awaited(event="boundary.broken", sandbox=box)
    assert record["ways"] == ["rules"]
    assert place.prove(box).code == 125
    place.end(box)


def test_another_namespace_than_the_interfaces_own_is_not_proven(place: Place) -> None:
    """The host's own namespace is known for what it is, whatever the interface."""
    done = place.sandbox("create", "--capture", place.machine.link, "--netns", "/proc/thread-self/ns/net")
    assert done.code == 125, done
    assert "namespace" in done.err
