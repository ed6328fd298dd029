"""The process around the HTTP/2 adapter: `python -I -m proxy.mitm_process <boot fd>`. Started only when a rule asks.

    boot JSON -> harden -> self-test -> address-space limit -> ready
    a worker's channel: (id, client stream) -> Session; its requests go back as (id, stream) on the same channel

It holds no key, no token, no certificate and no name of a sandbox: TLS ended in the worker, and `id` is a number that
a worker drew for one client connection. It has no network: what it can reach are the streams it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Final

from net.fdchannel import ChannelBroken, FdChannel, socket_pair
from net.process import BootError, complain, harden, quiet_hooks, read_boot
from net.stream import ByteStream, open_socket_stream
from net.turns import Turns
from proxy.mitm_adapter import AdapterFault, Session, check_version
from proxy.mitm_selftest import self_test

PROCESS: Final = "adapter"
MAX_SESSIONS: Final = 256
"""Client connections, all workers together."""
LOWER: Final = 10
"""Added to its niceness: where processors are short, workers, vault and log come before HTTP/2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What the supervisor tells it."""

    name: str
    channel_fds: tuple[int, ...]
    """SEQPACKET sockets, one to each worker."""
    memory_bytes: int = 512 * 1024 * 1024
    """Address space beyond what the process has at its start."""
    ready_fd: int | None = None
    """Written `ready\\n` after the self-test."""


class Adapter:
    """One per process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions = 0
        self._turns = Turns()

    def serve(self, channel: FdChannel) -> asyncio.Task[None]:
        """Take client connections from one worker until its channel ends."""
        return asyncio.ensure_future(self._take(channel))

    async def _take(self, channel: FdChannel) -> None:
        try:
            while (taken := await channel.receive()) is not None:
                message, sock = taken
                if self._sessions >= MAX_SESSIONS:
                    sock.close()
                    continue
                self._sessions += 1
                task = asyncio.ensure_future(self._session(channel, message, sock))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except ChannelBroken:
            pass

    async def _session(self, channel: FdChannel, number: bytes, sock: socket.socket) -> None:
        async def dial() -> ByteStream:
            ours, theirs = socket_pair()
            try:
                await channel.send(number, theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            return await open_socket_stream(ours)

        try:
            client = await open_socket_stream(sock)
            client.share = self._turns.share(("", number.hex()))
            await Session(client, dial).run()
        except (ChannelBroken, OSError):
            pass  # the worker is going
        except Exception as error:
            complain(PROCESS, "a connection ended by an unexpected error", error)
        finally:
            self._sessions -= 1

    async def stop(self) -> None:
        """End every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def give_way() -> None:
    """Come after workers, vault and log where processors are short; whatever priority was inherited.

    A nice value counts inside a session where the kernel schedules by session (autogroups, sched(7)), and each of our
    processes has one of its own: then it is the session that gets the value. To be called before harden(), which takes
    the file away.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(LOWER)
    if os.getsid(0) in (
        os.getpid(),
        0,
    ):  # 0: led by the launcher, outside of our PID namespace; never another's session
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as session:
            session.write(str(LOWER))


def main(argv: list[str] | None = None) -> int:
    """The process."""
    arguments = sys.argv if argv is None else argv
    quiet_hooks(PROCESS)
    logging.disable(logging.CRITICAL)  # mitmproxy's messages quote what clients sent
    try:
        give_way()
        harden()
        boot = read_boot(int(arguments[1]), Boot)
    except (BootError, IndexError, ValueError, OSError) as error:
        complain(PROCESS, f"cannot start: {error}" if isinstance(error, BootError) else "cannot start", error)
        return 2
    return asyncio.run(_run(boot))


async def _run(boot: Boot) -> int:
    try:
        check_version()
        await self_test()
    except AdapterFault as error:
        complain(PROCESS, f"does not serve: {error}")
        return 3
    limit_memory(boot.memory_bytes)
    adapter = Adapter()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    channels = [FdChannel(socket.socket(fileno=fd)) for fd in boot.channel_fds]
    taking = [adapter.serve(channel) for channel in channels]
    if boot.ready_fd is not None:
        os.write(boot.ready_fd, b"ready\n")
        os.close(boot.ready_fd)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopping, asyncio.ensure_future(asyncio.wait(taking))], return_when=asyncio.FIRST_COMPLETED)
    await adapter.stop()
    stopping.cancel()
    for channel in channels:
        channel.close()
    await asyncio.gather(*taking, return_exceptions=True)
    return 0


def limit_memory(more: int) -> None:
    """Set RLIMIT_AS to what is mapped now plus `more` bytes: a client that makes us allocate ends us, not the node."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        mapped = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, mapped + more))


if __name__ == "__main__":
    sys.exit(main())
