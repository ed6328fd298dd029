"""Tokens that an answer brought and the broker kept: where their placeholders stand (decision 16).

A mint operation says which fields of its answer are authority (`answer: {capture: [...]}`), other operations of the
same service say that they take such a token (`takes: bearer`). In a rule with a credential that has both, the sandbox
gets a placeholder for each token, and the token goes where that rule permits an operation that takes it, and nowhere
else: hosts, slot and effects are the rule's, nothing of them is the answer's.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from rules.credential_slots import NOT_SLOT_PREFIXES, NOT_SLOTS
from rules.names import Destination
from rules.policy import CredentialDef, Operation, PlaceholderSpec, Rule, Slot

SHAPE: Final = "{64}"
"""Of placeholders for captured tokens: what no client parses."""
MAX_FIELDS: Final = 16
MAX_ANSWER: Final = 256 << 10
"""Bytes of an answer that is captured from, after decoding."""
BEARER: Final = "bearer"
_HEADER = re.compile(r"[a-z][a-z0-9-]{0,63}\Z")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}(?:\.[A-Za-z_][A-Za-z0-9_-]{0,63}){0,3}\Z")


def check_fields(fields: tuple[str, ...]) -> None:
    """Raise ValueError unless `fields` name what is captured: `token`, `session.key`."""
    if not fields or len(fields) > MAX_FIELDS or len(set(fields)) != len(fields):
        raise ValueError("name each captured field once, at least one")
    if not all(_FIELD.match(name) for name in fields):
        raise ValueError("a captured field is names joined by dots")


def check_taking(takes: str) -> None:
    """Raise ValueError unless `takes` is `bearer` or the lower-case name of a header."""
    if (
        not _HEADER.match(takes)
        or takes == "authorization"
        or takes in NOT_SLOTS
        or takes.startswith(NOT_SLOT_PREFIXES)
    ):
        raise ValueError("takes: bearer, or the name of the header that the token stands in")


def takes_of(rule: Rule, op: Operation) -> str:
    """What `op` takes under `rule`: "" where no operation of it brings tokens, and `op` is given the credential."""
    if not op.takes or rule.credential is None or not any(other.captures for other in rule.operations):
        return ""
    return op.takes


def captured_form(credential: CredentialDef, destination: Destination, takes: str) -> CredentialDef:
    """`credential` as it is where a captured token stands for it: one slot, at this very place."""
    slot = Slot(where="bearer") if takes == BEARER else Slot(where="header", name=takes)
    return replace(
        credential,
        kind="bearer" if takes == BEARER else "header",
        slot=slot,
        hosts=(destination.host,),
        authorities=((destination.host.text, destination.port),),
        placeholder=PlaceholderSpec(env="", shape=SHAPE),
        scrub=True,
        username=None,
        params={},
        more_slots=(),
        more_placeholders=(),
    )
