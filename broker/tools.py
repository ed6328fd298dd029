"""A server's list of tools on its way to a sandbox: what the rules do not grant is left out (rules/answers.py).

Sources: MCP 2025-06-18 server/tools (`tools/list`: `result.tools[].name`) and basic/transports: the answer is one JSON
message or a stream of events, each `data:` one message; HTML standard 9.2.6 for how a stream is split into events.

What is not one strict JSON object raises ResultRefused: a client might read a list in it that was not seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from broker.result import ResultRefused, rewrite
from rules.operations.jsonrpc import is_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event: its fields other than data as they came, and its data, lines joined by a line feed."""

    fields: tuple[bytes, ...]
    data: bytes

    def written(self, data: bytes) -> bytes:
        """The event with `data` in place of its own, as a client reads it."""
        lines = [*self.fields, *(b"data: " + line for line in data.split(b"\n"))] if data else list(self.fields)
        return b"\n".join(lines) + b"\n\n"


class Events:
    """Splits a stream into events. `bound` is in bytes of one event; a longer one raises ResultRefused.

    One that is cut short by the end is dropped, as clients do (HTML 9.2.6).
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._line = bytearray()
        self._fields: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0
        self._after_return = False
        self._first = True

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that end in `data`."""
        if not data:
            return
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        for piece in data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines(keepends=True):
            self._line += piece
            self._size += len(piece)
            if self._size > self._bound:
                raise ResultRefused("an event is larger than its bound")
            if piece.endswith(b"\n"):
                yield from self._ended(bytes(self._line[:-1]))
                self._line.clear()

    def _ended(self, line: bytes) -> Iterator[Event]:
        if self._first:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._first = False
        name, _, value = line.partition(b":")
        if line == b"":
            if self._fields or self._data:
                yield Event(fields=tuple(self._fields), data=b"\n".join(self._data))
            self._fields, self._data, self._size = [], [], 0
        elif name == b"data":
            self._data.append(value.removeprefix(b" "))
        else:
            self._fields.append(line)


def only_granted(raw: bytes, bound: int, fits: Callable[[str], bool]) -> bytes:
    """Return the message `raw` without those of its tools for which `fits` says no. Raises ResultRefused."""
    return rewrite(raw, bound, lambda message: _granted(message, fits))


def _granted(message: Any, fits: Callable[[str], bool]) -> Any:
    if not isinstance(message, dict):
        raise ResultRefused("the answer is not one message")
    result = message.get("result")
    if not isinstance(result, dict) or "tools" not in result:
        return message
    tools = result["tools"]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ResultRefused("the list of tools has another shape")
    shown = [tool for tool in tools if is_name(tool.get("name")) and fits(str(tool["name"]))]
    return {**message, "result": {**result, "tools": shown}}
