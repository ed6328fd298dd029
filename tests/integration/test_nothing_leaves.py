"""Captured sandboxes without one proxy variable: real clients work, and nothing else leaves; the world outside watches.

The host is a namespace whose default routes lead to a witness (tests/support/world.py): whatever left it, by whatever
protocol and to whatever address, would be seen arriving there. Three sandboxes are played through: `exeat run` as
root, `exeat run` as an ordinary user, and a machine behind a captured interface. A fourth machine is free, and is
seen: so the witness sees. Only CA variables are set in any of them (docs/clients.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exeat.boundary import find_capture_tools
from exeat.environment import ADDING_CA_VARIABLES, PROXY_VARIABLES, REPLACING_CA_VARIABLES
from tests.support import ordinary, prober
from tests.support.entries import PYTHON, Inside, inside_of
from tests.support.gateway import Completed, TestGateway, completed
from tests.support.githttp import git_backend, make_repository
from tests.support.leaks import command_line, descendants
from tests.support.machines import Machine, capture, create, kernel, machine, own_network
from tests.support.origins import Origin, head
from tests.support.registries import serve_index, serve_registry
from tests.support.scripts import READ, chunk, script
from tests.support.signals import Gate
from tests.support.waiting import until
from tests.support.world import World, world

pytestmark = [
    pytest.mark.xdist_group("nothing-leaves"),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="the world outside is a namespace that root makes"),
    pytest.mark.skipif(find_capture_tools() is None, reason="iproute2 and nftables are not installed"),
]

KINDS = ("run-root", "run-user", "machine")
CA_VARIABLES = (*ADDING_CA_VARIABLES, *REPLACING_CA_VARIABLES)
PROBER = Path(prober.__file__)
QUIET = {
    # This machine's own configuration of pip and npm stays out; a sandbox elsewhere has none.
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "npm_config_fetch_retries": "0",
    "npm_config_audit": "false",
    "npm_config_update_notifier": "false",
}


def policy(index: Origin, registry: Origin, forge: Origin) -> str:
    return f"""
    services:
      local-index: {{like: pypi, base: "{index.base}"}}
      local-registry: {{like: npm, base: "{registry.base}"}}
      local-forge: {{like: github, base: "{forge.base}"}}
    roles:
      agent:
        allow:
          - {{service: [local-index, local-registry], operations: [read]}}
          - {{service: local-forge, operations: [git.fetch]}}
          - {{name: api, host: api.test, methods: [GET], paths: ["/v1/**"]}}
    """


class Captured:
    """One sandbox that is captured, and its gateway. Commands in it have PATH, HOME, CA variables, and nothing else."""

    def __init__(
        self, kind: str, gateway: TestGateway, box: Inside | Machine, shared: Path, identifier: str = ""
    ) -> None:
        self.kind = kind
        self.gateway = gateway
        self.id = box.id if isinstance(box, Inside) else identifier
        self.box = box
        self.shared = shared
        given = box.environment if isinstance(box, Inside) else machine_variables(gateway)
        self.environment = {name: given[name] for name in CA_VARIABLES} | QUIET
        self.environment |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(shared), "LANG": "C.UTF-8"}

    def command(self, *argv: str, env: Mapping[str, str] | None = None) -> Completed:
        settings = [f"{name}={value}" for name, value in (self.environment | dict(env or {})).items()]
        if isinstance(self.box, Inside):
            return self.box.command("env", "-i", *settings, *argv)
        return self.box.run("env", "-i", *settings, *argv)

    def dropped(self) -> int:
        """Packets that the rules of this sandbox's capture have refused so far."""
        if isinstance(self.box, Machine):
            counters = kernel("check", "-o", "json").json()["counters"]
            return sum(counters[name] for name in ("spoofed", "dot", "quic", "datagrams", "pings", "other"))
        tools = find_capture_tools()
        assert tools is not None
        for entry in os.listdir("/proc"):
            # Only the workload itself is in the namespace; `exeat run` and its launcher have the same words.
            if entry.isdigit() and str(self.shared).encode() in command_line(int(entry)):
                done = subprocess.run(
                    ["nsenter", "-t", entry, "-n", tools.nft, "-j", "list", "counter", "inet", "exeat", "refused"],
                    capture_output=True,
                    check=False,
                )
                if done.returncode == 0:
                    return int(json.loads(done.stdout)["nftables"][-1]["counter"]["packets"])
        raise AssertionError("the sandbox has no counter")


def machine_variables(gateway: TestGateway) -> dict[str, str]:
    """What the documentation has a microVM set: the CA files, by the names that clients read."""
    files = gateway.client_files
    return dict.fromkeys(ADDING_CA_VARIABLES, str(files / "ca.pem")) | dict.fromkeys(
        REPLACING_CA_VARIABLES, str(files / "bundle.pem")
    )


@dataclass
class Scene:
    """Everything of this module."""

    outside: World
    api: Origin
    index: Origin
    registry: Origin
    forge: Origin
    commit: str
    gateway: TestGateway
    free: Machine
    stack: contextlib.ExitStack
    boxes: dict[str, Captured] = field(default_factory=dict)
    restarts: int = 0
    """Of all processes, that the gateway's standard error told of before its last start."""

    def enter(self, kind: str, gateway: TestGateway) -> None:
        """An `exeat run` of that gateway, as whom it is; in place of an earlier one."""
        inside = self.stack.enter_context(inside_of(gateway))
        self.boxes[kind] = Captured(kind, gateway, inside, inside.shared)

    def calm(self) -> None:
        """A gateway that will not give up: its supervisor does after six restarts within a minute."""
        process = self.gateway.process
        counted = self.gateway.errors().count("restarting all processes")
        if process is None or process.poll() is not None or counted - self.restarts > 2:
            self.start_anew()
            self.move_in()

    def start_anew(self) -> None:
        """Stop the gateway, however it is, and start it."""
        self.gateway.stop()
        self.gateway.start()
        self.restarts = self.gateway.errors().count("restarting all processes")

    def move_in(self) -> None:
        """New sandboxes where those of the gateway before were."""
        behind = self.boxes["machine"]
        assert isinstance(behind.box, Machine)
        created = create(self.gateway, behind.box.link)
        assert created.code == 0, created
        behind.id = str(created.json()["id"])
        self.enter("run-root", self.gateway)

    def nothing_left(self) -> None:
        """What left by now would have arrived: nothing did, and the host sent nothing that way."""
        self.outside.sync()
        assert self.outside.heard() == []
        assert self.outside.counted() == 0

    def works(self, box: Captured, seconds: float = 10) -> bool:
        """The control: a name, a connection, TLS, an answer."""
        limit = ("--max-time", str(seconds))
        return box.command("curl", "-sS", "--fail", *limit, "-o", "/dev/null", self.api.url("/v1/x")).code == 0


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    # pytest's own folder can be entered by its user alone, and the path of a Unix socket has 107 bytes.
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exeat-")))
        folder.chmod(0o755)
        stack.enter_context(own_network())
        for path in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path(f"/proc/sys/net/{path}").write_text("1")  # what no rule dropped would be forwarded
        outside = stack.enter_context(world())
        commit = make_repository(folder / "repositories" / "o" / "r.git", {"README.md": "hello from git\n"})
        backend = git_backend(folder / "repositories")
        api = stack.enter_context(Origin("api.test", address="127.0.0.81").run_in_thread())
        index = stack.enter_context(Origin("index.test", address="127.0.0.82").run_in_thread())
        registry = stack.enter_context(Origin("registry.test", address="::1").run_in_thread())
        forge = stack.enter_context(Origin("forge.test", address="::1", handler=backend).run_in_thread())
        serve_index(index)
        serve_registry(registry)
        origins = (api, index, registry, forge)
        rules = policy(index, registry, forge)
        root = stack.enter_context(TestGateway(folder / "root", policy=rules, origins=origins))
        # An ordinary user's `exeat run` starts a gateway of its own.
        prefix = ordinary.prefix()
        user = TestGateway(folder / "user", policy=rules, origins=origins, run_prefix=prefix, settings="admins: [0]\n")
        ordinary.give(folder / "user")
        stack.callback(Path("/run/exeat-capture.lock").unlink, missing_ok=True)
        captured, free = (stack.enter_context(machine(number)) for number in (1, 2))
        free.connect_link()
        identifier = str(capture(root, captured)["id"])
        made = Scene(outside, api, index, registry, forge, commit, root, free, stack)
        for kind, gateway in (("run-root", root), ("run-user", user)):
            made.enter(kind, gateway)
        shared = folder / "machine"
        shared.mkdir()
        made.boxes["machine"] = Captured("machine", root, captured, shared, identifier)
        made.outside.forget()
        yield made


@pytest.fixture(params=KINDS)
def box(request: pytest.FixtureRequest, scene: Scene) -> Captured:
    found = scene.boxes[request.param]
    assert not set(found.environment) & set(PROXY_VARIABLES)
    assert not [value for value in found.environment.values() if "3128" in value]
    return found


@pytest.fixture(autouse=True)
def _watched(scene: Scene) -> Iterator[None]:
    """Whatever a test does in a captured sandbox, and what the gateway does for it, the world hears nothing of it."""
    scene.calm()
    scene.outside.sync()
    scene.outside.forget()
    yield
    scene.nothing_left()
    scene.outside.forget()


# --- nothing leaves ----------------------------------------------------------------------------------------------

EVERY_WAY = [
    *(f"tcp {address} {port}" for address in prober.ADDRESSES for port in (*prober.TCP, 53)),
    *(f"udp {address} {port}" for address in prober.ADDRESSES for port in (*prober.UDP, 53)),
    *(f"icmp {address}" for address in prober.ADDRESSES),
    *(f"protocol {number} {address}" for address in prober.ADDRESSES for number in (253, 132, 136, 47, 4, 41)),
    *(f"accepted {port}" for port in (*prober.TCP, 53)),
    *(f"received {port}" for port in (*prober.UDP, 53)),
]


@pytest.mark.parametrize("who", ["host", "free machine"])
def test_the_witness_sees_every_attempt_of_who_is_not_captured(scene: Scene, who: str) -> None:
    """The control of all tests here: the same program, on the host itself and on a machine beside the captured one,
    gets out every way, and each way is seen and counted."""
    argv = [sys.executable, "-I", str(PROBER)]
    done = completed(subprocess.run(argv, capture_output=True, check=False)) if who == "host" else scene.free.run(*argv)
    scene.outside.sync()
    heard = scene.outside.heard()
    assert [way for way in EVERY_WAY if way not in heard] == []
    assert scene.outside.counted() >= len(EVERY_WAY) - len(prober.TCP)
    said = done.json()
    ways = [way for way in EVERY_WAY if way.startswith(("tcp", "udp"))]
    assert [way for way in ways if way not in said["answered"]] == []
    scene.outside.forget()


def test_no_packet_of_a_captured_sandbox_leaves(scene: Scene, box: Captured) -> None:
    """TCP, UDP, QUIC, DNS at other servers, pings, raw packets, broadcast: refused, counted, seen by nobody outside."""
    before = box.dropped()
    done = box.command(PYTHON, "-I", str(readable(box, PROBER)))
    assert done.code == 0, done
    said = done.json()
    assert said["answered"] == []
    assert said["tried"] >= len(prober.ADDRESSES) * (len(prober.TCP) + len(prober.UDP) + 2)
    # Whatever server was asked, the stub answered, with an address that means something in there alone.
    assert [name.rpartition(" ")[0] for name in said["names"]] == sorted(
        f"{kind} {address} 53" for kind in ("tcp", "udp") for address in prober.ADDRESSES
    )
    assert {name.rpartition(" ")[2].rpartition(".")[0].rpartition(".")[0] for name in said["names"]} == {"198.18"}
    assert box.dropped() - before >= len(prober.ADDRESSES) * len(prober.UDP)
    scene.nothing_left()


def readable(box: Captured, program: Path) -> Path:
    """`program` where the sandbox can read it."""
    return Path(shutil.copy(program, box.shared))


CURL = "curl -sS -k --max-time 2 --noproxy *"


def test_no_option_of_curl_leads_out(scene: Scene, box: Captured) -> None:
    """Its own address, IPv6, its own resolver's answer, another proxy, SOCKS, DNS over HTTPS: each fails."""
    place = f"api.test:{scene.api.port}"
    attempts = [
        f"{CURL} http://192.0.2.1/",
        f"{CURL} https://198.51.100.1/",
        f"{CURL} -6 https://[2001:db8::1]/",
        f"{CURL} -6 https://{place}/v1/x",
        f"{CURL} --resolve {place}:203.0.113.1 https://{place}/v1/x",
        f"{CURL} --resolve {place}:[2001:db8::1] https://{place}/v1/x",
        f"{CURL} --resolve {place}:127.0.0.81 https://{place}/v1/x",
        f"{CURL} --connect-to {place}:192.0.2.1:443 https://{place}/v1/x",
        f"{CURL} --doh-url https://192.0.2.1/dns-query https://{place}/v1/x",
        f"{CURL} http://192.0.2.1:53/",
        f"{CURL} telnet://192.0.2.1:25",
        "curl -sS -k --max-time 2 -x http://192.0.2.1:3128 https://leaked.test/",
        "curl -sS -k --max-time 2 -x socks5h://198.51.100.1:1080 https://leaked.test/",
        "curl -sS -k --max-time 2 -x socks5h://[2001:db8::1]:1080 https://leaked.test/",
    ]
    served = len(scene.api.connections)
    # All at once, each with its exit code.
    quoted = [" ".join(shlex.quote(word) for word in attempt.split()) for attempt in attempts]
    lines = [f"({line} </dev/null >/dev/null 2>&1; echo {number} $?) &" for number, line in enumerate(quoted)]
    done = box.command("sh", "-c", "\n".join([*lines, "wait"]))
    codes = dict(line.split() for line in done.out.splitlines())
    assert len(codes) == len(attempts), done
    assert [attempts[int(number)] for number, code in codes.items() if code == "0"] == []
    assert len(scene.api.connections) == served
    scene.nothing_left()


# --- and what is permitted works ---------------------------------------------------------------------------------


def test_curl_works_by_name_alone(scene: Scene, box: Captured) -> None:
    """An allowed path is read; beside it is a refusal that says why, also of a host that no rule names."""
    done = box.command("curl", "-sS", "--fail", scene.api.url("/v1/hello"))
    assert done.code == 0, done
    assert done.json()["target"] == "/v1/hello"
    for url in (scene.api.url("/other"), "https://leaked.test/", "http://leaked.test/"):
        assert box.command("curl", "-sS", url).json()["reason"] == "no-rule", url
    assert box.gateway.awaited(sandbox=box.id, event="request.outcome", host="api.test", path="/v1/hello")


def test_pip_installs_without_a_proxy_variable(scene: Scene, box: Captured) -> None:
    """Download and installation from an index over HTTPS; the package then runs."""
    target = box.shared / "python"
    where = ("--no-cache-dir", "--index-url", scene.index.url("/simple/"))
    done = box.command(PYTHON, "-m", "pip", "download", *where, "--dest", str(box.shared / "wheels"), "exeat-hello")
    assert done.code == 0, done
    assert [path.name for path in (box.shared / "wheels").iterdir()] == ["exeat_hello-1.0-py3-none-any.whl"]
    done = box.command(PYTHON, "-m", "pip", "install", *where, "--target", str(target), "exeat-hello")
    assert done.code == 0, done
    program = "import exeat_hello; print(exeat_hello.GREETING)"
    assert box.command(PYTHON, "-c", program, env={"PYTHONPATH": str(target)}).out == "hello from pip\n"


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_installs_without_a_proxy_variable(scene: Scene, box: Captured) -> None:
    """From a registry that is reached over IPv6 upstream; Node loads the package."""
    folder = box.shared / "node"
    done = box.command("npm", "install", "--prefix", str(folder), "--registry", scene.registry.url("/"), "exeat-hello")
    assert done.code == 0, done
    shown = box.command("node", "-p", f"require({str(folder / 'node_modules' / 'exeat-hello')!r})")
    assert shown.out == "hello from npm\n"


def test_git_clones_and_fetches_without_a_proxy_variable(scene: Scene, box: Captured) -> None:
    """Over HTTPS from `git http-backend`, reached over IPv6; no proxy in any configuration; push is refused."""
    clone = str(box.shared / "clone")
    assert box.command("git", "config", "--get-regexp", "proxy").out == ""
    done = box.command("git", "clone", "-q", scene.forge.url("/o/r.git"), clone)
    assert done.code == 0, done
    assert box.command("git", "-C", clone, "rev-parse", "HEAD").out.strip() == scene.commit
    fetched = box.command("git", "-C", clone, "fetch", "-q", "origin", "main")
    assert fetched.code == 0, fetched
    before = len(scene.forge.received)
    pushed = box.command("git", "-C", clone, "push", "origin", "HEAD:refs/heads/other")
    assert (pushed.code != 0, "Exeat" in pushed.err) == (True, True), pushed
    assert len(scene.forge.received) == before


# --- processes of ours die ---------------------------------------------------------------------------------------


class Traffic:
    """A download that stands still in the middle, and attempts at every way out, over and over, in one sandbox."""

    def __init__(self, scene: Scene, box: Captured, name: str) -> None:
        self._box = box
        self._gate = Gate()
        self._over = box.shared / f"{name}.over"
        path = f"/v1/{name}/{box.kind}"
        opening = head(200, (("Content-Type", "text/plain"), ("Transfer-Encoding", "chunked")))
        scene.api.on(path, script(READ, opening, chunk(b"first "), self._gate, chunk(b"last"), b"0\r\n\r\n"))
        self._url = scene.api.url(path)
        self._probed: list[Completed] = []
        self._loaded: list[Completed] = []

    def __enter__(self) -> Traffic:
        program = readable(self._box, PROBER)
        self._threads = [
            threading.Thread(target=self._probe, args=(program,), daemon=True),
            threading.Thread(target=self._load, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._gate.wait_arrived()
        return self

    def _probe(self, program: Path) -> None:
        self._probed.append(self._box.command(PYTHON, "-I", str(program), str(self._over)))

    def _load(self) -> None:
        self._loaded.append(self._box.command("curl", "-sS", "--max-time", "20", self._url))

    def __exit__(self, *_: object) -> None:
        self._gate.open()
        self._over.touch()
        for thread in self._threads:
            thread.join(60)

    def ended(self) -> tuple[Completed, dict[str, Any]]:
        """(the download, what the attempts came to)."""
        (loaded,), (probed,) = self._loaded, self._probed
        return loaded, dict(json.loads(probed.out.splitlines()[-1]))


MODULES = {
    "worker": b"-m proxy.worker ",
    "executor": b"-m broker.executor_process ",
    "vault": b"-m broker.vault ",
    "auditor": b"-m audit.auditor ",
}


def processes_of(gateway: TestGateway, kind: str) -> list[int]:
    """The processes of that kind, `supervisor` included; there is at least one."""
    assert gateway.process is not None
    if kind == "supervisor":
        return [gateway.process.pid]
    found = [pid for pid in descendants(gateway.process.pid) if MODULES[kind] in command_line(pid)]
    assert found, kind
    return found


@pytest.mark.parametrize("kind", [*MODULES, "supervisor", "everything"])
def test_while_our_processes_stand_still_nothing_leaves(scene: Scene, kind: str) -> None:
    """SIGSTOP under load: every way out is tried again and again, the kernel goes on refusing and counting, in the
    sandbox's own namespace and at the captured interface; SIGCONT, and the same sandboxes are served."""
    boxes = [scene.boxes[name] for name in ("run-root", "machine")]
    kinds = [*MODULES, "supervisor"] if kind == "everything" else [kind]
    stopped = [pid for one in kinds for pid in processes_of(scene.gateway, one)]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Traffic(scene, box, f"stop-{kind}")) for box in boxes]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            for box in boxes:
                # A round of attempts makes so many; the second one began after the stop for certain.
                wanted = box.dropped() + 2 * len(prober.ADDRESSES) * len(prober.UDP)
                until(lambda box=box, wanted=wanted: box.dropped() >= wanted, what="the kernel's count")
            scene.nothing_left()
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        for box in boxes:
            until(lambda box=box: scene.works(box), what="work after the stop")
    for traffic in running:
        _, probed = traffic.ended()
        assert probed["rounds"] > 2
        assert probed["answered"] == []
    scene.nothing_left()


@pytest.mark.parametrize("kind", ["executor", "vault", "auditor"])
def test_while_a_killed_process_is_replaced_nothing_leaves(scene: Scene, kind: str) -> None:
    """SIGKILL under load for those that no sandbox speaks to: ways out stay shut, the kernel counts, work goes on."""
    boxes = [scene.boxes[name] for name in ("run-root", "machine")]
    before = [box.dropped() for box in boxes]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Traffic(scene, box, f"kill-{kind}")) for box in boxes]
        for pid in processes_of(scene.gateway, kind):
            os.kill(pid, signal.SIGKILL)
        until(lambda: "restarting all processes" in scene.gateway.errors(), what="the supervisor's word")
        for box in boxes:
            until(lambda box=box: scene.works(box), what="work after the kill")
    for traffic in running:
        _, probed = traffic.ended()
        assert probed["answered"] == []
    assert all(box.dropped() > count for box, count in zip(boxes, before, strict=True))
    scene.nothing_left()


def test_while_a_killed_worker_is_replaced_nothing_leaves(scene: Scene) -> None:
    """SIGKILL under load, in the middle of a download: it breaks off, all ways out stay shut, and work goes on by
    itself for the sandboxes that were there."""
    boxes = [scene.boxes[kind] for kind in ("run-root", "machine")]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Traffic(scene, box, "worker")) for box in boxes]
        assert scene.gateway.process is not None
        pids = descendants(scene.gateway.process.pid)
        workers = [pid for pid in pids if b"-m proxy.worker " in command_line(pid)]
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for box in boxes:
            until(lambda box=box: scene.works(box), what="work after the kill")
    for traffic in running:
        loaded, probed = traffic.ended()
        assert loaded.code != 0, "the kill did not hit the download"
        assert "last" not in loaded.out
        assert probed["rounds"] > 2
        assert probed["answered"] == []
    scene.nothing_left()


@pytest.mark.parametrize("killed", ["everything", "the supervisor alone"])
def test_while_the_whole_gateway_is_dead_nothing_leaves(scene: Scene, killed: str) -> None:
    """SIGKILL for every process of ours, or for the one that all end with: nothing is served and nothing leaves, and
    after a start new sandboxes work; those of the dead gateway stay shut."""
    boxes = [scene.boxes[kind] for kind in ("run-root", "machine")]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Traffic(scene, box, "gateway")) for box in boxes]
        assert scene.gateway.process is not None
        everybody = descendants(scene.gateway.process.pid)
        for pid in [scene.gateway.process.pid, *(everybody if killed == "everything" else ())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        scene.gateway.process.wait(60)
        until(lambda: not [pid for pid in everybody if command_line(pid)], what="the end of all")
        served = len(scene.api.connections)
        for box in boxes:
            assert not scene.works(box, 1)
            once = box.command(PYTHON, "-I", str(readable(box, PROBER))).json()
            assert once["answered"] == once["names"] == []
        assert len(scene.api.connections) == served
    for traffic in running:
        loaded, probed = traffic.ended()
        assert loaded.code != 0
        assert "last" not in loaded.out
        assert probed["answered"] == []
    scene.nothing_left()
    scene.start_anew()
    for box in boxes:
        assert not scene.works(box, 1), "its listeners died with the gateway"
    scene.move_in()
    for kind in ("run-root", "machine"):
        assert scene.works(scene.boxes[kind])
