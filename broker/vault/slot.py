"""Whose placeholder stands in the slot: step 8 of open.py.

Rules: a head holds either no placeholder at all, or exactly one, in the slot that the permit's credential declares,
and its hash is the one of this sandbox and this credential. Everything else is misuse; unknown, foreign and ended
ones are told apart nowhere (I13).
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from rules.facts import RequestFacts
from rules.placeholders import MARK, find_in_head, public_prefix, split_basic
from rules.policy import CredentialDef


def placeholder_fits(facts: RequestFacts, definition: CredentialDef | None, expected: bytes | None) -> bool:
    """True unless a placeholder of the head is misused. `expected` is the SHA-256 of the one that may be there."""
    found = find_in_head(facts)
    if not found:
        return True
    if definition is None or expected is None:
        return False
    slot = definition.slot
    where = {"query"} if slot.where == "query" else {"header", "basic"}
    name = slot.name if slot.where == "query" else slot.name.lower()
    if any(place.where not in where or place.name != name for place in found):
        return False
    if len({core for place in found for core in place.cores}) != 1:
        return False
    values = [value for key, value in (facts.query.pairs if slot.where == "query" else facts.headers) if key == name]
    if len(values) != 1:
        return False
    texts = [values[0]]
    if (pair := split_basic(values[0])) is not None:
        texts = list(pair)
    core = found[0].cores[0]
    holders = [text for text in texts if core in text]
    if len(holders) != 1:
        return False
    whole = _whole(holders[0], core, definition)
    return whole is not None and hmac.compare_digest(sha256(whole.encode()).digest(), expected)


def _whole(text: str, core: str, definition: CredentialDef) -> str | None:
    """The placeholder around `core`, cut by its shape, if nothing but a scheme or the slot's template surrounds it."""
    shape = definition.placeholder.shape
    prefix = public_prefix(shape)
    start = text.index(core) - len(prefix)
    length = len(prefix) + int(shape[len(prefix) + 1 : shape.index("}")]) + len(shape) - shape.index("}") - 1
    if start < 0 or not core.startswith(MARK):
        return None
    whole = text[start : start + length]
    around = text[:start] + "{value}" + text[start + length :]
    if around in {"{value}", definition.slot.template}:
        return whole
    scheme, _, rest = around.partition(" ")
    # `Authorization: token X` and `Bearer X` name the same slot; GitHub's own clients send either.
    if definition.slot.name.lower() == "authorization" and scheme.lower() in ("bearer", "token") and rest == "{value}":
        return whole
    return None
