"""Smart HTTP for test origins: `git http-backend` (CGI, RFC 3875) behind tests/support/origins.py.

repository = make_repository(tmp_path / "o" / "r.git", {"README.md": "hello\\n"})
origin.on("/o/*", git_backend(tmp_path))
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.origins import Exchange, Handler

_IDENTITY = {
    "GIT_AUTHOR_NAME": "Test",
    "GIT_AUTHOR_EMAIL": "test@example.test",
    "GIT_COMMITTER_NAME": "Test",
    "GIT_COMMITTER_EMAIL": "test@example.test",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
}


def make_repository(bare: Path, files: Mapping[str, str]) -> str:
    """Make the bare repository `bare` with one commit of `files` on main; return the commit's id."""
    work = bare.with_suffix(".work")
    work.mkdir(parents=True)
    for name, text in files.items():
        (work / name).write_text(text)

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=work, env=_IDENTITY, capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("clone", "-q", "--bare", ".", str(bare))
    return git("rev-parse", "HEAD")


def git_backend(root: Path, *, push: bool = False) -> Handler:
    """Serve every repository below `root`, read and with `push` write (else where its configuration says so).

    Bodies are held by the origin: one that is to take large pushes is made with a large `keep`.
    """
    settings = {"safe.directory": "*", "uploadpack.allowFilter": "true", "uploadpack.allowAnySHA1InWant": "true"} | (
        {"http.receivepack": "true"} if push else {}
    )
    # The repository belongs to whoever runs the tests.
    config = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (name, value) in enumerate(settings.items()):
        config |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}

    async def run(exchange: Exchange) -> None:
        request = exchange.request
        body = await exchange.read_body()
        path, _, query = request.target.partition("?")
        environment = {
            **_IDENTITY,
            **config,
            "GIT_PROJECT_ROOT": str(root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": request.method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": request.header("content-type") or "",
            "CONTENT_LENGTH": str(len(body)),
            "GIT_PROTOCOL": request.header("git-protocol") or "",
            "HTTP_CONTENT_ENCODING": request.header("content-encoding") or "",
        }
        process = await asyncio.create_subprocess_exec(
            "git",
            "http-backend",
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await process.communicate(body)
        head, _, answer = output.partition(b"\r\n\r\n")
        fields = [line.partition(": ")[::2] for line in head.decode("latin-1").split("\r\n")]
        status = next((int(value.split()[0]) for name, value in fields if name == "Status"), 200)
        await exchange.answer(status, answer, tuple(field for field in fields if field[0] != "Status"))

    return run
