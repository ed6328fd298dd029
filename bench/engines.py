"""What is measured, and how each is started.

    ENGINES: name -> starter(Ground) -> Engine (a context manager once started)

A starter raises NotHere with one sentence where its software is missing. An engine knows where the generator has to
go and whose processes to count: the whole tree below `pid`, so that ours pays for worker, executor, vault, auditor
and supervisor together.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.upstream import ADDRESS, Upstream, await_port, free_port
from tests.support.gateway import TestGateway

ROOT = Path(__file__).resolve().parent.parent


class NotHere(Exception):
    """This engine cannot be measured here. str() says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What all engines stand on. `pin` are words before an engine's command that choose its processor."""

    upstream: Upstream
    folder: Path
    pin: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One started row of the table. `port` None: straight to the upstream."""

    name: str
    host: str
    ca_file: Path
    port: int | None = None
    pid: int | None = None
    connect_header: str = ""
    header: str = ""
    http2: bool = False


Starter = Callable[[Ground], AbstractContextManager[Engine]]


# --- ours ----------------------------------------------------------------------------------------------------------

_TUNNEL = """
roles:
  agent:
    allow:
      - {host: tunnel.bench.test, port: PORT, tunnel: true, reason: measured}
"""
_PLAIN = """
roles:
  agent:
    allow:
      - {name: read, host: HOST, methods: [GET], paths: ["/small", "/large", "/v1/orders/{id}"]EXTRA}
      - {service: [pypi, npm], operations: [read]}
      - {service: github, operations: [git.fetch, rest.read]}
    deny:
      - {host: "**.internal.test"}
"""
_KEYED_CREDENTIALS = """
version: 1
credentials:
  keyed:
    kind: header
    header: X-Api-Key
    secret: "store:keyed"
    hosts: [keyed.bench.test]
    owner: bench
    placeholder: {env: BENCH_KEY, shape: "bench_{32}"}
"""
SECRET = "bench-secret-0f1e2d3c4b5a69788796a5b4"


def _plain(host: str, extra: str = "") -> str:
    return _PLAIN.replace("HOST", host).replace("EXTRA", extra)


@contextmanager
def _ours(
    ground: Ground, name: str, host: str, policy: str, *, keyed: bool = False, http2: bool = False, opaque: bool = False
) -> Iterator[Engine]:
    folder = ground.folder / name
    options = {"credentials": _KEYED_CREDENTIALS, "secrets": {"keyed": SECRET}} if keyed else {}
    gateway = TestGateway(folder, policy=policy, origins=[ground.upstream], prefix=ground.pin, **options)
    with gateway:
        box = gateway.sandbox(ttl="1h")
        token = base64.b64encode(f"session:{box.token}".encode()).decode()
        assert gateway.process is not None
        yield Engine(
            name=name,
            host=host,
            ca_file=ground.upstream.ca_file if opaque else gateway.client_files / "ca.pem",
            port=gateway.port,
            pid=gateway.process.pid,
            connect_header=f"Proxy-Authorization: Basic {token}",
            header=f"X-Api-Key: {box.placeholders['BENCH_KEY']}" if keyed else "",
            http2=http2,
        )


def tunnel(ground: Ground) -> AbstractContextManager[Engine]:
    """An uninspected tunnel: identity, one decision and two records for each connection."""
    policy = _TUNNEL.replace("PORT", str(ground.upstream.port))
    return _ours(ground, "tunnel", "tunnel.bench.test", policy, opaque=True)


def http1(ground: Ground) -> AbstractContextManager[Engine]:
    """The main lane, plain allowed traffic: identity, policy and two records for each request."""
    return _ours(ground, "http1", "plain.bench.test", _plain("plain.bench.test"))


def executor(ground: Ground) -> AbstractContextManager[Engine]:
    """A credentialed operation: handed to the broker, decided again, durably recorded, scrubbed."""
    extra = ", credential: keyed, limits: {response: 64MiB}"
    return _ours(ground, "executor", "keyed.bench.test", _plain("keyed.bench.test", extra), keyed=True)


def adapter(ground: Ground) -> AbstractContextManager[Engine]:
    """HTTP/2 through the mitmproxy adapter, which ends in the main lane."""
    if not (ROOT / "proxy" / "lanes" / "mitm.py").exists():
        raise NotHere("the HTTP/2 adapter is not built yet")
    if shutil.which("node") is None:
        raise NotHere("node is not installed; its HTTP/2 client is the generator")
    return _ours(ground, "adapter", "h2.bench.test", _plain("h2.bench.test", ", protocol: h2"), http2=True)


# --- beside us -----------------------------------------------------------------------------------------------------


@contextmanager
def direct(ground: Ground) -> Iterator[Engine]:
    """No proxy at all: what generator and upstream can do."""
    yield Engine(name="direct", host="plain.bench.test", ca_file=ground.upstream.ca_file)


@contextmanager
def _process(ground: Ground, command: list[str], port: int, log: Path, env: Mapping[str, str]) -> Iterator[int]:
    """Run `command` until the block ends; yields its pid once it listens."""
    with log.open("wb") as output:
        process = subprocess.Popen([*ground.pin, *command], stdout=output, stderr=output, env=dict(os.environ) | env)
    try:
        await_port(port, process)
        yield process.pid
    except RuntimeError as error:
        raise NotHere(f"it did not start: {log.read_text(errors='replace')[-300:]}") from error
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def _mitmdump(ground: Ground, name: str, *, http2: bool) -> Iterator[Engine]:
    program = Path(sys.executable).parent / "mitmdump"
    if not program.exists():
        raise NotHere("mitmdump is not in this environment")
    folder = ground.folder / name
    folder.mkdir()
    port, host = free_port(), "plain.bench.test"
    command = [str(program), "-q", "--listen-host", ADDRESS, "-p", str(port), "-s", str(ROOT / "bench/mitm_addon.py")]
    command += ["--set", f"confdir={folder}", "--set", f"ssl_verify_upstream_trusted_ca={ground.upstream.ca_file}"]
    env = {"EXEAT_BENCH_HOST": host, "EXEAT_BENCH_ADDRESS": ADDRESS}
    with _process(ground, command, port, folder / "log", env) as pid:
        yield Engine(
            name=name,
            host=host,
            ca_file=folder / "mitmproxy-ca-cert.pem",
            port=port,
            pid=pid,
            header="X-Api-Key: placeholder",
            http2=http2,
        )


def mitmdump(ground: Ground) -> AbstractContextManager[Engine]:
    """Stock `mitmdump` with a small addon: one host check, one header replaced, nothing recorded."""
    return _mitmdump(ground, "mitmdump", http2=False)


def mitmdump_h2(ground: Ground) -> AbstractContextManager[Engine]:
    """The same with an HTTP/2 client: the yardstick of the adapter."""
    if shutil.which("node") is None:
        raise NotHere("node is not installed; its HTTP/2 client is the generator")
    return _mitmdump(ground, "mitmdump-h2", http2=True)


_SQUID = """
http_port {address}:{port} ssl-bump tls-cert={folder}/ca.pem generate-host-certificates=on
sslcrtd_program {certgen} -s {folder}/db -M 4MB
sslcrtd_children 1
tls_outgoing_options cafile={upstream_ca}
hosts_file {folder}/hosts
ssl_bump bump all
acl allowed dstdomain plain.bench.test
http_access allow allowed
http_access deny all
request_header_access X-Api-Key deny all
request_header_add X-Api-Key "the-real-secret" all
cache deny all
access_log none
cache_log {folder}/cache.log
pid_filename {folder}/pid
coredump_dir {folder}
shutdown_lifetime 1 second
workers 1
"""


@contextmanager
def squid(ground: Ground) -> Iterator[Engine]:
    """Squid with ssl_bump (C++): one host check, one header replaced, no cache, no access log."""
    program = shutil.which("squid", path=os.environ.get("PATH", "") + ":/usr/sbin")
    certgen = Path("/usr/lib/squid/security_file_certgen")
    if program is None or not certgen.exists():
        raise NotHere("squid-openssl is not installed")
    folder = ground.folder / "squid"
    folder.mkdir()
    port = free_port()
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=bench -addext"
    subprocess.run(
        ["openssl", *words.split(), "keyUsage=critical,keyCertSign,cRLSign", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / "ca.pem").write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    (folder / "hosts").write_text(f"{ADDRESS} plain.bench.test\n")
    subprocess.run([str(certgen), "-c", "-s", "db", "-M", "4MB"], cwd=folder, check=True, capture_output=True)
    text = _SQUID.format(
        address=ADDRESS, port=port, folder=folder, certgen=certgen, upstream_ca=ground.upstream.ca_file
    )
    (folder / "squid.conf").write_text(text)
    if os.geteuid() == 0:  # Squid gives up root for this user
        subprocess.run(["chown", "-R", "proxy", str(folder)], check=True)
    command = [program, "-N", "-f", str(folder / "squid.conf")]
    with _process(ground, command, port, folder / "log", {}) as pid:
        yield Engine(
            name="squid",
            host="plain.bench.test",
            ca_file=folder / "cert.pem",
            port=port,
            pid=pid,
            header="X-Api-Key: placeholder",
        )


ENGINES: Mapping[str, Starter] = {
    "direct": direct,
    "tunnel": tunnel,
    "http1": http1,
    "executor": executor,
    "adapter": adapter,
    "mitmdump": mitmdump,
    "mitmdump-h2": mitmdump_h2,
    "squid": squid,
}
TITLES: Mapping[str, str] = {
    "direct": "direct (no proxy)",
    "tunnel": "**raw tunnel** (`tunnel: true`)",
    "http1": "**http1 lane** (plain, allowed)",
    "executor": "**executor path** (credentialed, scrubbed)",
    "adapter": "**HTTP/2 adapter** (`protocol: h2`)",
    "mitmdump": "stock mitmdump + addon",
    "mitmdump-h2": "stock mitmdump + addon, HTTP/2 client",
    "squid": "Squid ssl_bump",
}
