"""What surrounds the gateway's processes, and what a client can pile up before them (B102, B151, B168, B175, B177).

One gateway is started with everything in its environment and home that a program of its kind might take up: proxies,
a netrc, key log and module folders, a configuration of the HTTP/2 engine.
"""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import Box, TestGateway
from tests.support.leaks import command_line, descendants
from tests.support.origins import Origin

pytestmark = pytest.mark.xdist_group("surroundings")

POLICY = """
roles:
  agent:
    boundary: {external: tests, reason: the tests confine nothing}
    allow:
      - {name: open, host: pub.test, methods: [GET], paths: ["/v1/**"]}
      - {name: read, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}
      - {name: two, host: two.test, methods: [GET], paths: ["/v1/**"], protocol: h2}
"""
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests,
        placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
SECRET = "canary-around-1a2b3c4d5e6f708192"
AMBIENT = "ambient-password-of-the-host"
MEBIBYTE = 1 << 20


class Scene:
    def __init__(self, gateway: TestGateway, origin: Origin, folder: Path) -> None:
        self.gateway = gateway
        self.origin = origin
        self.folder = folder
        self.neighbour = gateway.sandbox()

    def process(self, words: bytes) -> int:
        assert self.gateway.process is not None
        (found,) = [pid for pid in descendants(self.gateway.process.pid) if words in command_line(pid)]
        return found

    def get(self, box: Box, host: str, *options: str) -> int:
        return box.curl("-f", "-o", "/dev/null", *options, f"https://{host}:{self.origin.port}/v1/x").code


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("around")
    folder.chmod(0o777)
    trap = folder / "modules"
    trap.mkdir()
    told = folder / "told"
    for name in ("aiohttp", "mitmproxy", "h2", "exeat_addon"):
        (trap / f"{name}.py").write_text(f"open({str(told)!r}, 'a').write('{name}\\n')\nraise ImportError\n")
    environment = {
        "HTTP_PROXY": "http://127.0.0.1:1",
        "HTTPS_PROXY": "http://127.0.0.1:1",
        "https_proxy": "http://127.0.0.1:1",
        "ALL_PROXY": "socks5://127.0.0.1:1",
        "SSLKEYLOGFILE": str(folder / "keys.log"),
        "SSL_CERT_FILE": "/nonexistent.pem",
        "PYTHONPATH": str(trap),
        "PYTHONSTARTUP": str(trap / "exeat_addon.py"),
        "NETRC": str(folder / "gateway" / "home" / ".netrc"),
        "LD_LIBRARY_PATH": str(trap),
    }
    with Origin("pub.test", "api.test", "two.test", address="127.0.0.63").run_in_thread() as origin:
        gateway = TestGateway(
            folder / "gateway",
            policy=POLICY,
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=(origin,),
            environment=environment,
        )
        netrc = "".join(f"machine {name} login me password {AMBIENT}\n" for name in origin.names)
        (gateway.home / ".netrc").write_text(netrc)
        (gateway.home / ".netrc").chmod(0o600)
        (gateway.home / ".mitmproxy").mkdir()
        (gateway.home / ".mitmproxy" / "config.yaml").write_text(
            f"ssl_insecure: true\nscripts: [{trap / 'exeat_addon.py'}]\nupstream_cert: false\n"
        )
        with gateway:
            yield Scene(gateway, origin, folder)


@pytest.fixture(autouse=True)
def control(scene: Scene) -> Iterator[None]:
    """After each attack a second sandbox is served, with and without a credential."""
    yield
    assert scene.get(scene.neighbour, "pub.test") == 0
    bearer = f"Authorization: Bearer {placeholder(scene.neighbour)}"
    done = scene.neighbour.curl("-i", "-H", bearer, f"https://api.test:{scene.origin.port}/v1/x")
    assert " 200 " in done.out, done


def placeholder(box: Box) -> str:
    return box.placeholders["API_KEY"]


@pytest.mark.parametrize("host", ["pub.test", "api.test", "two.test"])
def test_nothing_ambient_of_the_host_is_used(scene: Scene, host: str) -> None:
    """B102: no proxy variable, netrc or certificate file of the gateway's surroundings has a part in any lane."""
    box = scene.gateway.sandbox()
    before = len(scene.origin.received)
    options = ("--http2",) if host == "two.test" else ()
    assert scene.get(box, host, *options) == 0, scene.gateway.errors()
    (request,) = scene.origin.received[before:]
    seen = [value for name, value in request.headers if name.lower() == "authorization"]
    assert seen == ([f"Bearer {SECRET}"] if host == "api.test" else [])
    assert AMBIENT not in repr(request.headers)


def test_no_process_takes_code_or_settings_from_outside(scene: Scene) -> None:
    """B151: no module of ours came from a folder in the environment, no session key was written, argv is fixed."""
    assert scene.gateway.process is not None
    children = [pid for pid in descendants(scene.gateway.process.pid) if pid != scene.gateway.process.pid]
    given = Path(f"/proc/{scene.gateway.process.pid}/environ").read_bytes()
    assert b"SSLKEYLOGFILE=" in given, "the command itself was started with all of it"
    assert children
    for pid in children:
        words = command_line(pid)
        if b"python" in words:
            assert b" -I " in words, words
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        for name in (b"SSLKEYLOGFILE", b"PYTHONPATH", b"HTTPS_PROXY", b"https_proxy", b"NETRC", b"LD_LIBRARY_PATH"):
            assert name + b"=" not in environment, (words, name)
    assert not (scene.folder / "keys.log").exists()
    assert not (scene.folder / "told").exists(), (scene.folder / "told").read_text()


def test_thousands_of_pipelined_requests_wait_in_the_client(scene: Scene) -> None:
    """B177: a client that writes and never reads is held back; the worker holds a bounded part of what it sent."""
    box = scene.gateway.sandbox()
    worker = scene.process(b"-m proxy.worker ")
    before, served = resident(worker), len(scene.origin.received)
    context = ssl.create_default_context(cafile=str(scene.gateway.client_files / "ca.pem"))
    with box.connect() as plain:
        authority = f"pub.test:{scene.origin.port}"
        credentials = box.proxy_url.partition("//")[2].partition("@")[0]
        plain.sendall(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{basic(credentials)}\r\n".encode())
        assert b" 200 " in plain.recv(4096)
        with context.wrap_socket(plain, server_hostname="pub.test") as tls:
            tls.settimeout(3)
            request = f"GET /v1/{'x' * 200} HTTP/1.1\r\nHost: {authority}\r\nX-A: {'y' * 4000}\r\n\r\n".encode()
            sent = 0
            with contextlib.suppress(TimeoutError, OSError):
                for _ in range(10_000):
                    tls.sendall(request)
                    sent += 1
            assert resident(worker) - before < 32 * MEBIBYTE
            assert scene.get(scene.neighbour, "pub.test") == 0
    answered = len(scene.origin.received) - served
    assert 0 < answered <= sent + 1


def test_a_flood_of_names_makes_few_certificates(scene: Scene) -> None:
    """B175: denied names cost a bounded number of certificates; beyond, the refusal comes at CONNECT."""
    box = scene.gateway.sandbox()
    minted = len(scene.gateway.records(event="certificate.minted"))
    answers = {b"200": 0, b"403": 0}
    credentials = box.proxy_url.partition("//")[2].partition("@")[0]
    hello_context = ssl.create_default_context()
    for number in range(120):
        with box.connect() as plain, contextlib.suppress(OSError):
            authority = f"n{number}.evil.test:443"
            plain.sendall(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{basic(credentials)}\r\n".encode())
            head = plain.recv(4096)
            answers[head[9:12]] = answers.get(head[9:12], 0) + 1
            if head[9:12] == b"200":
                with contextlib.suppress(ssl.SSLError):
                    hello_context.wrap_socket(plain, server_hostname=f"n{number}.evil.test")
    assert answers[b"403"] >= 80, answers
    assert len(scene.gateway.records(event="certificate.minted")) - minted <= 40


def test_under_an_open_umask_nothing_private_is_open(tmp_path: Path) -> None:
    """B168: made under umask 0, everything in the state folder and the admin socket are closed to others."""
    old = os.umask(0)
    try:
        with TestGateway(tmp_path / "loose", policy="roles: {agent: {allow: []}}\n") as gateway:
            assert (gateway.run_folder / "admin.sock").stat().st_mode & 0o007 == 0
            found = [path for path in gateway.state.rglob("*") if not path.is_symlink()]
            assert gateway.log in found
            for path in found:
                assert path.stat().st_mode & 0o077 == 0 or _closed(path, gateway.state), path
    finally:
        os.umask(old)


def _closed(path: Path, top: Path) -> bool:
    """Whether a folder above `path`, up to `top`, lets nobody else in."""
    return any(top in (folder, *folder.parents) and folder.stat().st_mode & 0o077 == 0 for folder in path.parents)


# --- small looks -------------------------------------------------------------------------------------------------


def basic(credentials: str) -> str:
    """The header line of a proxy URL's user part."""
    return f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}\r\n"


def resident(pid: int) -> int:
    """Bytes of memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
