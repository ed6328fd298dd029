"""`env:NAME`: a variable of the operator's environment, passed at boot (our own environment is empty)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from broker.sources.base import SourceError
from broker.vault.secret import Secret, SecretRefused


class EnvironmentSource:
    """`values` is what the boot message carried."""

    blocks = False

    def __init__(self, values: Mapping[str, str], version_key: bytes) -> None:
        self._values = dict(values)
        self._version_key = version_key

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        if name not in self._values:
            raise SourceError("source-missing", f"env:{name}", "set the variable before `exeat up`")
        return make_secret(self._values[name].encode(), f"env:{name}", scrub=scrub, version_key=self._version_key)


def make_secret(value: bytes, name: str, *, scrub: bool, version_key: bytes, version: str = "") -> Secret:
    """A Secret. Without a `version` of its source a short keyed digest tells changes apart and helps nobody guess."""
    try:
        return Secret(value, name=name, version=version or fingerprint(value, version_key), scrub=scrub)
    except SecretRefused as error:
        raise SourceError("source-refused", f"{name}: {error.code}") from None


def fingerprint(value: bytes, key: bytes) -> str:
    """Eight hex digits that are the same for the same value in this installation, and say nothing to anybody else."""
    return hmac.digest(key, value, hashlib.sha256).hex()[:8]
