"""`open_vault`: key, store, rollback check, state, clock, authority, in that order; the first that fails refuses.

The authority lives in the store as one record of our own, and is made at the very first start.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from audit.journal import Journal
from broker.vault.boot import Boot, BootRefused
from broker.vault.ca import AuthorityError, CertificateAuthority
from broker.vault.clock import SystemClock
from broker.vault.keys import check_private_directory
from broker.vault.service import Random, Vault
from broker.vault.store import OWN_SECRETS, SecretStore, StoreError, check_rollback
from broker.vault.store_key import StoreKey
from broker.vault.wrapping import Unwrapped, Wrapping
from state.errors import StateError
from state.store import StateStore

AUTHORITY = OWN_SECRETS + "authority"


def open_vault(
    boot: Boot,
    journal: Journal,
    random: Random = os.urandom,
    *,
    wrapping: Wrapping | None = None,
    unwrapped: Unwrapped | None = None,
) -> Vault:
    """Open key, store, state and authority in that order. Blocks. Raises BrokerError naming what is wrong.

    `wrapping` and `unwrapped` are those of broker.vault.wrapping.unwrapped_of, where a key service wraps the key.
    """
    state_dir = Path(boot.state_dir)
    check_private_directory(state_dir)
    key = StoreKey(boot, random, wrapping, unwrapped)
    store = key.opened(state_dir / "store.json")
    try:
        state = StateStore(state_dir / "state.sqlite")
    except StateError as error:
        raise _state_refused(error) from None
    try:
        check_rollback(store, state.store_generation())
        check_rollback(store, (boot.logged_generation, boot.logged_digest))
        clock = SystemClock(state.raise_clock_floor(SystemClock(state.clock_floor()).wall()))
        authority = _authority(store, clock)
        return Vault(
            boot,
            state=state,
            store=store,
            key=key,
            authority=authority,
            journal=journal,
            clock=clock,
            random=random,
        )
    except StateError as error:
        state.close()
        raise _state_refused(error) from None
    except BaseException:
        state.close()
        raise


def _state_refused(error: StateError) -> BootRefused:
    return BootRefused(error.code, error.detail, "see the messages above; restore the state from a backup")


def _authority(store: SecretStore, clock: SystemClock) -> CertificateAuthority:
    """The installation's authority, kept in the store; made at the first start."""
    try:
        try:
            raw = store.read(AUTHORITY).reveal()
        except StoreError as error:
            if error.code != "secret-missing":
                raise
            label = os.urandom(4).hex()
            authority = CertificateAuthority.create(now=clock.wall(), installation=label, node=f"node-{label}")
            packed = base64.b64encode(json.dumps(authority.unsafe_export()).encode())
            store.add(AUTHORITY, packed, owner="exeat", now=clock.wall(), scrub=False)
            return authority
        return CertificateAuthority.load(json.loads(base64.b64decode(raw)))
    except (AuthorityError, ValueError):
        raise BootRefused("authority-invalid", "the certificate authority in the store cannot be read") from None
