"""One line of JSON at a time to the supervisor: ready, refused, adapter needed, who is lost (see Boot.report_fd)."""

from __future__ import annotations

import json
import os
from typing import Any

from broker.vault.boot import Boot
from net.process import complain


def report(boot: Boot, line: dict[str, Any]) -> None:
    """One line to the supervisor. A supervisor that is gone is not the vault's fault."""
    if boot.report_fd is None:
        return
    try:
        os.write(boot.report_fd, json.dumps(line).encode() + b"\n")
    except OSError as error:
        complain("vault", "the supervisor does not listen", error)
