"""`exeat capture`: the rules of this machine that bring the traffic of containers and microVMs to the gateway."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from capture.docker import CREATE, read_network
from capture.gateway import COUNTERS, ruleset
from capture.plan import Interface, Kind, Plan, PlanError, parse_interface
from exeat.commands.context import OutputOption
from exeat.netfilter import InForce, Netfilter, NetfilterError
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, note, print_json, say

app = typer.Typer(
    help="Capture on a host: containers and microVMs with no way out but the gateway.", no_args_is_help=True
)

InterfaceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--interface", "-i", help="A veth or tap: NAME=GATEWAY/PREFIX[,GATEWAY6/PREFIX] with our end; repeatable."
    ),
]
BridgeOption = Annotated[
    list[str] | None, typer.Option("--bridge", "-b", help="The same for a bridge of one sandbox; repeatable.")
]

_LOCK = Path("/run/exeat-capture.lock")
_MAX_INSPECTED = 1 << 20


@app.command("print")
def print_(interface: InterfaceOption = None, bridge: BridgeOption = None) -> None:
    """Print the rules as text for `nft -f`, to read before anything is changed."""
    plan = _plan(interface, bridge)
    print(ruleset(plan), end="")  # noqa: T201 - the result itself


@app.command()
def apply(
    interface: InterfaceOption = None,
    bridge: BridgeOption = None,
    forget: Annotated[
        list[str] | None, typer.Option("--forget", help="No longer this interface, which is gone; repeatable.")
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="Exactly the given interfaces, whatever was there.")] = False,
) -> None:
    """Put interfaces under capture, beside those that are. Needs root and nftables.

    One transaction: the new rules hold, or the old ones do. Nothing changes where the kernel has them already.
    """
    given = _interfaces(interface, bridge)
    if not given and not forget:
        fail("no interface is given", remedy="--interface NAME=GATEWAY/PREFIX", code=EXIT_USAGE)
    try:
        netfilter = Netfilter()
        with _alone():
            before = _before(netfilter, only)
            plan = (Plan() if only or before is None else before.plan).with_interfaces(given).without(forget or ())
            kept = {one.name for one in plan.interfaces}
            for one in before.plan.interfaces if before else ():
                if one.name not in kept and any(one.name == name for _, name in socket.if_nameindex()):
                    remedy = f"ip link del {one.name}"
                    fail(f"{one.name} still exists: without its rules its traffic would pass freely", remedy=remedy)
            same = before is not None and not netfilter.differences(plan, before)
            unchanged = same and not netfilter.unguarded(plan)
            if not same:
                netfilter.put(plan)
                if plan.interfaces and netfilter.differences(plan, netfilter.in_force()):
                    fail("the kernel does not hold what it was given", remedy="exeat capture check")
            gone = {one.name for one in before.plan.interfaces} - kept if before else set()
            netfilter.guard(plan, gone)
        for one in given:
            for misfit in netfilter.misfits(one):
                note(f"not usable yet: {misfit}")
    except (PlanError, NetfilterError) as error:
        _explain(error)
    say(f"{'unchanged' if unchanged else 'in force'}: {', '.join(one.name for one in plan.interfaces) or 'nothing'}")


@app.command()
def check(interface: InterfaceOption = None, bridge: BridgeOption = None, output: OutputOption = Output.text) -> None:
    """Compare the kernel's rules and interfaces with the plan, and show the counters. Exit 1: they differ.

    Without interfaces the plan is the one that the kernel itself names.
    """
    given = _interfaces(interface, bridge)
    try:
        netfilter = Netfilter()
        found = netfilter.in_force()
        plan = Plan.of(given) if given else found.plan if found else Plan()
        differences = netfilter.differences(plan, found) + netfilter.unguarded(plan)
        for one in plan.interfaces:
            differences += netfilter.misfits(one)
    except (PlanError, NetfilterError) as error:
        _explain(error)
    counters = found.counters if found else {}
    if output is Output.json:
        print_json({"ok": not differences, "differences": differences, "counters": counters})
    else:
        for line in differences:
            say(line, "red")
        if not differences:
            say(f"the kernel holds the plan: {', '.join(one.name for one in plan.interfaces)}")
        for name, packets in counters.items():
            say(f"{packets:10}  {name:10} {COUNTERS.get(name, 'packets between ports of one bridge, dropped')}")
    if differences:
        raise typer.Exit(EXIT_NO)


@app.command()
def tap(
    name: str,
    number: Annotated[int, typer.Option("--number", "-n", min=0, max=16383, help="Which subnet: one per sandbox.")] = 0,
    user: Annotated[str | None, typer.Option("--user", help="Who runs the microVM.")] = None,
) -> None:
    """Print the commands that give a microVM a tap of its own with a subnet of its own. Nothing is changed."""
    low, high = 4 * (number % 64), number // 64
    text = f"{name}=198.19.{high}.{low + 1}/30,fd65:7865:6174:{number + 1:x}::1/126"
    try:
        interface = parse_interface(text)
    except PlanError as error:
        _explain(error)
    four, six = interface.gateways
    owner = f" user {user}" if user else ""
    lines = [
        "# on the host, as root; the rules come first, so that the interface is never without them",
        f"exeat capture apply {interface.option}",
        f"ip tuntap add dev {name} mode tap{owner}",
        f"ip addr add {four} dev {name}",
        f"ip -6 addr add {six} dev {name} nodad",
        f"ip link set {name} up",
        f"exeat sandbox create --capture {name}",
        "# in the microVM",
        f"ip addr add {four.ip + 1}/30 dev eth0 && ip -6 addr add {six.ip + 1}/126 dev eth0 nodad",
        "ip link set eth0 up",
        f"ip route add default via {four.ip} && ip -6 route add default via {six.ip}",
        f"echo nameserver {four.ip} > /etc/resolv.conf",
    ]
    print("\n".join(lines))  # noqa: T201 - the result itself


@app.command()
def docker(
    network: Annotated[str, typer.Argument(help="The network's name; - reads 'docker network inspect' from stdin.")],
) -> None:
    """Print the plan and the rules for a Docker network of one sandbox. Nothing is changed."""
    try:
        found = read_network(_inspected(network))
        plan = Plan.of([found.interface])
    except PlanError as error:
        _explain(error)
    for sentence in found.notes:
        note(sentence)
    gateway = found.interface.gateways[0].ip
    print(  # noqa: T201 - the result itself
        f"# exeat capture apply {found.interface.option}\n"
        f"# exeat sandbox create --capture {found.interface.name}\n"
        f"# docker run --network {found.name} --dns {gateway} IMAGE\n"
        f"{ruleset(plan)}",
        end="",
    )


# --- what the commands share ---


def _interfaces(links: list[str] | None, bridges: list[str] | None) -> list[Interface]:
    kinds: tuple[tuple[Kind, list[str]], ...] = (("link", links or []), ("bridge", bridges or []))
    try:
        return [parse_interface(text, kind) for kind, texts in kinds for text in texts]
    except PlanError as error:
        fail(str(error), remedy=error.remedy, code=EXIT_USAGE)


def _plan(links: list[str] | None, bridges: list[str] | None) -> Plan:
    try:
        plan = Plan.of(_interfaces(links, bridges))
    except PlanError as error:
        fail(str(error), remedy=error.remedy, code=EXIT_USAGE)
    if not plan.interfaces:
        fail("no interface is given", remedy="--interface NAME=GATEWAY/PREFIX", code=EXIT_USAGE)
    return plan


def _before(netfilter: Netfilter, only: bool) -> InForce | None:
    """What is in force. With --only, rules that cannot be read are as none: the given plan takes their place."""
    try:
        return netfilter.in_force()
    except NetfilterError:
        if not only:
            raise
        return None


@contextmanager
def _alone() -> Iterator[None]:
    """One `apply` at a time: each reads what is in force and adds to it."""
    descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _inspected(network: str) -> Any:
    """The JSON of `docker network inspect`, from standard input or from the client. Raises PlanError."""
    if network == "-":
        text = sys.stdin.read(_MAX_INSPECTED)
    else:
        client = shutil.which("docker")
        if client is None:
            fail(
                "there is no docker client here",
                remedy="where there is one: docker network inspect NETWORK | exeat capture docker -",
            )
        if network.startswith("-"):
            raise PlanError(f"{network!r} is no network's name")
        done = subprocess.run(
            [client, "network", "inspect", network], capture_output=True, text=True, check=False, timeout=30
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["no answer"]
            raise PlanError(f"docker: {said[-1]}", f"a network of one sandbox: {CREATE}")
        text = done.stdout
    try:
        return json.loads(text)
    except ValueError:
        raise PlanError("this is not JSON") from None


def _explain(error: PlanError | NetfilterError) -> NoReturn:
    fail(str(error), remedy=error.remedy)
