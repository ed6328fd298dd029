"""Fields of the vault's audit records: who, what was asked, what was judged. Never a value, only names."""

from __future__ import annotations

from audit.events import Value
from rules.facts import RequestFacts, Sandbox
from rules.names import Destination
from rules.placeholders import contains
from rules.policy import CredentialDef
from rules.slots import masked

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


def shown(text: str, credential: CredentialDef | None) -> str:
    """`text` without placeholders: `{credential:NAME}` for those of the permitted credential, else nothing of it."""
    text = text if credential is None else masked(credential, text)
    return "{credential:unknown}" if contains(text) else text


def attempt(facts: RequestFacts, credential: CredentialDef | None = None) -> Fields:
    """The request: query keys only, and the path without placeholders. `credential`: the one that was permitted."""
    destination: Destination = facts.destination
    path = facts.path.raw
    return {
        "method": facts.method,
        "scheme": destination.scheme,
        "host": destination.host.text,
        "port": destination.port,
        "path": shown(path, credential if not contains("\n".join(facts.path.segments)) or contains(path) else None),
        "query_keys": tuple(name for name, _ in facts.query.pairs if not contains(name)),
        "upgrade": facts.upgrade,
        "lane": "executor",
    }
