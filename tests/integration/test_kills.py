"""Processes that die, signals in mid-stream, and a log that cannot be written: closed, recorded, and back again.

The gateway is one for the module. Each test leaves it running; the supervisor gives up after six restarts within a
minute, so the kills are few and the gateway itself is started anew between some of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import Box, TestGateway
from tests.support.origins import Origin, head
from tests.support.scripts import READ, chunk, script, text
from tests.support.signals import Gate
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("kills")

POLICY = """
roles:
  agent:
    boundary: {external: tests, reason: "a test"}
    allow:
      - {name: plain, host: plain.test, methods: [GET], paths: ["/**"]}
      - {name: held, host: held.test, methods: [GET], paths: ["/**"], credential: held}
"""
CREDENTIALS = """
version: 1
credentials:
  held: {kind: bearer, secret: "store:held", hosts: [held.test], owner: tests,
         placeholder: {env: HELD_KEY, shape: "sk_{32}"}}
"""
SECRET = "canary-2e8f6a0c9b7d4153"
HOSTS = ("plain.test", "held.test")
MODULES = {
    "worker": "proxy.worker",
    "executor": "broker.executor_process",
    "vault": "broker.vault",
    "auditor": "audit.auditor",
}


@pytest.fixture(scope="module")
def origin() -> Iterator[Origin]:
    with Origin(*HOSTS, address="127.0.0.52", handler=script(READ, text("answer"))).run_in_thread() as made:
        yield made


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, origin: Origin) -> Iterator[TestGateway]:
    folder = tmp_path_factory.mktemp("kills")
    folder.chmod(0o755)
    made = TestGateway(folder / "g", policy=POLICY, credentials=CREDENTIALS, secrets={"held": SECRET}, origins=[origin])
    with made:
        yield made


@pytest.fixture(autouse=True)
def _running(gateway: TestGateway) -> None:
    """Each test finds the gateway running, also after one that stopped it."""
    if gateway.process is None:
        gateway.start()


def outcome_of(gateway: TestGateway, path: str) -> dict[str, Any]:
    """The one outcome record of the one request for `path`."""
    (request,) = {
        record["request_id"]
        for event in ("request.intent", "broker.intent")
        for record in gateway.records(event=event)
        if record["path"] == path
    }
    found = [record for event in ("request.outcome", "broker.outcome") for record in gateway.records(event=event)]
    (outcome,) = [record for record in found if record["request_id"] == request]
    return outcome


def processes(gateway: TestGateway) -> dict[str, int]:
    """Our processes of this gateway: kind -> pid, of the program itself where a launcher stands before it."""
    assert gateway.process is not None
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_text().split("\0")
            kind = next((kind for kind, module in MODULES.items() if module in words), None)
            if kind and _descends(int(entry.name), gateway.process.pid):
                found[kind] = int(entry.name)
    return found


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def fetch(box: Box, origin: Origin, host: str, path: str) -> tuple[int, str]:
    """One request by curl: its exit code and `status body`."""
    credential = ["-H", f"Authorization: Bearer {box.placeholders['HELD_KEY']}"] if host == "held.test" else []
    url = f"https://{host}:{origin.port}{path}"
    answer = box.command("curl", "-s", "--max-time", "60", "-w", " %{http_code}", *credential, url)
    return answer.code, answer.out


@dataclass
class Stream:
    """An answer that stands still after its first piece until the gate is opened."""

    box: Box
    origin: Origin
    host: str
    path: str
    gate: Gate = field(default_factory=Gate)
    result: list[tuple[int, str]] = field(default_factory=list)

    def __enter__(self) -> Stream:
        opening = head(200, (("Content-Type", "text/plain"), ("Transfer-Encoding", "chunked")))
        self.origin.on(self.path, script(READ, opening, chunk(b"first "), self.gate, chunk(b"last"), b"0\r\n\r\n"))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.gate.wait_arrived()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open()
        self._thread.join(90)

    def _run(self) -> None:
        self.result.append(fetch(self.box, self.origin, self.host, self.path))

    def end(self) -> tuple[int, str]:
        self._thread.join(90)
        assert self.result, "curl did not end"
        return self.result[0]


def everything_was_written_first(gateway: TestGateway, origin: Origin) -> None:
    """Each request that the origin saw has its intent in the log, whatever died afterwards."""
    intents = {
        record["path"] for event in ("request.intent", "broker.intent") for record in gateway.records(event=event)
    }
    assert {request.path for request in origin.received} <= intents


@pytest.mark.parametrize("victim", list(MODULES))
def test_a_killed_process_closes_everything_and_all_come_back(
    gateway: TestGateway, origin: Origin, victim: str
) -> None:
    """SIGKILL while answers stream: both break off, nothing passes unrecorded, and soon both sandboxes work again."""
    box = gateway.sandbox()
    before = until(lambda: found if len(found := processes(gateway)) == 4 else None)
    with (
        Stream(box, origin, "plain.test", f"/{victim}/plain") as plain,
        Stream(box, origin, "held.test", f"/{victim}/held") as held,
    ):
        os.kill(before[victim], signal.SIGKILL)
        for stream in (plain, held):
            code, shown = stream.end()
            # Refused with a status where nothing had reached the client yet; never something that looks whole.
            assert code != 0 or shown[-3:] in ("502", "503"), shown
            assert "last" not in shown
    after = until(
        lambda: (
            found if len(found := processes(gateway)) == 4 and not set(found.values()) & set(before.values()) else None
        ),
        40,
    )
    assert set(after) == set(MODULES)
    for number, each in enumerate((box, until(lambda: _new_sandbox(gateway)))):
        for host in HOSTS:
            path = f"/{victim}/after/{number}"
            until(lambda each=each, host=host, path=path: fetch(each, origin, host, path) == (0, "answer 200"))
    everything_was_written_first(gateway, origin)
    if victim == "auditor":
        assert gateway.awaited(event="log.recovered")
    else:
        assert gateway.awaited(event="process.lost", program=victim)
    assert SECRET not in gateway.errors()
    assert "restarting all processes" in gateway.errors()
    verified = gateway.exeat("audit", "verify")
    assert verified.code == 0, verified.out + verified.err


def _new_sandbox(gateway: TestGateway) -> Box | None:
    with contextlib.suppress(Exception):
        return gateway.sandbox()
    return None


def test_a_killed_supervisor_takes_everything_down(gateway: TestGateway, origin: Origin) -> None:
    """Without it nothing of ours is left, and nothing passes; a new start finds a log that verifies, and old tokens."""
    box = gateway.sandbox()
    pids = processes(gateway)
    assert gateway.process is not None
    with Stream(box, origin, "plain.test", "/supervisor/plain") as stream:
        gateway.process.kill()
        code, shown = stream.end()
        assert code != 0
        assert "last" not in shown
    gateway.stop()
    until(lambda: not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()], what="our processes ended")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", gateway.port), timeout=2).close()
    gateway.start()
    assert fetch(box, origin, "held.test", "/supervisor/after") == (0, "answer 200")
    everything_was_written_first(gateway, origin)
    assert gateway.exeat("audit", "verify").code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
def test_a_stop_lets_answers_end_and_writes_their_outcomes(
    gateway: TestGateway, origin: Origin, number: signal.Signals
) -> None:
    """The stop drains: a stream that ends in time arrives whole, its outcome is on record, and the exit code is 0."""
    box = gateway.sandbox()
    assert gateway.process is not None
    with (
        Stream(box, origin, "plain.test", f"/drain/{number.name}/plain") as plain,
        Stream(box, origin, "held.test", f"/drain/{number.name}/held") as held,
    ):
        gateway.process.send_signal(number)
        until(lambda: _refused(gateway), what="new connections were refused")
        plain.gate.open()
        held.gate.open()
        assert [stream.end() for stream in (plain, held)] == [(0, "first last 200")] * 2
    assert gateway.process.wait(60) == 0
    gateway.stop()
    for name in ("plain", "held"):
        record = outcome_of(gateway, f"/drain/{number.name}/{name}")
        assert record["status"] == 200
        assert not record.get("error")


def _refused(gateway: TestGateway) -> bool:
    """Whether the proxy takes no new requests: no connection, or an answer that is no success."""
    try:
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=2) as probe:
            probe.settimeout(2)
            probe.sendall(b"CONNECT plain.test:443 HTTP/1.1\r\nHost: plain.test:443\r\n\r\n")
            answer = probe.recv(100)
    except OSError:
        return True
    return b" 503 " in answer or not answer


def test_a_stream_that_does_not_end_is_cut_with_its_outcome(gateway: TestGateway, origin: Origin) -> None:
    """A stop waits a few seconds only; what still streams then breaks off visibly, and its outcome says so."""
    box = gateway.sandbox()
    assert gateway.process is not None
    with Stream(box, origin, "plain.test", "/endless") as stream:
        assert gateway.stop(signal.SIGTERM) == 0
        code, shown = stream.end()
        assert code != 0
        assert "last" not in shown
    assert outcome_of(gateway, "/endless")["error"]
    assert gateway.exeat("audit", "verify").code == 0


def limit_file_size(pid: int, most: str) -> None:
    """Bound the files that `pid` writes; beyond it, writes fail as on a full disk, and as root's they would too.

    Done as the user of that process, because root may lack CAP_SYS_RESOURCE where the tests run.
    """
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    user, group = int(rows["Uid"].split()[0]), int(rows["Gid"].split()[0])
    become = {"user": user, "group": group, "extra_groups": []} if os.geteuid() == 0 else {}
    subprocess.run(["prlimit", f"--pid={pid}", f"--fsize={most}:"], check=True, **become)


def test_a_full_disk_refuses_everything_until_there_is_room(gateway: TestGateway, origin: Origin) -> None:
    """B158: no file of the auditor can grow: 503 audit-unavailable, the origin sees nothing; with room all is well."""
    box = gateway.sandbox()
    for host in HOSTS:  # so that both have their certificate: a new name gets none while minting cannot be recorded
        assert fetch(box, origin, host, "/disk/before") == (0, "answer 200")
    auditor = until(lambda: processes(gateway).get("auditor"))
    seen = len(origin.received), len(origin.connections), origin.bytes_in
    limit_file_size(auditor, "0")
    try:
        for host in HOSTS:
            code, shown = fetch(box, origin, host, "/disk/full")
            assert (code, shown[-3:]) == (0, "503"), shown
            assert "audit-unavailable" in shown
        with pytest.raises(Exception, match=r"log|audit"):
            gateway.sandbox()
        assert (len(origin.received), len(origin.connections), origin.bytes_in) == seen
    finally:
        limit_file_size(auditor, "unlimited")
    for host in HOSTS:
        until(lambda host=host: fetch(box, origin, host, "/disk/after") == (0, "answer 200"))
    assert processes(gateway)["auditor"] == auditor
    verified = gateway.exeat("audit", "verify")
    assert verified.code == 0, verified.out + verified.err
    assert not [request for request in origin.received if request.path == "/disk/full"]


def test_nothing_is_left_after_the_stop(gateway: TestGateway) -> None:
    """After the last stop no process of the gateway is alive, and its sockets are gone."""
    pids = processes(gateway)
    assert len(pids) == 4
    assert gateway.stop() == 0
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]
    assert not (gateway.run_folder / "control.sock").exists()
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(gateway.settings_file) not in shown
