"""Runs a program that gives a secret: one argv, an environment of named variables, a deadline, a bounded output.

The program is the operator's (RULINGS 3.6), named by its absolute path. It is started without a shell, in a session
of its own, with an empty standard input and nothing of ours inherited; the vault's no_new_privs passes on to it, so a
set-uid helper gains nothing. What it writes to standard error is thrown away, because it may hold what it was asked
for. It is killed with everything that it started when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from broker.sources.base import SourceError, unreachable

PROGRAM_SECONDS: Final = 4.0
MAX_OUTPUT: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program and what it is given besides its arguments. `environment` may hold secrets."""

    path: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    seconds: float = PROGRAM_SECONDS

    async def output(self, arguments: Sequence[str], what: str) -> bytes:
        """What it prints when called with `arguments`. Raises SourceError naming `what` and never what it printed."""
        _check(self.path, what)
        try:
            process = await asyncio.create_subprocess_exec(
                self.path,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd="/",
                env=dict(self.environment),
                start_new_session=True,
            )
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise SourceError("source-refused", f"{what}: {self.path} cannot be started ({why})", _PERMIT) from None
        assert process.stdout is not None
        printed = b""
        late = False
        try:
            async with asyncio.timeout(self.seconds):
                printed = await _read(process.stdout)
                code = await process.wait() if len(printed) <= MAX_OUTPUT else None
        except TimeoutError:
            late = True
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if late:
            raise unreachable(f"{what}: {self.path} took longer than {self.seconds:g} s", "see what it waits for")
        if code is None:
            raise SourceError("source-refused", f"{what}: {self.path} printed more than {MAX_OUTPUT} bytes")
        if code != 0:
            raise SourceError(
                "source-refused", f"{what}: {self.path} ended with {code}", "run it by hand as the gateway's user"
            )
        return printed


_PERMIT = "let the gateway's user run it"


def _check(path: str, what: str) -> None:
    """Whoever can write the program chooses the secret, and runs code beside the store."""
    try:
        found = os.stat(path)
    except OSError:
        raise SourceError("source-refused", f"{what}: {path} is not there", "install it, or correct program:") from None
    if not stat.S_ISREG(found.st_mode):
        raise SourceError("source-refused", f"{what}: {path} is not a file", "correct program:")
    if found.st_mode & 0o022 or found.st_uid not in (0, os.geteuid()):
        raise SourceError("source-refused", f"{what}: others may write {path}", f"chown root {path}; chmod go-w {path}")


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Everything up to one byte over the bound."""
    held = bytearray()
    while len(held) <= MAX_OUTPUT:
        piece = await stream.read(MAX_OUTPUT + 1 - len(held))
        if not piece:
            break
        held += piece
    return bytes(held)
