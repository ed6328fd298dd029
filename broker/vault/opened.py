"""What the vault answers to a hand-off: `Refused` or `Opened`. Values only; the service puts them on the wire.

`Opened` is made only by open.py, after the procedure's last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.vault.secret import Secret
from rules.decision import Permit
from rules.names import RequestId
from rules.policy import CredentialDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No. `reason` is a code of rules.reasons. Nothing of the request is reflected but what policy named."""

    request_id: RequestId
    reason: str
    rule: str = ""
    remedy: str = ""
    message: str = ""
    ticket: str = ""
    """For a held request: what the agent quotes when it asks a person (RULINGS 8.1)."""
    retry_after: int = 0
    """Seconds; 0 says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """One credential's public definition with its values for one call."""

    definition: CredentialDef
    parts: Mapping[str, Secret]
    version: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Yes: the permit, the material of this one call, and what its answer must not contain.

    `material` is None for hand-offs that only need counting. `scrub` holds the other secrets bound to this
    destination which this sandbox's role can use (RULINGS 7.1). `sequence` is the durable intent's.
    """

    request_id: RequestId
    permit: Permit
    policy_digest: str
    material: Material | None
    scrub: tuple[Secret, ...] = ()
    sequence: int = 0
    renewable: bool = False
    """A read that may be sent twice, with material that its source may have replaced by now."""


Answer = Refused | Opened
