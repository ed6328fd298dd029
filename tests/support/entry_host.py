"""The entry point `gateway`: a machine behind a captured interface of the host, with no other neighbour.

The machine is a network namespace with one veth (tests/support/machines.py). Prerouting redirects bring what it sends
to the gateway, and the interface says who it is: no token, no variable, root inside.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.entries import INSIDE, PYTHON, Inside
from tests.support.entry_gateway import Captured
from tests.support.gateway import TestGateway
from tests.support.ground import Ground
from tests.support.machines import capture, machine


class OnHost(Captured):
    """As `captured`, by the host's own rules."""

    def _enter(self, ground: Ground) -> Inside:
        return ground.enter(behind(ground.gateway))


@contextlib.contextmanager
def behind(gateway: TestGateway) -> Iterator[Inside]:
    """A sandbox behind an interface of its own; this thread's network must be the test's (machines.own_network)."""
    with machine(1) as made, tempfile.TemporaryDirectory(prefix="exeat-") as folder:
        created = capture(gateway, made)
        argv = ["ip", "netns", "exec", made.name, PYTHON, "-I", str(INSIDE), folder]
        environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"inside\n"
            given = {str(name): str(value) for name, value in created["env"].items()}
            try:
                yield Inside(Path(folder), given, name="gateway", id=str(created["id"]))
            finally:
                process.kill()
                Path("/run/exeat-capture.lock").unlink(missing_ok=True)
