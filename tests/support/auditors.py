"""Starts a real auditor as a process of its own, with links to it and, where a test wants it, a scripted fault."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from audit.link import AuditorLink

ROOT = Path(__file__).resolve().parents[2]
DIGEST_KEY = bytes(range(32))

_LAUNCH = """
import errno, json, os, signal, sys
sys.path.insert(0, {root!r})
from audit.auditor import main
from audit.segments import Faults

class Scripted(Faults):
    def __init__(self, script):
        self.script, self.seen = script, {{}}
    def due(self, step):
        nth = self.seen.get(step, 0)
        due = (f for f in self.script if f["step"] == step and f["nth"] <= nth < f["nth"] + f.get("times", 1))
        return next(due, None)
    def cut(self, step, data):
        fault = self.due(step)
        return data[: fault.get("keep", len(data))] if fault else data
    def hit(self, step):
        fault = self.due(step)
        self.seen[step] = self.seen.get(step, 0) + 1
        if fault is None:
            return
        if fault["do"] == "kill":
            os.kill(os.getpid(), 9)
        raise OSError(getattr(errno, fault["do"]), os.strerror(getattr(errno, fault["do"])))

raise SystemExit(main([sys.argv[1]], faults=Scripted(json.loads(sys.argv[2]))))
"""


class RunningAuditor:
    """One auditor process. `links` are Journals over its channels, in the order of `channels`."""

    def __init__(
        self,
        directory: Path,
        *,
        channels: tuple[tuple[str, str], ...] = (("worker-1", "worker"),),
        faults: list[dict[str, Any]] | None = None,
        deadline_s: float = 10.0,
        **boot: Any,
    ) -> None:
        self.directory = directory
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in channels]
        theirs = [pair[1].fileno() for pair in self._pairs]
        message = {
            "node": "node-1",
            "log_directory": str(directory),
            "digest_key": DIGEST_KEY.hex(),
            "channels": [
                {"fd": fd, "process": process, "kind": kind}
                for fd, (process, kind) in zip(theirs, channels, strict=True)
            ],
            **boot,
        }
        read, write = os.pipe()
        inherited = [read, *theirs]
        if "control_fd" in boot:
            inherited.append(boot["control_fd"])
        if faults is None:
            command = [sys.executable, "-I", "-m", "audit.auditor", str(read)]
        else:
            command = [sys.executable, "-I", "-c", _LAUNCH.format(root=str(ROOT)), str(read), json.dumps(faults)]
        self.process = subprocess.Popen(
            command, pass_fds=inherited, cwd="/", env={}, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        os.close(read)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps(message).encode())
        for pair in self._pairs:
            pair[1].close()
        self.sockets = [pair[0] for pair in self._pairs]
        self.links = [
            AuditorLink(sock, process, DIGEST_KEY, deadline_s=deadline_s)
            for sock, (process, _kind) in zip(self.sockets, channels, strict=True)
        ]

    async def stop(self) -> tuple[int, str]:
        """SIGTERM, close the links, wait; returns exit code and stderr."""
        self.process.send_signal(signal.SIGTERM)
        for link in self.links:
            await link.close()
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait for the end; returns exit code and stderr."""
        _out, err = self.process.communicate(timeout=60)
        return self.process.returncode, err.decode()

    def lines(self) -> list[bytes]:
        """All complete lines of all segments, in order of files."""
        found: list[bytes] = []
        for path in sorted(self.directory.glob("exeat-*.jsonl")):
            found += path.read_bytes().split(b"\n")[:-1]
        return found

    def records(self) -> list[dict[str, Any]]:
        """The same as JSON."""
        return [json.loads(line) for line in self.lines()]

    async def __aenter__(self) -> RunningAuditor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self.links:
            await link.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
