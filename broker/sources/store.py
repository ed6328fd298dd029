"""`store:name`: the embedded store. Its `scrub` flag was settled when the secret was added."""

from __future__ import annotations

from broker.sources.base import SourceError
from broker.vault.secret import Secret
from broker.vault.store import OWN_SECRETS, SecretStore, StoreError


class StoreSource:
    """Records are in memory, encrypted; `fetch` decrypts one."""

    blocks = False

    def __init__(self, store: SecretStore) -> None:
        self._store = store

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        """`scrub` True asks for a value that can be scrubbed: one stored without is refused."""
        if name.startswith(OWN_SECRETS):
            raise SourceError("source-refused", f"names below {OWN_SECRETS} are the gateway's own")
        try:
            secret = self._store.read(name)
        except StoreError as error:
            if error.code == "secret-missing":
                raise SourceError("source-missing", f"store:{name}", f"exeat secret add {name}") from None
            raise SourceError("source-unreadable", f"store:{name}", error.remedy) from None
        if scrub and not secret.scrub:
            raise SourceError(
                "source-refused", f"store:{name} was added with scrub: false", "say scrub: false on the credential too"
            )
        return secret
