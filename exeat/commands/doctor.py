"""`exeat doctor`: what holds, what does not, and why; inside a sandbox, or on the gateway's machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from exeat.commands.context import ConfigOption, OutputOption, settings
from exeat.doctor import CLAIM, FAILS, HOLDS, KEPT, Finding, examine, post
from exeat.output import EXIT_NO, Output, print_json, say

_STYLES = {"holds": "green", "fails": "bold red", "unknown": "yellow"}


def doctor(
    inside: Annotated[
        bool | None,
        typer.Option("--inside/--outside", help="In a sandbox, or on the gateway's machine (default: by EXEAT)."),
    ] = None,
    config: ConfigOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Say what holds, what does not and why.

    In a sandbox: ways round the gateway, the way through it, the variables of each installed client. The result is
    handed to the gateway, as a claim that arms nothing ('exeat sandbox show'). Exits 1 unless everything was shown to
    hold. Without Python: curl -fsS http://exeat.internal/doctor.sh | sh

    On the gateway's machine: kernel, namespaces, programs, files, log, ports, clock, CA, and what the running gateway
    says of itself. Exits 1 where something fails.
    """
    if inside if inside is not None else "EXEAT" in os.environ and config is None:
        found = list(_told(examine(), output))
        kept = post(found)
        _end(found, output, "claimed", CLAIM + (KEPT if kept else ""))
        raise SystemExit(0 if all(finding.state == HOLDS for finding in found) else EXIT_NO)
    from exeat.hostcheck import examine_host  # reads certificates, which nobody needs in a sandbox

    found = list(_told(examine_host(settings(config)), output))
    _end(found, output, "", "")
    raise SystemExit(EXIT_NO if any(finding.state == FAILS for finding in found) else 0)


def _told(findings: Iterator[Finding], output: Output) -> Iterator[Finding]:
    for finding in findings:
        if output is Output.text:
            say(f"{finding.state:8} {finding.what}: {finding.why}", _STYLES[finding.state])
        yield finding


def _end(found: list[Finding], output: Output, boundary: str, last: str) -> None:
    if output is Output.json:
        rows = [{"what": one.what, "state": one.state, "why": one.why} for one in found]
        print_json({"boundary": boundary, "findings": rows} if boundary else {"findings": rows})
    elif last:
        say(last)
