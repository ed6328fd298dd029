"""`Supply`: what a credential is made of, for one use. Between the references of credentials.yaml and the opener.

    parts = await supply.parts(active, name, sandbox)     every part, or SourceError: what is half there is not there
    supply.configure(active)                              the sources of a policy that is now in force
    supply.reject(name, owner)                            an upstream refused it: the next use asks its source again
    supply.ended(owner)                                   its leases are given back
    supply.check(...) / supply.sync(...)                  for an administrator

Sources at hand are read at each use. What other sources give is kept by the cache (material.py), one document at
a time, so that parts of one document are of one version. Each thing that a source gave is on record with its version
and its keyed fingerprint, as is a source that stops giving; never a value.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.errors import BrokerError
from broker.sources.base import Document, SourceError
from broker.sources.env import fingerprint, make_secret
from broker.sources.registry import Opened, Sources, expand
from broker.vault.clock import Clock
from broker.vault.exchanging import Exchanger
from broker.vault.material import FLIGHT_SECONDS, Fresh, Key, MaterialCache, Times
from broker.vault.policies import ActivePolicy
from broker.vault.records import Fields
from broker.vault.secret import Secret
from net.process import complain
from rules.credential_kinds import is_public
from rules.exchanges import is_exchange
from rules.facts import Sandbox
from rules.names import CredentialRef, Owner
from rules.secret_references import AT_HAND, split
from rules.secret_sources import MAX_SECONDS

SECONDS: Final = 6.0
"""All parts of one credential. Longer than one question, shorter than a hand-off."""
AT_ONCE: Final = 8
"""Questions of one check at a time."""
RETURNS: Final = (0.0, 1.0, 5.0)
"""Waits before each try to give a lease back."""
MAX_SAID: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One reference as `exeat secret check` shows it. `error` "" where it gives a secret now."""

    credential: str
    part: str
    source: str
    version: str = ""
    fingerprint: str = ""
    age: float | None = None
    """Seconds since the copy came that uses get now; None where none is kept."""
    error: str = ""
    detail: str = ""
    remedy: str = ""
    needs_sandbox: bool = False
    """The reference depends on the sandbox, and none was named: nothing was asked."""


class Supply:
    """One per vault."""

    def __init__(
        self,
        *,
        sources: Sources,
        journal: Journal,
        clock: Clock,
        random: Callable[[], float],
        version_key: bytes,
        exchanger: Exchanger | None = None,
    ) -> None:
        """`random` gives numbers from 0 to 1. Without an `exchanger` kinds that need one are not had."""
        self._sources = sources
        self._journal = journal
        self._clock = clock
        self._version_key = version_key
        self._exchanger = exchanger
        self._cache: MaterialCache[_Kept] = MaterialCache(
            now=lambda: self._clock.boot(), random=random, on_drop=self._dropped
        )
        self._said: OrderedDict[Key, str] = OrderedDict()
        """Keys whose last answer was a no, with its code: said once in the log, not at each try."""
        self._returning: set[asyncio.Task[None]] = set()
        self._active: ActivePolicy | None = None

    # --- uses

    async def parts(self, active: ActivePolicy, name: str, sandbox: Sandbox) -> Mapping[str, Secret]:
        """What is applied of a credential: its parts, or what its exchange obtained for them.

        Raises BrokerError, and TimeoutError where it takes over SECONDS.
        """
        definition = active.policy.credentials.get(CredentialRef(name))
        if definition is None or not is_exchange(definition.kind):
            return await self._stored(active, name, sandbox)
        if self._exchanger is None:
            raise SourceError("source-unknown", name)
        async with asyncio.timeout(SECONDS):
            stored = await self._stored(active, name, sandbox)
            references = {part: expand(text, sandbox) for part, text in active.secrets[name].references.items()}
            return await self._exchanger.parts(definition, references, stored, sandbox, active.places)

    async def _stored(self, active: ActivePolicy, name: str, sandbox: Sandbox) -> Mapping[str, Secret]:
        """Every part as its source gives it. Raises SourceError and TimeoutError."""
        binding = active.secrets.get(name)
        if binding is None:
            raise SourceError("source-unknown", name)
        found: dict[str, Secret] = {}
        async with asyncio.timeout(SECONDS):
            for part, reference in binding.references.items():
                scrub = binding.scrub and not self._public(active, name, part)
                if split(reference).source in AT_HAND:
                    found[part] = await self._sources.at_hand(reference, sandbox, scrub=scrub)
                    continue
                opened, place = self._sources.named(reference, sandbox)
                key = _key(name, opened, place.document, sandbox)
                copy = await self._cache.get(key, _times(opened), partial(self._ask, key, opened, place.document))
                found[part] = self._secret(copy.value.document, opened, place.document, place.field, scrub=scrub)
        return found

    async def parts_in_use(self, active: ActivePolicy, name: str, sandbox: Sandbox) -> Mapping[str, Secret]:
        """As `parts`, for what an answer must not hold: a lease that nobody asked for yet is nowhere, and not made."""
        definition = active.policy.credentials.get(CredentialRef(name))
        if definition is not None and is_exchange(definition.kind):
            return {} if self._exchanger is None else self._exchanger.parts_in_use(name, sandbox)
        binding = active.secrets.get(name)
        for reference in () if binding is None else binding.references.values():
            if split(reference).source in AT_HAND:
                continue
            opened, place = self._sources.named(reference, sandbox)
            if opened.source.own and self._cache.peek(_key(name, opened, place.document, sandbox)) is None:
                return {}
        return await self.parts(active, name, sandbox)

    def fingerprint(self, parts: Mapping[str, Secret]) -> str:
        """The keyed digest of what is used: of the one part, or of all by their names."""
        return self._digest({part: secret.reveal() for part, secret in parts.items()})

    def reject(self, credential: str, owner: Owner) -> bool:
        """An upstream refused what `owner` used: drop it, unless it came a moment ago. True where something was."""
        stored = self._cache.reject(credential, owner) > 0
        return (self._exchanger is not None and self._exchanger.reject(credential, owner)) or stored

    def could_reject(self, credential: str, owner: Owner) -> bool:
        """Whether asking the source again could give something else than what `owner` uses now."""
        exchanged = self._exchanger is not None and self._exchanger.could_reject(credential, owner)
        return exchanged or self._cache.could_reject(credential, owner)

    # --- changes

    async def configure(self, active: ActivePolicy) -> frozenset[str]:
        """Put the sources of `active` in force. Returns the credentials whose source changed: to be cut."""
        self._active = active
        return self._drop_of(active, await self._sources.configure(active.sources, active.places))

    def _drop_of(self, active: ActivePolicy, sources: frozenset[str]) -> frozenset[str]:
        """Drop the copies of credentials that name one of `sources`; returns their names."""
        touched = frozenset(
            name
            for name, binding in active.secrets.items()
            if any(split(reference).source in sources for reference in binding.references.values())
        )
        for name in touched:
            self.invalidate(name)
        return touched

    async def reopen(self, reference: str) -> None:
        """What `reference` names was replaced or removed: sources that were opened with it are opened anew.

        What they gave is dropped: a login takes the leases with it that it made.
        """
        again = await self._sources.reopen(reference)
        if again and self._active is not None:
            self._drop_of(self._active, again)

    def invalidate(self, credential: str | None = None) -> int:
        """Drop the copies of a credential, or of all; returns how many there were."""
        exchanged = 0 if self._exchanger is None else self._exchanger.invalidate(credential)
        return exchanged + self._cache.invalidate(credential)

    def ended(self, owner: Owner) -> int:
        """A sandbox ended: its leases are on their way back. Returns how many there were."""
        exchanged = 0 if self._exchanger is None else self._exchanger.ended(owner)
        return exchanged + self._cache.forget(owner)

    async def close(self) -> None:
        """Drop everything, give leases and logins back, and wait for that."""
        if self._exchanger is not None:
            await self._exchanger.close()
        await self._cache.close()
        await asyncio.gather(*self._returning, return_exceptions=True)
        await self._sources.close()

    # --- for an administrator

    async def check(self, active: ActivePolicy, wanted: str | None, sandbox: Sandbox | None) -> tuple[Row, ...]:
        """Ask for every reference now, past the cache, and drop what comes. Leases are given back at once."""
        asked: dict[tuple[str, str], asyncio.Task[Document]] = {}
        turns = asyncio.Semaphore(AT_ONCE)

        async def ask(opened: Opened, document: str) -> Document:
            async with turns, asyncio.timeout(FLIGHT_SECONDS):
                return await opened.source.read(document, None)

        async def get(name: str, opened: Opened, document: str) -> Document:
            task = asked.get((opened.definition.name, document))
            if task is None:
                task = asyncio.ensure_future(ask(opened, document))
                asked[opened.definition.name, document] = task
            return await task

        rows = await self._rows(active, wanted, sandbox, get)
        for (name, _), task in asked.items():
            if task.cancelled() or task.exception() is not None or not task.result().lease:
                continue
            opened, _ = self._sources.named(f"{name}:x", None)
            self._return(Key(credential="", references=()), _Kept(opened=opened, document=task.result()))
        return rows

    async def visit(self, active: ActivePolicy, see: Callable[[str, Secret], None]) -> tuple[Row, ...]:
        """Show `see` every secret part that uses would get now, by its credential; the rows say what was not there."""

        async def get(name: str, opened: Opened, document: str) -> Document:
            key = _key(name, opened, document, None)
            return (
                await self._cache.get(key, _times(opened), partial(self._ask, key, opened, document))
            ).value.document

        return await self._rows(active, None, None, get, see)

    async def sync(self, active: ActivePolicy, wanted: str | None, sandbox: Sandbox | None) -> tuple[Row, ...]:
        """Drop the copies and ask for them anew, so that the next use has the newest."""
        self.invalidate(wanted)

        async def get(name: str, opened: Opened, document: str) -> Document:
            key = _key(name, opened, document, sandbox)
            return (
                await self._cache.get(key, _times(opened), partial(self._ask, key, opened, document))
            ).value.document

        return await self._rows(active, wanted, sandbox, get)

    async def _rows(
        self,
        active: ActivePolicy,
        wanted: str | None,
        sandbox: Sandbox | None,
        get: Callable[[str, Opened, str], Awaitable[Document]],
        see: Callable[[str, Secret], None] = lambda name, secret: None,
    ) -> tuple[Row, ...]:
        if wanted is not None and wanted not in active.secrets:
            raise SourceError("no-such-credential", "credentials.yaml has none of this name", "see exeat policy show")
        names = sorted(active.secrets) if wanted is None else [wanted]
        work = [
            self._row(active, name, part, reference, sandbox, get, see)
            for name in names
            for part, reference in active.secrets[name].references.items()
        ]
        return tuple(await asyncio.gather(*work))

    async def _row(
        self,
        active: ActivePolicy,
        name: str,
        part: str,
        reference: str,
        sandbox: Sandbox | None,
        get: Callable[[str, Opened, str], Awaitable[Document]],
        see: Callable[[str, Secret], None],
    ) -> Row:
        source = split(reference).source
        scrub = active.secrets[name].scrub and not self._public(active, name, part)
        age: float | None = None
        if sandbox is None and ("${" in reference or self._sources.made_for_one(source)):
            return Row(credential=name, part=part, source=source, needs_sandbox=True)
        try:
            if source in AT_HAND:
                secret = await self._sources.at_hand(reference, sandbox, scrub=scrub)
            else:
                opened, place = self._sources.named(reference, sandbox)
                document = await get(name, opened, place.document)
                secret = self._secret(document, opened, place.document, place.field, scrub=scrub)
                kept = self._cache.peek(_key(name, opened, place.document, sandbox))
                age = None if kept is None else self._clock.boot() - kept.obtained_at
        except TimeoutError:
            detail = f"{reference} did not answer in time"
            return Row(credential=name, part=part, source=source, error="source-unreachable", detail=detail)
        except BrokerError as error:
            return Row(
                credential=name,
                part=part,
                source=source,
                error=error.code,
                detail=error.detail,
                remedy=error.remedy,
            )
        if not self._public(active, name, part):
            see(name, secret)
        return Row(
            credential=name,
            part=part,
            source=source,
            version=secret.version,
            fingerprint=fingerprint(secret.reveal(), self._version_key),
            age=age,
        )

    # --- asking

    async def _ask(self, key: Key, opened: Opened, document: str, before: _Kept | None) -> Fresh[_Kept]:
        """One question to a source, on record. Raises BrokerError and TimeoutError."""
        source = opened.definition.name
        fields: Fields = {"credential": key.credential, "source": source}
        if key.owner is not None:
            fields |= {"tenant": key.owner[0], "sandbox": key.owner[1]}
        try:
            found = await opened.source.read(document, None if before is None else before.document)
        except BrokerError as error:
            await self._say_no(key, fields, error.code)
            raise
        except TimeoutError:
            await self._say_no(key, fields, "source-unreachable")
            raise
        self._said.pop(key, None)
        renewed = before is not None and found.lease != "" and found.lease == before.document.lease
        fields |= {
            "credential_version": found.version or None,
            "fingerprint": self._digest(found.fields),
            "action": "lease.renewed" if renewed else None,
            "ttl_s": None if found.lasts is None else max(0, int(found.lasts)),
        }
        kept = _Kept(opened=opened, document=found)
        try:
            await self._journal.append(Event("secret.fetched", fields))
        except AuditUnavailable:
            if not renewed:
                self._return(key, kept)
            raise SourceError("source-refused", "the log cannot be written, so nothing is taken up") from None
        return Fresh(value=kept, lasts=found.lasts, renews=renewed)

    async def _say_no(self, key: Key, fields: Fields, code: str) -> None:
        if self._said.get(key) == code:
            return
        self._said[key] = code
        while len(self._said) > MAX_SAID:
            self._said.popitem(last=False)
        try:
            await self._journal.append(Event("secret.unavailable", {**fields, "reason": code}))
        except AuditUnavailable:
            self._said.pop(key, None)

    def _digest(self, fields: Mapping[str, bytes]) -> str:
        """Of the one value, or of all with their names."""
        if len(fields) == 1:
            return fingerprint(next(iter(fields.values())), self._version_key)
        pieces = [piece for name, value in sorted(fields.items()) for piece in (name.encode(), value)]
        return fingerprint(b"".join(len(piece).to_bytes(4) + piece for piece in pieces), self._version_key)

    def _secret(self, document: Document, opened: Opened, path: str, field: str, *, scrub: bool) -> Secret:
        what = f"{opened.definition.name}:{path}"
        value = document.value(field, what)
        return make_secret(
            value,
            f"{what}#{field}" if field else what,
            scrub=scrub,
            version_key=self._version_key,
            version=document.version,
        )

    def _public(self, active: ActivePolicy, name: str, part: str) -> bool:
        definition = active.policy.credentials.get(CredentialRef(name))
        return definition is not None and is_public(definition.kind, part)

    # --- giving back

    def _dropped(self, key: Key, kept: _Kept) -> None:
        if kept.document.lease:
            self._return(key, kept)

    def _return(self, key: Key, kept: _Kept) -> None:
        if not kept.document.lease:
            return
        task = asyncio.get_running_loop().create_task(self._give_back(key, kept))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _give_back(self, key: Key, kept: _Kept) -> None:
        """Revoke a lease; after the last try its own end must do. On record either way."""
        fields: Fields = {"credential": key.credential or None, "source": kept.opened.definition.name}
        if key.owner is not None:
            fields |= {"tenant": key.owner[0], "sandbox": key.owner[1]}
        code = ""
        for wait in RETURNS:
            await asyncio.sleep(wait)
            try:
                async with asyncio.timeout(FLIGHT_SECONDS):
                    await kept.opened.source.revoke(kept.document)
            except BrokerError as error:
                code = error.code
            except TimeoutError:
                code = "source-unreachable"
            except Exception as error:
                complain("vault", "a lease could not be given back", error)
                code = "source-unreadable"
            else:
                code = ""
                break
        outcome: Fields = {"outcome": "failed" if code else "done", "reason": code or None}
        try:
            await self._journal.append(Event("lease.returned", {**fields, **outcome}))
        except AuditUnavailable as error:
            complain("vault", "the return of a lease could not be recorded", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A document with the source that gave it, which is the one to give it back to."""

    opened: Opened
    document: Document


def _key(name: str, opened: Opened, document: str, sandbox: Sandbox | None) -> Key:
    owner = (sandbox.tenant, sandbox.id) if opened.source.own and sandbox is not None else None
    return Key(credential=name, references=(f"{opened.definition.name}:{document}",), owner=owner)


def _times(opened: Opened) -> Times:
    definition = opened.definition
    ttl = float(MAX_SECONDS if opened.source.own else definition.ttl)  # a lease says itself how long it lives
    return Times(ttl=ttl, failure_ttl=float(definition.failure_ttl), stale=float(definition.stale))
