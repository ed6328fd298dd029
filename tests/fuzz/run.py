"""`make fuzz`: every target (or those that are named) under atheris for FUZZ_SECONDS, one on each core.

Prints a table; exits 1 on any finding. What was found lies in .fuzz/findings/TARGET/, and is printed as the line to add
to tests/fuzz/corpus/TARGET.txt, where `make test` replays it from then on. What the fuzzer learned stays in
.fuzz/corpus/TARGET/ and is where the next run begins.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.support import fuzzing

ROOT = Path(__file__).parents[2]
PLAY = Path(__file__).with_name("play.py")
GRACE_SECONDS = 180
"""For importing, instrumenting and the first walk over the corpus."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one target came to. `output` is what libFuzzer wrote."""

    name: str
    code: int
    executions: int
    per_second: int
    corpus: int
    coverage: int
    findings: tuple[Path, ...]
    output: str


def main(names: list[str], seconds: int, folder: Path) -> int:
    """Run them all; the exit code."""
    unknown = set(names) - set(fuzzing.NAMES)
    if unknown:
        print(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(fuzzing.NAMES)}")
        return 2
    chosen = names or list(fuzzing.NAMES)
    print(f"{len(chosen)} targets, {seconds} s each")
    row = "{:<20}{:>12}{:>10}{:>9}{:>10}  {}"
    print(row.format("target", "executions", "exec/s", "corpus", "coverage", "findings"), flush=True)
    failed: list[Result] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for result in pool.map(lambda name: play(name, seconds, folder), chosen):
            bad = bool(result.findings) or result.code != 0
            said = str(len(result.findings)) if result.findings or not bad else f"ended with {result.code}"
            numbers = (result.executions, result.per_second, result.corpus, result.coverage)
            print(row.format(result.name, *numbers, said), flush=True)
            if bad:
                failed.append(result)
    for result in failed:
        print(f"\n--- {result.name} ---")
        print("\n".join(result.output.splitlines()[-60:]) if not result.findings else _told(result.output))
        for path in result.findings:
            print(f"input: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
            data = path.read_bytes()
            if data:
                print(f"as a line of tests/fuzz/corpus/{result.name}.txt:\n{fuzzing.spelled(data)}")
    return 1 if failed else 0


def play(name: str, seconds: int, folder: Path) -> Result:
    """One target in a process of its own."""
    corpus, findings = folder / "corpus" / name, folder / "findings" / name
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)
    for old in findings.iterdir():
        old.unlink()
    for seed in fuzzing.seeds(name):
        (corpus / sha256(seed).hexdigest()[:16]).write_bytes(seed)
    command = [sys.executable, str(PLAY), name, str(seconds), str(corpus), str(findings)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=seconds + GRACE_SECONDS,
        )
        code, output = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        code, output = -1, (late.stdout or b"").decode(errors="replace") + "\nit did not end in time"
    executions = _last(r"stat::number_of_executed_units: (\d+)", output) or _last(r"^#(\d+)", output)
    return Result(
        name=name,
        code=code,
        executions=executions,
        per_second=_last(r"exec/s: (\d+)", output) or int(executions / (time.monotonic() - began)),
        corpus=sum(1 for _ in corpus.iterdir()),
        coverage=_last(r"cov: (\d+)", output),
        findings=tuple(sorted(findings.iterdir())),
        output=output,
    )


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text, re.MULTILINE)
    return int(found[-1]) if found else 0


def _told(output: str) -> str:
    """The traceback of a finding, or what libFuzzer says where there is none (time, memory)."""
    start = output.find("=== Uncaught Python exception")
    return output[start:].partition("\n==")[0][:6000] if start >= 0 else output[-3000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], int(os.environ.get("FUZZ_SECONDS", "60")), ROOT / ".fuzz"))
