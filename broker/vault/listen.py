"""For containers: a Unix socket where workers and executors connect; the peer's uid says which it is.

On one machine the control streams are inherited descriptors and this module is not used.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from pathlib import Path

from broker.admin.peers import peer_of
from broker.vault.boot import BootRefused
from broker.vault.service import Vault
from net.process import complain

MAX_PROCESSES = 256


async def listen_for_processes(vault: Vault) -> ProcessListener:
    """Start accepting at `boot.listen_path`. Raises BootRefused."""
    return ProcessListener(vault)


class ProcessListener:
    """Accepts by uid. Names are given here: `worker-N`, `executor-N`, never reused in one boot."""

    def __init__(self, vault: Vault) -> None:
        path = Path(vault.boot.listen_path or "")
        self._vault = vault
        self._numbers = itertools.count(1)
        try:
            fresh = path.with_name(path.name + ".new")
            fresh.unlink(missing_ok=True)
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.bind(str(fresh))
            fresh.chmod(0o666)  # the uid decides, and only the listed containers mount this folder
            self._sock.listen(64)
            fresh.replace(path)  # the name appears when somebody listens
        except OSError as error:
            raise BootRefused("listen-unavailable", f"{path}: {os.strerror(error.errno or 0)}") from None
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return
        try:
            kind = self._vault.boot.listen_uids.get(str(peer_of(sock).uid))
            if kind not in ("worker", "executor") or len(self._vault.fleet.members()) >= MAX_PROCESSES:
                complain("vault", "a control connection of an unlisted uid was refused")
                sock.close()
                return
            name = f"{kind}-{next(self._numbers)}"
            self._vault.spawn(self._vault.adopt(sock, name, kind))
        except OSError as error:
            sock.close()
            complain("vault", "a control connection failed", error)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
