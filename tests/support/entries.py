"""Two ways into one gateway with one interface, so that a test runs through both of them.

    @pytest.fixture(scope="module", params=ENTRIES)
    def entry(request, gateway):
        with entry_of(request.param, gateway) as found:
            yield found

    entry.command("curl", ...)      a client with the environment that the product gives it
    entry.connect()                 raw bytes to the proxy; `entry.authorization` is the header line it needs there

"token" is the shared listener with a token; "run" is the listener in the network namespace of an `exeat run`, where
commands run inside the boundary and raw connections are carried in over a Unix socket.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.support.gateway import EXEAT, PATH, Box, Completed, TestGateway

ENTRIES = ("token", "run")
INSIDE = Path(__file__).with_name("inside.py")
PYTHON = sys.executable
"""The tests' own interpreter: visible inside too, with every client library."""


class Entry(Protocol):
    """One sandbox and one way to its proxy."""

    name: str
    id: str
    environment: Mapping[str, str]
    authorization: bytes
    """`Proxy-Authorization: ...\\r\\n`, or nothing where the channel identifies."""
    shared: Path
    """A folder that exists under the same name on both sides, writable on both."""

    def command(self, *argv: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> Completed:
        """Run a client with `environment`."""
        ...

    def connect(self) -> socket.socket:
        """A raw connection to the proxy."""
        ...


@contextlib.contextmanager
def entry_of(
    name: str, gateway: TestGateway, role: str = "agent", caller: Mapping[str, str] | None = None
) -> Iterator[Entry]:
    """The entry called `name`, with a sandbox of its own. `caller`: variables that were set where it was started."""
    if name == "run":
        with inside_of(gateway, role, caller) as entry:
            yield entry
        return
    # A short name: the path of a Unix socket has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="exeat-") as folder:
        shared = Path(folder)
        shared.chmod(0o777)
        yield _Token(gateway.sandbox(role), shared)


@contextlib.contextmanager
def inside_of(gateway: TestGateway, role: str = "agent", caller: Mapping[str, str] | None = None) -> Iterator[Inside]:
    """A sandbox of `exeat run`, which can also `reach` places without the proxy's help."""
    with tempfile.TemporaryDirectory(prefix="exeat-") as folder:
        shared = Path(folder)
        shared.chmod(0o777)
        with _inside(gateway, role, shared, caller or {}) as entry:
            yield entry


class _Token:
    name = "token"

    def __init__(self, box: Box, shared: Path) -> None:
        self._box = box
        self.id = box.id
        self.environment = box.environment
        self.shared = shared
        credentials = base64.b64encode(f"session:{box.token}".encode())
        self.authorization = b"Proxy-Authorization: Basic " + credentials + b"\r\n"

    def command(self, *argv: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> Completed:
        return self._box.command(*argv, env=env, input=stdin)

    def connect(self) -> socket.socket:
        return self._box.connect()


@dataclass
class Inside:
    shared: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = "run"
    id: str = ""
    authorization: bytes = b""

    def command(self, *argv: str, env: Mapping[str, str] | None = None, stdin: bytes = b"") -> Completed:
        answer = self.order({"argv": argv, "env": dict(env or {}), "input": stdin.decode("latin-1")})
        out, err = str(answer["out"]).encode("latin-1"), str(answer["err"]).encode("latin-1")
        return Completed(
            code=int(answer["code"]), out=out.decode(errors="replace"), err=err.decode(errors="replace"), raw=out
        )

    def connect(self) -> socket.socket:
        return self._to("proxy")

    def reach(self, host: str, port: int) -> socket.socket:
        """A raw connection that a program without proxy variables makes: a lookup, a connection, nothing else."""
        connection = self._to("captured")
        connection.sendall(f"{host} {port}\n".encode())
        return connection

    def order(self, order: Mapping[str, object]) -> dict[str, Any]:
        with self._to("commands", 150) as connection, connection.makefile("rwb") as lines:
            lines.write(json.dumps(order).encode() + b"\n")
            lines.flush()
            return dict(json.loads(lines.read()))

    def end(self) -> None:
        with self._to("commands") as connection:
            connection.sendall(b"\n")

    def _to(self, socket_name: str, timeout: float = 60) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        connection.connect(str(self.shared / socket_name))
        return connection


@contextlib.contextmanager
def _inside(gateway: TestGateway, role: str, shared: Path, caller: Mapping[str, str]) -> Iterator[Inside]:
    visible = {sys.prefix, sys.base_prefix, str(INSIDE.parent)}
    command = [*gateway.run_prefix, EXEAT, "run", "--config", str(gateway.settings_file)]
    command += ["--role", role, "--rw", str(shared)]
    for path in sorted(visible):
        command += ["--ro", path]
    command += ["--", PYTHON, str(INSIDE), str(shared)]
    environment = {"PATH": PATH, "HOME": str(gateway.home), "LANG": "C.UTF-8"} | dict(caller)
    with subprocess.Popen(
        command,
        env=environment,
        cwd=gateway.home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if line != b"inside\n":
            process.kill()
            raise AssertionError(line + process.stderr.read())
        entry = Inside(shared)
        try:
            entry.environment = dict(entry.order({"environment": True})["environment"])
            entry.id = entry.environment["EXEAT_SANDBOX"]
            yield entry
        finally:
            with contextlib.suppress(OSError):
                entry.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.communicate()


# --- raw conversations -------------------------------------------------------------------------------------------


def connect_through(entry: Entry, authority: str, *, host: str | None = None) -> socket.socket:
    """A raw connection after CONNECT `authority` was answered 200; AssertionError with the answer otherwise."""
    connection = entry.connect()
    connection.sendall(f"CONNECT {authority} HTTP/1.1\r\nHost: {host or authority}\r\n".encode())
    connection.sendall(entry.authorization + b"\r\n")
    answer = read_head(connection)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return connection


def tls_through(entry: Entry, authority: str, *, sni: str | None = None) -> ssl.SSLSocket:
    """TLS inside a CONNECT, trusting only the product's bundle, with strict X.509."""
    connection = connect_through(entry, authority)
    return trusting(entry).wrap_socket(connection, server_hostname=sni or authority.rpartition(":")[0])


def trusting(entry: Entry) -> ssl.SSLContext:
    """A strict client context over the product's bundle alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=bundle_of(entry))
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    return context


def bundle_of(entry: Entry) -> str:
    """The bundle as the sandbox sees it."""
    shown = entry.command("cat", entry.environment["SSL_CERT_FILE"])
    assert shown.code == 0, shown
    return shown.out


def read_head(connection: socket.socket) -> bytes:
    """Bytes up to and with the blank line; what came before an early end otherwise. Never reads past the head."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            break
        data += byte
    return data


def read_to_end(connection: socket.socket) -> bytes:
    """Everything up to the end or a reset."""
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := connection.recv(65536):
            data += piece
    return data


def read_answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """(head, body) of one answer with Content-Length; the connection stays usable."""
    head = read_head(connection)
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    body = b""
    while len(body) < length:
        piece = connection.recv(length - len(body))
        if not piece:
            break
        body += piece
    return head, body


def python_script(entry: Entry, text: str, *arguments: str, env: Mapping[str, str] | None = None) -> Completed:
    """Run a Python client: `text` with the tests' interpreter, isolated from the tests' own modules."""
    return entry.command(PYTHON, "-I", "-c", text, *arguments, env=env)


__all__ = [
    "ENTRIES",
    "PYTHON",
    "Entry",
    "Inside",
    "bundle_of",
    "connect_through",
    "entry_of",
    "inside_of",
    "python_script",
    "read_answer",
    "read_head",
    "read_to_end",
    "tls_through",
    "trusting",
]
