"""`systemd:NAME`: a credential that systemd passed to the gateway (systemd.exec(5): LoadCredential=, SetCredential=).

systemd decrypts them into a folder that only the service's own user may read, for as long as it runs. So the
supervisor reads them as it starts and hands them to the vault with its boot document, like the environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.sources.base import SourceError
from broker.sources.env import make_secret
from broker.vault.secret import Secret


class SystemdSource:
    """`values` is what the boot message carried."""

    blocks = False

    def __init__(self, values: Mapping[str, bytes], version_key: bytes) -> None:
        self._values = dict(values)
        self._version_key = version_key

    def fetch(self, name: str, *, scrub: bool) -> Secret:
        value = self._values.get(name)
        if value is None:
            remedy = f"add LoadCredential={name}:PATH to the unit and restart it (64 KiB each, 256 KiB together)"
            raise SourceError("source-missing", f"systemd:{name}", remedy)
        value = value.removesuffix(b"\n").removesuffix(b"\r")
        return make_secret(value, f"systemd:{name}", scrub=scrub, version_key=self._version_key)
