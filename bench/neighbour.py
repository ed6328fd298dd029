"""`make bench-neighbour`: what one sandbox's abuse costs another one; writes bench/NEIGHBOUR.md.

    python bench/neighbour.py [ABUSE ...] [--rounds N] [--seconds S] [--no-write]

One gateway, two sandboxes. A sends ordinary requests at an ordinary pace, plain ones and credentialed ones, first
alone, then while B abuses the gateway in one of the ways of bench/abuse.py; the two measurements lie next to each
other, so that a slow minute of the machine meets both. Alone means without abuse, but with the abuser's processor as
busy as it will be: what a client loses to a busy machine is no fault of the gateway's. A row passes if A's p99 under
abuse is at most twice what it is alone, or 20 ms, whichever is larger. A, the abuser (at a lower priority) and
the origins share one processor; the gateway may use every one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.abuse import ABUSES  # noqa: E402
from bench.ahead import session_nice, weigh  # noqa: E402
from bench.processes import tree  # noqa: E402
from bench.run import build_generator, say, scratch_folder  # noqa: E402
from bench.upstream import ADDRESS, NAMES, Upstream, await_port, free_port  # noqa: E402
from tests.support.authority import Authority  # noqa: E402
from tests.support.gateway import Box, TestGateway  # noqa: E402

PAGE = ROOT / "bench" / "NEIGHBOUR.md"
LANES = ("plain", "credentialed")
PAUSE_MS = 20.0
CLIENTS = 4
"""Of A in each lane, each with a pause between two requests: some two hundred requests a second in all."""
SETTLE_SECONDS = 1.0
"""Of abuse before it is measured."""
BOUND_MS = 20.0
FACTOR = 2.0
AHEAD, BEHIND = (-15, -5) if os.geteuid() == 0 else (0, 19)
"""Nice values: the gateway, A and its origin come before whatever else runs on the machine, and the abuser and the
origin that helps it between the two."""


def _niced(nice: int) -> list[str]:
    return [sys.executable, str(ROOT / "bench" / "ahead.py"), str(nice)]


NICE = (_niced(AHEAD), _niced(BEHIND))
"""Words before commands."""
REAL_TIME = (["chrt", "-r", "5"], _niced(BEHIND))
"""The same on a machine where others work: they cannot get in the way."""
SINK = "sink.bench.test"
SECRET = "bench-secret-0f1e2d3c4b5a69788796a5b4"

POLICY = """
roles:
  agent:
    allow:
      - {name: read, host: plain.bench.test, methods: [GET], paths: ["/small", "/large"]}
      - {name: keyed, host: keyed.bench.test, methods: [GET], paths: ["/{file}"], credential: keyed}
      - {name: two, host: h2.bench.test, methods: [GET], paths: ["/small"], protocol: h2}
      - {name: wild, host: "*.wild.bench.test", methods: [GET], paths: ["/**"]}
      - {name: put, host: sink.bench.test, methods: [PUT], paths: ["/upload"], effect: write}
      - {name: socket, host: sink.bench.test, methods: [GET], paths: ["/socket"], websocket: true}
      - name: ask
        host: plain.bench.test
        methods: [POST]
        paths: [/ask]
        body: {json: {op: [read], id: string}, max: 256KiB}
        effect: read
      - {service: [pypi, npm], operations: [read]}
    deny:
      - {host: "**.internal.test"}
"""
CREDENTIALS = """
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
HOSTILE = {
    "percent": b"%41" * 21_845,
    "unicode": b"\\u002541" * 8_192,
    "slashes": b"\\/" * 32_768,
    "packed": b"%5c%2f" * 10_922,
}


@dataclass(slots=True, kw_only=True)
class Taker:
    """The origin of bench/sink.py, as tests.support.gateway asks for one."""

    names: tuple[str, ...]
    port: int
    authority: Authority
    tls: bool = True
    address: str = ADDRESS
    entries: dict[str, str] = field(default_factory=dict)


Priorities = tuple[list[str], list[str]]
Times = dict[str, dict[str, float]]
"""By lane: p50_ms, p99_ms, answers, errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One abuse in one round: A's times in milliseconds by lane, and what the abuser counted."""

    abuse: str
    alone: Mapping[str, Mapping[str, float]]
    under: Mapping[str, Mapping[str, float]]
    counted: Mapping[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("abuses", nargs="*", help=f"which (default: all): {', '.join(ABUSES)}")
    parser.add_argument("--rounds", type=int, default=3, help="odd, so that the median is one of them")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--realtime", action="store_true", help="as root: before all that others run here")
    parser.add_argument("--no-write", action="store_true", help="print the table, leave the page alone")
    options = parser.parse_args()
    if unknown := set(options.abuses) - set(ABUSES):
        parser.error(f"unknown abuses: {', '.join(sorted(unknown))}")
    generator = build_generator()
    if generator is None:
        return 2
    measured: list[Measured] = []
    with scratch_folder() as folder, ExitStack() as stack:
        scene = stack.enter_context(Scene.started(folder, generator, REAL_TIME if options.realtime else NICE))
        for _ in range(options.rounds):
            for name in options.abuses or ABUSES:
                measured.append(scene.measure(name, options.seconds))
                say(line_of(measured[-1]))
        faults = scene.faults()
    text = page(measured, options.rounds, options.seconds, realtime=options.realtime)
    print(text)
    if faults:
        say("the gateway said:\n" + faults)
    if not (options.no_write or options.abuses):
        PAGE.write_text(text)
    return 0 if all(passes(measured, name, lane) for name, lane in rows(measured)) else 1


class Scene:
    """The gateway, its two sandboxes and the origins."""

    _gateway: TestGateway
    _a: Box

    def __init__(self, generator: list[str], abuser: list[str], upstream: Upstream, sink: int) -> None:
        self._generator = generator
        self._abuser = abuser
        self._upstream = upstream
        self._sink = sink

    @classmethod
    @contextmanager
    def started(cls, folder: Path, generator: Path, priorities: Priorities) -> Iterator[Scene]:
        ahead, behind = priorities
        cores = sorted(os.sched_getaffinity(0))
        apart = len(cores) > 1 and shutil.which("taskset") is not None
        front = ["taskset", "-c", str(cores[0])] if apart else []
        with Upstream(folder / "upstream", [*front, *ahead], names=(*NAMES, SINK)) as upstream, ExitStack() as stack:
            for name, text in HOSTILE.items():
                (upstream.folder / "www" / name).write_bytes(text[: 1 << 16])
            sink = free_port()
            command = [*front, *behind, sys.executable, "-m", "bench.sink", str(upstream.folder), str(sink)]
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            await_port(sink, process)
            taker = Taker(names=(SINK,), port=sink, authority=upstream.authority)
            upstream.names = NAMES
            scene = cls(
                [*front, *ahead, str(generator)], [*front, *behind, sys.executable, "-m", "bench.abuse"], upstream, sink
            )
            ours = TestGateway(
                folder / "gateway",
                policy=POLICY,
                credentials=CREDENTIALS,
                secrets={"keyed": SECRET},
                origins=[upstream, taker],
                prefix=ahead,
            )
            scene._gateway = stack.enter_context(ours)
            assert ours.process is not None
            sessions = {os.getsid(pid) for pid in tree(ours.process.pid)}  # each of its processes has one of its own
            for session in sessions:
                weigh(session, AHEAD + session_nice(session))  # what it chose itself counts among them
            scene._a = ours.sandbox(ttl="1h")
            scene._alone("plain", 1.0)
            scene._alone("credentialed", 1.0)
            yield scene

    def measure(self, abuse: str, seconds: float) -> Measured:
        """A while the abuser only keeps its processor busy, then A under `abuse`; each time of a new sandbox."""
        alone, _ = self._beside("nothing", seconds)
        under, counted = self._beside(abuse, seconds)
        return Measured(abuse=abuse, alone=alone, under=under, counted=counted)

    def _beside(self, abuse: str, seconds: float) -> tuple[Times, dict[str, int]]:
        box = self._gateway.sandbox(ttl="1h")
        ports = dict.fromkeys(NAMES, self._upstream.port) | {SINK: self._sink}
        told = {"proxy": self._gateway.port, "token": box.token, "ca": str(self._gateway.client_files / "ca.pem")}
        told |= {"key": box.placeholders["BENCH_KEY"], "ports": ports}
        process = subprocess.Popen(
            [*self._abuser, abuse], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            process.stdout.readline()  # it has begun
            time.sleep(SETTLE_SECONDS)
            times = self._both(seconds)
            if process.poll() is not None:
                raise RuntimeError(f"the abuser ended by itself: {abuse}")
        finally:
            process.kill()
            said, _ = process.communicate()
            self._gateway.admin.end_sandbox(box.id)
        counted = json.loads(said.splitlines()[-1]) if said.splitlines() else {}
        return times, counted

    def faults(self) -> str:
        """What the gateway's processes complained of."""
        return self._gateway.errors()[-2000:]

    def _alone(self, lane: str, seconds: float) -> dict[str, float]:
        return _result(self._load(lane, seconds))

    def _both(self, seconds: float) -> dict[str, dict[str, float]]:
        running = {lane: self._load(lane, seconds) for lane in LANES}
        return {lane: _result(process) for lane, process in running.items()}

    def _load(self, lane: str, seconds: float) -> subprocess.Popen[str]:
        host = "plain.bench.test" if lane == "plain" else "keyed.bench.test"
        words = ["--to", str(self._upstream.port), "--host", host, "--path", "/small"]
        words += ["--ca", str(self._gateway.client_files / "ca.pem"), "--proxy", str(self._gateway.port)]
        words += ["--connect-header", f"Proxy-Authorization: Bearer {self._a.token}"]
        words += ["--header", f"X-Api-Key: {self._a.placeholders['BENCH_KEY']}"] if lane == "credentialed" else []
        words += ["--clients", str(CLIENTS), "--pause", str(PAUSE_MS), "--warm", "0.5", "--seconds", str(seconds)]
        return subprocess.Popen([*self._generator, *words], stdout=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen[str]) -> dict[str, float]:
    said, _ = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError("the generator failed")
    found = json.loads(said)
    if found["errors"]:
        say(f"the neighbour met errors: {found['errors']} ({found['first_error']})")
    return {name: float(found[name]) for name in ("p50_ms", "p99_ms", "answers", "errors")}


# --- the page ------------------------------------------------------------------------------------------------------


def rows(measured: list[Measured]) -> list[tuple[str, str]]:
    return [(name, lane) for name in dict.fromkeys(found.abuse for found in measured) for lane in LANES]


def value(measured: list[Measured], name: str, lane: str, when: str, field: str) -> float:
    """The median over the rounds."""
    return median(getattr(found, when)[lane][field] for found in measured if found.abuse == name)


def passes(measured: list[Measured], name: str, lane: str) -> bool:
    alone, under = (value(measured, name, lane, when, "p99_ms") for when in ("alone", "under"))
    errors = value(measured, name, lane, "under", "errors")
    answered = min(value(measured, name, lane, when, "answers") for when in ("alone", "under"))
    return under <= max(FACTOR * alone, BOUND_MS) and not errors and answered > 0


def line_of(found: Measured) -> str:
    both = " ".join(
        f"{lane} {found.alone[lane]['p50_ms']:.1f}/{found.alone[lane]['p99_ms']:.1f} ->"
        f" {found.under[lane]['p50_ms']:.1f}/{found.under[lane]['p99_ms']:.1f} ms;"
        for lane in LANES
    )
    return f"{found.abuse:16} {both} {dict(found.counted)}"


def page(measured: list[Measured], rounds: int, seconds: float, *, realtime: bool) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    lines = [
        "# A neighbour under abuse",
        "",
        "Written by `make bench-neighbour`; do not edit. `bench/README.md` says how it is measured.",
        "",
        f"- Date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC; commit {commit or 'unknown'}",
        f"- Machine: {os.cpu_count()} processors, Linux {platform.release()}, Python {platform.python_version()}; "
        f"load average {os.getloadavg()[0]:.1f} at the end (above 2: others worked here too)",
        "- Gateway, neighbour and its origin ran as real-time processes: the kernel's own threads, which bring "
        "records to the disk, come last then"
        if realtime
        else "- Ordinary scheduling",
        f"- Medians of {rounds} rounds of {seconds:g} s; within: p99 at most {FACTOR:g} x alone, or {BOUND_MS:g} ms",
        "",
        "| abuse by another | lane | p50 alone | p99 alone | p50 under abuse | p99 under abuse | ratio | within |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, lane in rows(measured):
        figures = [
            value(measured, name, lane, when, field) for when in ("alone", "under") for field in ("p50_ms", "p99_ms")
        ]
        verdict = "yes" if passes(measured, name, lane) else "**no**"
        ratio = figures[3] / figures[1] if figures[1] else 0.0
        cells = [name.replace("_", " "), lane, *(f"{figure:.1f}" for figure in figures), f"{ratio:.1f}", verdict]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "What each abuse is: `bench/abuse.py`. Times in milliseconds.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
