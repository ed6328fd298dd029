"""`exeat store`: the embedded store as a whole. What is in it is `exeat secret`'s."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, secret_input
from exeat.output import Output, print_json, say

app = typer.Typer(help="The embedded store as a whole: its key.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `rotate-key` a word of its own, although it is the only one."""


@app.command("rotate-key")
def rotate_key(
    stdin: Annotated[
        bool,
        typer.Option(
            "--stdin", help="Take the new key (64 hex digits or base64) or passphrase from standard input or a prompt."
        ),
    ] = False,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Give the store another key, and every secret in it a fresh data key; nothing that runs is interrupted.

    A key file is replaced by itself. A key that lies elsewhere (a passphrase, a credential of systemd) you change
    there, and hand over with --stdin. Backups open with the key they were made under: keep the old one as long as them.
    """
    try:
        answer = admin(config).rotate_key(secret_input("New key") if stdin else None)
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(answer)
        return
    say(f"the store has another key ({answer['records']} records, generation {answer['generation']})")
    if stdin:
        say("It opens with the key you gave and with no other: put that where `key:` in exeat.yaml says, now.")
