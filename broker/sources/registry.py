"""The registry: a reference (`source:name`) to its source. A new source is one file and one entry here.

`AT_HAND` sources are there always and read at each use; the others are those of the operator's `sources:`, made anew
where their definition changed. Asking those, and keeping what they say, is broker/vault/supply.py.

A reference may hold `${sandbox.x}`: the attribute must be one plain segment, or the credential is unavailable to
that sandbox. The reference itself is the operator's (RULINGS 3.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

from broker.sources.aws import AwsServer, ParameterStoreSource, SecretsManagerSource
from broker.sources.base import RemoteSource, Source, SourceError
from broker.sources.clouds import AzureSource, CloudServer, GcpSource
from broker.sources.env import EnvironmentSource
from broker.sources.exec import ExecSource
from broker.sources.file import FileSource
from broker.sources.keyring import KeyringSource
from broker.sources.network import Ask, Network, Places
from broker.sources.onepassword import OnePasswordSource
from broker.sources.program import Program
from broker.sources.sops import AgeSource, SopsSource
from broker.sources.store import StoreSource
from broker.sources.systemd import SystemdSource
from broker.sources.vault import VaultDynamicSource, VaultServer, VaultSource
from broker.vault.secret import Secret
from broker.vault.store import SecretStore
from rules.facts import Sandbox
from rules.policy import DestinationDef
from rules.secret_references import KINDS, Reference, split
from rules.secret_sources import SourceDef

CLOSE_SECONDS = 2.0
_TARGETS = {"secretsmanager": "secretsmanager", "ssm": "AmazonSSM", "kms": "TrentService"}
"""What stands before an action's name in X-Amz-Target."""

_REFERENCE = re.compile(r"([a-z][a-z0-9-]*):(.+)\Z")
_VARIABLE = re.compile(r"\$\{sandbox\.([A-Za-z_][A-Za-z0-9_]*)\}")
_SEGMENT = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """One of the operator's sources, made and ready to be asked. `places`: the destinations that it was made with."""

    definition: SourceDef
    places: Places
    source: RemoteSource


class Sources:
    """All sources of this vault."""

    def __init__(
        self,
        *,
        store: SecretStore | None,
        environment: Mapping[str, str],
        version_key: bytes,
        systemd: Mapping[str, bytes] | None = None,
        threads: Executor | None = None,
        ask: Ask | None = None,
        now: Callable[[], float] = lambda: 0.0,
        boot: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`version_key` keys the version digests of sources that have no versions of their own.

        Without a store there is no `store:`. `ask` is the network's, without which none of its sources is had.
        `now`: Unix time, `boot`: the boot clock.
        """
        self.version_key = version_key
        self._environment = environment
        self._threads = threads
        self._ask = ask
        self._now = now
        self._boot = boot
        self._at_hand: dict[str, Source] = {
            "env": EnvironmentSource(environment, version_key),
            "file": FileSource(version_key),
            **({} if store is None else {"store": StoreSource(store)}),
            "systemd": SystemdSource(systemd or {}, version_key),
        }
        self._opened: dict[str, Opened] = {}

    def blocks(self, reference: str) -> bool:
        """True unless `fetch(reference)` is a matter of memory alone: then it needs no thread."""
        source = self._at_hand.get(reference.partition(":")[0])
        return source is not None and source.blocks

    def fetch(self, reference: str, sandbox: Sandbox, *, scrub: bool) -> Secret:
        """The secret that `reference` to a source at hand gives for `sandbox`. May block. Raises SourceError."""
        return self._fetch(expand(reference, sandbox), scrub=scrub)

    def _fetch(self, reference: str, *, scrub: bool) -> Secret:
        match = _REFERENCE.match(reference)
        if match is None or match[1] not in self._at_hand:
            known = ", ".join(f"{name}:" for name in (*self._at_hand, *self._opened))
            raise SourceError("source-unknown", "the reference names no source of ours", f"use {known}")
        return self._at_hand[match[1]].fetch(match[2], scrub=scrub)

    async def at_hand(self, reference: str, sandbox: Sandbox | None, *, scrub: bool) -> Secret:
        """As `fetch`, off the loop where it blocks. Without a sandbox nothing is replaced in `reference`."""
        text = reference if sandbox is None else expand(reference, sandbox)
        if not self.blocks(text):
            return self._fetch(text, scrub=scrub)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self._fetch(text, scrub=scrub))

    def named(self, reference: str, sandbox: Sandbox | None) -> tuple[Opened, Reference]:
        """The source of the operator's that `reference` names, and what to ask it for. Raises SourceError."""
        found = split(reference if sandbox is None else expand(reference, sandbox))
        opened = self._opened.get(found.source)
        if opened is None:
            raise SourceError("source-unknown", f"{found.source}: is not under sources:", "see credentials.yaml")
        path = found.document.partition("?")[0]
        if not KINDS[opened.definition.kind].path.match(path):
            # What was written was checked; a word of the sandbox must not make something else of it.
            raise SourceError("source-refused", f"{reference}: the sandbox's words make no reference of it")
        return opened, found

    def made_for_one(self, source: str) -> bool:
        """Whether what a source of the operator's gives is made for one sandbox."""
        opened = self._opened.get(source)
        return opened is not None and opened.source.own

    async def configure(
        self, definitions: Mapping[str, SourceDef], places: Mapping[str, DestinationDef]
    ) -> frozenset[str]:
        """Put the operator's `sources:` in force; returns the names of those that changed or went.

        `places` are the operator's `destinations:`.
        """
        changed = {
            name
            for name, opened in self._opened.items()
            if definitions.get(name) != opened.definition
            or {host: places.get(host) for host in opened.places} != opened.places
        }
        await self._close(changed)
        for name, definition in definitions.items():
            if name not in self._opened:
                hosts = {address.destination.host.text for address in definition.places.values()}
                used = {host: places.get(host) for host in hosts}
                self._opened[name] = Opened(definition=definition, places=used, source=self._make(definition, used))
        return frozenset(changed)

    async def reopen(self, reference: str) -> frozenset[str]:
        """What `reference` names was replaced: sources opened with it are opened anew. Returns their names."""
        again = [one for one in self._opened.values() if reference in one.definition.secrets.values()]
        await self._close({one.definition.name for one in again})
        for one in again:
            made = self._make(one.definition, one.places)
            self._opened[one.definition.name] = Opened(definition=one.definition, places=one.places, source=made)
        return frozenset(one.definition.name for one in again)

    async def close(self) -> None:
        """Give back what the sources were given."""
        await self._close(set(self._opened))

    async def _close(self, names: set[str]) -> None:
        """Whatever they say: what they were given ends by itself, and nobody waits long for them."""
        going = [self._opened.pop(name).source.close() for name in names]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*going, return_exceptions=True)

    def _make(self, definition: SourceDef, places: Places) -> RemoteSource:
        name, settings, words = definition.name, definition.settings, definition.words
        match definition.kind:
            case "exec":
                as_json = settings["format"] == "json"
                return ExecSource(name, self._program(definition), words["arguments"], json=as_json, now=self._now)
            case "onepassword":
                return OnePasswordSource(name, self._program(definition), self._key(definition, "token"))
            case "sops":
                return SopsSource(name, self._program(definition), self._key(definition, "age_key"))
            case "age":
                return AgeSource(name, self._program(definition), settings["identity"])
            case "keyring":
                return KeyringSource(name, self._program(definition))
            case "vault":
                return VaultSource(definition, self.vault_server(definition, places))
            case "vault-dynamic":
                return VaultDynamicSource(definition, self.vault_server(definition, places))
            case "aws-secrets-manager":
                return SecretsManagerSource(definition, self.aws_server(definition, places, "secretsmanager"))
            case "aws-parameter-store":
                return ParameterStoreSource(definition, self.aws_server(definition, places, "ssm"))
            case "gcp-secret-manager":
                return GcpSource(definition, self.cloud_server(definition, places, "gcp"))
            case "azure-key-vault":
                return AzureSource(definition, self.cloud_server(definition, places, "azure"))
            case kind:
                raise SourceError("source-unknown", f"{name}: kind {kind} does not exist")

    def _network(self, definition: SourceDef, places: Places) -> Network:
        if self._ask is None:
            raise SourceError("source-unknown", f"{definition.name}: there is no network here")
        return Network(self._ask, places)

    def vault_server(self, definition: SourceDef, places: Places) -> VaultServer:
        """A connection of its own to what `definition` names, opened by what is at hand here. Also the next two."""
        return VaultServer(definition, self._network(definition, places), self._text(definition), self._boot)

    def aws_server(self, definition: SourceDef, places: Places, service: str) -> AwsServer:
        network, key = self._network(definition, places), self._text(definition)
        return AwsServer(definition, network, key, self._now, service=service, prefix=_TARGETS[service])

    def cloud_server(self, definition: SourceDef, places: Places, cloud: Literal["gcp", "azure"]) -> CloudServer:
        async def opening(name: str) -> Secret:
            return await self.at_hand(definition.secrets[name], None, scrub=False)

        network = self._network(definition, places)
        return CloudServer(definition, network, opening, cloud=cloud, now=self._now, boot=self._boot)

    def _program(self, definition: SourceDef) -> Program:
        passed = {
            name: self._environment[name] for name in definition.words["environment"] if name in self._environment
        }
        return Program(path=definition.settings["program"], environment=passed)

    def _key(self, definition: SourceDef, name: str) -> Callable[[], Awaitable[str]]:
        text = self._text(definition)
        return lambda: text(name)

    def _text(self, definition: SourceDef) -> Callable[[str], Awaitable[str]]:
        """What gives a text that a source is opened with, read at each use; "" where it is opened with nothing."""

        async def key(name: str) -> str:
            reference = definition.secrets.get(name)
            if reference is None:
                return ""
            secret = await self.at_hand(reference, None, scrub=False)
            return secret.reveal().decode("utf-8", "replace")

        return key


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
