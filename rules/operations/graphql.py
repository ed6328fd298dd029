"""GraphQL over HTTP: what a document does is told from the document, never from the URL or the method.

Sources: GraphQL specification (October 2021) 2.1-2.13 and 5.2-5.8; GraphQL over HTTP (draft) 5.3-5.5. Parsed by
graphql-core. A body is one strict JSON object with `query`, `operationName`, `variables` and `extensions`.

Refused by not matching: batches (arrays), hashes in place of a document or beside it (the server might know another
document by that hash), other envelope keys, a document that is over a cap or ambiguous (`operationName` absent with
two operations, two of one name, an anonymous one among others), and one that holds *any* operation of another type
than the wanted one. Directives are ignored: what `@include(if: false)` hides is judged as if it were there. Fragments
are spread, aliases resolved.

Arguments: `field` holds every top-level field. What `fields:` of the parameters declares is stated as well, if each
top-level field states it and selects only what its closed type names: `repository(owner:, name:)` becomes
`repository`, and beside it a `node(id:)`, or inside it `owner { repositories }`, leaves `repository` unstated, so
that no rule that binds it fits. A value is text, an identifier or an integer, written plainly or by a variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations.media import json_object

if TYPE_CHECKING:
    from graphql import language as ast

MAX_QUERY = 64 << 10
"""Characters of a document."""
MAX_TOKENS = 4000
MAX_DEPTH = 40
"""Brackets of any kind that are open at once."""
MAX_HASHES = 4000
"""Number signs of a document: each may begin a comment, which is no token and costs as much as one."""
MAX_VISITS = 20_000
"""Selections looked at in one document, fragments counted each time that another type spreads them."""
MAX_FIELDS = 64
"""Top-level fields of one operation: they are shown to people and written to records."""
MAX_TEXT = 512
"""Characters of one bound value."""

TYPES = ("query", "mutation", "subscription")


class _Refused(Exception):
    """The document is not of the wanted kind, or not one thing only."""


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return the arguments of one operation of the wanted type, or None. See `check` for `params`."""
    value = json_object(body, facts, depth=32, nodes=50_000)
    if value is None:
        return None
    from graphql import GraphQLError

    try:
        text, name, variables = _envelope(value)
        document = _parse(text)
        return _Judge(params, document, text, name, variables).arguments()
    except (GraphQLError, RecursionError, _Refused):
        return None


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded.

    `type`: query, mutation or subscription. `introspection` true: `__schema` and `__type` may stand at the top.
    `fields`: top-level field -> {`with`: {argument: "{owner}/{name}"}, `without`: [paths that must be absent],
    `selects`: a name of `types`}; a field without `with` is neutral: it concerns nothing that rules bind. A path leads
    from an argument into an input object (`input.branch.name`). `types`: name -> "id name owner:Actor issues:[Issue]";
    `[X]` is a connection of X. `neutral` only: a document of neutral fields (and introspection) and nothing else;
    never: any other. `except`: top-level fields that never match. `payload`: a name of `types` that names all
    that a field may select beside its own type's, since what a mutation answers with leads anywhere.
    """
    if not params.keys() <= {"type", "introspection", "fields", "types", "neutral", "except", "payload"}:
        raise ValueError("unknown parameter of a GraphQL body")
    if params.get("type") not in TYPES:
        raise ValueError("a GraphQL body has a type: query, mutation or subscription")
    if not isinstance(params.get("introspection", False), bool):
        raise ValueError("introspection is true or false")
    if params.get("neutral", "only") not in ("only", "never"):
        raise ValueError("neutral is only or never")
    refused = params.get("except", [])
    if not isinstance(refused, list | tuple) or not all(isinstance(name, str) for name in refused):
        raise ValueError("except is a list of fields")
    types, fields = params.get("types", {}), params.get("fields", {})
    if not isinstance(types, Mapping) or not isinstance(fields, Mapping):
        raise ValueError("fields and types are mappings")
    if "payload" in params and params["payload"] not in types:
        raise ValueError("payload is a type that is listed")
    for listed in types.values():
        if not isinstance(listed, str):
            raise ValueError("a type is a list of its fields as text")
        for inner in _listed(listed).values():
            if inner is not None and inner.strip("[]") not in types:
                raise ValueError("a field has a type that is not listed")
    for spec in fields.values():
        if not isinstance(spec, Mapping) or not spec.keys() <= {"with", "without", "selects"}:
            raise ValueError("a top-level field has with, without and selects")
        if spec.get("selects") is not None and spec["selects"] not in types:
            raise ValueError("a field selects a type that is not listed")
        stated, absent = spec.get("with", {}), spec.get("without", [])
        if not isinstance(stated, Mapping) or not isinstance(absent, list | tuple):
            raise ValueError("with is a mapping and without a list")
        if not all(isinstance(path, str) and _PATH.fullmatch(path) for path in absent):
            raise ValueError("a path is names with dots")
        for argument, template in stated.items():
            if not isinstance(argument, str) or argument == "field" or not isinstance(template, str):
                raise ValueError("with maps a name other than field to a template")
            if not _PLACE.search(template) or "{" in _PLACE.sub("", template):
                raise ValueError("a template holds {paths} of arguments")


def prepare() -> None:
    """Import the parser, which takes a third of a second: not in every process, and not under a request."""
    import graphql  # noqa: F401


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    specs: Mapping[str, Mapping[str, Any]] = params.get("fields", {})
    return frozenset({"field", *(name for spec in specs.values() for name in spec.get("with", {}))})


_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PATH = re.compile(rf"{_NAME}(?:\.{_NAME}){{0,7}}")
_PLACE = re.compile(rf"\{{({_NAME}(?:\.{_NAME}){{0,7}})\}}")
_FIELD = re.compile(rf"({_NAME})(?::({_NAME}|\[{_NAME}\]))?")

# Ways to end a line, or to be no character at all, on which lexers do not agree (specification 2.1.1 and 2.1.2).
_UNSURE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x85\u2028\u2029\ufeff]|\r(?!\n)")


@lru_cache(maxsize=1024)
def _listed(text: str) -> Mapping[str, str | None]:
    found: dict[str, str | None] = {}
    for part in text.split():
        match = _FIELD.fullmatch(part)
        if match is None or match[1] in found:
            raise ValueError("a type lists name or name:Type, each once")
        found[match[1]] = match[2]
    return found


def _envelope(value: dict[str, Any]) -> tuple[str, str | None, Mapping[str, Any]]:
    if not value.keys() <= {"query", "operationName", "variables", "extensions"}:
        raise _Refused
    text, name = value.get("query"), value.get("operationName")
    variables, extensions = value.get("variables"), value.get("extensions")
    if not isinstance(text, str) or not 0 < len(text) <= MAX_QUERY or text.count("#") > MAX_HASHES:
        raise _Refused
    if _UNSURE.search(text):
        raise _Refused
    if name is not None and (not isinstance(name, str) or name == ""):
        raise _Refused
    if variables is not None and not isinstance(variables, dict):
        raise _Refused
    # `persistedQuery` names a document by its hash; `clientLibrary` only says who asks.
    if extensions is not None and (not isinstance(extensions, dict) or not extensions.keys() <= {"clientLibrary"}):
        raise _Refused
    return text, name, variables or {}


def _parse(text: str) -> ast.DocumentNode:
    """Parse what stays within the caps. Tokens and depth are counted first, so that nesting never costs a stack."""
    from graphql.language import Lexer, Source, TokenKind, parse

    source = Source(text)
    lexer = Lexer(source)
    opening = {TokenKind.PAREN_L, TokenKind.BRACKET_L, TokenKind.BRACE_L}
    closing = {TokenKind.PAREN_R, TokenKind.BRACKET_R, TokenKind.BRACE_R}
    tokens = depth = 0
    while (kind := lexer.advance().kind) is not TokenKind.EOF:
        tokens += 1
        depth += (kind in opening) - (kind in closing)
        if tokens > MAX_TOKENS or depth > MAX_DEPTH:
            raise _Refused
    return parse(source)


@dataclass(frozen=True, slots=True)
class _Unbound:
    """A value that no template can hold: null, true, a list, an object, text in a spelling that parsers dispute."""


_UNBOUND = _Unbound()


class _Judge:
    """One document under one set of parameters."""

    def __init__(
        self,
        params: Mapping[str, Any],
        document: ast.DocumentNode,
        text: str,
        name: str | None,
        variables: Mapping[str, Any],
    ) -> None:
        from graphql.language import FragmentDefinitionNode, OperationDefinitionNode

        self.params = params
        self.text = text
        self.variables = variables
        self.types: Mapping[str, str] = params.get("types", {})
        self.fragments: dict[str, ast.FragmentDefinitionNode] = {}
        self.visits = 0
        operations: dict[str | None, ast.OperationDefinitionNode] = {}
        for definition in document.definitions:
            if isinstance(definition, FragmentDefinitionNode):
                if definition.name.value in self.fragments:
                    raise _Refused
                self.fragments[definition.name.value] = definition
            elif isinstance(definition, OperationDefinitionNode):
                known_as = definition.name.value if definition.name else None
                if known_as in operations or definition.operation.value != params["type"]:
                    raise _Refused
                operations[known_as] = definition
            else:
                raise _Refused  # a schema definition is nothing to execute (specification 5.1.1)
        if not operations or (len(operations) > 1 and (name is None or None in operations)):
            raise _Refused
        if name is not None and name not in operations:
            raise _Refused
        self.operation = operations[name] if name is not None else next(iter(operations.values()))
        self.defined: dict[str, ast.VariableDefinitionNode] = {}
        for variable in self.operation.variable_definitions or ():
            if variable.variable.name.value in self.defined:
                raise _Refused
            self.defined[variable.variable.name.value] = variable

    def arguments(self) -> Mapping[str, Value]:
        top = list(self.top_fields())
        names = sorted({field.name.value for field in top})
        if not names or len(names) > MAX_FIELDS:
            raise _Refused
        introspects = {"__schema", "__type"} & set(names)
        if introspects and (self.params.get("introspection") is not True or self.params["type"] != "query"):
            raise _Refused
        if set(names) & set(self.params.get("except", ())):
            raise _Refused
        real = [field for field in top if field.name.value not in ("__typename", "__schema", "__type")]
        if not all(map(self.answers_for_itself, real)):
            raise _Refused
        stated = self.stated(real)
        neutral = stated is not None and not any(self.binds(name) for name in names)
        if self.params.get("neutral") not in (None, "only" if neutral else "never"):
            raise _Refused
        found: dict[str, Value] = {"field": tuple(names)}
        found.update((argument, tuple(sorted(values))) for argument, values in (stated or {}).items())
        return found

    def top_fields(self) -> Iterator[ast.FieldNode]:
        """The fields of the operation itself, fragments spread. Each fragment counts once: it adds the same again."""
        from graphql.language import FieldNode, FragmentSpreadNode, InlineFragmentNode

        stack: list[ast.SelectionSetNode] = [self.operation.selection_set]
        spread: set[str] = set()
        while stack:
            for selection in stack.pop().selections:
                if isinstance(selection, FieldNode):
                    yield selection
                elif isinstance(selection, InlineFragmentNode):
                    stack.append(selection.selection_set)
                elif isinstance(selection, FragmentSpreadNode):
                    if selection.name.value not in spread:
                        spread.add(selection.name.value)
                        stack.append(self.fragment(selection.name.value).selection_set)
                else:
                    raise _Refused

    def stated(self, top: list[ast.FieldNode]) -> Mapping[str, set[str]] | None:
        """What every field of `top` states, or None if one of them is not declared or selects what is not."""
        specs: Mapping[str, Mapping[str, Any]] = self.params.get("fields", {})
        found: dict[str, set[str]] | None = None
        for field in top:
            spec = specs.get(field.name.value)
            if spec is None or not self.selects(field, spec.get("selects")):
                return None
            if any(self.value(field, path) is not None for path in spec.get("without", ())):
                return None
            if not self.binds(field.name.value):
                continue
            mine: dict[str, set[str]] = {}
            for argument, template in spec["with"].items():
                text = self.filled(field, template)
                if text is not None:
                    mine[argument] = {text}
            if found is None:
                found = mine
            else:
                found = {name: values | mine[name] for name, values in found.items() if name in mine}
        return found or {}

    def answers_for_itself(self, field: ast.FieldNode) -> bool:
        """True if `field` selects nothing beyond `payload`, where that is set: a write by name is no read of all."""
        payload = self.params.get("payload")
        if payload is None or self.selects(field, payload):
            return True
        own = self.params.get("fields", {}).get(field.name.value, {}).get("selects")
        return own is not None and self.selects(field, own)

    def binds(self, name: str) -> bool:
        return bool(self.params.get("fields", {}).get(name, {}).get("with"))

    def filled(self, field: ast.FieldNode, template: str) -> str | None:
        """`template` with the values of `field`, or None if one is missing or could pass for several segments."""
        values: dict[str, str] = {}
        for path in _PLACE.findall(template):
            value = self.value(field, path)
            if not isinstance(value, str) or not value or len(value) > MAX_TEXT or not value.isprintable():
                return None
            if "/" in value and template != f"{{{path}}}":
                return None
            values[path] = value
        return _PLACE.sub(lambda match: values[match[1]], template)

    def value(self, field: ast.FieldNode, path: str) -> str | _Unbound | None:
        """The scalar at `path` of the arguments of `field`: text, _UNBOUND, or None where nothing stands."""
        from graphql.language import ObjectValueNode, VariableNode

        first, *rest = path.split(".")
        given = [argument.value for argument in field.arguments or () if argument.name.value == first]
        if len(given) > 1:
            raise _Refused  # two values for one argument: servers differ (specification 5.4.2)
        if not given:
            return None
        node: ast.ValueNode = given[0]
        while True:
            if isinstance(node, VariableNode):
                name = node.name.value
                definition = self.defined.get(name)
                if definition is None:
                    raise _Refused
                if name in self.variables:
                    return _json_value(self.variables[name], rest)
                if definition.default_value is None:
                    return None
                node = definition.default_value
            elif rest:
                if not isinstance(node, ObjectValueNode):
                    return _UNBOUND
                inner = [entry.value for entry in node.fields if entry.name.value == rest[0]]
                if len(inner) > 1:
                    raise _Refused
                if not inner:
                    return None
                node, rest = inner[0], rest[1:]
            else:
                return self.literal(node)

    def literal(self, node: ast.ValueNode) -> str | _Unbound | None:
        from graphql.language import EnumValueNode, IntValueNode, NullValueNode, StringValueNode

        if isinstance(node, NullValueNode):
            return None
        if isinstance(node, IntValueNode | EnumValueNode):
            return node.value
        if isinstance(node, StringValueNode) and node.loc is not None:
            # Only as it is written: no escapes, no block string.
            spelt = self.text[node.loc.start : node.loc.end]
            return node.value if spelt == f'"{node.value}"' else _UNBOUND
        return _UNBOUND

    def selects(self, field: ast.FieldNode, type_name: str | None) -> bool:
        """True if everything beneath `field` is named by the closed types. No type: `field` is a leaf."""
        from graphql.language import FieldNode, FragmentSpreadNode, InlineFragmentNode

        if field.selection_set is None:
            return True
        if type_name is None:
            return False
        stack: list[tuple[ast.SelectionSetNode, str]] = [(field.selection_set, type_name)]
        spread: set[tuple[str, str]] = set()
        while stack:
            selections, current = stack.pop()
            fields = self.fields_of(current)
            for selection in selections.selections:
                self.visits += 1
                if self.visits > MAX_VISITS:
                    raise _Refused
                if isinstance(selection, FieldNode):
                    name = selection.name.value
                    if name == "__typename":
                        continue
                    if name not in fields:
                        return False
                    inner = fields[name]
                    if selection.selection_set is not None:
                        if inner is None:
                            return False
                        stack.append((selection.selection_set, inner))
                elif isinstance(selection, InlineFragmentNode):
                    # Whatever the type condition says: the fields must be those of the type that stands here.
                    stack.append((selection.selection_set, current))
                elif isinstance(selection, FragmentSpreadNode):
                    key = (selection.name.value, current)
                    if key not in spread:
                        spread.add(key)
                        stack.append((self.fragment(key[0]).selection_set, current))
                else:
                    return False
        return True

    def fields_of(self, type_name: str) -> Mapping[str, str | None]:
        """The fields of a declared type; of `[X]`, `X[` and `]` those of a connection (Relay specification)."""
        if type_name.startswith("["):
            item = type_name[1:-1]
            return {"totalCount": None, "pageInfo": "]", "nodes": item, "edges": item + "["}
        if type_name.endswith("["):
            return {"cursor": None, "node": type_name[:-1]}
        if type_name == "]":
            return {"hasNextPage": None, "hasPreviousPage": None, "startCursor": None, "endCursor": None}
        return _listed(self.types[type_name])

    def fragment(self, name: str) -> ast.FragmentDefinitionNode:
        found = self.fragments.get(name)
        if found is None:
            raise _Refused
        return found


def _json_value(value: Any, rest: list[str]) -> str | _Unbound | None:
    for key in rest:
        if value is None:
            return None
        if not isinstance(value, dict):
            return _UNBOUND
        value = value.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _UNBOUND
