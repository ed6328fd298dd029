"""`exeat backup` and `exeat restore`: store and state of one moment, in one file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, settings
from exeat.keyservice import key_service_fields
from exeat.launch import BoundaryUnavailable, Plan, boot_document, launch
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, print_json, say
from exeat.principals import uid_of
from exeat.settings import Settings
from exeat.storekey import StoreKeyMissing, logged_store, store_key
from exeat.upstream import UpstreamRefused
from exeat.views import wide_view

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]


def backup(file: FileArgument, config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Write the running gateway's store and state to FILE, as of this moment. An existing file is never overwritten.

    Secrets in it are encrypted as they are in the store, and its key is not in it: keep that elsewhere, as long as the
    backup. The log is not in it: it is append-only, copy its folder.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fail(f"{file}: {error.strerror}", remedy="name a new file in a folder of yours", code=EXIT_USAGE)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            raw = admin(config).backup()
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
    except AdminError as error:
        file.unlink()
        explain(error)
    except OSError as error:
        file.unlink()
        fail(f"{file}: {error.strerror}; nothing was kept", remedy="free some space, or name another folder")
    print_json({"file": str(file), "bytes": len(raw)}) if output is Output.json else say(f"wrote {file}")


def restore(
    file: FileArgument,
    accept_older: Annotated[
        bool, typer.Option("--accept-older", help="Take a backup although a later store was in use since.")
    ] = False,
    why: Annotated[str, typer.Option("--why", help="With --accept-older: one sentence that goes on record.")] = "",
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Put FILE in the place of store and state, with the gateway stopped. What lay there is kept as *.replaced.

    A backup that was changed, made under another key, or is older than what state and log remember is refused, and
    nothing changes. Sandboxes of its time are ended. With --accept-older what was rotated or removed since is back:
    rotate and remove it again.
    """
    if accept_older and (not why.strip() or len(why) > 200 or not why.isprintable()):
        fail("--accept-older needs --why: one sentence, at most 200 characters", code=EXIT_USAGE)
    known = settings(config)
    try:
        key: dict[str, Any] = {**store_key(known, os.environ), **key_service_fields(known, os.environ)}
    except (StoreKeyMissing, UpstreamRefused) as error:
        fail(str(error), remedy=error.remedy, code=EXIT_USAGE)
    try:
        content = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        fail(f"{file}: {error.strerror}", remedy="name a file of `exeat backup`", code=EXIT_USAGE)
    with stopped(known):
        _make_state(known)
        boot = {
            "state_dir": str(known.vault_state),
            **key,
            **logged_store(known.log),
            "accept_older": accept_older,
            "why": why,
            "actor": f"uid:{os.getuid()}",
        }
        answer = as_the_vault(known, "broker.vault.restore", boot, (content,))
    if "generation" not in answer:
        fail(answer.get("detail", "the restoring process failed"), remedy=answer.get("remedy", ""), code=EXIT_NO)
    if output is Output.json:
        print_json(answer)
    else:
        say(f"restored: the store is generation {answer['generation']}; sandboxes of its time are ended")


def as_the_vault(known: Settings, module: str, boot: dict[str, Any], files: tuple[int, ...] = ()) -> dict[str, Any]:
    """Run `module` as the user who owns the vault's folder, with descriptors of `files`; what it answers."""
    document = boot_document(boot)
    reading, writing = os.pipe()
    inherited = (document, *files, writing)
    argv = (sys.executable, "-I", "-m", module, *map(str, inherited))
    try:
        if os.geteuid() == 0:
            uid = uid_of("vault")
            process = launch(
                Plan(
                    argv=argv,
                    env={},
                    view=tuple(wide_view(known, "vault")),
                    cwd="/",
                    uid=uid,
                    gid=uid,
                    hostname="exeat-vault",
                    network=False,
                    isolate=False,
                    pass_fds=inherited,
                )
            ).process
        else:
            process = subprocess.Popen(argv, pass_fds=inherited, cwd="/", env={}, stdin=subprocess.DEVNULL)
    except BoundaryUnavailable as error:
        fail(str(error), remedy="run as the user who starts the gateway")
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    process.wait()
    return dict(json.loads(said or b"{}"))


@contextlib.contextmanager
def stopped(known: Settings) -> Iterator[None]:
    """Hold what a gateway holds while it runs, so that none runs now or starts meanwhile."""
    with contextlib.ExitStack() as held:
        for path in (known.run / "lock", known.log / "lock"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as error:
                fail(f"{path}: {error.strerror}", remedy="run as the user who starts the gateway")
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                fail("the gateway is running", remedy="stop it, do this again, and start it")
        yield


def _make_state(known: Settings) -> None:
    """The vault's folder, where a new machine has none yet."""
    folder = known.vault_state
    try:
        folder.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        if not folder.exists():
            folder.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(folder, uid_of("vault"), uid_of("vault"))
    except OSError as error:
        fail(f"{folder}: {error.strerror}", remedy="run as the user who starts the gateway")
