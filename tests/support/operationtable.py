"""`make corpus`: plays every vector of tests/cases/operations in every lane and prints services by lanes.

python tests/support/operationtable.py [LANE...] [ROLE...]      only these lanes, only these roles

Each cell is how many vectors went as the pure decision says, and of how many where not all did. Exit 1 on any that
did not.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rules.catalogue import builtin_services
from rules.names import Host, InvalidName
from tests.support.operationcases import NOTHING, Corpus, Vector
from tests.support.operationlanes import LANES, Stand, why_apart, why_not_here

WIDTH = 11


def main(wanted: list[str]) -> int:
    """Play, print, and say how many went otherwise."""
    if why_not_here():
        print(f"not here: {why_not_here()}")
        return 1
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    played: Counter[tuple[str, str]] = Counter()
    held: Counter[tuple[str, str]] = Counter()
    apart: Counter[str] = Counter()
    failures: list[str] = []
    lanes = [lane for lane in LANES if lane in wanted] or list(LANES)
    roles = set(wanted) - set(LANES)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="operations-") as folder:
        Path(folder).chmod(0o755)
        with Stand(Path(folder)) as stand:
            vectors = [one for one in stand.corpus.vectors if not roles or one.role in roles]
            stand.coming = sorted({one.role for one in vectors})
            for lane in lanes:
                for vector in sorted(vectors, key=lambda one: one.role):  # one sandbox after another
                    if why_apart(vector, lane):
                        apart[lane] += 1
                        continue
                    key = (service_of(vector, stand.corpus), lane)
                    played[key] += 1
                    try:
                        stand.play(vector, lane)
                    except Exception as error:
                        failures.append(f"{vector.name} in {lane}: {error or type(error).__name__}")
                    else:
                        held[key] += 1
            try:
                stand.verify()
            except AssertionError as error:
                failures.append(f"the log does not verify: {error}")
            total = len(vectors)
    print_table(lanes, played, held)
    for failure in failures:
        print(f"\nOTHERWISE {failure[:2000]}")
    print(
        f"{sum(played.values())} plays of {total} vectors in {time.monotonic() - started:.0f} s; not played: "
        + ", ".join(f"{lane} {apart[lane]}" for lane in lanes)
        + f".\nOtherwise than decided: {len(failures)}"
    )
    return 1 if failures else 0


def service_of(vector: Vector, corpus: Corpus) -> str:
    """The service that a vector is about: what it is, else whose host it goes to; `-` for none and for several."""
    name = vector.operation.partition("/")[0]
    if name not in ("", NOTHING):
        return name
    try:
        host = Host.parse(vector.authority.partition(":")[0])
    except InvalidName:
        return "-"
    named = [(name, builtin_services()[name]) for name in corpus.services_of(vector.role)]
    there = [
        name for name, service in named if any(place.pattern.matches(host) for place in service.endpoints.values())
    ]
    return there[0] if len(there) == 1 else "-"


def print_table(lanes: list[str], played: Counter[tuple[str, str]], held: Counter[tuple[str, str]]) -> None:
    """One row for each service, the sum last."""
    print("service".ljust(20) + "".join(lane.rjust(WIDTH) for lane in lanes))
    for name in sorted({name for name, _ in played}):
        print(name.ljust(20) + "".join(cell(held[name, lane], played[name, lane]).rjust(WIDTH) for lane in lanes))
    sums = [
        tuple(sum(count for (_, at), count in table.items() if at == lane) for table in (held, played))
        for lane in lanes
    ]
    print("all".ljust(20) + "".join(cell(good, every).rjust(WIDTH) for good, every in sums))


def cell(good: int, every: int) -> str:
    return "" if not every else str(good) if good == every else f"{good} of {every}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
