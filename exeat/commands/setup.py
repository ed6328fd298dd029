"""`exeat init` and `exeat ca`: what a person does once."""

from __future__ import annotations

import os
import secrets
from importlib import resources
from pathlib import Path
from typing import Annotated

import orjson
import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, places
from exeat.output import EXIT_USAGE, Output, fail, print_json, say
from exeat.principals import uid_of
from rules.schema import credentials_schema, json_schema

ca_app = typer.Typer(help="The certificate authority that sandboxes trust.", no_args_is_help=True)

ROLES = ("coding-agent",)
FILES = ("exeat.yaml", "credentials.yaml", "policy.yaml", "keys/store.key")


def init(
    role: Annotated[str, typer.Option("--for", help="Which starting policy to write: coding-agent.")] = "coding-agent",
    folder: Annotated[Path | None, typer.Option("--dir", help="Where (default: the configuration folder).")] = None,
) -> None:
    """Write the three files and the store's key, or those that are missing. Existing files are never changed."""
    if role not in ROLES:
        fail(f"there is no starting policy named {role!r}", remedy=f"known: {', '.join(ROLES)}", code=EXIT_USAGE)
    target = (folder or places().config).absolute()
    try:
        written = write_installation(target)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", remedy="choose a folder of yours with --dir")
    if not written:
        fail(
            f"{target} already holds {', '.join(FILES)}; nothing was changed",
            remedy="edit those files, or give another folder with --dir",
        )
    option = "" if folder is None else f" --config {target / 'exeat.yaml'}"
    say(f"Wrote {', '.join(written)} in {target}")
    say("Next:  exeat run" + option + " -- bash        a shell in a sandbox with this policy")
    say("  or:  exeat up" + option + "                  the gateway for other sandboxes")


def write_installation(target: Path, texts: dict[str, str] | None = None) -> list[str]:
    """Write what `target` lacks of settings, credentials, policy, key and schemas; return which of FILES were written.

    `texts` replaces templates by name. Raises OSError.
    """
    target.mkdir(mode=0o755, parents=True, exist_ok=True)
    keys = target / "keys"
    keys.mkdir(mode=0o700, exist_ok=True)
    written = []
    for name in FILES:
        text = (texts or {}).get(name) or _template(name)
        if _write(target / name, text, 0o600 if name in ("credentials.yaml", "keys/store.key") else 0o644):
            written.append(name)
    (target / "schema").mkdir(mode=0o755, exist_ok=True)
    for name, schema in (("policy", json_schema()), ("credentials", credentials_schema())):
        text = orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode() + "\n"
        _write(target / "schema" / f"{name}.schema.json", text, 0o644)
    if os.geteuid() == 0:  # the vault reads these under a uid of its own
        if "keys/store.key" in written:
            for path in (keys, keys / "store.key"):
                os.chown(path, uid_of("vault"), uid_of("vault"))
        if "credentials.yaml" in written:
            os.chown(target / "credentials.yaml", 0, uid_of("vault"))
            (target / "credentials.yaml").chmod(0o640)
    return written


def _template(name: str) -> str:
    if name == "keys/store.key":
        return secrets.token_hex(32) + "\n"
    return resources.files("exeat").joinpath("templates", name).read_text("utf-8")


def _write(path: Path, text: str, mode: int) -> bool:
    """Make the file `path`; False where something is there already, be it a link that leads nowhere."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    return True


@ca_app.command("show")
def ca_show(config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Print the root certificate in PEM (add it where a client has no variable for it)."""
    try:
        answer = admin(config).ca()
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(answer)
    else:
        say(str(answer["root_pem"]).rstrip("\n"))
