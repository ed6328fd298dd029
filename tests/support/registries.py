"""Package registries as test origins, each with one small package: exeat-hello.

serve_index(origin)           pip: PEP 503 at /simple/, one wheel; `exeat_hello.GREETING` is "hello from pip"
serve_registry(origin)        npm: one tarball; the module is "hello from npm"
serve_gems(origin)            Bundler: the compact index, and a file that is no gem
serve_crate(origin)           cargo: the sparse index of a crate, and no file
serve_module(origin, name)    Go: version v1.0.0 of a module, as a module proxy has it
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import zipfile

from tests.support.origins import Exchange, Handler, Origin


def answering(body: bytes, media_type: str) -> Handler:
    """The same answer always."""

    async def run(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer(200, body, (("Content-Type", media_type),))

    return run


def serve_index(origin: Origin) -> None:
    """A simple index (PEP 503) with one wheel."""
    wheel = make_wheel()
    digest = hashlib.sha256(wheel).hexdigest()
    path = "/packages/hello/1.0/exeat_hello-1.0-py3-none-any.whl"
    page = f'<!DOCTYPE html><a href="{path}#sha256={digest}">exeat_hello-1.0-py3-none-any.whl</a>'
    origin.on("/simple/exeat-hello/", answering(page.encode(), "text/html"))
    origin.on(path, answering(wheel, "application/octet-stream"))


def make_wheel() -> bytes:
    """exeat-hello 1.0: one module that says hello."""
    files = {
        "exeat_hello.py": "GREETING = 'hello from pip'\n",
        "exeat_hello-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: exeat-hello\nVersion: 1.0\n",
        "exeat_hello-1.0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(text)}\n")
    record = "exeat_hello-1.0.dist-info/RECORD"
    files[record] = "".join(rows) + f"{record},,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def serve_registry(origin: Origin) -> None:
    """An npm registry with one package."""
    tarball = make_tarball()
    version = {
        "name": "exeat-hello",
        "version": "1.0.0",
        "main": "index.js",
        "dist": {
            "tarball": f"{origin.base}/exeat-hello/-/exeat-hello-1.0.0.tgz",
            "integrity": "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode(),
        },
    }
    packument = {"name": "exeat-hello", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    origin.on("/exeat-hello", answering(json.dumps(packument).encode(), "application/json"))
    origin.on("/exeat-hello/-/exeat-hello-1.0.0.tgz", answering(tarball, "application/octet-stream"))


def make_tarball() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in (
            ("package/package.json", json.dumps({"name": "exeat-hello", "version": "1.0.0", "main": "index.js"})),
            ("package/index.js", "module.exports = 'hello from npm';\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def serve_gems(origin: Origin) -> None:
    """A compact index with one gem, whose file is none."""
    entry = b"---\n1.0 |checksum:" + hashlib.sha256(b"").hexdigest().encode() + b"\n"
    digest = hashlib.md5(entry, usedforsecurity=False).hexdigest()
    versions = f"created_at: 2026-01-01T00:00:00Z\n---\nexeat-hello 1.0 {digest}\n"
    origin.on("/versions", answering(versions.encode(), "text/plain"))
    origin.on("/info/exeat-hello", answering(entry, "text/plain"))


def serve_crate(origin: Origin) -> None:
    """A sparse index with one crate, whose file is not there."""
    config = {"dl": f"{origin.base}/api/v1/crates", "api": origin.base}
    row = {"name": "exeat-hello", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False}
    row["cksum"] = hashlib.sha256(b"").hexdigest()
    origin.on("/config.json", answering(json.dumps(config).encode(), "application/json"))
    origin.on("/ex/ea/exeat-hello", answering(json.dumps(row).encode() + b"\n", "text/plain"))


def serve_module(origin: Origin, module: str) -> None:
    """One version of a module without dependencies. `module` has no upper-case letter."""
    mod = f"module {module}\n\ngo 1.19\n".encode()
    info = b'{"Version": "v1.0.0", "Time": "2026-01-01T00:00:00Z"}'
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{module}@v1.0.0/go.mod", mod)
        archive.writestr(f"{module}@v1.0.0/hello.go", "package hello\n")
    for path, body, media_type in (
        ("@v/list", b"v1.0.0\n", "text/plain"),
        ("@latest", info, "application/json"),
        ("@v/v1.0.0.info", info, "application/json"),
        ("@v/v1.0.0.mod", mod, "text/plain"),
        ("@v/v1.0.0.zip", buffer.getvalue(), "application/zip"),
    ):
        origin.on(f"/{module}/{path}", answering(body, media_type))
