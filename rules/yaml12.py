"""YAML as our files use it: a small, unambiguous part of YAML 1.2, with the place of every value.

1. One document, a mapping at the top. Size, depth and number of nodes are bounded before anything is built.
2. No tags, no anchors, no aliases, no merge keys: nothing is constructed but text, numbers, booleans, null,
   lists and mappings, so there are no alias bombs and no Python objects.
3. Plain scalars follow the YAML 1.2 core schema (spec 10.3.2), except that what YAML 1.1 and 1.2 read
   differently (`yes`, `on`, `0777`, `1_000`, `12:30`) is an error and not a guess.
4. Keys are text, each once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
import yaml.composer
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    NodeEvent,
    ScalarEvent,
)
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 50_000

Path = tuple[str | int, ...]
QUOTE_THIS = "quote this value"


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file; both numbers start at 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong (or, as a warning, doubtful) and where."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


class YamlError(ValueError):
    """The text is not a file of ours. `problems` says why and where; str() has one line for each."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Where values and keys stand, by their path from the top (`("roles", "dev", "allow", 0)`)."""

    values: Mapping[Path, Mark]
    keys: Mapping[Path, Mark]

    def value(self, path: Path) -> Mark:
        """The place of the value at `path`, or of its nearest known parent."""
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, Mark(1, 1))

    def key(self, path: Path) -> Mark:
        """The place of the key that ends `path`; of the value where that is a list item."""
        return self.keys.get(path) or self.value(path)


def load(text: str, filename: str, *, packaged: bool = False) -> tuple[dict[str, Any], Marks]:
    """Return the mapping in `text` and where its parts stand. Raises YamlError; `filename` is only for messages.

    `packaged` text came with us, and a test read it by both parsers: libyaml's takes a tenth of the time. What others
    write goes through PyYAML's own, whose messages we know.
    """
    return _Reader(text, filename, _PackagedLoader if packaged else _Loader).read()


class _Loader(yaml.SafeLoader):
    """Scanner and parser only: nothing is ever constructed by PyYAML."""


_PackagedLoader: type[Any] = getattr(yaml, "CSafeLoader", _Loader)
"""libyaml's scanner and parser, where PyYAML was built with it."""


class _Composer(yaml.composer.Composer):
    """Makes nodes of events that were checked before, so that a file is scanned once.

    Tags are not resolved: what a plain scalar means is decided by this module (`_scalar`).
    """

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events = events
        self._next = 0

    def check_event(self, *choices: type[Event]) -> bool:
        if self._next >= len(self._events):
            return False
        return not choices or isinstance(self._events[self._next], choices)

    def peek_event(self) -> Event:
        return self._events[self._next]

    def get_event(self) -> Event:
        self._next += 1
        return self._events[self._next - 1]

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> str:
        return ""

    def descend_resolver(self, current_node: Node | None, current_index: Any) -> None:
        return None

    def ascend_resolver(self) -> None:
        return None


# YAML 1.2.2 section 10.3.2, core schema.
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_HEX_OCT = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_BOOLEAN_1_1 = frozenset(
    word for base in ("yes", "no", "on", "off", "y", "n") for word in (base, base.capitalize(), base.upper())
)
# Numbers for YAML 1.1 that are other numbers or text for 1.2: octal, underscores, sexagesimal, infinities.
_NUMBER_1_1 = re.compile(
    r"[-+]?0[0-9_]+\Z|[-+]?[0-9][0-9_]*_[0-9_]*\Z|[-+]?[0-9]+(?::[0-5]?[0-9])+\Z|[-+]?\.(?:inf|nan)\Z", re.I
)
_SPECIAL = re.compile(r"[*&!%@`{}\[\]|>#]")
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"\\]|\\.)*\"")


class _Reader:
    def __init__(self, text: str, filename: str, loader: type[Any]) -> None:
        self.text = text
        self.loader = loader
        self.filename = filename
        self.problems: list[Problem] = []
        self.values: dict[Path, Mark] = {}
        self.keys: dict[Path, Mark] = {}

    def read(self) -> tuple[dict[str, Any], Marks]:
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise self._error(Mark(1, 1), "the file is larger than 1 MiB")
        try:
            node = _Composer(self._checked_events()).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = Mark(1, 1) if mark is None else Mark(mark.line + 1, mark.column + 1)
            raise self._error(where, self._explain(error, where)) from None
        except yaml.YAMLError as error:
            raise self._error(self._reader_mark(error), "the file holds a character that YAML does not take") from None
        if node is None:
            raise self._error(Mark(1, 1), "the file is empty")
        if not isinstance(node, MappingNode):
            raise self._error(_mark(node), "the file is not a mapping of keys to values")
        value = self._value(node, ())
        if self.problems:
            raise YamlError(tuple(self.problems))
        return value, Marks(values=self.values, keys=self.keys)

    def _checked_events(self) -> list[Event]:
        """Bound depth and size, and refuse tags, anchors and aliases, before recursion or memory depend on them."""
        depth = nodes = documents = 0
        events: list[Event] = []
        for event in yaml.parse(self.text, Loader=self.loader):
            events.append(event)
            start = event.start_mark
            mark = Mark(1, 1) if start is None else Mark(start.line + 1, start.column + 1)
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._error(mark, "the file holds more than one document")
                if event.tags:
                    raise self._error(mark, "tag directives are not accepted")
            elif isinstance(event, AliasEvent):
                raise self._error(mark, f"aliases are not accepted; to mean text that starts with *, {QUOTE_THIS}")
            elif isinstance(event, CollectionEndEvent):
                depth -= 1
            elif isinstance(event, NodeEvent):
                nodes += 1
                if nodes > MAX_NODES:
                    why = f"the file holds more than {MAX_NODES:,} values; split it into files of a policy folder"
                    raise self._error(mark, why)
                if event.anchor is not None:
                    raise self._error(mark, f"anchors are not accepted; to mean text that starts with &, {QUOTE_THIS}")
                tag = event.tag if isinstance(event, CollectionStartEvent | ScalarEvent) else None
                if tag is not None:
                    raise self._error(mark, f"tags are not accepted; to mean text that starts with !, {QUOTE_THIS}")
                if isinstance(event, CollectionStartEvent):
                    depth += 1
                    if depth > MAX_DEPTH:
                        raise self._error(mark, "the file is nested too deeply")
        return events

    def _value(self, node: Node, path: Path) -> Any:
        self.values[path] = _mark(node)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = _mark(key_node)
            key = self._scalar(key_node) if isinstance(key_node, ScalarNode) else None
            if not isinstance(key, str):
                hint = "a key is text; " if isinstance(key_node, ScalarNode) else "a key is one word of text; "
                self._note(mark, hint + QUOTE_THIS)
                continue
            if key in result:
                first = self.keys[(*path, key)]
                self._note(mark, f"duplicate key {_shown(key)}, first on line {first.line}")
                continue
            self.keys[(*path, key)] = mark
            result[key] = self._value(value_node, (*path, key))
        return result

    def _scalar(self, node: ScalarNode) -> Any:
        text: str = node.value
        if node.style:  # libyaml says "" for plain text, PyYAML None
            return text
        if text in _NULL:
            return None
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        if text in _BOOLEAN_1_1:
            self._note(
                _mark(node), f"{_shown(text)} is a boolean for some readers: write true or false, or {QUOTE_THIS}"
            )
        elif text == "<<":
            self._note(_mark(node), "merge keys are not accepted")
        elif _NUMBER_1_1.match(text):
            self._note(_mark(node), f"{_shown(text)} is another number for some readers: {QUOTE_THIS}")
        elif _INT.match(text):
            return self._number(node, int, text, 10) if len(text) <= 19 else self._number(node, None, text, 10)
        elif _HEX_OCT.match(text):
            return self._number(node, int if len(text) <= 18 else None, text, 0)
        elif _FLOAT.match(text):
            return float(text)
        return text

    def _number(self, node: ScalarNode, make: type[int] | None, text: str, base: int) -> int | None:
        if make is None:
            self._note(_mark(node), "the number is too large")
            return None
        return make(text, base)

    def _explain(self, error: yaml.MarkedYAMLError, where: Mark) -> str:
        message = error.problem or error.context or "not YAML"
        lines = self.text.splitlines()
        line = lines[where.line - 1] if 0 < where.line <= len(lines) else ""
        unquoted = _QUOTED.sub("", line)
        _, _, after = unquoted.partition(": ")
        if _SPECIAL.search(after or unquoted):
            return f"{message}; if * & ! {{ }} [ ] % or @ here is meant as text, {QUOTE_THIS}"
        if "\t" in line[: where.column]:
            return f"{message}; indent with spaces"
        return str(message)

    def _reader_mark(self, error: yaml.YAMLError) -> Mark:
        position = getattr(error, "position", None)
        if not isinstance(position, int):
            return Mark(1, 1)
        before = self.text[:position]
        return Mark(before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)

    def _note(self, mark: Mark, message: str) -> None:
        self.problems.append(Problem(file=self.filename, line=mark.line, column=mark.column, message=message))

    def _error(self, mark: Mark, message: str) -> YamlError:
        self._note(mark, message)
        return YamlError(tuple(self.problems))


def _mark(node: Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _shown(text: str) -> str:
    cut = text if len(text) <= 60 else text[:57] + "..."
    return repr(cut)
