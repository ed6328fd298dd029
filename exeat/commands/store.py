"""`exeat store`: the embedded store as a whole. What is in it is `exeat secret`'s."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from broker.admin.client import AdminError
from exeat.commands.backup import as_the_vault, stopped
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, secret_input, settings
from exeat.keyservice import key_service_fields
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, print_json, say
from exeat.upstream import UpstreamRefused

app = typer.Typer(help="The embedded store as a whole: its key.", no_args_is_help=True)


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

    A key file is replaced by itself, also one with a wrapped key. A key that lies elsewhere (a passphrase, a credential
    of systemd) you change there, and hand over with --stdin. Backups open with the key they were made under: keep the
    old one as long as them.
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


@app.command("wrap-key")
def wrap_key(
    file: Annotated[Path, typer.Option("--from", metavar="FILE", help="The key file that opens the store now.")],
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Have the key service that `key:` names wrap the key in FILE, with the gateway stopped. FILE stays as it is.

    Write `key: {wrapped: FILE, by: {...}}` into exeat.yaml before. The service must give the key back, or nothing is
    written. Afterwards start the gateway, give the store a key that never lay in clear (`exeat store rotate-key`), and
    remove FILE once no backup needs it.
    """
    known = settings(config)
    if known.wrapped_file is None:
        fail("exeat.yaml names no wrapped key", remedy="write key: {wrapped: FILE, by: {...}}", code=EXIT_USAGE)
    try:
        fields = key_service_fields(known, os.environ)
    except UpstreamRefused as error:
        fail(str(error), remedy=error.remedy, code=EXIT_USAGE)
    boot = {
        "state_dir": str(known.vault_state),
        "from_file": str(file.absolute()),
        "wrapped_file": str(known.wrapped_file),
        "wrapping": known.wrapping,
        **fields,
    }
    with stopped(known):
        answer = as_the_vault(known, "broker.vault.wrap", boot)
    if "by" not in answer:
        fail(answer.get("detail", "the wrapping process failed"), remedy=answer.get("remedy", ""), code=EXIT_NO)
    if output is Output.json:
        print_json(answer)
    else:
        say(f"{answer['by']} wrapped the key; start the gateway, and then: exeat store rotate-key")
