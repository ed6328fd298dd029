"""`exeat secret`: values go in, never out. They come from standard input or a prompt, never from the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, secret_input
from exeat.output import Output, fail, note, print_json, print_table, say

app = typer.Typer(help="Secrets in the embedded store, and sources elsewhere.", no_args_is_help=True)

CredentialArgument = Annotated[
    str | None, typer.Argument(metavar="CREDENTIAL", help="One credential of credentials.yaml (default: all).")
]
SandboxOption = Annotated[
    str | None, typer.Option("--sandbox", help="The sandbox that ${sandbox.x} and leases are for: its id.")
]
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


@app.command()
def check(
    credential: CredentialArgument = None,
    sandbox: SandboxOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Ask every source now whether it gives what credentials.yaml refers to. Changes nothing.

    Shows version, fingerprint (equal for equal values, of this installation only) and the age of the copy in use,
    never a value. Exits with 1 where one gives nothing, saying why and what to do.
    """
    try:
        rows = admin(config).check_credentials(credential, sandbox=sandbox)
    except AdminError as error:
        explain(error)
    _show(rows, output)


@app.command()
def sync(
    credential: CredentialArgument = None,
    sandbox: SandboxOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Drop the copies of what sources gave and fetch it again, so that the next call uses what is there now."""
    try:
        rows = admin(config).sync_credentials(credential, sandbox=sandbox)
    except AdminError as error:
        explain(error)
    _show(rows, output)


def _show(rows: list[dict[str, Any]], output: Output) -> None:
    """The rows as a table, what failed below it with cause and remedy; exits with 1 where one did."""
    if output is Output.json:
        print_json(rows)
    else:
        columns = ["CREDENTIAL", "PART", "SOURCE", "STATE", "VERSION", "FINGERPRINT", "AGE"]
        print_table(columns, [_cells(row) for row in rows])
    failed = [row for row in rows if row["error"]]
    for row in failed:
        cause = f"{row['credential']} ({row['part']}): {row['error']}: {row['detail']}"
        note(f"{cause}\n    {row['remedy']}" if row["remedy"] else cause)
    if failed:
        fail(f"{len(failed)} of {len(rows)} references give no secret now; calls that need them are refused")


def _cells(row: dict[str, Any]) -> list[Any]:
    state = "needs --sandbox" if row["needs_sandbox"] else row["error"] or "ok"
    age = "" if row["age"] is None else f"{row['age']} s"
    return [row["credential"], row["part"], row["source"], state, row["version"], row["fingerprint"], age]
