"""The reader of service files (rules/services/*.yaml, and `services/*.yaml` beside a policy).

    version: 1
    service: small
    hosts: {api: {host: api.small.example, mirror: /v1}}
    credential: {kind: bearer, at: [api], placeholder: {env: SMALL_TOKEN, shape: "sm_{32}"}}
    auth: {headers: [authorization], query: [token]}
    operations:
      items.read:
        effect: read
        why: One sentence for a reviewer.
        arguments: {item: "{id}"}
        requests: [{at: api, methods: [GET], paths: ["/items/{id}"], query: {page: any}}]
    tests:
      - {allow: "GET https://api.small.example/items/1", operation: items.read, why: one item}
      - {deny: "POST https://api.small.example/items", near: method, why: a write}

Problems are collected and raised together, each with its line and column, so that an editor sees all at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from rules.arguments import Value
from rules.captured import check_fields, check_taking
from rules.credential_kinds import KINDS, VALUE
from rules.credential_slots import OPEN_KEYS, BadForm, read_form
from rules.matching import InvalidTemplate, parse_host_template, parse_path
from rules.names import DEFAULT_PORTS, Host, InvalidName, Scheme
from rules.operations import LATER, arguments_of, check_head_params, check_params
from rules.placeholders import InvalidShape, check_shape
from rules.policy import (
    ANSWERS,
    BodySpec,
    Effect,
    HeadSpec,
    HostPattern,
    PathPattern,
    PlaceholderSpec,
    RedirectSpec,
    Slot,
)
from rules.redirects import MAX_QUERY_KEYS, MAX_TARGETS, InvalidRedirect, check_redirect, parse_target
from rules.service import (
    EFFECTS,
    NATIVES,
    CredentialSlot,
    Endpoint,
    RequestDef,
    ServiceDef,
    ServiceTest,
    is_plain_prefix,
    put_hosts_in,
)
from rules.yaml12 import Marks, Path, Problem, YamlError, load

MAX_BOUND = 32 << 20
"""Bytes of a body that may be judged; larger operations are recognised by their head."""
MAX_PREFIX = 1 << 20
"""Bytes of the beginning of a body that may be judged."""


class CatalogueError(YamlError):
    """A service file that cannot be used. `problems` says why and where."""


def parse_service(text: str, filename: str) -> ServiceDef:
    """Return the service that `text` describes. Raises CatalogueError (a YamlError) with every problem found."""
    value, marks = load(text, filename)
    return _Parser(filename, marks).service(value)


def parse_without_tests(text: str, filename: str) -> ServiceDef:
    """The same for a file of the package, whose tests were run when it was made: they are its end and not read."""
    value, marks = load(text.partition("\ntests:\n")[0] + "\n", filename, packaged=True)
    return _Parser(filename, marks, tested=False).service(value)


_SERVICE_KEYS = ("version", "service", "title", "native", "hosts", "credential", "auth", "headers", "test_headers")
_OPERATION_KEYS = (
    "effect",
    "why",
    "arguments",
    "bind",
    "answer",
    "answer_headers",
    "takes",
    "fold",
    "headers",
    "placeholders",
    "redirects",
    "shared_state",
    "download",
    "later",
    "native",
)
_REQUEST_KEYS = (
    "at",
    "when",
    "methods",
    "paths",
    "encoded_slash",
    "query",
    "required",
    "require",
    "match",
    "body",
    "answer",
    "arguments",
    "unbound",
)
_NEEDED = ("at", "methods", "paths")
_EVERY_PATH = ("/", "/**")
_TEST_KEYS = ("allow", "deny", "operation", "effect", "arguments", "near", "headers", "body", "why")
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "LIST")


class _Parser:
    """Reads one file; collects problems and raises them together, so that an editor sees all at once."""

    def __init__(self, filename: str, marks: Marks, *, tested: bool = True) -> None:
        self.filename = filename
        self.marks = marks
        self.tested = tested
        self.problems: list[Problem] = []

    def service(self, value: Mapping[str, Any]) -> ServiceDef:
        self.keys(value, (), (*_SERVICE_KEYS, "operations", "tests"), ("version", "service", "hosts", "operations"))
        if value.get("version") != 1:
            self.problem(("version",), "version must be 1")
        name = self.text(value.get("service"), ("service",))
        native = self.choice(value.get("native", "problem"), ("native",), NATIVES)
        endpoints = self.endpoints(value.get("hosts"), ("hosts",))
        common = self.names(value.get("headers"), ("headers",))
        requests: list[RequestDef] = []
        for op_name, operation in self.mapping(value.get("operations"), ("operations",)).items():
            requests += self.operation(op_name, operation, ("operations", op_name), endpoints, common, native)
        auth = self.mapping(value.get("auth", {}), ("auth",))
        self.keys(auth, ("auth",), ("headers", "query"))
        credential, credential_at = self.credential(value.get("credential"), ("credential",), endpoints)
        test_headers = self.header_pairs(value.get("test_headers"), ("test_headers",))
        names = {request.operation for request in requests}
        tests = tuple(
            self.test(item, ("tests", index), names, test_headers)
            for index, item in enumerate(self.items(value.get("tests", []), ("tests",)) if self.tested else [])
        )
        for expect in ("allow", "deny"):
            if self.tested and not any(test.expect == expect for test in tests):
                self.problem(("tests",), f"a service needs at least one {expect} test")
        if self.problems:
            raise CatalogueError(tuple(self.problems))
        return put_hosts_in(
            ServiceDef(
                name=name,
                title=self.text(value.get("title", name), ("title",)),
                native=native,
                endpoints=endpoints,
                operations=(),
                credential=credential,
                credential_at=credential_at,
                auth_headers=self.names(auth.get("headers"), ("auth", "headers")),
                auth_query=self.names(auth.get("query"), ("auth", "query")),
                requests=tuple(requests),
                tests=tests,
            )
        )

    def endpoints(self, value: Any, path: Path) -> dict[str, Endpoint]:
        found: dict[str, Endpoint] = {}
        for key, item in self.mapping(value, path).items():
            where = (*path, key)
            entry = self.mapping(item, where)
            self.keys(entry, where, ("host", "scheme", "port", "mirror", "tenant"), ("host",))
            mirror = entry.get("mirror")
            text = self.text(entry.get("host"), (*where, "host"))
            try:
                pattern = (
                    parse_host_template(text)
                    if "{" in text
                    else HostPattern(kind="exact", suffix=Host.parse(text).text)
                )
            except (InvalidName, InvalidTemplate) as error:
                self.problem((*where, "host"), str(error))
                continue
            tenant = self.text(entry["tenant"], (*where, "tenant")) if "tenant" in entry else None
            if mirror is not None and (not isinstance(mirror, str) or not is_plain_prefix(mirror)):
                self.problem((*where, "mirror"), "a mirror is a path prefix without a slash at its end")
                mirror = None
            # Clear text only where the service's clients ask for it (signed package archives, mostly).
            scheme = cast("Scheme", self.choice(entry.get("scheme", "https"), (*where, "scheme"), ("https", "http")))
            port = entry.get("port", DEFAULT_PORTS[scheme])
            if not isinstance(port, int) or not 0 < port < 65536:
                self.problem((*where, "port"), "not a port")
                port = 443
            found[key] = Endpoint(scheme=scheme, pattern=pattern, port=port, prefix="", mirror=mirror, tenant=tenant)
        return found

    def credential(
        self, value: Any, path: Path, endpoints: Mapping[str, Endpoint]
    ) -> tuple[CredentialSlot | None, tuple[str, ...]]:
        if value is None:
            return None, ()
        entry = self.mapping(value, path)
        kind = self.choice(entry.get("kind"), (*path, "kind"), tuple(KINDS))
        own = KINDS[kind].keys if kind in KINDS else ()
        self.keys(entry, path, ("kind", "at", "placeholder", *own), ("kind", "at", "placeholder"))
        written = {key: entry[key] for key in own if key in entry and key != "username"}
        slots: tuple[Slot, ...] = ()
        try:
            slots = read_form(kind, {**OPEN_KEYS.get(kind, {}), **written}).slots
        except BadForm as error:
            self.problem((*path, error.key) if error.key in entry else path, str(error))
        except KeyError:
            pass  # a kind that does not exist: said above
        at = self.at(entry.get("at"), (*path, "at"), endpoints)
        username = entry.get("username")
        slot = CredentialSlot(
            kind=kind,
            written=written,
            slots=slots,
            authorities=(),
            placeholders=self.placeholders(entry.get("placeholder"), (*path, "placeholder"), slots),
            username=None if username is None else self.text(username, (*path, "username")),
        )
        return slot, at

    def placeholders(self, value: Any, path: Path, slots: tuple[Slot, ...]) -> tuple[tuple[str, PlaceholderSpec], ...]:
        entry = self.mapping(value, path)
        lead = slots[0].part if slots else VALUE
        items = (
            {lead: (entry, path)} if "env" in entry else {part: (item, (*path, part)) for part, item in entry.items()}
        )
        found: list[tuple[str, PlaceholderSpec]] = []
        for part, (item, where) in items.items():
            shown = self.mapping(item, where)
            self.keys(shown, where, ("env", "shape"), ("env", "shape"))
            shape = self.text(shown.get("shape"), (*where, "shape"))
            try:
                check_shape(shape)
            except InvalidShape as error:
                self.problem((*where, "shape"), str(error))
            found.append((part, PlaceholderSpec(env=self.text(shown.get("env"), (*where, "env")), shape=shape)))
        return tuple(found)

    def operation(
        self, name: str, value: Any, path: Path, endpoints: Mapping[str, Endpoint], common: tuple[str, ...], native: str
    ) -> list[RequestDef]:
        entry = self.mapping(value, path)
        self.keys(entry, path, (*_OPERATION_KEYS, "request_bytes", "requests"), ("effect", "why", "requests"))
        if name in EFFECTS or not name or not all(part.replace("-", "").isalnum() for part in name.split(".")):
            self.problem(path, "an operation name is words with dots and not the name of an effect")
        effect = cast("Effect", self.choice(entry.get("effect"), (*path, "effect"), EFFECTS))
        self.text(entry.get("why"), (*path, "why"))
        inert = self.choice(entry.get("placeholders", "refused"), (*path, "placeholders"), ("refused", "inert"))
        own = self.names(entry.get("headers"), (*path, "headers"))
        default_arguments = self.strings(entry.get("arguments"), (*path, "arguments"))
        request_bytes = entry.get("request_bytes")
        if request_bytes is not None and (not isinstance(request_bytes, int) or request_bytes < 0):
            self.problem((*path, "request_bytes"), "a number of bytes")
            request_bytes = None
        later = self.flag(entry, path, "later")
        redirects = self.redirects(entry, path, endpoints)
        answer, captures = self.answer(entry, path)
        takes = self.takes(entry, path)
        shared_state = self.shared_state(entry, path)
        told_apart: set[str] = set()
        requests: list[RequestDef] = []
        items = self.items(entry.get("requests"), (*path, "requests"))
        for index, item in enumerate(items):
            where: Path = (*path, "requests", index)
            request = self.mapping(item, where)
            self.keys(request, where, _REQUEST_KEYS, ("at", "methods") if "match" in request else _NEEDED)
            encoded_slash = self.flag(request, where, "encoded_slash")
            head = self.head(request.get("match"), (*where, "match"))
            paths = (
                self.paths(request.get("paths"), (*where, "paths"), encoded_slash)
                if "paths" in request or head is None
                else _EVERY_PATH
            )
            query, required = self.query(request, where)
            arguments = (
                self.strings(request["arguments"], (*where, "arguments"))
                if "arguments" in request
                else default_arguments
            )
            self.known_captures(arguments, paths, (*where, "paths"))
            body = BodySpec(matcher=LATER, bound=0) if later else self.body(request.get("body"), (*where, "body"))
            at = self.at(request.get("at"), (*where, "at"), endpoints)
            must_bind = self.names(entry.get("bind"), (*path, "bind"), lower=False)
            unbound = self.names(request.get("unbound"), (*where, "unbound"), lower=False)
            stated = set(arguments)
            for matcher in (spec for spec in (head, body) if spec is not None):
                stated |= arguments_of(matcher.matcher, matcher.params)
            needed = {*must_bind, *(tenant for key in at if (tenant := endpoints[key].tenant) is not None)}
            if not needed <= stated:
                self.problem(where, "an argument that rules must bind is not stated by this request")
            if {*unbound} & {*needed, *stated, *(shared_state or ())}:
                self.problem((*where, "unbound"), "what must be bound, or is stated here, cannot be left open")
            told_apart |= stated
            requests.append(
                RequestDef(
                    operation=name,
                    effect=effect,
                    at=at,
                    when=cast(
                        "Any", self.choice(request.get("when", "both"), (*where, "when"), ("both", "public", "mirror"))
                    ),
                    methods=tuple(
                        self.choice(method, (*where, "methods"), _METHODS)
                        for method in self.items(request.get("methods"), (*where, "methods"))
                    ),
                    paths=paths,
                    encoded_slash=encoded_slash,
                    query=query,
                    query_required=required,
                    request_headers=self.required_headers(request.get("require"), (*where, "require")),
                    head=head,
                    body=body,
                    arguments=arguments,
                    must_bind=must_bind,
                    unbound=unbound,
                    fold=self.names(entry.get("fold"), (*path, "fold")),
                    extra_request_headers=tuple(dict.fromkeys((*common, *own))),
                    placeholders_inert=inert == "inert",
                    redirects=redirects,
                    download=self.flag(entry, path, "download"),
                    request_bytes=request_bytes,
                    native=self.choice(entry.get("native", native), (*path, "native"), NATIVES),
                    answer=self.choice(request.get("answer", answer), where, ("", *ANSWERS)),
                    captures=captures,
                    takes=takes,
                    extra_response_headers=self.names(entry.get("answer_headers"), (*path, "answer_headers")),
                    shared_state=shared_state,
                )
            )
        if not {*(shared_state or ())} <= told_apart:
            self.problem((*path, "shared_state"), "an argument that tells sandboxes apart is stated by no request")
        return requests

    def answer(self, entry: Mapping[str, Any], path: Path) -> tuple[Any, tuple[str, ...]]:
        """`answer:` is a name, or says which fields of the answer are authority: `{capture: [token]}`."""
        value, where = entry.get("answer", ""), (*path, "answer")
        if not isinstance(value, Mapping):
            if value == "capture":
                self.problem(where, "say which fields are authority: {capture: [token]}")
            return value, ()
        self.keys(value, where, ("capture",), ("capture",))
        fields = self.names(value.get("capture"), (*where, "capture"), lower=False)
        if entry.get("effect") != "mint":
            self.problem(where, "only what mints authority is captured from")
        try:
            check_fields(fields)
        except ValueError as error:
            self.problem(where, str(error))
        return "capture", fields

    def takes(self, entry: Mapping[str, Any], path: Path) -> str:
        if "takes" not in entry:
            return ""
        name = self.text(entry["takes"], (*path, "takes"))
        try:
            check_taking(name)
        except ValueError as error:
            self.problem((*path, "takes"), str(error))
        if entry.get("effect") == "mint":
            self.problem((*path, "takes"), "what mints authority is given the credential itself")
        return name

    def redirects(
        self, entry: Mapping[str, Any], path: Path, endpoints: Mapping[str, Endpoint]
    ) -> tuple[RedirectSpec, ...]:
        """`redirects:` is one declaration, or a list of them where hosts differ in path or query."""
        if "redirects" not in entry:
            return ()
        value, where = entry["redirects"], (*path, "redirects")
        if entry.get("effect") != "read":
            self.problem(where, "only a read is redirected: whatever else an answer leads to is judged anew")
        several = isinstance(value, list)
        items = self.items(value, where) if several else [value]
        # A host where a tenant has to be bound holds what others keep: it does not tell whose.
        shared = bool(entry.get("bind"))
        own = [place.host for place in endpoints.values() if place.host is not None and not shared]
        found = (self.redirect(item, (*where, at) if several else where, own) for at, item in enumerate(items))
        return tuple(spec for spec in found if spec is not None)

    def redirect(self, value: Any, path: Path, own: list[Host], *, first: bool = True) -> RedirectSpec | None:
        before = len(self.problems)
        entry = self.mapping(value, path)
        self.keys(entry, path, ("to", "path", "query_keys", *(("then",) if first else ())), ("to",))
        after: tuple[RedirectSpec, ...] = ()
        if first and "then" in entry:
            several = isinstance(entry["then"], list)
            items = self.items(entry["then"], (*path, "then")) if several else [entry["then"]]
            found = (
                self.redirect(item, (*path, "then", *((at,) if several else ())), own, first=False)
                for at, item in enumerate(items)
            )
            after = tuple(spec for spec in found if spec is not None)
        to: list[HostPattern] = []
        for index, item in enumerate(self.items(entry.get("to"), (*path, "to")) if "to" in entry else []):
            try:
                to.append(parse_target(self.text(item, (*path, "to", index))))
            except InvalidRedirect as error:
                self.problem((*path, "to", index), str(error))
        below: PathPattern | None = None
        if "path" in entry:
            try:
                below = parse_path(self.text(entry["path"], (*path, "path")))
            except InvalidTemplate as error:
                self.problem((*path, "path"), str(error))
        keys = self.names(entry.get("query_keys"), (*path, "query_keys"), lower=False)
        for key, most, listed in (("to", MAX_TARGETS, to), ("query_keys", MAX_QUERY_KEYS, keys)):
            if len(listed) > most or len(set(listed)) != len(listed):
                self.problem((*path, key), f"at most {most}, and each of them once")
        if len(self.problems) > before:
            return None
        spec = RedirectSpec(to=tuple(to), path=below, query_keys=keys, then=after)
        try:
            if self.tested:  # those of the package were checked when it was made
                check_redirect(spec, own)
        except InvalidRedirect as error:
            self.problem(path, str(error))
        return spec

    def shared_state(self, entry: Mapping[str, Any], path: Path) -> tuple[str, ...] | None:
        if "shared_state" not in entry:
            return None
        where = (*path, "shared_state")
        if not isinstance(entry["shared_state"], list):
            self.problem(where, "a list of the arguments that tell sandboxes apart; [] where none does")
            return ()
        return self.names(entry["shared_state"], where, lower=False)

    def paths(self, value: Any, path: Path, encoded_slash: bool) -> tuple[str, ...]:
        found: list[str] = []
        for index, template in enumerate(self.items(value, path)):
            text = self.text(template, (*path, index), empty=True)
            try:
                parse_path(text or "/", encoded_slash=encoded_slash)
            except InvalidTemplate as error:
                self.problem((*path, index), str(error))
            else:
                found.append(text)
        return tuple(found)

    def known_captures(self, arguments: Mapping[str, str], paths: tuple[str, ...], path: Path) -> None:
        """A path that yields half of an argument is a mistake: with `{owner}` alone `{owner}/{repo}` would vanish."""
        for template in paths:
            captured = set(parse_path(template or "/").names)
            for argument in arguments.values():
                written = (part.partition("}")[0] for part in argument.split("{")[1:])
                places = {place for place in written if not place.startswith(("query.", "host."))}
                if places & captured and not places <= captured:
                    self.problem(path, "a path yields only a part of an argument")

    def query(self, request: Mapping[str, Any], path: Path) -> tuple[Any, tuple[str, ...]]:
        required = self.names(request.get("required"), (*path, "required"), lower=False)
        value = request.get("query", {})
        if value == "any":
            return None, required
        allowed: dict[str, tuple[str, ...] | None] = {}
        for name, item in self.mapping(value, (*path, "query")).items():
            where = (*path, "query", name)
            allowed[name] = (
                None if item == "any" else tuple(self.text(entry, where) for entry in self.items(item, where))
            )
        if not set(required) <= allowed.keys():
            self.problem((*path, "required"), "a required parameter is not in query")
        return allowed, required

    def required_headers(self, value: Any, path: Path) -> dict[str, tuple[str, ...]]:
        if value is None:
            return {}
        return {
            name.lower(): tuple(
                self.text(item, (*path, name), empty=True).lower() for item in self.items(entry, (*path, name))
            )
            for name, entry in self.mapping(value, path).items()
        }

    def head(self, value: Any, path: Path) -> HeadSpec | None:
        if value is None:
            return None
        entry = self.mapping(value, path)
        self.keys(entry, path, ("matcher", "params"), ("matcher",))
        matcher = self.text(entry.get("matcher"), (*path, "matcher"))
        params = self.mapping(entry.get("params", {}), (*path, "params"))
        try:
            check_head_params(matcher, params)
        except ValueError as error:
            self.problem((*path, "matcher"), str(error))
        return HeadSpec(matcher=matcher, params=params)

    def body(self, value: Any, path: Path) -> BodySpec | None:
        if value is None:
            return None
        entry = self.mapping(value, path)
        self.keys(entry, path, ("matcher", "bound", "params", "prefix"), ("matcher", "bound"))
        prefix = self.flag(entry, path, "prefix")
        bound = entry.get("bound")
        if not isinstance(bound, int) or isinstance(bound, bool) or not 0 < bound <= MAX_BOUND:
            self.problem((*path, "bound"), "a bound is a number of bytes up to 32 MiB")
            bound = 1
        params = self.mapping(entry.get("params", {}), (*path, "params"))
        matcher = self.text(entry.get("matcher"), (*path, "matcher"))
        try:
            check_params(matcher, params)
        except ValueError as error:
            self.problem((*path, "matcher"), str(error))
        if prefix and bound > MAX_PREFIX:
            self.problem((*path, "bound"), "a prefix is at most 1 MiB")
        return BodySpec(matcher=matcher, bound=bound, params=params, prefix=prefix)

    def test(self, value: Any, path: Path, names: set[str], test_headers: tuple[tuple[str, str], ...]) -> ServiceTest:
        entry = self.mapping(value, path)
        self.keys(entry, path, _TEST_KEYS, ("why",))
        stated = [key for key in ("allow", "deny") if key in entry]
        if len(stated) != 1:
            self.problem(path, "a test says either allow or deny")
        expect = stated[0] if stated else "deny"
        method, _, url = self.text(entry.get(expect), (*path, expect)).partition(" ")
        if not url:
            self.problem((*path, expect), "a test names a method and a URL")
        operation = ""
        if expect == "allow":
            operation = self.text(entry.get("operation"), (*path, "operation"))
            if operation not in names:
                self.problem((*path, "operation"), "unknown operation")
        body = entry.get("body")
        headers = (
            self.header_pairs(entry["headers"], (*path, "headers"))
            if "headers" in entry
            else (test_headers if body is not None else ())
        )
        return ServiceTest(
            expect=expect,
            method=method,
            url=url,
            why=self.text(entry.get("why"), (*path, "why")),
            operation=operation,
            effect=entry.get("effect"),
            arguments=self.values(entry["arguments"], (*path, "arguments")) if "arguments" in entry else None,
            near=entry.get("near"),
            headers=headers,
            body=None if body is None else _test_body(body),
            line=self.marks.value(path).line,
        )

    # Small readers: each returns a value of the right type, and notes a problem where the file had another.

    def problem(self, path: Path, message: str) -> None:
        mark = self.marks.value(path)
        self.problems.append(Problem(file=self.filename, line=mark.line, column=mark.column, message=message))

    def keys(
        self, value: Mapping[str, Any], path: Path, known: tuple[str, ...], required: tuple[str, ...] = ()
    ) -> None:
        for key in value:
            if key not in known:
                mark = self.marks.key((*path, key))
                message = f"unknown key; known here: {', '.join(known)}"
                self.problems.append(Problem(file=self.filename, line=mark.line, column=mark.column, message=message))
        for key in required:
            if key not in value:
                self.problem(path, f"missing key {key}")

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.problem(path, "a mapping is needed here")
        return {}

    def items(self, value: Any, path: Path) -> list[Any]:
        if isinstance(value, list) and value:
            return value
        self.problem(path, "a list with at least one entry is needed here")
        return []

    def text(self, value: Any, path: Path, *, empty: bool = False) -> str:
        if isinstance(value, str) and (value or empty):
            return value
        self.problem(path, "text is needed here")
        return ""

    def choice(self, value: Any, path: Path, allowed: tuple[str, ...]) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        self.problem(path, f"one of: {', '.join(allowed)}")
        return allowed[0]

    def flag(self, value: Mapping[str, Any], path: Path, key: str) -> bool:
        flag = value.get(key, False)
        if not isinstance(flag, bool):
            self.problem((*path, key), "true or false is needed here")
            return False
        return flag

    def names(self, value: Any, path: Path, *, lower: bool = True) -> tuple[str, ...]:
        if value is None or value == []:
            return ()
        found = [self.text(item, (*path, index)) for index, item in enumerate(self.items(value, path))]
        return tuple(name.lower() if lower else name for name in found)

    def strings(self, value: Any, path: Path) -> dict[str, str]:
        if value is None:
            return {}
        return {key: self.text(item, (*path, key)) for key, item in self.mapping(value, path).items()}

    def values(self, value: Any, path: Path) -> dict[str, Value]:
        """Text, or a list of texts for an argument with several values."""
        found: dict[str, Value] = {}
        for key, item in self.mapping(value, path).items():
            where = (*path, key)
            if isinstance(item, list):
                several = tuple(self.text(entry, (*where, index)) for index, entry in enumerate(item))
                found[key] = tuple(sorted(set(several)))
            else:
                found[key] = self.text(item, where)
        return found

    def header_pairs(self, value: Any, path: Path) -> tuple[tuple[str, str], ...]:
        return tuple((name.lower(), text) for name, text in self.strings(value, path).items())

    def at(self, value: Any, path: Path, endpoints: Mapping[str, Endpoint]) -> tuple[str, ...]:
        keys = [value] if isinstance(value, str) else self.items(value, path)
        for key in keys:
            if key not in endpoints:
                self.problem(path, "not one of this service's hosts")
        return tuple(key for key in keys if key in endpoints)


def _test_body(value: Any) -> bytes:
    return value.encode("utf-8") if isinstance(value, str) else json.dumps(value).encode("utf-8")
