"""`exeat run -- CMD` and `exeat demo`."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from audit.search import Place, end_of_log, reason_of, refusals_since
from broker.admin.client import AdminError
from exeat import session
from exeat.boundary import BoundaryRefused, Surroundings
from exeat.commands import sandbox as options
from exeat.commands.context import ConfigOption, explain, settings
from exeat.commands.gateway import SharedUidOption
from exeat.launch import BoundaryUnavailable
from exeat.output import EXIT_BOUNDARY, EXIT_USAGE, fail, note
from exeat.settings import Settings
from exeat.supervisor import StartRefused


def run(
    command: Annotated[list[str] | None, typer.Argument(help="The command, after --.")] = None,
    role: options.RoleOption = None,
    rw: Annotated[list[str] | None, typer.Option("--rw", help="Folder or file to show writable; repeatable.")] = None,
    ro: Annotated[list[str] | None, typer.Option("--ro", help="Folder or file to show read-only; repeatable.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", help="NAME=value, or NAME to take it over; repeatable.")
    ] = None,
    ttl: options.TtlOption = None,
    owner: options.OwnerOption = "",
    agent: options.AgentOption = "",
    task: options.TaskOption = "",
    attribute: options.AttributeOption = None,
    danger_shared_uid: SharedUidOption = False,
    config: ConfigOption = None,
) -> None:
    """Run a command in a sandbox: no secrets in its environment, no route out but the proxy.

    Uses the running gateway, or starts one for this command. The exit code is the command's.
    The working directory is writable inside; the home folder is an empty one.
    """
    if not command:
        fail("there is no command to run", remedy="exeat run -- COMMAND [ARGUMENT...]", code=EXIT_USAGE)
    current = settings(config)
    code = asyncio.run(
        _run(
            current,
            command,
            role=role,
            rw=[os.path.abspath(path) for path in rw or []],
            ro=[os.path.abspath(path) for path in ro or []],
            variables=_variables(env),
            ttl=ttl,
            owner=owner or os.environ.get("SUDO_USER") or os.environ.get("USER") or "",
            agent=agent,
            task=task,
            attributes=options.attributes(attribute),
            danger_shared_uid=danger_shared_uid,
        )
    )
    raise SystemExit(code)


async def _run(
    current: Settings,
    command: list[str],
    *,
    role: str | None,
    rw: list[str],
    ro: list[str],
    variables: dict[str, str],
    ttl: str | None,
    owner: str,
    agent: str,
    task: str,
    attributes: dict[str, str],
    danger_shared_uid: bool,
) -> int:
    try:
        async with session.gateway(current, danger_shared_uid=danger_shared_uid, report=note) as link:
            wanted = await asyncio.to_thread(options.only_role, link.admin, role)
            before = _end_of_log(current.log)
            async with session.sandbox(
                link,
                argv=command,
                surroundings=surroundings(current),
                role=wanted,
                ttl=ttl,
                owner=owner,
                agent=agent,
                task=task,
                attributes=attributes,
                variables=variables,
                read_only=ro,
                read_write=rw,
            ) as running:
                how = "the running gateway" if link.embedded is None else "a gateway of its own"
                note(
                    f"exeat: sandbox {running.id} (role {wanted}, {how}); boundary proven: "
                    "own namespaces, loopback only, no route out, no capabilities"
                )
                if running.cwd != os.getcwd():
                    note(
                        f"exeat: {os.getcwd()} is not shown inside, because it holds your home, keys, or exeat's own "
                        f"files; the command starts in {running.cwd} (start from a project folder, or use --rw)"
                    )
                for path in not_writable([running.cwd, *rw]):
                    note(
                        f"exeat: started by root, the command has a user of its own that may not write in {path} "
                        f"(start exeat as an ordinary user who may, or: chmod o+w {path})"
                    )
                code = await running.wait()
            if before is not None:
                _say_refused(current.log, before, running.id)
            return code
    except AdminError as error:
        explain(error)
    except StartRefused as error:
        fail(str(error), remedy=error.remedy)
    except BoundaryRefused as error:
        fail(str(error), code=EXIT_USAGE)
    except BoundaryUnavailable as error:
        fail(str(error), code=EXIT_BOUNDARY)


def not_writable(shown: list[str]) -> list[str]:
    """As root: those of the folders shown writable in which the sandbox's own user may not write."""
    if os.geteuid() != 0:
        return []
    return [path for path in dict.fromkeys(shown) if os.path.isdir(path) and not os.stat(path).st_mode & stat.S_IWOTH]


def _end_of_log(log: Path) -> Place | None:
    """None where the log is another user's."""
    try:
        return end_of_log(log)
    except OSError:
        return None


def _say_refused(log: Path, before: Place, sandbox: str) -> None:
    """What was refused, in one line: pip and others do not show the refusal that they got."""
    counts: Counter[str] = Counter()
    last = ""
    try:
        for record in refusals_since(log, before, sandbox):
            counts.update(_reasons(record))
            last = str(record.get("request_id") or last)
    except OSError:
        return
    if total := counts.total():
        reasons = ", ".join(f"{code} {number}" if total > 1 else code for code, number in counts.most_common(5))
        also = f"; all: exeat audit search --refused --sandbox {sandbox}" if total > 1 else ""
        # Where none is on record by itself (the disk is nearly full, or there were too many), a reason can be asked.
        the_last = "the last: " if last and total > 1 else ""
        note(f"exeat: {total} refused ({reasons}); {the_last}exeat why {last or counts.most_common(1)[0][0]}{also}")


def _reasons(record: Mapping[str, Any]) -> Mapping[str, int]:
    """How often each reason stands in a record: one refusal, or a summary with `reasons` such as `no-rule=3`."""
    if reason := reason_of(record):
        return {reason: int(str(record.get("count") or 1))}
    pairs = (str(entry).partition("=") for entry in record.get("reasons", ()))
    return {reason: int(count) for reason, _, count in pairs if count.isdecimal()}


def surroundings(current: Settings) -> Surroundings:
    """What the boundary must know of the caller and must hide of this installation."""
    return Surroundings(
        environment=dict(os.environ),
        home=os.path.expanduser("~"),
        cwd=os.getcwd(),
        hidden=tuple(str(path) for path in current.private),
    )


def _variables(entries: list[str] | None) -> dict[str, str]:
    result: dict[str, str] = {}
    for entry in entries or []:
        name, equals, value = entry.partition("=")
        if not name or (not equals and name not in os.environ):
            fail(f"--env {entry!r} is neither NAME=value nor a variable that is set", code=EXIT_USAGE)
        result[name] = value if equals else os.environ[name]
    return result


def demo(
    danger_shared_uid: SharedUidOption = False,
    unconfined: Annotated[
        bool, typer.Option("--danger-unconfined", help="Without namespaces, where the kernel has none; exits 3.")
    ] = False,
) -> None:
    """Play the whole story on this machine in under a minute: everything starts, and ends, by itself."""
    from exeat.demo.story import play  # imports the shop's web server, which no other command needs

    sys.exit(asyncio.run(play(danger_shared_uid=danger_shared_uid, unconfined=unconfined)))
