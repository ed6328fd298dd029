"""`Secret`: the value itself. One door (`reveal`), and nothing else that could show, compare, copy or store it.

Rules: no str, repr, format, pickle, copy, equality, hash, iteration or attribute dictionary. The bytes live in a
closure and not in an attribute, so that a traceback renderer which prints locals or walks attributes (structlog
and rich do, RULINGS 1.6) finds a name and no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Never, NoReturn, SupportsIndex

from broker.errors import BrokerError

MIN_SECRET_BYTES = 12
"""Below this, a masked answer would say more than it hides (RULINGS 7.1)."""
MAX_SECRET_BYTES = 64 * 1024

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_CONTROL_IN_FILES = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_FILES = (b"-----BEGIN ", b"{")
"""Secrets that are whole files, a PEM or a JSON object, have lines. No kind puts one into a head as it is."""


class SecretRefused(BrokerError):
    """The bytes cannot be a secret of ours. `code`: secret-empty, -control, -short, -long."""


class Secret:
    """A secret value with its version and owner. Made by the store and the sources only."""

    __slots__ = ("__door", "name", "owner", "scrub", "version")

    def __init__(self, value: bytes, *, name: str, version: str = "1", owner: str = "", scrub: bool = True) -> None:
        """`value`: 12 bytes or more unless `scrub` is False, no control bytes (B098). Raises SecretRefused.

        A PEM or JSON file may have line ends."""
        check_value(value, scrub=scrub)
        self.name = name
        self.version = version
        self.owner = owner
        self.scrub = scrub
        self.__door: Callable[[], bytes] = _shut(value)

    def reveal(self) -> bytes:
        """The value. The one grep-able door: callers use it at once and keep no copy."""
        return self.__door()

    def __repr__(self) -> str:
        return "<Secret>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "<Secret>"

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("secrets are not compared")

    __hash__ = None  # type: ignore[assignment]  # hashing is as bad as comparing: it is how sets and dicts compare

    def __bool__(self) -> NoReturn:
        raise TypeError("a secret has no truth value")

    def __iter__(self) -> Never:
        raise TypeError("a secret is not iterated")

    def __len__(self) -> NoReturn:
        raise TypeError("a secret has no length")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")

    def __copy__(self) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a secret is not pickled or copied")


def check_value(value: bytes, *, scrub: bool) -> None:
    """Raise SecretRefused unless `value` may be a secret. The message never holds any of it."""
    if not value:
        raise SecretRefused("secret-empty", "the secret is empty", "give a value")
    if len(value) > MAX_SECRET_BYTES:
        raise SecretRefused("secret-long", f"the secret is longer than {MAX_SECRET_BYTES} bytes")
    if (_CONTROL_IN_FILES if value.startswith(_FILES) else _CONTROL).search(value):
        raise SecretRefused("secret-control", "the secret holds a control byte (a line end, perhaps)", "remove it")
    if scrub and len(value) < MIN_SECRET_BYTES:
        raise SecretRefused(
            "secret-short",
            f"the secret is shorter than {MIN_SECRET_BYTES} bytes, so answers cannot be scrubbed of it",
            "use a longer secret, or add it with --no-scrub (and `scrub: false` on its credential)",
        )


def _shut(value: bytes) -> Callable[[], bytes]:
    def door() -> bytes:
        return value

    return door
