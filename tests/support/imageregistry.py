"""Debian's docker-registry as an origin, and a small image for it.

with ImageRegistry(folder, "registry.test", address="127.0.0.95") as registry:
    TestGateway(..., origins=[registry])    # as much of an Origin as the policy is written from
    registry.tags("team/shop")              # as it has them on disk
make_image(folder / "image")            # an OCI layout with one layer, tag v1: skopeo reads oci:FOLDER:v1

With `user` and `password_hash` (bcrypt) it asks for Basic authentication.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.support.authority import Authority
from tests.support.gateway import PATH, free_port
from tests.support.waiting import until

PROGRAM = shutil.which("docker-registry", path=f"{PATH}:/usr/sbin:/usr/bin")


class ImageRegistry:
    """One registry process over TLS, its images in `folder`."""

    tls = True

    def __init__(self, folder: Path, name: str, *, address: str, user: str = "", password_hash: str = "") -> None:
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
        until(self._answers, 30, "docker-registry")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "out").read_text(errors="replace")
        with socket.socket() as probe:
            return not probe.connect_ex((self.address, self.port))


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
