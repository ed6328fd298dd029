"""`exeat secret`: values go in, never out. They come from standard input or a prompt, never from the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, secret_input
from exeat.output import Output, print_json, print_table, say

app = typer.Typer(help="Secrets in the embedded store.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="Name in the store, as credentials.yaml refers to it: store:NAME.")]


@app.command()
def add(
    name: NameArgument,
    owner: Annotated[str, typer.Option("--owner", help="Team or person responsible for it.")] = "operator",
    scrub: Annotated[bool, typer.Option(help="Mask it in answers; --no-scrub for values under 12 bytes.")] = True,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Add a secret, read from standard input or asked for."""
    try:
        answer = admin(config).add_secret(name, secret_input("Secret"), owner=owner, scrub=scrub)
    except AdminError as error:
        explain(error)
    print_json(answer) if output is Output.json else say(f"added {name}")


@app.command()
def rotate(name: NameArgument, config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Replace a secret's value; calls in flight end, later ones use the new value."""
    try:
        answer = admin(config).rotate_secret(name, secret_input("Secret"))
    except AdminError as error:
        explain(error)
    print_json(answer) if output is Output.json else say(f"rotated {name} (version {answer.get('version')})")


@app.command("list")
def list_(config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """List names, owners and versions. Values are never shown."""
    try:
        rows = admin(config).secrets()
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(rows)
    else:
        print_table(["NAME", "OWNER", "VERSION"], [[row["name"], row["owner"], row["version"]] for row in rows])


@app.command()
def remove(name: NameArgument, config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Delete a secret. Rules that need it refuse from now on."""
    try:
        answer = admin(config).remove_secret(name)
    except AdminError as error:
        explain(error)
    print_json(answer) if output is Output.json else say(f"removed {name}")
