"""A namespace as `exeat run` makes it, held before its program starts, and somebody who plays its worker."""

from __future__ import annotations

import contextlib
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from exeat.boundary import _CAPTURING, PROXY_PORT, capture_plan, find_capture_tools
from exeat.launch import Confined, Plan, launch, system_view
from exeat.proving import Namespaces
from proxy.stubdns import StubNames, answerer
from wire.probe import NONCE_BYTES, proof

KEY = b"k" * 32
NSENTER = shutil.which("nsenter") or "/usr/bin/nsenter"


@dataclass
class Made:
    """The namespaces, and commands inside their network as root."""

    confined: Confined
    namespaces: Namespaces

    def inside(self, *argv: str) -> None:
        """Run a command of the host in the network namespace, with root's rights in it."""
        subprocess.run([NSENTER, f"--net=/proc/{self.confined.process.pid}/ns/net", *argv], check=True, timeout=60)


@contextlib.contextmanager
def made(*, captured: bool = True, key: bytes = KEY, answers: bytes = KEY) -> Iterator[Made]:
    """Namespaces with a worker that proves `answers`; `key` is what the prover expects."""
    tools = find_capture_tools() if captured else None
    plan = Plan(
        argv=("/bin/sleep", "120"),
        env={},
        view=tuple(system_view()),
        cwd="/",
        uid=65534,
        gid=65534,
        hostname="sandbox",
        network=True,
        listeners=(("proxy", "127.0.0.1", PROXY_PORT), *(_CAPTURING if tools else ())),
        capture=None if tools is None else capture_plan(tools),
        hold=True,
    )
    confined = launch(plan)
    worker = Worker(plan, confined, answers)
    worker.start()
    try:
        assert confined.namespaces is not None
        net, user = confined.namespaces
        yield Made(confined, Namespaces(net=net, user=user, tools=tools, channel_key=key))
    finally:
        worker.stop()
        confined.close()
        confined.process.kill()
        confined.process.wait()
        for listener in confined.listeners:
            listener.close()


class Worker(threading.Thread):
    """Answers on the listeners as proxy/probed.py and the stub resolver do."""

    def __init__(self, plan: Plan, confined: Confined, key: bytes) -> None:
        super().__init__(daemon=True)
        self._key = key
        self._ended = threading.Event()
        names = StubNames()
        names.admit("box")
        self._stub = answerer(names, "box", time.monotonic, lambda _: True)
        self._selector = selectors.DefaultSelector()
        for (use, _, _), listener in zip(plan.listeners, confined.listeners, strict=True):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, use)

    def run(self) -> None:
        while not self._ended.is_set():
            for found, _ in self._selector.select(0.1):
                listener, use = found.fileobj, found.data
                assert isinstance(listener, socket.socket)
                with contextlib.suppress(OSError):
                    if use == "dns-udp":
                        query, peer = listener.recvfrom(512)
                        listener.sendto(self._stub(query) or b"", peer)
                    else:
                        stream, _ = listener.accept()
                        with stream:
                            stream.settimeout(60)
                            stream.sendall(proof(self._key, stream.recv(NONCE_BYTES)))

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self._selector.close()


def with_key(namespaces: Namespaces, key: bytes) -> Namespaces:
    """The same place, where another channel key is expected."""
    return replace(namespaces, channel_key=key)
