"""A real Squid as a corporate proxy: asks for Basic authentication, and inspects TLS with a CA of its own.

with Squid(folder, hosts={"api.example.com": "127.0.0.61"}, origin_ca=origin.ca_pem) as squid:
    squid.port, squid.ca_pem, squid.user, squid.password
    squid.log()          # what it says that it was asked

It needs Debian's `squid-openssl` (plain `squid` has no ssl_bump) and `openssl`; `missing()` says what is not there.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.support.gateway import free_port
from tests.support.waiting import until

LIBRARY = Path("/usr/lib/squid")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> str:
    """Why no inspecting Squid can be started here; empty: one can."""
    squid = shutil.which("squid", path=_PATH)
    if squid is None:
        return "squid is not installed (Debian: squid-openssl)"
    if not (LIBRARY / "security_file_certgen").is_file() or not (LIBRARY / "basic_ncsa_auth").is_file():
        return "this squid inspects no TLS (Debian: squid-openssl instead of squid)"
    if shutil.which("openssl", path=_PATH) is None:
        return "openssl is not installed"
    return ""


class Squid:
    """One Squid in the foreground. `hosts` is all that its resolver knows. A context manager."""

    user = "exeat"

    def __init__(self, folder: Path, *, hosts: Mapping[str, str], origin_ca: str, password: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.password = password
        self._hosts = dict(hosts)
        self._origin_ca = origin_ca
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = pwd.getpwnam("proxy") if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ca_pem(self) -> str:
        """The CA that it signs inspected hosts with."""
        return (self.folder / "ca.pem").read_text("ascii")

    def log(self) -> str:
        """Its access log: time, client, status, method, target, user."""
        path = self.folder / "access.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Squid:
        self._write()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        with (self.folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                ["squid", "-N", "-f", str(self.folder / "squid.conf")],
                env={"PATH": _PATH, "LANG": "C"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        until(self._answers, what="squid")

    def stop(self) -> None:
        """End it and its helpers at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "out").read_text(errors="replace")
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _write(self) -> None:
        folder = self.folder
        folder.mkdir()
        self._run(
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
            "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Corporate inspection",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        hashed = self._run("openssl", "passwd", "-apr1", self.password).decode().strip()
        (folder / "users").write_text(f"{self.user}:{hashed}\n")
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in self._hosts.items()))
        (folder / "origin.pem").write_text(self._origin_ca)
        (folder / "squid.conf").write_text(self._configuration())
        self._run(str(LIBRARY / "security_file_certgen"), "-c", "-s", str(folder / "certificates"), "-M", "4MB")
        if self._owner is not None:  # started by root it becomes this user
            for path in (folder, *folder.rglob("*")):
                os.chown(path, self._owner.pw_uid, self._owner.pw_gid)

    def _configuration(self) -> str:
        folder = self.folder
        return "\n".join(
            (
                f"http_port 127.0.0.1:{self.port} ssl-bump tls-cert={folder}/ca.pem tls-key={folder}/ca.key "
                "generate-host-certificates=on dynamic_cert_mem_cache_size=4MB",
                f"sslcrtd_program {LIBRARY}/security_file_certgen -s {folder}/certificates -M 4MB",
                "sslcrtd_children 1 startup=1 idle=1",
                f"tls_outgoing_options cafile={folder}/origin.pem",
                f"auth_param basic program {LIBRARY}/basic_ncsa_auth {folder}/users",
                "auth_param basic children 1 startup=1 idle=1",
                "acl known proxy_auth REQUIRED",
                "acl step1 at_step SslBump1",
                "http_access deny !known",
                "http_access allow known",
                "ssl_bump stare step1",
                "ssl_bump bump all",
                "on_unsupported_protocol tunnel all",  # what is not TLS inside CONNECT
                f"hosts_file {folder}/hosts",
                "dns_nameservers 127.0.0.1",
                "dns_timeout 1 seconds",
                "cache deny all",
                "cache_mem 8 MB",
                "pinger_enable off",
                "shutdown_lifetime 0 seconds",
                "visible_hostname squid.example.com",
                f"pid_filename {folder}/squid.pid",
                f"cache_log {folder}/cache.log",
                "logformat short %ts %>a %>Hs %rm %ru %un",
                f"access_log stdio:{folder}/access.log short",
                f"coredump_dir {folder}",
                "",
            )
        )

    def _run(self, *argv: str) -> bytes:
        done = subprocess.run(
            argv, cwd=self.folder, env={"PATH": _PATH, "LANG": "C"}, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
