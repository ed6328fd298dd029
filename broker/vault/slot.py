"""Whose placeholder stands in the slot: step 9 of open.py.

Rules: a head holds either no placeholder at all, or those of this sandbox and of the permit's credential, each in the
slot of its part. Everything else is misuse; unknown, foreign and ended ones are told apart nowhere (I13). How a slot is
read is said once, in rules/slots.py. Bodies are not here: what stands in one, the gate and the executor judged.
"""

from __future__ import annotations

from collections.abc import Mapping

from rules.facts import RequestFacts
from rules.placeholders import find_in_head
from rules.policy import CredentialDef
from rules.slots import fits, in_head


def placeholder_fits(facts: RequestFacts, definition: CredentialDef | None, expected: Mapping[str, bytes]) -> bool:
    """True unless a placeholder of the head is misused. `expected`: name of a placeholder -> its SHA-256."""
    found = find_in_head(facts)
    if not found:
        return True
    if definition is None:
        return False
    spots = in_head(definition, facts, found)
    return spots is not None and fits(definition, spots, expected)
