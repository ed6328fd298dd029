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


def init(
    role: Annotated[str, typer.Option("--for", help="Which starting policy to write: coding-agent.")] = "coding-agent",
    folder: Annotated[Path | None, typer.Option("--dir", help="Where (default: the configuration folder).")] = None,
) -> None:
    """Write the three files and the store's key, and say what comes next. Existing files are never changed."""
    if role not in ROLES:
        fail(f"there is no starting policy named {role!r}", remedy=f"known: {', '.join(ROLES)}", code=EXIT_USAGE)
    target = (folder or places().config).absolute()
    existing = [name for name in ("exeat.yaml", "credentials.yaml", "policy.yaml") if (target / name).exists()]
    if existing:
        fail(
            f"{target} already holds {', '.join(existing)}; nothing was changed",
            remedy="edit those files, or give another folder with --dir",
        )
    try:
        write_installation(target)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    option = "" if folder is None else f" --config {target / 'exeat.yaml'}"
    say(f"Wrote {target}/exeat.yaml, credentials.yaml, policy.yaml and keys/store.key")
    say("Next:  exeat run" + option + " -- bash        a shell in a sandbox with this policy")
    say("  or:  exeat up" + option + "                  the gateway for other sandboxes")


def write_installation(target: Path, texts: dict[str, str] | None = None) -> None:
    """Write settings, credentials, policy, schemas and keys into `target`. `texts` replaces templates by name."""
    target.mkdir(mode=0o755, parents=True, exist_ok=True)
    keys = target / "keys"
    keys.mkdir(mode=0o700, exist_ok=True)
    _write(keys / "store.key", secrets.token_hex(32) + "\n", 0o600)
    for name in ("policy.yaml", "credentials.yaml", "exeat.yaml"):
        text = (texts or {}).get(name) or resources.files("exeat").joinpath("templates", name).read_text("utf-8")
        _write(target / name, text, 0o600 if name == "credentials.yaml" else 0o644)
    (target / "schema").mkdir(mode=0o755, exist_ok=True)
    for name, schema in (("policy", json_schema()), ("credentials", credentials_schema())):
        text = orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode() + "\n"
        _write(target / "schema" / f"{name}.schema.json", text, 0o644)
    if os.geteuid() == 0:  # the vault reads these under a uid of its own
        for path in (keys, keys / "store.key"):
            os.chown(path, uid_of("vault"), uid_of("vault"))
        os.chown(target / "credentials.yaml", 0, uid_of("vault"))
        (target / "credentials.yaml").chmod(0o640)


def _write(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


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
