"""What a sandbox sends past the gateway is counted by the kernel, and the count is in the log (RULINGS 9.9).

Under `exeat run` and behind a captured interface of a host, with the kernel's own rules; the coverage that a verifier
states is the sum of the records.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from audit.verify import verify
from exeat.boundary import find_capture_tools
from tests.support import ordinary
from tests.support.gateway import EXEAT, PATH, TestGateway
from tests.support.machines import can_capture, create, exeat, kernel, machine, own_network
from tests.support.waiting import until

pytestmark = [
    pytest.mark.xdist_group("kernel-drops"),
    pytest.mark.skipif(find_capture_tools() is None, reason="iproute2 and nftables are not installed"),
]

POLICY = """
roles:
  agent:
    boundary: {external: a namespace, reason: the tests play a microVM}
    allow: []
"""
SEND = """
import socket
for family, server in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    for port in (443, 443, 5000):
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            try:
                s.sendto(b"x" * 32, (server, port))
            except OSError:
                pass
"""
"""Four datagrams to the port of QUIC, two others."""
COUNTED = ["datagrams=2", "quic=4"]


@dataclass(frozen=True)
class Scene:
    gateway: TestGateway

    def drops(self, **conditions: str) -> list[dict[str, Any]]:
        """Records of drops in which these fields have these values."""
        return self.gateway.records(event="drops.counted", **conditions)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        if can_capture():
            stack.enter_context(own_network())
        yield Scene(stack.enter_context(TestGateway(tmp_path_factory.mktemp("drops"), policy=POLICY)))


def test_a_quiet_sandbox_leaves_no_record(scene: Scene) -> None:
    """Neither the kernel's own neighbour discovery nor our probe is a sandbox's packet."""
    done = scene.gateway.run("true", options=("--owner", "quiet"))
    assert done.code == 0, done
    scene.gateway.awaited(event="sandbox.ended", owner="quiet")
    assert scene.drops(owner="quiet") == []


def test_what_went_past_the_gateway_is_on_record_when_the_sandbox_ends(scene: Scene) -> None:
    """By kind, for who answers for it, and in the coverage of the log."""
    before = verify([scene.gateway.log]).coverage.kernel_drops
    done = scene.gateway.run("python3", "-c", SEND, options=("--owner", "ada"))
    assert done.code == 0, done
    found = scene.gateway.awaited(event="drops.counted", owner="ada")
    assert [(record["count"], record["drops"]) for record in found] == [(6, COUNTED)]
    assert (found[0]["role"], found[0]["code"]) == ("agent", "XT006W")
    assert verify([scene.gateway.log]).coverage.kernel_drops == before + 6
    done = scene.gateway.exeat("audit", "verify")
    assert f"{before + 6} kernel drops" in done.out, done


def test_a_sandbox_whose_command_was_killed_is_counted_too(scene: Scene) -> None:
    """SIGKILL for `exeat run`: the counters outlive every process of the sandbox."""
    gateway = scene.gateway
    words = [EXEAT, "run", "--config", str(gateway.settings_file), "--owner", "eve", "--", "python3", "-c"]
    program = SEND + "print('sent', flush=True)\nimport time\ntime.sleep(60)"
    environment = {"PATH": PATH, "HOME": str(gateway.home)}
    with subprocess.Popen([*words, program], env=environment, cwd=gateway.home, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"sent\n"
        assert scene.drops(owner="eve") == [], "not yet: at most one record a minute"
        running.kill()
    found = scene.gateway.awaited(event="drops.counted", owner="eve")
    assert [record["drops"] for record in found] == [COUNTED]


def test_an_ordinary_users_sandbox_is_counted() -> None:
    """Whose `exeat run` has a gateway of its own: nobody needs root to read what he made."""
    # pytest's own folder can be entered by its user alone, and the path of a Unix socket has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="exeat-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        gateway = TestGateway(folder / "g", policy=POLICY, run_prefix=ordinary.prefix())
        ordinary.give(folder)
        done = gateway.run("python3", "-c", SEND)
        assert done.code == 0, done
        (record,) = gateway.awaited(event="drops.counted")
        assert (record["drops"], record.get("error")) == (COUNTED, None)


@pytest.mark.root
@pytest.mark.skipif(not can_capture(), reason="interfaces and rules of a host are root's")
def test_what_a_machine_sent_is_counted_for_its_interface(scene: Scene) -> None:
    """In the host's rules; what the interface had counted before its sandbox is not the sandbox's."""
    with machine(1) as made:
        assert kernel("apply", "--interface", made.option).code == 0
        made.connect_link()
        made.python(SEND)
        done = create(scene.gateway, made.link)
        assert done.code == 0, done
        created = done.json()
        made.python(SEND)
        ended = exeat("sandbox", "end", "--config", str(scene.gateway.settings_file), created["id"])
        assert ended.code == 0, ended
        (record,) = until(lambda: scene.drops(sandbox=created["id"]), what="the record")
        counted = dict(entry.split("=") for entry in record["drops"])
        assert (counted["quic"], counted["datagrams"], record["interface"]) == ("4", "2", made.link)
    until(lambda: kernel("apply", "--forget", made.link).code == 0, what="the end of the interface")
