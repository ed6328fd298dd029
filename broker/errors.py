"""`BrokerError`: the room's base error. A fault is a fixed code and a fixed sentence, never a value (RULINGS 1.6)."""

from __future__ import annotations


class BrokerError(Exception):
    """A fault of the broker. `code` is stable; `detail` a fixed sentence or a name that the operator typed."""

    transient = False
    """True where nobody said no: what was asked could not be reached, and a moment later may be (material.py)."""

    def __init__(self, code: str, detail: str = "", remedy: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail
        self.remedy = remedy
