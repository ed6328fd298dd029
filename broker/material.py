"""The material of one call: its parts as secrets, and what of them and of their forms must not come back.

A secret that is a whole file is guarded for what is secret in it: the lines of a PEM without its armour, and the
values of a JSON key file that are keys. Else every other certificate and key file would look like ours.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Final

from broker.scrub import Guarded
from broker.vault.secret import Secret
from rules.credential_kinds import is_public
from rules.placeholders import public_prefix
from rules.policy import CredentialDef, Policy

PEM_HEAD: Final = 48
"""Characters of a key's base64 that say what kind of key it is, the same in every one."""
_ARMOUR = b"-----BEGIN "
_KEY_WORDS = ("key", "secret", "token", "password", "assertion")
_MAX_DEPTH = 8


def material(definition: CredentialDef, parts: Iterable[tuple[str, bytes]], version: str) -> dict[str, Secret]:
    """The parts of a call. Raises SecretRefused."""
    return {
        part: Secret(
            value,
            name=str(definition.name),
            version=version,
            scrub=definition.scrub and not is_public(definition.kind, part),
        )
        for part, value in parts
    }


def guards_of(definition: CredentialDef, parts: Mapping[str, Secret], forms: Iterable[bytes]) -> list[Guarded]:
    """What must not come back: the secret parts, and each form that the kind made which holds none in a known coding.

    `user:secret` and its base64 are covered by the secret's own patterns; adding them would make the user name a hit.
    """
    if not definition.scrub:
        return []
    shapes = {part: spec.shape for part, spec in definition.placeholders}
    values: dict[bytes, bytes] = {}
    for part, secret in parts.items():
        if not is_public(definition.kind, part):
            values[secret.reveal()] = public_prefix(shapes[part]).encode() if part in shapes else b""
    guarded = [guard for value, prefix in values.items() for guard in guards(value, prefix)]
    for form in forms:
        plain = _unbased(form)
        if not any(value in form or value in plain for value in values):
            guarded.append(Guarded(value=form))
    return guarded


def guard_other(policy: Policy, value: bytes) -> list[Guarded]:
    """Another secret of the same destination: its public prefix is the longest of a shape that it starts with."""
    prefixes = [
        public_prefix(spec.shape).encode() for item in policy.credentials.values() for _, spec in item.placeholders
    ]
    return guards(value, max((prefix for prefix in prefixes if value.startswith(prefix)), key=len, default=b""))


def guards(value: bytes, prefix: bytes = b"") -> list[Guarded]:
    """One secret as what is looked for."""
    if value.startswith(_ARMOUR):
        return [Guarded(value=body, public_prefix=body[:PEM_HEAD]) for body in _bodies(value)]
    if value.startswith(b"{"):
        return [guard for found in _keys(value) for guard in guards(found.encode())] or [Guarded(value=value)]
    return [Guarded(value=value, public_prefix=prefix)]


def _bodies(pem: bytes) -> list[bytes]:
    """The base64 of each private block of a PEM, in one line; all of it where none says that it is a key."""
    bodies: list[bytes] = []
    for block in pem.split(b"-----BEGIN ")[1:]:
        label, _, rest = block.partition(b"-----")
        body = b"".join(line.strip() for line in rest.partition(b"-----END ")[0].splitlines() if b":" not in line)
        if b"CERTIFICATE" not in label and body:
            bodies.append(body)
    return bodies or [pem]


def _keys(text: bytes) -> list[str]:
    """The values of a JSON file whose names say that they are keys."""
    try:
        whole = json.loads(text)
    except ValueError:
        return []
    found: list[str] = []
    waiting = [(whole, 0)]
    while waiting:
        value, depth = waiting.pop()
        if not isinstance(value, dict) or depth > _MAX_DEPTH:
            continue
        for name, item in value.items():
            secret = any(word in str(name).lower() for word in _KEY_WORDS) and not str(name).lower().endswith("_id")
            if isinstance(item, str) and secret:
                found.append(item)
            waiting.append((item, depth + 1))
    return found


def _unbased(form: bytes) -> bytes:
    try:
        return base64.b64decode(form, validate=True)
    except ValueError:
        return b""
