"""The sealed statement: any other seal is refused; under the right one, one statement has one spelling."""

from __future__ import annotations

import contextlib
import hmac

from rules.facts import FactsRefused
from wire.frames import WireError
from wire.handoff import MAC_BYTES, check_fresh, claimed_worker, facts_of, open_sealed, seal

WORDS = (
    b"\x01", b"\x00\x00\x00\x04", b"exeat-broker", b"worker-1", b"sha256", b"https", b"GET", b"/orders/7", b"host",
    b"\xff\xff\xff\xff", b"\x7f\xf8", b"\xed\xa0\x80",
)  # fmt: skip

KEY = bytes(range(32))
_CONTEXT = b"exeat hand-off statement 1\x00"
"""Written anew here, so that a change of what is sealed is noticed."""


def check(data: bytes) -> bool:
    """`data` is an encoded statement without its seal."""
    for unsealed in (data, bytes(MAC_BYTES) + data):
        with contextlib.suppress(WireError):
            claimed_worker(unsealed)
        try:
            open_sealed(unsealed, KEY)
        except WireError:
            pass
        else:
            raise AssertionError("a statement without its seal was opened")
    sealed = hmac.digest(KEY, _CONTEXT + data, "sha256") + data
    try:
        statement = open_sealed(sealed, KEY)
    except WireError:
        return False
    assert claimed_worker(sealed) == statement.worker
    again = seal(statement, KEY)
    assert again == sealed, "one statement in two spellings"
    with contextlib.suppress(WireError):
        check_fresh(statement, 1000.0)
    with contextlib.suppress(WireError, FactsRefused):
        facts = facts_of(statement)
        assert facts.destination.host.text == statement.host
        assert facts.destination.port == statement.port
        assert facts.method == statement.method
    return True
