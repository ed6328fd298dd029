"""Programs that stand in for a secret manager's own, and a `Sources` to ask them through."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

from broker.sources.registry import Sources
from broker.vault.store import SecretStore
from rules.facts import Sandbox
from rules.policy import DestinationDef
from rules.reader import Node, Problems
from rules.secret_sources import SourceDef, read_sources

CANARY = b"canary-0123456789"
VERSION_KEY = b"v" * 32


def sandbox(**attributes: str) -> Sandbox:
    return Sandbox(
        tenant="t", id="sb_a", epoch=1, role="r", owner="alice", agent="", task="", attributes=attributes, expires_at=1
    )


def definitions(text: str, destinations: Mapping[str, DestinationDef] | None = None) -> dict[str, SourceDef]:
    """`text` as the entries under `sources:` of credentials.yaml."""
    problems = Problems()
    found = read_sources(Node.load(text, "credentials.yaml", problems), destinations or {})
    assert not problems.errors, [str(problem) for problem in problems.errors]
    return found


def all_sources(folder: Path, environment: Mapping[str, str] | None = None, **more: object) -> Sources:
    """With an empty store in `folder`."""
    home = folder / "state"
    home.mkdir(0o700, exist_ok=True)
    store = SecretStore(home / "store.json", lambda salt: b"k" * 32, os.urandom)
    return Sources(store=store, environment=environment or {}, version_key=VERSION_KEY, **more)  # type: ignore[arg-type]


def program(folder: Path, name: str, body: str) -> Path:
    """A shell script that only we may write."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(0o700)
    return path
