"""`exeat doctor`: inside a sandbox, what holds, what does not, and why."""

from __future__ import annotations

from exeat.commands.context import OutputOption
from exeat.doctor import CLAIM, HOLDS, examine
from exeat.output import EXIT_NO, Output, print_json, say

_STYLES = {"holds": "green", "fails": "bold red", "unknown": "yellow"}


def doctor(output: OutputOption = Output.text) -> None:
    """Say what holds in the sandbox that this runs in: ways round the gateway, the way through it, each client.

    Run it inside. Its result is a claim of the sandbox and arms nothing. Exits 1 unless everything was shown to hold.
    Without Python: curl -fsS http://exeat.internal/doctor.sh | sh
    """
    found = []
    for finding in examine():
        found.append(finding)
        if output is Output.text:
            say(f"{finding.state:8} {finding.what}: {finding.why}", _STYLES[finding.state])
    if output is Output.json:
        print_json({"boundary": "claimed", "findings": [finding._asdict() for finding in found]})
    else:
        say(CLAIM)
    raise SystemExit(0 if all(finding.state == HOLDS for finding in found) else EXIT_NO)
