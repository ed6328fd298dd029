"""`make bench`: every engine under one generator and one upstream, in turns; writes bench/RESULTS.md.

    python bench/run.py [ENGINE ...] [--rounds N] [--seconds S] [--workloads ...] [--no-write]

All engines are started first and stay up. A round runs each workload over all engines before the next workload, and
every other round in reverse order, so that a slow minute of the machine meets all of them. Medians of the rounds
are reported. With two processors or more, engines share the last one and generator and upstream the first:
what is compared is the work that one processor does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.engines import ENGINES, Engine, Ground, NotHere  # noqa: E402
from bench.processes import cpu_seconds, memory_bytes  # noqa: E402
from bench.report import WORKLOADS, Measured, Workload, write  # noqa: E402
from bench.upstream import LARGE_BYTES, Upstream  # noqa: E402

BUILD = ROOT / ".bench"
RESULTS = ROOT / "bench" / "RESULTS.md"
WARM_UP_SECONDS = 2.0
"""Of load before the first round, for each engine: fresh Python processes are slow for a moment."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help=f"which (default: all): {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured seconds of each workload in each round")
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--spread", action="store_true", help="let engines use every processor (not for RESULTS.md)")
    parser.add_argument("--no-write", action="store_true", help="print the tables, leave RESULTS.md alone")
    parser.add_argument("--no-install", action="store_true", help="do not ask for missing Debian packages")
    options = parser.parse_args()
    if unknown := set(options.engines) - set(ENGINES):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}")
    if not options.no_install:
        subprocess.run(["sh", str(ROOT / "deploy/bench-packages.sh")], check=False)
    generator = build_generator()
    if generator is None:
        return 2
    with scratch_folder() as folder, ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))
        apart = len(cores) > 1 and shutil.which("taskset") is not None
        front, back = (["taskset", "-c", str(cores[0])], ["taskset", "-c", str(cores[-1])]) if apart else ([], [])
        upstream = stack.enter_context(Upstream(folder / "upstream", front))
        ground = Ground(upstream=upstream, folder=folder, pin=() if options.spread else tuple(back))
        engines, absent = start(stack, ground, options.engines or list(ENGINES))
        runner = Runner(upstream, [*front, str(generator)], front, options.seconds)
        for engine in engines:
            runner.run(engine, Workload(title="", clients=8), seconds=WARM_UP_SECONDS)
        measured: list[Measured] = []
        for number in range(options.rounds):
            for name in options.workloads:
                for engine in engines if number % 2 == 0 else reversed(engines):
                    if (found := runner.measure(engine, name)) is not None:
                        measured.append(found)
                        print(found.line(), flush=True)
        text = write(measured, absent, software=upstream.software, rounds=options.rounds, seconds=options.seconds)
    (BUILD / "results.json").write_text(json.dumps([found.as_dict() for found in measured], indent=1))
    print(text)
    if not (options.no_write or options.spread or options.engines):
        RESULTS.write_text(text)
    return 0


def build_generator() -> Path | None:
    """Compile load.c if it is newer than what was built; None (and a sentence) where that is not possible."""
    BUILD.mkdir(exist_ok=True)
    source, program = ROOT / "bench" / "load.c", BUILD / "load"
    if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
        return program
    compiler = shutil.which("cc")
    if compiler is None:
        say("there is no C compiler (cc): the generator cannot be built; on Debian install gcc and libssl-dev")
        return None
    command = [compiler, "-O2", "-Wall", "-o", str(program), str(source), "-lssl", "-lcrypto"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        say("the generator does not compile; on Debian install libssl-dev:\n" + built.stderr[:600])
        return None
    return program


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that other uids may enter (our processes and Squid give up root), gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="exeat-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def start(stack: ExitStack, ground: Ground, names: list[str]) -> tuple[list[Engine], dict[str, str]]:
    """Start the engines; those that cannot be come back with the reason."""
    engines, absent = [], {}
    for name in names:
        try:
            engines.append(stack.enter_context(ENGINES[name](ground)))
            say(f"{name} is up")
        except NotHere as reason:
            absent[name] = str(reason)
            say(f"{name} is left out: {reason}")
    return engines, absent


class Runner:
    """Runs the generator against one engine."""

    def __init__(self, upstream: Upstream, generator: list[str], front: list[str], seconds: float) -> None:
        self._upstream = upstream
        self._generator = generator
        self._front = front
        self._seconds = seconds

    def measure(self, engine: Engine, name: str) -> Measured | None:
        """One workload once; None where the engine has no such workload."""
        workload = WORKLOADS[name]
        if engine.http2 and workload.fresh:
            return None
        before = cpu_seconds(engine.pid)
        answer = self.run(engine, workload)
        used = cpu_seconds(engine.pid) - before
        count = answer["answers_ever"]
        return Measured(
            engine=engine.name,
            workload=name,
            per_second=answer["answers"] / answer["seconds"],
            megabytes_per_second=answer["bytes"] / answer["seconds"] / 1e6,
            p50_ms=answer["p50_ms"],
            p99_ms=answer["p99_ms"],
            cpu_per_1000=used / count * 1000 if count and engine.pid else None,
            memory_mb=memory_bytes(engine.pid) / 1e6 if engine.pid else None,
            errors=answer["errors"],
            first_error=answer["first_error"],
        )

    def run(self, engine: Engine, workload: Workload, seconds: float | None = None) -> dict:
        """The generator's answer."""
        seconds = seconds or self._seconds * workload.stretch
        path = "/large" if workload.large else "/small"
        warm = 0.0 if workload.large else 0.3
        if engine.http2:
            script = str(ROOT / "bench" / "load_h2.js")
            words = [engine.port, self._upstream.port, engine.host, path, engine.ca_file, engine.connect_header]
            words += [workload.clients, warm, seconds]
            command = [*self._front, "node", script, *map(str, words)]
        else:
            command = [*self._generator, "--to", str(self._upstream.port), "--host", engine.host, "--path", path]
            command += ["--ca", str(engine.ca_file), "--clients", str(workload.clients)]
            command += ["--warm", str(warm), "--seconds", str(seconds)]
            command += ["--proxy", str(engine.port)] if engine.port else []
            command += ["--connect-header", engine.connect_header] if engine.connect_header else []
            command += ["--header", engine.header] if engine.header else []
            command += ["--fresh"] if workload.fresh else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"the generator failed: {done.stderr[:400]}")
        return json.loads(done.stdout)


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    assert LARGE_BYTES == 50_000_000  # the report's column says 50 MB
    sys.exit(main())
