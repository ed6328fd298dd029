"""A canary secret goes everywhere that a secret goes, and is then looked for everywhere that it must not be (I01, I22).

Looked through: the state folder (the store in clear), log, standard error, refusals, every answer that a sandbox or an
administrator was given, sandbox environments, process lists and environments, temporary files, cores. What is looked
for is every run of eight characters, plain and in base64.
"""

from __future__ import annotations

import json
import os
import secrets as random_secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import EXEAT, Completed, TestGateway
from tests.support.leaks import command_line, descendants, files_below, leaks, process_texts, windows
from tests.support.origins import Exchange, Origin, echo
from tests.support.scripts import READ, script, text
from tests.support.waiting import until

pytestmark = [pytest.mark.xdist_group("canary"), pytest.mark.slow]


def canary(name: str) -> str:
    """An unpredictable secret of letters and digits."""
    letters = random_secrets.token_urlsafe(48).replace("-", "").replace("_", "")
    return f"{name}{letters[:32]}"


STORED, ROTATED, MOUNTED, BROKEN, TYPED = (canary(name) for name in ("st", "ro", "mo", "br", "ty"))
CANARIES = {"stored": STORED, "rotated": ROTATED, "mounted": MOUNTED, "broken": BROKEN, "typed": TYPED}
KNOWN = {name: windows(value) for name, value in CANARIES.items()}

CREDENTIALS = """
version: 1
credentials:
  bearer: {{kind: bearer, secret: "store:one", hosts: [bearer.test], owner: tests,
            placeholder: {{env: BEARER_KEY, shape: "sk_{{24}}"}}}}
  basic: {{kind: basic, secret: "file:{mounted}", hosts: [basic.test], owner: tests,
           placeholder: {{env: BASIC_KEY, shape: "gh_{{24}}"}}}}
  query: {{kind: query, query: key, secret: "store:one", hosts: [query.test], owner: tests,
           placeholder: {{env: QUERY_KEY, shape: "qk_{{24}}"}}}}
  header: {{kind: header, header: X-Api-Key, secret: "store:broken", hosts: [header.test], owner: tests,
            placeholder: {{env: HEADER_KEY, shape: "hk_{{24}}"}}}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: bearer, host: bearer.test, methods: [GET], paths: ["/**"], credential: bearer}
      - {name: basic, host: basic.test, methods: [GET], paths: ["/**"], credential: basic}
      - {name: query, host: query.test, methods: [GET], paths: ["/**"], query: any, credential: query}
      - {name: header, host: header.test, methods: [GET], paths: ["/**"], credential: header}
"""
HOSTS = ("bearer.test", "basic.test", "query.test", "header.test")


class Scene:
    def __init__(self, gateway: TestGateway, origin: Origin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.shown: dict[str, str] = {}
        """Everything that a sandbox or an administrator was given to read, by what it was."""

    def keep(self, name: str, answer: Completed) -> Completed:
        self.shown[name] = answer.out + answer.err
        return answer


async def _echo_in_pieces(exchange: Exchange) -> None:
    """The secret comes back in a header, in the body across chunks, and inside an error page of the origin's."""
    await exchange.read_body()
    value = exchange.request.header("authorization") or ""
    await exchange.begin(500, (("X-Request-Id", value[-20:]), ("Content-Type", "text/plain")))
    for at in range(0, len(value), 5):
        await exchange.chunk(value[at : at + 5].encode())
    await exchange.end()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("canary")
    mounted = folder / "config" / "mounted"
    with (
        Origin(*HOSTS, address="127.0.0.48", handler=script(READ, text("done"))).run_in_thread() as origin,
        TestGateway(
            folder, policy=POLICY, credentials=CREDENTIALS.format(mounted=mounted), origins=[origin]
        ) as gateway,
    ):
        mounted.write_text(MOUNTED + "\n")
        mounted.chmod(0o444)
        origin.on("/echo", echo)
        origin.on("/pieces", _echo_in_pieces)
        scene = Scene(gateway, origin)
        _live(scene)
        yield scene


def _live(scene: Scene) -> None:
    """All that a day brings, one after the other: adding, using, misusing, echoing, failing, rotating, listing."""
    gateway = scene.gateway
    for name, value in (("one", STORED), ("broken", BROKEN + "\nsecond line")):
        scene.keep(f"secret add {name}", _piped(gateway, "add", name, value))
    scene.keep("secret add twice", _piped(gateway, "add", "one", TYPED))  # refused: it is there already
    box = gateway.sandbox()
    for host in HOSTS:
        for path in ("/x", "/echo", "/pieces"):
            url = f"https://{host}:{scene.origin.port}{path}"
            slot = {
                "bearer.test": ("-H", f"Authorization: Bearer {box.placeholders['BEARER_KEY']}"),
                "basic.test": ("-u", f"user:{box.placeholders['BASIC_KEY']}"),
                "query.test": ("-G", "-d", f"key={box.placeholders['QUERY_KEY']}"),
                "header.test": ("-H", f"X-Api-Key: {box.placeholders['HEADER_KEY']}"),
            }[host]
            scene.keep(f"{host}{path}", box.curl("-i", *slot, url))
        scene.keep(f"{host} denied", box.curl("-i", "-X", "DELETE", f"https://{host}:{scene.origin.port}/x"))
    scene.keep("rotate", _piped(gateway, "rotate", "one", ROTATED))
    other = gateway.sandbox()
    scene.keep("rotated use", other.curl("-i", f"https://bearer.test:{scene.origin.port}/x"))
    for page in ("/", "/ca.pem", "/env", "/policy", "/reasons/no-rule", "/metrics"):
        scene.keep(f"help host {page}", box.curl("-i", f"http://exeat.internal{page}"))
    for command in (
        ("status",),
        ("secret", "list"),
        ("sandbox", "list"),
        ("sandbox", "show", box.id),
        ("policy", "show"),
        ("policy", "check"),
        ("audit", "search", "--output", "json"),
        ("audit", "verify"),
        ("why", "credential-unavailable"),
        ("ca", "show"),
    ):
        scene.keep(" ".join(command), gateway.exeat(*command))
    inside = "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null; ls -laR /tmp /run 2>/dev/null; mount"
    scene.keep("inside a sandbox", gateway.run("/bin/sh", "-c", inside))


def _piped(gateway: TestGateway, verb: str, name: str, value: str) -> Completed:
    command = [EXEAT, "secret", verb, name, "--config", str(gateway.settings_file)]
    done = subprocess.run(command, input=value.encode(), capture_output=True, timeout=60, check=False)
    return Completed(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def found_in(data: Iterator[tuple[str, bytes]]) -> dict[str, list[str]]:
    return {where: found for where, content in data if (found := leaks(content, KNOWN))}


def test_the_canaries_were_really_used(scene: Scene) -> None:
    """The control: the origin saw them, and the search finds one where it is."""
    seen = [value for item in scene.origin.received for value in item.values("authorization")]
    assert f"Bearer {STORED}" in seen
    assert f"Bearer {ROTATED}" in seen
    assert any(STORED in item.target for item in scene.origin.received)
    assert "200" in scene.shown["bearer.test/x"]
    assert leaks(f"x {STORED} x".encode(), KNOWN)
    assert scene.shown["inside a sandbox"].count("BEARER_KEY=") >= 1


def test_no_answer_to_anyone_shows_a_canary(scene: Scene) -> None:
    """Refusals, echoes, pages of the help host, every command's output, and all that a sandbox can look at."""
    assert found_in((name, shown.encode()) for name, shown in scene.shown.items()) == {}


def test_a_secret_that_does_not_fit_its_slot_is_refused_without_its_text(scene: Scene) -> None:
    """The kind raised with the secret in a local: what the client, the log and standard error got is a code."""
    assert "credential-unavailable" in scene.shown["header.test/x"]
    hosts = [item.header("host") or "" for item in scene.origin.received]
    assert not [host for host in hosts if host.startswith("header.test")]
    assert "Traceback" not in scene.gateway.errors()


def test_no_file_holds_a_canary_but_the_one_that_was_mounted(scene: Scene) -> None:
    """State folder with its database and journals, log, run folder, home, configuration, standard error."""
    hits = found_in(files_below(scene.gateway.folder))
    assert set(hits) <= {str(scene.gateway.config / "mounted")}
    assert hits, "the search did not even find the mounted file"


def test_no_process_shows_a_canary(scene: Scene) -> None:
    """Command lines and environments of the gateway's processes; nor the store's key, the tokens or the seal keys."""
    assert scene.gateway.process is not None
    pids = descendants(scene.gateway.process.pid)
    assert len(pids) >= 5
    assert found_in(process_texts(pids)) == {}
    key = (scene.gateway.config / "keys" / "store.key").read_text().strip()
    for where, data in process_texts(pids):
        assert key.encode() not in data, where
        if where.endswith("environ") and not where.startswith(f"/proc/{scene.gateway.process.pid}/"):
            assert len(data) < 200, where  # built from an empty one


def test_no_temporary_file_holds_a_canary(scene: Scene) -> None:
    """Nothing younger than this module's start in the temporary folders, nor in shared memory."""
    places = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path("/var/tmp")]
    own = scene.gateway.folder.parent.parent
    hits: dict[str, list[str]] = {}
    for place in places:
        for entry in place.iterdir() if place.is_dir() else ():
            if entry == own or own.is_relative_to(entry) or entry.name.startswith("pytest-"):
                continue
            if entry.is_file() and entry.stat().st_size < 1 << 22 and entry.stat().st_uid in _uids(scene):
                hits |= found_in(iter([(str(entry), entry.read_bytes())]))
    assert hits == {}


def _uids(scene: Scene) -> set[int]:
    """The uids that the gateway's processes run as."""
    assert scene.gateway.process is not None
    found: set[int] = {os.getuid()}
    for pid in descendants(scene.gateway.process.pid):
        try:
            found.add(Path(f"/proc/{pid}").stat().st_uid)
        except OSError:
            continue
    return found


def test_the_log_says_the_same_of_a_secret_by_name_only(scene: Scene) -> None:
    """Adding, rotating and echoing are on record, with names and versions."""
    for event in ("secret.added", "secret.rotated", "secret.echoed", "broker.outcome"):
        scene.gateway.awaited(event=event)
    assert leaks(json.dumps(scene.gateway.records()).encode(), KNOWN) == []


@pytest.mark.parametrize("module", ["broker.executor_process", "broker.vault", "proxy.worker", "audit.auditor"])
def test_no_process_can_leave_a_core_or_be_read(scene: Scene, module: str) -> None:
    """Every one of them is not dumpable: what /proc shows of its memory is root's, whatever its uid (RULINGS 1.2)."""
    for pid in _pids(scene, module):
        assert _status(pid, "Uid") != 0
        assert Path(f"/proc/{pid}/environ").stat().st_uid == 0
        [core] = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line]
        assert core.split()[4:6] == ["0", "0"]


def test_a_crash_leaves_no_core(scene: Scene) -> None:
    """SIGSEGV to the vault, which holds them all: no core file where cores are put, and all start again.

    Workers and executors are the first of their process namespaces: only a real fault would kill them so.
    """
    box = scene.gateway.sandbox()
    url = f"https://basic.test:{scene.origin.port}/x"
    placeholder = f"user:{box.placeholders['BASIC_KEY']}"
    began = time.time() - 1
    [victim] = _pids(scene, "broker.vault")
    os.kill(victim, signal.SIGSEGV)
    until(lambda: not command_line(victim), what="the end of the process")
    until(lambda: "200" in box.curl("-i", "-u", placeholder, url).out, what="a working gateway again")
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    places = {Path("/"), scene.gateway.home, scene.gateway.folder, Path.cwd(), Path("/var/lib/systemd/coredump")}
    if pattern.startswith("/"):
        places.add(Path(pattern).parent)
    for place in places:
        for entry in place.glob("*core*") if place.is_dir() else ():
            if entry.is_file() and entry.stat().st_mtime >= began:
                assert not leaks(entry.read_bytes(), KNOWN), entry
                assert entry.name.split(".")[0] != "core", entry
    assert leaks(scene.gateway.errors().encode(), KNOWN) == []


def _pids(scene: Scene, module: str) -> list[int]:
    assert scene.gateway.process is not None
    top = scene.gateway.process.pid
    # All restart when one dies, and another test of this module kills one.
    return until(
        lambda: [p for p in descendants(top) if f"-m {module} ".encode() in command_line(p)], 30, f"a running {module}"
    )


def _status(pid: int, name: str) -> int:
    """A number of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
