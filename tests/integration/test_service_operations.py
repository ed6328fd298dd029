"""Operations of the catalogue in the live lane: head and body decide, and what is refused reaches nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gateway import TestGateway
from tests.support.origins import Origin
from tests.support.scripts import READ, script, text

pytestmark = pytest.mark.xdist_group("services")

POLICY = """
services:
  chat: {{like: slack, base: "https://svc.test:{port}/chat"}}
  store: {{like: s3, base: "https://svc.test:{port}/store"}}
  table: {{like: aws-dynamodb, base: "https://svc.test:{port}/table"}}
  who: {{like: aws-sts, base: "https://svc.test:{port}/who"}}
  safe: {{like: vault, base: "https://svc.test:{port}/vault"}}
  logs: {{like: elasticsearch, base: "https://svc.test:{port}/logs"}}
  prod: {{like: kubernetes, base: "https://svc.test:{port}/prod"}}
  pay: {{like: stripe, base: "https://svc.test:{port}/pay"}}
roles:
  agent:
    allow:
      - {{name: chat, service: chat, operations: [read]}}
      - {{name: say, service: chat, operations: [message.write], with: {{channel: C1}}}}
      - {{name: store, service: store, operations: [read, object.write, object.copy], with: {{bucket: data}}}}
      - {{name: table, service: table, operations: [item.read], with: {{table: orders}}}}
      - {{service: who, operations: [read]}}
      - {{service: safe, operations: [read]}}
      - {{service: logs, operations: [document.search], with: {{index: app}}}}
      - {{service: prod, operations: [read], with: {{namespace: shop}}}}
      - {{service: pay, operations: [refund.create], with: {{charge: "ch_*"}}}}
"""
FORM = ("-H", "Content-Type: application/x-www-form-urlencoded")
JSON = ("-H", "Content-Type: application/json")
AMZ = ("-H", "Content-Type: application/x-amz-json-1.0", "-H", "X-Amz-Target: DynamoDB_20120810.GetItem")

REFUSED: dict[str, tuple[str, ...]] = {
    "chat: another channel by GET": ("/chat/api/chat.postMessage?channel=C2&text=x",),
    "chat: a channel in two places": (*FORM, "-d", "channel=C1", "/chat/api/chat.postMessage?channel=C2"),
    "chat: an unknown method": ("/chat/api/chat.newThing?channel=C1",),
    "chat: a mint": ("/chat/api/files.getUploadURLExternal?filename=a&length=1",),
    "chat: multipart": ("-F", "channel=C1", "/chat/api/chat.postMessage"),
    "store: another bucket": ("/store/other/k",),
    "store: presigned": ("-X", "PUT", "-d", "x", "/store/data/k?X-Amz-Signature=a&X-Amz-Credential=b"),
    "store: a copy from elsewhere": ("-X", "PUT", "-H", "x-amz-copy-source: /other/k", "/store/data/k"),
    "store: a write that publishes": ("-X", "PUT", "-H", "x-amz-acl: public-read", "-d", "x", "/store/data/k"),
    "store: keys by GET": ("/store/data?session",),
    "table: another action": (
        *("-H", "Content-Type: application/x-amz-json-1.0", "-H", "X-Amz-Target: DynamoDB_20120810.DeleteItem"),
        *("-d", '{"TableName":"orders"}', "/table/"),
    ),
    "table: another table": (*AMZ, "-d", '{"TableName":"other"}', "/table/"),
    "table: two tables": (*AMZ, "-d", '{"TableName":"orders","TableName":"other"}', "/table/"),
    "who: keys": (*FORM, "-d", "Action=GetSessionToken&Version=2011-06-15", "/who/"),
    "who: two actions": (*FORM, "-d", "Action=GetCallerIdentity&Action=AssumeRole&Version=2011-06-15", "/who/"),
    "vault: an account by GET": ("/vault/v1/database/creds/app",),
    "vault: a secret": ("/vault/v1/secret/data/app",),
    "vault: wrapped": ("-H", "X-Vault-Wrap-TTL: 60s", "/vault/v1/secret/metadata/app?list=true"),
    "logs: a script": (*JSON, "-d", '{"query":{"script":{"script":"1"}}}', "/logs/app/_search"),
    "logs: another index": (*JSON, "-d", "{}", "/logs/app,other/_search"),
    "prod: secrets": ("/prod/api/v1/namespaces/shop/secrets",),
    "prod: another namespace": ("/prod/api/v1/namespaces/other/pods",),
    "prod: a command by GET": ("/prod/api/v1/namespaces/shop/pods/a/exec?command=sh",),
    "pay: another account": (*FORM, "-H", "Stripe-Account: acct_2", "-d", "charge=ch_1", "/pay/v1/refunds"),
    "pay: no charge": (*FORM, "-d", "payment_intent=pi_1", "/pay/v1/refunds"),
}
PERMITTED: dict[str, tuple[str, ...]] = {
    "chat: a message by GET": ("/chat/api/chat.postMessage?channel=C1&text=x",),
    "chat: a message by form": (*FORM, "-d", "channel=C1&text=x", "/chat/api/chat.postMessage"),
    "chat: a message by JSON": (*JSON, "-d", '{"channel":"C1"}', "/chat/api/chat.postMessage"),
    "chat: a read by POST": ("-X", "POST", "/chat/api/conversations.list"),
    "store: an object": ("/store/data/a/b.txt",),
    "store: a write": ("-X", "PUT", "-d", "x", "/store/data/a/b.txt"),
    "store: a copy within": ("-X", "PUT", "-H", "x-amz-copy-source: /data/x", "/store/data/k"),
    "table: an item": (*AMZ, "-d", '{"TableName":"orders","Key":{}}', "/table/"),
    "who: oneself": (*FORM, "-d", "Action=GetCallerIdentity&Version=2011-06-15", "/who/"),
    "who: oneself by GET": ("/who/?Action=GetCallerIdentity&Version=2011-06-15",),
    "vault: names": ("/vault/v1/secret/metadata/app?list=true",),
    "logs: a search": (*JSON, "-d", '{"query":{"match_all":{}}}', "/logs/app/_search"),
    "logs: a search by GET": ("/logs/app/_search?q=x",),
    "prod: pods": ("/prod/api/v1/namespaces/shop/pods?limit=5",),
    "pay: money back": (*FORM, "-d", "charge=ch_1&amount=5", "/pay/v1/refunds"),
}


class Scene:
    def __init__(self, gateway: TestGateway, origin: Origin) -> None:
        self.origin = origin
        self.box = gateway.sandbox()

    def status(self, *arguments: str) -> int:
        *rest, path = arguments
        url = f"https://svc.test:{self.origin.port}{path}"
        return int(self.box.curl("-o", "/dev/null", "-w", "%{http_code}", *rest, url).out)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with (
        Origin("svc.test", address="127.0.0.74", handler=script(READ, text("done"))).run_in_thread() as origin,
        TestGateway(
            tmp_path_factory.mktemp("services"), policy=POLICY.format(port=origin.port), origins=[origin]
        ) as gateway,
    ):
        yield Scene(gateway, origin)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_grants_reaches_nobody(scene: Scene, name: str) -> None:
    """Expect 403 and no byte at the origin."""
    scene.origin.received.clear()
    assert scene.status(*REFUSED[name]) == 403
    assert not scene.origin.received


@pytest.mark.parametrize("name", PERMITTED)
def test_what_a_rule_grants_goes_on(scene: Scene, name: str) -> None:
    """Expect the origin's answer, and one request there."""
    scene.origin.received.clear()
    assert scene.status(*PERMITTED[name]) == 200
    assert len(scene.origin.received) == 1
