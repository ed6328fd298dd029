"""Repositories of hundreds of megabytes pass in both directions, and our processes hold none of it (`make soak`)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway import Box, TestGateway
from tests.support.githttp import git_backend, make_repository
from tests.support.leaks import command_line, descendants
from tests.support.origins import Origin

pytestmark = [pytest.mark.xdist_group("git-large"), pytest.mark.soak, pytest.mark.timeout(900)]

BLOBS, BLOB = 10, 30_000_000
GROWTH = 50_000_000
"""Bytes by which the highest memory of one process may grow: frames in flight, TLS, what Python keeps of both."""
SETTINGS = ("core.compression=0", "pack.window=0", "user.name=Agent", "user.email=agent@example.test")
PLAIN = tuple(word for setting in SETTINGS for word in ("-c", setting))
CREDENTIALS = """
version: 1
credentials:
  forge: {kind: basic, username: agent, secret: "store:forge", hosts: [keyed.test], owner: tests,
          placeholder: {env: FORGE_KEY, shape: "git_{36}"}}
"""
POLICY = """
services:
  plain: {{like: git, base: "{plain}"}}
  keyed: {{like: git, base: "{keyed}"}}
roles:
  agent:
    deny:
      - {{name: plain-main, service: plain, operations: [git.push], with: {{ref: refs/heads/main}}}}
      - {{name: keyed-main, service: keyed, operations: [git.push], with: {{ref: refs/heads/main}}}}
    allow:
      - {{service: plain, operations: [git.fetch, git.push]}}
      - {{service: keyed, operations: [git.fetch, git.push], credential: forge}}
"""


@dataclass
class Place:
    gateway: TestGateway
    box: Box
    urls: dict[str, str]
    bare: Path

    def highest(self) -> dict[str, int]:
        """Module of each of our processes that traffic passes -> the most bytes that it ever held."""
        found: dict[str, int] = {}
        assert self.gateway.process is not None
        for pid in descendants(self.gateway.process.pid):
            line = command_line(pid).decode(errors="replace")
            for module in ("proxy.worker", "broker.executor_process", "broker.vault", "audit.auditor"):
                if line.endswith(module) or f" {module} " in line:
                    status = Path(f"/proc/{pid}/status").read_text()
                    kilobytes = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
                    assert kilobytes is not None
                    found[module] = max(found.get(module, 0), int(kilobytes[1]) * 1024)
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("forge")
    bare = root / "o/r.git"
    make_repository(bare, {"README.md": "hello\n"})
    for setting in ("core.compression", "pack.window"):  # noise has no deltas, and looking for them takes minutes
        subprocess.run(["git", "-C", str(bare), "config", setting, "0"], check=True)
    work = tmp_path_factory.mktemp("work") / "r"
    subprocess.run(["git", "clone", "-q", str(bare), str(work)], check=True)
    for number in range(BLOBS):
        (work / f"{number}.bin").write_bytes(os.urandom(BLOB))
    for words in (("add", "."), ("commit", "-q", "-m", "noise"), ("push", "-q", "origin", "HEAD:main")):
        subprocess.run(["git", *PLAIN, "-C", str(work), *words], check=True)
    with (
        Origin("plain.test", address="127.0.0.131", keep=512 << 20).run_in_thread() as plain,
        Origin("keyed.test", address="127.0.0.132", keep=512 << 20).run_in_thread() as keyed,
    ):
        for origin in (plain, keyed):
            origin.on("/*", git_backend(root, push=True))
        with TestGateway(
            tmp_path_factory.mktemp("gateway"),
            policy=POLICY.format(plain=plain.base, keyed=keyed.base),
            credentials=CREDENTIALS,
            secrets={"forge": "kq8-Forge-Real-0d7f1c52aa93"},
            origins=[plain, keyed],
        ) as gateway:
            urls = {"plain": plain.url("/o/r.git"), "keyed": keyed.url("/o/r.git")}
            yield Place(gateway, gateway.sandbox("agent"), urls, bare)


@pytest.mark.parametrize("which", ["plain", "keyed"])
def test_hundreds_of_megabytes_pass_and_are_not_held(place: Place, which: str, tmp_path: Path) -> None:
    """C082, T15: a clone of 300 MB and a push of 100 MB; through the worker alone, and through the broker with a key.

    The push is one that a deny rule looks into: its beginning is judged, its pack is not held.
    """
    before = place.highest()
    assert {"proxy.worker", "broker.executor_process"} <= before.keys()
    work = tmp_path / "work"
    cloned = place.box.command("git", "clone", "--progress", place.urls[which], str(work))
    assert cloned.code == 0, cloned
    assert "Receiving objects" in cloned.err
    assert sum(found.stat().st_size for found in work.glob("*.bin")) == BLOBS * BLOB
    (work / "more.bin").write_bytes(os.urandom(100_000_000))
    branch = f"agent/{which}"
    for words in (("add", "."), ("commit", "-q", "-m", "more"), ("push", "-q", "origin", f"HEAD:refs/heads/{branch}")):
        done = place.box.command("git", *PLAIN, "-C", str(work), *words)
        assert done.code == 0, done
    head = place.box.command("git", "-C", str(work), "rev-parse", "HEAD").out.strip()
    assert (place.bare / "refs/heads" / branch).read_text().strip() == head
    refused = place.box.command("git", *PLAIN, "-C", str(work), "push", "-q", "origin", "HEAD:refs/heads/main")
    assert refused.code != 0
    grown = {module: held - before.get(module, 0) for module, held in place.highest().items()}
    assert {module: count for module, count in grown.items() if count > GROWTH} == {}, grown
