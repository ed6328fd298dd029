"""What was measured, and the page that says it: bench/RESULTS.md."""

from __future__ import annotations

import datetime
import os
import platform
import ssl
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.engines import TITLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the generator does. `stretch` multiplies the measured seconds."""

    title: str
    clients: int
    fresh: bool = False
    large: bool = False
    stretch: float = 1.0


WORKLOADS: Mapping[str, Workload] = {
    "c1": Workload(title="1 kB, 1 client", clients=1),
    "c32": Workload(title="1 kB, 32 clients", clients=32, stretch=1.5),
    "new": Workload(title="new connection for each request, 16 clients", clients=16, fresh=True),
    "large": Workload(title="50 MB, 2 clients", clients=2, large=True, stretch=3.0),
}
YARDSTICKS = ("direct", "tunnel", "mitmdump", "squid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One engine under one workload, once. `cpu_per_1000` and memory cover the engine's whole process tree."""

    engine: str
    workload: str
    per_second: float
    megabytes_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_per_1000: float | None
    memory_mb: float | None
    errors: int
    first_error: str

    def line(self) -> str:
        """For a person who watches."""
        cpu = "" if self.cpu_per_1000 is None else f"{self.cpu_per_1000:8.3f} cpu-s/1000"
        bad = f"  {self.errors} errors ({self.first_error})" if self.errors else ""
        return (
            f"{self.engine:12} {self.workload:6} {self.per_second:9.1f}/s {self.megabytes_per_second:8.1f} MB/s"
            f" {self.p50_ms:8.2f}/{self.p99_ms:.2f} ms {cpu}{bad}"
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Table:
    """Medians over the rounds."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._measured = measured
        self.engines = [name for name in TITLES if any(found.engine == name for found in measured)]

    def value(self, engine: str, workload: str, field: str) -> float | None:
        """The median, or None where it was not measured or half of the answers were errors."""
        rows = [found for found in self._measured if (found.engine, found.workload) == (engine, workload)]
        values = [getattr(found, field) for found in rows]
        values = [value for value in values if value is not None]
        return median(values) if values else None

    def ratio(self, engine: str, other: str, workload: str, field: str) -> float | None:
        ours, theirs = self.value(engine, workload, field), self.value(other, workload, field)
        return ours / theirs if ours is not None and theirs else None

    def errors(self) -> list[str]:
        return [
            f"{found.engine}, {found.workload}: {found.errors} ({found.first_error})"
            for found in self._measured
            if found.errors
        ]


def write(
    measured: Sequence[Measured], absent: Mapping[str, str], *, software: str, rounds: int, seconds: float
) -> str:
    """The page, as Markdown."""
    table = Table(measured)
    parts = [
        "# Benchmark results\n",
        "Written by `make bench`; do not edit. `bench/README.md` says what is measured and what it does not show.\n",
        *_setting(software, rounds, seconds),
        "\n## Ratios\n",
        "Requests a second with 32 clients (1 kB of JSON, TLS inside CONNECT, kept-alive connections), as a multiple "
        "of each yardstick. Above 1 is faster.\n",
        _ratios(table, "c32", "per_second"),
        "\nProcessor seconds for each request under the same load, as a multiple. Below 1 is cheaper. Ours counts "
        "worker, executor, vault, auditor and supervisor.\n",
        _ratios(table, "c32", "cpu_per_1000"),
        "\nNew connections (TCP, CONNECT, TLS on both sides) a second, and their processor seconds:\n",
        _ratios(table, "new", "per_second"),
        "",
        _ratios(table, "new", "cpu_per_1000"),
        "\nDownload of 50 MB, MB/s:\n",
        _ratios(table, "large", "megabytes_per_second"),
        "\n## Figures\n",
        "Medians over the rounds. They say something about this machine and minute only.\n",
        _figures(table),
        "",
    ]
    if absent:
        parts += ["\n## Left out\n", *(f"- {TITLES[name]}: {why}" for name, why in absent.items())]
    if errors := table.errors():
        parts += ["\n## Errors\n", *(f"- {error}" for error in errors[:20])]
    return "\n".join(parts).rstrip() + "\n"


def _setting(software: str, rounds: int, seconds: float) -> list[str]:
    cpu = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line), "?"
    )
    squid = _first_line(["/usr/sbin/squid", "-v"])
    commit = _first_line(["git", "rev-parse", "--short", "HEAD"])
    versions = {
        "Python": platform.python_version(),
        "OpenSSL": ssl.OPENSSL_VERSION.split()[1],
        "uvloop": version("uvloop"),
        "mitmproxy": version("mitmproxy"),
        "Squid": squid.rpartition(" ")[2] or "not installed",
        "upstream": software,
    }
    load = os.getloadavg()[0]
    return [
        f"- Date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC; commit {commit or 'unknown'}",
        f"- Machine: {cpu}, {os.cpu_count()} processors, Linux {platform.release()}; "
        f"load average {load:.1f} at the end (above 2: others worked here too)",
        f"- Versions: {', '.join(f'{name} {value}' for name, value in versions.items())}",
        f"- {rounds} rounds in turns, {seconds:g} s a workload; engines on one processor, generator and upstream on "
        "another",
    ]


def _ratios(table: Table, workload: str, field: str) -> str:
    yardsticks = [name for name in YARDSTICKS if name in table.engines]
    rows = []
    for engine in table.engines:
        ratios = [table.ratio(engine, other, workload, field) for other in yardsticks]
        if any(ratio is not None for ratio in ratios):
            rows.append([TITLES[engine], *(_short(ratio) for ratio in ratios)])
    return _markdown(["", *(f"x {name}" for name in yardsticks)], rows)


_COLUMNS: Sequence[tuple[str, Callable[[Table, str], float | None]]] = (
    ("req/s, 1 client", lambda table, name: table.value(name, "c1", "per_second")),
    ("p50 ms", lambda table, name: table.value(name, "c1", "p50_ms")),
    ("req/s, 32 clients", lambda table, name: table.value(name, "c32", "per_second")),
    ("p50 ms", lambda table, name: table.value(name, "c32", "p50_ms")),
    ("p99 ms", lambda table, name: table.value(name, "c32", "p99_ms")),
    ("CPU s/1000", lambda table, name: table.value(name, "c32", "cpu_per_1000")),
    ("new/s", lambda table, name: table.value(name, "new", "per_second")),
    ("CPU s/1000 new", lambda table, name: table.value(name, "new", "cpu_per_1000")),
    ("50 MB, MB/s", lambda table, name: table.value(name, "large", "megabytes_per_second")),
    ("memory MB", lambda table, name: table.value(name, "c32", "memory_mb")),
)


def _figures(table: Table) -> str:
    rows = [[TITLES[name], *(_short(read(table, name)) for _, read in _COLUMNS)] for name in table.engines]
    return _markdown(["", *(title for title, _ in _COLUMNS)], rows)


def _markdown(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _read(path: str) -> str:
    return Path(path).read_text(errors="replace")


def _first_line(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout
    except OSError:
        return ""
    return said.partition("\n")[0].strip()
