"""Debian's docker-registry as an origin, and a small image for it.

with ImageRegistry(folder, "registry.test", address="127.0.0.95") as registry:
    TestGateway(..., origins=[registry])    # as much of an Origin as the policy is written from
    registry.tags("team/shop")              # as it has them on disk
make_image(folder / "image")            # an OCI layout with one layer, tag v1: skopeo reads oci:FOLDER:v1

With `user` and `password_hash` (bcrypt) it asks for Basic authentication; with a TokenServer for that one's tokens.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tests.support.authority import Authority
from tests.support.gateway import PATH, free_port
from tests.support.origins import Exchange
from tests.support.waiting import until

PROGRAM = shutil.which("docker-registry", path=f"{PATH}:/usr/sbin:/usr/bin")


class ImageRegistry:
    """One registry process over TLS, its images in `folder`."""

    tls = True

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        address: str,
        user: str = "",
        password_hash: str = "",
        tokens: TokenServer | None = None,
    ) -> None:
        folder.mkdir()
        self._folder = folder
        self.names = (name,)
        self.address = address
        self.port = free_port()
        self.authority = Authority(f"Registry {name}")
        self.entries: Mapping[str, str] = {}
        pem = folder / "key.pem"
        pem.write_bytes(self.authority.issue(self.names))
        tls = {"certificate": str(pem), "key": str(pem)}
        config: dict[str, object] = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "images")}, "delete": {"enabled": True}},
            "http": {"addr": f"{address}:{self.port}", "tls": tls},
        }
        if user:
            (folder / "users").write_text(f"{user}:{password_hash}\n")
            config["auth"] = {"htpasswd": {"realm": "registry", "path": str(folder / "users")}}
        if tokens is not None:
            (folder / "roots.pem").write_text(tokens.authority.pem)
            config["auth"] = {
                "token": {
                    "realm": tokens.realm,
                    "service": tokens.service,
                    "issuer": tokens.issuer,
                    "rootcertbundle": str(folder / "roots.pem"),
                }
            }
        (folder / "config.yml").write_text(json.dumps(config))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base(self) -> str:
        return f"https://{self.names[0]}:{self.port}"

    @property
    def host(self) -> str:
        return f"{self.names[0]}:{self.port}"

    def repositories(self) -> set[str]:
        """Images that exist."""
        root = self._folder / "images/docker/registry/v2/repositories"
        return {str(found.parent.relative_to(root)) for found in root.glob("**/_manifests")}

    def tags(self, repository: str) -> set[str]:
        """Tags of one image."""
        root = self._folder / "images/docker/registry/v2/repositories" / repository / "_manifests/tags"
        return {found.name for found in root.iterdir()} if root.exists() else set()

    def __enter__(self) -> ImageRegistry:
        assert PROGRAM is not None
        with (self._folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                [PROGRAM, "serve", str(self._folder / "config.yml")],
                env={"PATH": PATH, "OTEL_TRACES_EXPORTER": "none"},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        until(self._answers, what="docker-registry")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "out").read_text(errors="replace")
        with socket.socket() as probe:
            return not probe.connect_ex((self.address, self.port))


class TokenServer:
    """Gives a token for whatever is asked, as registries do for public images (distribution, docs/spec/auth/token.md).

    origin.on("/token", TokenServer(origin.base)); `asked` holds the scopes of each call.
    """

    service = "registry"
    issuer = "tests"

    def __init__(self, base: str) -> None:
        self.realm = f"{base}/token"
        self.authority = Authority("Tokens")
        pem = self.authority.issue(("tokens.test",))
        key = serialization.load_pem_private_key(pem, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._chain = [
            base64.b64encode(x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)).decode()
        ]
        self.asked: list[list[str]] = []

    async def __call__(self, exchange: Exchange) -> None:
        query = parse_qs(exchange.request.target.partition("?")[2])
        scopes = [scope for value in query.get("scope", []) for scope in value.split(" ")]
        self.asked.append(scopes)
        access = [
            {"type": kind, "name": name, "actions": actions.split(",")}
            for kind, name, actions in (scope.split(":") for scope in scopes)
        ]
        now = int(time.time())
        claims = {"iss": self.issuer, "sub": "", "aud": self.service, "exp": now + 300, "nbf": now - 60, "iat": now}
        head = {"typ": "JWT", "alg": "ES256", "x5c": self._chain}
        signed = b".".join(
            _part(json.dumps(part).encode()) for part in (head, {**claims, "jti": "1", "access": access})
        )
        r, s = decode_dss_signature(self._key.sign(signed, ec.ECDSA(hashes.SHA256())))
        token = (signed + b"." + _part(r.to_bytes(32, "big") + s.to_bytes(32, "big"))).decode()
        await exchange.read_body()
        answer = json.dumps({"token": token, "expires_in": 300}).encode()
        await exchange.answer(200, answer, (("Content-Type", "application/json"),))


def _part(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def make_image(folder: Path, content: bytes = b"hello from an image\n", tag: str = "v1") -> str:
    """Write an OCI image layout (image-spec, image-layout.md) with one layer; return the manifest's digest."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        entry = tarfile.TarInfo("hello.txt")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    layer = blob(gzip.compress(tar.getvalue(), mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip")
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar.getvalue()).hexdigest()}"]},
    }
    config = blob(json.dumps(image).encode(), "application/vnd.oci.image.config.v1+json")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [layer],
    }
    made = blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [{**made, "annotations": {"org.opencontainers.image.ref.name": tag}}]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(made["digest"])
