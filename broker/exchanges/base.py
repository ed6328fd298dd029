"""The contract of an exchange: a plan made from operator data and one sandbox, then one question to a token endpoint.

    plan = exchange.plan(definition, sandbox)            pure: what will be asked for; equal plans give equal tokens
    obtained = await exchange.obtain(plan, parts, ask, now)

Where a question goes stands in credentials.yaml (`definition.params`, checked when it was loaded), never in policy,
never in a stored secret, never in an answer: a service account's own `token_uri` is not read, and no redirect followed.
What is asked for may be narrowed by `${sandbox.x}`; an attribute that is not one plain word refuses.

What goes wrong is an ExchangeError with a fixed code. Of an answer that says no, only an error word that RFC 6749 or
RFC 8693 lists is repeated; the server's own text is not (it may quote what we sent).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

from broker.errors import BrokerError
from broker.vault.secret import MIN_SECRET_BYTES, Secret
from net.client import Answer
from rules.exchanges import place_of
from rules.facts import Sandbox
from rules.names import Destination, InvalidName
from rules.operations.strict_json import InvalidJson, load
from rules.policy import CredentialDef

MAX_TOKEN_BYTES: Final = 16 * 1024
MIN_LIFE: Final = 30
"""Seconds. A token that lives shorter is over before it was used."""
MAX_LIFE: Final = 24 * 3600
"""Seconds. However long a token may live, after a day another one is asked for."""
UNSAID_LIFE: Final = 300
"""Seconds, where the answer does not say (RFC 6749 section 5.1: RECOMMENDED only)."""
MAX_DEPTH: Final = 8
MAX_NODES: Final = 2000

_TOKEN = re.compile(rf"[\x21-\x7e]{{{MIN_SECRET_BYTES},{MAX_TOKEN_BYTES}}}\Z")
_VARIABLE = re.compile(r"\$\{sandbox\.([a-z][a-z0-9_]{0,31})\}")
_WORD = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?\Z")

# RFC 6749 section 5.2, RFC 8693 section 2.2.2, RFC 8707 section 2, RFC 7521 section 4.1.1.
_REFUSALS: Final[Mapping[str, str]] = {
    "invalid_client": "it does not know this client, or not with this secret",
    "invalid_grant": "what was presented is wrong, used up or over; sign in again and store what you get",
    "unauthorized_client": "this client may not use this grant",
    "unsupported_grant_type": "it does not have this grant",
    "invalid_scope": "it does not give this scope",
    "invalid_target": "it does not give tokens for this audience",
    "invalid_request": "it does not understand the request",
    "access_denied": "it denied access",
}


class ExchangeError(BrokerError):
    """There is no short-lived part now.

    `code`: exchange-unreachable (nobody answered, transient), exchange-refused (it said no), exchange-answer (what it
    said is no token), exchange-material (what is stored cannot be used, or the sandbox has no such attribute),
    exchange-unwritten (a rotated token could not be stored, transient).
    """

    def __init__(self, code: str, detail: str = "", remedy: str = "", *, transient: bool = False) -> None:
        super().__init__(code, detail, remedy)
        self.transient = transient


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be asked of whom. Holds no secret; `text` of it is part of a cache key."""

    destination: Destination
    target: str
    """The endpoint's path and query."""
    asks: Mapping[str, Any]
    """The definition's own parameters with every `${sandbox.x}` replaced."""
    own: bool = False
    """What is obtained is for this one sandbox and ends with it."""
    rotates: str = ""
    """The part that the endpoint may replace when it is used, "" for none."""

    @property
    def url(self) -> str:
        return f"{self.destination}{self.target}"

    @property
    def text(self) -> str:
        """One spelling of everything asked for."""
        return f"{self.url} {sorted(self.asks.items())!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obtained:
    """What a token endpoint gave. `lasts` in seconds, our margin already taken off."""

    parts: Mapping[str, bytes] = field(repr=False)
    lasts: float
    rotated: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Stored parts with their next value: kept before `parts` are used, or the credential is lost at the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One request to the endpoint of a plan, before anybody knows how that is reached."""

    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)


AskEndpoint = Callable[[Plan, Wish], Awaitable[Answer]]
"""POSTs a wish to the plan's endpoint. Raises ExchangeError(`exchange-unreachable`); never follows a redirect."""


class Exchange(Protocol):
    """One kind. Both methods raise ExchangeError; `obtain` also CancelledError."""

    def plan(self, definition: CredentialDef, sandbox: Sandbox) -> Plan:
        """Pure."""
        ...

    async def obtain(self, plan: Plan, parts: Mapping[str, Secret], ask: AskEndpoint, now: float) -> Obtained:
        """Ask once. `now` is Unix time in seconds."""
        ...


# what plans are made with


def endpoint(url: str) -> tuple[Destination, str]:
    """An endpoint's destination and target. Raises ExchangeError for what credentials.yaml would have refused."""
    try:
        return place_of(url)
    except InvalidName:
        raise ExchangeError("exchange-material", "the endpoint is not a URL of ours") from None


def expand(text: str, sandbox: Sandbox) -> str:
    """`text` with each `${sandbox.x}` replaced by one plain word. Raises ExchangeError(`exchange-material`)."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        own = {"id": sandbox.id, "owner": sandbox.owner, "agent": sandbox.agent, "task": sandbox.task}
        word = sandbox.attributes.get(name, own.get(name, ""))
        if not _WORD.match(word):
            raise ExchangeError("exchange-material", f"the sandbox has no plain attribute {name}")
        return word

    return _VARIABLE.sub(value, text)


def expand_all(value: Any, sandbox: Sandbox) -> Any:
    """The same inside lists and mappings (values only: keys are ours)."""
    match value:
        case str():
            return expand(value, sandbox)
        case list() | tuple():
            return tuple(expand_all(item, sandbox) for item in value)
        case Mapping():
            return {key: expand_all(item, sandbox) for key, item in sorted(value.items())}
        case _:
            return value


# what answers are read with


def text_of(parts: Mapping[str, Secret], name: str) -> str:
    """A stored part as text. Raises ExchangeError(`exchange-material`) where it is missing or not ASCII."""
    secret = parts.get(name)
    if secret is None:
        raise ExchangeError("exchange-material", f"the credential has no part {name}")
    try:
        return secret.reveal().decode("ascii")
    except UnicodeDecodeError:
        raise ExchangeError("exchange-material", f"the part {name} is not ASCII") from None


def read_json(answer: Answer, accepted: int = 200) -> Mapping[str, Any]:
    """The JSON object of an answer that says yes. Raises ExchangeError."""
    if answer.status != accepted:
        check_now(answer)
        _refused(answer)
    media = (answer.header("content-type") or "").partition(";")[0].strip().lower()
    if media != "application/json":
        _no_token("its answer is not JSON")
    return _object(answer)


def token_of(answer: Mapping[str, Any], name: str) -> bytes:
    """A token that may stand in a header as it is. Raises ExchangeError(`exchange-answer`)."""
    value = answer.get(name)
    if not isinstance(value, str) or not _TOKEN.match(value):
        _no_token(f"its answer has no {name} that can stand in a header, of {MIN_SECRET_BYTES} bytes or more")
    return value.encode("ascii")


def life_of(answer: Mapping[str, Any], name: str = "expires_in") -> float:
    """Seconds that a token may be used, less a margin. Numbers may be written as text, as some servers do."""
    value = answer.get(name)
    if value is None:
        return bounded_life(float(UNSAID_LIFE))
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        _no_token(f"{name} is not a number of seconds")
    return bounded_life(float(value))


def bounded_life(seconds: float) -> float:
    """`seconds` within our bounds, with a tenth and at most a minute taken off: a token must not end on its way."""
    if not seconds >= MIN_LIFE:
        _no_token(f"the token would live less than {MIN_LIFE} seconds")
    return min(seconds, MAX_LIFE) - min(60.0, seconds / 10)


def check_now(answer: Answer) -> None:
    """Raise where the answer is neither yes nor no: the endpoint cannot now, or is elsewhere."""
    if answer.status in (408, 425, 429) or answer.status >= 500:
        raise ExchangeError(
            "exchange-unreachable", f"the token endpoint answered {answer.status}", "try again later", transient=True
        )
    if 300 <= answer.status < 400:
        raise ExchangeError(
            "exchange-answer", "the token endpoint leads elsewhere", "name in credentials.yaml where it is now"
        )


def _refused(answer: Answer) -> NoReturn:
    word = ""
    try:
        found = load(answer.body, depth=MAX_DEPTH, nodes=MAX_NODES)
        word = found.get("error", "") if isinstance(found, dict) else ""
    except InvalidJson:
        pass
    why = _REFUSALS.get(word) if isinstance(word, str) else None
    said = f": {word}: {why}" if why else ""
    raise ExchangeError("exchange-refused", f"the token endpoint answered {answer.status}{said}")


def _object(answer: Answer) -> Mapping[str, Any]:
    try:
        found = load(answer.body, depth=MAX_DEPTH, nodes=MAX_NODES)
    except InvalidJson:
        _no_token("its answer is not strict JSON")
    if not isinstance(found, dict):
        _no_token("its answer is not a JSON object")
    return found


def _no_token(why: str) -> NoReturn:
    raise ExchangeError("exchange-answer", f"the token endpoint gave no token: {why}")


FORM: Final = ("Content-Type", "application/x-www-form-urlencoded")
JSON: Final = ("Accept", "application/json")
