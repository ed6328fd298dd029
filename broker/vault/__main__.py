"""The vault process: `python -I -m broker.vault FD`, FD an inherited descriptor with the boot document.

Fails closed: whatever is wrong at start is one line on stderr and on the report pipe, and exit code 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

from audit.events import Event
from audit.journal import AuditUnavailable
from audit.link import AuditorLink
from broker.admin.server import serve_admin
from broker.errors import BrokerError
from broker.vault.boot import Boot, check_boot
from broker.vault.listen import listen_for_processes
from broker.vault.report import report
from broker.vault.start import open_vault
from broker.vault.wrapping import unwrapped_of
from net.process import BootError, complain, harden, keep_in_memory, quiet_hooks, read_boot
from state.errors import StateError

NAME = "vault"


def main(argv: list[str]) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 0 after a drain, 2 where it refused to start."""
    quiet_hooks(NAME)
    # No logger of a library may print an exception of ours: its text or locals could hold a secret (RULINGS 1.6).
    logging.disable(logging.CRITICAL)
    try:
        harden()
        os.umask(0o077)
        locked = keep_in_memory()
        boot = read_boot(int(argv[0]), Boot)
    except (BootError, ValueError, IndexError, OSError) as error:
        detail = str(error) if isinstance(error, BootError) else "the only argument is a descriptor number"
        complain(NAME, f"cannot start: {detail}")
        return 2
    try:
        check_boot(boot)
        asyncio.run(_run(boot, locked=locked))
    except (BrokerError, StateError) as error:
        remedy = error.remedy if isinstance(error, BrokerError) else ""
        line: dict[str, Any] = {"error": error.code, "detail": error.detail, "remedy": remedy}
        problems = getattr(error, "problems", ())
        if boot.report_fd is None:  # otherwise whoever reads the report says it
            complain(NAME, f"cannot start: {error.code}: {error.detail}{'; ' + remedy if remedy else ''}")
            for problem in problems:
                complain(NAME, problem)
        report(boot, line | ({"problems": list(problems)} if problems else {}))
        return 2
    except AuditUnavailable:
        complain(NAME, "stopped: the log cannot be written")
        remedy = "the auditor says why in a line of its own: disk space, or the log folder's owner and modes"
        report(boot, {"error": "audit-unavailable", "detail": "the log cannot be written", "remedy": remedy})
        return 2
    return 0


async def _run(boot: Boot, *, locked: bool) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_fault)
    if boot.auditor_fd is not None:
        journal = AuditorLink(socket.socket(fileno=boot.auditor_fd), NAME, boot.digest_key)
    else:
        assert boot.auditor_path is not None
        try:
            journal = AuditorLink.open_path(boot.auditor_path, NAME, boot.digest_key)
        except OSError:
            raise AuditUnavailable("the auditor cannot be reached") from None
    wrapping, unwrapped = await unwrapped_of(boot)
    vault = open_vault(boot, journal, wrapping=wrapping, unwrapped=unwrapped)
    vault.memory_locked = locked
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, vault.stop)
    try:
        await vault.start()
        if wrapping is not None:
            fields = {"action": "store.key-unwrapped", "actor": "vault", "subject": wrapping.label}
            await journal.append(Event("admin.action", fields), durable=True)
        runner = await serve_admin(vault)
        server = await listen_for_processes(vault) if boot.listen_path is not None else None
        for channel in boot.channels:
            await vault.adopt(socket.socket(fileno=channel.fd), channel.name, channel.kind)
        report(boot, {"ready": True})
        if boot.report_fd is not None:
            # Nothing can be read from it: it turns readable when the supervisor, who holds the other end, is gone.
            loop.add_reader(boot.report_fd, vault.stop)
        try:
            await vault.run()
        finally:
            if server is not None:
                server.close()
            await runner.cleanup()
    finally:
        await journal.close()


def _on_loop_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    complain(NAME, "the event loop met an error", error if isinstance(error, BaseException) else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
