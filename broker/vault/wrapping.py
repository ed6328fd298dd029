"""`Wrapping`: the store's key lies wrapped in a file, and a key service unwraps it, once, at start.

The file is text, one JSON object: {"format": 1, "kind", "key", "version", "ciphertext"}. Who has it alone has nothing;
it is held to mode 0600 all the same. The key itself is in this process's memory and nowhere else.

Fails closed: whatever the service says but a key of 32 bytes refuses the start, with its name, the cause and what to
do. Nothing is wrapped for use before the service has unwrapped it again: a service that takes but does not give back
would otherwise leave a store that nobody opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Protocol

from broker.errors import BrokerError
from broker.sources.base import json_object
from broker.sources.registry import Sources
from broker.vault.key_services import KeyService, Wrapped, key_service
from broker.vault.keys import KEY_BYTES, KeyRefused, read_private
from net.addresses import AddressTable
from net.client import HttpClient
from net.contexts import ClientContexts
from net.resolve import Lookups, SystemResolver
from net.upstream import UpstreamProxy
from rules.reader import Node, Problems, Rejected
from rules.wrapping_keys import WrappingKey, read_wrapping_key
from rules.yaml12 import YamlError

FORMAT = 1
MAX_FILE_BYTES = 16 * 1024
ASK_SECONDS = 6.0
"""One question to the service."""
WHOLE_SECONDS = 20.0
"""Logging in and every question of one act; the supervisor waits 30 s for a vault."""
CLOSE_SECONDS = 2.0
_KEEP = "nothing was changed; the store needs this service at each start"


class WrapPlace(Protocol):
    """The fields of a boot document that say who unwraps, and how he is reached."""

    @property
    def wrapped_file(self) -> str | None: ...
    @property
    def wrapping(self) -> str | None: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def systemd(self) -> Mapping[str, bytes]: ...
    @property
    def internal_ranges(self) -> tuple[str, ...]: ...
    @property
    def self_addresses(self) -> tuple[str, ...]: ...
    @property
    def upstream(self) -> UpstreamProxy | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A new key and the text of the file that holds it wrapped."""

    key: bytes = field(repr=False)
    text: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwrapped:
    """The key in FILE, and what came of FILE.next: None where there is none. Of `later` a refusal counts only if the
    store does not open with `key`."""

    key: bytes = field(repr=False)
    later: bytes | KeyRefused | None = field(default=None, repr=False)


class Wrapping:
    """One key of one key service."""

    def __init__(self, wrapping: WrappingKey, sources: Sources, random: Callable[[int], bytes] = os.urandom) -> None:
        self._wrapping = wrapping
        self._sources = sources
        self._random = random

    @property
    def label(self) -> str:
        """`KIND:KEY`, for refusals and records."""
        return self._wrapping.label

    async def opened(self, file: Path) -> Unwrapped:
        """Ask for the key in `file`, and for the one in FILE.next where a rotation broke off. Raises KeyRefused."""
        wrapped = self._read(file)
        later = file.with_name(file.name + ".next")
        key = await self._act("unwrapped", lambda service: self._unwrap(service, wrapped, file))
        try:
            waiting = self._read(later) if _is_there(later) else None
            if waiting is None:
                return Unwrapped(key=key)
            other = await self._act("unwrapped", lambda service: self._unwrap(service, waiting, later))
            return Unwrapped(key=key, later=other)
        except KeyRefused as error:
            return Unwrapped(key=key, later=error)

    async def made(self, key: bytes | None = None) -> Made:
        """`key`, or a new one, wrapped, and unwrapped again to see that it can be. Raises KeyRefused."""
        chosen = self._random(KEY_BYTES) if key is None else key

        async def act(service: KeyService) -> Wrapped:
            wrapped = await service.wrap(chosen)
            if not hmac.compare_digest(await service.unwrap(wrapped), chosen):
                raise KeyRefused("key-provider", f"{self.label} gave another key back than it was given", _KEEP)
            return wrapped

        return Made(key=chosen, text=self._written(await self._act("wrapped", act)))

    async def _unwrap(self, service: KeyService, wrapped: Wrapped, file: Path) -> bytes:
        key = await service.unwrap(wrapped)
        if len(key) != KEY_BYTES:
            raise KeyRefused(
                "key-invalid",
                f"{self.label} unwrapped {file} to {len(key)} bytes, and a key has {KEY_BYTES}",
                "restore the file that `exeat store wrap-key` or the last rotation wrote",
            )
        return key

    async def _act[T](self, done: str, act: Callable[[KeyService], Awaitable[T]]) -> T:
        """`act` with a connection of its own, within the deadline. Raises KeyRefused, without a word of the peer."""
        service = key_service(self._wrapping, self._sources)
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                return await act(service)
        except KeyRefused:
            raise
        except TimeoutError:
            why, remedy = f"{self.label}: no whole answer within {WHOLE_SECONDS:g} s", "see that it runs and answers"
        except BrokerError as error:
            why, remedy = error.detail or error.code, error.remedy
        finally:
            with contextlib.suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await service.close()
        said = f"the store's key was not {done}: {why}"
        raise KeyRefused("key-provider", said, remedy or "see by: under key: in exeat.yaml, and the service's own log")

    def _read(self, file: Path) -> Wrapped:
        raw = read_private(file, "key-missing", "key-modes", limit=MAX_FILE_BYTES)
        found = json_object(raw) or {}
        mine = {"kind": self._wrapping.source.kind, "key": self._wrapping.key}
        try:
            if found.keys() != {"format", "ciphertext", "version", *mine} or found["format"] != FORMAT:
                raise ValueError
            if not all(isinstance(found[name], str) for name in ("ciphertext", "version", *mine)):
                raise ValueError
            wrapped = Wrapped(ciphertext=found["ciphertext"], version=found["version"])
        except ValueError:
            raise KeyRefused(
                "key-invalid",
                f"{file} holds no wrapped key, or a damaged one",
                "restore it; where its key still lies in a file: exeat store wrap-key --from FILE",
            ) from None
        if {name: found[name] for name in mine} != mine:
            raise KeyRefused(
                "key-provider",
                f"{file} was wrapped by another key than {self.label}, which exeat.yaml names",
                "name the key that wrapped it (it stands in the file)",
            )
        return wrapped

    def _written(self, wrapped: Wrapped) -> bytes:
        document: dict[str, Any] = {
            "format": FORMAT,
            "kind": self._wrapping.source.kind,
            "key": self._wrapping.key,
            "version": wrapped.version,
            "ciphertext": wrapped.ciphertext,
        }
        return json.dumps(document).encode() + b"\n"


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def wrapping_of(boot: WrapPlace) -> Wrapping | None:
    """What the boot document names, None where the key is not wrapped. Raises KeyRefused. Within a running loop."""
    if boot.wrapping is None:
        return None
    table = AddressTable(
        internal_ranges=tuple(ip_network(text) for text in boot.internal_ranges),
        self_addresses=tuple(ip_network(text) for text in boot.self_addresses),
    )
    client = HttpClient(
        Lookups(SystemResolver(), clock=time.monotonic),
        ClientContexts(),
        lambda: table,
        upstream=boot.upstream,
        seconds=ASK_SECONDS,
    )
    sources = Sources(
        store=None,
        environment=boot.environment,
        systemd=boot.systemd,
        version_key=os.urandom(32),
        ask=client.ask,
        now=time.time,
        boot=time.monotonic,
    )
    return Wrapping(_parsed(boot.wrapping), sources)


async def unwrapped_of(boot: WrapPlace) -> tuple[Wrapping | None, Unwrapped | None]:
    """Both for StoreKey; (None, None) where the key is not wrapped. Raises KeyRefused."""
    wrapping = wrapping_of(boot)
    if wrapping is None or boot.wrapped_file is None:
        return None, None
    return wrapping, await wrapping.opened(Path(boot.wrapped_file))


def _parsed(text: str) -> WrappingKey:
    problems = Problems()
    why = "it is incomplete"
    try:
        document = json.loads(text)
        folder = Path(document["folder"])
        node = Node.load(json.dumps(document["by"]), "by: under key:", problems)
        parsed = read_wrapping_key(node, lambda path: (folder / path).read_text("ascii"))
        if not problems.errors:
            return parsed
    except Rejected:
        pass
    except (YamlError, KeyError, TypeError, ValueError):
        why = "it cannot be read"
    if problems.errors:
        why = problems.errors[0].message
    raise KeyRefused("key-provider", f"by: under key: in exeat.yaml: {why}", "see docs/settings.md, The store's key")
