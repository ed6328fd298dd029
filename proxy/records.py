"""Audit records of this room, made from values that were judged: who, attempt, judgement, outcome.

Rules: no query value, header value, token or placeholder enters, but for the scopes of a token call of which fewer are
granted than were asked for (decision 13). A placeholder inside a path or query name is
masked (`{placeholder}`); where no facts could be made of an attempt, nothing of its target is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from audit.events import Event, Value
from rules.facts import RequestFacts, Sandbox
from rules.narrowing import scopes
from rules.placeholders import find
from rules.policy import CredentialDef
from rules.slots import masked

type Fields = dict[str, Value | list[str] | None]

MAX_NAME = 128
"""Characters of one query name as recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the connection showed besides the request itself. Names as the client sent them, canonical or empty."""

    lane: str = ""
    connect_host: str = ""
    """`host:port` of the CONNECT; empty for a request to the proxy itself."""
    sni: str = ""
    host_header: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a passage. `error` is a reason code or error class; empty: nothing went wrong."""

    status: int = 0
    """Sent to the client; 0: no head was sent."""
    upstream_status: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    completed: bool = False
    error: str = ""
    detail: str = ""
    """A sentence of ours for the operator; never text from a peer, never shown to the client."""
    address: str = ""
    tls: str = ""
    redirect_host: str = ""
    """The other host that the answer leads to."""


def who(sandbox: Sandbox | None) -> Fields:
    """The fields that say whose it is; empty before identity is known."""
    if sandbox is None:
        return {}
    return {
        "tenant": sandbox.tenant,
        "sandbox": sandbox.id,
        "owner": sandbox.owner,
        "agent": sandbox.agent,
        "task": sandbox.task,
        "role": sandbox.role,
        "epoch": sandbox.epoch,
    }


def seen(what: Seen) -> Fields:
    """The names that the connection showed."""
    return {
        "lane": what.lane or None,
        "connect_host": what.connect_host or None,
        "sni": what.sni or None,
        "host_header": what.host_header or None,
    }


def attempt(facts: RequestFacts, credential: CredentialDef | None = None) -> Fields:
    """The canonical tuple of a request, values of the query left out; where it was narrowed, what of it.

    `credential` is the one that was permitted: a placeholder in its slot is shown by its name.
    """
    destination = facts.destination
    agents = facts.header("user-agent")
    smaller: Fields = {}
    if facts.asked is not None:
        smaller = {"asked": [mask(scope) for scope in scopes(facts.asked)], "granted": list(scopes(facts.query))}
    return {
        "method": facts.method,
        "scheme": destination.scheme,
        "host": destination.host.text,
        "port": destination.port,
        "path": mask(facts.path.raw, credential),
        "query_keys": [mask(name)[:MAX_NAME] for name, _ in facts.query.pairs] or None,
        "user_agent": agents[0] if agents else None,
        "upgrade": facts.upgrade,
        "body_bytes": len(facts.body) if isinstance(facts.body, bytes) else None,
        **smaller,
    }


def outcome(result: Outcome, duration_us: int) -> Fields:
    """The fields of an outcome record."""
    return {
        "status": result.status or None,
        "upstream_status": result.upstream_status or None,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "completed": result.completed,
        "error": result.error,
        "detail": result.detail or None,
        "address": result.address or None,
        "tls": result.tls or None,
        "redirect_host": result.redirect_host or None,
        "duration_us": duration_us,
    }


def mask(text: str, credential: CredentialDef | None = None) -> str:
    """`text` with every placeholder core replaced; those of `credential` whole, by its name (RULINGS 4.4)."""
    if credential is not None:
        text = masked(credential, text)
    for core in find(text):
        text = text.replace(core, "{placeholder}")
    return text


def event(name: str, *parts: Fields) -> Event:
    """One event from its parts; fields that say nothing are left out. Raises audit.events.EventInvalid."""
    fields: Fields = {}
    for part in parts:
        fields.update((key, value) for key, value in part.items() if value is not None)
    return Event(name, fields)
