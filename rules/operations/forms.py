"""Forms: `application/x-www-form-urlencoded` bodies as Stripe, Twilio, Slack and the AWS query protocol take them.

Source: WHATWG URL standard, 5.1 (parsing); what servers do with a repeated or bracketed name differs, so that a name
occurs once, and one that is another's with brackets behind it (`a` and `a[0]`) is refused.

`form` judges such a body: fields that carry authority are refused, and those that `arguments` names become arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from rules.arguments import Value
from rules.facts import RequestFacts
from rules.operations.media import is_type
from rules.shapes import SHAPES

MAX_FIELDS = 1000
MAX_NAME = 200
"""Characters of a field name."""
MAX_TEXT = 512
"""Characters of one bound value."""

OVERRIDES = frozenset({"_method", "x_http_method_override", "x_http_method", "x_method_override"})
"""Names by which frameworks take another method than the one that was sent."""
AUTHORITY = frozenset(
    "token access_token refresh_token id_token auth_token api_key apikey key secret client_secret client_id password "
    "authorization signature sig".split()
)
"""Names by which services take someone's authority. Compared without case, `-` as `_`."""

_BROKEN = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}(?:\[[A-Za-z0-9_.:-]{0,128}\]){0,8}")


class InvalidForm(ValueError):
    """The bytes are no form of one meaning. str() is a fixed sentence that reflects no input."""


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, Value] | None:
    """Return what `arguments` binds, or None. See `check` for `params`."""
    fields = read(body, facts)
    if fields is None or carries_authority(fields) or not refused(params).isdisjoint(map(folded, fields)):
        return None
    allowed = params.get("fields")
    if allowed is not None and not all(fits(name, allowed) for name in fields):
        return None
    if not all(name in fields for name in params.get("required", ())):
        return None
    if any(name in fields and SHAPES[shape](fields[name]) is None for name, shape in params.get("shapes", {}).items()):
        return None
    found: dict[str, Value] = {}
    for argument, name in params.get("arguments", {}).items():
        if name in fields:
            if not plain(fields[name]):
                return None
            found[argument] = fields[name]
    return found


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when policy is loaded.

    `arguments`: argument -> field. `required`: fields that must be there. `fields`: all that may be there (`a` also
    stands for `a[...]`); without it any but those of AUTHORITY, of OVERRIDES and of `refuse`.
    `shapes`: field -> what its value may be, a shape of rules/shapes.py.
    """
    if not params.keys() <= {"arguments", "required", "fields", "refuse", "shapes"}:
        raise ValueError("unknown parameter of a form")
    named = params.get("arguments", {})
    if not isinstance(named, Mapping) or not all(
        isinstance(argument, str) and isinstance(name, str) and _NAME.fullmatch(name)
        for argument, name in named.items()
    ):
        raise ValueError("arguments map a name to a field")
    shapes = params.get("shapes", {})
    if not isinstance(shapes, Mapping) or not set(shapes.values()) <= SHAPES.keys():
        raise ValueError("shapes map a field to a shape")
    for key in ("required", "fields", "refuse"):
        listed = params.get(key, ())
        if not isinstance(listed, list | tuple) or not all(
            isinstance(name, str) and _NAME.fullmatch(name) for name in listed
        ):
            raise ValueError("required, fields and refuse list names of fields")


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that may be stated under `params`."""
    return frozenset(params.get("arguments", {}))


# --- shared with rules/operations/aws.py and rules/operations/method_name.py ---


def read(body: bytes, facts: RequestFacts) -> dict[str, str] | None:
    """The fields of a form, or None where the head says another type or a coding, or the bytes have two meanings."""
    if not is_type(facts, "application/x-www-form-urlencoded"):
        return None
    try:
        return parse(body)
    except InvalidForm:
        return None


def parse(body: bytes) -> dict[str, str]:
    """Return name -> value of a form. Raises InvalidForm; time is linear in len(body), which callers bound."""
    if body.count(b"&") >= MAX_FIELDS:
        raise InvalidForm("too many fields")
    fields: dict[str, str] = {}
    stems: dict[str, bool] = {}
    for part in body.split(b"&") if body else ():
        # `;` separated fields once, and still does for some servers.
        if b"=" not in part or b";" in part:
            raise InvalidForm("a field is name=value")
        raw_name, _, raw_value = part.partition(b"=")
        name, value = _decoded(raw_name), _decoded(raw_value)
        if not is_name(name):
            raise InvalidForm("not a field name")
        stem, bracketed = folded(name), "[" in name
        again = stem in stems and not (bracketed and stems[stem] and (name not in fields or name.endswith("[]")))
        stems[stem] = bracketed
        if again:
            raise InvalidForm("a field occurs twice")
        if not name.endswith("[]"):
            fields[name] = value
        else:
            fields.setdefault(name, "")
    return fields


def carries_authority(fields: Mapping[str, str]) -> bool:
    """True if a field's name says that it holds a key or token."""
    return any(folded(name) in AUTHORITY for name in fields)


def refused(params: Mapping[str, Any]) -> frozenset[str]:
    """Names, folded, that must not stand in a form under `params`."""
    return OVERRIDES | {folded(name) for name in params.get("refuse", ())}


def is_name(name: str) -> bool:
    """True for a plain field name, with brackets behind it or none: nothing that a server would trim or cut."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def folded(name: str) -> str:
    """The stem of a name as the most lenient server compares it: PHP reads `a.b` as `a_b`, others ignore case."""
    return name.partition("[")[0].lower().replace("-", "_").replace(".", "_")


def fits(name: str, allowed: list[str] | tuple[str, ...]) -> bool:
    """True if a field is one of `allowed`, or a bracketed part of one."""
    return name in allowed or name.partition("[")[0] in allowed


def plain(value: str) -> bool:
    """A value that may become an argument."""
    return 0 < len(value) <= MAX_TEXT and value.isprintable()


def _decoded(raw: bytes) -> str:
    if _BROKEN.search(raw):
        raise InvalidForm("a broken percent sequence")
    try:
        return unquote_to_bytes(raw.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidForm("not UTF-8") from None
