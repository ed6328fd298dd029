"""A policy with two credentials, and the constants of credentialed calls in tests."""

from __future__ import annotations

from proxy.brokerlink import HandoffRequest
from rules.compile import compile_policy
from rules.facts import Sandbox
from rules.parse import Sources, parse_sources
from rules.placeholders import make
from rules.policy import Policy
from wire.handoff import BodyPlan, Evidence

CANARY = b"sk_live_Zq7w4nX0pLrT9vB2mK6dCanary"
KEY = b"k" * 32
PLACEHOLDER = make("sk_live_{24}", b"\x07" * 64)

CREDENTIALS = """
version: 1
credentials:
  shop:
    kind: header
    header: X-Api-Key
    secret: store:shop
    hosts: [shop.test]
    owner: team
    placeholder: {env: SHOP_KEY, shape: "sk_live_{24}"}
  git:
    kind: basic
    secret: store:git
    hosts: [git.test]
    owner: team
    placeholder: {env: GIT_TOKEN, shape: "ghp_{36}"}
"""
POLICY = """
version: 1
roles:
  dev:
    allow:
      - {name: orders, host: shop.test, methods: [GET], paths: ["/orders/{id}"], credential: shop}
      - {name: upload, host: shop.test, methods: [POST], paths: [/upload], credential: shop}
      - name: kept
        host: shop.test
        methods: [GET]
        paths: [/kept]
        credential: shop
        result: {keep: [id, "items[].sku", "note?"]}
      - name: refund
        host: shop.test
        methods: [POST]
        paths: [/refund]
        credential: shop
        body: {json: {order: string}}
      - {name: clone, host: git.test, methods: [GET], paths: ["/repo/{name}"], credential: git}
"""


def policy(text: str = POLICY) -> Policy:
    """The policy of these tests, compiled as a process would."""
    parsed = parse_sources(
        Sources(policy={"policy.yaml": text}, credentials=("credentials.yaml", CREDENTIALS), services={}, ca_files=None)
    )
    return compile_policy(parsed.document)


def request(box: Sandbox, digest: str, path: str = "/orders/7") -> HandoffRequest:
    """A hand-off as a gate makes it for the rule `orders`."""
    return HandoffRequest(
        request_id="req_aaaaaaaaaaaaaaaaaaaa",
        tenant=box.tenant,
        sandbox=box.id,
        epoch=box.epoch,
        evidence=Evidence(token="tok"),
        policy_digest=digest,
        method="GET",
        scheme="https",
        host="shop.test",
        port=443,
        target=path,
        headers=(("Host", "shop.test"), ("Accept", "*/*"), ("X-Api-Key", PLACEHOLDER)),
        body=BodyPlan(),
        rule="dev/orders",
        operation="dev/orders",
        credential="shop",
    )
