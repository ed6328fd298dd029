"""Images as agents pull and push them: skopeo and curl, against Debian's docker-registry through the gateway.

`open.test` takes everybody; `keyed.test` takes the key that the broker has.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway import Box, Completed, TestGateway
from tests.support.imageregistry import PROGRAM, ImageRegistry, TokenServer, make_image
from tests.support.origins import Origin

pytestmark = [
    pytest.mark.xdist_group("image-registry"),
    pytest.mark.skipif(PROGRAM is None, reason="docker-registry is not installed"),
]

KEY = "kq8-Registry-Real-0d7f1c52aa93"
KEY_HASH = "$2a$04$UcKq1i8t0VlzMIAeOnxoCe1TmcnWChFjorHf2nCpWLOPJjA54dSEy"
CREDENTIALS = """
version: 1
credentials:
  images: {kind: basic, username: agent, secret: "store:images", hosts: [keyed.test], owner: tests,
           placeholder: {env: IMAGES_KEY, shape: "reg_{36}"}}
"""
SKOPEO = pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DIGEST = "sha256:" + "a" * 64


def policy(plain: ImageRegistry, keyed: ImageRegistry, public: ImageRegistry, realm: Origin) -> str:
    return f"""
    services:
      public: {{like: oci, base: "{public.base}"}}
      realm: {{like: oci, base: "{realm.base}"}}
      plain: {{like: oci, base: "{plain.base}"}}
      keyed: {{like: oci, base: "{keyed.base}"}}
    roles:
      agent:
        allow:
          - {{service: plain, operations: [image.pull], with: {{repository: ["team/*", base]}}}}
          - {{name: push, service: plain, operations: [image.push], with: {{repository: "team/*"}}}}
          - name: keyed
            service: keyed
            operations: [image.pull]
            with: {{repository: "team/*"}}
            credential: images
          - name: keyed-push
            service: keyed
            operations: [image.push]
            with: {{repository: "team/*"}}
            credential: images
          - {{service: public, operations: [image.pull], with: {{repository: "team/*"}}, client_auth: pass}}
          - {{service: realm, operations: [token.pull], with: {{repository: "team/*"}}}}
          - name: build
            service: public
            operations: [image.push]
            with: {{repository: team/built}}
            client_auth: pass
          - {{name: build-token, service: realm, operations: [token.push], with: {{repository: team/built}}}}
      reader:
        allow:
          - {{service: public, operations: [read, write], client_auth: pass}}
          - {{service: realm, operations: [token.pull], with: {{repository: "team/*"}}}}
      owner:
        allow:
          - {{service: public, operations: [read, write], client_auth: pass}}
          - {{service: realm, operations: [token.pull, token.push]}}
          - {{service: plain, operations: [read, write, disclose]}}
          - {{service: keyed, operations: [read, write, disclose], credential: images}}
    """


@dataclass
class Place:
    """Two registries and the gateway. `owner` may do everything, `agent` what the rules of its role say."""

    registries: dict[str, ImageRegistry]
    tokens: TokenServer
    agent: Box
    owner: Box
    reader: Box
    image: Path
    digest: str

    def skopeo(self, box: Box, *words: str) -> Completed:
        return box.command("skopeo", "--insecure-policy", *words, env={"XDG_RUNTIME_DIR": str(self.image.parent)})

    def copy(self, box: Box, which: str, name: str, *words: str) -> Completed:
        return self.skopeo(box, "copy", *words, f"oci:{self.image}:v1", self.url(which, name))

    def url(self, which: str, name: str) -> str:
        return f"docker://{self.registries[which].host}/{name}"

    def ask(self, box: Box, which: str, method: str, path: str) -> tuple[int, str]:
        """(status, body) of one call of the API."""
        url = self.registries[which].base + path
        done = box.curl("-X", method, "-w", "\n%{http_code}", "-H", f"Accept: {MANIFEST}, application/json", url)
        body, _, status = done.out.rpartition("\n")
        return int(status), body


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("images")
    digest = make_image(folder / "image")
    with Origin("realm.test", address="127.0.0.97").run_in_thread() as realm, ExitStack() as opened:
        tokens = TokenServer(realm.base)
        realm.on("/token", tokens)
        plain = ImageRegistry(folder / "plain", "open.test", address="127.0.0.95")
        keyed = ImageRegistry(
            folder / "keyed", "keyed.test", address="127.0.0.96", user="agent", password_hash=KEY_HASH
        )
        public = ImageRegistry(folder / "public", "public.test", address="127.0.0.98", tokens=tokens)
        for registry in (plain, keyed, public):
            opened.enter_context(registry)
        gateway = opened.enter_context(
            TestGateway(
                tmp_path_factory.mktemp("registry"),
                policy=policy(plain, keyed, public, realm),
                credentials=CREDENTIALS,
                secrets={"images": KEY},
                origins=[plain, keyed, public, realm],  # type: ignore[list-item]  # as much of an Origin as is needed
            )
        )
        made = Place(
            {"plain": plain, "keyed": keyed, "public": public},
            tokens,
            gateway.sandbox("agent"),
            gateway.sandbox("owner"),
            gateway.sandbox("reader"),
            folder / "image",
            digest,
        )
        for which in ("plain", "keyed"):
            for name in ("secret/base", "base"):
                copied = made.copy(made.owner, which, f"{name}:v1")
                assert copied.code == 0, copied
        yield made


@pytest.fixture(params=["plain", "keyed"])
def which(request: pytest.FixtureRequest) -> str:
    """Through the worker alone, or through the broker with a key."""
    return str(request.param)


pytestmark.append(SKOPEO)

# --- refused ---

REFUSED = {
    "another image": ("GET", "/v2/secret/base/manifests/v1"),
    "its blobs": ("GET", f"/v2/secret/base/blobs/{DIGEST}"),
    "its tags": ("GET", "/v2/secret/base/tags/list"),
    "an upload to another image": ("POST", "/v2/secret/base/blobs/uploads/"),
    "a mount from another image": ("POST", f"/v2/team/shop/blobs/uploads/?mount={DIGEST}&from=secret/base"),
    "a mount without a source": ("POST", f"/v2/team/shop/blobs/uploads/?mount={DIGEST}"),
    "a tag of another image": ("PUT", "/v2/secret/base/manifests/v1"),
    "a removal": ("DELETE", f"/v2/team/shop/manifests/{DIGEST}"),
    "the catalogue": ("GET", "/v2/_catalog"),
    "a name that is none": ("GET", "/v2/team/Shop/manifests/v1"),
}


@pytest.mark.parametrize(("method", "path"), REFUSED.values(), ids=REFUSED)
def test_what_no_rule_names_is_refused_in_the_registrys_shape(place: Place, which: str, method: str, path: str) -> None:
    """Expect the form that clients of registries show, and a registry in which nothing changed."""
    before = {name: place.registries[which].tags(name) for name in ("secret/base", "team/shop")}
    status, body = place.ask(place.agent, which, method, path)
    assert status == 403
    (error,) = json.loads(body)["errors"]
    assert error["code"] == "DENIED"
    assert "Exeat" in error["message"]
    assert {name: place.registries[which].tags(name) for name in before} == before


def test_a_refused_push_makes_no_image(place: Place, which: str) -> None:
    """Expect skopeo to fail; it asks by HEAD first, so of the refusal it has the status alone."""
    copied = place.copy(place.agent, which, "secret/mine:v1")
    assert copied.code != 0
    assert "403" in copied.err, copied
    assert "secret/mine" not in place.registries[which].repositories()


def test_a_refused_pull_is_told_by_the_client(place: Place, which: str, tmp_path: Path) -> None:
    """Expect skopeo to fail with our words and to get nothing."""
    pulled = place.skopeo(place.agent, "copy", place.url(which, "secret/base:v1"), f"oci:{tmp_path / 'image'}:v1")
    assert pulled.code != 0
    assert "Exeat" in pulled.err, pulled


# --- permitted ---


def test_push_and_pull(place: Place, which: str, tmp_path: Path) -> None:
    """Expect an image to arrive, its tags to be listed, and the same image to come back."""
    pushed = place.copy(place.agent, which, "team/shop:v1")
    assert pushed.code == 0, pushed
    assert place.registries[which].tags("team/shop") == {"v1"}
    listed = place.skopeo(place.agent, "list-tags", place.url(which, "team/shop"))
    assert listed.json()["Tags"] == ["v1"], listed
    pulled = place.skopeo(place.agent, "copy", place.url(which, "team/shop:v1"), f"oci:{tmp_path / 'image'}:v1")
    assert pulled.code == 0, pulled
    assert (tmp_path / "image/blobs/sha256" / place.digest.removeprefix("sha256:")).exists()


def test_a_large_layer_streams_both_ways(place: Place, which: str, tmp_path: Path) -> None:
    """C125: a layer of 12 MB is uploaded in pieces, each where the last answer said, and downloaded whole."""
    digest = make_image(tmp_path / "large", os.urandom(12_000_000), tag="v2")
    pushed = place.skopeo(place.agent, "copy", f"oci:{tmp_path / 'large'}:v2", place.url(which, "team/large:v2"))
    assert pushed.code == 0, pushed
    pulled = place.skopeo(place.agent, "copy", place.url(which, "team/large:v2"), f"oci:{tmp_path / 'back'}:v2")
    assert pulled.code == 0, pulled
    manifest = json.loads((tmp_path / "back/blobs/sha256" / digest.removeprefix("sha256:")).read_text())
    layer = tmp_path / "back/blobs/sha256" / manifest["layers"][0]["digest"].removeprefix("sha256:")
    assert layer.stat().st_size > 12_000_000


def test_a_mount_between_permitted_images(place: Place, which: str) -> None:
    """Expect a blob to be mounted where the rule permits both images."""
    assert place.copy(place.agent, which, "team/from:v1").code == 0
    manifest = json.loads((place.image / "blobs/sha256" / place.digest.removeprefix("sha256:")).read_text())
    blob = manifest["layers"][0]["digest"]
    path = f"/v2/team/to/blobs/uploads/?mount={blob}&from=team/from"
    assert place.ask(place.agent, which, "POST", path)[0] == 201


def test_an_image_that_may_be_pulled_may_not_be_written(place: Place) -> None:
    """Expect the two operations to have bindings of their own."""
    assert place.ask(place.agent, "plain", "GET", "/v2/base/manifests/v1")[0] == 200
    assert place.ask(place.agent, "plain", "PUT", "/v2/base/manifests/v1")[0] == 403


def test_tokens_are_good_for_no_more_than_the_rule(place: Place, tmp_path: Path) -> None:
    """Expect a client that fetches its own token to pull what the rule names, and no token that pulls more or pushes.

    A client that pushes asks for `pull,push`, and of that the pull leaves. The token itself travels because the rule
    lets the client's authority pass.
    """
    for name in ("team/shared:v1", "secret/other:v1"):
        pushed = place.copy(place.owner, "public", name)
        assert pushed.code == 0, pushed
    before = len(place.tokens.asked)
    refused = place.skopeo(place.agent, "copy", place.url("public", "secret/other:v1"), f"oci:{tmp_path / 'other'}:v1")
    assert refused.code != 0
    assert len(place.tokens.asked) == before
    pushed = place.copy(place.agent, "public", "team/mine:v1")
    assert pushed.code != 0
    assert "Exeat" in pushed.err, pushed
    asked = {
        scope for scopes in place.tokens.asked[before:] for scope in scopes
    }  # it names what it could mount as well
    assert {"repository:team/mine:pull"} <= asked <= {"repository:team/mine:pull", "repository:team/shared:pull"}
    before = len(place.tokens.asked)
    assert "team/mine" not in place.registries["public"].repositories()
    pulled = place.skopeo(place.agent, "copy", place.url("public", "team/shared:v1"), f"oci:{tmp_path / 'shared'}:v1")
    assert pulled.code == 0, pulled
    assert place.tokens.asked[before:] == [["repository:team/shared:pull"]]


PUSHES = """
import hashlib, json, requests, sys
registry, realm, repository, scopes = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
session = requests.Session()
def ask(method, url, **more):
    answer = session.request(method, url, timeout=60, **more)
    print(answer.status_code, end=" ")
    return answer
given = ask("GET", realm, params={"account": "me", "scope": scopes, "service": "registry"})
if given.status_code == 200:
    session.headers["Authorization"] = "Bearer " + given.json()["token"]
    def blob(data):
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        ask("HEAD", f"{registry}/v2/{repository}/blobs/{digest}")
        begun = ask("POST", f"{registry}/v2/{repository}/blobs/uploads/")
        if begun.status_code == 202:
            ask("PUT", begun.headers["Location"], params={"digest": digest}, data=data)
        return {"mediaType": "application/octet-stream", "digest": digest, "size": len(data)}
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": blob(b"{}"), "layers": []}
    url = f"{registry}/v2/{repository}/manifests/v1"
    ask("PUT", url, data=json.dumps(manifest), headers={"Content-Type": kind})
"""


def test_a_push_asks_for_more_than_it_is_granted_and_goes_on_with_that(place: Place) -> None:
    """Expect the push of the named image with a token for it alone; what was asked for besides is not in the token."""
    public, realm = place.registries["public"], place.tokens.realm
    scopes = ("repository:team/built:pull,push", "repository:secret/other:pull", "registry:catalog:*")
    before = len(place.tokens.asked)
    pushed = place.agent.command(sys.executable, "-c", PUSHES, public.base, realm, "team/built", *scopes)
    assert pushed.out.split() == ["200", "404", "202", "201", "201"], pushed
    assert place.tokens.asked[before:] == [["repository:team/built:pull,push"]]
    assert public.tags("team/built") == {"v1"}


def test_a_push_with_a_token_that_only_pulls_is_the_registrys_to_refuse(place: Place) -> None:
    """Expect the registry to see a token without the push, and to say no where no rule of ours does."""
    public, realm = place.registries["public"], place.tokens.realm
    before = len(place.tokens.asked)
    pushed = place.reader.command(
        sys.executable, "-c", PUSHES, public.base, realm, "team/unbuilt", "repository:team/unbuilt:pull,push"
    )
    assert pushed.out.split() == ["200", "404", "401", "401"], pushed
    assert place.tokens.asked[before:] == [["repository:team/unbuilt:pull"]]
    assert "team/unbuilt" not in public.repositories()


def test_the_catalogue_and_removals_where_a_rule_names_them(place: Place, which: str) -> None:
    """Expect the owner's role to list all images and to remove one."""
    status, body = place.ask(place.owner, which, "GET", "/v2/_catalog")
    assert status == 200
    assert "secret/base" in json.loads(body)["repositories"]
    assert place.copy(place.owner, which, "team/gone:v1").code == 0
    assert place.ask(place.owner, which, "GET", "/v2/team/gone/manifests/v1")[0] == 200
    assert place.ask(place.owner, which, "DELETE", f"/v2/team/gone/manifests/{place.digest}")[0] == 202
    assert place.ask(place.owner, which, "GET", "/v2/team/gone/manifests/v1")[0] == 404
