"""Slots: where a placeholder may stand in a request, and which one stands there.

One reading for everybody: policy asks whether what stands there has the right form (rules/authority.py), the gate and
the vault whose it is (`fits`), and a kind where to put the secret. What is not read here in full is misuse.

Forms that clients send: `Bearer X`, `token X`, the slot's own template or the bare value in a header; `X` as either
half of Basic; `name=X` as a query key or cookie; one segment of a path; one whole field of a body that was read whole;
the key id of an AWS signature; one name of a list of WebSocket subprotocols.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from rules.facts import RequestFacts
from rules.operations import forms
from rules.operations.media import is_type
from rules.operations.strict_json import InvalidJson, load
from rules.placeholders import Found, find, pattern, split_basic
from rules.policy import CredentialDef, Slot
from rules.sigv4 import client_key_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One placeholder, whole, in a slot of its part."""

    slot: Slot
    text: str

    @property
    def part(self) -> str:
        return self.slot.part


def is_slot(credential: CredentialDef, place: Found) -> bool:
    """Whether a core was found where one of the credential's slots is."""
    return any(_at(slot, place) for slot in credential.slots)


def header_slots(credential: CredentialDef, name: str) -> tuple[Slot, ...]:
    """The slots in the header `name` (lower case)."""
    return tuple(slot for slot in credential.slots if _header(slot) == name)


def query_slots(credential: CredentialDef) -> Mapping[str, Slot]:
    """Query key -> its slot. An AWS signature in a URL has its key id in one."""
    keys = {"query": None, "sigv4": "X-Amz-Credential"}
    return {keys[slot.where] or slot.name: slot for slot in credential.slots if slot.where in keys}


def in_header(credential: CredentialDef, name: str, value: str) -> tuple[Spot, ...] | None:
    """What stands in one header field: its placeholders, () where the slot takes anything, None where it is misused."""
    slots = header_slots(credential, name)
    if any(slot.where == "signature" for slot in slots):
        return _in_signature(credential, slots, value)
    if len({slot.where for slot in slots}) > 1:  # bearer or basic: what the client wrote says which
        basic = value.strip().lower().startswith("basic ")
        slots = tuple(slot for slot in slots if (slot.where == "basic") is basic)
    for slot in slots:
        if slot.where == "cookie":
            return _in_cookies(credential, slots, value)
        text = _in_field(credential, slot, value.strip())
        if text is not None:
            return (Spot(slot=slot, text=text),)
    return None


def in_query(credential: CredentialDef, name: str, value: str) -> tuple[Spot, ...] | None:
    """The same for one query parameter, decoded."""
    slot = query_slots(credential).get(name)
    if slot is None:
        return None
    text = client_key_id(value) if slot.where == "sigv4" else value
    return None if text is None else _spot(credential, slot, text)


def in_path(credential: CredentialDef, facts: RequestFacts) -> tuple[Spot, ...] | None:
    """The same for the path: one segment, spelled plainly."""
    for slot in credential.slots:
        if slot.where == "path" and (text := path_value(slot.template, facts.path.raw)) is not None:
            return _spot(credential, slot, text) if facts.path.raw.count(text) == 1 else None
    return None


def names_own(credential: CredentialDef, facts: RequestFacts) -> bool:
    """Whether the path's slot holds something else than a placeholder: a token of the client's own."""
    values = (path_value(slot.template, facts.path.raw) for slot in credential.slots if slot.where == "path")
    return any(value is not None and not is_placeholder(credential, credential.slot.part, value) for value in values)


def in_body(credential: CredentialDef, facts: RequestFacts) -> tuple[Spot, ...] | None:
    """The same for a whole judged body: the field holds the placeholder, and nothing else of the body does."""
    slots = [slot for slot in credential.slots if slot.where == "body"]
    body = facts.body
    if not isinstance(body, bytes) or facts.partial or not slots:
        return None
    spots: list[Spot] = []
    for slot in slots:
        text = body_field(slot, facts)
        found = None if text is None else _spot(credential, slot, text)
        if found is not None and body.count(found[0].text.encode()) == 1:
            spots += found
    return tuple(spots) or None


def in_head(credential: CredentialDef, facts: RequestFacts, found: Sequence[Found]) -> tuple[Spot, ...] | None:
    """Every placeholder of a head that stands in its slot; None where one of `found` does not, or a slot is misused."""
    spots: list[Spot] = []
    for place in found:
        if not is_slot(credential, place):
            return None
        match place.where:
            case "path":
                here = in_path(credential, facts)
            case "query":
                values = [value for name, value in facts.query.pairs if name == place.name]
                here = in_query(credential, place.name, values[0]) if len(values) == 1 else None
            case "header" | "basic":
                fields = facts.header(place.name)
                here = in_header(credential, place.name, fields[0]) if len(fields) == 1 else None
        if here is None or not set(place.cores) <= {core for spot in here for core in find(spot.text)}:
            return None
        spots += (spot for spot in here if spot not in spots)
    return tuple(spots)


def fits(credential: CredentialDef, spots: Iterable[Spot], expected: Mapping[str, bytes]) -> bool:
    """Whether every placeholder is the one of this sandbox. `expected`: name of a placeholder -> its SHA-256.

    Unknown, foreign and ended ones look alike from outside (I13).
    """
    for spot in spots:
        wanted = expected.get(credential.placeholder_name(spot.part))
        if wanted is None or not hmac.compare_digest(sha256(spot.text.encode()).digest(), wanted):
            return False
    return True


def masked(credential: CredentialDef, text: str) -> str:
    """`text` as records show it: `{credential:NAME}` where a placeholder of the credential stands (RULINGS 4.4)."""
    for _, spec in credential.placeholders:
        text = pattern(spec.shape).sub(
            lambda match: f"{{credential:{credential.name}}}" if find(match[0]) else match[0], text
        )
    return text


def path_value(template: str, raw: str) -> str | None:
    """What stands in a raw path where the template has `{value}`; None where the path is another one."""
    wanted, given = template.split("/"), raw.split("/")
    if wanted[-1] == "**":
        wanted.pop()
        if len(given) <= len(wanted):
            return None
        given = given[: len(wanted)]
    if len(wanted) != len(given):
        return None
    value: str | None = None
    for pattern_, segment in zip(wanted, given, strict=True):
        before, here, after = pattern_.partition("{value}")
        if here:
            if not segment.startswith(before) or not segment.endswith(after):
                return None
            value = segment[len(before) : len(segment) - len(after)]
        elif pattern_ != "*" and pattern_ != segment:
            return None
    return value


def body_field(slot: Slot, facts: RequestFacts) -> str | None:
    """The text of a body slot's field, None where the body has it not or means two things."""
    body = facts.body
    if not isinstance(body, bytes):
        return None
    kind, _, name = slot.name.partition(":")
    if kind == "form":
        fields = forms.read(body, facts)
        return None if fields is None else fields.get(name)
    if not is_type(facts, "application/json"):
        return None
    try:
        value = load(body)
    except InvalidJson:
        return None
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def subprotocol_value(slot: Slot, offered: str) -> str | None:
    """What one of the offered subprotocols carries after the slot's name, decoded; None where none does, or several."""
    carried = [item.strip()[len(slot.name) :] for item in offered.split(",") if item.strip().startswith(slot.name)]
    if len(carried) != 1:
        return None
    if slot.template != "{base64url}":
        return carried[0]
    try:
        return base64.urlsafe_b64decode(carried[0] + "=" * (-len(carried[0]) % 4)).decode("ascii")
    except (binascii.Error, ValueError):
        return None


def _header(slot: Slot) -> str | None:
    match slot.where:
        case "bearer" | "basic" | "sigv4":
            return "authorization"
        case "header" | "signature":
            return slot.name.lower()
        case "cookie":
            return "cookie"
        case "subprotocol":
            return "sec-websocket-protocol"
        case "query" | "path" | "body" | "none":
            return None


def _at(slot: Slot, place: Found) -> bool:
    match place.where:
        case "path":
            return slot.where == "path"
        case "query":
            return (slot.where == "query" and place.name == slot.name) or (
                slot.where == "sigv4" and place.name == "X-Amz-Credential"
            )
        case "header":
            return place.name == _header(slot)
        case "basic":
            return place.name == _header(slot) and slot.where in ("bearer", "basic", "header")


def _spot(credential: CredentialDef, slot: Slot, text: str) -> tuple[Spot, ...] | None:
    return (Spot(slot=slot, text=text),) if is_placeholder(credential, slot.part, text) else None


def is_placeholder(credential: CredentialDef, part: str, text: str) -> bool:
    """Whether `text` is one placeholder of the part's shape, whoever's."""
    shape = next((spec.shape for name, spec in credential.placeholders if name == part), None)
    return shape is not None and pattern(shape).fullmatch(text) is not None and len(find(text)) == 1


def _in_cookies(credential: CredentialDef, slots: Sequence[Slot], value: str) -> tuple[Spot, ...] | None:
    """A Cookie field of the slots' cookies alone: any other is the client's own authority."""
    named = {slot.name: slot for slot in slots}
    spots: list[Spot] = []
    for item in value.split(";"):
        name, equals, text = item.strip().partition("=")
        slot = named.pop(name, None)
        found = _spot(credential, slot, text) if slot is not None and equals else None
        if found is None:
            return None
        spots += found
    return tuple(spots)


def _in_signature(credential: CredentialDef, slots: Sequence[Slot], value: str) -> tuple[Spot, ...] | None:
    """Whatever a client signs with its placeholder is dropped; a placeholder in it is that of the key's name."""
    spots: list[Spot] = []
    cores = find(value)
    for slot in slots:
        for spec in (spec for part, spec in credential.placeholders if part == slot.part):
            spots += (Spot(slot=slot, text=match[0]) for match in pattern(spec.shape).finditer(value))
    return tuple(spots) if set(cores) <= {core for spot in spots for core in find(spot.text)} else None


def _in_field(credential: CredentialDef, slot: Slot, value: str) -> str | None:
    """The placeholder that is all of a header's value, in a form that clients send for the slot."""
    candidates: list[str | None] = []
    match slot.where:
        case "sigv4":
            candidates = [client_key_id(value)]
        case "subprotocol":
            candidates = [subprotocol_value(slot, value)]
        case _:
            if slot.where == "header":
                before, _, after = slot.template.partition("{value}")
                if value.startswith(before) and value.endswith(after):
                    candidates.append(value[len(before) : len(value) - len(after)])
                candidates.append(value)
            if _header(slot) == "authorization":
                candidates += _in_authorization(value)
    return next((text for text in candidates if text and is_placeholder(credential, slot.part, text)), None)


def _in_authorization(value: str) -> list[str | None]:
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "basic":
        return [rest or value]
    pair = split_basic(value)
    if pair is None:
        return []
    user, password = pair
    if find(user):
        return [] if password else [user]
    return [password]
