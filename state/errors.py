"""`StateError`: the room's base error."""

from __future__ import annotations


class StateError(Exception):
    """The database cannot be used, or refuses. `code` is stable; `detail` holds no value of any record."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail
