"""`Exchanger`: the short-lived parts of a credential whose kind has an exchange, for one use.

    parts = await exchanger.parts(definition, references, stored, sandbox, places)

The stored parts are read at each use (supply.py), so that one which is gone refuses at once; what was obtained for them
is kept by the cache (material.py) for as long as it lives. Two uses share it where they would ask for the same with the
same: the key holds the plan and the versions of the stored parts.

Refresh tokens that are replaced when they are used have one writer. This vault is the only process of a node that
opens the store (the supervisor holds a lock on its folder), however many executors and workers ask it; in it one lock
for each stored token lets one exchange run at a time, whoever needs it and however it is narrowed. The order is: read
the token from the store, ask, write the next one to the store, and only then hand out what was obtained. So:

- two uses that come together make one exchange (cache) and never use one refresh token twice (lock);
- an exchange that began is finished and written even where nobody waits for it any more;
- a next token that could not be written is kept in memory and written before anything else is asked for;
- a crash between the endpoint's answer and the write loses the next token: the endpoint then says no to the old one
  (`exchange-refused`: invalid_grant), unless it gives a grace period. Nothing can prevent that from here; signing in
  again and `exeat secret rotate` mend it (docs/credentials.md).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from audit.events import Event
from audit.journal import AuditUnavailable, Journal
from broker.errors import BrokerError
from broker.exchanges import EXCHANGES
from broker.exchanges.base import AskEndpoint, Exchange, ExchangeError, Obtained, Plan, Wish
from broker.sources.env import fingerprint, make_secret
from broker.vault.clock import Clock
from broker.vault.material import Fresh, Key, MaterialCache, Times
from broker.vault.records import Fields
from broker.vault.secret import Secret
from broker.vault.store import SecretStore
from net.client import Answer, Endpoint, NoAnswer, Question
from net.trust import SYSTEM_TRUST, TrustKey
from rules.credential_kinds import is_public
from rules.facts import Sandbox
from rules.names import Destination, Owner
from rules.policy import CredentialDef, DestinationDef
from state.errors import StateError

TIMES: Final = Times(ttl=24 * 3600.0, failure_ttl=10.0)
"""What is obtained says itself how long it lives. Never stale: what is over, is over."""
MAX_SAID: Final = 4096
MAX_KEYS: Final = 4096
_TRANSIENT: Final = frozenset({"name-unresolved", "unreachable", "timed-out", "proxy-refused"})

Ask = Callable[[Question], Awaitable[Answer | NoAnswer]]
"""net.client.HttpClient.ask."""
WriteBack = Callable[[str, bytes, str], Awaitable[str]]
"""(name in the store, next value, credential): durable when it returns the new version. Raises BrokerError."""
Places = Mapping[str, DestinationDef]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unwritten:
    """A refresh token that is not in the store yet. `after`: the version that it replaces."""

    value: Secret = field(repr=False)
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A refresh token of the store. `line` counts how often somebody else than we gave it another value."""

    version: str
    line: int


class Exchanger:
    """One per vault."""

    def __init__(
        self,
        *,
        ask: Ask,
        store: SecretStore,
        write_back: WriteBack,
        journal: Journal,
        clock: Clock,
        random: Callable[[], float],
        version_key: bytes,
        exchanges: Mapping[str, Exchange] = EXCHANGES,
    ) -> None:
        """`random` gives numbers from 0 to 1."""
        self._ask = ask
        self._store = store
        self._write_back = write_back
        self._journal = journal
        self._clock = clock
        self._version_key = version_key
        self._exchanges = exchanges
        self._cache: MaterialCache[Mapping[str, Secret]] = MaterialCache(now=clock.boot, random=random)
        self._locks: dict[str, asyncio.Lock] = {}
        self._tokens: dict[str, _Token] = {}
        self._unwritten: dict[str, _Unwritten] = {}
        self._last: OrderedDict[tuple[str, Owner], Key] = OrderedDict()
        self._said: OrderedDict[Key, str] = OrderedDict()
        self._finishing: set[asyncio.Task[Any]] = set()

    def exchanges(self, kind: str) -> bool:
        """Whether what is stored of `kind` is exchanged before it is used."""
        return kind in self._exchanges

    async def parts(
        self,
        definition: CredentialDef,
        references: Mapping[str, str],
        stored: Mapping[str, Secret],
        sandbox: Sandbox,
        places: Places,
    ) -> Mapping[str, Secret]:
        """The short-lived parts. `references`: part -> its reference, expanded. Raises BrokerError."""
        exchange = self._exchanges[definition.kind]
        plan = exchange.plan(definition, sandbox)
        key = self._key(definition, plan, references, stored, sandbox)
        copy = await self._cache.get(
            key, TIMES, partial(self._fly, key, definition, exchange, plan, references, stored, places)
        )
        self._last[definition.name, (sandbox.tenant, sandbox.id)] = key
        while len(self._last) > MAX_KEYS:
            self._last.popitem(last=False)
        return copy.value

    def parts_in_use(self, credential: str, sandbox: Sandbox) -> Mapping[str, Secret]:
        """What this sandbox was last given of a credential and may still be using; {} where that is nothing."""
        key = self._last.get((credential, (sandbox.tenant, sandbox.id)))
        copy = None if key is None else self._cache.peek(key)
        return {} if copy is None else copy.value

    def reject(self, credential: str, owner: Owner) -> bool:
        """An upstream refused it. True where asking anew may give something else."""
        return self._cache.reject(credential, owner) > 0

    def could_reject(self, credential: str, owner: Owner) -> bool:
        return self._cache.could_reject(credential, owner)

    def invalidate(self, credential: str | None = None) -> int:
        return self._cache.invalidate(credential)

    def ended(self, owner: Owner) -> int:
        for entry in [entry for entry in self._last if entry[1] == owner]:
            del self._last[entry]
        return self._cache.forget(owner)

    async def close(self) -> None:
        """Obtain nothing any more; returns when every exchange that began is finished and written."""
        await self._cache.close()
        await asyncio.gather(*self._finishing, return_exceptions=True)

    # --- keys

    def _key(
        self,
        definition: CredentialDef,
        plan: Plan,
        references: Mapping[str, str],
        stored: Mapping[str, Secret],
        sandbox: Sandbox,
    ) -> Key:
        versions = [f"{part}={secret.version}" for part, secret in sorted(stored.items()) if part != plan.rotates]
        if plan.rotates:
            versions.append(f"{plan.rotates}:{self._line(references[plan.rotates], stored[plan.rotates].version)}")
        return Key(
            credential=definition.name,
            references=tuple(reference for _, reference in sorted(references.items())),
            narrowing=f"{plan.text} {' '.join(versions)}",
            owner=(sandbox.tenant, sandbox.id) if plan.own else None,
        )

    def _line(self, reference: str, version: str) -> int:
        """Our own replacing of a refresh token does not make what it gave another thing; an operator's does."""
        known = self._tokens.get(reference)
        if known is None or known.version != version:
            known = _Token(version=version, line=0 if known is None else known.line + 1)
            self._tokens[reference] = known
        return known.line

    # --- asking

    async def _fly(
        self,
        key: Key,
        definition: CredentialDef,
        exchange: Exchange,
        plan: Plan,
        references: Mapping[str, str],
        stored: Mapping[str, Secret],
        places: Places,
        before: object,
    ) -> Fresh[Mapping[str, Secret]]:
        """One question, on record. Raises BrokerError."""
        fields: Fields = {"credential": key.credential, "source": definition.kind}
        if key.owner is not None:
            fields |= {"tenant": key.owner[0], "sandbox": key.owner[1]}
        ask = partial(self._asked, places)
        try:
            if plan.rotates:
                work = self._refresh(definition, exchange, plan, references[plan.rotates], stored, ask)
                obtained = await asyncio.shield(self._finish(work))
            else:
                obtained = await exchange.obtain(plan, stored, ask, self._clock.wall())
            parts = {part: self._secret(definition, part, value) for part, value in obtained.parts.items()}
        except BrokerError as error:
            await self._say_no(key, fields, error.code)
            raise
        self._said.pop(key, None)
        digest = fingerprint(b"\0".join(value for _, value in sorted(obtained.parts.items())), self._version_key)
        try:
            await self._journal.append(
                Event("secret.fetched", {**fields, "fingerprint": digest, "ttl_s": int(obtained.lasts)})
            )
        except AuditUnavailable:
            raise ExchangeError(
                "exchange-refused", "the log cannot be written, so nothing is taken up", transient=True
            ) from None
        return Fresh(value=parts, lasts=obtained.lasts)

    async def _refresh(
        self,
        definition: CredentialDef,
        exchange: Exchange,
        plan: Plan,
        reference: str,
        stored: Mapping[str, Secret],
        ask: AskEndpoint,
    ) -> Obtained:
        """One exchange with a refresh token, and its next value stored before anything is handed out."""
        name = reference.partition(":")[2]
        async with self._locks.setdefault(name, asyncio.Lock()):
            token = self._store.read(name)  # now, not before the lock: whoever held it may have replaced the token
            unwritten = self._unwritten.get(name)
            if unwritten is not None and unwritten.after == token.version:
                await self._write(definition, reference, unwritten.value, token.version)
                token = unwritten.value
            self._unwritten.pop(name, None)
            parts = {**stored, plan.rotates: token}
            obtained = await exchange.obtain(plan, parts, ask, self._clock.wall())
            if plan.rotates in obtained.rotated:
                fresh = Secret(obtained.rotated[plan.rotates], name=name)
                await self._write(definition, reference, fresh, self._store.read(name).version)
            return obtained

    async def _write(self, definition: CredentialDef, reference: str, value: Secret, after: str) -> None:
        """Put the next refresh token into the store. Raises ExchangeError(`exchange-unwritten`), and keeps it then."""
        name = reference.partition(":")[2]
        try:
            version = await self._write_back(name, value.reveal(), definition.name)
        except (BrokerError, StateError, AuditUnavailable, OSError):
            self._unwritten[name] = _Unwritten(value=value, after=after)
            raise ExchangeError(
                "exchange-unwritten",
                f"the next refresh token could not be written to store:{name}",
                "see the vault's messages; it is kept in memory and tried again",
                transient=True,
            ) from None
        line = self._tokens[reference].line if reference in self._tokens else 0
        self._tokens[reference] = _Token(version=version, line=line)

    def _finish[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """`work` beside whoever waits for it: it goes on where that one is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._finishing.add(task)

        def done(finished: asyncio.Task[T]) -> None:
            self._finishing.discard(finished)
            if not finished.cancelled():
                finished.exception()  # taken: whoever waits for it gets it too

        task.add_done_callback(done)
        return task

    async def _asked(self, places: Places, plan: Plan, wish: Wish) -> Answer:
        """POST to the plan's endpoint, reached as the operator's `destinations:` say. Raises ExchangeError."""
        question = Question(
            endpoint=_endpoint(plan.destination, places),
            method="POST",
            target=plan.target,
            headers=wish.headers,
            body=wish.body,
        )
        answer = await self._ask(question)
        match answer:
            case Answer():
                return answer
            case NoAnswer(code=code, detail=detail):
                transient = code in _TRANSIENT
                fault = "exchange-unreachable" if transient else "exchange-answer"
                raise ExchangeError(fault, f"{plan.destination}: {code}: {detail}", transient=transient)

    def _secret(self, definition: CredentialDef, part: str, value: bytes) -> Secret:
        scrub = definition.scrub and not is_public(definition.kind, part)
        return make_secret(value, f"{definition.name}#{part}", scrub=scrub, version_key=self._version_key)

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


def _endpoint(destination: Destination, places: Places) -> Endpoint:
    """How a token endpoint is reached. Clear text only where the operator's own file says so. Raises ExchangeError."""
    place = places.get(destination.host.text)
    if destination.scheme == "http" and (place is None or place.scheme != "http"):
        raise ExchangeError("exchange-material", "secrets are sent over https", "destinations: may say scheme: http")
    if place is None:
        return Endpoint(destination=destination)
    return Endpoint(
        destination=destination,
        addresses=place.addresses,
        static=place.static,
        trust=SYSTEM_TRUST if place.ca_pem is None else TrustKey(ca_pem=place.ca_pem),
    )
