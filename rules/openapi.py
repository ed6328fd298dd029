"""OpenAPI: a service compiled from its published description (OpenAPI 3.0 and 3.1, JSON or YAML).

    services:
      shop: {openapi: {document: file:shop.json, sha256: ..., operations: [getOrder, "tag:orders"]}}

    read_openapi(text, file, ...) -> a service file, as a value     what the policy uses, and what
    as_service_file(value)        -> the same as YAML               `exeat policy import openapi` writes to start from

What a description says of an operation is taken as the most that it may be, never as a promise: GET is `read`, every
other method `write`; a parameter that is not described is refused; security schemes become the slot of a credential
and are never the client's own. What cannot be said exactly (a path segment that is partly literal, an unknown
reference, a server of its own) leaves that operation out, which is a denial, and is told in `left_out`. A template does
not stand for the more concrete paths beside it: those are other operations, described here or not chosen.
Source: OpenAPI Specification 3.1.1, sections 4.8.5 (server), 4.8.8 (paths), 4.8.12 (parameter), 4.8.27 (security).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from rules.matching import InvalidTemplate, parse_path
from rules.names import Destination, Host, InvalidName, parse_authority
from rules.operations.media import media_type
from rules.operations.path_unlike import MAX_PATHS
from rules.operations.strict_json import InvalidJson
from rules.operations.strict_json import load as load_json
from rules.reader import shown
from rules.service import EFFECTS
from rules.yaml12 import Problem, YamlError
from rules.yaml12 import load as load_yaml

MAX_DOCUMENT: Final = 16 << 20
"""Characters of a description."""
MAX_OPERATIONS: Final = 2_000

_METHODS: Final = ("get", "post", "put", "patch", "delete", "options")
"""HEAD goes with GET; TRACE is never forwarded."""
_CAPTURE: Final = re.compile(r"\{([^{}/]+)\}\Z")
_AUTHORITY: Final = frozenset({"authorization", "cookie", "proxy-authorization", "host"})
_MEDIA: Final = re.compile(r"[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+-]+\Z")


class OpenApiError(YamlError):
    """A description that no service can be made of. `problems` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What was made: a service file as a value (rules/service_file.py), and what is not in it."""

    service: dict[str, Any]
    left_out: tuple[str, ...]
    """`operation: why`, sorted."""


def read_openapi(
    text: str, file: str, *, name: str, base: str | None = None, operations: Sequence[str] | None = None
) -> Described:
    """Return the service `name` that the description `text` states. Raises OpenApiError.

    `base` stands in for the document's own server. `operations` are operation ids and `tag:NAME`; None takes all.
    """
    return _Reader(_document(text, file), file).service(name, base, operations)


def as_service_file(described: Described) -> str:
    """The service file as YAML text, with a comment for each operation that is left out."""
    told = "".join(f"# left out: {line}\n" for line in described.left_out)
    return told + yaml.safe_dump(described.service, sort_keys=False, allow_unicode=False, width=120)


def _document(text: str, file: str) -> Mapping[str, Any]:
    if len(text) > MAX_DOCUMENT:
        raise _error(file, "the description is larger than 16 MiB")
    if text.lstrip().startswith("{"):
        try:
            value = load_json(text.encode("utf-8"), nodes=4_000_000)
        except InvalidJson as error:
            raise _error(file, f"not strict JSON: {error}") from None
    else:
        value, _ = load_yaml(text, file)
    if not isinstance(value, Mapping):
        raise _error(file, "the description is an object")
    version = value.get("openapi")
    if not isinstance(version, str) or not version.startswith(("3.0.", "3.1.")):
        raise _error(file, "openapi is 3.0.x or 3.1.x; convert older descriptions first")
    return value


def _error(file: str, message: str) -> OpenApiError:
    return OpenApiError((Problem(file=file, line=1, column=1, message=message),))


class _LeftOut(Exception):
    """This operation cannot be said exactly."""


class _Reader:
    """One description."""

    def __init__(self, document: Mapping[str, Any], file: str) -> None:
        self.document = document
        self.file = file
        self.left_out: dict[str, str] = {}
        self.patterns: dict[tuple[str, int], list[list[str]]] = {}

    def service(self, name: str, base: str | None, wanted: Sequence[str] | None) -> Described:
        host, port, prefix = self.place(base)
        authority = Destination("https", host, port).authority
        kind, auth = self.credential(name)
        operations: dict[str, Any] = {}
        tests: list[dict[str, Any]] = []
        asked = set(wanted) if wanted is not None else None
        known: set[str] = set()
        stated = list(self.stated())
        for method, path, _, _ in stated:
            segments = [re.sub(r"\{[^{}/]*\}", "*", part) for part in path.removeprefix("/").split("/")]
            self.patterns.setdefault((method, len(segments)), []).append(segments)
        for method, path, item, operation in stated:
            ident = _ident(operation, method, path)
            tags = {f"tag:{tag}" for tag in _list(operation, "tags") if isinstance(tag, str)}
            known |= {ident, *tags}
            if asked is not None and not asked & {ident, *tags}:
                continue
            if len(operations) >= MAX_OPERATIONS:
                raise _error(self.file, f"more than {MAX_OPERATIONS} operations: choose with operations:")
            try:
                label = _label(ident)
                if label in operations:
                    raise _LeftOut("another operation is written alike")
                operations[label], sample = self.operation(method, path, prefix, item, operation, auth)
            except _LeftOut as error:
                self.left_out[ident] = str(error)
                continue
            if not tests and sample:
                url = f"https://{authority}{sample}"
                tests.append({"allow": f"GET {url}", "operation": label, "why": "the first plain read"})
        missing = sorted((asked or set()) - known)
        if missing:
            near = get_close_matches(missing[0], sorted(known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _error(self.file, f"the description has no {', '.join(missing[:5])}{hint}")
        if not operations:
            why = "; ".join(f"{key}: {text}" for key, text in sorted(self.left_out.items())[:3])
            raise _error(self.file, f"no operation is left to state{': ' + why if why else ''}")
        tests.append({"deny": f"DELETE https://{authority}/exeat-is-not-described", "why": "what nobody described"})
        title = self.document.get("info", {}).get("title") if isinstance(self.document.get("info"), Mapping) else None
        service: dict[str, Any] = {"version": 1, "service": name}
        if isinstance(title, str) and title.isprintable():
            service["title"] = title[:100]
        service["hosts"] = {"api": {"host": host.authority} if port == 443 else {"host": host.authority, "port": port}}
        if kind is not None:
            service["credential"] = kind
        if auth["headers"] or auth["query"]:
            service["auth"] = {key: sorted(values) for key, values in auth.items() if values}
        service["operations"] = operations
        service["tests"] = tests
        return Described(
            service=service, left_out=tuple(f"{key}: {text}" for key, text in sorted(self.left_out.items()))
        )

    # --- where it is ---

    def place(self, base: str | None) -> tuple[Host, int, str]:
        """(host, port, path prefix without a slash at its end)."""
        servers = _list(self.document, "servers")
        url = base or (servers[0].get("url") if servers and isinstance(servers[0], Mapping) else None)
        if base is not None and not base.startswith("https://"):
            raise _error(self.file, f"the base {shown(base)} is no https URL")
        if not isinstance(url, str) or "{" in url or not url.startswith("https://"):
            raise _error(self.file, "the description names no single https server: give one with base:")
        try:
            parts = urlsplit(url)
            host, port = parse_authority(parts.netloc, 443)
        except (InvalidName, ValueError):
            raise _error(self.file, "its server is not a host: give one with base:") from None
        prefix = parts.path.rstrip("/")
        if parts.query or parts.fragment or (prefix and not re.fullmatch(r"(?:/[A-Za-z0-9._~-]+)+", prefix)):
            raise _error(self.file, "its server has a path that cannot be a prefix: give one with base:")
        return host, port, prefix

    def credential(self, name: str) -> tuple[dict[str, Any] | None, dict[str, set[str]]]:
        """The slot of the first security scheme that has one, and every place where authority goes."""
        auth: dict[str, set[str]] = {"headers": set(), "query": set()}
        slot: dict[str, Any] | None = None
        for scheme in _mapping(_mapping(self.document, "components"), "securitySchemes").values():
            try:
                found = self.slot(self.resolved(scheme))
            except _LeftOut:
                continue
            if found is None:
                continue
            place = found.get("query")
            if place is not None:
                auth["query"].add(str(place))
            else:
                auth["headers"].add(str(found.get("header", "authorization")).lower())
            slot = slot or found
        if slot is None:
            return None, auth
        variable = re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_") or "API"
        if variable[0].isdigit():
            variable = f"API_{variable}"
        return {**slot, "at": ["api"], "placeholder": {"env": f"{variable}_KEY", "shape": "key_{32}"}}, auth

    def slot(self, scheme: Mapping[str, Any]) -> dict[str, Any] | None:
        match scheme.get("type"), str(scheme.get("scheme", "")).lower(), scheme.get("in"):
            case ("http", "bearer", _) | ("oauth2" | "openIdConnect", _, _):
                return {"kind": "bearer"}
            case "http", "basic", _:
                return {"kind": "basic"}
            case "apiKey", _, ("header" | "query") as where if isinstance(scheme.get("name"), str):
                key = str(scheme["name"])
                if where == "header" and key.lower() == "authorization":
                    return {"kind": "header", "header": "authorization"}
                return {"kind": where, where: key}
        return None

    # --- operations ---

    def stated(self) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
        """(method, path, path item, operation), in the document's order."""
        for path, raw in _mapping(self.document, "paths").items():
            try:
                item = self.resolved(raw)
            except _LeftOut as error:
                self.left_out[str(path)] = str(error)
                continue
            for method in _METHODS:
                operation = item.get(method)
                if isinstance(operation, Mapping):
                    yield method, str(path), item, operation

    def operation(
        self,
        method: str,
        path: str,
        prefix: str,
        item: Mapping[str, Any],
        operation: Mapping[str, Any],
        auth: Mapping[str, set[str]],
    ) -> tuple[dict[str, Any], str]:
        """(entry of a service file, path of a request that it allows or ""). Raises _LeftOut."""
        if "servers" in item or "servers" in operation:
            raise _LeftOut("it lies at a server of its own")
        template, names = _template(prefix + path)
        others = self.more_concrete(method, path, prefix)
        query, required, headers = self.parameters(item, operation, auth)
        request: dict[str, Any] = {"at": "api", "methods": [method.upper()], "paths": [template]}
        if others:
            request["match"] = {"matcher": "path_unlike", "params": {"paths": others}}
        if query:
            request["query"] = query
        if required:
            request["required"] = required
        kinds = self.body(operation)
        if kinds is not None:
            request["require"] = {"content-type": kinds}
        summary = operation.get("summary") or operation.get("description") or f"{method.upper()} {path}"
        why = " ".join(str(summary).split())
        entry: dict[str, Any] = {
            "effect": "read" if method == "get" else "write",
            "why": "".join(char for char in why if char.isprintable())[:160] or f"{method.upper()} {template}",
        }
        if names:
            entry["arguments"] = {name: f"{{{name}}}" for name in names}
        if headers:
            entry["headers"] = headers
        entry["requests"] = [request]
        plain = method == "get" and not required and not (others and names)
        return entry, re.sub(r"\{[^}]*\}", "x", template) if plain else ""

    def more_concrete(self, method: str, path: str, prefix: str) -> list[str]:
        """Paths of other operations that fit the template `path` and say in words what it leaves open."""
        mine = path.removeprefix("/").split("/")
        found: set[str] = set()
        for other in self.patterns.get((method, len(mine)), ()):
            pairs = list(zip(mine, other, strict=True))
            apart = any("{" not in own and "*" not in his and own != his for own, his in pairs)
            if not apart and any(_CAPTURE.match(own) and his != "*" for own, his in pairs):
                found.add(f"{prefix}/" + "/".join(own if his == "*" and "{" not in own else his for own, his in pairs))
        if len(found) > MAX_PATHS:
            raise _LeftOut("too many other paths would fit its template")
        return sorted(found)

    def parameters(
        self, item: Mapping[str, Any], operation: Mapping[str, Any], auth: Mapping[str, set[str]]
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        found: dict[tuple[str, str], Mapping[str, Any]] = {}
        for raw in (*_list(item, "parameters"), *_list(operation, "parameters")):
            parameter = self.resolved(raw)
            found[str(parameter.get("in")), str(parameter.get("name"))] = parameter
        query: dict[str, Any] = {}
        required: list[str] = []
        headers: list[str] = []
        for (where, name), parameter in found.items():
            if where == "query" and name not in auth["query"]:
                query[name] = self.values(parameter)
                if parameter.get("required") is True:
                    required.append(name)
            elif where == "header" and name.lower() not in _AUTHORITY | auth["headers"]:
                headers.append(name.lower())
        return query, required, sorted(set(headers))

    def values(self, parameter: Mapping[str, Any]) -> str | list[str]:
        schema = self.resolved(parameter.get("schema", {}))
        allowed = schema.get("enum")
        if isinstance(allowed, list) and allowed and all(isinstance(value, str) and value for value in allowed):
            return list(dict.fromkeys(allowed))
        return "any"

    def body(self, operation: Mapping[str, Any]) -> list[str] | None:
        """The media types that a body may have, None where any will do. "" where it may be absent."""
        if "requestBody" not in operation:
            return None
        described = self.resolved(operation["requestBody"])
        kinds = [media_type(str(kind)) for kind in _mapping(described, "content")]
        if not kinds or not all(_MEDIA.match(kind) for kind in kinds):
            return None
        return list(dict.fromkeys(kinds if described.get("required") is True else ["", *kinds]))

    def resolved(self, value: Any) -> Mapping[str, Any]:
        """`value`, or what its local reference names (one in a chain of at most eight). Raises _LeftOut."""
        for _ in range(8):
            if not isinstance(value, Mapping):
                raise _LeftOut("a part of it is no object")
            reference = value.get("$ref")
            if reference is None:
                return value
            if not isinstance(reference, str) or not reference.startswith("#/"):
                raise _LeftOut("a reference leads out of the description")
            value = self.document
            for step in reference[2:].split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                if not isinstance(value, Mapping) or step not in value:
                    raise _LeftOut("a reference leads nowhere")
                value = value[step]
        raise _LeftOut("references lead in a circle")


def _ident(operation: Mapping[str, Any], method: str, path: str) -> str:
    given = operation.get("operationId")
    return given if isinstance(given, str) and given else f"{method} {path}"


def _label(ident: str) -> str:
    """An operation's name in a service file: words of letters, digits and hyphens, with dots between."""
    parts = [re.sub(r"[^A-Za-z0-9]+", "-", part).strip("-") for part in re.split(r"[./]", ident)]
    label = ".".join(part for part in parts if part)
    if not label:
        raise _LeftOut("it has no name that could be written")
    return f"{label}.call" if label in EFFECTS else label


def _template(path: str) -> tuple[str, list[str]]:
    """The path as a template of ours, and the names of its captures. Raises _LeftOut."""
    names: list[str] = []
    parts: list[str] = []
    for part in path.removeprefix("/").split("/"):
        capture = _CAPTURE.match(part)
        if capture is None:
            parts.append(part)
            continue
        snake = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", capture[1]).lower()).strip("_")
        name = snake[:28] if snake[:1].isalpha() else f"p_{snake}"[:28]
        while name in names:
            name += "_"
        names.append(name)
        parts.append(f"{{{name}}}")
    template = "/" + "/".join(parts)
    try:
        parse_path(template)
    except InvalidTemplate:
        raise _LeftOut("a segment of its path is partly literal, or not canonical") from None
    return template, names


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(value: Mapping[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    return found if isinstance(found, list) else []
