"""Tokens that an answer brings stay with the broker (decision 16): an image registry with a realm, and a login.

One origin is every host at port 443. The realm takes the broker's key alone, the registry the realm's tokens alone; the
sandbox holds neither, and no rule passes a client's own authority.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway import Box, Completed, TestGateway
from tests.support.imageregistry import make_image
from tests.support.operationlanes import why_not_here
from tests.support.origins import Exchange, Origin

pytestmark = [
    pytest.mark.xdist_group("captured-tokens"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "-"),
]

ADDRESS = f"127.34.{os.getpid() >> 8 & 255}.{os.getpid() & 255 | 1}"
HOSTS = ("images.test", "realm.test", "cdn.test", "api.test", "other.test")
KEY = "canary-realm-5f4e3d2c1b0a99887766"
TOKEN = "canary-token-eyJhbGciOiJub25lIn0.e30.abcdef0123456789"
SESSION = "canary-session-0f1e2d3c4b5a69788796a5b4c3d2e1f0"
IMAGES = """
version: 1
service: images
title: Images behind tokens
native: oci
hosts:
  registry: {host: images.test}
  realm: {host: realm.test}
operations:
  image.pull:
    effect: read
    why: Manifests and blobs of one image.
    download: true
    takes: bearer
    redirects: {to: [cdn.test], path: /STORE/**, query_keys: [X-Amz-Signature]}
    answer_headers: [docker-content-digest, docker-distribution-api-version]
    requests:
      - {at: registry, methods: [GET], paths: ["/v2", "/v2/"], unbound: [repository, reference]}
      - {at: registry, methods: [GET], match: {matcher: oci, params: {action: pull}}}
  token.pull:
    effect: mint
    why: A token that pulls these images.
    answer: {capture: [token, access_token]}
    requests:
      - at: realm
        methods: [GET]
        paths: ["/token"]
        match: {matcher: oci_token, params: {actions: [pull]}}
        query: any
tests:
  - {allow: "GET https://images.test/v2/team/shop/manifests/v1", operation: image.pull, why: a tag}
  - {deny: "POST https://images.test/v2/team/shop/blobs/uploads/", body: "", why: a push}
"""
LOGIN = """
version: 1
service: login
title: An API with sessions
hosts:
  api: {host: api.test}
operations:
  session.mint:
    effect: mint
    why: A session.
    answer: {capture: [session.key]}
    requests: [{at: api, methods: [POST], paths: ["/login/{how}"]}]
  items.read:
    effect: read
    why: Items.
    takes: x-session
    requests: [{at: api, methods: [GET], paths: ["/items/{id}"]}]
tests:
  - {allow: "GET https://api.test/items/7", operation: items.read, why: an item}
  - {deny: "DELETE https://api.test/items/7", why: a deletion}
"""
POLICY = """
roles:
  agent:
    allow:
      - name: images
        service: images
        operations: [image.pull, token.pull]
        with: {repository: "team/*"}
        credential: realm
      - {service: login, operations: [session.mint, items.read], credential: login}
      - {name: other, host: other.test, methods: [GET], paths: ["/x"]}
  other:
    allow:
      - name: images
        service: images
        operations: [image.pull, token.pull]
        with: {repository: "team/*"}
        credential: realm
"""
CREDENTIALS = """
version: 1
credentials:
  realm: {kind: basic, username: agent, secret: "store:key", hosts: [realm.test, images.test], owner: tests,
          placeholder: {env: REALM_KEY, shape: "key_{36}"}}
  login: {kind: header, header: X-Login, secret: "store:key", hosts: [api.test], owner: tests,
          placeholder: {env: LOGIN_KEY, shape: "log_{36}"}}
"""
SCOPE = "service=images&scope=repository:team/shop:pull"


@dataclass
class Scene:
    gateway: TestGateway
    origin: Origin
    folder: Path

    def at(self, host: str) -> list[str | None]:
        """The Authorization of every request that `host` got."""
        return [one.header("authorization") for one in self.origin.received if one.header("host") == host]

    def token(self, box: Box) -> str:
        done = box.curl("-f", f"https://realm.test/token?{SCOPE}")
        assert done.code == 0, done
        return str(done.json()["token"])


def manifest(box: Box, token: str, *more: str) -> Completed:
    url = "https://images.test/v2/team/shop/manifests/v1"
    return box.curl("-i", "-H", f"Authorization: Bearer {token}", *more, url)


def status(done: Completed) -> int:
    """Of the last answer: before it stands the one to CONNECT."""
    return int([line for line in done.out.splitlines() if line.startswith("HTTP/")][-1].split()[1])


def reason(done: Completed) -> str:
    """As the client was told, in whatever shape the service has."""
    found = re.search(r'"reason": ?"([a-z-]+)"', done.out)
    return found[1] if found else ""


def world(folder: Path) -> Origin:
    make_image(folder / "image")
    described = json.loads((folder / "image/index.json").read_text())["manifests"][0]
    blobs = {f"sha256:{path.name}": path.read_bytes() for path in (folder / "image/blobs/sha256").iterdir()}
    basic = "Basic " + base64.b64encode(f"agent:{KEY}".encode()).decode()

    async def serve(exchange: Exchange) -> None:
        await exchange.read_body()
        request, path = exchange.request, exchange.request.path
        authority, host = request.header("authorization"), request.header("host")
        answer: dict[str, object] = {}
        if host == "realm.test" and authority == basic:
            answer = {"token": TOKEN, "access_token": TOKEN, "expires_in": 300, "issued_at": "2026-12-01T00:00:00Z"}
        elif host == "api.test" and path.startswith("/login/") and request.header("x-login") == KEY:
            answer = {
                "good": {"session": {"key": SESSION, "id": 7}, "expires_in": 60},
                "more": {"session": {"key": SESSION}, "refresh_token": "canary-refresh-0011223344556677"},
                "twice": {"session": {"key": SESSION}, "note": f"use {SESSION} well"},
                "none": {"welcome": True},
                "list": [SESSION],  # type: ignore[dict-item]
            }[path.rpartition("/")[2]]
        elif host == "api.test" and path.startswith("/items/") and request.header("x-session") == SESSION:
            answer = {"id": 7, "you": request.header("x-session")}
        elif host == "images.test" and authority != f"Bearer {TOKEN}":
            challenge = 'Bearer realm="https://realm.test/token",service="images"'
            await exchange.answer(401, b"", (("WWW-Authenticate", challenge),))
            return
        elif "/manifests/" in path:
            more = (("Content-Type", described["mediaType"]), ("Docker-Content-Digest", described["digest"]))
            await exchange.answer(200, blobs[described["digest"]], more)
            return
        elif "/blobs/" in path:
            place = f"https://cdn.test/STORE/{path.rpartition('/')[2]}?X-Amz-Signature=00ff"
            await exchange.answer(307, b"", (("Location", place),))
            return
        elif host == "cdn.test":
            await exchange.answer(400 if authority else 200, blobs[path.rpartition("/")[2]])
            return
        elif host != "images.test":
            await exchange.answer(401, json.dumps({"error": "who", "token": TOKEN}).encode())
            return
        await exchange.answer(200, json.dumps(answer).encode(), (("Content-Type", "application/json"),))

    return Origin(*HOSTS, address=ADDRESS, port=443, handler=serve, keep=1 << 20)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("captured")
    with world(folder).run_in_thread() as origin:
        gateway = TestGateway(
            folder / "gateway", policy=POLICY, credentials=CREDENTIALS, secrets={"key": KEY}, origins=[origin]
        )
        (gateway.config / "services").mkdir()
        for name, text in {"images": IMAGES, "login": LOGIN}.items():
            (gateway.config / f"services/{name}.yaml").write_text(text)
        with gateway:
            yield Scene(gateway, origin, folder)


@pytest.fixture
def scene(running: Scene) -> Scene:
    running.origin.received.clear()
    return running


# --- what is withheld and refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("more", "a second authority that the service does not name"),
        ("twice", "the token in a second place"),
        ("none", "no token at all"),
        ("list", "another shape"),
    ],
)
def test_an_answer_that_is_not_as_the_service_says_is_withheld(scene: Scene, how: str, why: str) -> None:
    """A fixed 502, and nothing of the answer reaches the sandbox."""
    box = scene.gateway.sandbox()
    done = box.curl("-i", "-X", "POST", f"https://api.test/login/{how}")
    assert reason(done) == "answer-withheld", why
    assert "canary" not in done.out
    assert scene.gateway.records(event="token.kept", sandbox=box.id) == []


def test_another_sandbox_and_another_rule_cannot_use_it(scene: Scene) -> None:
    """Its placeholder is worth nothing elsewhere: not in another sandbox, role, host, slot, or as the credential."""
    box = scene.gateway.sandbox()
    token = scene.token(box)
    scene.origin.received.clear()
    for other in (scene.gateway.sandbox(), scene.gateway.sandbox("other")):
        assert reason(manifest(other, token)) == "placeholder-misuse"
    headers = ("-H", f"Authorization: Bearer {token}")
    for url in ("https://other.test/x", f"https://realm.test/token?{SCOPE}", "https://api.test/items/7"):
        assert reason(box.curl("-i", *headers, url)) in ("placeholder-misuse", "client-authority"), url
    assert reason(box.curl("-i", "-H", f"X-Session: {token}", "https://api.test/items/7")) == "placeholder-misuse"
    assert scene.origin.received == []


def test_the_credential_itself_never_goes_where_its_tokens_go(scene: Scene) -> None:
    """The key's own placeholder, and no authority at all: the registry sees neither key nor token."""
    box = scene.gateway.sandbox()
    url = "https://images.test/v2/team/shop/manifests/v1"
    done = box.curl("-i", "-u", f"agent:{box.placeholders['REALM_KEY']}", url)
    assert reason(done) in ("placeholder-misuse", "client-authority")
    asked = box.curl("-i", url)
    assert status(asked) == 401
    assert 'Bearer realm="https://realm.test/token"' in asked.out
    assert scene.at("images.test") == [None]


def test_a_made_up_token_is_refused_and_the_clients_own_too(scene: Scene) -> None:
    """What was never given is misuse; what is no placeholder is the client's own authority."""
    box = scene.gateway.sandbox()
    assert reason(manifest(box, TOKEN)) == "client-authority"
    token = scene.token(box)
    changed = token[:-1] + ("A" if token[-1] != "A" else "B")
    assert reason(manifest(box, changed)) == "placeholder-misuse"
    assert scene.at("images.test") == []


def test_a_token_ends_with_its_credential(scene: Scene) -> None:
    """The key is rotated: what it brought is worth nothing any more."""
    box = scene.gateway.sandbox()
    token = scene.token(box)
    assert status(manifest(box, token)) == 200
    scene.gateway.admin.rotate_secret("key", KEY.encode())
    scene.origin.received.clear()
    assert reason(manifest(box, token)) == "placeholder-misuse"
    assert scene.origin.received == []


def test_an_image_of_no_rule_gets_no_token(scene: Scene) -> None:
    """C125: the scope is judged at the realm, before anything leaves."""
    box = scene.gateway.sandbox()
    done = box.curl("-i", "https://realm.test/token?service=images&scope=repository:secret/base:pull")
    assert reason(done) == "no-rule"
    assert scene.origin.received == []


# --- what works -----------------------------------------------------------------------------------------------------


def test_the_sandbox_gets_a_placeholder_and_the_registry_the_token(scene: Scene) -> None:
    """C109, C125: the realm sees the key, the registry the token; log and sandbox see neither."""
    box = scene.gateway.sandbox()
    done = box.curl("-f", f"https://realm.test/token?{SCOPE}")
    said = done.json()
    assert said["token"] == said["access_token"] != TOKEN
    assert (said["expires_in"], said["issued_at"]) == (300, "2026-12-01T00:00:00Z")
    answer = manifest(box, said["token"])
    assert status(answer) == 200, answer
    assert scene.at("realm.test") == ["Basic " + base64.b64encode(f"agent:{KEY}".encode()).decode()]
    assert scene.at("images.test") == [f"Bearer {TOKEN}"]
    [kept] = scene.gateway.records(event="token.kept", sandbox=box.id)
    assert (kept["count"], kept["operation"]) == (1, "images/token.pull")
    [used] = scene.gateway.awaited(event="broker.outcome", sandbox=box.id, host="images.test")
    assert used["credential"] == "realm"
    assert used["credential_version"].startswith("captured:")
    logged = json.dumps(scene.gateway.records())
    for value in (KEY, TOKEN, said["token"]):
        assert value not in logged
    assert TOKEN not in done.out + answer.out


def test_a_session_goes_into_the_header_that_takes_it_and_its_echo_is_masked(scene: Scene) -> None:
    """A login that is no OAuth: a nested field, a header of its own, and an API that echoes it."""
    box = scene.gateway.sandbox()
    said = box.curl("-f", "-X", "POST", "https://api.test/login/good").json()
    assert said["session"]["id"] == 7
    done = box.curl("-f", "-H", f"X-Session: {said['session']['key']}", "https://api.test/items/7")
    assert done.json()["id"] == 7
    assert SESSION not in done.out
    assert set(done.json()["you"]) == {"*"}
    assert scene.gateway.awaited(event="secret.echoed", sandbox=box.id)


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_pulls_without_any_authority_of_its_own(scene: Scene, tmp_path: Path) -> None:
    """C105, C125: an unmodified client through realm, registry and store; no rule passes a client's authority."""
    box = scene.gateway.sandbox()
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    done = box.command(
        "skopeo", "--policy", str(policy), "copy", "-q", "docker://images.test/team/shop:v1", f"oci:{tmp_path}/out:v1",
        env={"XDG_RUNTIME_DIR": str(tmp_path), "REGISTRY_AUTH_FILE": str(tmp_path / "none.json")},
    )  # fmt: skip
    assert done.code == 0, (done, [one.raw_head for one in scene.origin.received])
    pulled = {path.name for path in (tmp_path / "out/blobs/sha256").iterdir()}
    assert pulled == {path.name for path in (scene.folder / "image/blobs/sha256").iterdir()}
    assert set(scene.at("images.test")) == {None, f"Bearer {TOKEN}"}
    assert set(scene.at("cdn.test")) == {None}
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
