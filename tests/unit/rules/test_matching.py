"""Matching: head before body, nothing repaired, every stumble a miss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import BodyAttested, RequestFacts, Sandbox
from rules.matching import (
    InvalidTemplate,
    Matched,
    NoMatch,
    WantsBody,
    attestation,
    bind_arguments,
    check_binding,
    match_operation,
    match_path,
    parse_path,
)
from rules.names import RuleId
from rules.paths import CanonicalPath
from rules.policy import BodySpec, HostPattern, Operation, PathPattern, Rule
from tests.support.properties import tried
from tests.support.rows import every_row

JSON = (("content-type", "application/json"),)


def operation(**changes: Any) -> Operation:
    base = Operation(
        id="dev/orders",
        effect="read",
        hosts=(HostPattern(kind="exact", suffix="shop.example"),),
        port=443,
        scheme="https",
        methods=("GET",),
        paths=(parse_path("/v1/orders/{id}"),),
        arguments={"order": "{id}"},
    )
    return replace(base, **changes)


def facts(
    line: str = "GET https://shop.example/v1/orders/7",
    headers: tuple[tuple[str, str], ...] = (),
    body: bytes | BodyAttested | None = None,
) -> RequestFacts:
    method, url = line.split(" ")
    scheme, _, rest = url.partition("://")
    made = RequestFacts.build(
        method=method,
        scheme="https" if scheme == "https" else "http",
        tunnel=None,
        target=url,
        headers=(("host", rest.partition("/")[0]), *headers),
        has_body=body is not None,
    )
    return replace(made, body=body)


def sandbox(**attributes: str) -> Sandbox:
    return Sandbox(
        tenant="t",
        id="sb_1",
        epoch=1,
        role="dev",
        owner="ana",
        agent="a",
        task="k",
        attributes=attributes,
        expires_at=1,
    )


def rule(bind: Mapping[str, tuple[str, ...]], *ops: Operation) -> Rule:
    return Rule(id=RuleId("dev/r"), action="allow", operations=ops, bind=bind)


@every_row(
    ("line", "near", "why"),
    [
        ("GET https://other.example/v1/orders/7", "host", "another host"),
        ("GET https://x.shop.example/v1/orders/7", "host", "a name below an exact host"),
        ("GET https://shop.example:8443/v1/orders/7", "port", "another port"),
        ("GET http://shop.example:443/v1/orders/7", "scheme", "clear text"),
        ("GET https://shop.example/v1/orders", "path", "a segment short"),
        ("GET https://shop.example/v1/orders/", "path", "a capture is never empty"),
        ("GET https://shop.example/v1/orders/7/lines", "path", "a segment more"),
        ("GET https://shop.example/v1/orders/7%2Flines", "path", "an encoded slash"),
        ("GET https://shop.example/V1/orders/7", "path", "paths have case"),
        ("POST https://shop.example/v1/orders/7", "method", "another method"),
        ("get https://shop.example/v1/orders/7", "method", "methods have case"),
        ("GET https://shop.example/v1/orders/7?x=1", "query", "a parameter that is not listed"),
        ("GET https://shop.example/v1/orders/7?&", "query", "a parameter without a name"),
    ],
)
def test_a_request_beside_the_operation_does_not_match(line: str, near: str, why: str) -> None:
    """Expect NoMatch at the first check that fails, so that the agent is told what was near."""
    assert match_operation(operation(), facts(line)) == NoMatch(near=near)


def test_a_body_on_a_read_does_not_match() -> None:
    """Expect a GET with a body to be refused: every origin receives it and no read needs it."""
    assert match_operation(operation(), facts(body=b"x")) == NoMatch(near="body")


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ("?expand=lines", False),
        ("?expand=items&expand=items", False),
        ("?expand=items&page=1&page=2", False),
        ("?page=1", False),
        ("?expand=items", True),
        ("?expand=items&page=anything", True),
        ("?expand=%69tems", True),
    ],
)
def test_a_query_holds_listed_parameters_once(query: str, fits: bool) -> None:
    """Expect each listed parameter at most once with an allowed value, and required ones always."""
    op = operation(query={"expand": ("items",), "page": None}, query_required=("expand",))
    made = match_operation(op, facts(f"GET https://shop.example/v1/orders/7{query}"))
    assert isinstance(made, Matched) is fits


def test_query_any_lifts_the_list_and_not_what_is_required() -> None:
    """Expect `query: any` to take duplicates of others, but a required parameter still exactly once."""
    op = operation(query=None, query_required=("a",))
    base = "GET https://shop.example/v1/orders/7"
    assert match_operation(op, facts(base + "?b=1&b=2")) == NoMatch(near="query")
    assert match_operation(op, facts(base + "?a=1&a=2")) == NoMatch(near="query")
    assert isinstance(match_operation(op, facts(base + "?a=1&b=1&b=2")), Matched)


@pytest.mark.parametrize(
    ("headers", "fits"),
    [
        ((), False),
        ((("content-type", "text/plain"),), False),
        ((("content-type", "a/b"), ("content-type", "a/b")), False),
        ((("content-type", "a/b, a/b"),), False),
        ((("content-type", "A/B; charset=x"),), True),
        ((("content-type", "a/b"), ("git-protocol", "version=9")), False),
        ((("content-type", "a/b"), ("git-protocol", "version=2")), True),
    ],
)
def test_required_headers_stand_once_with_a_listed_value(headers: tuple[tuple[str, str], ...], fits: bool) -> None:
    """Expect one value out of the list; "" in the list lets the header be absent."""
    op = operation(request_headers={"content-type": ("a/b",), "git-protocol": ("", "version=2")})
    assert isinstance(match_operation(op, facts(headers=headers)), Matched) is fits


def test_head_goes_with_get_and_the_arguments_come_from_the_path() -> None:
    """Expect HEAD to match where GET is listed, with the captured value decoded once."""
    made = match_operation(operation(), facts("HEAD https://shop.example/v1/orders/%C3%A9"))
    assert made == Matched(arguments={"order": "é"})


def body_operation(**params: Any) -> Operation:
    return operation(
        methods=("POST",), body=BodySpec(matcher="json_fields", bound=64, params=params or {"version": "string"})
    )


POST = "POST https://shop.example/v1/orders/7"


def test_the_body_is_asked_for_only_after_the_head_fits() -> None:
    """Expect WantsBody with the bound where only the body is missing, and a plain miss where the head fails."""
    assert match_operation(body_operation(), facts(POST, JSON)) == WantsBody(bound=64)
    assert match_operation(body_operation(), facts("GET https://shop.example/v1/orders/7")) == NoMatch(near="method")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"version":1}', "the wrong type"),
        (b"", "no JSON"),
        (b'{"version":"' + b"x" * 64 + b'"}', "over the bound"),
    ],
)
def test_a_body_that_does_not_fit_does_not_match(body: bytes, why: str) -> None:
    """Expect a miss at the body, also where the body is larger than the bound it was asked for."""
    assert match_operation(body_operation(), facts(POST, JSON, body)) == NoMatch(near="body")


def test_an_evaluator_that_raises_recognises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect a miss and no exception: whatever stumbles denies (I09)."""
    import rules.matching as matching

    def broken(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(matching, "EVALUATORS", {"json_fields": broken})
    assert match_operation(body_operation(), facts(POST, JSON, b"{}")) == NoMatch(near="body")
    monkeypatch.setattr(matching, "EVALUATORS", {})
    assert match_operation(body_operation(), facts(POST, JSON, b"{}")) == NoMatch(near="body")


def test_what_is_matched_later_is_denied_at_the_head() -> None:
    """Expect `later` before any body is read."""
    op = operation(body=BodySpec(matcher="later", bound=0))
    assert match_operation(op, facts()) == NoMatch(near="later")
    assert match_operation(op, facts(body=b"{}")) == NoMatch(near="later")


def test_an_argument_that_head_and_body_both_state_is_refused() -> None:
    """Expect a miss where two places could say two things under one name."""
    op = body_operation(order="string")
    assert match_operation(op, facts(POST, JSON, b'{"order":"8"}')) == NoMatch(near="argument")


def test_an_attested_body_counts_only_for_the_operation_that_it_names() -> None:
    """Expect the vault to take the executor's word for this operation id and no other, arguments included."""

    def attested(*operations: str) -> RequestFacts:
        return facts(POST, JSON, BodyAttested(operations=frozenset(operations), sha256=bytes(32)))

    op = body_operation()
    assert match_operation(op, attested()) == NoMatch(near="body")
    assert match_operation(op, attested("dev/other", "dev/orders2?version=1")) == NoMatch(near="body")
    assert match_operation(op, attested("dev/orders?order=8")) == NoMatch(near="argument")
    assert match_operation(op, attested("dev/orders")) == Matched(arguments={"order": "7"})
    entry = attestation("dev/orders", (("version", "1&x=2"), ("a", "é"), ("a", "b")))
    expected: dict[str, str | tuple[str, ...]] = {"order": "7", "version": "1&x=2", "a": ("b", "é")}
    assert match_operation(op, attested(entry)) == Matched(arguments=expected)


@every_row(
    ("template", "why"),
    [
        ("v1", "not absolute"),
        ("", "empty"),
        ("/a//b", "an empty segment"),
        ("/a/../b", "a dot segment"),
        ("/{a}/{a}", "a name twice"),
        ("/x{a}", "text beside a capture"),
        ("/{a:nothing}", "an unknown shape"),
        ("/**/a", "the rest is not last"),
        ("/a/*", "a star is no path grammar"),
        ("/a?b", "a query"),
        ("/a%20b", "literals are decoded text"),
        ("/{A}", "names are lower case"),
        ("//**", "an empty segment before the rest"),
    ],
)
def test_a_template_that_could_be_read_two_ways_is_refused(template: str, why: str) -> None:
    """Expect InvalidTemplate when policy is loaded, not a surprise when it is used."""
    with pytest.raises(InvalidTemplate):
        parse_path(template)


@every_row(
    ("template", "path", "captures"),
    [
        ("/public/**", "/public", None),
        ("/public/**", "/public/", None),
        ("/public/**", "/publicx/a", None),
        ("/public/**", "/public/a/b/", {}),
        ("/**", "/", None),
        ("/**", "/a", {}),
        ("/", "/a", None),
        ("/", "/", {}),
        ("/a/", "/a", None),
        ("/a/", "/a/", {}),
        ("/{x:number}", "/1a", None),
        ("/{x:number}", "/12", {"x": "12"}),
        ("/{o:git-owner}/{r:git-repository}", "/o/r.git", {"o": "o", "r": "r"}),
        ("/{o:git-owner}/{r:git-repository}", "/o/r.GIT", {"o": "o", "r": "r"}),
        ("/{o:git-owner}/{r:git-repository}", "/o/r.git.git", None),
        ("/{o:git-owner}/{r:git-repository}", "/o/.git", None),
        ("/{o:git-owner}/{r:git-repository}", "/o/r%40x", None),
        ("/{p:python-project}", "/Foo_.Bar", {"p": "foo-bar"}),
        ("/{p:python-file-project}", "/Foo_Bar-1.0-py3-none-any.whl.metadata", {"p": "foo-bar"}),
        ("/{p:python-file-project}", "/python-dateutil-2.9.tar.gz", {"p": "python-dateutil"}),
        ("/{p:python-file-project}", "/noversion.tar.gz", None),
        ("/{p:npm-package}", "/@scope%2fname", None),
    ],
)
def test_paths_match_whole_segments(template: str, path: str, captures: dict[str, str] | None) -> None:
    """Expect anchored matching, one segment per capture, shapes in their canonical spelling."""
    assert match_path(parse_path(template), CanonicalPath.parse(path)) == captures


@pytest.mark.parametrize("path", ["/@scope%2fname", "/@scope%2Fname"])
def test_an_encoded_slash_fits_only_where_it_is_declared(path: str) -> None:
    """Expect npm's scoped names to be one capture, in both spellings of the escape."""
    pattern = parse_path("/{p:npm-package}", encoded_slash=True)
    assert match_path(pattern, CanonicalPath.parse(path)) == {"p": "@scope/name"}
    assert match_path(pattern, CanonicalPath.parse("/a%2fb")) is None
    assert match_path(pattern, CanonicalPath.parse("/@a%2fb%2fc")) is None


def test_a_pattern_that_lost_its_shapes_matches_nothing() -> None:
    """Expect a hand-made pattern without shapes to deny instead of taking any segment."""
    pattern = PathPattern(template="/{x:number}", segments=(None,), names=("x",), rest=False)
    assert match_path(pattern, CanonicalPath.parse("/1")) is None


@every_row(
    ("pattern", "value", "fits", "why"),
    [
        ("acme/shop", None, False, "an argument that is not stated"),
        ("acme/shop", "acme/shop2", False, "no prefix matching"),
        ("acme/shop", "Acme/shop", False, "case counts"),
        ("*", "acme/shop", False, "a star stays in its segment"),
        ("acme/*", "acme/", False, "a star takes at least one character"),
        ("acme/*", "acme/a/b", False, "one segment"),
        ("${sandbox.missing}", "", False, "an attribute that the sandbox does not have"),
        ("${sandbox.empty}", "", False, "an empty attribute binds nothing"),
        ("acme/${sandbox.star}", "acme/shop", False, "an attribute is never a pattern"),
        ("acme/${sandbox.slash}", "acme/a/b", False, "an attribute is one segment"),
        ("acme/${sandbox.repo}", "acme/shop2", False, "another repository"),
        ("a*a", "a", False, "first and last do not overlap"),
        ("a*b*c", "acb", False, "order counts"),
        ("acme/shop", "acme/shop", True, "the same text"),
        ("acme/*", "acme/shop", True, "one segment"),
        ("*/*", "acme/shop", True, "two segments"),
        ("claude-*", "claude-sonnet-4-5", True, "a star inside a segment"),
        ("claude-*", "claude-", True, "a star inside a segment may take nothing"),
        ("a*b*c", "axbxc", True, "several stars"),
        ("acme/${sandbox.repo}", "acme/shop", True, "an attribute as a segment"),
        ("acme/${sandbox.repo}-*", "acme/shop-x", True, "an attribute beside a star"),
        ("${sandbox.slash}", "a/b", True, "alone an attribute is compared as text"),
        ("${sandbox.star}", "*", True, "alone an attribute is compared as text"),
        ("${sandbox.owner}/x", "ana/x", True, "the owner of the sandbox"),
    ],
)
def test_arguments_are_bound_by_patterns(pattern: str, value: str | None, fits: bool, why: str) -> None:
    """Expect a rule to match only arguments that fit, and a sandbox attribute to mean nothing but itself."""
    box = sandbox(repo="shop", slash="a/b", star="*", empty="")
    arguments = {} if value is None else {"repository": value}
    assert bind_arguments(rule({"repository": (pattern,)}), box, arguments) is fits


def test_every_bound_argument_needs_one_fitting_pattern() -> None:
    """Expect all of several arguments, and for each any of its patterns."""
    bound = rule({"a": ("1", "2"), "b": ("x",)})
    assert not bind_arguments(bound, sandbox(), {"a": "2"})
    assert not bind_arguments(bound, sandbox(), {"a": "3", "b": "x"})
    assert bind_arguments(bound, sandbox(), {"a": "2", "b": "x"})
    assert bind_arguments(rule({}), sandbox(), {"anything": "x"})
    assert not bind_arguments(rule({"a": ()}), sandbox(), {"a": "1"})


def test_folded_arguments_ignore_ascii_case_only() -> None:
    """Expect Acme/Shop to be acme/shop where the catalogue says so, and the Kelvin sign never to be a k."""
    folding = rule({"repository": ("Acme/${sandbox.repo}",)}, operation(fold=("repository",)))
    assert bind_arguments(folding, sandbox(repo="kit"), {"repository": "acme/KIT"})
    assert not bind_arguments(folding, sandbox(repo="kit"), {"repository": "acme/\u212ait"})
    assert not bind_arguments(folding, sandbox(repo="kit"), {"repository": "acme/kit2"})


@pytest.mark.parametrize("pattern", ["", "a/**", "${other.x}", "${sandbox.X}", "a\nb", "x" * 513, "${sandbox.x"])
def test_a_binding_that_means_nothing_is_refused(pattern: str) -> None:
    """Expect InvalidTemplate when policy is loaded."""
    with pytest.raises(InvalidTemplate):
        check_binding(pattern)


@tried()
@given(st.text(alphabet="ab*/", max_size=12), st.text(alphabet="ab/", max_size=12))
def test_patterns_agree_with_the_plain_definition(pattern: str, value: str) -> None:
    """Expect the linear matcher to say what a regular expression would."""
    import re

    parts = ["[^/]+" if part == "*" else "[^/]*".join(map(re.escape, part.split("*"))) for part in pattern.split("/")]
    wanted = re.fullmatch("/".join(parts), value) is not None
    assert bind_arguments(rule({"x": (pattern,)}), sandbox(), {"x": value}) is wanted
