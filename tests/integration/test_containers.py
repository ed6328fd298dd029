"""The container topology without containers: four processes under four uids, joined only by sockets in folders."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.admin.client import AdminClient, AdminError
from exeat.commands.setup import write_installation
from exeat.environment import client_environment
from exeat.launch import Plan, interpreter_view, launch, system_view
from exeat.principals import CONTAINER_UIDS
from tests.support.gateway import PATH, free_port
from tests.support.origins import Origin
from tests.support.waiting import until

pytestmark = [
    pytest.mark.xdist_group("containers"),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="four uids need root"),
]

GROUP = 10000
POLICY = """version: 1
destinations:
  api.test: {{addresses: [127.0.0.31/32], resolve: [127.0.0.31], port: {port}, ca: "file:api.pem"}}
roles:
  agent:
    boundary: {{external: docker internal network, reason: the compose file}}
    allow:
      - {{name: read, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}}
"""
CREDENTIALS = """version: 1
credentials:
  api:
    kind: bearer
    secret: store:api
    hosts: [api.test]
    owner: tests
    placeholder: {env: API_KEY, shape: "sk_{32}"}
"""
SECRET = "canary-containers-8d1f0c2b3a4e5f60"


class Topology:
    """Folders as compose.yaml mounts them, and the processes."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        self.folder = folder
        self.port = free_port()
        self.sockets = folder / "sockets"
        self.config = folder / "config"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        uids = CONTAINER_UIDS
        owners = {"audit": "auditor", "control": "vault", "handoff": "executor", "admin": "vault", "client": "vault"}
        for name, owner in owners.items():
            path = self.sockets / name
            path.mkdir(parents=True)
            os.chown(path, uids[owner], GROUP)  # type: ignore[index]
            path.chmod(0o755)
        for name, owner in {"state/vault": "vault", "state/auditor": "auditor", "log": "auditor"}.items():
            path = folder / name
            path.mkdir(parents=True)
            os.chown(path, uids[owner], GROUP)  # type: ignore[index]
            path.chmod(0o700)
        self.config.mkdir()
        (self.config / "api.pem").write_text(origin.authority.pem)
        write_installation(
            self.config,
            {
                "policy.yaml": POLICY.format(port=origin.port),
                "credentials.yaml": CREDENTIALS,
                "exeat.yaml": (
                    f"version: 1\nstate: {folder}/state\nlog: {folder}/log\nadmins: [0]\n"
                    "key: {file: keys/store.key}\n"
                ),
            },
        )
        for path in (self.config / "keys", self.config / "keys/store.key", self.config / "credentials.yaml"):
            os.chown(path, uids["vault"], GROUP)
        (folder / "digest_key").write_text("ab" * 32)
        os.chown(folder / "digest_key", 0, GROUP)
        (folder / "digest_key").chmod(0o640)

    def start(self, kind: str, mounts: dict[str, str]) -> None:
        """Run `exeat serve kind` under its uid, seeing only `mounts` (folder -> ro|rw) of the topology."""
        uid = CONTAINER_UIDS[kind]  # type: ignore[index]
        view = system_view()
        view += [("tmpfs", "mode=1777", "/tmp")]
        view += interpreter_view(view)
        view += [
            (mode, str(self.folder / name), str(self.folder / name))  # type: ignore[misc]
            for name, mode in {**mounts, "digest_key": "ro", "config/exeat.yaml": "ro"}.items()
        ]
        argv = [sys.executable, "-I", "-m", "exeat", "serve", kind, "--sockets", str(self.sockets)]
        argv += ["--digest-key", str(self.folder / "digest_key"), "--listen", f"127.0.0.1:{self.port}"]
        argv += ["--config", str(self.config / "exeat.yaml")]
        plan = Plan(
            argv=tuple(argv),
            env={"HOME": "/tmp"},
            view=tuple(view),
            cwd="/",
            uid=uid,
            gid=GROUP,
            hostname=kind,
            network=False,
            isolate=False,  # containers share one user namespace: peers see each other's uids
            reap=True,
        )
        self.processes[kind] = launch(plan).process

    def stop(self) -> None:
        for kind in ("worker", "executor", "vault", "auditor"):
            if (process := self.processes.get(kind)) is not None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Topology, Origin]]:
    folder = tmp_path_factory.mktemp("containers")
    with Origin("api.test", address="127.0.0.31").run_in_thread() as origin:
        running = Topology(folder, origin)
        try:
            running.start("auditor", {"sockets/audit": "rw", "state/auditor": "rw", "log": "rw"})
            running.start(
                "vault",
                {
                    "sockets/audit": "ro",
                    "sockets/control": "rw",
                    "sockets/admin": "rw",
                    "sockets/client": "rw",
                    "state/vault": "rw",
                    "config": "ro",
                },
            )
            running.start("executor", {"sockets/audit": "ro", "sockets/control": "ro", "sockets/handoff": "rw"})
            running.start(
                "worker",
                {"sockets/audit": "ro", "sockets/control": "ro", "sockets/handoff": "ro", "sockets/client": "ro"},
            )
            yield running, origin
        finally:
            running.stop()


def test_a_credentialed_call_works_across_containers(topology: tuple[Topology, Origin]) -> None:
    """Four separate principals, no inherited descriptor: the secret reaches the origin and not the client."""
    running, origin = topology
    admin = AdminClient(running.sockets / "admin/admin.sock")
    deadline = time.monotonic() + 15
    while True:
        try:
            processes = {entry["kind"] for entry in admin.status()["processes"]}
            if processes == {"worker", "executor"}:
                break
        except AdminError:
            processes = set()
        assert time.monotonic() < deadline, (processes, {k: p.poll() for k, p in running.processes.items()})
        time.sleep(0.1)
    admin.add_secret("api", SECRET.encode(), owner="tests")
    box = admin.create_sandbox("agent", ttl="5m")
    files = running.sockets / "client"
    environment = client_environment(
        proxy_url=f"http://session:{box['token']}@127.0.0.1:{running.port}",
        ca_file=str(files / "ca.pem"),
        bundle_file=str(files / "bundle.pem"),
    )
    result = subprocess.run(
        [
            *("curl", "-sS", "-m", "60", "-H", f"Authorization: Bearer {box['env']['API_KEY']}"),
            f"https://api.test:{origin.port}/v1/x",
        ],
        env=environment | {"PATH": PATH},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, (result.stderr, result.stdout)
    assert origin.received[0].values("authorization") == [f"Bearer {SECRET}"]
    assert SECRET not in result.stdout


def worker_process() -> int:
    """The pid of the worker itself, 0 while it is still on its way."""
    argv = ["pgrep", "-u", str(CONTAINER_UIDS["worker"]), "-f", "proxy.worker"]
    found = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()
    return int(found[0]) if found else 0


def test_the_worker_sees_neither_state_nor_admin_socket(topology: tuple[Topology, Origin]) -> None:
    """What a container does not mount, its process does not have."""
    running, _ = topology
    inner = until(worker_process)
    root = Path(f"/proc/{inner}/root")
    assert (root / str(running.sockets / "client" / "ca.pem").lstrip("/")).exists()
    for hidden in (running.folder / "state", running.sockets / "admin", running.config / "keys"):
        assert not (root / str(hidden).lstrip("/")).exists()
