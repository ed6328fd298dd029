"""`kind: onepassword`: `op://vault/item/[section/]field`, read by 1Password's own program `op`.

By the program and not by their SDK, whose core is a native library inside the process that holds every other secret.
`auth: {token: ...}` is a service account's (developer.1password.com: Service Accounts), handed over as
OP_SERVICE_ACCOUNT_TOKEN; without it `op` finds its session by the variables that `environment:` passes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from broker.sources.base import Document, Unleased
from broker.sources.program import Program
from rules.secret_references import WHOLE

TOKEN_VARIABLE = "OP_SERVICE_ACCOUNT_TOKEN"  # noqa: S105 - the name of a variable


class OnePasswordSource(Unleased):
    """`token` gives the service account's token, "" for none."""

    def __init__(self, name: str, program: Program, token: Callable[[], Awaitable[str]]) -> None:
        self._name = name
        self._program = program
        self._token = token

    async def read(self, document: str, before: Document | None) -> Document:
        token = await self._token()
        environment = {**self._program.environment, **({TOKEN_VARIABLE: token} if token else {})}
        program = replace(self._program, environment=environment)
        printed = await program.output(["read", "--no-newline", f"op:{document}"], f"{self._name}:{document}")
        return Document(fields={WHOLE: printed})
