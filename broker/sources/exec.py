"""`kind: exec`: a helper of the operator's own, asked as the AWS tools ask theirs (credential_process).

`format: plain`: it prints the value; one line end is not part of it, and a JSON object's fields can be named after #.
`format: json`: it prints `{"Version": 1, ...}` (AWS SDKs and Tools Reference Guide, "Process credential provider");
every text in it is a field, and `Expiration` (ISO 8601) ends them all.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

from broker.sources.base import Document, SourceError, Unleased, fields_of, flat, json_object
from broker.sources.program import Program

EXPIRATION = "Expiration"


class ExecSource(Unleased):
    """`arguments` may hold `{name}`, which becomes what stands in the reference. `now` gives Unix time."""

    def __init__(
        self, name: str, program: Program, arguments: Sequence[str], *, json: bool, now: Callable[[], float]
    ) -> None:
        self._name = name
        self._program = program
        self._arguments = tuple(arguments)
        self._json = json
        self._now = now

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        arguments = [argument.replace("{name}", document) for argument in self._arguments]
        printed = await self._program.output(arguments, what)
        if not self._json:
            return Document(fields=fields_of(printed.removesuffix(b"\n").removesuffix(b"\r")))
        found = json_object(printed)
        if found is None or found.get("Version") != 1:
            raise SourceError(
                "source-unreadable", f'{what}: it printed no {{"Version": 1, ...}}', "correct it, or say format: plain"
            )
        ends = found.pop(EXPIRATION, None)
        lasts = None if ends is None else _seconds(ends, self._now())
        if ends is not None and lasts is None:
            raise SourceError("source-unreadable", f"{what}: its Expiration is no ISO 8601 time with a zone")
        return Document(fields=flat(found), lasts=lasts)


def _seconds(text: object, now: float) -> float | None:
    """Seconds from `now` to an ISO 8601 time, or None where it is none."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if found.tzinfo is None else found.timestamp() - now
