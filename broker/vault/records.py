"""Fields of the vault's audit records: who, what was asked, what was judged. Never a value, only names."""

from __future__ import annotations

from audit.events import Value
from rules.facts import RequestFacts, Sandbox
from rules.names import Destination
from rules.placeholders import contains

Fields = dict[str, Value | list[str] | None]


def who(sandbox: Sandbox) -> Fields:
    """The common fields of every record about a sandbox (RULINGS 9.9)."""
    return {
        "tenant": sandbox.tenant,
        "sandbox": sandbox.id,
        "epoch": sandbox.epoch,
        "owner": sandbox.owner,
        "agent": sandbox.agent,
        "task": sandbox.task,
        "role": sandbox.role,
    }


def attempt(facts: RequestFacts) -> Fields:
    """The request: query keys only, and the path without placeholders (a head with one in its path is refused)."""
    destination: Destination = facts.destination
    path = facts.path.raw
    return {
        "method": facts.method,
        "scheme": destination.scheme,
        "host": destination.host.text,
        "port": destination.port,
        "path": "{credential:unknown}" if contains("\n".join((path, *facts.path.segments))) else path,
        "query_keys": tuple(name for name, _ in facts.query.pairs if not contains(name)),
        "upgrade": facts.upgrade,
        "lane": "executor",
    }
