"""`exeat sandbox` and `exeat env`: identities for sandboxes that something else runs (a container, a microVM)."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.admin.client import AdminError
from capture.plan import PlanError
from exeat.capturing import captured_interface, quieten, sockets_on
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, settings
from exeat.commands.proof import armed_by, prove_, prove_first
from exeat.environment import FORMATS, client_environment, removals, render
from exeat.launch import ListenerKind
from exeat.netfilter import Netfilter, NetfilterError
from exeat.output import (
    EXIT_BOUNDARY,
    EXIT_USAGE,
    Output,
    fail,
    note,
    print_fields,
    print_json,
    print_table,
    say,
)
from exeat.session import RemoteListeners
from exeat.settings import Settings
from exeat.supervisor import SandboxListener, StartRefused
from rules.names import InvalidName, parse_authority

app = typer.Typer(help="Sandboxes: create, prove, list, show, thaw, end.", no_args_is_help=True)

RoleOption = Annotated[str | None, typer.Option("--role", "-r", help="Its role (default: the only one there is).")]
TtlOption = Annotated[str | None, typer.Option("--ttl", help="How long it lives: 90s, 30m, 1h, 2d.")]
OwnerOption = Annotated[str, typer.Option("--owner", help="Who answers for it; in every record.")]
AgentOption = Annotated[str, typer.Option("--agent", help="The program in it; in every record.")]
TaskOption = Annotated[str, typer.Option("--task", help="What it is for; in every record.")]
AttributeOption = Annotated[
    list[str] | None, typer.Option("--attribute", "-a", help="name=value for ${sandbox.name} in policy; repeatable.")
]
FormatOption = Annotated[str, typer.Option("--format", "-f", help=f"One of {', '.join(FORMATS)}.")]
NetnsOption = Annotated[
    Path | None, typer.Option("--netns", help="With --capture: its network namespace, to be probed; root.")
]
FilesOption = Annotated[
    Path | None, typer.Option("--files", help="Folder of ca.pem and bundle.pem as the sandbox will see it.")
]


def attributes(pairs: list[str] | None) -> dict[str, str]:
    """`name=value` pairs as a mapping; exits on anything else."""
    result: dict[str, str] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name or name in result:
            fail(f"--attribute {pair!r} is not name=value (each name once)", code=EXIT_USAGE)
        result[name] = value
    return result


def only_role(client: Any, wanted: str | None) -> str:
    """`wanted`, or the policy's only role. Exits naming the roles when there are several."""
    roles = sorted(client.policy().get("roles", []))
    if wanted is None and len(roles) == 1:
        return str(roles[0])
    if wanted is None:
        fail(f"the policy has {len(roles)} roles", remedy=f"choose one: --role {' | '.join(roles)}", code=EXIT_USAGE)
    if wanted not in roles:
        fail(f"the policy has no role {wanted!r}", remedy=f"known: {', '.join(roles)}", code=EXIT_USAGE)
    return wanted


def checked_format(format: str) -> Any:
    if format not in FORMATS:
        fail(f"unknown format {format!r}", remedy=f"known: {', '.join(FORMATS)}", code=EXIT_USAGE)
    return format


def variables_for(answer: dict[str, Any], current: Settings, files: Path | None) -> dict[str, str]:
    """The environment of a freshly created sandbox: proxy with its token, CA files, placeholders."""
    if current.listen is None:
        fail("this gateway has no listener (listen: none)", remedy="set listen: in exeat.yaml", code=EXIT_USAGE)
    folder = files or current.client_files
    host, port = current.listen
    authority = f"[{host}]" if ":" in host else host
    return client_environment(
        proxy_url=f"http://session:{answer['token']}@{authority}:{port}",
        ca_file=str(folder / "ca.pem"),
        bundle_file=str(folder / "bundle.pem"),
    ) | {str(name): str(value) for name, value in answer.get("env", {}).items()}


@app.command()
def create(
    role: RoleOption = None,
    ttl: TtlOption = None,
    owner: OwnerOption = "",
    agent: AgentOption = "",
    task: TaskOption = "",
    attribute: AttributeOption = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Its token counts only from this source address.")
    ] = None,
    port: Annotated[
        str | None, typer.Option("--port", help="A listener of its own, ADDRESS:PORT, that it alone can reach.")
    ] = None,
    unix: Annotated[
        Path | None, typer.Option("--unix", help="A Unix socket of its own at this path, that it alone can reach.")
    ] = None,
    capture: Annotated[
        str | None, typer.Option("--capture", help="The captured interface that leads to it ('exeat capture'); root.")
    ] = None,
    netns: NetnsOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Create a sandbox. Its token is shown once and stored only as a hash.

    With --port, --unix or --capture the listener itself identifies it, and no token is needed there. With --netns
    every way out is tried before anything else: its credentials are armed where none leads out ('exeat sandbox prove'
    has to repeat that), and it is not created where one does.
    """
    if netns is not None and capture is None:
        fail("--netns belongs to --capture", code=EXIT_USAGE)
    if sum(value is not None for value in (address, port, unix, capture)) > 1:
        fail("choose one of --address, --port, --unix and --capture", code=EXIT_USAGE)
    current = settings(config)
    client = admin(config)
    channel: dict[str, str] = {"kind": "shared"}
    listeners: list[tuple[ListenerKind, socket.socket]] = []
    if address is not None:
        channel = {"kind": "address", "address": address}
    elif port is not None or unix is not None:
        channel = {"kind": "unix" if unix else "port"}
        listeners = [("proxy", own_listener(port, unix))]
    elif capture is not None:
        channel = {"kind": "port"}
        listeners = captured_listeners(capture)
    try:
        answer = client.create_sandbox(
            only_role(client, role),
            ttl=ttl,
            owner=owner,
            agent=agent,
            task=task,
            attributes=attributes(attribute),
            channel=channel,
        )
        if listeners:
            identifier, key = str(answer["id"]), str(answer.pop("channel_key"))
            found = prove_first(netns, listeners, key) if netns is not None else None
            if found is not None and found.passed:
                for _, listener in listeners:
                    listener.close()
                client.break_boundary(identifier, found.passed)
                client.end_sandbox(identifier)
                fail(f"a probe got out by: {', '.join(found.passed)}", remedy="exeat capture check", code=EXIT_BOUNDARY)
            for use, listener in listeners:
                RemoteListeners(current).leave(
                    SandboxListener(sandbox=identifier, channel_key=key, use=use, socket=listener)
                )
            if found is not None:
                answer |= armed_by(client, identifier, found)
    except AdminError as error:
        explain(error)
    except StartRefused as error:
        client.end_sandbox(str(answer["id"]))
        fail(str(error), remedy=error.remedy)
    if output is Output.json:
        print_json(answer)
        return
    _say_unarmed(answer)
    say(f"sandbox  {answer['id']}")
    say(f"token    {answer['token']}   (shown once)")
    for name, value in sorted(answer.get("env", {}).items()):
        say(f"env      {name}={value}   (placeholder)")


def _say_unarmed(answer: dict[str, Any]) -> None:
    """A sandbox that was given placeholders which will be refused: better heard now than from the first refusal."""
    if answer.get("env") and not answer.get("armed"):
        note(
            f"exeat: no credential is used for {answer['id']}, because nothing confines it that we know of; "
            "where something does, state it in the role: boundary: {external: ..., reason: ...}"
        )


def own_listener(port: str | None, unix: Path | None) -> socket.socket:
    """A listening socket at `port` (ADDRESS:PORT) or `unix`; exits with the cause when it cannot be made."""
    try:
        if unix is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(unix.absolute()))
            unix.chmod(0o666)  # who may reach it is decided by the folder, which only the sandbox should see
        else:
            host, number = parse_authority(str(port), None)
            family = socket.AF_INET6 if ":" in host.text else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.text, number))
        listener.listen(1024)
    except InvalidName:
        fail(f"--port {port!r} is not ADDRESS:PORT with a numeric address", code=EXIT_USAGE)
    except OSError as error:
        fail(f"cannot listen at {unix or port}: {error.strerror}", remedy="choose another path or port")
    return listener


def captured_listeners(name: str) -> list[tuple[ListenerKind, socket.socket]]:
    """The sockets of the sandbox behind the captured interface `name`; exits unless the kernel's rules hold for it."""
    try:
        interface = captured_interface(Netfilter(), name)
        quieten(interface)
        return sockets_on(interface)
    except (PlanError, NetfilterError) as error:
        fail(str(error), remedy=error.remedy)
    except OSError as error:
        taken = "another sandbox has it, or another program has its ports" if error.errno == errno.EADDRINUSE else ""
        fail(f"cannot listen on {name}: {error.strerror}", remedy=taken)


app.command("prove")(prove_)


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Ended ones too.")] = False,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """List sandboxes."""
    try:
        rows = admin(config).sandboxes(ended=everything)
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(rows)
        return
    columns = ["id", "role", "owner", "agent", "task", "state"]
    print_table([name.upper() for name in columns], [[row.get(name, "") for name in columns] for row in rows])


@app.command()
def show(sandbox: str, config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Show one sandbox."""
    try:
        answer = admin(config).sandbox(sandbox)
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(answer)
        return
    answer["frozen"] = [
        f"{item['operation']} for {item['seconds']} s more ({item['budget']})" for item in answer.get("frozen", [])
    ]
    print_fields(answer)


@app.command()
def thaw(sandbox: str, config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Give a sandbox its budgets anew: what a used-up one has frozen goes on at once. On record."""
    try:
        answer = admin(config).thaw_sandbox(sandbox)
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(answer)
        return
    say(f"thawed {sandbox}: {answer['thawed']} operation(s) were frozen")


@app.command()
def end(sandbox: str, config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """End a sandbox: its token, placeholders, connections and grants die with it."""
    try:
        answer = admin(config).end_sandbox(sandbox)
    except AdminError as error:
        RemoteListeners(settings(config)).remove(sandbox)  # one whose time was over may still hold an address
        explain(error)
    RemoteListeners(settings(config)).remove(sandbox)
    if output is Output.json:
        print_json(answer)
        return
    say(f"ended {sandbox}")
    for name in ("deleted", "remains"):
        for item in answer.get(name, []):
            say(f"  {name}: {item}")


def env(
    role: RoleOption = None,
    token: Annotated[
        str | None,
        typer.Option("--token", help="Of an existing sandbox, instead of a new one; - reads it from standard input."),
    ] = None,
    format: FormatOption = "sh",
    files: FilesOption = None,
    ttl: TtlOption = None,
    owner: OwnerOption = "",
    agent: AgentOption = "",
    task: TaskOption = "",
    attribute: AttributeOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the variables that make clients in a sandbox use the gateway: proxy, CA files, placeholders.

    Creates a sandbox, unless --token names one (placeholders were printed when that one was created).
    """
    shape = checked_format(format)
    current = settings(config)
    client = admin(config)
    if token == "-":  # noqa: S105 - a dash: not on the command line, where every process can read it
        token = sys.stdin.readline().strip()
    try:
        if token is None:
            answer = client.create_sandbox(
                only_role(client, role), ttl=ttl, owner=owner, agent=agent, task=task, attributes=attributes(attribute)
            )
            note(f"created sandbox {answer['id']}; end it with: exeat sandbox end {answer['id']}")
            _say_unarmed(answer)
        else:
            answer = {"token": token}
    except AdminError as error:
        explain(error)
    print(removals(shape) + render(variables_for(answer, current, files), shape), end="")  # noqa: T201 - the result itself
