"""Explanations: what nearly permits a request and why it does not, and what a request is recognised as."""

from __future__ import annotations

import pytest

from exeat.explain import explain_request
from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from tests.support.policies import NOW

POLICY = compile_policy(
    parse_sources(
        Sources(
            policy={
                "policy.yaml": """
version: 1
roles:
  dev:
    allow:
      - name: orders
        host: api.shop.example
        methods: [GET]
        paths: ["/v1/orders/{id}"]
        query: {expand: [items], page: any}
      - name: release
        host: api.shop.example
        methods: [POST]
        paths: [/release]
        body: {json: {service: [shop]}}
      - {name: video, host: video.shop.example, tunnel: true, reason: pinned}
      - {service: github, operations: [git.fetch, rest.read], with: {repository: "acme/${sandbox.project}"}}
"""
            }
        )
    ).document
)

API, GIT = "https://api.shop.example", "https://github.com"
PLAIN = (("content-type", "text/plain"),)
FETCH = "application/x-git-upload-pack-request"

MISSES = [
    ("GET", f"{API}/v2/x", None, "orders", "the path fits none of /v1/orders/{id}"),
    ("PUT", f"{API}/v1/orders/7", None, "orders", "the method is PUT, not GET"),
    ("GET", f"{API}/v1/orders/7?t=1", None, "orders", "the query may not hold t; it may hold expand, page"),
    ("GET", f"{API}/v1/orders/7?expand=all", None, "orders", "expand in the query must be items"),
    ("GET", f"{API}/v1/orders/7?page=1&page=2", None, "orders", "the query holds page more than once"),
    ("GET", f"{API}:444/v1/orders/7", None, "orders", "the port is 444, not 443"),
    ("POST", f"{GIT}/acme/shop/git-upload-pack", b"0", "github", f"content-type is text/plain and must be {FETCH}"),
    ("GET", f"{GIT}/acme/shop.git/info/refs", None, "github", "the query lacks service"),
    (
        "GET",
        f"{GIT}/evil/shop.git/info/refs?service=git-upload-pack",
        None,
        "github",
        "repository is evil/shop; the rule binds it to acme/${sandbox.project}",
    ),
]


@pytest.mark.parametrize(("method", "url", "body", "rule", "because"), MISSES)
def test_the_nearest_miss_says_what_differs(method: str, url: str, body: bytes | None, rule: str, because: str) -> None:
    """The first miss is the rule that comes nearest, with the one thing that is wrong."""
    headers = PLAIN if body else ()
    answer = explain_request(POLICY, "dev", method, url, body, NOW, headers, {"project": "shop"})
    assert answer["decision"] == "deny"
    assert (answer["misses"][0]["rule"], answer["misses"][0]["because"]) == (f"dev/{rule}", because)


def test_a_body_that_states_something_else_is_named() -> None:
    """Where the head fits, the matcher that did not recognise the body is said."""
    answer = explain_request(POLICY, "dev", "POST", f"{API}/release", b'{"service":"x"}', NOW)
    assert answer["reason"] == "body-not-judged"
    assert answer["misses"][0]["because"] == (
        "the body (application/json) is not what json_fields recognises as this operation"
    )


def test_at_most_five_misses_are_told_and_no_other_hosts() -> None:
    """A host of many operations does not drown the answer; rules about other hosts are no misses."""
    answer = explain_request(POLICY, "dev", "DELETE", "https://api.github.com/repos/acme/shop", None, NOW)
    assert 0 < len(answer["misses"]) <= 5
    assert {miss["rule"] for miss in answer["misses"]} == {"dev/github"}


def test_a_host_that_nobody_names_has_no_misses() -> None:
    """There is nothing near it, and the catalogue does not know it."""
    answer = explain_request(POLICY, "dev", "GET", "https://elsewhere.example/", None, NOW)
    assert (answer["misses"], answer["recognised"]) == ([], [])


def test_a_request_is_recognised_whoever_permits_it() -> None:
    """The catalogue says what it is: operation, effect and arguments, also where no rule permits it."""
    url = "https://github.com/acme/shop.git/info/refs?service=git-receive-pack"
    answer = explain_request(POLICY, "dev", "GET", url, None, NOW)
    assert answer["decision"] == "deny"
    found = {entry["operation"]: entry for entry in answer["recognised"]}
    assert found["github/git.push"]["effect"] == "write"
    assert found["github/git.push"]["arguments"] == {"repository": "acme/shop"}


def test_the_canonical_request_shows_what_is_judged_and_no_values() -> None:
    """Host in lower case, port, path as sent; of the query the names, of a body the size."""
    answer = explain_request(POLICY, "dev", "POST", "https://API.shop.example/release?a=1", b'{"service":"shop"}', NOW)
    assert answer["canonical"] == {
        "method": "POST",
        "scheme": "https",
        "host": "api.shop.example",
        "port": 443,
        "path": "/release",
        "query": ["a"],
    }
    fits = explain_request(POLICY, "dev", "POST", "https://api.shop.example/release", b'{"service":"shop"}', NOW)
    assert (fits["decision"], fits["canonical"]["body_bytes"], "misses" in fits) == ("permit", 18, False)


def test_attributes_stand_for_a_sandbox() -> None:
    """A binding to an attribute is judged with the one that is given."""
    url = "https://github.com/acme/shop.git/info/refs?service=git-upload-pack"
    assert explain_request(POLICY, "dev", "GET", url, None, NOW)["decision"] == "deny"
    answer = explain_request(POLICY, "dev", "GET", url, None, NOW, (), {"project": "shop"})
    assert (answer["decision"], answer["rule"]) == ("permit", "dev/github")
