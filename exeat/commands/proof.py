"""`exeat sandbox prove`, and the proof of a captured sandbox that `exeat sandbox create --netns` begins with."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.admin.client import AdminClient, AdminError
from capture.plan import PlanError
from exeat.capturing import captured_interface
from exeat.commands.context import ConfigOption, admin, explain, settings
from exeat.launch import ListenerKind
from exeat.netfilter import Netfilter, NetfilterError
from exeat.output import EXIT_BOUNDARY, EXIT_NO, fail, note, say
from exeat.proving import Namespaces, Proof, answering, prove


def prove_first(netns: Path, listeners: list[tuple[ListenerKind, socket.socket]], key: str) -> Proof:
    """Try every way out of `netns` while the interface's sockets are still ours."""
    channel_key = bytes.fromhex(key)
    with entered(netns) as net, answering(listeners, channel_key):
        return prove(Namespaces(net=net, user=-1, tools=None, channel_key=channel_key, hosted=True))


@contextlib.contextmanager
def entered(netns: Path) -> Iterator[int]:
    """A descriptor of the namespace at `netns`; exits where there is none to open."""
    try:
        descriptor = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        fail(f"{netns}: {error.strerror}", remedy="name a file such as /run/netns/NAME or /proc/PID/ns/net")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def armed_by(client: AdminClient, sandbox: str, found: Proof) -> dict[str, Any]:
    """What a probe that found no way out makes of `sandbox`, as fields of its answer."""
    if not found.proven:
        note(f"exeat: not proven, nothing was seen of: {', '.join(found.unclear)}; try 'exeat sandbox prove'")
        return {}
    client.prove_boundary(sandbox, "probed")
    return {"boundary": "probed", "armed": True}


def prove_(
    sandbox: str,
    capture: Annotated[str, typer.Option("--capture", help="The captured interface that leads to it.")],
    netns: Annotated[Path, typer.Option("--netns", help="Its network namespace: /run/netns/NAME, /proc/PID/ns/net.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again (self_check_seconds), until it ends.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Try every way out of a captured sandbox's network namespace, and arm its credentials where none leads out; root.

    A proof counts for a few minutes, so run it with --watch, or from a timer. What gets out disarms the sandbox for
    good and exits with 125. Connections are tried by 'exeat sandbox create --netns' alone; here the kernel's rules are
    compared instead, so that the sandbox's own record stays its own.
    """
    client, current = admin(config), settings(config)
    while True:
        try:
            found = proof_again(capture, netns)
            if found.passed:
                client.break_boundary(sandbox, found.passed)
                fail(f"a probe got out by: {', '.join(found.passed)}", remedy="exeat capture check", code=EXIT_BOUNDARY)
            armed_by(client, sandbox, found)
        except AdminError as error:
            explain(error)
        if not watch:
            say(f"{sandbox}: {'proven' if found.proven else 'not proven'}")
            raise SystemExit(0 if found.proven else EXIT_NO)
        time.sleep(current.self_check_seconds)


def proof_again(capture: str, netns: Path) -> Proof:
    """Compare the host's rules for the interface, and try what needs no answer of ours. Exits where root is needed."""
    try:
        captured_interface(Netfilter(), capture)
    except (PlanError, NetfilterError) as error:
        if os.geteuid() != 0 or capture not in {name for _, name in socket.if_nameindex()}:
            fail(str(error), remedy=error.remedy)  # it could not be looked at, or the name is wrong
        note(f"exeat: {error}")
        return Proof(passed=("rules",), unclear=())
    with entered(netns) as net:
        again = Namespaces(net=net, user=-1, tools=None, channel_key=bytes(32), hosted=True, answering=False)
        return prove(again)
