"""`exeat`: the command. This file is the map of its sub-commands; each lives in exeat/commands/."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer

from exeat.commands import (
    audit,
    backup,
    capture,
    clock,
    doctor,
    gateway,
    policy,
    run,
    sandbox,
    scan,
    secret,
    setup,
    store,
)
from exeat.output import EXIT_USAGE, Output, fail, is_plain, print_json, say
from exeat.version import __version__

app = typer.Typer(
    name="exeat",
    help="A credential-brokering egress proxy and access gateway for AI sandboxes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a pretty traceback shows locals, and a local may be a secret
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("init")(setup.init)
app.command("up")(gateway.up)
app.command("serve")(gateway.serve)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.command("demo")(run.demo)
app.command("env")(sandbox.env)
app.command("status")(gateway.status)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.command("scan")(scan.scan)
app.command("doctor")(doctor.doctor)
app.command("why")(audit.why)
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(secret.app, name="secret")
app.add_typer(store.app, name="store")
app.add_typer(policy.app, name="policy")
app.add_typer(audit.app, name="audit")
app.add_typer(capture.app, name="capture")
app.add_typer(setup.ca_app, name="ca")
app.add_typer(clock.app, name="clock")


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"exeat {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What holds for every command."""


@app.command()
def version(output: Annotated[Output, typer.Option("--output", "-o", help="text or json")] = Output.text) -> None:
    """Print the version."""
    if output is Output.json:
        print_json({"version": __version__, "python": sys.version.split()[0]})
    else:
        say(f"exeat {__version__}")


def main(argv: list[str] | None = None) -> Any:
    """Console entry point. Turns everything unexpected into one line; Ctrl-C exits 130."""
    if sys.flags.optimize:
        fail("Python's -O removes checks; start exeat without it", code=EXIT_USAGE)
    try:
        command = typer.main.get_command(app)
        if is_plain(sys.stdout) or is_plain(sys.stderr):
            _without_frames(command)
        return command.main(args=argv, prog_name="exeat")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(141) from None
    except Exception as error:
        # No text of the error: it may hold what a secret's owner typed. Class and place are enough to find it.
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        fail(
            f"unexpected {type(error).__name__} at {where}",
            remedy="this is a mistake in exeat; please report that line",
        )


def _without_frames(command: Any) -> None:
    """Have help and usage errors of `command` and everything below it printed as text, for pipes and NO_COLOR."""
    command.rich_markup_mode = None
    for nested in getattr(command, "commands", {}).values():
        _without_frames(nested)
