"""The base error of this room. Leaves live beside what raises them."""

from __future__ import annotations


class NetError(Exception):
    """A fault on the network side. str() is for the log, never for a sandbox."""
