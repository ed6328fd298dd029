"""Runs inside `exeat run` for tests/support/entries.py: runs commands there, passes connections to the proxy.

    python inside.py FOLDER        FOLDER/commands: one JSON command a connection; FOLDER/proxy: bytes to the proxy;
                                   FOLDER/captured: a line `HOST PORT`, then bytes to that place as any program
                                   would reach it: a lookup and a connection, no variable and no proxy

Standard library only, and no import of ours: it is a workload. It ends when FOLDER/commands gets an empty line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    commands, proxy, captured = (listening(folder / name) for name in ("commands", "proxy", "captured"))
    threading.Thread(target=pass_on, args=(proxy, to_proxy), daemon=True).start()
    threading.Thread(target=pass_on, args=(captured, to_named), daemon=True).start()
    print("inside", flush=True)
    over = threading.Event()
    threading.Thread(target=obey, args=(commands, over), daemon=True).start()
    over.wait()


def obey(commands: socket.socket, over: threading.Event) -> None:
    """Run what is ordered, several commands at a time."""
    while True:
        connection, _ = commands.accept()
        threading.Thread(target=obey_one, args=(connection, over), daemon=True).start()


def obey_one(connection: socket.socket, over: threading.Event) -> None:
    with connection, connection.makefile("rwb") as lines:
        line = lines.readline()
        if not line.strip():
            over.set()
            return
        lines.write(json.dumps(run(json.loads(line))).encode())


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o777)
    listener.listen(16)
    return listener


def run(order: dict[str, object]) -> dict[str, object]:
    """`argv`, `env` (added to ours), `input`; `environment: true` only tells ours."""
    if order.get("environment"):
        return {"environment": dict(os.environ)}
    try:
        done = subprocess.run(
            order["argv"],  # type: ignore[call-overload]
            env=os.environ | order["env"],  # type: ignore[operator]
            input=str(order["input"]).encode("latin-1"),
            capture_output=True,
            timeout=120,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        code, out, err = 127, b"", repr(error).encode()
    return {"code": code, "out": out.decode("latin-1"), "err": err.decode("latin-1")}


def pass_on(listener: socket.socket, connect: Callable[[socket.socket], socket.socket]) -> None:
    """Each connection to the Unix socket becomes one to elsewhere; ends and resets are passed on."""
    while True:
        client, _ = listener.accept()
        threading.Thread(target=joined, args=(client, connect), daemon=True).start()


def joined(client: socket.socket, connect: Callable[[socket.socket], socket.socket]) -> None:
    try:
        other = connect(client)
    except OSError:
        client.close()
        return
    back = threading.Thread(target=pump, args=(other, client), daemon=True)
    back.start()
    pump(client, other)
    back.join()
    for end in (client, other):
        end.close()


def to_proxy(_client: socket.socket) -> socket.socket:
    return socket.create_connection(("127.0.0.1", 3128))


def to_named(client: socket.socket) -> socket.socket:
    line = b""
    while not line.endswith(b"\n"):
        byte = client.recv(1)
        if not byte:
            raise OSError("no destination")
        line += byte
    host, _, port = line.decode("ascii").strip().rpartition(" ")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    other = socket.create_connection(found[0][4][:2], timeout=60)
    other.settimeout(None)
    return other


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
        return
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
