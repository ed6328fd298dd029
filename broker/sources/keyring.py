"""`kind: keyring`: the desktop's keyring by `secret-tool` (libsecret), which speaks the Secret Service API.

By the program, so that no D-Bus client runs in the process that holds every other secret. It finds the session by
variables: `environment: [DBUS_SESSION_BUS_ADDRESS]`, or XDG_RUNTIME_DIR. For a person's own machine: a gateway that
runs as another user has no keyring. Attributes are those of the Python keyring library: `service` and `username`.
"""

from __future__ import annotations

from broker.sources.base import Document, SourceError, Unleased
from broker.sources.program import Program
from rules.secret_references import WHOLE


class KeyringSource(Unleased):
    """References are `service/user`."""

    def __init__(self, name: str, program: Program) -> None:
        self._name = name
        self._program = program

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        service, _, user = document.partition("/")
        printed = await self._program.output(["lookup", "service", service, "username", user], what)
        if not printed:
            raise SourceError("source-missing", what, f"secret-tool store --label NAME service {service} username USER")
        return Document(fields={WHOLE: printed.removesuffix(b"\n")})
