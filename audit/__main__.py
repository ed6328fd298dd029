"""`python -I -m audit verify|search|tail|show`: read a log with nothing else of ours running."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from audit.records import canonical
from audit.search import Filter, explain_record, follow, search
from audit.verify import main as verify_main

_POLL_S = 0.25


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["verify"]:
        return verify_main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -I -m audit")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("verify", help="check a log (see verify --help)", add_help=False)
    for name, meaning in (("search", "print matching records"), ("tail", "print the last ones and follow")):
        command = commands.add_parser(name, help=meaning)
        command.add_argument("directory", type=Path)
        command.add_argument("--sandbox")
        command.add_argument("--refused", action="store_true", help="refusals only")
        command.add_argument("--reason")
        command.add_argument("--host")
        command.add_argument("--since", help="UTC date or time")
        command.add_argument("--request", dest="request_id")
        command.add_argument("--event")
    show = commands.add_parser("show", help="say what became of one request")
    show.add_argument("directory", type=Path)
    show.add_argument("request_id")
    options = parser.parse_args(arguments)
    try:
        if options.command == "show":
            found = list(search(options.directory, Filter(request_id=options.request_id)))
            sys.stdout.write(explain_record(found) + "\n")
            return 0 if found else 1
        wanted = Filter(
            sandbox=options.sandbox,
            refused=options.refused,
            reason=options.reason,
            host=options.host,
            since=options.since,
            request_id=options.request_id,
            event=options.event,
        )
        _print(search(options.directory, wanted) if options.command == "search" else _tail(options.directory, wanted))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"audit: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def _tail(directory: Path, wanted: Filter) -> Iterable[Mapping[str, object]]:
    def wait() -> bool:
        time.sleep(_POLL_S)
        return True

    return follow(directory, wanted, wait)


def _print(records: Iterable[Mapping[str, object]]) -> None:
    for record in records:
        sys.stdout.write(canonical(record).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
