"""OCI distribution: names that hold slashes, and tokens that are good for more than they are asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.arguments import Value, settled
from rules.facts import FactsRefused, RequestFacts
from rules.operations import check_head_params
from rules.operations.oci import head, token
from tests.support.properties import tried
from tests.support.rows import every_row

DIGEST = "sha256:" + "a" * 64
SERVICE = {"actions": ["pull"], "service": "registry.test"}


def facts(line: str) -> RequestFacts:
    method, target = line.split(" ", 1)
    return RequestFacts.build(
        method=method,
        scheme="https",
        tunnel=None,
        target=f"https://registry.test{target}",
        headers=(("host", "registry.test"),),
    )


def judged(line: str) -> dict[str, object]:
    """{action: arguments} for every action that the request is."""
    found = {action: head({"action": action}, facts(line)) for action in ("pull", "push", "delete")}
    return {action: arguments for action, arguments in found.items() if arguments is not None}


@every_row(
    "line",
    [
        "GET /v2/",
        "GET /v2/_catalog",
        "GET /v2/shop/manifests/",
        "GET /v2/shop/manifests/.x",
        "GET /v2/shop/manifests/" + "x" * 129,
        "GET /v2/shop_/manifests/v1",
        "GET /v2/sh--_op/manifests/v1",
        "GET /v2/shop/manifests/sha256:" + "A" * 64,
        "GET /v2/shop/manifests/sha512:" + "a" * 64,
        "GET /v2/shop/blobs/v1",
        "GET /v2/shop/tags",
        "GET /v2/shop/tags/list/",
        "GET /v2/a/tags/list/tags/list",
        "GET /v2/a/manifests/b/blobs/" + DIGEST,
        "GET /v2/_catalog/manifests/v1",
        "GET /v3/shop/manifests/v1",
        "GET /x/v2/shop/manifests/v1",
        "POST /v2/shop/manifests/v1",
        "PATCH /v2/shop/blobs/" + DIGEST,
        "PUT /v2/shop/blobs/uploads/",
        "PUT /v2/shop/blobs/uploads/u",
        "PUT /v2/shop/blobs/uploads/u?digest=v1",
        f"PUT /v2/shop/blobs/uploads/u?digest={DIGEST}&digest={DIGEST}",
        f"PATCH /v2/shop/blobs/uploads/u?digest={DIGEST}",
        f"PATCH /v2/shop/blobs/uploads/u?mount={DIGEST}&from=a",
        f"POST /v2/shop/blobs/uploads/u?digest={DIGEST}",
        f"POST /v2/shop/blobs/uploads/?mount={DIGEST}",
        f"POST /v2/shop/blobs/uploads/?mount={DIGEST}&from=",
        f"POST /v2/shop/blobs/uploads/?mount={DIGEST}&from=../secret",
        "POST /v2/shop/blobs/uploads/?mount=v1&from=a",
        "POST /v2/shop/blobs/uploads/?from=a",
        "DELETE /v2/shop/tags/list",
        "DELETE /v2/shop",
        "OPTIONS /v2/shop/manifests/v1",
    ],
)
def test_what_is_no_such_call_is_no_action(line: str) -> None:
    """Expect nothing for a path that the specification does not have, or that could be cut in two places."""
    assert judged(line) == {}


@pytest.mark.parametrize("target", ["/v2/a/../b/manifests/v1", "/v2/a//manifests/v1", "/v2/a/%2e%2e/manifests/v1"])
def test_dots_and_doubled_slashes_never_get_here(target: str) -> None:
    """Expect them to be refused with the facts."""
    with pytest.raises(FactsRefused):
        facts(f"GET {target}")


@every_row(
    ("line", "action", "arguments"),
    [
        ("GET /v2/a/manifests/v1", "pull", {"repository": "a", "reference": "v1"}),
        ("HEAD /v2/a/b/c/blobs/" + DIGEST, "pull", {"repository": "a/b/c", "reference": DIGEST}),
        ("GET /v2/a.b_c__d-e--f/tags/list", "pull", {"repository": "a.b_c__d-e--f"}),
        ("GET /v2/a/referrers/" + DIGEST, "pull", {"repository": "a", "reference": DIGEST}),
        ("PUT /v2/a/b/manifests/v1", "push", {"repository": "a/b", "reference": "v1"}),
        ("POST /v2/a/b/blobs/uploads/", "push", {"repository": "a/b"}),
        ("POST /v2/a/b/blobs/uploads", "push", {"repository": "a/b"}),
        (f"POST /v2/a/blobs/uploads/?mount={DIGEST}&from=c/d", "push", {"repository": ("a", "c/d")}),
        (f"PUT /v2/a/blobs/uploads/u=_.~:@-1?state=x&digest={DIGEST}", "push", {"repository": "a"}),
        ("GET /v2/a/blobs/uploads/u", "push", {"repository": "a"}),
        ("DELETE /v2/a/blobs/uploads/u", "push", {"repository": "a"}),
        ("DELETE /v2/a/manifests/v1", "delete", {"repository": "a", "reference": "v1"}),
        ("DELETE /v2/a/blobs/" + DIGEST, "delete", {"repository": "a", "reference": DIGEST}),
    ],
)
def test_a_call_is_exactly_one_action(line: str, action: str, arguments: dict[str, Value]) -> None:
    """Expect the image and what of it, for one action alone."""
    assert judged(line) == {action: arguments}


@tried(400)
@given(
    st.lists(
        st.sampled_from(["a", "b-c", "manifests", "blobs", "uploads", "tags", "list", "referrers", "v1", DIGEST, "_"]),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]),
)
def test_no_path_is_two_actions(words: list[str], method: str) -> None:
    """Expect at most one reading of any path made of the protocol's own words."""
    assert len(judged(f"{method} /v2/{'/'.join(words)}")) <= 1


@every_row(
    "query",
    [
        "",
        "?service=registry.test",
        "?scope=repository:a:pull",
        "?service=other.test&scope=repository:a:pull",
        "?service=registry.test&service=registry.test&scope=repository:a:pull",
        "?service=registry.test&scope=repository:a:pull,push",
        "?service=registry.test&scope=repository:a:pull&scope=repository:b:push",
        "?service=registry.test&scope=repository:a:pull%20repository:b:push",
        "?service=registry.test&scope=repository:a:pull+repository:b:*",
        "?service=registry.test&scope=repository:a:pull&scope=",
        "?service=registry.test&scope=repository:A:pull",
        "?service=registry.test&scope=repository:a",
        "?service=registry.test&scope=registry:catalog:*",
        "?service=registry.test&scope=repository:a:pull,",
        "?service=registry.test&scope=repository:a:pull&offline_token=true",
        "?service=registry.test&scope=repository:a:pull&refresh_token=x",
        "?service=registry.test" + "&scope=repository:a:pull" * 17,
    ],
)
def test_a_token_that_is_good_for_more_is_refused(query: str) -> None:
    """Expect every scope, in every spelling, to count; nothing is struck out."""
    assert token(SERVICE, facts(f"GET /token{query}")) is None


def test_a_token_states_all_that_it_is_good_for() -> None:
    """Expect all names and actions; what only pulls is not also the larger operation."""
    pull = "GET /token?service=registry.test&client_id=docker&scope=repository:a:pull&scope=repository:b/c:pull"
    assert settled(token(SERVICE, facts(pull)) or {}) == {"repository": ("a", "b/c"), "action": "pull"}
    push = {"actions": ["pull", "push"]}
    assert token(push, facts(pull)) is None
    found = token(push, facts("GET /token?service=x&scope=repository:a:pull,push"))
    assert settled(found or {}) == {"repository": "a", "action": ("pull", "push")}


def test_parameters_are_checked_when_a_service_is_read() -> None:
    """Expect a sentence for what is missing or unknown."""
    for matcher, params in (
        ("oci", {}),
        ("oci", {"action": "read"}),
        ("oci_token", {}),
        ("oci_token", {"actions": ["admin"]}),
        ("oci_token", {"actions": []}),
        ("oci_token", {"actions": ["pull"], "more": 1}),
    ):
        with pytest.raises(ValueError, match="oci"):
            check_head_params(matcher, params)
