"""The catalogue: files that say what they mean, and services that do what their tests say."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import resources

import pytest

from rules.authority_names import AUTH_HEADERS, AUTH_QUERY, AUTHORITY_FILE, authority_list
from rules.catalogue import (
    EFFECTS,
    CatalogueError,
    InvalidBase,
    ServiceDef,
    ServiceTest,
    UnknownService,
    builtin_services,
    parse_service,
    read_builtin,
    resolve_service,
    services_with_tests,
)
from rules.compile import compile_policy
from rules.document import encode_operation, encode_rule
from rules.facts import RequestFacts
from rules.matching import Matched, match_operation
from rules.names import RuleId
from rules.operations import EVALUATORS, arguments_of
from rules.policy import Operation, Rule
from rules.service import head_arguments
from rules.servicetests import check_service_test, run_service_tests
from rules.yaml12 import YamlError
from tests.support.rows import every, every_row

SERVICES = services_with_tests()
TESTS = [(service, test) for service in SERVICES.values() for test in service.tests]

CLEAR_TEXT = {"debian", "ubuntu", "ubuntu-ppa"}
"""Archives whose clients check signatures themselves and ask by plain HTTP; nothing else may."""

DAILY = {
    "anthropic", "crates", "debian", "dockerhub", "github", "gitlab", "go", "huggingface", "npm", "openai", "pypi",
    "s3", "slack", "stripe",
}  # fmt: skip

READS_BY_OTHER_METHODS = {
    "bitbucket/git.fetch",
    "datadog/logs.read",
    "github/git.fetch",
    "gitlab-git/git.fetch",
    "google-calendar/calendars.read",
    "huggingface/repository.read",
    "jira/issue.search",
    "kubernetes/access.review",
    "mcp/session.end",
    "mcp/prompts.read",
    "mcp/resources.read",
    "mcp/session.open",
    "mcp/session.stream",
    "mcp/tools.list",
    "msgraph/search",
    "notion/database.read",
    "notion/search",
    "vault/secret.list",
}
"""Reads that another method than GET states and no matcher judges, each looked at by someone."""

ANY_QUERY = {"huggingface/file.download", "telegram/bot.call"}
"""The redirects of one carry a parameter that is named for the path; the other has a hundred methods, each with its own
parameters, and takes them in a form or in the query alike. What else takes any query is a mistake."""

QUERY_JUDGED_BY = {"oci", "oci_token", "s3", "call", "aws_action"}
"""Matchers that look at every query key themselves."""

SMALL = """\
version: 1
service: small
hosts:
  api: {host: api.small.example, mirror: /v}
operations:
  items.read:
    effect: read
    why: Items.
    arguments: {item: "{id}"}
    requests:
      - {at: api, methods: [GET], paths: ["/items/{id}"]}
tests:
  - {allow: "GET https://api.small.example/items/1", operation: items.read, why: one item}
  - {deny: "POST https://api.small.example/items/1", why: a write}
"""


def facts(line: str, headers: tuple[tuple[str, str], ...] = ()) -> RequestFacts:
    method, url = line.split(" ")
    scheme, _, rest = url.partition("://")
    return RequestFacts.build(
        method=method,
        scheme="https" if scheme == "https" else "http",
        tunnel=None,
        target=url,
        headers=(("host", rest.partition("/")[0]), *headers),
    )


def facts_of(test: ServiceTest) -> RequestFacts:
    made = RequestFacts.build(
        method=test.method,
        scheme="https" if test.url.startswith("https:") else "http",
        tunnel=None,
        target=test.url,
        headers=(("host", test.url.split("/")[2]), *test.headers),
        has_body=test.body is not None,
    )
    return replace(made, body=test.body)


def recognised(service: ServiceDef, line: str, *headers: tuple[str, str]) -> set[str]:
    made = facts(line, headers)
    return {op.name for op in service.operations if isinstance(match_operation(op, made), Matched)}


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_services_do_what_they_say(service: ServiceDef) -> None:
    """Expect every line of `tests:` to hold: denied ones by no operation, allowed ones by exactly the named one."""

    def check(test: ServiceTest) -> None:
        assert check_service_test(service, test) == ""

    every((f"{service.name}.yaml:{test.line} {test.expect}", partial(check, test)) for test in service.tests)


@every_row("service", SERVICES.values(), ids=SERVICES)
def test_each_service_denies_more_than_it_allows(service: ServiceDef) -> None:
    """Expect denials first in number, and every operation that is built to be tested."""
    assert sum(test.expect == "deny" for test in service.tests) >= 8
    allowed = {test.operation for test in service.tests if test.expect == "allow"}
    built = {_name(op) for op in service.operations if not _later(op)}
    assert allowed == built


@every_row("name", sorted(DAILY & SERVICES.keys()))
def test_what_agents_use_daily_is_tested_deepest(name: str) -> None:
    """Expect at least twenty requests for each service that an agent meets in a day."""
    assert len(SERVICES[name].tests) >= 20


def test_a_read_of_one_service_is_no_more_than_a_read_at_another() -> None:
    """Expect every request that some service calls a write, mint, execution or disclosure to be no read anywhere."""
    for service, test in TESTS:
        if test.expect == "deny" or "{" in test.url:
            continue
        made = facts_of(test)
        told = {op.effect for op in service.operations if isinstance(match_operation(op, made), Matched)}
        for other in SERVICES.values():
            if other is service:
                continue
            also = {op.effect for op in other.operations if isinstance(match_operation(op, made), Matched)}
            assert also <= told, (service.name, other.name, test.method, test.url)


@every_row("service", SERVICES.values(), ids=SERVICES)
def test_the_word_read_selects_reads_only(service: ServiceDef) -> None:
    """Expect nothing else in `operations: [read]`, and no other request to be taken for one of its reads."""
    reads = service.select("read")
    assert {op.effect for op in reads} <= {"read"}
    names = {_name(op) for op in reads}
    for test in service.tests:
        if test.expect == "allow" and test.operation not in names:
            made = facts_of(test)
            assert not any(isinstance(match_operation(op, made), Matched) for op in reads), test.url


@every_row("service", SERVICES.values(), ids=SERVICES)
def test_a_read_is_a_get_or_is_told_by_a_matcher(service: ServiceDef) -> None:
    """Expect every read to be GET alone, or judged by what is in it, or to be one of those that are listed here."""
    for op in service.select("read"):
        if op.methods != ("GET",) and not _later(op):
            judged = op.body is not None or op.head is not None
            assert judged or op.name in READS_BY_OTHER_METHODS, op.id


@every_row("service", SERVICES.values(), ids=SERVICES)
def test_operations_are_consistent(service: ServiceDef) -> None:
    """Expect unique ids, exact hosts, known effects and matchers, and TLS wherever the content is not signed."""
    ids = [op.id for op in service.operations]
    assert len(set(ids)) == len(ids)
    for op in service.operations:
        assert op.effect in EFFECTS
        assert all(pattern.kind == "exact" or (pattern.kind == "template" and op.must_bind) for pattern in op.hosts)
        assert op.scheme == "https" or (service.name in CLEAR_TEXT and op.effect == "read")
        assert op.body is None or op.body.matcher in EVALUATORS
        judged = {spec.matcher for spec in (op.head, op.body) if spec is not None} & QUERY_JUDGED_BY
        assert op.query is not None or judged or _later(op) or op.name in ANY_QUERY


@every_row("service", SERVICES.values(), ids=SERVICES)
@every_row("effect", ["read", "disclose", "write", "execute"])
def test_a_rule_can_name_an_effect_of_every_service(service: ServiceDef, effect: str) -> None:
    """Expect what one operation of an effect must have bound to be stated by all, so that a rule can take them."""
    ops = service.select(effect)
    needed = {name for op in ops for name in op.must_bind}
    for op in ops:
        stated = op.arguments.keys() | head_arguments(op)
        if op.body is not None:
            stated |= arguments_of(op.body.matcher, op.body.params)
        assert needed <= stated | set(op.unbound), op.id


def test_the_test_runner_notices_what_is_wrong() -> None:
    """Expect a sentence for each way in which a test can fail, so that a passing run means something."""
    text = SMALL.partition("tests:")[0] + (
        "tests:\n"
        '  - {allow: "GET https://api.small.example/items/1", operation: items.read, effect: write, why: effect}\n'
        '  - {allow: "GET https://api.small.example/items/1", operation: items.read, arguments: {item: "2"}, why: a}\n'
        '  - {allow: "GET https://api.small.example/other", operation: items.read, why: unknown}\n'
        '  - {allow: "GET https://api.small.example/items/..", operation: items.read, why: target}\n'
        '  - {deny: "GET https://api.small.example/items/1", why: matches}\n'
        '  - {deny: "POST https://api.small.example/items/1", near: path, why: near}\n'
    )
    assert len(run_service_tests(parse_service(text, "small.yaml"))) == 6


@every_row(
    ("old", "new", "place", "sentence"),
    [
        ("version: 1", "version: 2", "1:", "version must be 1"),
        ("service: small", "service: small\nservice: other", "3:1", ""),
        ("    effect: read", "    effects: read", "7:5", "unknown key"),
        ("    effect: read", "    effect: peek", "7:13", "one of"),
        ("    why: Items.\n", "", "7:5", "missing key why"),
        ("at: api", "at: web", "11:14", "hosts"),
        ("methods: [GET]", "methods: []", "11:28", "at least one"),
        ("methods: [GET]", "methods: [get]", "11:28", "one of"),
        ('"/items/{id}"', '"items/{id}"', "11:43", "slash"),
        ('"/items/{id}"', '"/items/{id:nothing}"', "11:43", "shape"),
        ('"{id}"}', '"{owner}/{id}"}', "11:42", "only a part"),
        ("host: api.small.example", "host: small", "4:15", "single-label"),
        ("mirror: /v", "mirror: /v/", "4:42", "prefix"),
        ("operation: items.read, why", "operation: items.write, why", "13:65", "unknown operation"),
        ("{deny: ", "{denied: ", "14:6", "unknown key"),
        ('  - {deny: "POST https://api.small.example/items/1", why: a write}\n', "", "13:3", "deny test"),
        ("methods: [GET],", "methods: [GET], query: {a: []},", "11:46", "at least one"),
        ("methods: [GET],", "methods: [GET], required: [a],", "11:45", "required"),
        ("methods: [GET],", "methods: [GET], body: {matcher: nothing, bound: 9},", "11:51", "matcher"),
        ("methods: [GET],", "methods: [GET], body: {matcher: json_fields, bound: 0},", "11:71", "bound"),
        (
            "operations:\n",
            "credential: {kind: bearer, at: [api], placeholder: {env: X, shape: x}}\noperations:\n",
            "5:",
            "shape",
        ),
        (
            "operations:\n",
            "credential: {kind: bearer, template: 'T {value}', at: [api], placeholder: {env: X, shape: 'x{24}'}}\n"
            "operations:\n",
            "5:",
            "unknown key",
        ),
    ],
)
def test_a_file_with_a_mistake_is_refused_where_it_stands(old: str, new: str, place: str, sentence: str) -> None:
    """Expect file:line:column and a sentence about the mistake."""
    assert old in SMALL
    with pytest.raises(YamlError) as caught:
        parse_service(SMALL.replace(old, new, 1), "small.yaml")
    lines = [line for line in str(caught.value).splitlines() if sentence in line]
    assert any(line.startswith(f"small.yaml:{place}") for line in lines), str(caught.value)


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    """Expect one problem for each, so that an editor shows them all."""
    text = SMALL.replace("effect: read", "effect: peek").replace("at: api", "at: web").replace("why: a write", "x: 1")
    with pytest.raises(CatalogueError) as caught:
        parse_service(text, "small.yaml")
    assert len(caught.value.problems) >= 4


@every_row(
    ("base", "why"),
    [
        ("nexus.corp.example/pypi", "no scheme"),
        ("ftp://nexus.corp.example/pypi", "another scheme"),
        ("https://user:pw@nexus.corp.example/pypi", "userinfo"),
        ("https://nexus.corp.example/pypi?x=1", "a query"),
        ("https://nexus.corp.example/pypi#x", "a fragment"),
        ("https://nexus.corp.example/a/../b", "a dot segment"),
        ("https://nexus.corp.example/a//b", "an empty segment"),
        ("https://nexus.corp.example/%70ypi", "an encoded letter"),
        ("https://nexus.corp.example/a/**", "a pattern"),
        ("https://nexus.corp.example/{x}", "a capture"),
        ("https://nexus/pypi", "a single label"),
        ("https:///pypi", "no host"),
        ("https://[nexus.corp.example]/pypi", "brackets around a name"),
        ("https://nexus[.corp.example/pypi", "half a bracket"),
        ("https://nexus.corp\t.example/pypi", "a tab, which some readers leave out"),
        ("https://nexus.corp.example/py\npi", "a line break, which some readers leave out"),
        (" https://nexus.corp.example/pypi", "a blank before it"),
        ("https://nexus.corp.example/p\u00fdpi", "another letter than ASCII has"),
    ],
)
def test_a_base_that_is_not_plain_is_refused(base: str, why: str) -> None:
    """Expect InvalidBase with a fixed sentence."""
    with pytest.raises(InvalidBase):
        resolve_service(SERVICES, "corp-pypi", "pypi", base)


def test_like_names_a_known_service() -> None:
    """Expect UnknownService for any other."""
    with pytest.raises(UnknownService):
        resolve_service(SERVICES, "corp", "nothing", "https://nexus.corp.example")


def test_like_moves_host_port_and_prefix_and_nothing_else() -> None:
    """Expect the index and its files under the base, and neither the public hosts nor the same paths elsewhere."""
    corp = resolve_service(SERVICES, "corp-pypi", "pypi", "https://nexus.corp.example:8443/repository/pypi/")
    base = "https://nexus.corp.example:8443/repository/pypi"
    public = next(place.host for place in SERVICES["pypi"].endpoints.values() if place.mirror == "")
    assert recognised(corp, f"GET https://{public}/simple/requests/") == set()
    assert recognised(corp, "GET https://nexus.corp.example/repository/pypi/simple/requests/") == set()
    assert recognised(corp, "GET https://nexus.corp.example:8443/simple/requests/") == set()
    assert recognised(corp, f"POST {base}/simple/requests/") == set()
    assert recognised(corp, f"GET {base}/service/rest/v1/status") == set()
    assert recognised(corp, f"GET {base}/simple/requests/") == {"corp-pypi/simple.read"}
    assert recognised(corp, f"GET {base}/packages/requests/2.32.3/requests-2.32.3.tar.gz") == {
        "corp-pypi/file.download"
    }
    assert [host.text for host in corp.hosts] == ["nexus.corp.example"]


def test_like_leaves_behind_what_has_no_mirror() -> None:
    """Expect GitHub under a base to have its API and git there, and no raw or archive host."""
    ghes = resolve_service(SERVICES, "ghes", "github", "https://git.corp.example")
    assert recognised(ghes, "GET https://raw.githubusercontent.com/a/b/main/c") == set()
    assert recognised(ghes, "GET https://git.corp.example/a/b/info/refs?service=git-upload-pack") == {"ghes/git.fetch"}
    assert recognised(ghes, "GET https://git.corp.example/api/v3/repos/a/b/pulls") == {"ghes/rest.read"}
    assert {op.paths[0].template for op in ghes.select("graphql.query")} == {"/api/graphql"}
    assert recognised(ghes, "POST https://git.corp.example/api/graphql") == set()
    assert ghes.credential is not None
    assert ghes.credential.authorities == (("git.corp.example", 443),)


def test_select_takes_names_and_effects() -> None:
    """Expect every way of stating an operation, all of an effect, and nothing for an unknown word."""
    github = SERVICES["github"]
    assert github.select("nothing") == ()
    assert github.select("git") == ()
    assert [op.id for op in github.select("git.fetch")] == ["github/git.fetch", "github/git.fetch#2"]
    assert {op.effect for op in github.select("read")} == {"read"}
    assert github.arguments("git.fetch") == {"repository"}
    assert SERVICES["openai"].arguments("chat.create") == {"model"}


def test_publishing_and_pushing_are_never_reads() -> None:
    """Expect effect read to hold no write under another name."""
    reads = {op.name for service in SERVICES.values() for op in service.select("read")}
    assert not reads & {"npm/publish", "github/git.push", "npm/audit", "anthropic/messages.create"}


def test_known_auth_slots_are_known_everywhere() -> None:
    """Expect the union over the catalogue and the well-known ones, in lower case."""
    assert {"authorization", "cookie", "x-api-key", "private-token", "api-key", "x-auth-token"} <= AUTH_HEADERS
    assert {"access_token", "api_key", "x-amz-signature", "x-amz-credential", "sig", "x-goog-signature"} <= AUTH_QUERY
    for service in SERVICES.values():
        assert set(service.auth_headers) <= AUTH_HEADERS
        if service.credential is not None:
            slots = service.credential.slots
            assert {one.name for one in slots if one.where in ("header", "bearer", "basic", "sigv4")} <= set(
                service.auth_headers
            )
            assert {one.name.lower() for one in slots if one.where == "query"} <= set(service.auth_query)
    assert all(name == name.lower() for name in AUTH_HEADERS | AUTH_QUERY)
    kept = (resources.files("rules") / "services" / AUTHORITY_FILE).read_text("utf-8")
    assert kept == authority_list(SERVICES), "run make docs"


@every_row("service", SERVICES.values(), ids=SERVICES)
def test_the_tests_of_a_file_are_its_end(service: ServiceDef) -> None:
    """Expect what policy takes, read without the tests, to be the very service that was tested."""
    assert read_builtin()[f"{service.name}.yaml"].count("\ntests:\n") == 1
    assert builtin_services()[service.name] == replace(service, tests=())


def test_a_policy_parses_only_the_services_that_it_names() -> None:
    """Expect a process that decides, and a policy with one service, not to read the whole catalogue."""
    code = (
        "from rules import authority\n"
        "from rules.catalogue import builtin_services\n"
        "from rules.parse import Sources, parse_sources\n"
        "assert not builtin_services()._parsed\n"
        "text = 'version: 1\\nroles: {r: {allow: [{service: pypi, operations: [read]}]}}\\n'\n"
        "parse_sources(Sources(policy={'policy.yaml': text}, credentials=None, services={}))\n"
        "assert set(builtin_services()._parsed) == {'pypi'}, builtin_services()._parsed\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_file_of_the_package_is_one_service() -> None:
    """Expect the file to be named for its service."""
    assert {name.removesuffix(".yaml") for name in read_builtin()} == set(SERVICES)


@every_row("service", SERVICES.values(), ids=SERVICES)
def test_operations_survive_the_document(service: ServiceDef) -> None:
    """Expect what the compiler makes of the document to be the very operation that was described."""
    bind = {name: ("x",) for op in service.operations for name in op.must_bind}
    rule = Rule(id=RuleId("dev/all"), action="allow", operations=service.operations, bind=bind)
    document = {
        "version": 1,
        "basis": {},
        "operations": {op.id: encode_operation(op) for op in service.operations},
        "credentials": {},
        "destinations": {},
        "roles": {"dev": {"message": "", "boundary": None, "dns": "synthetic", "rules": [encode_rule(rule)]}},
    }
    compiled = compile_policy(json.loads(json.dumps(document)))
    assert compiled.roles["dev"].rules[0].operations == service.operations


def _name(op: Operation) -> str:
    return op.name.partition("/")[2]


def _later(op: object) -> bool:
    body = getattr(op, "body", None)
    return body is not None and body.matcher == "later"
