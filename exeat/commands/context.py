"""How a command reaches its surroundings: the --config option, the settings, the running gateway."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from broker.admin.client import AdminClient, AdminError
from exeat.output import EXIT_NO, EXIT_NOT_RUNNING, EXIT_USAGE, Output, fail
from exeat.places import Places, default_places
from exeat.settings import Settings, SettingsError, load_settings

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The settings file (default: exeat.yaml in the configuration folder)."),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text, or json for scripts.")]


def places() -> Places:
    return default_places(os.environ, os.geteuid())


def settings(config: Path | None) -> Settings:
    """The settings named on the command line, or the default ones. Exits with a clear sentence on errors."""
    file = config.absolute() if config else places().config / "exeat.yaml"
    try:
        return load_settings(file, places())
    except SettingsError as error:
        fail(str(error), code=EXIT_USAGE)


def admin(config: Path | None) -> AdminClient:
    """A client of the running gateway. Calls raise AdminError; see `explain`."""
    return AdminClient(settings(config).admin_socket)


def explain(error: AdminError) -> NoReturn:
    """Print an admin error with its remedy and exit."""
    codes = {"not-running": EXIT_NOT_RUNNING, "bad-ttl": EXIT_USAGE}
    fail(error.detail or error.code, remedy=error.remedy, code=codes.get(error.code, EXIT_NO))


def secret_input(what: str) -> bytes:
    """What a person types at a prompt that does not show it, or what is piped in; one trailing newline is dropped."""
    if sys.stdin.isatty():
        value = getpass.getpass(f"{what} (not shown): ").encode()
    else:
        value = sys.stdin.buffer.read(1 << 20)
        value = value[:-1] if value.endswith(b"\n") else value
    if not value:
        fail(f"the {what.lower()} is empty", remedy="type it at the prompt, or pipe it in with < FILE", code=EXIT_USAGE)
    return value
