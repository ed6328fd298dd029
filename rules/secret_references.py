"""References: how credentials.yaml says where a secret is, without ever holding one.

    secret: "store:shop/orders"                                  one part, called `value`
    secret: {access_key_id: "env:AKID", secret_access_key: "..."}   several parts
    secret: "corp-vault:kv/team/github#token"                    a source of the operator's `sources:`
    secret: {from: corp-vault, mount: kv, path: team/github, field: token}      the same, typed

A reference is `SOURCE:NAME`. `env`, `file`, `store` and `systemd` are at hand and need no entry under `sources:`;
what follows them is the name as it stands. Every other source is one of `sources:` (rules/secret_sources.py), and

    NAME = DOCUMENT[#FIELD]     DOCUMENT = PATH[?KEY=VALUE]      with the path and the keys that the source's kind has

Both forms give one text, the first one, which is what the vault works with. In a path `${sandbox.x}` stands for one
word of the sandbox. References are the operator's: policy never holds one (RULINGS 3.6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rules import grammar
from rules.reader import Node

FROM: Final = "from"
"""The key that tells a typed reference from a mapping of parts."""
WHOLE: Final = ""
"""The field of a document that is one value."""

_STEP = r"[^\x00-\x1f\x7f/?#]+"
_FIELD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,127}\Z")
_VALUE = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What may follow `SOURCE:` for one kind of source.

    `typed`: the keys of the typed form whose values are joined by `/` to the path, those that are optional with `?`.
    """

    path: re.Pattern[str]
    typed: tuple[str, ...]
    keys: tuple[str, ...] = ()
    """Keys after `?`: at most one of them in a reference."""
    field: bool = False
    """Whether `#FIELD` may follow."""
    prefix: str = ""
    """Stands before the path."""


def _path(first: str = "") -> re.Pattern[str]:
    return re.compile(rf"{first}{_STEP}(?:/{_STEP})*\Z")


_WORDS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.@+-]*)*\Z")

AT_HAND: Final[Mapping[str, Grammar]] = {
    "env": Grammar(path=re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z"), typed=("name",)),
    "file": Grammar(path=re.compile(r"/?[^\x00-\x1f\x7f/]+(?:/[^\x00-\x1f\x7f/]+)*\Z"), typed=("path",)),
    "store": Grammar(
        path=re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*\Z"), typed=("name",)
    ),
    "systemd": Grammar(path=re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}\Z"), typed=("name",)),
}
"""Sources that need no entry of their own. Read at each use."""

KINDS: Final[Mapping[str, Grammar]] = {
    "vault": Grammar(path=_path(), typed=("mount?", "path"), keys=("version",), field=True),
    "vault-dynamic": Grammar(path=_path(), typed=("mount?", "path"), field=True),
    "aws-secrets-manager": Grammar(
        path=re.compile(r"[A-Za-z0-9/_+=.@:-]{1,512}\Z"), typed=("name",), keys=("version", "stage"), field=True
    ),
    "aws-parameter-store": Grammar(
        path=re.compile(r"[A-Za-z0-9/_.:-]{1,1024}\Z"), typed=("name",), keys=("version",), field=True
    ),
    "gcp-secret-manager": Grammar(
        path=re.compile(r"[A-Za-z0-9_-]{1,255}\Z"), typed=("name",), keys=("version",), field=True
    ),
    "azure-key-vault": Grammar(
        path=re.compile(r"[A-Za-z0-9-]{1,127}\Z"), typed=("name",), keys=("version",), field=True
    ),
    "onepassword": Grammar(
        path=re.compile(rf"//(?:{_STEP}/){{2,3}}{_STEP}\Z"),
        typed=("vault", "item", "section?", "field"),
        keys=("attribute",),
        prefix="//",
    ),
    "sops": Grammar(path=_path("/"), typed=("path",), field=True),
    "age": Grammar(path=_path("/"), typed=("path",), field=True),
    "keyring": Grammar(path=re.compile(rf"{_STEP}/{_STEP}\Z"), typed=("service", "user")),
    "exec": Grammar(path=_WORDS, typed=("name",), field=True),
}
"""Kinds of `sources:`, with what a reference to one of them looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference taken apart. `document` is what the source is asked for, `field` what is taken from the answer."""

    source: str
    document: str
    field: str = WHOLE


def split(reference: str) -> Reference:
    """Take apart what `read_reference` returned, `${sandbox.x}` replaced or not."""
    source, _, name = reference.partition(":")
    if source in AT_HAND:
        return Reference(source=source, document=name)
    document, _, field = name.partition("#")
    return Reference(source=source, document=document, field=field)


def read_reference(node: Node, sources: Mapping[str, str]) -> str:
    """The one text of a reference in either form. `sources`: name -> kind of the operator's. Raises Rejected."""
    if isinstance(node.value, dict):
        return _typed(node, sources)
    text = node.text()
    source, colon, name = text.partition(":")
    known = (*AT_HAND, *sources)
    # The text is not shown: it may be the secret itself, pasted.
    if not colon or source not in known:
        hint = "" if sources else "; others are defined under sources:"
        listed = ", ".join(f"{word}:" for word in known)
        node.fail(f"a secret is named by its source ({listed}), never written here{hint}")
    _check(node, source, name, sources)
    return text


def read_at_hand(node: Node) -> str:
    """A reference that a source may be opened by itself: at hand, and the same for every sandbox. Raises Rejected."""
    text = node.text()
    source, colon, name = text.partition(":")
    if not colon or source not in AT_HAND:
        listed = ", ".join(f"{word}:" for word in AT_HAND)
        node.fail(f"what a source is opened with is named by its place ({listed}), never written here")
    if "${" in name:
        node.fail("a source is the same for every sandbox; ${sandbox.x} stands in references to it")
    _check(node, source, name, {})
    return text


def _typed(node: Node, sources: Mapping[str, str]) -> str:
    entries = dict(node.entries())
    if FROM not in entries:
        node.fail("a typed reference says from: which source, and what it is called there")
    source = entries[FROM].word((*AT_HAND, *sources))
    rules = _grammar(source, sources)
    required = [key for key in rules.typed if not key.endswith("?")]
    optional = [key.removesuffix("?") for key in rules.typed if key.endswith("?")]
    more = (*rules.keys, *(("field",) if rules.field else ()))
    fields = node.fields(" ".join((FROM, *required)), " ".join((*optional, *more)))
    steps = []
    for key in (key.removesuffix("?") for key in rules.typed):
        if key in fields:
            step = fields[key].text()
            if source not in AT_HAND and ("?" in step or "#" in step):
                fields[key].fail(f"{key}: holds no ? and no #; the other keys say what follows them")
            steps.append(step)
    text = f"{source}:{rules.prefix}{'/'.join(steps)}"
    chosen = [key for key in rules.keys if key in fields]
    if len(chosen) > 1:
        fields[chosen[1]].fail(f"{chosen[0]}: already says which one", on_key=True)
    for key in chosen:
        value = fields[key].value
        text += f"?{key}={value if type(value) is int else fields[key].text()}"
    if rules.field and "field" in fields:
        text += "#" + fields["field"].text()
    _check(node, source, text.partition(":")[2], sources)
    return text


def _grammar(source: str, sources: Mapping[str, str]) -> Grammar:
    return AT_HAND[source] if source in AT_HAND else KINDS[sources[source]]


def _check(node: Node, source: str, name: str, sources: Mapping[str, str]) -> None:
    rules = _grammar(source, sources)
    grammar.sandbox_references(node, name)
    plain = grammar.SANDBOX_REFERENCE.sub("x", name)
    path, query, field = plain, "", ""
    if source not in AT_HAND:
        document, hash_mark, field = plain.partition("#")
        path, question, query = document.partition("?")
        if hash_mark and (not rules.field or not _FIELD.match(field)):
            node.fail(f"what follows # is not a field of {source}:")
        if question:
            key, equals, value = query.partition("=")
            if key not in rules.keys or not equals or not _VALUE.match(value):
                known = " or ".join(f"?{word}=..." for word in rules.keys) or "nothing"
                node.fail(f"what follows ? is not for {source}: ({known} may stand there)")
    if not rules.path.match(path) or {"..", "."} & set(path.split("/")):
        node.fail(f"what follows {source}: is not a reference of that source")
