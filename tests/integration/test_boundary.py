"""The boundary of `exeat run` against a hostile workload, started by root and by an ordinary user (RULINGS 6.1).

One gateway and one run of tests/support/hostile.py for each of the two; every row of the table looks at one attempt.
Then the life of a sandbox: exit codes, signals, and that nothing is left when anything above it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import ordinary
from tests.support.gateway import EXEAT, PATH, Completed, TestGateway, completed
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("boundary")

HOSTILE = Path(__file__).parents[1] / "support" / "hostile.py"
POLICY = "roles: {agent: {allow: [{name: read, host: api.test, methods: [GET], paths: [/]}]}}\n"
CANARY = "canary-6d1f0b7ae2954c38"
AS = ["root", "user"] if os.geteuid() == 0 else ["user"]


@dataclass
class Host:
    """A gateway, a user's home with keys in it, and a project to start from."""

    who: str
    folder: Path
    gateway: TestGateway
    held: list[socket.socket] = field(default_factory=list)

    @property
    def prefix(self) -> list[str]:
        return ordinary.prefix() if self.who == "user" else []

    @property
    def home(self) -> Path:
        return self.gateway.home

    @property
    def project(self) -> Path:
        return self.home / "project"

    def command(self, *argv: str, options: Sequence[str] = ()) -> list[str]:
        shown = [word for path in sorted({sys.base_prefix, sys.prefix}) for word in ("--ro", path)]
        config = ["--config", str(self.gateway.settings_file)]
        return [*self.prefix, EXEAT, "run", *config, *shown, *options, "--", *argv]

    def environment(self) -> dict[str, str]:
        return {"PATH": PATH, "HOME": str(self.home), "LANG": "C.UTF-8"}

    def run(
        self, *argv: str, options: Sequence[str] = (), env: Mapping[str, str] | None = None, **more: Any
    ) -> Completed:
        more.setdefault("cwd", self.project)
        result = subprocess.run(
            self.command(*argv, options=options),
            env=self.environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=90,
            check=False,
            **more,
        )
        return completed(result)

    @contextlib.contextmanager
    def started(self, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
        """`exeat run` in a session of its own, as a terminal would start it."""
        process = subprocess.Popen(
            self.command(*argv),
            env=self.environment(),
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


class Hosts:
    """One Host and one run of the hostile workload for each who, made when first asked for, in whatever order."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._hosts: dict[str, Host] = {}
        self._attempts: dict[str, dict[str, str]] = {}

    def host(self, who: str) -> Host:
        if who not in self._hosts:
            self._hosts[who] = self._stack.enter_context(made_for(who))
        return self._hosts[who]

    def attempts(self, who: str) -> dict[str, str]:
        if who not in self._attempts:
            self._attempts[who] = {}  # should the attack itself fail, it is not repeated for every row
            self._attempts[who] = attack(self.host(who))
        return self._attempts[who]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        yield Hosts(stack)


@pytest.fixture(params=AS)
def host(request: pytest.FixtureRequest, hosts: Hosts) -> Host:
    return hosts.host(request.param)


@pytest.fixture(params=AS)
def attempts(request: pytest.FixtureRequest, hosts: Hosts) -> dict[str, str]:
    """How each attempt of the hostile workload ended."""
    return hosts.attempts(request.param)


@contextlib.contextmanager
def made_for(who: str) -> Iterator[Host]:
    # pytest's own temporary folder can be entered by its user alone.
    with tempfile.TemporaryDirectory(prefix="exeat-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        prefix = ordinary.prefix() if who == "user" else []
        gateway = TestGateway(folder / "g", policy=POLICY, prefix=prefix, settings=f"admins: [{os.geteuid()}]\n")
        folder.chmod(0o755)
        for path in (".ssh", ".aws", "project", ".config/gh"):
            (gateway.home / path).mkdir(parents=True)
        for path in (".ssh/id_ed25519", ".aws/credentials", ".netrc", ".config/gh/hosts.yml"):
            (gateway.home / path).write_text(CANARY)
        shutil.copy(HOSTILE, gateway.home / "project")
        if who == "user":
            ordinary.give(folder)
        elif os.geteuid() == 0:
            gateway.home.joinpath("project").chmod(0o777)
        made = Host(who=who, folder=folder, gateway=gateway)
        stack.enter_context(gateway)
        yield made


def attack(host: Host) -> dict[str, str]:
    """Run the hostile workload: how each of its attempts ended."""
    abstract = f"exeat-test-{uuid.uuid4().hex}"
    outside = [
        host.home / ".ssh" / "id_ed25519",
        host.home / ".aws" / "credentials",
        host.home / ".netrc",
        host.home / ".config" / "gh" / "hosts.yml",
        host.gateway.config / "policy.yaml",
        host.gateway.config / "credentials.yaml",
        host.gateway.config / "keys" / "store.key",
        host.gateway.settings_file,
        host.gateway.state / "vault",
        host.gateway.log,
        host.gateway.run_folder / "admin.sock",
        host.gateway.run_folder / "control.sock",
        host.gateway.run_folder / "lock",
        Path("/root/.bashrc"),
        Path("/var/run/docker.sock"),
        Path("/run/dbus"),
        Path("/proc/1/root/etc"),
        Path("/sys/kernel"),
    ]
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind("\0" + abstract)
        hidden.listen()
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.bind(str(host.folder / "bus"))
        os.chmod(host.folder / "bus", 0o777)
        named.listen()
        descriptor = os.open(host.gateway.settings_file, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        suid = host.project / "suid-id"
        shutil.copy(str(shutil.which("id")), suid)
        suid.chmod(0o4755)
        facts = {
            "tcp_port": tcp.getsockname()[1],
            "abstract": abstract,
            "unix": str(host.folder / "bus"),
            "admin": str(host.gateway.run_folder / "admin.sock"),
            "control": str(host.gateway.run_folder / "control.sock"),
            "pid": os.getpid(),
            "suid": str(suid),
            "canary": CANARY,
            "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid", "ipc", "uts")},
            "files": [str(path) for path in outside],
        }
        (host.project / "facts.json").write_text(json.dumps(facts))
        (host.project / "facts.json").chmod(0o644)
        answer = host.run(
            sys.executable,
            "hostile.py",
            "facts.json",
            env={"AWS_SECRET_ACCESS_KEY": CANARY, "GITHUB_TOKEN": CANARY, "DBUS_SESSION_BUS_ADDRESS": CANARY},
            pass_fds=(descriptor,),
        )
        assert answer.code == 0, answer.err
        tcp.setblocking(False)
        with pytest.raises(BlockingIOError):
            tcp.accept()
        return dict(answer.json())


UNREACHABLE = {"ENETUNREACH", "EHOSTUNREACH", "ENETDOWN", "EADDRNOTAVAIL", "EACCES", "ECONNRESET", "EPERM"}
"""No route; or, where connections are captured, reset by the gateway (tcp) or dropped by the rules (udp)."""
NOT_THERE = {"ENOENT", "EACCES"}
ROWS: list[tuple[str, set[str], str]] = [
    *[
        (f"{kind} {address}", UNREACHABLE, "there is no route to anything")
        for kind in ("tcp", "udp")
        for address in ("192.0.2.1", "198.51.100.7", "2001:db8::1")
    ],
    ("broadcast", UNREACHABLE, "nobody hears a broadcast"),
    ("interfaces", {"nothing"}, "there is loopback and a pair that leads to itself"),
    ("add an address", {"EPERM"}, "the network cannot be set up by the workload"),
    ("host loopback", {"ECONNREFUSED"}, "loopback is the sandbox's own, without the host's services"),
    ("host abstract socket", {"ECONNREFUSED"}, "abstract sockets (X11, D-Bus, containerd) are not shared"),
    ("host unix socket", NOT_THERE, "a socket in the file system is not in view"),
    ("admin socket", NOT_THERE, "who reaches it administers the gateway"),
    ("control socket", NOT_THERE, "who reaches it hands out listeners"),
    ("raw ipv4 socket", {"EPERM"}, "raw sockets forge packets"),
    ("raw ipv6 socket", {"EPERM"}, "raw sockets forge packets"),
    ("old packet socket", {"EPERM"}, "another name of packet sockets"),
    ("packet socket", {"EAFNOSUPPORT"}, "packet sockets read and forge frames"),
    ("packet datagram socket", {"EAFNOSUPPORT"}, "packet sockets read and forge frames"),
    ("vsock socket", {"EAFNOSUPPORT"}, "vsock reaches the hypervisor past every network namespace"),
    ("crypto socket", {"EAFNOSUPPORT"}, "a kernel interface that no workload needs"),
    ("bluetooth socket", {"EAFNOSUPPORT"}, "Bluetooth is another way out"),
    ("xdp socket", {"EAFNOSUPPORT"}, "XDP bypasses the stack"),
    *[
        (f"{call} {space}", {"EPERM"}, "a namespace of its own would give capabilities")
        for call in ("unshare", "clone")
        for space in ("mount", "uts", "ipc", "user", "pid", "net", "cgroup")
    ],
    ("clone3", {"ENOSYS"}, "its flags cannot be judged"),
    ("setns", {"EPERM"}, "another namespace cannot be entered"),
    ("mount tmpfs", {"EPERM"}, "the view cannot be changed"),
    ("mount proc", {"EPERM"}, "the view cannot be changed"),
    ("remount writable", {"EPERM"}, "the system stays read-only"),
    ("umount", {"EPERM"}, "nothing comes to light from below a mount"),
    ("chroot", {"EPERM"}, "the root is final"),
    ("pivot_root", {"EPERM"}, "the root is final"),
    ("ptrace me", {"EPERM"}, "no tracing at all"),
    ("ptrace the first process", {"EPERM"}, "no tracing at all"),
    *[
        (name, {"EPERM"}, "a kernel interface that no workload needs")
        for name in (
            "bpf", "keyctl", "add_key", "perf_event_open", "io_uring", "open_by_handle_at", "process_vm_readv",
            "init_module", "kexec", "userfaultfd", "open_tree", "fsopen", "mount_setattr", "pidfd_getfd", "kernel log",
        )
    ],
    ("type into a terminal", {"EPERM"}, "TIOCSTI would type commands for the operator"),
    *[
        (f"write {path}", {"EACCES", "EROFS", "EPERM", "ENOENT"}, "the kernel cannot be set up from inside")
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/net/ipv4/ip_forward")
    ],
    ("make a device", {"EPERM"}, "a device file would reach the disk"),
    ("set the host name", {"EPERM"}, "no capabilities, not even over its own namespace"),
    ("capabilities", {"nothing"}, "every set is empty, no_new_privs and the filter are on, the uid is not 0"),
    ("become root", {"EPERM", "EINVAL"}, "there is no way back to uid 0"),
    ("take a group", {"EPERM"}, "nor into a group"),
    ("setuid program", {"nothing"}, "a setuid program runs as whoever starts it"),
    ("core files", {"nothing"}, "a core could hold placeholders and data"),
    ("see host processes", {"nothing"}, "the process table is its own"),
    ("signal a host process", {"ESRCH"}, "host processes do not exist for it"),
    *[
        (f"look into the first process: {name}", {"EACCES", "EPERM"}, "the launcher's remains are closed")
        for name in ("mem", "environ", "root", "cwd", "fd", "maps")
    ],
    ("namespaces of the host", {"nothing"}, "network, mount, PID, IPC and UTS namespaces are its own"),
    ("inherited descriptors", {"nothing"}, "a descriptor of the caller would be a way to his files"),
    ("environment", {"nothing"}, "keys in the caller's variables stay outside"),
    ("old root", {"nothing"}, "the old root is gone"),
    ("sysfs and host folders", {"nothing"}, "no sysfs, no /var/lib, no runtime folders"),
    *[
        (f"write to {path}", {"EROFS", "EACCES", "EPERM"}, "the system is read-only")
        for path in ("/usr/bin/x", "/etc/passwd", "/usr/lib/x", "/dev/x")
    ],
    ("devices", {"nothing"}, "only the harmless devices"),
]  # fmt: skip


@pytest.mark.parametrize(("attempt", "refusals", "sentence"), ROWS, ids=[row[0] for row in ROWS])
def test_a_way_out_is_closed(attempts: dict[str, str], attempt: str, refusals: set[str], sentence: str) -> None:
    """The workload tried it and was refused in the way that the boundary says."""
    assert attempts[attempt] in refusals, sentence


def test_no_file_of_the_host_is_in_view(attempts: dict[str, str]) -> None:
    """Keys, settings, policy, state, log and sockets: each path leads nowhere (T: RULINGS 6.1)."""
    found = {name: result for name, result in attempts.items() if name.startswith("read ")}
    assert len(found) == 18
    assert {name: result for name, result in found.items() if result not in NOT_THERE} == {}


def test_every_attempt_was_looked_at(attempts: dict[str, str]) -> None:
    """An attempt without a row, or a row without an attempt, is a mistake in this file."""
    tried = {name for name in attempts if not name.startswith("read ")}
    assert tried == {row[0] for row in ROWS}
    assert not [name for name, result in attempts.items() if result.startswith("OPEN")]


def test_the_folder_of_the_keys_cannot_be_asked_for(host: Host) -> None:
    """`--ro ~/.ssh` and the settings are refused with exit 2 and a sentence; nothing is started."""
    for path in (host.home / ".ssh", host.gateway.config):
        answer = host.run("/bin/echo", "started", options=["--ro", str(path)])
        assert answer.code == 2
        assert "started" not in answer.out
        assert str(path) in answer.err


def test_a_start_from_the_home_does_not_show_the_home(host: Host) -> None:
    """Started in the home folder, the command finds an empty one and is told so."""
    answer = host.run("/bin/sh", "-c", "pwd; ls -A", cwd=host.home)
    assert answer.out.split() == ["/home/sandbox"]
    assert "is not shown inside" in answer.err


# --- life ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["/bin/true"], 0),
        (["/bin/sh", "-c", "exit 7"], 7),
        (["/no/such/program"], 127),
        (["/etc/passwd"], 126),
        (["/bin/sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
        (["/bin/sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL),
    ],
    ids=str,
)
def test_the_exit_code_is_the_commands(host: Host, argv: list[str], code: int) -> None:
    """0, its own, 127 for not found, 126 for not executable, 128 + n for signal n: as a shell passes them on."""
    answer = host.run(*argv)
    assert answer.code == code, answer.err
    if code in (126, 127):
        assert f"cannot start '{argv[0]}'" in answer.err


def running(marker: str) -> list[int]:
    """The processes of this machine with `marker` in their command line, but not the command that started them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and marker in (entry / "cmdline").read_text(errors="replace").split("\0"):
                found.append(int(entry.name))
    return found


SLEEPER = 'trap "exit 9" INT; trap "exit 8" TERM; echo up; sleep 600 & wait'


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 9), (signal.SIGTERM, 8)], ids=["ctrl-c", "sigterm"])
def test_signals_reach_the_command(host: Host, number: int, code: int) -> None:
    """Ctrl-C goes to the whole terminal group, SIGTERM to `exeat run` alone; the command decides what it does."""
    with host.started("/bin/sh", "-c", SLEEPER) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(60) == code


def test_what_the_command_left_behind_ends_with_it(host: Host) -> None:
    """A child that made a session of its own and was orphaned does not outlive the command."""
    marker = f"marker-{uuid.uuid4().hex}"
    script = f"(setsid sh -c 'sleep 600; :' {marker} </dev/null >/dev/null 2>&1 &) ; echo done"
    answer = host.run("/bin/sh", "-c", script)
    assert answer.out == "done\n"
    until(lambda: not running(marker), what="the orphan ended")


@pytest.mark.parametrize("victim", ["exeat run", "launcher", "first process"])
def test_nothing_outlives_what_answers_for_it(host: Host, victim: str) -> None:
    """Whoever dies above the workload, by SIGKILL and so without a word: the workload dies, and the sandbox ends."""
    marker = f"marker-{uuid.uuid4().hex}"
    with host.started("/bin/sh", "-c", "echo up; sleep 600; :", marker) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        # For a moment the child that becomes `sleep` still has its parent's command line.
        (workload,) = until(lambda: found if len(found := set(running(marker)) - {process.pid}) == 1 else None)
        first = _parent(workload)
        launcher = _parent(first)
        assert _parent(launcher) == process.pid
        os.kill({"exeat run": process.pid, "launcher": launcher, "first process": first}[victim], signal.SIGKILL)
        until(lambda: not running(marker), what="the workload died")
        process.wait(60)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_sandbox_ends_with_its_command(host: Host) -> None:
    """After every run above, no live sandbox is left, and each end is on record."""
    assert host.run("/bin/true").code == 0
    for record in host.gateway.awaited(event="sandbox.created"):
        host.gateway.awaited(event="sandbox.ended", sandbox=record["sandbox"])


def test_a_gateway_of_its_own_leaves_nothing(host: Host) -> None:
    """Without a running gateway `exeat run` starts one for the command and takes it down: no process, no socket."""
    with tempfile.TemporaryDirectory(prefix="exeat-", dir=host.folder) as name:
        folder = Path(name)
        prefix = host.prefix
        alone = TestGateway(folder / "g", policy=POLICY, prefix=prefix)
        (alone.home / "project").mkdir()
        folder.chmod(0o755)
        if host.who == "user":
            ordinary.give(folder)
        other = Host(who=host.who, folder=folder, gateway=alone)
        answer = other.run("/bin/sh", "-c", "exit 5")
        assert answer.code == 5, answer.err
        assert "a gateway of its own" in answer.err
        assert not list(alone.run_folder.glob("control.sock"))
        assert not _processes_with(str(alone.config))
        assert alone.awaited(event="sandbox.ended")


def _processes_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                line = (entry / "cmdline").read_text(errors="replace")
                if text in line:
                    found.append(line)
    return found
