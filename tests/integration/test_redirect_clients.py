"""Real clients whose downloads end at a storage host: git-lfs, skopeo, pip, and a release as curl fetches it.

One origin is every host at port 443. `cdn.test` is a store of many owners: no rule names it, and it knows whether an
address was signed and whether anybody's authority came along.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway import Box, TestGateway
from tests.support.githttp import git_backend, make_repository
from tests.support.imageregistry import make_image
from tests.support.lfs import LfsServer
from tests.support.operationlanes import why_not_here
from tests.support.origins import Exchange, Origin

pytestmark = [
    pytest.mark.xdist_group("redirect-clients"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "-"),
]

ADDRESS = f"127.33.{os.getpid() >> 8 & 255}.{os.getpid() & 255 | 1}"
HOSTS = ("forge.test", "public.test", "images.test", "index.test", "cdn.test")
SECRET = "canary-clients-0a1b2c3d4e5f60718293"
CONTENT = os.urandom(300_000)
OID = hashlib.sha256(CONTENT).hexdigest()
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize {len(CONTENT)}\n"
SIGNED = "X-Amz-Date=20261201T000000Z&X-Amz-Signature=00ff%2Bx"
LEADS = "{to: [cdn.test], path: /STORE/**, query_keys: [X-Amz-Date, X-Amz-Signature]}"

FORGE = """
version: 1
service: NAME-lfs
title: A forge that keeps large files elsewhere
hosts:
  web: {host: NAME.test}
operations:
  lfs.download:
    effect: read
    why: Where objects are.
    redirects: LEADS
    requests:
      - at: web
        methods: [POST]
        match: {matcher: git_repository, params: {suffix: info/lfs/objects/batch}}
        body: {matcher: lfs_batch, bound: 262144, params: {operation: download}}
        answer: lfs_batch
tests:
  - allow: "POST https://NAME.test/o/r.git/info/lfs/objects/batch"
    operation: lfs.download
    headers: {content-type: application/vnd.git-lfs+json}
    body: {operation: download, transfers: [basic], objects: [{oid: OID, size: 7}]}
    why: objects
  - {deny: "GET https://NAME.test/o/r.git/info/lfs/objects/batch", why: no batch}
"""
IMAGES = """
version: 1
service: images
title: Images whose blobs lie elsewhere
native: oci
hosts:
  registry: {host: images.test}
operations:
  image.pull:
    effect: read
    why: Manifests and blobs of one image.
    download: true
    answer_headers: [docker-content-digest, docker-distribution-api-version]
    redirects: LEADS
    requests:
      - {at: registry, methods: [GET], paths: ["/v2", "/v2/"], unbound: [repository, reference]}
      - {at: registry, methods: [GET], match: {matcher: oci, params: {action: pull}}}
tests:
  - {allow: "GET https://images.test/v2/team/shop/manifests/v1", operation: image.pull, why: a tag}
  - {deny: "POST https://images.test/v2/team/shop/blobs/uploads/", body: "", why: a push}
"""
INDEX = """
version: 1
service: wheels
title: An index whose files lie elsewhere
native: pypi
hosts:
  index: {host: index.test}
operations:
  package.read:
    effect: read
    why: Pages and files.
    download: true
    redirects: LEADS
    requests:
      - {at: index, methods: [GET], paths: ["/simple/{package}/", "/files/{file}"]}
tests:
  - {allow: "GET https://index.test/files/a.whl", operation: package.read, why: a file}
  - {deny: "GET https://index.test/other", why: another path}
"""
POLICY = """
services:
  forge: {like: git, base: "https://forge.test"}
  public: {like: git, base: "https://public.test"}
roles:
  agent:
    allow:
      - {name: fetch, service: forge, operations: [git.fetch], credential: forge}
      - {name: lfs, service: forge-lfs, operations: [lfs.download], credential: forge}
      - {name: open-fetch, service: public, operations: [git.fetch]}
      - {name: open-lfs, service: public-lfs, operations: [lfs.download]}
      - {service: images, operations: [image.pull], with: {repository: "team/*"}, credential: images}
      - {service: wheels, operations: [read]}
"""
CREDENTIALS = """
version: 1
credentials:
  forge: {kind: basic, username: agent, secret: "store:key", hosts: [forge.test], owner: tests,
          placeholder: {env: FORGE_KEY, shape: "git_{36}"}}
  images: {kind: basic, username: agent, secret: "store:key", hosts: [images.test], owner: tests,
           placeholder: {env: IMAGES_KEY, shape: "reg_{36}"}}
"""


class SignedLfs(LfsServer):
    """Every download is at the store, with an authority of the forge's beside it."""

    def _batch(self, repository: str, asked: dict[str, object]) -> dict[str, object]:
        objects = asked["objects"]
        assert isinstance(objects, list)
        return {
            "transfer": "basic",
            "objects": [
                {
                    **one,
                    "actions": {"download": {"href": f"https://cdn.test/STORE/{one['oid']}?{SIGNED}", "header": {}}},
                }
                for one in objects
            ],
        }


@dataclass
class Scene:
    gateway: TestGateway
    origin: Origin
    box: Box
    folder: Path

    def store(self) -> list[tuple[str, str | None]]:
        """(target, Authorization) of every request that reached the store."""
        asked = [one for one in self.origin.received if one.header("host") == "cdn.test"]
        return [(one.target, one.header("authorization")) for one in asked]


def wheel(folder: Path) -> bytes:
    """A package that pip takes."""
    path = folder / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("parcel.py", "x = 1\n" * 1000)
        archive.writestr("parcel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n")
        archive.writestr(
            "parcel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("parcel-1.0.dist-info/RECORD", "")
    return path.read_bytes()


def world(folder: Path) -> Origin:
    """Every host, with what each keeps."""
    for host in ("forge", "public"):
        files = {".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n", "large.bin": POINTER}
        make_repository(folder / host / "o/r.git", files)
    forges = {host: SignedLfs(f"https://{host}.test", git_backend(folder / host)) for host in ("forge", "public")}
    make_image(folder / "image")
    index = json.loads((folder / "image/index.json").read_text())
    manifest = index["manifests"][0]
    package = wheel(folder)
    kept = {f"/STORE/{OID}": CONTENT, "/STORE/parcel-1.0-py3-none-any.whl": package}
    for blob in (folder / "image/blobs/sha256").iterdir():
        kept[f"/STORE/sha256/{blob.name}"] = blob.read_bytes()
    expected = "Basic " + base64.b64encode(f"agent:{SECRET}".encode()).decode()

    async def images(exchange: Exchange) -> None:
        path = exchange.request.path
        if exchange.request.header("authorization") != expected:
            await exchange.answer(401, b"", (("WWW-Authenticate", 'Basic realm="images"'),))
        elif "/blobs/" in path:
            place = f"https://cdn.test/STORE/{path.rpartition('/')[2].replace(':', '/')}?{SIGNED}"
            await exchange.answer(307, b"", (("Location", place),))
        elif "/manifests/" in path:
            raw = kept["/STORE/" + manifest["digest"].replace(":", "/")]
            more = (("Content-Type", manifest["mediaType"]), ("Docker-Content-Digest", manifest["digest"]))
            await exchange.answer(200, raw, more)
        else:
            await exchange.answer(200, b"{}")

    async def serve(exchange: Exchange) -> None:
        request = exchange.request
        host, _, path = (request.header("host") or "").partition(".")[0], "", request.path
        if host == "forge" and request.header("authorization") != expected:
            await exchange.read_body()
            await exchange.answer(401, b"", (("WWW-Authenticate", 'Basic realm="forge"'),))
        elif host in forges:
            await forges[host](exchange)
        elif host == "images":
            await exchange.read_body()
            await images(exchange)
        elif host == "index" and path == "/simple/parcel/":
            link = f'<a href="/files/parcel-1.0-py3-none-any.whl#sha256={hashlib.sha256(package).hexdigest()}">x</a>'
            await exchange.answer(200, link.encode(), (("Content-Type", "text/html"),))
        elif host == "index":
            place = f"https://cdn.test/STORE/{path.rpartition('/')[2]}?{SIGNED}"
            await exchange.answer(302, b"", (("Location", place),))
        elif host == "cdn" and request.target.endswith(f"?{SIGNED}") and path in kept:
            await exchange.answer(400 if request.header("authorization") else 200, kept[path])
        else:
            await exchange.answer(404)

    return Origin(*HOSTS, address=ADDRESS, port=443, handler=serve, keep=1 << 20)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("clients")
    with world(folder).run_in_thread() as origin:
        gateway = TestGateway(
            folder / "gateway", policy=POLICY, credentials=CREDENTIALS, secrets={"key": SECRET}, origins=[origin]
        )
        (gateway.config / "services").mkdir()
        files = {f"{name}-lfs": FORGE.replace("NAME", name) for name in ("forge", "public")}
        for name, text in {**files, "images": IMAGES, "wheels": INDEX}.items():
            (gateway.config / f"services/{name}.yaml").write_text(text.replace("LEADS", LEADS).replace("OID", "c" * 64))
        with gateway:
            yield Scene(gateway, origin, gateway.sandbox(), folder)


@pytest.fixture
def scene(running: Scene) -> Scene:
    running.origin.received.clear()
    return running


@pytest.mark.skipif(shutil.which("git-lfs") is None, reason="git-lfs is not installed")
@pytest.mark.parametrize("host", ["forge", "public"])
def test_git_lfs_fetches_an_object_from_the_store(scene: Scene, host: str, tmp_path: Path) -> None:
    """A clone with large files, behind a key and for everybody: the store sees the signed address and no authority."""
    assert scene.box.command("git", "lfs", "install").code == 0
    done = scene.box.command("git", "clone", "-q", f"https://{host}.test/o/r.git", str(tmp_path / "work"))
    assert done.code == 0, done
    assert (tmp_path / "work/large.bin").read_bytes() == CONTENT
    assert scene.store() == [(f"/STORE/{OID}?{SIGNED}", None)]
    [granted] = scene.gateway.awaited(
        event="redirect.granted", sandbox=scene.box.id, operation=f"{host}-lfs/lfs.download"
    )
    assert granted["redirect_host"] == "cdn.test"


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_pulls_an_image_whose_blobs_lie_at_the_store(scene: Scene, tmp_path: Path) -> None:
    """C105, C125: each blob answers 307; the registry gets the key, the store none, and the image is whole."""
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    done = scene.box.command(
        "skopeo", "--policy", str(policy), "copy", "-q", "docker://images.test/team/shop:v1", f"oci:{tmp_path}/out:v1",
        env={"XDG_RUNTIME_DIR": str(tmp_path), "REGISTRY_AUTH_FILE": str(tmp_path / "none.json")},
    )  # fmt: skip
    assert done.code == 0, done
    pulled = {path.name for path in (tmp_path / "out/blobs/sha256").iterdir()}
    assert pulled == {path.name for path in (scene.folder / "image/blobs/sha256").iterdir()}
    assert len(scene.store()) == 2
    assert {authority for _, authority in scene.store()} == {None}
    assert SECRET not in done.out + done.err


def test_pip_downloads_a_file_that_lies_at_the_store(scene: Scene, tmp_path: Path) -> None:
    """An index that redirects its files: pip follows, without a rule for the store and without a credential."""
    done = scene.box.command(
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--index-url",
        "https://index.test/simple/", "--dest", str(tmp_path), "parcel",
    )  # fmt: skip
    assert done.code == 0, done
    assert (tmp_path / "parcel-1.0-py3-none-any.whl").read_bytes() == (
        scene.folder / "parcel-1.0-py3-none-any.whl"
    ).read_bytes()
    assert scene.store() == [(f"/STORE/parcel-1.0-py3-none-any.whl?{SIGNED}", None)]


def test_nothing_at_the_store_is_reached_by_itself(scene: Scene) -> None:
    """The same signed address in a sandbox that was not led there: refused, and the store hears nothing."""
    other = scene.gateway.sandbox()
    done = other.curl("-i", f"https://cdn.test/STORE/{OID}?{SIGNED}")
    assert "no-rule" in done.out + done.err
    assert scene.store() == []
