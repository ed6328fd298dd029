"""`Node`: one value of a YAML file with its place, so that every complaint names file, line and column.

Readers ask a node for what they expect (`fields`, `text`, `texts`, ...). What is wrong is noted in `Problems`
and, where nothing sensible can follow, `Rejected` is raised; the caller of one rule, one credential or one test
catches it and goes on with the next, so that one run reports everything.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rules.yaml12 import QUOTE_THIS, Marks, Path, Problem, load

MAX_TEXT = 4096
MOST_SHOWN = 24
"""Words that are listed where none is near: more than the catalogue's names would hide the complaint."""
MOST_ECHOED = 40
"""Characters of a value that is shown as it should stand."""


class Rejected(Exception):
    """A value cannot be used. Its problem is already noted."""


@dataclass(slots=True)
class Problems:
    """What was found so far: errors refuse the policy, warnings are shown."""

    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Swallow Rejected: the problem is noted, the next item is read."""
        with suppress(Rejected):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value, its path from the top of `file`, and where to note problems."""

    value: Any
    path: Path
    file: str
    marks: Marks
    problems: Problems

    @classmethod
    def load(cls, text: str, file: str, problems: Problems) -> Node:
        """Return the top of the file. Raises rules.yaml12.YamlError."""
        value, marks = load(text, file)
        return cls(value=value, path=(), file=file, marks=marks, problems=problems)

    # --- complaints ---

    def note(self, message: str, *, on_key: bool = False) -> None:
        """Note an error at this value, or at its key."""
        self.problems.errors.append(self._problem(message, on_key))

    def warn(self, message: str) -> None:
        self.problems.warnings.append(self._problem(message, False))

    def fail(self, message: str, *, on_key: bool = False) -> NoReturn:
        """Note an error and give up on this value."""
        self.note(message, on_key=on_key)
        raise Rejected

    def _problem(self, message: str, on_key: bool) -> Problem:
        mark = self.marks.key(self.path) if on_key else self.marks.value(self.path)
        return Problem(file=self.file, line=mark.line, column=mark.column, message=message)

    # --- shapes ---

    def child(self, key: str | int) -> Node:
        """The value under `key` of a mapping or list that is known to have it."""
        return Node(
            value=self.value[key], path=(*self.path, key), file=self.file, marks=self.marks, problems=self.problems
        )

    def fields(self, required: str = "", optional: str = "") -> dict[str, Node]:
        """Return the values of a mapping with these keys. Unknown keys are errors, missing ones too."""
        known, needed = (*required.split(), *optional.split()), required.split()
        found: dict[str, Node] = {}
        for key, node in self.entries():
            if key in known:
                found[key] = node
                continue
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(sorted(set(known)))}"
            node.note(f"unknown key {shown(key)}{hint}", on_key=True)
        missing = [key for key in needed if key not in found]
        if missing:
            self.fail(f"missing key {', '.join(missing)}")
        return found

    def entries(self) -> list[tuple[str, Node]]:
        """The pairs of a mapping, in the order of the file."""
        if not isinstance(self.value, dict):
            self.fail(f"expected a mapping, found {self._found()}")
        return [(key, self.child(key)) for key in self.value]

    def items(self, *, empty: str | None) -> list[Node]:
        """The values of a list. `empty` is the complaint about an empty one; None where empty is fine."""
        if not isinstance(self.value, list):
            plain = isinstance(self.value, str) and self.value.isprintable() and len(self.value) <= MOST_ECHOED
            hint = f": write [{self.value}]" if plain else ""
            self.fail(f"expected a list, found {self._found()}{hint}")
        if not self.value and empty is not None:
            self.fail(empty)
        return [self.child(index) for index in range(len(self.value))]

    def text(self) -> str:
        """One non-empty line of printable text."""
        if not isinstance(self.value, str):
            self.fail(f"expected text, found {self._found()}")
        if not self.value or len(self.value) > MAX_TEXT or not self.value.isprintable():
            self.fail("expected one line of printable text that is not empty")
        return self.value

    def texts(self, *, empty: str) -> list[str]:
        """A list of texts, none twice."""
        found: list[str] = []
        for item in self.items(empty=empty):
            text = item.text()
            if text in found:
                item.fail(f"{shown(text)} is listed twice")
            found.append(text)
        return found

    def word(self, allowed: Iterable[str]) -> str:
        """One of the words in `allowed`."""
        text = self.text()
        words = list(allowed)
        if text not in words:
            near = difflib.get_close_matches(text, words, 1)
            more = f" and {len(words) - MOST_SHOWN} more" if len(words) > MOST_SHOWN else ""
            hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(words[:MOST_SHOWN])}{more}"
            self.fail(f"{shown(text)} is not known here; {hint}")
        return text

    def flag(self) -> bool:
        if type(self.value) is not bool:
            self.fail(f"expected true or false, found {self._found()}")
        return self.value

    def natural(self, least: int, most: int) -> int:
        """A whole number from `least` to `most`."""
        if type(self.value) is not int or not least <= self.value <= most:
            wanted = f"a whole number from {least} to {most}" if least < most else f"the number {least}"
            self.fail(f"expected {wanted}, found {self._found()}")
        return self.value

    def _found(self) -> str:
        value = self.value
        match value:
            case None:
                return "nothing"
            case bool():
                return "true or false"
            case int() | float():
                return f"a number; to mean text, {QUOTE_THIS}"
            case str():
                return "text"
            case list():
                return f"a list; if [ ] is meant as text, {QUOTE_THIS}"
            case _:
                return f"a mapping; if {{ }} is meant as text, {QUOTE_THIS}"


def shown(text: str) -> str:
    """`text` as a complaint shows it: quoted, escaped, cut."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
