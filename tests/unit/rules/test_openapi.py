"""Services from OpenAPI descriptions: what cannot be said exactly is left out, and the rest is what was described."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.compile import compile_policy
from rules.decide import decide_request
from rules.decision import Decision, Denied, NeedsBody, Permit
from rules.openapi import OpenApiError, as_service_file, read_openapi
from rules.parse import PolicyError, Sources, parse_sources
from rules.policy import Policy
from rules.service_file import parse_service
from rules.yaml12 import YamlError
from tests.support.policies import NOW, request, sandbox
from tests.support.rows import every_row

SHOP: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1"},
    "servers": [{"url": "https://api.shop.example/v2"}],
    "components": {
        "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-Shop-Key"}},
        "parameters": {"Page": {"name": "page", "in": "query", "schema": {"type": "integer"}}},
    },
    "paths": {
        "/orders": {
            "get": {
                "operationId": "listOrders",
                "tags": ["orders"],
                "summary": "All orders.",
                "parameters": [
                    {"$ref": "#/components/parameters/Page"},
                    {"name": "state", "in": "query", "required": True, "schema": {"enum": ["open", "paid"]}},
                    {"name": "X-Trace", "in": "header", "schema": {}},
                    {"name": "X-Shop-Key", "in": "header", "schema": {}},
                ],
            },
            "post": {
                "operationId": "createOrder",
                "tags": ["orders"],
                "requestBody": {"required": True, "content": {"application/json": {}}},
            },
        },
        "/orders/{orderId}": {"get": {"operationId": "orders/get", "tags": ["orders"]}},
        "/files/{name}.pdf": {"get": {"operationId": "getFile"}},
        "/health": {"get": {}, "trace": {"operationId": "traceIt"}},
    },
}
TEXT = json.dumps(SHOP)
DIGEST = sha256(TEXT.encode()).hexdigest()


def policy(entry: str, rules: str, text: str = TEXT) -> Policy:
    written = f"version: 1\nservices:\n  shop: {entry}\nroles:\n  dev:\n    allow:\n      - {rules}\n"

    def read(name: str) -> str:
        if name != "shop.json":
            raise ValueError("no such file")
        return text

    sources = Sources(policy={"policy.yaml": written}, descriptions=read)
    return compile_policy(parse_sources(sources).document)


def pinned(more: str = "") -> str:
    return f"{{openapi: {{document: file:shop.json, sha256: {DIGEST}{more}}}}}"


def verdict(made: Policy, line: str, *headers: tuple[str, str], body: bytes | None = None) -> Decision:
    asked = request(line, *headers, has_body=body is not None)
    decision = decide_request(made, sandbox(), asked, NOW)
    if isinstance(decision, NeedsBody):
        decision = decide_request(made, sandbox(), replace(asked, body=body), NOW)
    return decision


@every_row(
    ("change", "said"),
    [
        ({"openapi": "2.0"}, "openapi is 3.0.x or 3.1.x"),
        ({"openapi": None}, "openapi is 3.0.x or 3.1.x"),
        ({"servers": []}, "give one with base:"),
        ({"servers": [{"url": "http://api.shop.example"}]}, "give one with base:"),
        ({"servers": [{"url": "https://{region}.shop.example"}]}, "give one with base:"),
        ({"servers": [{"url": "https://user@api.shop.example"}]}, "not a host"),
        ({"servers": [{"url": "https://api.shop.example/a?b"}]}, "cannot be a prefix"),
        ({"servers": [{"url": "https://api.shop.example/../x"}]}, "no operation is left"),
        ({"paths": {}}, "no operation is left"),
        ({"paths": {"/{a}-{b}": {"get": {}}}}, "partly literal"),
        ({"paths": {"/x": {"$ref": "other.json#/x"}}}, "leads out of the description"),
        ({"paths": {"/x": {"$ref": "#/paths/~1x"}}}, "in a circle"),
        ({"paths": {"/x": {"get": {"parameters": [{"$ref": "#/nowhere"}]}}}}, "leads nowhere"),
    ],
)
def test_a_description_that_makes_no_service_says_why(change: dict[str, Any], said: str) -> None:
    """Each is an error with a place and one sentence; nothing is guessed."""
    with pytest.raises(OpenApiError) as raised:
        read_openapi(json.dumps(SHOP | change), "shop.json", name="shop")
    assert said in raised.value.problems[0].message


@pytest.mark.parametrize("text", ["[]", "{", '{"openapi":"3.1.0","openapi":"3.1.0"}', "a: b: c", ""])
def test_what_is_no_description_is_refused(text: str) -> None:
    """Neither JSON with two meanings nor broken YAML is read."""
    with pytest.raises(YamlError):
        read_openapi(text, "shop.json", name="shop")


def test_an_operation_that_is_not_there_is_named() -> None:
    """A typo in `operations:` is an error, not an empty service."""
    with pytest.raises(OpenApiError, match="has no listOrder, tag:order; did you mean listOrders"):
        read_openapi(TEXT, "shop.json", name="shop", operations=["listOrder", "tag:order"])


def test_a_base_that_is_no_https_url_is_named() -> None:
    """Whoever gave a base is not told to give one."""
    with pytest.raises(OpenApiError, match="the base 'ftp://x' is no https URL"):
        read_openapi(TEXT, "shop.json", name="shop", base="ftp://x")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (pinned().replace(DIGEST, "f" * 64), f"the description is another one: its SHA-256 is {DIGEST}"),
        (pinned(", operations: [nope]"), "the description has no nope"),
        (pinned(", operations: []"), "empty list"),
        ("{openapi: {document: shop.json, sha256: x}}", "expected file:"),
        ("{openapi: {document: file:none.json, sha256: x}}", "cannot be read"),
        ("{openapi: {document: file:shop.json}}", "sha256"),
        (pinned()[:-1] + ", like: pypi}", "like"),
    ],
)
def test_a_policy_that_names_a_description_wrongly_is_refused_at_its_place(entry: str, said: str) -> None:
    """The error has file, line and column, and no service comes of it."""
    with pytest.raises(PolicyError, match=r"policy.yaml:3:") as raised:
        policy(entry, "{service: shop, operations: [read]}")
    assert said in str(raised.value)


DENIED = [
    ("a write by a role that reads", "POST https://api.shop.example/v2/orders", ()),
    ("a path beside the description", "GET https://api.shop.example/v2/customers", ()),
    ("the same path without its prefix", "GET https://api.shop.example/orders?state=open", ()),
    ("a required parameter that is missing", "GET https://api.shop.example/v2/orders", ()),
    ("a value that is not listed", "GET https://api.shop.example/v2/orders?state=all", ()),
    ("a parameter that is not described", "GET https://api.shop.example/v2/orders?state=open&x=1", ()),
    ("an operation that could not be said", "GET https://api.shop.example/v2/files/a.pdf", ()),
    ("the client's own key", "GET https://api.shop.example/v2/orders/7", (("x-shop-key", "mine"),)),
]


@pytest.mark.parametrize(("line", "headers"), [row[1:] for row in DENIED], ids=[row[0] for row in DENIED])
def test_what_is_not_described_is_denied(line: str, headers: tuple[tuple[str, str], ...]) -> None:
    """Unknown means write, and a security scheme of the description is a slot, never the client's own."""
    made = policy(pinned(), "{service: shop, operations: [read]}")
    assert isinstance(verdict(made, line, *headers), Denied)


def test_reads_and_named_writes_are_permitted_with_their_arguments() -> None:
    """GET is read, POST is write; captures are arguments that a rule may bind."""
    made = policy(pinned(), "{service: shop, operations: [read, createOrder], with: {}}".replace(", with: {}", ""))
    listed = verdict(made, "GET https://api.shop.example/v2/orders?state=open&page=2")
    assert isinstance(listed, Permit)
    assert (listed.operation, listed.effect) == ("shop/listOrders", "read")
    created = verdict(made, "POST https://api.shop.example/v2/orders", ("content-type", "application/json"), body=b"{}")
    assert isinstance(created, Permit)
    assert created.effect == "write"
    assert isinstance(verdict(made, "POST https://api.shop.example/v2/orders", body=b"{}"), Denied)
    bound = policy(pinned(), '{service: shop, operations: [orders.get], with: {order_id: ["7"]}}')
    assert isinstance(verdict(bound, "GET https://api.shop.example/v2/orders/7"), Permit)
    assert isinstance(verdict(bound, "GET https://api.shop.example/v2/orders/8"), Denied)


OVERLAPPING = json.dumps(
    {
        "openapi": "3.1.0",
        "servers": [{"url": "https://api.shop.example/v2"}],
        "paths": {
            "/orders/{id}": {"get": {"operationId": "getOrder"}, "post": {"operationId": "changeOrder"}},
            "/orders/export": {"get": {"operationId": "exportOrders"}},
            "/orders/{id}:cancel": {"post": {"operationId": "cancelOrder"}},
            "/orders/purge": {"post": {"operationId": "purgeOrders"}},
            "/{kind}/recent": {"get": {"operationId": "recent"}},
            "/moved": {"get": {"operationId": "moved"}, "servers": [{"url": "https://api.shop.example/v3"}]},
            "/kept": {"get": {"operationId": "kept"}},
        },
    }
)


@pytest.mark.parametrize(
    "line",
    [
        "GET https://api.shop.example/v2/orders/export",
        "GET https://api.shop.example/v2/orders/Export",
        "GET https://api.shop.example/v2/orders/recent",
        "GET https://api.shop.example/v2/moved",
        "POST https://api.shop.example/v2/orders/7:cancel",
        "POST https://api.shop.example/v2/orders/purge",
    ],
)
def test_a_template_does_not_stand_for_the_words_of_another_path(line: str) -> None:
    """`/orders/export` is its own operation to the server: one that chose `/orders/{id}` alone may not have it."""
    digest = sha256(OVERLAPPING.encode()).hexdigest()
    chosen = "[getOrder, changeOrder, kept]" if "moved" not in line else "[getOrder, changeOrder, moved, kept]"
    entry = f"{{openapi: {{document: file:shop.json, sha256: {digest}, operations: {chosen}}}}}"
    made = policy(entry, "{service: shop, operations: [read, write]}", OVERLAPPING)
    assert isinstance(verdict(made, line), Denied)
    assert isinstance(verdict(made, "GET https://api.shop.example/v2/orders/7"), Permit)
    assert isinstance(verdict(made, "GET https://api.shop.example/v2/kept"), Permit)


def test_tags_choose_operations_and_a_base_stands_for_the_server() -> None:
    """Only what is chosen is there, at the place that policy names."""
    entry = pinned(', operations: ["tag:orders"]')[:-1] + ', base: "https://eu.shop.example:8443/api"}'
    made = policy(entry, "{service: shop, operations: [read]}")
    assert isinstance(verdict(made, "GET https://eu.shop.example:8443/api/orders/7"), Permit)
    assert isinstance(verdict(made, "GET https://eu.shop.example:8443/api/health"), Denied)
    assert isinstance(verdict(made, "GET https://api.shop.example/v2/orders/7"), Denied)


def test_the_written_file_is_a_service_file_and_tells_what_is_left_out() -> None:
    """What `exeat policy import openapi` writes loads as it is, with its tests and credential slot."""
    text = as_service_file(read_openapi(TEXT, "shop.json", name="shop"))
    assert "# left out: getFile: a segment of its path is partly literal" in text
    service = parse_service(text, "shop.yaml")
    assert service.credential is not None
    assert (service.credential.kind, service.credential.placeholders[0][1].env) == ("header", "SHOP_KEY")
    assert {test.expect for test in service.tests} == {"allow", "deny"}
    assert {op.id for op in service.operations} == {
        "shop/listOrders",
        "shop/createOrder",
        "shop/orders.get",
        "shop/get.health",
    }


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["get", "/a/{b}", "#/paths", "query", "x"]) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["get", "post", "parameters", "$ref", "in", "name", "schema", "requestBody", "content", "tags"]
            )
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(_JSON, _JSON)
def test_any_description_is_a_service_or_an_error(item: Any, components: Any) -> None:
    """Whatever stands in it: a service file that loads, or an error with a place."""
    text = json.dumps(SHOP | {"paths": {"/a/{b}": item, "/c": {"get": {}}}, "components": components})
    try:
        found = read_openapi(text, "shop.json", name="shop")
    except OpenApiError:
        return
    assert parse_service(as_service_file(found), "shop.yaml").operations
