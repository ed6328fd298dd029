"""Policy changes under live connections: a tightening reaches what is open, and no reload ever opens anything."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from broker.admin.client import AdminError
from tests.support.entries import ENTRIES, Entry, connect_through, entry_of, read_answer, read_head, tls_through
from tests.support.gateway import TestGateway
from tests.support.origins import Exchange, Origin
from tests.support.scripts import READ, script, text
from tests.support.signals import Gate
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("reload")

SECRET = "rl4-Real-7720acbe91d5f0"
CREDENTIALS = """
version: 1
credentials:
  held: {kind: bearer, secret: "store:held", hosts: [held.test], owner: tests,
         placeholder: {env: HELD_KEY, shape: "sk_{24}"}}
"""
STAYS = """
roles:
  agent:
    allow:
      - {name: stays, host: stays.test, methods: [GET], paths: ["/**"]}
"""
OPEN = (
    STAYS
    + """
      - {name: live, host: live.test, methods: [GET], paths: ["/**"]}
      - {name: held, host: held.test, methods: [GET], paths: ["/**"], credential: held}
      - {name: opaque, host: opaque.test, tunnel: true, reason: "a test", port: %d}
"""
)
NAMES = ("stays.test", "live.test", "held.test")


class Scene:
    def __init__(self, gateway: TestGateway, origin: Origin, opaque: Origin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.opaque = opaque
        self.open = OPEN % opaque.port

    def authority(self, host: str) -> str:
        return f"{host}:{self.opaque.port if host == 'opaque.test' else self.origin.port}"

    def allow(self, policy: str, credentials: str = CREDENTIALS) -> None:
        """Put a policy in force; returns when every process has it and has cut what it ends."""
        (self.gateway.config / "credentials.yaml").write_text(credentials)
        self.gateway.write_policy(policy)
        answer = self.gateway.reload()
        assert not answer.get("unacknowledged"), answer


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    opaque = Origin("opaque.test", address="127.0.0.35", handler=script(READ, text("opaque")))
    with (
        Origin(*NAMES, address="127.0.0.34", handler=script(READ, text("live"))).run_in_thread() as origin,
        opaque.run_in_thread(),
        TestGateway(
            tmp_path_factory.mktemp("reload"),
            policy=OPEN % opaque.port,
            credentials=CREDENTIALS,
            secrets={"held": SECRET},
            origins=[origin, opaque],
        ) as gateway,
    ):
        yield Scene(gateway, origin, opaque)


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest, scene: Scene) -> Iterator[Entry]:
    scene.allow(scene.open)
    with entry_of(request.param, scene.gateway) as found:
        yield found
    scene.allow(scene.open)


# --- T28: tightened under a live connection ----------------------------------------------------------------------


@dataclass
class Caller:
    """Sends request after request on one kept-alive connection until it is refused or closed for good."""

    connection: ssl.SSLSocket
    authority: str
    answers: list[tuple[float, float, int]] = field(default_factory=list)
    """(sent at, answered at, status); 0 for a connection that ended."""

    def run(self) -> None:
        status = 200
        while status in (200, 503):  # 503 policy-changing: the broker has the new policy before the proxy
            sent = time.monotonic()
            try:
                self.connection.sendall(f"GET /x HTTP/1.1\r\nHost: {self.authority}\r\n\r\n".encode())
                head, _ = read_answer(self.connection)
                status = int(head.split(b" ")[1]) if head else 0
            except OSError:
                status = 0
            self.answers.append((sent, time.monotonic(), status))


@pytest.mark.parametrize("host", ["live.test", "held.test"], ids=["plain", "credentialed"])
def test_a_host_taken_from_the_policy_stops_on_an_open_connection(scene: Scene, entry: Entry, host: str) -> None:
    """T28: of a stream of requests on one connection none that is sent after the reload returned succeeds."""
    caller = Caller(tls_through(entry, scene.authority(host)), scene.authority(host))
    thread = threading.Thread(target=caller.run, daemon=True)
    thread.start()
    until(lambda: len(caller.answers) >= 5, what="five answers")
    scene.allow(STAYS, "version: 1\ncredentials: {}\n")
    returned = time.monotonic()
    thread.join(60)
    assert not thread.is_alive()
    assert {status for sent, _, status in caller.answers if sent > returned} <= {403, 0}
    assert sum(1 for _, at, status in caller.answers if at > returned and status == 200) <= 1
    assert caller.answers[-1][2] in (403, 0)
    caller.connection.close()


@pytest.mark.parametrize("host", ["live.test", "held.test", "opaque.test"], ids=["inspected", "credentialed", "opaque"])
def test_an_open_tunnel_to_a_removed_host_is_closed(scene: Scene, entry: Entry, host: str) -> None:
    """T28: an idle CONNECT, read by us or not, ends within two seconds of the reload; the origin's side too."""
    opened = tls_through(entry, scene.authority(host)) if host != "opaque.test" else _opaque(scene, entry)
    with opened as connection:
        connection.sendall(f"GET /x HTTP/1.1\r\nHost: {scene.authority(host)}\r\n\r\n".encode())
        head, _ = read_answer(connection)
        assert head.startswith(b"HTTP/1.1 200"), head
        connection.settimeout(60)
        began = time.monotonic()
        scene.allow(STAYS, "version: 1\ncredentials: {}\n")
        returned = time.monotonic()
        assert _ended(connection)
        # The command returns only after every process reported it closed, so two seconds is generous.
        assert time.monotonic() - returned < 2
        assert returned - began < 5
    origin = scene.opaque if host == "opaque.test" else scene.origin
    origin.wait_until(lambda: all(item.closed for item in origin.connections if item.sni == host))


@pytest.mark.parametrize("host", ["live.test", "held.test"], ids=["plain", "credentialed"])
def test_an_answer_in_progress_is_cut_with_its_host(scene: Scene, entry: Entry, host: str) -> None:
    """T28: a download that is under way when its host is removed ends as an aborted message, not as a whole one."""
    gate = Gate()

    async def slow(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.chunk(b"first")
        await gate.passage()
        await exchange.chunk(b"second")
        await exchange.end()

    scene.origin.on("/slow", slow)
    rest = b""
    with tls_through(entry, scene.authority(host)) as connection:
        connection.sendall(f"GET /slow HTTP/1.1\r\nHost: {scene.authority(host)}\r\n\r\n".encode())
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        gate.wait_arrived()
        scene.allow(STAYS, "version: 1\ncredentials: {}\n")
        gate.open()
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                rest += piece
    assert b"second" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    name = "request.outcome" if host == "live.test" else "broker.outcome"
    (outcome,) = scene.gateway.awaited(event=name, sandbox=entry.id, path="/slow")
    assert outcome["error"]
    assert outcome["completed"] is False


def test_a_host_that_stays_keeps_its_connection(scene: Scene, entry: Entry) -> None:
    """T28: what the new policy still permits goes on, on the same connection."""
    connection = tls_through(entry, scene.authority("stays.test"))
    for policy in (STAYS, scene.open):
        connection.sendall(f"GET /x HTTP/1.1\r\nHost: {scene.authority('stays.test')}\r\n\r\n".encode())
        assert read_answer(connection)[0].startswith(b"HTTP/1.1 200")
        scene.allow(policy, CREDENTIALS if policy is scene.open else "version: 1\ncredentials: {}\n")
    connection.sendall(f"GET /x HTTP/1.1\r\nHost: {scene.authority('stays.test')}\r\n\r\n".encode())
    assert read_answer(connection)[0].startswith(b"HTTP/1.1 200")
    connection.close()


def _opaque(scene: Scene, entry: Entry) -> ssl.SSLSocket:
    """TLS straight to the origin through an uninspected tunnel."""
    context = ssl.create_default_context(cadata=scene.opaque.ca_pem)
    connection = connect_through(entry, scene.authority("opaque.test"))
    return context.wrap_socket(connection, server_hostname="opaque.test")


def _ended(connection: ssl.SSLSocket) -> bool:
    try:
        return connection.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


# --- T29: a hundred reloads ---------------------------------------------------------------------------------------


class Prober(threading.Thread):
    """Asks for a denied host over and over, each time on a new connection, by CONNECT and by absolute form in turn."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(daemon=True)
        self.entry = entry
        self.stop = threading.Event()
        self.statuses: list[int] = []
        self.faults: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            line = b"CONNECT denied.test:8443" if len(self.statuses) % 2 else b"GET http://denied.test/x"
            host = b"denied.test:8443" if len(self.statuses) % 2 else b"denied.test"
            try:
                with self.entry.connect() as connection:
                    connection.sendall(
                        line + b" HTTP/1.1\r\nHost: " + host + b"\r\n" + self.entry.authorization + b"\r\n"
                    )
                    head = read_head(connection)
            except OSError as error:
                self.faults.append(repr(error))
                continue
            self.statuses.append(int(head.split(b" ")[1]) if head else 0)


def test_reloads_never_open_the_gate(scene: Scene, entry: Entry) -> None:
    """T29: during a hundred reloads, every tenth of them invalid, no probe of a denied host gets through.

    An invalid file is reported with its line, the last good policy stays in force, and `exeat status` shows it.
    """
    prober = Prober(entry)
    prober.start()
    until(lambda: prober.statuses, what="a first probe")
    good = ""
    for number in range(1, 101):
        if number % 10 == 0:
            scene.gateway.write_policy("roles:\n  agent:\n    allow:\n      - {hosst: denied.test}\n")
            with pytest.raises(AdminError) as refused:
                scene.gateway.reload()
            assert any("policy.yaml:" in str(line) for line in refused.value.body["problems"])
            status = scene.gateway.admin.status()
            assert status["policy"]["digest"] == good
            assert status["policy"]["rejected"]["problems"]
        else:
            comment = f"# unrelated edit {number}\n"
            extra = f"\n      - {{name: edit, host: stays.test, methods: [GET], paths: [/edit/{number}]}}\n"
            scene.gateway.write_policy(comment + scene.open + extra)
            answer = scene.gateway.reload()
            assert not answer.get("unacknowledged")
            good = str(answer["digest"])
    until(lambda: len(prober.statuses) >= 100, what="a hundred probes")
    prober.stop.set()
    prober.join(60)
    # 403 by policy; a connection closed without an answer, or an error of ours, is no way through either.
    assert set(prober.statuses) <= {403, 503, 0}, set(prober.statuses)
    assert prober.statuses.count(403) > len(prober.statuses) // 2
    assert scene.gateway.records(event="request.intent", host="denied.test") == []
    assert len(scene.gateway.awaited(10, event="policy.rejected")) >= 10
    shown = scene.gateway.exeat("status", "--output", "json")
    assert good in shown.out
