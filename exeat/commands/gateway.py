"""`exeat up`, `exeat serve`, `exeat status`: the gateway itself."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Annotated

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, settings
from exeat.output import Output, fail, note, print_json, say
from exeat.settings import Settings
from exeat.supervisor import StartRefused, Supervisor

SharedUidOption = Annotated[
    bool,
    typer.Option("--danger-shared-uid", help="Run without separating processes, where the kernel cannot do it."),
]
KeyBesideOption = Annotated[
    bool,
    typer.Option("--danger-key-beside-store", help="Accept a key file inside the state folder."),
]


def up(
    config: ConfigOption = None,
    danger_shared_uid: SharedUidOption = False,
    danger_key_beside_store: KeyBesideOption = False,
) -> None:
    """Run the gateway: proxy workers, executors, vault and auditor. Stops on Ctrl-C or SIGTERM after a drain."""
    current = settings(config)
    supervisor = Supervisor(
        current,
        danger_shared_uid=danger_shared_uid,
        danger_key_beside_store=danger_key_beside_store,
        environment=os.environ,
        report=note,
    )
    raise SystemExit(asyncio.run(_serve(supervisor, current)))


async def _serve(supervisor: Supervisor, current: Settings) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.request_stop)
    try:
        await supervisor.start()
    except StartRefused as error:
        fail(str(error), remedy=error.remedy)
    try:
        where = "only inside sandboxes" if current.listen is None else f"on {current.listen[0]}:{supervisor.port}"
        say(f"exeat is up: proxy {where}, log in {current.log}")
        return await supervisor.wait()
    finally:
        note("stopping")
        await supervisor.stop()


def status(config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Say whether the gateway runs, which policy is in force, and what is wrong."""
    try:
        answer = admin(config).status()
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(answer)
        return
    for name, value in answer.items():
        say(f"{name:12} {value}")
