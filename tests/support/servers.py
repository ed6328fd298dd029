"""Real servers as origins: nginx and Node's http, in clear and in TLS, each with a log of what it was asked.

with nginx(folder) as server:
    server.clear, server.tls     # what TestGateway(origins=...) takes
    server.stop(); server.asked()    # ["GET /x", ...] in order; what it could not read whole begins with `!`
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.support.authority import Authority
from tests.support.gateway import PATH, free_port
from tests.support.waiting import until

_PATH = f"{PATH}:/usr/sbin:/sbin"
_SCRIPT = Path(__file__).with_name("origin_server.cjs")


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a server listens: as much of tests.support.origins.Origin as the gateway's policy is written from."""

    names: tuple[str, ...]
    port: int
    tls: bool
    authority: Authority
    address: str = "127.0.0.1"
    entries: Mapping[str, str] = field(default_factory=dict)
    """Further words of a name's destination."""

    @property
    def host(self) -> str:
        return f"{self.names[0]}:{self.port}"


class Server:
    """One server process. A context manager; `clear` and `tls` are its listeners."""

    def __init__(self, folder: Path, name: str, command: list[str], *, quit_signal: int) -> None:
        self.name = name
        self.log = folder / "asked.log"
        self._folder = folder
        self._command = command
        self._quit = quit_signal
        authority = Authority(f"Origins of {name}")
        self.clear = Listener((f"{name}.test",), free_port(), False, authority)
        self.tls = Listener((f"{name}-tls.test", f"{name}-key.test"), free_port(), True, authority)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        folder.chmod(0o755)
        self.pem = folder / "key.pem"
        self.pem.write_bytes(authority.issue(self.tls.names))

    def __enter__(self) -> Server:
        with (self._folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                [word.format(server=self) for word in self._command],
                env={"PATH": _PATH, "LANG": "C"},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        until(self._answers, 30, self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; what it was asked is in its log then."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(self._quit)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def asked(self) -> list[str]:
        """The lines of its log."""
        return self.log.read_text("latin-1").splitlines() if self.log.exists() else []

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "out").read_text(errors="replace")
        with socket.socket() as clear, socket.socket() as tls:
            return not clear.connect_ex(("127.0.0.1", self.clear.port)) and not tls.connect_ex(
                ("127.0.0.1", self.tls.port)
            )


def nginx(folder: Path) -> Server:
    """Debian's nginx with one worker."""
    server = Server(
        folder, "nginx", ["nginx", "-p", "{server._folder}", "-c", "nginx.conf"], quit_signal=signal.SIGTERM
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"""{user}daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr crit;
events {{ worker_connections 512; }}
http {{
    log_format asked '$request_method $request_uri';
    log_format broken '! $status $request_method $request_uri';
    map $status $broken {{ default 0; ~^4 1; ~^5 1; }}
    map $status $asked {{ default 1; ~^4 0; ~^5 0; }}
    access_log asked.log asked if=$asked;
    access_log asked.log broken if=$broken;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path u; scgi_temp_path s;
    keepalive_timeout 120s;
    keepalive_requests 100000;
    server {{
        listen 127.0.0.1:{server.clear.port};
        listen 127.0.0.1:{server.tls.port} ssl;
        ssl_certificate key.pem;
        ssl_certificate_key key.pem;
        # The whole body is read before there is an answer, as an application behind nginx has it.
        location / {{ proxy_pass http://unix:{folder}/inner.sock:/; }}
    }}
    server {{
        listen unix:{folder}/inner.sock;
        access_log off;
        location / {{ return 200 ok; }}
    }}
}}
"""
    )
    return server


def node(folder: Path, *, lenient: bool = False) -> Server:
    """Node's http server. `lenient`: with the parser that forgives what it can."""
    name = "lenient" if lenient else "node"
    options = ["--insecure-http-parser"] if lenient else []
    words = ["{server.name}", "{server.pem}", "{server.log}", "{server.clear.port}", "{server.tls.port}"]
    return Server(folder, name, ["node", *options, str(_SCRIPT), *words], quit_signal=signal.SIGKILL)


def missing() -> str:
    """Which of the programs is not installed; empty: all are."""
    return ", ".join(name for name in ("nginx", "node") if shutil.which(name, path=_PATH) is None)
