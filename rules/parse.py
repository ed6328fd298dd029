"""`parse_sources`: from the three files to a document, secret bindings, warnings and tests (RULINGS 3.6).

 1. services: the built-in catalogue, then service files, then `services:` of policy (like/base)
 2. the operator's credentials.yaml, with its own destinations
 3. destinations of policy
 4. roles and `everyone`; `include:` takes over the rules of other roles
 5. what takes two rules or two files to see (rules/checks.py)
 6. the document (rules/document.py), which is compiled once here so that it is known to be good

Everything that is wrong is reported together, each with file:line:column; nothing is half accepted.
`tests:` are read here and run by the caller (rules/policytests.py), before a policy is put in force.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, cast

from rules import grammar
from rules.catalogue import (
    InvalidBase,
    ServiceDef,
    UnknownService,
    builtin_services,
    parse_service,
    resolve_service,
)
from rules.checks import (
    check_ambiguity,
    check_credentials,
    check_placeholders,
    check_places,
    check_storage,
    warn_of_dead_rules,
)
from rules.compile import DocumentFault, compile_policy
from rules.credentials_file import SecretBinding, WrittenCredential, read_credentials
from rules.destinations import read_destinations
from rules.document import VERSION, encode_credential, encode_destination, encode_operation, encode_rule
from rules.names import RuleId
from rules.openapi import as_service_file, read_openapi
from rules.policy import CredentialDef, DestinationDef, Operation
from rules.policy_file import Surroundings, WrittenRole, WrittenRule, read_everyone, read_role
from rules.policytests import PolicyTest, json_body
from rules.reader import Node, Problems, Rejected, shown
from rules.reasons import REASONS
from rules.secret_sources import SourceDef, kinds_of, read_sources
from rules.sigv4 import QUERY_KEYS
from rules.yaml12 import Problem, YamlError

ATTRIBUTE = grammar.ATTRIBUTE
valid_attribute = grammar.valid_attribute


class PolicyError(ValueError):
    """The sources are not a policy. `problems` says why and where; str() has one `file:line:column: message` a line."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The texts, by file name (names are only for messages). `ca_files` reads a `ca: file:` path (rules is pure)."""

    policy: Mapping[str, str]
    credentials: tuple[str, str] | None = None
    """(file name, text) of the operator's credentials.yaml."""
    services: Mapping[str, str] = field(default_factory=dict)
    ca_files: Callable[[str], str] | None = None
    descriptions: Callable[[str], str] | None = None
    """Reads an `openapi: {document: file:...}` path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """`document` is plain JSON for compile_policy; `secrets` never leaves the vault."""

    document: dict[str, Any]
    secrets: Mapping[str, SecretBinding]
    secret_sources: Mapping[str, SourceDef]
    """The operator's `sources:`. Never leaves the vault either."""
    places: Mapping[str, DestinationDef]
    """The operator's own `destinations:`: how the vault itself may reach a host. Policy adds nothing to them."""
    warnings: tuple[Problem, ...]
    tests: tuple[PolicyTest, ...]


def parse_sources(sources: Sources) -> Parsed:
    """Return what `sources` say. Raises PolicyError with every problem found."""
    problems = Problems()
    tops = [top for name, text in sorted(sources.policy.items()) if (top := _load(name, text, problems)) is not None]
    if not sources.policy:
        problems.errors.append(Problem(file="policy", line=1, column=1, message="there is no policy; see exeat init"))
    files = [(top, fields) for top in tops if (fields := _top(top)) is not None]
    services = _services(sources, files, problems)
    operator = None if sources.credentials is None else _load(*sources.credentials, problems)
    written, settled, secret_sources = _operator(operator, sources, problems)
    destinations = {**_destinations(files, settled, sources, problems), **settled}
    around = Surroundings(services=services, destinations=destinations)
    roles = _roles(files, around, problems)
    for role in roles.values():
        role.rules = [_with_query_slot(entry, written) for entry in role.rules]
    if not roles and not problems.errors and files:
        files[0][0].note("the policy has no roles")
    ports = {text: entry.port for text, entry in destinations.items() if entry.port is not None}
    credentials: dict[str, CredentialDef] = {name: entry.definition(ports) for name, entry in written.items()}
    for role in roles.values():
        check_places(role, problems)
        check_ambiguity(role, problems)
        check_storage(role, problems)
        warn_of_dead_rules(role)
    credentials = check_credentials(written, credentials, roles.values(), problems)
    for role in roles.values():
        check_placeholders(role, credentials, problems)
    _warn_of_moved_hosts(files, credentials, problems)
    tests = _tests(files, roles, problems)
    _raise(problems)
    document = _document(roles, credentials, destinations)
    try:
        compile_policy(document)
    except DocumentFault as fault:  # our own parser and compiler disagree: nothing is put in force
        raise PolicyError((Problem(file="policy", line=1, column=1, message=str(fault)),)) from None
    return Parsed(
        document=document,
        secrets={name: entry.secret for name, entry in written.items()},
        secret_sources=secret_sources,
        places=settled,
        warnings=tuple(sorted(problems.warnings, key=lambda problem: (problem.file, problem.line, problem.column))),
        tests=tests,
    )


# --- files ---


def _load(name: str, text: str, problems: Problems) -> Node | None:
    try:
        return Node.load(text, name, problems)
    except YamlError as error:
        problems.errors += error.problems
        return None


def _top(top: Node) -> dict[str, Node] | None:
    try:
        fields = top.fields("version", "destinations services roles everyone tests")
        fields["version"].natural(1, 1)
    except Rejected:
        return None
    return fields


def _raise(problems: Problems) -> None:
    if problems.errors:
        unique = dict.fromkeys(problems.errors)
        raise PolicyError(tuple(sorted(unique, key=lambda problem: (problem.file, problem.line, problem.column))))


def _services(
    sources: Sources, files: list[tuple[Node, dict[str, Node]]], problems: Problems
) -> Mapping[str, ServiceDef]:
    # The built-in ones stay behind, so that only those are parsed that policy names.
    services: ChainMap[str, ServiceDef] = ChainMap({}, cast("MutableMapping[str, ServiceDef]", builtin_services()))
    for name, text in sorted(sources.services.items()):
        try:
            service = parse_service(text, name)
        except YamlError as error:
            problems.errors += error.problems
            continue
        if service.name in services:
            message = f"service {shown(service.name)} is already in the catalogue"
            problems.errors.append(Problem(file=name, line=1, column=1, message=message))
            continue
        services[service.name] = _with_authority(service)
    for _, fields in files:
        if "services" not in fields:
            continue
        with problems.collecting():
            for name, node in fields["services"].entries():
                with problems.collecting():
                    described = isinstance(node.value, dict) and "openapi" in node.value
                    services[name] = (
                        _described(name, node, services, sources) if described else _like(name, node, services)
                    )
    return services


def _like(name: str, node: Node, services: Mapping[str, ServiceDef]) -> ServiceDef:
    grammar.checked_name(node, name)
    if name in services:
        node.fail(f"service {shown(name)} is already in the catalogue; give it another name", on_key=True)
    fields = node.fields("like base")
    like = fields["like"].word(builtin_services())
    try:
        service = resolve_service(services, name, like, fields["base"].text())
    except (InvalidBase, UnknownService) as error:
        fields["base"].fail(str(error))
    if not service.operations:
        fields["like"].fail(f"service {like} has nothing that a mirror could serve")
    return service


def _with_authority(service: ServiceDef) -> ServiceDef:
    """`service` with its own auth slots on each operation: the catalogue's list knows only the built-in ones."""
    headers = tuple(name.lower() for name in service.auth_headers)
    query = tuple(name.lower() for name in service.auth_query)
    return replace(
        service, operations=tuple(replace(op, auth_headers=headers, auth_query=query) for op in service.operations)
    )


def _described(name: str, node: Node, services: Mapping[str, ServiceDef], sources: Sources) -> ServiceDef:
    """`openapi:`: a service compiled from its published description, pinned by its digest."""
    grammar.checked_name(node, name)
    if name in services:
        node.fail(f"service {shown(name)} is already in the catalogue; give it another name", on_key=True)
    fields = node.fields("openapi", "base")
    wanted = fields["openapi"].fields("document sha256", "operations")
    place = wanted["document"].text()
    if not place.startswith("file:"):
        wanted["document"].fail("expected file: and the path of an OpenAPI description")
    if sources.descriptions is None:
        wanted["document"].fail("no file can be read here")
    try:
        text = sources.descriptions(place.removeprefix("file:"))
    except (OSError, ValueError):
        wanted["document"].fail(f"{shown(place)} cannot be read")
    digest = sha256(text.encode("utf-8")).hexdigest()
    if wanted["sha256"].text() != digest:
        wanted["sha256"].fail(
            f"the description is another one: its SHA-256 is {digest}; read what changed, then write that here"
        )
    base = fields["base"].text() if "base" in fields else None
    chosen = wanted["operations"].texts(empty="an empty list would leave nothing") if "operations" in wanted else None
    try:
        found = read_openapi(text, place, name=name, base=base, operations=chosen)
        return _with_authority(parse_service(as_service_file(found), place))
    except YamlError as error:
        wanted["document"].fail(error.problems[0].message)


def _operator(
    top: Node | None, sources: Sources, problems: Problems
) -> tuple[dict[str, WrittenCredential], dict[str, DestinationDef], dict[str, SourceDef]]:
    """Return the credentials, the destinations that the operator settled, and the sources of secrets."""
    written: dict[str, WrittenCredential] = {}
    settled: dict[str, DestinationDef] = {}
    found: dict[str, SourceDef] = {}
    if top is not None:
        with problems.collecting():
            fields = top.fields("version", "credentials destinations sources")
            fields["version"].natural(1, 1)
            if "destinations" in fields:
                settled = read_destinations(fields["destinations"], sources.ca_files)
            if "sources" in fields:
                found = read_sources(fields["sources"], settled)
            if "credentials" in fields:
                written = read_credentials(fields["credentials"], builtin_services(), kinds_of(found), settled)
    return written, settled, found


def _destinations(
    files: list[tuple[Node, dict[str, Node]]],
    settled: Mapping[str, DestinationDef],
    sources: Sources,
    problems: Problems,
) -> dict[str, DestinationDef]:
    """The entries of policy. What the operator wrote for a host cannot be changed there."""
    found: dict[str, DestinationDef] = {}
    for _, fields in files:
        if "destinations" not in fields:
            continue
        with problems.collecting():
            for text, entry in read_destinations(fields["destinations"], sources.ca_files).items():
                if text in found:
                    fields["destinations"].note(f"{text} stands in two files")
                if text in settled and settled[text] != entry:
                    fields["destinations"].note(f"{text} is settled by destinations: in credentials.yaml")
                found[text] = entry
    return found


def _warn_of_moved_hosts(
    files: list[tuple[Node, dict[str, Node]]], credentials: Mapping[str, CredentialDef], problems: Problems
) -> None:
    bound = {host.text: name for name, entry in credentials.items() for host in entry.hosts}
    for _, fields in files:
        if "destinations" not in fields:
            continue
        if not isinstance(fields["destinations"].value, dict):
            continue  # already complained of
        for key, node in fields["destinations"].entries():
            name = bound.get(key.lower().rstrip("."))
            if name is not None:
                node.warn(
                    f"policy decides where {key} is, and credential {name} goes there; "
                    "to settle it, move this entry to credentials.yaml"
                )


# --- roles ---


def _roles(
    files: list[tuple[Node, dict[str, Node]]], around: Surroundings, problems: Problems
) -> dict[str, WrittenRole]:
    roles: dict[str, WrittenRole] = {}
    everyone: list[WrittenRule] = []
    for _, fields in files:
        if "roles" in fields:
            with problems.collecting():
                for name, node in fields["roles"].entries():
                    with problems.collecting():
                        grammar.role_name(node, name)
                        if name in roles:
                            node.fail(f"role {name} is already written in {roles[name].node.file}", on_key=True)
                        roles[name] = read_role(name, node, around)
        if "everyone" in fields:
            with problems.collecting():
                for entry in read_everyone(fields["everyone"], around).rules:
                    if any(entry.rule.id == other.rule.id for other in everyone):
                        entry.node.note(f"a second rule is called {entry.rule.id}; give one of them a name:")
                    everyone.append(entry)
    own = {name: tuple(role.rules) for name, role in roles.items()}
    for role in roles.values():
        with problems.collecting():
            _take_over(role, roles, own)
        role.rules.extend(everyone)
    return roles


def _take_over(role: WrittenRole, roles: Mapping[str, WrittenRole], own: Mapping[str, tuple[WrittenRule, ...]]) -> None:
    """Add the rules of every role that `role` includes, directly or not, under this role's name."""
    pending, seen = list(role.include), {role.name}
    taken = {entry.rule.id for entry in role.rules}
    while pending:
        node = pending.pop()
        name = node.word(roles)
        if name == role.name:
            node.fail(f"role {name} includes itself")
        if name in seen:
            continue
        seen.add(name)
        pending += roles[name].include
        for entry in own[name]:
            moved = RuleId(f"{role.name}/{entry.rule.id.partition('/')[2]}")
            if moved in taken:
                node.fail(f"including {name} gives a second rule {moved}; give one of them a name:")
            taken.add(moved)
            role.rules.append(WrittenRule(rule=replace(entry.rule, id=moved), node=entry.node))


def _with_query_slot(entry: WrittenRule, written: Mapping[str, WrittenCredential]) -> WrittenRule:
    """A hand-written operation takes the query key of its credential; what it may hold, decide.py checks."""
    rule = entry.rule
    credential = written.get(rule.credential) if rule.credential is not None else None
    if credential is None or "service" in entry.node.value:
        return entry
    keys = {slot.name for slot in credential.form.slots if slot.where == "query"}
    if any(slot.where == "sigv4" for slot in credential.form.slots):
        keys |= set(QUERY_KEYS)
    own = dict.fromkeys(keys)
    ops = tuple(op if op.query is None or not own else replace(op, query={**op.query, **own}) for op in rule.operations)
    return WrittenRule(rule=replace(rule, operations=ops), node=entry.node)


def _document(
    roles: Mapping[str, WrittenRole],
    credentials: Mapping[str, CredentialDef],
    destinations: Mapping[str, DestinationDef],
) -> dict[str, Any]:
    operations: dict[str, Operation] = {
        op.id: op for role in roles.values() for entry in role.rules for op in entry.rule.operations
    }
    used = {entry.rule.credential for role in roles.values() for entry in role.rules}
    return {
        "version": VERSION,
        "basis": {"public_suffixes": grammar.public_suffix_version()},
        "operations": {name: encode_operation(op) for name, op in sorted(operations.items())},
        "credentials": {name: encode_credential(entry) for name, entry in sorted(credentials.items()) if name in used},
        "destinations": {text: encode_destination(entry) for text, entry in sorted(destinations.items())},
        "roles": {
            name: {
                "message": role.message,
                "boundary": role.boundary,
                "dns": role.dns,
                "rules": [encode_rule(entry.rule) for entry in sorted(role.rules, key=lambda entry: entry.rule.id)],
            }
            for name, role in sorted(roles.items())
        },
    }


# --- tests ---

_VERDICTS = ("deny", "hold", "allow")


def _tests(
    files: list[tuple[Node, dict[str, Node]]], roles: Mapping[str, WrittenRole], problems: Problems
) -> tuple[PolicyTest, ...]:
    found: list[PolicyTest] = []
    for _, fields in files:
        if "tests" not in fields:
            continue
        with problems.collecting():
            for node in fields["tests"].items(empty=None):
                with problems.collecting():
                    found.append(read_test(node, roles))
    return tuple(found)


def read_test(node: Node, roles: Mapping[str, object]) -> PolicyTest:
    """Return one row of `tests:`. `roles` are the names that exist. Raises Rejected."""
    fields = node.fields("role", "allow deny hold rule reason body headers sandbox why")
    stated = [verdict for verdict in _VERDICTS if verdict in fields]
    if len(stated) != 1:
        node.fail("a test says exactly one of allow:, deny: and hold:")
    expect = stated[0]
    request = fields[expect].text()
    method, _, target = request.partition(" ")
    if not target or " " in target or not method.isalpha():
        fields[expect].fail('expected "METHOD URL" or "CONNECT host:port"')
    if "reason" in fields and expect != "deny":
        fields["reason"].fail("only a denial has a reason", on_key=True)
    headers = [(name, value.text()) for name, value in fields["headers"].entries()] if "headers" in fields else []
    body = None
    if "body" in fields:
        value = fields["body"].value
        if isinstance(value, str):
            body = value.encode("utf-8")
        else:
            body = json_body(value)
            if not any(name.lower() == "content-type" for name, _ in headers):
                headers.append(("content-type", "application/json"))
    attributes: dict[str, str] = {}
    for name, value in fields["sandbox"].entries() if "sandbox" in fields else ():
        if not grammar.ATTRIBUTE_NAME.match(name) or not grammar.valid_attribute(value.text()):
            value.fail("an attribute is words of letters, digits, hyphen and underscore, joined by single . or /")
        attributes[name] = value.text()
    mark = node.marks.value(node.path)
    return PolicyTest(
        role=fields["role"].word(roles),
        expect="deny" if expect == "deny" else "hold" if expect == "hold" else "allow",
        request=request,
        reason=fields["reason"].word(REASONS) if "reason" in fields else None,
        rule=fields["rule"].text() if "rule" in fields else None,
        headers=tuple(headers),
        body=body,
        attributes=attributes,
        place=Problem(file=node.file, line=mark.line, column=mark.column, message=f"{expect} {request}"),
        why=fields["why"].text() if "why" in fields else "",
    )
