"""`make attacks`: plays every case at every entry point and prints the table; exit 1 on any hole.

python tests/attacks/table.py [ID...]      only cases whose number begins like one of these
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import yaml

from tests.support.attackdata import COVERAGE, FOLDER, Case, load
from tests.support.entrypoints import ENTRY_POINTS, available
from tests.support.ground import Ground
from tests.support.scoring import Field

WIDTH = 9


def main(wanted: list[str]) -> int:
    """Play, print, and say how many holes there are."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # origins that write to whoever has left say so
    cases = [case for case in load() if not wanted or case.id.startswith(tuple(wanted))]
    points = [name for name in ENTRY_POINTS if available(name)]
    held: dict[tuple[str, str], int] = defaultdict(int)
    played: dict[tuple[str, str], int] = defaultdict(int)
    holes: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        Path(folder).chmod(0o755)
        with Ground(Path(folder)) as ground:
            field = Field(ground)
            for entry in points:
                for case in cases:
                    if entry not in case.at:
                        continue
                    key = (number_of(case), entry)
                    played[key] += 1
                    try:
                        field.play(case, entry)
                    except Exception as error:
                        holes.append(f"{case.name} at {entry}: {error or type(error).__name__}")
                    else:
                        held[key] += 1
            try:
                ground.verify()
            except AssertionError as error:
                holes.append(f"the log does not verify: {error}")
    print_table(points, played, held)
    for hole in holes:
        print(f"\nHOLE {hole[:2000]}")
    attacks = sum(count for (number, _), count in played.items() if not is_control(number))
    if not wanted:
        elsewhere = sorted(
            set(yaml.safe_load((FOLDER / COVERAGE).read_text("utf-8"))["tests"]) - {n for n, _ in played}
        )
        print(f"Played by tests of `make test` alone (tests/attacks/coverage.yaml): {' '.join(elsewhere)}")
    kinds = len({number_of(case) for case in cases if not is_control(case.id)})
    print(
        f"{attacks} attempts of {kinds} attacks and {sum(played.values()) - attacks} controls at {len(points)} entry "
        f"points in {time.monotonic() - started:.0f} s; each was followed by a request of a second sandbox.\n"
        f"Holes: {len(holes)}"
    )
    return 1 if holes else 0


def print_table(points: list[str], played: dict[tuple[str, str], int], held: dict[tuple[str, str], int]) -> None:
    """One row for each attack: how many inputs were stopped, of how many where not all were. Controls come last."""
    numbers = sorted({number for number, _ in played}, key=lambda number: (is_control(number), number))
    print("attack".ljust(WIDTH) + "".join(name.rjust(WIDTH) for name in points))
    for kind, chosen in (
        ("attacks", [n for n in numbers if not is_control(n)]),
        ("controls", list(filter(is_control, numbers))),
    ):
        for number in chosen:
            print(number.ljust(WIDTH) + "".join(cell(played[number, name], held[number, name]) for name in points))
        sums = [(sum(played[n, name] for n in chosen), sum(held[n, name] for n in chosen)) for name in points]
        print(kind.ljust(WIDTH) + "".join(cell(*pair) for pair in sums) + "\n")


def cell(of: int, count: int) -> str:
    """`12`, `11/12 !` or a point where the attack does not apply."""
    if of == 0:
        return ".".rjust(WIDTH)
    return (str(count) if count == of else f"{count}/{of}!").rjust(WIDTH)


def number_of(case: Case) -> str:
    """The attack's number without its variant; a control keeps its name."""
    return case.id if is_control(case.id) else case.id.partition("-")[0]


def is_control(number: str) -> bool:
    """Whether it is what must be allowed."""
    return number.startswith("C-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
