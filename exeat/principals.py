"""Who runs as what (RULINGS 1.2): started by root, one unprivileged uid per kind of process and per sandbox."""

from __future__ import annotations

from typing import Literal

ContainerKind = Literal["auditor", "vault", "executor", "worker"]
"""What has a container of its own; the HTTP/2 adapter exists under a supervisor only."""
Kind = ContainerKind | Literal["adapter"]

BASE_UID = 1_879_100_000
"""Above the ranges that distributions and systemd hand out (uids.systemd.io: containers end at 1,879,048,191)."""

CONTAINER_UIDS: dict[ContainerKind, int] = {"auditor": 10001, "vault": 10002, "executor": 10003, "worker": 10004}
"""The users of the image; below 65,536 so that containers with a user namespace have them too."""

_OFFSET: dict[Kind, int] = {"auditor": 1, "vault": 2, "executor": 3, "worker": 4, "adapter": 5}
PROBE_UID = BASE_UID + 6
"""Of the process that tries to get out of a sandbox's network namespace; it holds nothing."""
_SANDBOXES = 10_000
_SANDBOX_SLOTS = 50_000


def uid_of(kind: Kind) -> int:
    """The uid (and gid) of our own processes when root starts them."""
    return BASE_UID + _OFFSET[kind]


def uid_of_sandbox(number: int) -> int:
    """The host uid of a sandbox; `number` is any non-negative integer (from its id)."""
    return BASE_UID + _SANDBOXES + number % _SANDBOX_SLOTS
