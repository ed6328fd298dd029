"""`kind: sops` and `kind: age`: files that lie encrypted beside the code, decrypted in memory by their own programs.

`sops` (getsops.io) prints the whole file as JSON: a reference names one of its fields, `a.b` for nested ones. Its key
is `auth: {age_key: ...}`, or what it finds by the variables that `environment:` passes (AWS, GCP, its own key file).
`age` (age-encryption.org) prints one value, whose fields can be named where it is a JSON object.

By the programs and not by libraries: SOPS has none in Python, and age's is native code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from broker.sources.base import Document, SourceError, Unleased, fields_of, flat, json_object
from broker.sources.program import Program

KEY_VARIABLE = "SOPS_AGE_KEY"


class SopsSource(Unleased):
    """`age_key` gives the text of an age identity, "" for none."""

    def __init__(self, name: str, program: Program, age_key: Callable[[], Awaitable[str]]) -> None:
        self._name = name
        self._program = program
        self._age_key = age_key

    async def read(self, document: str, before: Document | None) -> Document:
        what = f"{self._name}:{document}"
        key = await self._age_key()
        environment = {**self._program.environment, **({KEY_VARIABLE: key} if key else {})}
        program = replace(self._program, environment=environment)
        printed = await program.output(["--decrypt", "--output-type", "json", document], what)
        found = json_object(printed)
        if found is None:
            raise SourceError("source-unreadable", f"{what}: sops printed no JSON object")
        return Document(fields=flat(found))


class AgeSource(Unleased):
    """`identity` is the path of the file with the private key, which `age` reads itself."""

    def __init__(self, name: str, program: Program, identity: str) -> None:
        self._name = name
        self._program = program
        self._identity = identity

    async def read(self, document: str, before: Document | None) -> Document:
        arguments = ["--decrypt", "--identity", self._identity, document]
        printed = await self._program.output(arguments, f"{self._name}:{document}")
        return Document(fields=fields_of(printed.removesuffix(b"\n").removesuffix(b"\r")))
