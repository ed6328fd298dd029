"""How commands speak: pleasant on a terminal, plain when piped, JSON where asked; errors with cause and remedy.

Exit codes: 0 done; 1 the answer is no (refused, a check failed, a record is bad); 2 wrong usage or settings;
3 the demo ran unconfined; 4 the gateway is not running; 125-127 as a shell uses them (`exeat run`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NoReturn, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_NOT_CONFINED = 3
EXIT_NOT_RUNNING = 4
EXIT_BOUNDARY = 125


class Output(StrEnum):
    """`--output`."""

    text = "text"
    json = "json"


def console(*, error: bool = False) -> Console:
    """A console that honours NO_COLOR, writes plain text into a pipe, and never guesses at markup in data."""
    stream = sys.stderr if error else sys.stdout
    # Not left to rich: FORCE_COLOR would colour a pipe, and NO_COLOR alone leaves bold and dim.
    return Console(
        file=stream, force_terminal=not is_plain(stream), highlight=False, markup=False, soft_wrap=True, emoji=False
    )


def is_plain(stream: TextIO) -> bool:
    """Whether `stream` gets text alone: a pipe, a file, or a terminal whose user set NO_COLOR."""
    return bool(os.environ.get("NO_COLOR")) or not stream.isatty()


def say(text: str, style: str | None = None) -> None:
    console().print(Text(text, style=style or ""))


def note(text: str) -> None:
    """A remark that is not the result: standard error."""
    console(error=True).print(Text(text, style="dim"))


def fail(message: str, *, remedy: str = "", code: int = EXIT_NO) -> NoReturn:
    """Print the cause and what to do about it, then exit with `code`."""
    out = console(error=True)
    out.print(Text("exeat: ", style="bold red") + Text(message))
    if remedy:
        out.print(Text(f"       {remedy}"))
    raise SystemExit(code)


def print_json(value: Any) -> None:
    """One JSON document, sorted keys, for scripts."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on a terminal; tab-separated lines with a header line in a pipe."""
    rows = [[printable("" if cell is None else str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in [list(columns), *rows]:
            sys.stdout.write("\t".join(row) + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    console().print(table)


def print_fields(fields: Mapping[str, Any]) -> None:
    """One line a field, for people: lists joined, times in UTC, nothing as "none"."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        say(f"{name:{width}}  {_shown(name, value)}")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(str(key), item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(_shown("", item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and (name == "at" or name.endswith("_at")):
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    return "none" if value is None or value == "" else printable(str(value))


def printable(text: str) -> str:
    """`text` without anything that could move a cursor, ring a bell or reverse the reading order."""
    return "".join(
        character if character.isprintable() and not _reorders(character) else f"\\u{ord(character):04x}"
        for character in text
    )


def _reorders(character: str) -> bool:
    return "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
