"""Arguments with several values, hosts of many customers, head matchers: what the operation model adds to matching."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules import operations
from rules.arguments import MAX_PAIRS, Value, grouped, pairs, settled, shown
from rules.catalogue import CatalogueError, parse_service, resolve_service
from rules.compile import DocumentFault, compile_host, compile_policy
from rules.decide import decide_request
from rules.decision import Denied, NeedsBody, Permit
from rules.facts import RequestFacts, Sandbox
from rules.matching import (
    InvalidTemplate,
    Matched,
    NoMatch,
    WantsBody,
    bind_arguments,
    match_operation,
    parse_host_template,
    parse_path,
)
from rules.names import Host, RuleId
from rules.parse import Parsed, PolicyError, Sources, parse_sources
from rules.policy import BodySpec, HeadSpec, HostPattern, Operation, Policy, Role, Rule
from tests.support.properties import tried
from tests.support.pushes import NEW, TYPE, ZERO, push

SANDBOX = Sandbox(
    tenant="t", id="sb", epoch=1, role="dev", owner="o", agent="a", task="7", attributes={}, expires_at=2e9
)
TENANTS = """\
version: 1
service: bucketeer
hosts:
  bucket: {host: "{bucket}.s3.{region}.cloud.example", tenant: bucket}
credential: {kind: bearer, at: [bucket], placeholder: {env: BUCKET_TOKEN, shape: "bk_{32}"}}
auth: {headers: [authorization]}
operations:
  object.read:
    effect: read
    why: One object.
    arguments: {bucket: "{host.bucket}", region: "{host.region}"}
    requests: [{at: bucket, methods: [GET], paths: ["/**"]}]
  key.create:
    effect: mint
    why: The answer is a key.
    arguments: {bucket: "{host.bucket}"}
    requests: [{at: bucket, methods: [POST], paths: ["/keys"]}]
tests:
  - allow: "GET https://mine.s3.eu.cloud.example/a"
    operation: object.read
    arguments: {bucket: mine, region: eu}
    why: one object
  - {deny: "PUT https://mine.s3.eu.cloud.example/a", near: method, why: a write}
"""
WORDS = """\
version: 1
service: words
hosts: {api: {host: svc.example, mirror: ""}}
operations:
  word.read:
    effect: read
    why: Words.
    requests: [{at: api, methods: [GET], match: {matcher: words, params: {most: 2}}}]
tests:
  - {allow: "GET https://svc.example/a/b", operation: word.read, arguments: {word: [a, b]}, why: two words}
  - {deny: "GET https://svc.example/a/b/c", near: operation, why: three words}
"""


def facts(line: str, *headers: tuple[str, str], body: bytes | None = None, **more: Any) -> RequestFacts:
    method, url = line.split(" ")
    made = RequestFacts.build(
        method=method,
        scheme="https",
        tunnel=None,
        target=url,
        headers=(("host", url.removeprefix("https://").partition("/")[0]), *headers),
        has_body=body is not None or more.pop("has_body", False),
    )
    return replace(made, body=body, **more)


def operation(**changes: Any) -> Operation:
    base = Operation(
        id="svc/op",
        effect="read",
        hosts=(HostPattern(kind="exact", suffix="svc.example"),),
        port=443,
        scheme="https",
        methods=("GET", "POST"),
        paths=(parse_path("/"), parse_path("/**")),
    )
    return replace(base, **changes)


def binding(**bind: str | tuple[str, ...]) -> Rule:
    patterns = {name: (value,) if isinstance(value, str) else value for name, value in bind.items()}
    return Rule(id=RuleId("dev/r"), action="allow", operations=(operation(),), bind=patterns)


def policy(rules: str, *, service: str = TENANTS, credentials: str | None = None) -> Parsed:
    text = f"version: 1\nroles:\n  dev:\n    allow:\n{rules}"
    operator = None if credentials is None else ("credentials.yaml", credentials)
    return parse_sources(
        Sources(policy={"policy.yaml": text}, services={"services/bucketeer.yaml": service}, credentials=operator)
    )


# --- several values ---


def test_one_value_outside_the_binding_refuses_all() -> None:
    """Expect a request that names a permitted and another thing to fit no rule."""
    rule = binding(ref=("refs/heads/agent/*", "refs/tags/v1"))
    for value in (("refs/heads/agent/x", "refs/heads/main"), ("refs/heads/main", "refs/tags/v1"), "refs/heads/main"):
        assert not bind_arguments(rule, SANDBOX, {"ref": value})
    assert not bind_arguments(rule, SANDBOX, {})
    assert bind_arguments(rule, SANDBOX, {"ref": ("refs/heads/agent/x", "refs/tags/v1")})


def test_a_deny_rule_reads_several_values_the_other_way() -> None:
    """Expect one value that fits to be enough for a deny."""
    rule = binding(ref="refs/heads/main")
    values = ("refs/heads/agent/x", "refs/heads/main")
    assert not bind_arguments(rule, SANDBOX, {"ref": values})
    assert bind_arguments(rule, SANDBOX, {"ref": values}, every=False)


def test_a_near_miss_says_what_the_argument_must_be() -> None:
    """Expect the patterns of the rule, and the operation's name where its paths say nothing."""
    binds = "repository: 'o/*', ref: [refs/heads/a, refs/tags/*]"
    text = f"      - {{service: git, operations: [git.push], with: {{{binds}}}}}\n"
    compiled = compile_policy(policy(text).document)
    line = "GET https://git.example/other/r.git/info/refs?service=git-receive-pack"
    denied = decide_request(compiled, SANDBOX, facts(line), 1e9)
    assert isinstance(denied, Denied)
    assert denied.remedy == "Nearest is dev/git: git/git.push; repository must be o/*."
    pushed = push((ZERO, NEW, "refs/heads/main"))
    request = facts("POST https://git.example/o/r.git/git-receive-pack", ("content-type", TYPE), body=pushed)
    denied = decide_request(compiled, SANDBOX, request, 1e9)
    assert isinstance(denied, Denied)
    assert denied.remedy == "Nearest is dev/git: git/git.push; ref must be refs/heads/a or refs/tags/*."


def test_only_what_an_operation_leaves_open_may_be_missing() -> None:
    """Expect `unbound` to excuse an argument that is not stated, never one that is stated and does not fit."""
    rule = binding(ref="refs/heads/agent/*", repository="acme/shop")
    assert not bind_arguments(rule, SANDBOX, {"repository": "acme/shop"})
    assert not bind_arguments(rule, SANDBOX, {"repository": "evil/x"}, unbound=("ref",))
    assert not bind_arguments(rule, SANDBOX, {"repository": "acme/shop", "ref": "refs/heads/x"}, unbound=("ref",))
    assert bind_arguments(rule, SANDBOX, {"repository": "acme/shop"}, unbound=("ref",))


@pytest.mark.parametrize(
    "found",
    [
        {"a": ()},
        {"a": 7},
        {"a": ["x"]},
        {"a": ("x", 7)},
        {7: "x"},
        {"a": tuple(str(number) for number in range(MAX_PAIRS + 1))},
        {"a": "x" * (33 << 10)},
    ],
)
def test_what_a_matcher_may_not_state_is_no_match(found: Any) -> None:
    """Expect no arguments at all where one is empty, of another type, or beyond the caps."""
    assert settled(found) is None


@tried()
@given(st.dictionaries(st.text(max_size=8), st.lists(st.text(max_size=8), min_size=1, max_size=5), max_size=6))
def test_arguments_survive_their_pairs(found: dict[str, list[str]]) -> None:
    """Expect the form that travels to give back the very arguments, in one spelling."""
    arguments = settled({name: tuple(values) for name, values in found.items()})
    assert arguments is not None
    assert grouped(pairs(arguments)) == arguments
    assert all(isinstance(value, str) or len(value) > 1 for value in arguments.values())
    assert shown(pairs(arguments)).keys() == arguments.keys()


# --- hosts of many customers ---


@pytest.mark.parametrize(
    "text",
    [
        "{bucket}.example",
        "{a}.{b}.com",
        "s3.{region}.example",
        "{a}.{a}.cloud.example",
        "x{a}.cloud.example",
        "{a}.CLOUD.example",
        "{A}.cloud.example",
        "{a}.exeat.{b}",
        "plain.cloud.example",
        "{a}..example",
        "{a}.127.0.0.1",
    ],
)
def test_a_template_that_would_cover_too_much_is_refused(text: str) -> None:
    """Expect whole labels, each name once, two literal labels at the end, in the spelling of host names."""
    with pytest.raises(InvalidTemplate):
        parse_host_template(text)


@pytest.mark.parametrize(
    "host",
    ["cloud.example", "s3.eu.cloud.example", "a.b.s3.eu.cloud.example", "a.s4.eu.cloud.example", "a.s3.eu.cloud.test"],
)
def test_a_label_is_exactly_one_label(host: str) -> None:
    """Expect neither more labels nor fewer, nor another literal."""
    pattern = parse_host_template("{bucket}.s3.{region}.cloud.example")
    assert not pattern.matches(Host.parse(host))
    assert pattern.captures(Host.parse(host)) is None


def test_a_template_says_whose_host_it_is() -> None:
    """Expect the labels by name, and the same pattern from the document."""
    pattern = parse_host_template("{bucket}.s3.{region}.cloud.example")
    assert pattern.captures(Host.parse("Mine.s3.eu.cloud.example")) == {"bucket": "mine", "region": "eu"}
    assert compile_host(pattern.text) == pattern


@pytest.mark.parametrize(
    ("rules", "fragment"),
    [
        ("      - {service: bucketeer, operations: [read]}\n", "with: must bind bucket"),
        ("      - {service: bucketeer, operations: [read], with: {region: eu}}\n", "with: must bind bucket"),
        ('      - {service: bucketeer, operations: [read], with: {bucket: "*"}}\n', "needs more than *"),
        ('      - {service: bucketeer, operations: [read], with: {bucket: [a, "**"]}}\n', "stays inside one segment"),
        ("      - {service: bucketeer, operations: [mint], with: {bucket: a}}\n", "name it"),
    ],
)
def test_a_rule_for_everybodys_host_says_whose(rules: str, fragment: str) -> None:
    """Expect a policy error with its place where a rule leaves the customer open, or takes all that mints."""
    with pytest.raises(PolicyError) as raised:
        policy(rules)
    assert fragment in str(raised.value)
    assert "policy.yaml:5:" in str(raised.value)


def test_another_customers_host_is_refused() -> None:
    """Expect only the bound bucket, in every region, and a named mint without a credential to load."""
    parsed = policy("      - {service: bucketeer, operations: [read, key.create], with: {bucket: mine}}\n")
    compiled = compile_policy(json.loads(json.dumps(parsed.document)))
    denied = decide_request(compiled, SANDBOX, facts("GET https://theirs.s3.eu.cloud.example/a"), 1e9)
    assert isinstance(denied, Denied)
    permit = decide_request(compiled, SANDBOX, facts("GET https://mine.s3.eu.cloud.example/a"), 1e9)
    assert isinstance(permit, Permit)
    assert permit.arguments == (("bucket", "mine"), ("region", "eu"))


def test_a_document_without_the_binding_is_damaged() -> None:
    """Expect the compiler to refuse what the parser would not have made."""
    document = policy("      - {service: bucketeer, operations: [read], with: {bucket: mine}}\n").document
    document["roles"]["dev"]["rules"][0]["bind"] = {}
    with pytest.raises(DocumentFault):
        compile_policy(document)


def test_a_credential_goes_to_named_hosts_of_a_template() -> None:
    """Expect the operator's hosts to be required, checked against the template, and the only ones at run time."""
    rules = "      - {service: bucketeer, operations: [read], with: {bucket: [mine, theirs]}, credential: key}\n"
    plain = "kind: bearer, secret: 'store:b', owner: o, placeholder: {env: BUCKET_TOKEN, shape: 'bk_{32}'}"
    with pytest.raises(PolicyError, match="list the hosts"):
        policy(rules, credentials=f"version: 1\ncredentials:\n  key: {{{plain}, hosts: [other.example]}}\n")
    bound = f"version: 1\ncredentials:\n  key: {{{plain}, hosts: [mine.s3.eu.cloud.example]}}\n"
    compiled = compile_policy(policy(rules, credentials=bound).document)
    permit = decide_request(compiled, SANDBOX, facts("GET https://mine.s3.eu.cloud.example/a"), 1e9)
    assert isinstance(permit, Permit)
    assert permit.credential == "key"
    for host in ("theirs.s3.eu.cloud.example", "mine.s3.us.cloud.example"):
        assert isinstance(decide_request(compiled, SANDBOX, facts(f"GET https://{host}/a"), 1e9), Denied)


def test_what_mints_is_not_served_with_a_credential() -> None:
    """Expect a policy error: its answer is made from the credential and would go to the sandbox."""
    plain = "kind: bearer, secret: 'store:b', owner: o, placeholder: {env: BUCKET_TOKEN, shape: 'bk_{32}'}"
    with pytest.raises(PolicyError, match="does not say in which fields"):
        policy(
            "      - {service: bucketeer, operations: [key.create], with: {bucket: mine}, credential: key}\n",
            credentials=f"version: 1\ncredentials:\n  key: {{{plain}, hosts: [mine.s3.eu.cloud.example]}}\n",
        )


@pytest.mark.parametrize(
    ("old", "new", "fragment"),
    [
        ('bucket: "{host.bucket}", region', "region", "is not stated by this request"),
        ("{bucket}.s3", "{bucket}.*", "host template"),
        ("[{at: bucket, methods: [GET]", "[{at: bucket, unbound: [bucket], methods: [GET]", "cannot be left open"),
        ("[{at: bucket, methods: [GET]", "[{at: bucket, match: {matcher: none}, methods: [GET]", "unknown matcher"),
    ],
)
def test_a_service_file_that_leaves_the_customer_open_is_refused(old: str, new: str, fragment: str) -> None:
    """Expect the mistake in the file that makes it, with its place."""
    with pytest.raises(CatalogueError, match=fragment):
        parse_service(TENANTS.replace(old, new, 1), "bucketeer.yaml")


# --- head matchers ---


@pytest.fixture
def last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(params: Mapping[str, Any], request: RequestFacts) -> Mapping[str, Value] | None:
        if request.path.segments[-1] == "boom":
            raise RuntimeError("a matcher that stumbles")
        names = tuple(request.path.segments)
        return {"word": names} if len(names) <= params["most"] else None

    monkeypatch.setitem(operations.HEAD_MATCHERS, "words", last)
    monkeypatch.setitem(operations._PARAMS, "words", frozenset({"most"}))


@pytest.mark.usefixtures("last_word")
def test_a_head_matcher_speaks_after_the_plain_facts_and_before_the_body() -> None:
    """Expect a miss named for it, a stumble to be a miss, its arguments beside those of the path, and then the body."""
    op = operation(head=HeadSpec(matcher="words", params={"most": 2}))
    assert match_operation(op, facts("GET https://svc.example/a/b/c")) == NoMatch(near="operation")
    assert match_operation(op, facts("GET https://svc.example/boom")) == NoMatch(near="operation")
    assert match_operation(op, facts("PUT https://svc.example/a")) == NoMatch(near="method")
    assert match_operation(op, facts("GET https://svc.example/b/a")) == Matched(arguments={"word": ("a", "b")})
    waiting = replace(op, body=BodySpec(matcher="json_fields", bound=9, params={"x": "string"}))
    assert match_operation(waiting, facts("POST https://svc.example/a/b/c", body=b"{}")) == NoMatch(near="operation")
    assert match_operation(waiting, facts("POST https://svc.example/a", has_body=True)) == WantsBody(bound=9)


@pytest.mark.usefixtures("last_word")
def test_a_head_matcher_sees_the_path_below_the_base() -> None:
    """Expect the same words under a base, and none beside it."""
    service = parse_service(WORDS, "words.yaml")
    (plain,) = service.select("word.read")
    assert match_operation(plain, facts("GET https://svc.example/a/b")) == Matched(arguments={"word": ("a", "b")})
    moved = resolve_service({"words": service}, "corp", "words", "https://nexus.corp.example/repo/x")
    (op,) = moved.select("word.read")
    for path in ("/repo/y/a", "/repo/x", "/a/b", "/repo/x/a/b/c"):
        assert isinstance(match_operation(op, facts(f"GET https://nexus.corp.example{path}")), NoMatch)
    below = match_operation(op, facts("GET https://nexus.corp.example/repo/x/a/b"))
    assert below == Matched(arguments={"word": ("a", "b")})


# --- a beginning that is judged ---


@pytest.fixture
def first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(params: Mapping[str, Any], body: bytes, request: RequestFacts) -> Mapping[str, Value] | None:
        return {"size": str(len(body)), "partial": str(request.partial)} if body[:1] == b"y" else None

    monkeypatch.setitem(operations.EVALUATORS, "first", first)


@pytest.mark.usefixtures("first_byte")
def test_every_process_judges_the_same_beginning() -> None:
    """Expect the first bytes up to the bound whatever more is held, and to be told whether there is more."""
    op = operation(body=BodySpec(matcher="first", bound=4, prefix=True))
    line = "POST https://svc.example/a"
    assert match_operation(op, facts(line, has_body=True)) == WantsBody(bound=4, prefix=True)
    assert match_operation(op, facts(line, body=b"nyyy")) == NoMatch(near="body")
    coded = facts(line, ("content-encoding", "gzip"), body=b"yyyy")
    assert match_operation(op, coded) == NoMatch(near="header")
    for body, partial in ((b"yyyy", True), (b"yyyyz", False), (b"yyyyzzz", True)):
        judged = match_operation(op, facts(line, body=body, partial=partial))
        assert judged == Matched(arguments={"size": "4", "partial": "True"}), body
    assert match_operation(op, facts(line, body=b"yy")) == Matched(arguments={"size": "2", "partial": "False"})


@pytest.mark.usefixtures("first_byte")
def test_one_operation_that_needs_the_end_needs_the_whole_body() -> None:
    """Expect the decision to ask for the whole where one candidate cannot be judged by the beginning."""
    early = operation(id="svc/early", body=BodySpec(matcher="first", bound=4, prefix=True))
    whole = operation(id="svc/whole", body=BodySpec(matcher="first", bound=3))
    line = "POST https://svc.example/a"
    assert match_operation(whole, facts(line, body=b"yy", partial=True)) == NoMatch(near="body")
    assert decided((early,), facts(line, has_body=True)) == NeedsBody(bound=4, prefix=True)
    assert decided((early, whole), facts(line, has_body=True)) == NeedsBody(bound=4, prefix=False)


def decided(ops: tuple[Operation, ...], request: RequestFacts) -> object:
    role = Role(name="dev", rules=(Rule(id=RuleId("dev/r"), action="allow", operations=ops),))
    whole = Policy(digest="", document={}, roles={"dev": role}, destinations={}, credentials={})
    return decide_request(whole, SANDBOX, request, 1e9)
