"""What every kind of credential is made of: its parts, its keys in credentials.yaml, where its placeholder stands.

One row per kind. The executor's half (how it is put on a request) is one file in broker/credentials/; kinds whose
parts a token endpoint turns into short-lived ones have another in broker/exchanges/. Both look here.

A *part* is one secret of a credential: `secret: "store:x"` names the part `value`; a mapping names several. A part is
secret unless its kind says that it is public (an account's name, a certificate): public parts are not scrubbed from
answers, because answers hold them rightly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

VALUE: Final = "value"
"""The part of a credential whose `secret:` is one reference."""
PART: Final = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
MAX_PARTS: Final = 8

Where = Literal["bearer", "basic", "header", "query", "cookie"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDef:
    """One kind. `keys` are its own keys in credentials.yaml, all optional here: its reader asks for what it needs."""

    name: str
    where: Where
    required: tuple[str, ...] = (VALUE,)
    optional: tuple[str, ...] = ()
    obtained: tuple[str, ...] = ()
    """Of a kind with an exchange: the parts that a token endpoint gives for the stored ones. They alone are applied."""
    public: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    """The names that `CredentialDef.params` may hold, each checked by the kind's reader."""

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    def wrong_parts(self, parts: Iterable[str]) -> str | None:
        """What is wrong with these part names, as a sentence; None where nothing is."""
        given = set(parts)
        missing = [name for name in self.required if name not in given]
        unknown = sorted(given - set(self.parts))
        if unknown:
            return f"kind: {self.name} has no part {unknown[0]}; it has {', '.join(self.parts)}"
        if missing:
            return f"kind: {self.name} needs the part {missing[0]} under secret:"
        return None


_ROWS = (
    KindDef(name="bearer", where="bearer"),
    KindDef(name="basic", where="basic", keys=("username",)),
    KindDef(name="header", where="header", keys=("header", "template")),
    KindDef(name="query", where="query", keys=("query",)),
)

KINDS: Final[Mapping[str, KindDef]] = {row.name: row for row in _ROWS}


def is_public(kind: str, part: str) -> bool:
    """Whether everyone may know this part. Of a kind that does not exist nothing is public."""
    row = KINDS.get(kind)
    return row is not None and part in row.public


def wrong_params(kind: str, params: Mapping[str, Any]) -> str | None:
    """What is wrong with a document's `params` for `kind`, as a sentence; None where nothing is."""
    row = KINDS.get(kind)
    if row is None:
        return "a kind that does not exist"
    unknown = sorted(set(params) - set(row.params))
    return f"kind {kind} has no parameter {unknown[0]}" if unknown else None
