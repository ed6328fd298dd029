"""`exeat scan`: the check before a workspace, an image layer or a snapshot is kept."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, print_json, print_table, say
from exeat.scan.search import Finding, Search
from exeat.scan.walk import Walk
from wire.marks import Mark

MAX_SHOWN = 1000


def scan(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Folders and files (archives are opened); - reads standard input."),
    ],
    own_only: Annotated[
        bool, typer.Option("--own-only", help="Look for the gateway's secrets alone, not for tokens by their look.")
    ] = False,
    looks_only: Annotated[
        bool, typer.Option("--looks-only", help="Look for tokens by their look alone; needs no running gateway.")
    ] = False,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Look for brokered secrets, in any usual writing, and for known kinds of token. Neither is ever printed.

    Exits 0 only if everything was searched to its end and nothing was found. The gateway gives this command no secret:
    it gives keyed marks of them (docs/scan.md).
    """
    if own_only and looks_only:
        fail("--own-only and --looks-only leave nothing to look for", code=EXIT_USAGE)
    key, marks, missing = bytes(32), list[Mark](), list[str]()
    if not looks_only:
        try:
            key, marks, missing = admin(config).marks()
        except AdminError as error:
            if error.code == "not-running":
                remedy = "start it with `exeat up`, or say --looks-only"
                fail(f"{error.detail}: its secrets cannot be looked for", remedy=remedy)
            explain(error)
    skipped: list[tuple[str, str]] = []
    walk = Walk(Search(key, marks, looks=not own_only), lambda place, why: skipped.append((place, why)))
    found: list[Finding] = []
    for path in paths:
        try:
            found += walk.stream("standard input", sys.stdin.buffer) if path == "-" else walk.path(Path(path))
        except OSError as error:
            fail(
                f"{path}: {error.strerror}", remedy="name a file or a folder, or - for standard input", code=EXIT_USAGE
            )
    if output is Output.json:
        print_json(
            {
                "findings": [asdict(one) for one in found],
                "not_searched": [{"place": place, "why": why} for place, why in skipped],
                "not_looked_for": missing,
                "streams": walk.streams,
                "bytes": walk.bytes,
            }
        )
    else:
        _tell(found, skipped, missing, walk)
    if found or skipped or missing:
        raise typer.Exit(EXIT_NO)


def _tell(found: list[Finding], skipped: list[tuple[str, str]], missing: list[str], walk: Walk) -> None:
    if found:
        rows = [
            [one.name, f"{one.form}, {one.count}x" if one.count > 1 else one.form, _shown(one.place), one.offset]
            for one in found[:MAX_SHOWN]
        ]
        print_table(["WHAT", "HOW", "WHERE", "AT BYTE"], rows)
        if len(found) > MAX_SHOWN:
            say(f"... and {len(found) - MAX_SHOWN} more (-o json has all)")
    for place, why in skipped[:MAX_SHOWN]:
        say(f"not searched to its end: {_shown(place)}: {why}")
    for what in missing:
        say(f"not looked for: {what}")
    verdict = f"{len(found)} found" if found else "nothing found"
    say(f"{verdict} in {walk.streams} streams, {walk.bytes} bytes")


def _shown(place: str) -> str:
    """A name from a hostile folder, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in place)
