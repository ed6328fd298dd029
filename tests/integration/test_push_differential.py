"""What git would do with a push, and what we say that it does: never more.

Bodies of pushes are damaged in every way that moves a boundary (bytes changed, inserted, dropped, doubled) and given to
git's own receive-pack, whose pre-receive hook writes down the commands and refuses them. Whatever git understood of a
body that our matcher accepted must be what the matcher stated.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rules.arguments import settled, values_of
from rules.facts import RequestFacts
from rules.operations.git import push
from tests.support.githttp import make_repository
from tests.support.pushes import BOUND, TYPE, ZERO, packet
from tests.support.pushes import push as body_of

pytestmark = pytest.mark.xdist_group("push-differential")

ROUNDS = 240
ENVIRONMENT = {
    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "receive.advertisePushOptions",
    "GIT_CONFIG_VALUE_1": "true",
}
INSERTED = (
    b"\n",
    b"\x00",
    b" ",
    b"0",
    b"0000",
    b"0001",
    b"0004",
    b"\r\n",
    b"/",
    b"..",
    b"\xff",
    b"PACK",
    b"refs/heads/main",
)


@dataclass
class Forge:
    """A repository that takes nothing and says what it was told to do."""

    repository: Path
    told: Path
    commit: str
    pack: bytes

    def receive(self, body: bytes) -> list[tuple[str, str]]:
        """(ref, change) of every command that git understood."""
        self.told.unlink(missing_ok=True)
        subprocess.run(
            ["git", "receive-pack", "--stateless-rpc", str(self.repository)],
            input=body,
            env=ENVIRONMENT | {"TOLD": str(self.told)},
            capture_output=True,
            check=False,
            timeout=60,
        )
        found = []
        lines = self.told.read_bytes().decode("latin-1").split("\n") if self.told.exists() else []
        for line in filter(None, lines):
            old, new, ref = line.split(" ", 2)
            found.append((ref, "create" if old == ZERO else "delete" if new == ZERO else "update"))
        return found

    def seeds(self) -> Iterator[bytes]:
        """Pushes as clients send them."""
        new, old = self.commit, self.commit
        yield body_of((ZERO, new, "refs/heads/agent/x"), pack=self.pack)
        yield body_of((ZERO, new, "refs/heads/agent/x"), (old, ZERO, "refs/heads/main"), pack=self.pack)
        yield body_of((old, ZERO, "refs/heads/main"), pack=b"")
        two = ((ZERO, new, "refs/tags/v1"), (ZERO, new, "refs/heads/agent/y"))
        yield packet(f"shallow {new}\n") + body_of(*two, caps=" report-status atomic agent=x", pack=self.pack)
        optioned = body_of((ZERO, new, "refs/heads/agent/z"), caps=" report-status push-options", pack=b"")
        yield optioned + packet("ci.skip") + b"0000" + self.pack


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    folder = tmp_path_factory.mktemp("differential")
    repository = folder / "r.git"
    commit = make_repository(repository, {"README.md": "hello\n"})
    hook = repository / "hooks/pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\ncat > "$TOLD"\nexit 1\n')
    hook.chmod(0o755)
    packed = subprocess.run(
        ["git", "-C", str(repository), "pack-objects", "--stdout", "--revs"],
        input=commit.encode() + b"\n",
        env=ENVIRONMENT,
        capture_output=True,
        check=True,
    )
    return Forge(repository, folder / "told", commit, packed.stdout)


def stated(body: bytes) -> set[tuple[str, str]] | None:
    """What our matcher says: every ref with every change, None where it is no push."""
    facts = RequestFacts.build(
        method="POST",
        scheme="https",
        tunnel=None,
        target="https://forge.test/o/r.git/git-receive-pack",
        headers=(("host", "forge.test"), ("content-type", TYPE)),
        has_body=True,
    )
    found = push({"options": True}, body[:BOUND], replace(facts, partial=len(body) > BOUND))
    settled_found = None if found is None else settled(found)
    if settled_found is None:
        return None
    refs, changes = values_of(settled_found["ref"]), values_of(settled_found["change"])
    return {(ref, change) for ref in refs for change in changes}


def damaged(body: bytes, commands: int, chance: random.Random) -> bytes:
    """`body` with one to three changes in its first `commands` bytes."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(commands)
        end = min(commands, at + chance.choice((1, 2, 4, 41, 120)))
        match chance.randrange(5):
            case 0:
                body = body[:at] + bytes([chance.randrange(256)]) + body[at + 1 :]
            case 1:
                body = body[:at] + chance.choice(INSERTED) + body[at:]
            case 2:
                body = body[:at] + body[end:]
            case 3:
                body = body[:at] + body[at:end] + body[at:]
            case _:
                body = body[:at] + body[at : at + 1].swapcase() + body[at + 1 :]
    return body


def test_git_never_understands_more_than_was_stated(forge: Forge) -> None:
    """Expect every command that git takes from an accepted body to be one that we stated, over many damaged bodies."""
    chance = random.Random(20261130)
    seeds = list(forge.seeds())
    accepted = understood = refused_though_understood = 0
    for round_number in range(ROUNDS):
        seed = seeds[round_number % len(seeds)]
        found = seed.find(b"PACK")
        body = damaged(seed, found if found > 0 else len(seed), chance)
        ours, theirs = stated(body), forge.receive(body)
        understood += bool(theirs)
        if ours is None:
            refused_though_understood += bool(theirs)
            continue
        accepted += 1
        assert set(theirs) <= ours, (body[:600], theirs, ours)
    # The comparison looked at something: both sides said yes and no, and not always together.
    assert accepted >= 5
    assert understood >= 10
    assert refused_though_understood >= 5


def test_undamaged_pushes_are_understood_alike(forge: Forge) -> None:
    """Expect git and the matcher to read every seed in the same way."""
    for seed in forge.seeds():
        ours = stated(seed)
        theirs = forge.receive(seed)
        assert ours is not None
        assert theirs
        assert {ref for ref, _ in theirs} == {ref for ref, _ in ours}
        assert set(theirs) <= ours
