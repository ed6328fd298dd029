"""Stand-ins for microVMs: network namespaces with a veth each, beside a host that is a namespace as well.

    with own_network(), machine(1) as made:      # from here on this thread's network is nobody else's
        capture(gateway, made)                   # rules, interfaces, sandbox; `made.connect_link()` for one without
        made.run("curl", ...)                    # as root there, without any variable of ours

Root's. What is in one is root there; no rule and no interface of the real host is touched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from exeat.boundary import find_capture_tools
from exeat.cli import app
from tests.support.gateway import Completed, TestGateway, completed


def can_capture() -> bool:
    """Whether interfaces and rules of a host can be made here."""
    return os.geteuid() == 0 and find_capture_tools() is not None


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr)


@dataclass(frozen=True)
class Machine:
    """A stand-in for a microVM: namespace, the host's interface towards it, the addresses of both ends."""

    name: str
    link: str
    host4: str
    own4: str
    host6: str
    own6: str

    @property
    def option(self) -> str:
        return f"{self.link}={self.host4}/30,{self.host6}/126"

    def run(self, *argv: str, seconds: float = 60) -> Completed:
        """Run a program in it, as root, without any of our variables."""
        command = ["ip", "netns", "exec", self.name, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *argv]
        return completed(subprocess.run(command, capture_output=True, timeout=seconds, check=False))

    def python(self, program: str) -> str:
        """The output of a Python program in it."""
        done = self.run("/usr/bin/python3", "-c", program)
        assert done.code == 0, done
        return done.out

    def connect_link(self) -> None:
        """Make the pair of interfaces, with addresses and default routes inside."""
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("addr", "add", f"{self.host4}/30", "dev", self.link)
        ip("-6", "addr", "add", f"{self.host6}/126", "dev", self.link, "nodad")
        ip("link", "set", self.link, "up")
        inside = ("-n", self.name)
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "addr", "add", f"{self.own4}/30", "dev", "eth0")
        ip(*inside, "-6", "addr", "add", f"{self.own6}/126", "dev", "eth0", "nodad")
        ip(*inside, "link", "set", "eth0", "up")
        ip(*inside, "route", "add", "default", "via", self.host4)
        ip(*inside, "-6", "route", "add", "default", "via", self.host6)


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """This thread, and every process and thread that it starts, in a network namespace of its own."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.unshare(os.CLONE_NEWNET)
        ip("link", "set", "lo", "up")
        yield
    finally:
        os.setns(before, os.CLONE_NEWNET)
        os.close(before)


@contextlib.contextmanager
def machine(number: int) -> Iterator[Machine]:
    name = f"exq{os.getpid()}-{number}"
    low = 4 * number
    made = Machine(
        name=name,
        link=f"exq{number}",
        host4=f"198.19.1.{low + 1}",
        own4=f"198.19.1.{low + 2}",
        host6=f"fd65:7865:{number}::1",
        own6=f"fd65:7865:{number}::2",
    )
    resolver = Path("/etc/netns") / name
    ip("netns", "add", name)
    try:
        make_folder(resolver)
        (resolver / "resolv.conf").write_text("nameserver 192.0.2.53\noptions timeout:3 attempts:1\n")
        yield made
    finally:
        ip("netns", "del", name)
        (resolver / "resolv.conf").unlink(missing_ok=True)
        resolver.rmdir()
        with contextlib.suppress(OSError):  # another test run has machines too, or the folder is the system's
            resolver.parent.rmdir()


def make_folder(path: Path) -> None:
    """Make `path` and the folder above it, which another test run may take away in between."""
    for _ in range(20):
        with contextlib.suppress(FileNotFoundError):
            path.mkdir(parents=True)
            return
    raise FileNotFoundError(path)


def capture(gateway: TestGateway, made: Machine) -> dict[str, Any]:
    """Rules first, then the interface, then the sandbox: the order that the documentation gives."""
    applied = kernel("apply", "--interface", made.option)
    assert applied.code == 0, applied
    made.connect_link()
    created = create(gateway, made.link)
    assert created.code == 0, created
    return dict(created.json())


def exeat(*arguments: str) -> Completed:
    """One command, in this process: it is in the right namespace, and starts in no time."""
    done = CliRunner().invoke(app, list(arguments))
    return Completed(code=done.exit_code, out=done.stdout, err=done.stderr)


def kernel(*arguments: str) -> Completed:
    """`exeat capture`, which needs no gateway."""
    return exeat("capture", *arguments)


def create(gateway: TestGateway, link: str) -> Completed:
    """`exeat sandbox create --capture LINK`."""
    return exeat("sandbox", "create", "--config", str(gateway.settings_file), "--capture", link, "-o", "json")
