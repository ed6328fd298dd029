"""The one upstream of a run: nginx with one worker where it is installed, else our own responder. TLS on 127.0.0.1.

    with Upstream(folder, pin) as upstream: upstream.port, upstream.software

Serves /small (1 kB of JSON) and /large (50 MB) under every name in NAMES, with a certificate of `authority`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

from tests.support.authority import Authority

ADDRESS = "127.0.0.1"
NAMES = ("plain.bench.test", "tunnel.bench.test", "keyed.bench.test", "h2.bench.test")
SMALL_BYTES = 1024
LARGE_BYTES = 50 * 1000 * 1000
READY_SECONDS = 10.0

_NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; default_type application/json;
  keepalive_requests 1000000000; keepalive_timeout 300; open_file_cache max=16;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen {address}:{port} ssl http2 backlog=2048; root {folder}/www;
    ssl_certificate {folder}/upstream.pem; ssl_certificate_key {folder}/upstream.pem; ssl_protocols TLSv1.3;
  }}
}}
"""


class Upstream:
    """A context manager; nothing of it is left afterwards. It has what tests.support.gateway asks of an origin."""

    tls = True
    address = ADDRESS

    def __init__(self, folder: Path, pin: list[str], names: tuple[str, ...] = NAMES) -> None:
        """`pin` are words before the command that choose its processor."""
        self.folder = folder
        self.names = names
        self.entries: dict[str, str] = {}
        """Further words of a host's `destinations:` entry."""
        self.authority = Authority("Benchmark upstream")
        self.port = free_port()
        self._pin = pin
        self._process: subprocess.Popen[bytes] | None = None
        self.software = ""

    @property
    def ca_file(self) -> Path:
        return self.folder / "upstream-ca.pem"

    def __enter__(self) -> Upstream:
        www = self.folder / "www"
        www.mkdir(parents=True)
        (www / "small").write_bytes(json.dumps({"data": "x" * (SMALL_BYTES - 12)}).encode())
        (www / "large").write_bytes(os.urandom(LARGE_BYTES // 50) * 50)
        self.ca_file.write_text(self.authority.pem)
        (self.folder / "upstream.pem").write_bytes(self.authority.issue((*self.names, ADDRESS)))
        nginx = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
        if nginx is not None:
            file = self.folder / "nginx.conf"
            file.write_text(_NGINX.format(folder=self.folder, address=ADDRESS, port=self.port))
            command = [nginx, "-c", str(file)]
            said = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=False).stderr
            self.software = said.strip().rpartition(" ")[2]
        else:
            command = [sys.executable, "-m", "bench.upstream", str(self.folder), str(self.port)]
            self.software = "our own responder (Python, uvloop): nginx is not installed"
        with (self.folder / "upstream.err").open("wb") as errors:
            self._process = subprocess.Popen([*self._pin, *command], stdout=errors, stderr=errors)
        await_port(self.port, self._process)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def await_port(port: int, process: subprocess.Popen[bytes], seconds: float = READY_SECONDS) -> None:
    """Return once something accepts on `port`; RuntimeError when the process ends or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection((ADDRESS, port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("it does not listen")


class _Responder(asyncio.Protocol):
    """Answers every head with the file that it names. Request bodies are not understood."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers = answers
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *heads, self._held = (self._held + data).split(b"\r\n\r\n")
        for head in heads:
            path = head.split(b" ", 2)[1]
            self._transport.write(self._answers.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))


async def _serve(folder: Path, port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "upstream.pem")
    answers = {}
    for file in (folder / "www").iterdir():
        body = file.read_bytes()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        answers[f"/{file.name}".encode()] = head.encode() + body
    server = await asyncio.get_running_loop().create_server(
        lambda: _Responder(answers), ADDRESS, port, ssl=context, backlog=2048
    )
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
