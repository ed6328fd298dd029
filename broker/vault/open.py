"""`Opener.open_handoff`: the last word. The procedure, numbered once; the code below is tagged with the numbers.

 1 MAC            the statement was sealed by this worker, this boot
 2 fresh          issued at most 5 s ago, its nonce never seen before
 3 evidence       the token or channel key names a live sandbox, and the one that the statement names
 4 facts          rebuilt from the statement; names agree, targets are canonical
 5 decide         rules.decide.decide_request on our own policy and our own view of the sandbox
 6 compare        what the worker said of policy is compared, never used
 7 budget         limits charged, holds get a ticket, disarmed credentials stay shut
 8 placeholder    the one in the slot is this sandbox's and this credential's
 9 secret         from its source, for a destination and slot inside the credential's definition
10 intent         durable in the log
11 release        the material leaves

Any exception anywhere is `internal-error` (I09): never a secret, never its text.
"""

from __future__ import annotations

from typing import Protocol

from broker.vault.opened import Answer, Material, Opened, Refused, WantsBody
from rules.facts import BodyAttested

__all__ = ["Answer", "HandoffOpener", "Material", "Opened", "Refused", "WantsBody"]


class HandoffOpener(Protocol):
    """What the executor channel calls; the fake of the executor's tests implements it too."""

    async def open_handoff(self, worker: str, sealed: bytes, attested: BodyAttested | None, now: float) -> Answer:
        """Judge one sealed statement of `worker`. Never raises but CancelledError."""
        ...
