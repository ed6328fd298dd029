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
from typing import Any, Final

from rules.policy import Where

VALUE: Final = "value"
"""The part of a credential whose `secret:` is one reference."""
PART: Final = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
MAX_PARTS: Final = 8


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
    open: bool = False
    """The parts are those that its slots name, whatever they are called."""
    needs_placeholder: bool = True
    """Clients send something for it. Else a placeholder is for programs that want one before they start."""
    params: tuple[str, ...] = ()
    """The names that `CredentialDef.params` may hold, each checked by the kind's reader."""

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    def wrong_parts(self, parts: Iterable[str], named: Iterable[str] = ()) -> str | None:
        """What is wrong with these part names, as a sentence; None where nothing is. `named`: those that slots name."""
        given, own = set(parts), (tuple(dict.fromkeys(named)) if self.open else self.parts)
        missing = [name for name in (own if self.open else self.required) if name not in given]
        unknown = sorted(given - set(own))
        if unknown:
            return f"kind: {self.name} has no part {unknown[0]} here; it has {', '.join(own)}"
        if missing:
            return f"kind: {self.name} needs the part {missing[0]} under secret:"
        return None


_OAUTH2 = tuple(
    "token_url grant client_auth scopes audience resource key_id issuer subject "
    "subject_token_type actor_token_type requested_token_type".split()
)
_GITHUB_APP = ("app_id", "installation_id", "api_url", "repositories", "permissions")
_GOOGLE = ("token_url", "scopes", "audience", "subject")
_AZURE = ("tenant", "authority", "scope")
_AWS_STS = ("role_arn", "sts_url", "external_id", "duration", "session_policy")

_ROWS = (
    KindDef(name="bearer", where="bearer"),
    KindDef(name="basic", where="basic", keys=("username",)),
    KindDef(name="header", where="header", keys=("header", "template", "also")),
    KindDef(name="query", where="query", keys=("query",)),
    KindDef(name="headers", where="header", keys=("headers",), open=True),
    KindDef(name="cookie", where="cookie", keys=("cookie",), open=True),
    KindDef(name="path", where="path", keys=("path",)),
    KindDef(name="body", where="body", keys=("field",), open=True),
    KindDef(name="subprotocol", where="subprotocol", keys=("subprotocol", "encoding")),
    KindDef(
        name="sigv4",
        where="sigv4",
        required=("access_key_id", "secret_access_key"),
        optional=("session_token",),
        public=frozenset({"access_key_id"}),
        keys=("regions", "aws_services"),
        params=("regions", "services"),
    ),
    KindDef(
        name="hmac",
        where="signature",
        optional=("key_id",),
        public=frozenset({"key_id"}),
        keys=(
            "header",
            "sign",
            "template",
            "algorithm",
            "encoding",
            "key_encoding",
            "clock",
            "timestamp_header",
            "key_id_header",
        ),
        needs_placeholder=False,
        params=("sign", "template", "algorithm", "encoding", "key_encoding", "clock", "timestamp_header"),
    ),
    KindDef(
        name="totp",
        where="signature",
        keys=("header", "template", "digits", "period", "algorithm"),
        needs_placeholder=False,
        params=("digits", "period", "algorithm"),
    ),
    KindDef(
        name="mtls",
        where="none",
        required=("certificate", "key"),
        public=frozenset({"certificate"}),
        needs_placeholder=False,
    ),
    # With an exchange (rules/exchanges.py): what is stored goes to a token endpoint, what comes back on the request.
    KindDef(
        name="oauth2",
        where="bearer",
        required=(),
        optional=("client_id", "client_secret", "private_key", "refresh_token", "subject_token", "actor_token"),
        obtained=(VALUE,),
        public=frozenset({"client_id"}),
        keys=(*_OAUTH2, "header", "template", "stub"),
        params=(*_OAUTH2, "stub"),
    ),
    KindDef(
        name="github-app",
        where="bearer",
        required=("private_key",),
        obtained=(VALUE,),
        keys=(*_GITHUB_APP, "header", "template"),
        params=_GITHUB_APP,
    ),
    KindDef(
        name="google",
        where="bearer",
        obtained=(VALUE,),
        keys=(*_GOOGLE, "header", "template", "stub"),
        params=(*_GOOGLE, "stub"),
    ),
    KindDef(
        name="azure",
        where="bearer",
        required=("client_id",),
        optional=("client_secret", "certificate", "private_key"),
        obtained=(VALUE,),
        public=frozenset({"client_id", "certificate"}),
        keys=(*_AZURE, "header", "template", "stub"),
        params=(*_AZURE, "stub"),
    ),
    KindDef(
        name="aws-sts",
        where="sigv4",
        required=("access_key_id", "secret_access_key"),
        optional=("session_token",),
        obtained=("access_key_id", "secret_access_key", "session_token"),
        public=frozenset({"access_key_id"}),
        keys=("regions", "aws_services", *_AWS_STS, "stub"),
        params=("regions", "services", *_AWS_STS, "stub"),
    ),
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
