"""An image pulled by its three hosts: a registry that asks for a token, the realm that gives it, a store of blobs.

Here password, token and signed URL are the client's own, and rules let each pass to its place; how the broker's key
makes the token is in test_captured_tokens.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.support.gateway import Box, TestGateway
from tests.support.origins import Exchange, Handler, Origin

pytestmark = pytest.mark.xdist_group("image-token-flow")

PASSWORD = "mine"
TOKEN = "pull-token-of-the-realm"
BLOB = b"layer" * 5000
DIGEST = "sha256:" + hashlib.sha256(BLOB).hexdigest()
POLICY = """
services:
  images: {{like: oci, base: "{images}"}}
  realm: {{like: oci, base: "{realm}"}}
roles:
  agent:
    allow:
      - {{name: pull, service: images, operations: [image.pull], with: {{repository: team/shop}}, client_auth: pass}}
      - {{name: token, service: realm, operations: [token.pull], with: {{repository: team/shop}}, client_auth: pass}}
      - {{name: blobs, host: blobs.test, methods: [GET], paths: ["/store/{{name}}"], query: any, client_auth: pass}}
"""
PULL = """
import requests, sys
registry, repository, path, scope = sys.argv[1:]
session = requests.Session()
def get(url, **more):
    answer = session.get(url, timeout=60, allow_redirects=False, **more)
    print(answer.status_code, end=" ")
    return answer
asked = get(registry + "/v2/")
parts = dict(part.split("=") for part in asked.headers["www-authenticate"].removeprefix("Bearer ").split(","))
query = {"service": parts["service"].strip('"'), "scope": f"repository:{repository}:{scope}"}
given = get(parts["realm"].strip('"'), params=query, auth=("agent", "mine"))
if given.status_code == 200:
    bearer = {"Authorization": "Bearer " + given.json()["token"]}
    answer = get(f"{registry}/v2/{repository}/{path}", headers=bearer)
    if "location" in answer.headers:
        print(len(get(answer.headers["location"]).content))
"""


@dataclass
class Place:
    registry: Origin
    realm: Origin
    blobs: Origin
    box: Box
    gateway: TestGateway

    def pull(self, repository: str, path: str, scope: str = "pull") -> list[str]:
        """The statuses in order, and at the end how much came of a blob."""
        for origin in (self.registry, self.realm, self.blobs):
            origin.received.clear()
        done = self.box.command(sys.executable, "-c", PULL, self.registry.base, repository, path, scope)
        assert done.code == 0, done
        return done.out.split()


def registry(realm: Origin, blobs: Origin) -> Handler:
    async def run(exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.request.header("authorization") != f"Bearer {TOKEN}":
            challenge = f'Bearer realm="{realm.base}/token",service="images"'
            await exchange.answer(401, b"", (("WWW-Authenticate", challenge),))
        elif "/blobs/" in exchange.request.path:
            place = f"{blobs.base}/store/{DIGEST.partition(':')[2]}?X-Amz-Signature=0123456789abcdef"
            await exchange.answer(307, b"", (("Location", place),))
        else:
            manifest = {"schemaVersion": 2, "layers": [{"digest": DIGEST}]}
            await exchange.answer(200, json.dumps(manifest).encode())

    return run


async def token(exchange: Exchange) -> None:
    await exchange.read_body()
    expected = "Basic " + base64.b64encode(f"agent:{PASSWORD}".encode()).decode()
    known = exchange.request.header("authorization") == expected
    body = json.dumps({"token": TOKEN, "expires_in": 300}).encode()
    await exchange.answer(200 if known else 401, body if known else b"", (("Content-Type", "application/json"),))


async def blob(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.answer(200, BLOB)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with ExitStack() as opened:
        blobs = opened.enter_context(Origin("blobs.test", address="127.0.0.126", handler=blob).run_in_thread())
        realm = opened.enter_context(Origin("realm.test", address="127.0.0.125", handler=token).run_in_thread())
        images = opened.enter_context(
            Origin("images.test", address="127.0.0.124", handler=registry(realm, blobs)).run_in_thread()
        )
        gateway = opened.enter_context(
            TestGateway(
                tmp_path_factory.mktemp("flow"),
                policy=POLICY.format(images=images.base, realm=realm.base),
                origins=[images, realm, blobs],
            )
        )
        yield Place(images, realm, blobs, gateway.sandbox(), gateway)


def test_a_token_for_another_image_or_for_more_alone_is_not_given(place: Place) -> None:
    """C125: the scope of the token is judged at the realm, before it leaves."""
    assert place.pull("secret/base", "manifests/v1") == ["401", "403"]
    assert place.pull("secret/base", "manifests/v1", "pull,push") == ["401", "403"]
    assert place.pull("team/shop", "manifests/v1", "push") == ["401", "403"]
    assert place.pull("team/shop", "manifests/v1", "delete,admin") == ["401", "403"]
    assert place.realm.received == []


def test_of_a_token_for_more_the_granted_part_is_asked_for(place: Place) -> None:
    """Expect the pull alone at the realm, whatever else the client asks for, and both on record."""
    for scope in ("pull,push", "*", "push,pull repository:secret/base:pull"):
        assert place.pull("team/shop", "manifests/v1", scope) == ["401", "200", "200"]
        [asked] = place.realm.received
        assert asked.target == "/token?service=images&scope=repository:team/shop:pull"
        [record] = place.gateway.awaited(host="realm.test", event="request.intent", asked=_asked(scope))
        assert record["granted"] == ["repository:team/shop:pull"]
        assert record["arguments"] == ["action=pull", "repository=team/shop"]
        assert f"asked: {' '.join(_asked(scope))}" in place.gateway.exeat("why", record["request_id"]).out


def _asked(scope: str) -> list[str]:
    return f"repository:team/shop:{scope}".split(" ")


def test_an_image_comes_from_three_hosts_each_with_its_own_authority(place: Place) -> None:
    """C125, C105: the password goes to the realm alone, the token to the registry, and neither to the signed URL."""
    assert place.pull("team/shop", "manifests/v1") == ["401", "200", "200"]
    assert place.pull("team/shop", f"blobs/{DIGEST}") == ["401", "200", "307", "200", str(len(BLOB))]
    assert [one.header("authorization") for one in place.registry.received] == [None, f"Bearer {TOKEN}"]
    [asked] = place.realm.received
    assert base64.b64decode(str(asked.header("authorization")).removeprefix("Basic ")) == f"agent:{PASSWORD}".encode()
    [fetched] = place.blobs.received
    assert fetched.header("authorization") is None
    assert "X-Amz-Signature=0123456789abcdef" in fetched.target
