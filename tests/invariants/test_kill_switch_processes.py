"""Any process of ours that hangs or dies shuts the way out: a refusal in time, and not a byte to the origin (I09).

Hanging is SIGSTOP. Dying is SIGKILL while the supervisor is stopped too, because it would repair what is looked at;
let go, it does, and then everything works again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.entries import read_answer, read_head, tls_through
from tests.support.gateway import Box, Completed, TestGateway
from tests.support.leaks import command_line, descendants
from tests.support.origins import Exchange, Origin
from tests.support.scripts import READ, script, text
from tests.support.signals import Gate
from tests.support.waiting import until

pytestmark = [pytest.mark.xdist_group("kill_switch"), pytest.mark.slow]

DEADLINE = 25.0
"""The longest that a client waits for any refusal here: the lane's own 20 s for a broker's verdict, with room."""
MODULES = {
    "vault": b"-m broker.vault ",
    "executor": b"-m broker.executor_process ",
    "auditor": b"-m audit.auditor ",
    "worker": b"-m proxy.worker ",
}
REFUSED = {503, 502, 403}

CREDENTIALS = """
version: 1
credentials:
  held: {kind: bearer, secret: "store:held", hosts: [held.test], owner: tests,
         placeholder: {env: HELD_KEY, shape: "sk_{24}"}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: plain, host: plain.test, methods: [GET], paths: ["/**"]}
      - {name: held, host: held.test, methods: [GET], paths: ["/**"], credential: held}
      - {name: opaque, host: opaque.test, tunnel: true, port: %d, reason: "a test"}
"""


class Scene:
    def __init__(self, gateway: TestGateway, origin: Origin, opaque: Origin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.opaque = opaque
        self.box: Box = gateway.sandbox()

    def port(self, host: str) -> int:
        return self.opaque.port if host == "opaque.test" else self.origin.port

    def get(self, host: str, path: str = "/x") -> Completed:
        extra = ("--cacert", str(self.gateway.config / "opaque.test.pem")) if host == "opaque.test" else ()
        return self.box.command(
            "curl", "-sS", "-m", "40", "-w", "\n%{http_code}", *extra, f"https://{host}:{self.port(host)}{path}"
        )

    def works(self, host: str) -> bool:
        return status(self.get(host)) == 200

    @property
    def reached(self) -> tuple[int, int]:
        """(requests, application bytes) that any origin has seen."""
        both = (self.origin, self.opaque)
        return sum(len(origin.received) for origin in both), sum(origin.bytes_in for origin in both)

    def running(self, kind: str) -> list[int]:
        """The pids of all processes of `kind`; none while they are being started again."""
        assert self.gateway.process is not None
        lines = {pid: command_line(pid) for pid in descendants(self.gateway.process.pid)}
        return [pid for pid, line in lines.items() if MODULES[kind] in line and b"python" in line.split(b" ")[0]]

    def processes(self, kind: str) -> list[int]:
        found = self.running(kind)
        assert found, kind
        return found

    @contextlib.contextmanager
    def stopped(self, pids: list[int]) -> Iterator[None]:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def status(answer: Completed) -> int:
    return int(answer.out.rpartition("\n")[2] or 0)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    opaque = Origin("opaque.test", address="127.0.0.42", handler=script(READ, text("done")))
    with (
        Origin(
            "plain.test", "held.test", address="127.0.0.41", handler=script(READ, text("done"))
        ).run_in_thread() as origin,
        opaque.run_in_thread(),
        TestGateway(
            tmp_path_factory.mktemp("kill"),
            policy=POLICY % opaque.port,
            credentials=CREDENTIALS,
            secrets={"held": "kx7-Real-55aa0192ccdd71"},
            origins=[origin, opaque],
        ) as gateway,
    ):
        yield Scene(gateway, origin, opaque)


@pytest.fixture(autouse=True)
def _sound(scene: Scene) -> Iterator[None]:
    """Each test begins and ends with a gateway that works, begun anew: after five restarts in a minute it gives up."""
    scene.gateway.stop()
    scene.gateway.start()
    until(lambda: scene.works("plain.test") and scene.works("held.test"), what="a working gateway")
    yield
    until(lambda: scene.works("plain.test") and scene.works("held.test"), what="a working gateway again")


def assert_refused(scene: Scene, host: str, reasons: tuple[str, ...]) -> None:
    """One request: a refusal with one of these reasons within the deadline, and the origin saw nothing of it."""
    before = scene.reached
    began = time.monotonic()
    answer = scene.get(host)
    assert time.monotonic() - began < DEADLINE
    assert status(answer) in REFUSED or answer.code != 0, answer
    assert any(reason in answer.out + answer.err for reason in reasons), answer
    assert scene.reached == before


# --- hanging ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "host", "reasons"),
    [
        # Executor and worker both cut what waits for a silent vault: whichever is first says so, or resets.
        ("vault", "held.test", ("-unavailable", "policy-changing", "reset", "SSL_read", "closed")),
        ("executor", "held.test", ("broker-unavailable",)),
        ("auditor", "held.test", ("audit-unavailable", "broker-unavailable")),
        ("auditor", "plain.test", ("audit-unavailable",)),
        ("auditor", "opaque.test", ("error", "closed", "EOF", "reset")),
    ],
)
def test_a_process_that_hangs_refuses_at_once(scene: Scene, kind: str, host: str, reasons: tuple[str, ...]) -> None:
    """The very first request after the process stopped answering is refused; afterwards everything works again."""
    with scene.stopped(scene.processes(kind)):
        assert_refused(scene, host, reasons)


@pytest.mark.parametrize("host", ["plain.test", "held.test", "opaque.test"])
def test_a_silent_vault_shuts_plain_traffic_within_its_age_bound(scene: Scene, host: str) -> None:
    """Without a heartbeat nothing is permitted: requests of both kinds and tunnels are refused (9.5)."""
    with scene.stopped(scene.processes("vault")):
        seen: list[str] = []

        def refused() -> bool:
            answer = scene.get("plain.test")
            seen.append(answer.out + answer.err)
            return status(answer) == 503 or "response 503" in answer.err  # told inside the tunnel, or at CONNECT

        assert until(refused, DEADLINE, "the end of the snapshot's age"), seen
        assert_refused(scene, host, ("policy-unavailable", "503"))


def test_an_open_connection_is_cut_when_the_vault_falls_silent(scene: Scene) -> None:
    """What was under way when the vault stopped is aborted on both sides, not left to run on an old policy."""
    gate = Gate()

    async def slow(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(b"first")
        await gate.passage()
        await exchange.end()

    scene.origin.on("/slow", slow)
    with _connect(scene, "plain.test") as connection, scene.stopped(scene.processes("vault")):
        connection.sendall(f"GET /slow HTTP/1.1\r\nHost: plain.test:{scene.origin.port}\r\n\r\n".encode())
        read_head(connection)
        rest = b""
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                rest += piece
        assert not rest.endswith(b"0\r\n\r\n")
    gate.open()


def test_an_executor_that_hangs_leaves_plain_traffic_alone(scene: Scene) -> None:
    """Only what needs the broker is refused."""
    with scene.stopped(scene.processes("executor")):
        assert scene.works("plain.test")


# --- dying --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("vault", ("held.test", "plain.test", "opaque.test")),
        ("executor", ("held.test",)),
        ("auditor", ("plain.test", "held.test", "opaque.test")),
    ],
)
def test_a_process_that_dies_refuses_until_all_are_started_again(
    scene: Scene, kind: str, hosts: tuple[str, ...]
) -> None:
    """After SIGKILL the others refuse by themselves; the supervisor then starts the whole set again."""
    assert scene.gateway.process is not None
    before = set(scene.processes("worker"))
    with scene.stopped([scene.gateway.process.pid]):
        for pid in scene.processes(kind):
            os.kill(pid, signal.SIGKILL)
        for host in hosts:
            assert_refused(scene, host, ("unavailable", "503", "closed", "EOF", "reset", "error"))
    until(lambda: set(scene.running("worker")) - before, what="a new set of processes")


def test_a_worker_that_dies_takes_its_connections_with_it(scene: Scene) -> None:
    """Client and origin both see the end; nothing answers in its place until a new worker is there."""
    assert scene.gateway.process is not None
    with _connect(scene, "plain.test") as connection:
        host = f"plain.test:{scene.origin.port}"
        connection.sendall(f"GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert read_answer(connection)[0].startswith(b"HTTP/1.1 200")
        for pid in scene.processes("worker"):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            assert connection.recv(1) == b""
    scene.origin.wait_until(lambda: all(item.closed for item in scene.origin.connections if item.sni == "plain.test"))


class _Token:
    """The least of an entry that tls_through needs."""

    def __init__(self, scene: Scene) -> None:
        self.connect = scene.box.connect
        self.authorization = f"Proxy-Authorization: Bearer {scene.box.token}\r\n".encode()
        self.environment = scene.box.environment
        self.command = scene.box.command


def _connect(scene: Scene, host: str):
    return tls_through(_Token(scene), f"{host}:{scene.port(host)}")
