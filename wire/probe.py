"""What a probe of ours and the worker say to each other on a connection that the kernel redirected (I28).

A probe runs in a sandbox's network namespace and wants to know where a connection to nowhere ends. It marks its
packets, which takes a capability that no sandbox has, sends NONCE_BYTES and gets `proof`: only who holds the
sandbox's channel key can answer. A marked connection carries no request, is never judged and leaves no record.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

MARK: Final = 0x6578_6561
"""SO_MARK of a probe's sockets (socket(7): needs CAP_NET_ADMIN or CAP_NET_RAW in the namespace's user namespace)."""
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32


def proof(channel_key: bytes, nonce: bytes) -> bytes:
    """The answer to `nonce` (NONCE_BYTES) by the holder of `channel_key`. Raises ValueError for another length."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError("a nonce of another length")
    return hmac.digest(channel_key, b"exeat probe 1\x00" + nonce, sha256)
