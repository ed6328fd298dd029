"""The registry: a reference (`scheme:name`) to its source. A new source is one file and one entry here.

A reference may hold `${sandbox.x}`: the attribute must be one plain segment, or the credential is unavailable to
that sandbox. The reference itself is the operator's (RULINGS 3.6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from broker.sources.base import Source, SourceError
from broker.sources.env import EnvironmentSource
from broker.sources.file import FileSource
from broker.sources.store import StoreSource
from broker.vault.secret import Secret
from broker.vault.store import SecretStore
from rules.facts import Sandbox

_REFERENCE = re.compile(r"([a-z][a-z0-9]*):(.+)\Z")
_VARIABLE = re.compile(r"\$\{sandbox\.([A-Za-z_][A-Za-z0-9_]*)\}")
_SEGMENT = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


class Sources:
    """All sources of this vault."""

    def __init__(self, *, store: SecretStore, environment: Mapping[str, str], version_key: bytes) -> None:
        """`version_key` keys the version digests of sources that have no versions of their own."""
        self._sources: dict[str, Source] = {
            "env": EnvironmentSource(environment, version_key),
            "file": FileSource(version_key),
            "store": StoreSource(store),
        }

    def blocks(self, reference: str) -> bool:
        """True unless `fetch(reference)` is a matter of memory alone: then it needs no thread."""
        source = self._sources.get(reference.partition(":")[0])
        return source is not None and source.blocks

    def fetch(self, reference: str, sandbox: Sandbox, *, scrub: bool) -> Secret:
        """The secret that `reference` gives for `sandbox`. May block (`blocks`). Raises SourceError."""
        match = _REFERENCE.match(expand(reference, sandbox))
        if match is None or match[1] not in self._sources:
            raise SourceError("source-unknown", "the reference names no source of ours", "use env:, file: or store:")
        return self._sources[match[1]].fetch(match[2], scrub=scrub)


def expand(reference: str, sandbox: Sandbox) -> str:
    """`reference` with its `${sandbox.x}` replaced. Raises SourceError(`source-refused`)."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        own = {"id": sandbox.id, "owner": sandbox.owner, "agent": sandbox.agent, "task": sandbox.task}
        text = sandbox.attributes.get(name, own.get(name, ""))
        if not _SEGMENT.match(text):
            raise SourceError("source-refused", f"the sandbox has no plain attribute {name}")
        return text

    return _VARIABLE.sub(value, reference)
