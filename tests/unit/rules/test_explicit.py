"""Explicit operations: inputs that state nothing, and inputs that become exactly the request they name."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.compile import compile_policy
from rules.decide import decide_request
from rules.decision import Denied, Permit
from rules.explicit import MAX_INPUT, Offer, Stated, Unstated, offers, state
from rules.facts import RequestFacts, Sandbox, TunnelFacts
from rules.parse import Sources, parse_sources
from rules.policy import Policy
from tests.support.policies import NOW, sandbox
from tests.support.rows import every_row

POLICY = compile_policy(
    parse_sources(
        Sources(
            policy={
                "policy.yaml": """
version: 1
roles:
  dev:
    allow:
      - name: orders.read
        host: orders.shop.example
        methods: [GET]
        paths: ["/v1/orders/{id}"]
        query: {expand: [items], page: any}
      - name: files.read
        host: files.shop.example
        methods: [GET]
        paths: ["/public/**"]
      - name: release
        host: deploy.shop.example
        methods: [POST]
        paths: [/release]
        effect: execute
        body: {json: {service: [shop, cart], version: string, "dry?": boolean}}
      - name: many
        host: "*.pages.example"
        methods: [GET]
        paths: ["/{page}"]
      - name: hidden
        host: video.shop.example
        tunnel: true
        reason: pinned
      - {service: github, operations: [rest.read, git.fetch], with: {repository: acme/shop}}
    deny:
      - {host: secret.files.example}
"""
            }
        )
    ).document
)
DEV = sandbox()


def stated(name: str, value: Any) -> Stated:
    made = state(POLICY, DEV, name, json.dumps(value).encode())
    assert isinstance(made, Stated), made
    return made


def facts(made: Stated) -> RequestFacts:
    return RequestFacts.build(
        method=made.method,
        scheme=made.scheme,
        tunnel=TunnelFacts(host=made.host, port=made.port),
        target=made.target,
        headers=made.headers,
        has_body=made.body is not None,
    )


def verdict(made: Stated, policy: Policy = POLICY, who: Sandbox = DEV) -> Any:
    asked = facts(made)
    decision = decide_request(policy, who, asked, NOW)
    if made.body is not None and not isinstance(decision, Permit | Denied):
        decision = decide_request(policy, who, replace(asked, body=made.body), NOW)
    return decision


UNSTATED = [
    ("an operation that nobody offers", "orders.write", {}, "No such operation is offered to this sandbox."),
    ("a tunnel is no operation", "hidden", {}, "No such operation is offered to this sandbox."),
    ("a missing capture", "orders.read", {}, "`path` holds exactly: id."),
    ("a capture too many", "orders.read", {"path": {"id": "7", "x": "1"}}, "`path` holds exactly: id."),
    (
        "a dot segment",
        "orders.read",
        {"path": {"id": ".."}},
        "These values make no path: the path holds a dot segment.",
    ),
    ("a slash in one segment", "orders.read", {"path": {"id": "7/8"}}, "These values do not fit /v1/orders/{id}."),
    ("an empty segment", "orders.read", {"path": {"id": ""}}, "These values do not fit /v1/orders/{id}."),
    ("a value that is no text", "orders.read", {"path": {"id": {}}}, "A value in `path` is text or a whole number."),
    ("a truth value in a path", "orders.read", {"path": {"id": True}}, "A value in `path` is text or a whole number."),
    (
        "an encoded percent",
        "orders.read",
        {"path": {"id": "%2e"}},
        "These values make no path: the path encodes a control, percent or backslash character.",
    ),
    (
        "a parameter beside the list",
        "orders.read",
        {"path": {"id": "7"}, "query": {"token": "x"}},
        "`query` may hold: expand, page.",
    ),
    (
        "a value beside the list",
        "orders.read",
        {"path": {"id": "7"}, "query": {"expand": "all"}},
        "`query` takes for expand: items.",
    ),
    (
        "a list as a value",
        "orders.read",
        {"path": {"id": "7"}, "query": {"page": [1]}},
        "A value in `query` is text, a whole number or a truth value.",
    ),
    ("a body on a GET", "orders.read", {"path": {"id": "7"}, "body": {}}, "A GET has no body."),
    (
        "a member of another kind",
        "orders.read",
        {"path": {"id": "7"}, "url": "https://x.example"},
        "An input holds only request, host, path, query, body.",
    ),
    ("no object at all", "orders.read", [], "The input is not a JSON object."),
    (
        "several requests and none chosen",
        "github.rest.read",
        {},
        "This operation knows several requests: say which in `request`.",
    ),
    (
        "a request of its own",
        "github.rest.read",
        {"request": "DELETE https://api.github.com/x"},
        "`request` is not one of those that this operation knows.",
    ),
    ("no host where it is a pattern", "many", {"path": {"page": "a"}}, "`host` names the one host to ask."),
    (
        "a host outside the pattern",
        "many",
        {"host": "evil.example", "path": {"page": "a"}},
        "`host` does not fit *.pages.example.",
    ),
    ("a host that is none", "many", {"host": "a b", "path": {"page": "a"}}, "`host` is not a host name."),
    (
        "another host than the one",
        "orders.read",
        {"host": "evil.example", "path": {"id": "7"}},
        "`host` does not fit orders.shop.example.",
    ),
]


@every_row(("name", "value", "problem"), [row[1:] for row in UNSTATED], ids=[row[0] for row in UNSTATED])
def test_an_input_that_states_nothing_says_why_in_words_of_policy(name: str, value: Any, problem: str) -> None:
    """No request is made, and the sentence reflects nothing that was sent."""
    made = state(POLICY, DEV, name, json.dumps(value).encode())
    assert made == Unstated(problem=problem, unknown=problem.startswith("No such"))


@pytest.mark.parametrize(
    "raw", [b'{"path":{"id":"1"},"path":{"id":"2"}}', b"\xff", b"{" * 99, b"null", b'{"path":NaN}']
)
def test_an_input_with_two_meanings_is_refused(raw: bytes) -> None:
    """Duplicate keys, other encodings, deep nesting and what is no object state nothing."""
    assert isinstance(state(POLICY, DEV, "orders.read", raw), Unstated)


def test_an_input_over_its_bound_is_refused() -> None:
    """64 KiB are an input; one byte more is none."""
    made = state(POLICY, DEV, "orders.read", b'{"path":{"id":"7"}}' + b" " * MAX_INPUT)
    assert made == Unstated(problem="An input has at most 64 KiB.")


@pytest.mark.parametrize("value", [["a"], {"a": "b"}, None, True, 1.5])
def test_a_value_of_a_path_is_text_or_a_whole_number(value: Any) -> None:
    """What is written as a list, an object or nothing is never spelt into a path, at its end neither."""
    raw = json.dumps({"path": {"rest": value}}).encode()
    assert state(POLICY, DEV, "files.read", raw) == Unstated(problem="A value in `path` is text or a whole number.")


def test_a_query_over_its_bound_states_nothing() -> None:
    """What no request may have as its query is told as a wrong input, and is no fault of ours."""
    made = state(POLICY, DEV, "orders.read", json.dumps({"path": {"id": "7"}, "query": {"page": "x" * 9000}}).encode())
    assert made == Unstated(problem="These values make no query: the query is too long.")


def test_a_wrong_binding_is_stated_and_then_denied() -> None:
    """Stating is no permission: the decision sees the same request as from any client."""
    made = stated(
        "github.rest.read",
        {
            "request": "GET https://api.github.com/repos/{owner:git-owner}/{repo:git-repository}/branches",
            "path": {"owner": "evil", "repo": "shop"},
        },
    )
    denied = verdict(made)
    assert isinstance(denied, Denied)
    assert denied.reason == "no-rule"


def test_a_role_without_rules_is_offered_nothing() -> None:
    """An unknown role lists no operation."""
    assert offers(POLICY, sandbox("nobody")) == ()


def test_an_input_becomes_the_request_that_the_rule_permits() -> None:
    """Path, query and host are written from policy's template and the input's values."""
    made = stated("orders.read", {"path": {"id": 7}, "query": {"expand": "items", "page": "a&b=c"}})
    assert (made.method, made.host.text, made.port) == ("GET", "orders.shop.example", 443)
    assert made.target == "/v1/orders/7?expand=items&page=a%26b%3Dc"
    permit = verdict(made)
    assert isinstance(permit, Permit)
    assert permit.rule == "dev/orders.read"


def test_the_rest_of_a_path_may_hold_slashes() -> None:
    """`**` takes one or more segments."""
    made = stated("files.read", {"path": {"rest": "a/b c/d"}})
    assert made.target == "/public/a/b%20c/d"
    assert isinstance(verdict(made), Permit)


def test_a_json_body_is_written_as_the_operation_reads_it() -> None:
    """The body carries its media type and is judged as any other."""
    made = stated("release", {"body": {"service": "shop", "version": "1.4", "dry": True}})
    assert made.body == b'{"service":"shop","version":"1.4","dry":true}'
    assert ("content-type", "application/json") in made.headers
    assert isinstance(verdict(made), Permit)


def test_a_pattern_of_hosts_takes_the_one_that_is_named() -> None:
    """A wildcard rule is stated for one host that it matches."""
    made = stated("many", {"host": "a.pages.example", "path": {"page": "x"}})
    assert made.host.text == "a.pages.example"
    assert isinstance(verdict(made), Permit)


def offer(name: str) -> Offer:
    return next(item for item in offers(POLICY, DEV) if item.name == name)


def test_offers_are_named_as_they_are_called() -> None:
    """Service operations carry the service, hand-written ones the rule; tunnels and denials are none."""
    names = [item.name for item in offers(POLICY, DEV)]
    assert names == ["files.read", "github.git.fetch", "github.rest.read", "many", "orders.read", "release"]


def test_an_offer_shows_what_is_bound_and_which_inputs_it_takes() -> None:
    """The schema is closed, names every required value, and lists what a query may hold."""
    assert offer("github.rest.read").bound == {"repository": ("acme/shop",)}
    schema = offer("orders.read").schema()
    assert schema["required"] == ["path"]
    assert schema["properties"]["path"]["required"] == ["id"]
    assert schema["properties"]["query"]["properties"]["expand"] == {"enum": ["items"]}
    assert schema["additionalProperties"] is False
    release = offer("release").schema()["properties"]["body"]
    assert release["properties"]["service"] == {"enum": ["shop", "cart"]}
    assert release["required"] == ["service", "version"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["request", "host", "path", "query", "body", "id", "rest", "page"]) | st.text(), inner
            )
        ),
    )
)
def test_no_input_makes_a_request_outside_its_operation(value: Any) -> None:
    """Whatever is sent, what is stated lies at the operation's host and under its template."""
    for name in ("orders.read", "files.read", "many", "release"):
        made = state(POLICY, DEV, name, json.dumps(value).encode())
        if isinstance(made, Stated):
            decision = verdict(made)
            assert isinstance(decision, Permit) or decision.reason == "body-not-judged"
