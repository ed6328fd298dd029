"""Big bodies, slow peers and many requests: what is held stays bounded, and everything opened is closed again (T16).

How much is held is measured at its ends, not as resident memory (bench/ reports that): what one side could hand in
while the other side took nothing is what sits in between.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from tests.support.entries import read_answer, read_head
from tests.support.gateway import Box, TestGateway
from tests.support.leaks import command_line, descendants
from tests.support.origins import Exchange, Origin, head
from tests.support.scripts import READ, script, slow_read, text
from tests.support.signals import Gate, Notice
from tests.support.waiting import until

pytestmark = [pytest.mark.xdist_group("load"), pytest.mark.slow]

SECRET = "ld2-Real-4411c0ffee7799ab"
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
      - {name: plain, host: plain.test, methods: [GET, PUT], paths: ["/**"]}
      - {name: held, host: held.test, methods: [GET, PUT], paths: ["/**"], credential: held}
"""

MIB = 1 << 20
IN_BETWEEN = 16 * MIB
"""What may sit between two ends: four streams of 256 KiB each way and the kernel's socket buffers, with room."""
BIG = 128 * MIB
HOSTS = ("plain.test", "held.test")


class Scene:
    def __init__(self, gateway: TestGateway, origin: Origin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.box: Box = gateway.sandbox()

    def authority(self, host: str) -> str:
        return f"{host}:{self.origin.port}"

    def connect(self, host: str, window: int | None = None) -> ssl.SSLSocket:
        """TLS through CONNECT, by token; `window` bounds our own receive and send buffers."""
        connection = socket.socket()
        if window is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.gateway.port))
        authority = self.authority(host)
        token = f"Proxy-Authorization: Bearer {self.box.token}"
        connection.sendall(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{token}\r\n\r\n".encode())
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        context = ssl.create_default_context(cafile=str(self.gateway.client_files / "ca.pem"))
        return context.wrap_socket(connection, server_hostname=host)

    def open_files(self) -> dict[str, int]:
        """Open descriptors of workers and executors, by process."""
        assert self.gateway.process is not None
        found: dict[str, int] = {}
        for pid in descendants(self.gateway.process.pid):
            line = command_line(pid)
            for module in (b"proxy.worker", b"broker.executor_process"):
                if b"-m " + module in line:
                    found[f"{module.decode()} {pid}"] = len(os.listdir(f"/proc/{pid}/fd"))
        assert len(found) >= 2
        return found


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with (
        Origin(
            *HOSTS, address="127.0.0.40", handler=script(READ, text("small")), keep=1 << 16
        ).run_in_thread() as origin,
        TestGateway(
            tmp_path_factory.mktemp("load"),
            policy=POLICY,
            credentials=CREDENTIALS,
            secrets={"held": SECRET},
            origins=[origin],
        ) as gateway,
    ):
        yield Scene(gateway, origin)
        assert not origin.faults


class Source:
    """A handler that sends `total` bytes of a known pattern, and tells how many the network has taken."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self.notice = Notice()
        self.digest = hashlib.sha256()

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.read_body()
        fields = (("Content-Type", "application/octet-stream"), ("Content-Length", str(self.total)))
        await exchange.send(head(200, fields))
        block = os.urandom(65536)
        while self.taken < self.total:
            await exchange.send(block)
            self.digest.update(block)
            self.taken += len(block)
            self.notice.tell()


def settled(read: object, seconds: float = 20.0) -> int:
    """The value of `read()` once it has stayed the same over fifty looks in a row."""
    seen: list[int] = []

    def quiet() -> bool:
        seen.append(read())  # type: ignore[operator]
        return len(seen) > 50 and len(set(seen[-50:])) == 1

    until(quiet, seconds, "a pause")
    return seen[-1]


@pytest.mark.parametrize("host", HOSTS)
def test_a_reader_that_stops_stops_the_origin(scene: Scene, host: str) -> None:
    """T16: while the client takes nothing the origin can hand in a bounded amount; then all of it arrives unchanged."""
    source = Source(BIG)
    scene.origin.on(f"/download/{host}", source)
    with scene.connect(host, window=65536) as connection:
        connection.sendall(f"GET /download/{host} HTTP/1.1\r\nHost: {scene.authority(host)}\r\n\r\n".encode())
        source.notice.wait_until(lambda: source.taken > 0)
        held = settled(lambda: source.taken)
        assert held < IN_BETWEEN, f"{held >> 20} MiB were taken from the origin while nobody read"
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        digest, received = hashlib.sha256(), 0
        while received < BIG:
            piece = connection.recv(1 << 18)
            assert piece
            digest.update(piece)
            received += len(piece)
    assert digest.hexdigest() == source.digest.hexdigest()


@pytest.mark.parametrize("host", HOSTS)
def test_an_origin_that_stops_reading_stops_the_client(scene: Scene, host: str) -> None:
    """T16: an upload to an origin that takes nothing is held back after a bounded amount; then all of it arrives."""
    gate = Gate()
    scene.origin.on(f"/upload/{host}", slow_read(gate))
    sent = [0]
    block = os.urandom(65536)
    digest = hashlib.sha256()
    with scene.connect(host, window=65536) as connection:
        head = f"PUT /upload/{host} HTTP/1.1\r\nHost: {scene.authority(host)}\r\nContent-Length: {BIG}\r\n\r\n"
        connection.sendall(head.encode())

        def upload() -> None:
            while sent[0] < BIG:
                connection.sendall(block)
                digest.update(block)
                sent[0] += len(block)

        thread = threading.Thread(target=upload, daemon=True)
        thread.start()
        gate.wait_arrived()
        held = settled(lambda: sent[0])
        assert held < IN_BETWEEN, f"{held >> 20} MiB were taken from the client while nobody read"
        gate.open()
        thread.join(120)
        assert not thread.is_alive()
        answer, body = read_answer(connection)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert int(body) == BIG
    [received] = [item for item in scene.origin.received if item.path == f"/upload/{host}"]
    assert received.body_sha256 == digest.hexdigest()


def test_open_files_return_to_where_they_were(scene: Scene) -> None:
    """T16: after a thousand small requests on many connections nothing more is open than before them.

    Half go through the broker; every tenth connection is dropped by the client in the middle of an answer.
    """
    for host in HOSTS:  # what is made once (leaf contexts, pools) is not counted
        assert _small(scene, host, 1, drop=False) == 1
    scene.gateway.admin.end_sandbox(scene.box.id)
    scene.box = scene.gateway.sandbox()
    before = until(lambda: scene.open_files())
    answered = 0
    for number in range(60):
        answered += _small(scene, HOSTS[number % 2], 20, drop=number % 10 == 9)
    assert answered >= 1000
    scene.gateway.admin.end_sandbox(scene.box.id)  # its pooled connections go with it
    scene.box = scene.gateway.sandbox()
    after = until(lambda: _no_more_than(scene.open_files(), before), what="open files back to where they were")
    assert after.keys() == before.keys()


def _small(scene: Scene, host: str, count: int, *, drop: bool) -> int:
    request = f"GET /small HTTP/1.1\r\nHost: {scene.authority(host)}\r\n\r\n".encode()
    done = 0
    with scene.connect(host) as connection:
        for number in range(count):
            connection.sendall(request)
            if drop and number == count - 1:
                break
            head, body = read_answer(connection)
            assert head.startswith(b"HTTP/1.1 200"), head
            assert body == b"small"
            done += 1
    return done


def _no_more_than(now: dict[str, int], before: dict[str, int]) -> dict[str, int] | None:
    """`now` if no process has more open than before, a handful aside (a pooled connection that is just closing)."""
    return now if all(count <= before.get(name, 0) + 2 for name, count in now.items()) else None


def test_bodies_are_not_written_to_disk(scene: Scene) -> None:
    """T16: after all of the above the state and run folders hold certificates and records, and no body."""
    folders = (scene.gateway.state, scene.gateway.run_folder)
    sizes = {str(path): path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 32 * MIB, sizes
    assert all(size < 16 * MIB for size in sizes.values()), sizes
