"""A package index and an npm registry as test origins, each with one small package: exeat-hello.

serve_index(origin)      pip: PEP 503 at /simple/, one wheel; `exeat_hello.GREETING` is "hello from pip"
serve_registry(origin)   npm: one tarball; the module is "hello from npm"
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
