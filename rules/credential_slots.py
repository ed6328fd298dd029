"""From what is written of a kind to its slots and parameters; the same for credentials.yaml and for the catalogue.

    header     header: X-Api-Key, template: "Token {value}"   also: [bearer, basic] where the provider takes those, too
    headers    headers: {DD-API-KEY: "{api_key}", DD-APPLICATION-KEY: "{application_key}"}
    query      query: key
    cookie     cookie: sessionid                              or a mapping of names to "{part}"
    path       path: "/bot{value}/**"                         or a list: the secret is part of one segment
    body       field: "form:api_key"                          or "json:auth.token", or a mapping to "{part}"
    subprotocol  subprotocol: "openai-insecure-api-key."      encoding: base64url
    sigv4      regions: [eu-central-1], aws_services: [s3]
    hmac       header: X-Signature, sign: "{timestamp}.{body}", algorithm: sha256, encoding: hex, ...
    totp       header: X-OTP, digits: 6, period: 30, algorithm: sha1
    mtls       nothing: the parts are a certificate and its key

Every value is checked here; what a kind does not have was refused before. Raises BadForm, whose `key` is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rules.credential_kinds import KINDS, MAX_PARTS, PART, VALUE
from rules.policy import Slot, Where

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}\Z")
_QUERY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_COOKIE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}\Z")
_FIELD = re.compile(r"(?:form:[A-Za-z0-9_.-]{1,64}|json:[A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9_-]{1,64}){0,7})\Z")
_PATH_SEGMENT = re.compile(r"[A-Za-z0-9._~:@!$&'()+,=-]*\Z")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_SUBPROTOCOL = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{4,64}\Z")
_PLACE = re.compile(r"\{([^{}]*)\}")

# Setting one of these would let a credential rewrite the request instead of authenticating it.
NOT_SLOTS: Final = frozenset(
    {
        "connection",
        "content-length",
        "content-type",
        "content-encoding",
        "cookie",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-original-url",
        "x-rewrite-url",
        "x-host",
        "x-real-ip",
    }
)
NOT_SLOT_PREFIXES: Final = ("proxy-", "exeat-", "x-forwarded-", "x-http-method", "x-method-", "sec-")

SIGNED_FIELDS: Final = frozenset(
    "method path query target host timestamp body body_sha256 body_sha256_base64 body_md5_base64 key_id".split()
)
"""What `sign:` of hmac may name."""
ALGORITHMS: Final = ("sha1", "sha256", "sha384", "sha512")
ENCODINGS: Final = ("hex", "base64", "base64url")
KEY_ENCODINGS: Final = ("text", "hex", "base64")
CLOCKS: Final = ("unix", "unix-ms", "iso8601", "http")
MAX_SIGN: Final = 1024


class BadForm(ValueError):
    """What is written under `key` cannot be used. str() is the sentence."""

    def __init__(self, key: str, sentence: str) -> None:
        super().__init__(sentence)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Where a credential's placeholders stand, the first slot leading, and what its kind is told besides."""

    slots: tuple[Slot, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


OPEN_KEYS: Final[Mapping[str, Mapping[str, Any]]] = {"sigv4": {"regions": ["us-east-1"]}}
"""What a service of the catalogue leaves to the operator, with a value that its file is checked with."""


def read_form(kind: str, written: Mapping[str, Any]) -> Form:
    """The form of `kind`, of which `written` are the keys. Raises BadForm."""
    row = KINDS[kind]
    for key in written:
        if key not in row.keys:
            raise BadForm(key, f"{key}: does not go with kind: {kind}")
    reader = _READERS.get(kind)
    return Form(slots=(Slot(where=row.where),)) if reader is None else reader(written)


def _header(written: Mapping[str, Any]) -> Form:
    name = header_name("header", _text(written, "header"))
    lead = Slot(where="header", name=name, template=_template(written, "template", "{value}", VALUE))
    others = _texts(written, "also") if "also" in written else ()
    if others and (name == "authorization" or set(others) - {"bearer", "basic"}):
        raise BadForm("also", "the same secret can also go as bearer or basic, where its own header is another")
    return Form(slots=(lead, *(Slot(where=cast("Where", word)) for word in others)))


def _headers(written: Mapping[str, Any]) -> Form:
    return Form(slots=_header_slots(written, "headers"))


def _query(written: Mapping[str, Any]) -> Form:
    name = _text(written, "query")
    if not _QUERY_NAME.match(name):
        raise BadForm("query", "a query key is letters, digits, dot, underscore and hyphen")
    return Form(slots=(Slot(where="query", name=name),))


def _cookie(written: Mapping[str, Any]) -> Form:
    slots = tuple(Slot(where="cookie", name=name, part=part) for name, part in _named(written, "cookie"))
    if any(not _COOKIE.match(slot.name) for slot in slots):
        raise BadForm("cookie", "a cookie's name is a token (RFC 6265 section 4.1.1)")
    return Form(slots=slots)


def _path(written: Mapping[str, Any]) -> Form:
    templates = _texts(written, "path")
    for template in templates:
        segments = template.split("/")
        inner = [segment for segment in segments[1:] if "{value}" in segment]
        rest = [segment for segment in segments[1:] if "{value}" not in segment]
        plain = all(
            segment == "*" or (segment == "**" and segment is segments[-1]) or _PATH_SEGMENT.match(segment)
            for segment in (*rest, *(segment.replace("{value}", "", 1) for segment in inner))
        )
        if not template.startswith("/") or len(inner) != 1 or not plain or "" in segments[1:-1]:
            raise BadForm("path", "a path is segments, * for any one and a last ** for the rest, with {value} in one")
    return Form(slots=tuple(Slot(where="path", name="path", template=template) for template in templates))


def _body(written: Mapping[str, Any]) -> Form:
    slots = tuple(Slot(where="body", name=name, part=part) for name, part in _named(written, "field"))
    if any(not _FIELD.match(slot.name) for slot in slots):
        raise BadForm("field", "a field is form:NAME, or json:NAME with dots between the names of nested objects")
    if len({slot.name.partition(":")[0] for slot in slots}) != 1:
        raise BadForm("field", "a body is a form or JSON, not both")
    return Form(slots=slots)


def _subprotocol(written: Mapping[str, Any]) -> Form:
    name = _text(written, "subprotocol")
    if not _SUBPROTOCOL.match(name):
        raise BadForm("subprotocol", "the beginning of a WebSocket subprotocol is a token of at least 4 characters")
    encoding = _word(written, "encoding", ("plain", "base64url"), "plain")
    template = "{value}" if encoding == "plain" else "{base64url}"
    return Form(slots=(Slot(where="subprotocol", name=name, template=template),))


def _sigv4(written: Mapping[str, Any]) -> Form:
    regions, services = _texts(written, "regions"), _texts(written, "aws_services")
    for key, words in (("regions", regions), ("aws_services", services)):
        if any(not _REGION.match(word) for word in words):
            raise BadForm(key, "exact names in lower case: a signature is made for one region and one service")
    return Form(slots=sigv4_slots(), params={"regions": list(regions), "services": list(services)})


def sigv4_slots() -> tuple[Slot, ...]:
    """Where an AWS signature names its key, and the token of keys that end."""
    return (
        Slot(where="sigv4", part="access_key_id"),
        Slot(where="header", name="x-amz-security-token", part="session_token"),
        Slot(where="query", name="X-Amz-Security-Token", part="session_token"),
    )


def _hmac(written: Mapping[str, Any]) -> Form:
    name = header_name("header", _text(written, "header"))
    sign = _text(written, "sign")
    unknown = sorted(set(_PLACE.findall(sign)) - SIGNED_FIELDS)
    if unknown or len(sign) > MAX_SIGN or "{" in _PLACE.sub("", sign) or "}" in _PLACE.sub("", sign):
        raise BadForm(
            "sign", f"what is signed is text with {', '.join(f'{{{word}}}' for word in sorted(SIGNED_FIELDS))}"
        )
    template = _text(written, "template") if "template" in written else "{signature}"
    if (
        sorted(set(_PLACE.findall(template)) - {"signature", "timestamp", "key_id"})
        or template.count("{signature}") != 1
    ):
        raise BadForm("template", "a template is text with {signature} once, and {timestamp} and {key_id}")
    if not template.isascii() or not template.isprintable():
        raise BadForm("template", "a template is one line of ASCII text")
    params: dict[str, Any] = {
        "sign": sign.replace("\\n", "\n"),
        "template": template,
        "algorithm": _word(written, "algorithm", ALGORITHMS, "sha256"),
        "encoding": _word(written, "encoding", ENCODINGS, "hex"),
        "key_encoding": _word(written, "key_encoding", KEY_ENCODINGS, "text"),
        "clock": _word(written, "clock", CLOCKS, "unix"),
    }
    if "timestamp_header" in written:
        params["timestamp_header"] = header_name("timestamp_header", _text(written, "timestamp_header"))
    slots = [Slot(where="signature", name=name, part=VALUE)]
    if "key_id_header" in written:
        slots.append(
            Slot(where="header", name=header_name("key_id_header", _text(written, "key_id_header")), part="key_id")
        )
    elif "{key_id}" in template:
        slots.append(Slot(where="signature", name=name, part="key_id"))
    names = [slot.name for slot in slots if slot.where == "header"] + [name, params.get("timestamp_header", "")]
    if len(set(names)) != len(names):
        raise BadForm("header", "the signature, its time and the key's name stand in different headers")
    return Form(slots=tuple(slots), params=params)


def _totp(written: Mapping[str, Any]) -> Form:
    name = header_name("header", _text(written, "header"))
    return Form(
        slots=(Slot(where="signature", name=name, template=_template(written, "template", "{value}", VALUE)),),
        params={
            "digits": _number(written, "digits", 6, 8, 6),
            "period": _number(written, "period", 15, 300, 30),
            "algorithm": _word(written, "algorithm", ("sha1", "sha256", "sha512"), "sha1"),
        },
    )


def _mtls(written: Mapping[str, Any]) -> Form:
    return Form(slots=(Slot(where="none", part="key"),))


_READERS: Final = {
    "header": _header,
    "headers": _headers,
    "query": _query,
    "cookie": _cookie,
    "path": _path,
    "body": _body,
    "subprotocol": _subprotocol,
    "sigv4": _sigv4,
    "hmac": _hmac,
    "totp": _totp,
    "mtls": _mtls,
}


def header_name(key: str, name: str) -> str:
    """A header that may hold a credential, in lower case. Raises BadForm."""
    lower = name.lower()
    if not _HEADER.match(name):
        raise BadForm(key, "not the name of a header")
    if lower in NOT_SLOTS or lower.startswith(NOT_SLOT_PREFIXES):
        raise BadForm(key, f"{lower} cannot hold a credential")
    return lower


def _header_slots(written: Mapping[str, Any], key: str) -> tuple[Slot, ...]:
    entry = written.get(key)
    if not isinstance(entry, Mapping) or not 1 <= len(entry) <= MAX_PARTS:
        raise BadForm(key, 'a mapping of header names to templates: {X-Api-Key: "{api_key}"}')
    slots: list[Slot] = []
    for name, template in entry.items():
        lower = header_name(key, str(name))
        if any(slot.name == lower for slot in slots):
            raise BadForm(key, f"{lower} is named twice")
        part, plain = _with_part(key, template)
        slots.append(Slot(where="header", name=lower, template=plain, part=part))
    return tuple(slots)


def _with_part(key: str, template: Any) -> tuple[str, str]:
    """(part, template with {value}) of a template that names one part."""
    if isinstance(template, str) and template.isascii() and template.isprintable():
        places = _PLACE.findall(template)
        if len(places) == 1 and PART.match(places[0]):
            return places[0], template.replace("{" + places[0] + "}", "{value}")
    raise BadForm(key, "a template is one line of ASCII text with one {part} of the secret")


def _named(written: Mapping[str, Any], key: str) -> list[tuple[str, str]]:
    """(name, part): one name means the part `value`; a mapping says which part goes under which name."""
    entry = written.get(key)
    if isinstance(entry, str):
        return [(entry, VALUE)]
    if isinstance(entry, Mapping) and 1 <= len(entry) <= MAX_PARTS:
        found = [(str(name), *_with_part(key, template)) for name, template in entry.items()]
        if all(template == "{value}" for _, _, template in found):
            return [(name, part) for name, part, _ in found]
    raise BadForm(key, 'a name, or a mapping of names to "{part}"')


def _template(written: Mapping[str, Any], key: str, default: str, part: str) -> str:
    template = written.get(key, default)
    if not isinstance(template, str) or template.count("{" + part + "}") != 1:
        raise BadForm(key, "a template is text with {value} once")
    if not template.isascii() or not template.isprintable():
        raise BadForm(key, "a template is text with {value} once")
    return template


def _text(written: Mapping[str, Any], key: str) -> str:
    value = written.get(key)
    if value is None:
        raise BadForm(key, f"this kind needs {key}:")
    if not isinstance(value, str) or not value:
        raise BadForm(key, "expected text")
    return value


def _texts(written: Mapping[str, Any], key: str) -> Sequence[str]:
    value = written.get(key)
    if value is None:
        raise BadForm(key, f"this kind needs {key}:")
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items or not all(isinstance(item, str) and item for item in items):
        raise BadForm(key, "expected a text or a list of texts")
    if len(set(items)) != len(items) or len(items) > 64:
        raise BadForm(key, "something is listed twice, or too much is")
    return tuple(items)


def _word(written: Mapping[str, Any], key: str, allowed: Sequence[str], default: str) -> str:
    value = written.get(key, default)
    if value not in allowed:
        raise BadForm(key, f"one of {', '.join(allowed)}")
    return str(value)


def _number(written: Mapping[str, Any], key: str, least: int, most: int, default: int) -> int:
    value = written.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise BadForm(key, f"a whole number from {least} to {most}")
    return value
