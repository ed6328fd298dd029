"""The launcher and the control socket against a workload that got hold of a folder or a path it should not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exeat.launch import BoundaryUnavailable, Plan, launch, system_view
from exeat.principals import uid_of_sandbox
from tests.support.gateway import TestGateway

pytestmark = pytest.mark.xdist_group("launcher")

POLICY = """
roles:
  agent:
    allow:
      - {name: read, host: api.test, methods: [GET], paths: ["/v1/**"]}
"""

CONTROL = """
import json, socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.settimeout(60)
peer.connect(sys.argv[1])
answer = peer.recv(4096) if len(sys.argv) > 2 else b""
if not answer:
    peer.send(json.dumps({"op": "remove", "sandbox": "sb_other"}).encode())
    answer = peer.recv(4096)
print(answer.decode())
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestGateway]:
    with TestGateway(tmp_path_factory.mktemp("launcher"), policy=POLICY) as running:
        yield running


def plan(*view: tuple[str, str, str]) -> Plan:
    uid = uid_of_sandbox(7) if os.geteuid() == 0 else os.getuid()
    return Plan(
        argv=("/bin/true",),
        env={},
        view=(*system_view(), *view),  # type: ignore[arg-type]  # rows of the test
        cwd="/",
        uid=uid,
        gid=uid if os.geteuid() == 0 else os.getgid(),
        hostname="test",
        network=True,
    )


def test_a_link_on_the_way_to_a_shown_folder_is_refused(tmp_path: Path) -> None:
    """Whoever swaps a component for a link after the check shows nothing: the launcher follows none."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "project").symlink_to("../secret")
    for source in (tmp_path / "shared" / "project", tmp_path / "shared" / "project" / "deeper"):
        (tmp_path / "secret" / "deeper").mkdir(exist_ok=True)
        with pytest.raises(BoundaryUnavailable, match="symbolic link"):
            launch(plan(("rw", str(source), "/work")))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """The error says which path is not there."""
    with pytest.raises(BoundaryUnavailable, match="nothing-here does not exist"):
        launch(plan(("ro", str(tmp_path / "nothing-here"), "/work")))


def test_a_real_folder_is_shown(tmp_path: Path) -> None:
    """The control: without a link the program starts and ends with its own code."""
    (tmp_path / "project").mkdir()
    started = launch(plan(("ro", str(tmp_path / "project"), "/work")))
    assert started.process.wait(60) == 0


def test_the_control_socket_hears_nobody_from_another_namespace(gateway: TestGateway) -> None:
    """Same uid, same path, but another PID namespace: told no, and no sandbox is touched."""
    path = str(gateway.run_folder / "control.sock")
    own = subprocess.run([sys.executable, "-c", CONTROL, path], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(own.stdout) == {"ok": True}
    unshare = ["unshare", "--pid", "--fork"] if os.geteuid() == 0 else ["unshare", "--user", "--pid", "--fork"]
    other = subprocess.run(
        [*unshare, sys.executable, "-c", CONTROL, path, "listen"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "namespace" in json.loads(other.stdout)["error"], other
