"""The entry points at which attack cases are played. Each makes the same attempt in its own form and says the same.

    decide     pure: head and facts as every entry point builds them, then rules.decide; no socket anywhere
    explicit   bytes on the shared listener of a real gateway, with a token: absolute-form, or CONNECT and TLS inside
    sandbox    the same bytes on the listener in the network namespace of an `exeat run`, where the channel identifies
    captured   a program in an `exeat run` without proxy variables: name, synthetic address, TLS or clear HTTP
    gateway    a machine behind a captured interface of the host, with no other neighbour: as `captured`, and root there
    help       the help host by TLS: `{help}` is then https; by clear text it is played at the entry points above
    tunnel     as `explicit`, towards a host that has a tunnel rule: `{ok}` is then that host
    http1      the HTTP/1.1 lane of a proxy room by itself: what would stand inside TLS, without front door or TLS
    broker     a hand-off by a worker that judged nothing, to a real executor and vault
    mitm       as `explicit`, by HTTP/2 through the adapter: `{ok}` and `{pub}` are then hosts with `protocol: h2`

To add one: a class with `attempt` and `control`, and a row in ENTRY_POINTS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from exeat.boundary import find_capture_tools
from tests.support.attempts import EntryPoint
from tests.support.entry_broker import Broker
from tests.support.entry_decide import Decide
from tests.support.entry_gateway import Captured, Explicit, Help, InSandbox, Mitm, Tunnel
from tests.support.entry_host import OnHost
from tests.support.entry_http1 import Http1
from tests.support.ground import Ground
from tests.support.machines import can_capture

ENTRY_POINTS: Mapping[str, Callable[[Ground], EntryPoint] | None] = {
    "decide": Decide,
    "explicit": Explicit,
    "sandbox": InSandbox,
    "captured": Captured if find_capture_tools() is not None else None,
    "gateway": OnHost if can_capture() else None,
    "help": Help,
    "tunnel": Tunnel,
    "http1": Http1,
    "broker": Broker,
    "mitm": Mitm,
}
"""None: cannot be had on this machine."""


def available(name: str) -> bool:
    """Whether cases are played at that entry point."""
    return ENTRY_POINTS[name] is not None
