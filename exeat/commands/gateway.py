"""`exeat up`, `exeat serve`, `exeat status`: the gateway itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from broker.admin.client import AdminError
from exeat.commands.context import ConfigOption, OutputOption, admin, explain, settings
from exeat.containers import Containers, ServeRefused, healthy
from exeat.containers import serve as run_container
from exeat.doctor import FAILS
from exeat.hostcheck import disk
from exeat.output import EXIT_NO, EXIT_USAGE, Output, fail, note, print_fields, print_json, say
from exeat.principals import CONTAINER_UIDS, ContainerKind
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
        for finding in disk(current.log):
            if finding.state == FAILS:
                note(f"warning: {finding.why}")
        return await supervisor.wait()
    finally:
        note("stopping")
        await supervisor.stop()


def serve(
    kind: Annotated[str, typer.Argument(help="auditor, vault, executor or worker.")],
    sockets: Annotated[Path, typer.Option("--sockets", help="Folder of the shared socket volumes.")] = Path(
        "/run/exeat"
    ),
    digest_key: Annotated[
        Path, typer.Option("--digest-key", help="File with 64 hex digits, the same for all four.")
    ] = Path("/run/secrets/digest_key"),
    uid: Annotated[
        list[str] | None, typer.Option("--uid", help="kind=uid; repeatable (default: the image's 10001 to 10004).")
    ] = None,
    listen: Annotated[str, typer.Option("--listen", help="Where the worker listens.")] = "0.0.0.0:3128",
    check: Annotated[bool, typer.Option("--check", help="Only say whether it answers (health check).")] = False,
    config: ConfigOption = None,
) -> None:
    """Run one process of the gateway, for containers: compose.yaml shows how the four are joined."""
    kinds = get_args(ContainerKind)
    if kind not in kinds:
        fail(f"there is no process {kind!r}", remedy=f"known: {', '.join(kinds)}", code=EXIT_USAGE)
    uids = dict(CONTAINER_UIDS)
    for entry in uid or []:
        name, _, number = entry.partition("=")
        if name not in kinds or not number.isdigit():
            fail(f"--uid {entry!r} is not kind=uid", code=EXIT_USAGE)
        uids[cast("ContainerKind", name)] = int(number)
    layout = Containers(sockets=sockets, digest_key=digest_key, uids=uids, listen=listen)
    if check:
        raise SystemExit(0 if healthy(cast("ContainerKind", kind), layout) else EXIT_NO)
    try:
        run_container(cast("ContainerKind", kind), settings(config), layout)
    except ServeRefused as error:
        fail(str(error), remedy=error.remedy)


def status(config: ConfigOption = None, output: OutputOption = Output.text) -> None:
    """Say whether the gateway runs, which policy is in force, and what is wrong."""
    try:
        answer = admin(config).status()
    except AdminError as error:
        explain(error)
    if output is Output.json:
        print_json(answer)
        return
    short = [finding.why for finding in disk(settings(config).log) if finding.state == FAILS]
    print_fields(_told(answer) | ({"log": short} if short else {}))


def _told(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A status as people ask for it: what is well first, then only what is wrong."""
    policy = answer["policy"]
    told: dict[str, Any] = {
        "up since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(answer["started_at"])),
        "processes": [member["name"] for member in answer["processes"]] or "none yet: still starting",
        "policy": policy["digest"][:16] if policy["digest"] else "none: everything is refused",
        "roles": policy["roles"],
        "sandboxes": answer["sandboxes"],
    }
    told["self-check"] = _last_check(answer)
    if policy["rejected"]:
        told["rejected"] = [
            f"the files do not load and the policy above stays: {policy['rejected']['detail']}",
            *policy["rejected"]["problems"],
        ]
    if answer.get("frozen"):
        told["frozen"] = f"{answer['frozen']} sandbox(es) used up a budget: see `exeat sandbox show`"
    if answer["lost"]:
        told["lost"] = answer["lost"]
    if answer["clock_behind"]:
        told["clock"] = (
            "behind the latest time on record, so credentials are refused: set it, or see `exeat clock reset -h`"
        )
    if answer["shared_uid"]:
        told["separation"] = "none: all processes run as one user (--danger-shared-uid)"
    return told


def _last_check(answer: Mapping[str, Any]) -> str:
    """When what must not pass was last tried, and what came of it: of the worker that tried longest ago."""
    checks = [member["self_check"] for member in answer["processes"] if "self_check" in member]
    if not checks:
        return "none yet"
    if not all(check["passed"] for check in checks):
        return "FAILED: something passed that must not; that worker refuses everything (selfcheck.failed in the log)"
    return time.strftime("passed at %Y-%m-%d %H:%M:%S UTC", time.gmtime(min(check["at"] for check in checks)))
