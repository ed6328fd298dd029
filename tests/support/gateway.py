"""A whole gateway with real processes, for integration tests: files in a folder of its own, `exeat up`, sandboxes.

with TestGateway(tmp_path, policy=POLICY, credentials=CREDENTIALS, secrets={"api": "..."} ) as gateway:
    box = gateway.sandbox()                       # a token on the shared listener
    box.curl("https://api.test:8443/x")           # a real client, with the product's environment
    gateway.awaited(event="request.outcome", sandbox=box.id)   # what the log says, once it does
    gateway.run("sh", "-c", "...")                # `exeat run` against this gateway
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from audit.search import Filter, search
from broker.admin.client import AdminClient
from exeat.commands.setup import write_installation
from exeat.environment import client_environment
from tests.support.origins import Origin
from tests.support.waiting import until

type Test = Callable[[dict[str, Any]], bool]

LOWEST_PORT = 10_240
FILTERS = frozenset(one.name for one in fields(Filter))
EXEAT = str(Path(sys.executable).parent / "exeat")
PATH = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")


def destinations(*origins: Origin) -> str:
    """The `destinations:` block that a user would write for loopback origins (each host once)."""
    lines = ["destinations:"]
    for origin in origins:
        for name in origin.names:
            more = f", ca: file:{origin.names[0]}.pem" if origin.tls else ", scheme: http"
            if name in origin.entries:
                more += f", {origin.entries[name]}"
            bits = 128 if ":" in origin.address else 32
            place = f'addresses: ["{origin.address}/{bits}"], resolve: ["{origin.address}"], port: {origin.port}'
            lines.append(f"  {name}: {{{place}{more}}}")
    return "\n".join(lines) + "\n"


@dataclass
class Box:
    """One sandbox of the gateway, reached over the shared listener with its token."""

    gateway: TestGateway
    answer: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.answer["id"])

    @property
    def token(self) -> str:
        return str(self.answer["token"])

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Variable name -> placeholder."""
        return dict(self.answer["env"])

    @property
    def proxy_url(self) -> str:
        return f"http://session:{self.token}@127.0.0.1:{self.gateway.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What `exeat env` gives to a client, and nothing of the test's own."""
        files = self.gateway.client_files
        variables = client_environment(
            proxy_url=self.proxy_url, ca_file=str(files / "ca.pem"), bundle_file=str(files / "bundle.pem")
        )
        return variables | dict(self.placeholders) | {"PATH": PATH, "HOME": str(self.gateway.home), "LANG": "C.UTF-8"}

    def command(self, *argv: str, env: Mapping[str, str] | None = None, **options: Any) -> Completed:
        """Run a client with the product's environment; text output, two minutes at most."""
        merged = self.environment | dict(env or {})
        return completed(subprocess.run(argv, env=merged, capture_output=True, timeout=120, check=False, **options))

    def curl(self, *arguments: str, env: Mapping[str, str] | None = None) -> Completed:
        return self.command("curl", "-sS", "--max-time", "60", *arguments, env=env)

    def connect(self) -> socket.socket:
        """A raw connection to the proxy."""
        return socket.create_connection(("127.0.0.1", self.gateway.port), timeout=60)


@dataclass
class Completed:
    """What a command did; `out` and `err` as text with replacement characters."""

    code: int
    out: str
    err: str
    raw: bytes = field(repr=False, default=b"")

    def json(self) -> Any:
        return json.loads(self.out)


def completed(result: subprocess.CompletedProcess[bytes]) -> Completed:
    return Completed(
        code=result.returncode,
        out=result.stdout.decode(errors="replace"),
        err=result.stderr.decode(errors="replace"),
        raw=result.stdout,
    )


class TestGateway:
    """`exeat up` over files in `folder`. A context manager; everything it started is gone afterwards."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        *,
        policy: str,
        credentials: str = "version: 1\ncredentials: {}\n",
        secrets: Mapping[str, str] | None = None,
        origins: Iterable[Origin] = (),
        settings: str = "",
        listen: str | None = None,
        options: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Iterable[str] = (),
        run_prefix: Iterable[str] = (),
        confined: bool = False,
    ) -> None:
        """`policy` is the part after `version:` and `destinations:`; those are written from `origins`.

        `secrets` are put into the store after the start. `settings` are further lines of exeat.yaml.
        `prefix` are words before `exeat up`, which exec it in other surroundings; `run_prefix`: before `exeat run`.
        `confined`: the policy stays as it is, so that only what `exeat run` proves arms a credential.
        """
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # pytest's folder is 0700, and started by root the vault has a uid of its own
        self.folder = folder
        self.config = folder / "config"
        self.home = folder / "home"
        self.state = folder / "state"
        self.run_folder = folder / "run"
        self.port = 0
        self.log = self.state / "log"
        self._origins = tuple(origins)
        self._secrets = dict(secrets or {})
        self._options = tuple(options)
        self._environment = dict(environment or {})
        self._prefix = tuple(prefix)
        self.run_prefix = tuple(run_prefix)
        self._confined = confined
        self.process: subprocess.Popen[bytes] | None = None
        self.home.mkdir()
        self.config.mkdir()
        for origin in self._origins:
            if origin.tls:
                (self.config / f"{origin.names[0]}.pem").write_text(origin.authority.pem)
        self._listen = listen or f"127.0.0.1:{free_port()}"
        self.port = int(self._listen.rpartition(":")[2]) if self._listen != "none" else 0
        text = (
            f'version: 1\nlisten: "{self._listen}"\nstate: {self.state}\nrun: {self.run_folder}\n'
            "policy: policy.yaml\ncredentials: credentials.yaml\nkey: {file: keys/store.key}\n" + settings
        )
        write_installation(
            self.config,
            {
                "policy.yaml": self.policy_text(policy),
                "credentials.yaml": textwrap.dedent(credentials),
                "exeat.yaml": text,
            },
        )

    def policy_text(self, policy: str) -> str:
        places = destinations(*self._origins) if self._origins else ""
        rules = textwrap.dedent(policy)
        return "version: 1\n" + places + (rules if self._confined else unconfined(rules))

    @property
    def settings_file(self) -> Path:
        return self.config / "exeat.yaml"

    @property
    def client_files(self) -> Path:
        return self.run_folder / "client"

    @property
    def admin(self) -> AdminClient:
        return AdminClient(self.run_folder / "admin.sock")

    def __enter__(self) -> TestGateway:
        self.start()
        for name, value in self._secrets.items():
            self.admin.add_secret(name, value.encode(), owner="tests", scrub=len(value) >= 12)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start `exeat up` and wait for its line; AssertionError with its output where it does not come."""
        environment = {"PATH": PATH, "HOME": str(self.home), "LANG": "C.UTF-8"} | self._environment
        with (self.folder / "up.err").open("ab") as errors:
            self.process = subprocess.Popen(
                [*self._prefix, EXEAT, "up", "--config", str(self.settings_file), *self._options],
                env=environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert b"exeat is up" in line, self.errors() + line.decode()

    def errors(self) -> str:
        """What the gateway's processes wrote to standard error."""
        path = self.folder / "up.err"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it and return its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None
        return code

    def sandbox(self, role: str = "agent", **options: Any) -> Box:
        options.setdefault("ttl", "10m")
        return Box(self, self.admin.create_sandbox(role, **options))

    def write_policy(self, policy: str) -> None:
        """Replace policy.yaml; `reload` puts it in force."""
        (self.config / "policy.yaml").write_text(self.policy_text(policy))

    def reload(self) -> dict[str, Any]:
        return self.admin.reload_policy()

    def records(self, **wanted: Any) -> list[dict[str, Any]]:
        """The log's records that match now, in order: conditions of `audit.search.Filter`, other fields by value.

        Only for what is certainly there, or to compare with later: a refusal and an intent are written before the
        client hears of them, an outcome may be written after. Otherwise ask `awaited` or `settled`.
        """
        conditions = {name: wanted.pop(name) for name in FILTERS & wanted.keys()}
        found = (dict(record) for record in search(self.log, Filter(**conditions)))
        return [record for record in found if all(record.get(name) == value for name, value in wanted.items())]

    def awaited(self, count: int = 1, where: Test = lambda _: True, **wanted: Any) -> list[dict[str, Any]]:
        """The records that match, in order, once there are `count` or more. AssertionError where they do not come."""

        def enough() -> tuple[list[dict[str, Any]]] | None:
            found = list(filter(where, self.records(**wanted)))
            return (found,) if len(found) >= count else None

        try:
            return until(enough)[0]
        except AssertionError:
            raise AssertionError(f"{count} wanted of {wanted}; the log ends with {self.records()[-12:]}") from None

    def settled(self, count: int = 1, **wanted: Any) -> list[dict[str, Any]]:
        """`awaited`, once besides every request that has a record among them is over: no more will come of it.

        With `count` 0: what there is now, to compare with later.
        """

        def over() -> tuple[list[dict[str, Any]]] | None:
            found = self.records(**wanted)
            events: dict[str, list[str]] = {one["request_id"]: [] for one in found if "request_id" in one}
            for record in self.records():
                if record.get("request_id") in events:
                    events[record["request_id"]].append(record["event"])
            return (found,) if len(found) >= count and all(map(_over, events.values())) else None

        try:
            return until(over)[0]
        except AssertionError:
            raise AssertionError(f"not over: {wanted}; the log ends with {self.records()[-12:]}") from None

    def exeat(self, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> Completed:
        """Run the command against this gateway: `gateway.exeat("status")`."""
        environment = {"PATH": PATH, "HOME": str(self.home), "LANG": "C.UTF-8"} | dict(env or {})
        options.setdefault("cwd", self.home)
        argv = [EXEAT, arguments[0], *_config_position(arguments[1:], str(self.settings_file))]
        options |= {"capture_output": True, "timeout": 120, "check": False, "stdin": subprocess.DEVNULL}
        return completed(subprocess.run(argv, env=environment, **options))

    def run(self, *argv: str, options: Iterable[str] = (), env: Mapping[str, str] | None = None) -> Completed:
        """`exeat run` of `argv` in a sandbox of this gateway."""
        environment = {"PATH": PATH, "HOME": str(self.home), "LANG": "C.UTF-8"} | dict(env or {})
        command = [*self.run_prefix, EXEAT, "run", "--config", str(self.settings_file), *options, "--", *argv]
        return completed(
            subprocess.run(
                command,
                env=environment,
                cwd=self.home,
                capture_output=True,
                timeout=120,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        )


def _over(events: list[str]) -> bool:
    """Whether the records of one request are all there: an outcome for each intent, the broker's word on a hand-off."""
    begun = [event.replace("intent", "outcome") for event in events if event.endswith(".intent")]
    answered = "request.handoff" not in events or {"broker.outcome", "broker.refused", "request.refused"} & set(events)
    return bool(answered) and all(events.count(event) >= begun.count(event) for event in begun)


def unconfined(policy: str) -> str:
    """`policy` with a boundary in every role, where it names credentials: sandboxes of tests are not confined.

    Roles must be written in block style. A policy that states a boundary anywhere stays as it is.
    """
    if "credential: " not in policy or "boundary: " in policy:
        return policy
    head, roles, rest = policy.partition("roles:\n")
    block = re.match(r"(?:(?: .*|#.*)?\n)*", rest)
    end = 0 if block is None else block.end()
    stated = "    boundary: {external: tests, reason: the tests confine nothing}\n"
    return head + roles + re.sub(r"(?m)^(  [\w-]+:\n)", r"\1" + stated, rest[:end]) + rest[end:]


_ports = itertools.count(random.SystemRandom().randrange(1 << 20))


def free_port() -> int:
    """A port of 127.0.0.1 that is free, for who binds it himself, sooner or later.

    None of those that the kernel gives away: a connection of somebody else could have it by then.
    """
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in itertools.islice(_ports, 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", LOWEST_PORT + number % (below - LOWEST_PORT)))
            return int(probe.getsockname()[1])
    raise AssertionError("no port is free")


def _config_position(arguments: tuple[str, ...], file: str) -> list[str]:
    """Groups take --config after their sub-command: `sandbox list --config F`."""
    words = list(arguments)
    position = 1 if words and not words[0].startswith("-") else 0
    return [*words[:position], "--config", file, *words[position:]]
