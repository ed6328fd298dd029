"""The entry points that speak to a real gateway: explicit, tunnel, mitm, sandbox."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from tests.support.answers import SERVED
from tests.support.attackdata import Case, render
from tests.support.attacker import Plan, play, play_http2
from tests.support.attempts import (
    ALARMS,
    CONTROL,
    INTENTS,
    OUTCOMES,
    REFUSALS,
    Names,
    Observed,
    form,
    host_names,
    judge,
    secret_names,
)
from tests.support.entries import Inside, inside_of
from tests.support.gateway import Box
from tests.support.ground import Ground
from tests.support.waiting import until

REFUSALS_PER_SECOND = 30
"""Below what the auditor writes singly for one sandbox (RULINGS 9.2)."""


class _OnGateway:
    """What the three have in common: bytes on a proxy's listener, a log on disk."""

    hosts: ClassVar[Mapping[str, str]] = {}
    """Hosts that stand for others here: name -> name of `host_names`."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._second = ground.second

    def attempt(self, case: Case) -> Observed:
        before = len(self._ground.tail.read())  # a captured connection may be refused as soon as it is open
        sock, names, _ = self._open(case)
        names |= {name: names[other] for name, other in self.hosts.items()}
        observed = self._play(case, sock, names)
        observed.records = self._records(before, case)
        self._close(case)
        self._no_token_in(observed.delivered, names)
        return observed

    def _no_token_in(self, delivered: bytes, names: Names) -> None:
        """Nobody's token ever comes back, neither plain nor as it was presented."""
        tokens = [self._second.token.encode()]
        if presented := names["auth"].partition(b"Basic ")[2].strip():
            tokens += [presented, base64.b64decode(presented).partition(b":")[2]]
        for token in tokens:
            assert token not in delivered, "a token came back"

    def control(self) -> None:
        observed = self._play(CONTROL, self._second.connect(), self._token_names(self._second))
        assert (observed.verdict, observed.status) == ("allowed", 200), observed
        assert observed.answer is not None
        assert observed.answer.body == SERVED, observed

    def _open(self, case: Case) -> tuple[socket.socket, dict[str, bytes], str]:
        """A connection to the proxy as the case's sandbox, its names, its id."""
        raise NotImplementedError

    def _close(self, case: Case) -> None:
        """What `_open` made is not needed any more."""

    def _token_names(self, box: Box, token: str | None = None) -> dict[str, bytes]:
        names = self._sandbox_names(box.placeholders["OK_KEY"])
        return names | {"auth": authorization(box.token if token is None else token)}

    def _sandbox_names(self, placeholder: str) -> dict[str, bytes]:
        names = host_names(self._ground) | secret_names("ph", placeholder.encode())
        names |= {"id.other": self._second.id.encode(), "refused.other": self._ground.foreign_refusal.encode()}
        return names | secret_names("ph.other", self._second.placeholders["OK_KEY"].encode())

    def _play(self, case: Case, sock: socket.socket, names: Names) -> Observed:
        return judge(play(sock, self._plan(case, names)), case.answers)

    def _plan(self, case: Case, names: Names) -> Plan:
        auth = names["auth"]
        plan = Plan(answers=case.answers, alpn=case.alpn, trusted=self._trusted())
        if case.request is not None:
            made = form(case.request, names)
            plan.heads = made.method == b"HEAD"
            if case.then is not None:
                plan.then = render(case.then, names)
                plan.then_reads = len(render(case.echoes or "", names))
            if made.scheme == "http":
                plan.send = (made.raw(b"http://" + made.authority + made.path, auth),)
                return plan
            connect: bytes | None = made.connect
            plan.send = (made.raw(made.path),)
        else:
            connect = None if case.connect is None else render(case.connect, names)
            plan.send = tuple(render(piece, names) for piece in case.send)
        if connect is None:
            return plan
        plan.first = (b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (connect, connect, auth),)
        plan.tunnel, plan.tls = True, case.tls
        plan.sni = connect.decode("latin-1").rpartition(":")[0] if case.sni is None else case.sni
        if plan.sni == "none":
            plan.sni = None
        return plan

    def _trusted(self) -> str:
        return (self._ground.gateway.client_files / "ca.pem").read_text()

    def _records(self, before: int, case: Case) -> list[dict[str, Any]]:
        """What was recorded since, once every intent has its outcome and the expected number is there."""

        def since() -> list[dict[str, Any]]:
            return [record for record in self._ground.tail.read()[before:] if record.get("sandbox") != self._second.id]

        def settled() -> bool:
            names = [record["event"] for record in since()]
            intents, outcomes = (sum(name in kind for name in names) for kind in (INTENTS, OUTCOMES))
            refusals = sum(name in REFUSALS | ALARMS for name in names)
            return intents == outcomes and intents + refusals >= case.expect.records

        with suppress(AssertionError):  # the caller compares, and says what is there
            until(settled)
        return since()


class Explicit(_OnGateway):
    """The shared listener, with a token; a sandbox of its own for each case."""

    def _open(self, case: Case) -> tuple[socket.socket, dict[str, bytes], str]:
        gateway = self._ground.gateway
        box = gateway.sandbox()
        names = self._token_names(box)
        match case.token:
            case "own":
                pass
            case "none":
                names["auth"] = b""
            case "wrong":
                names["auth"] = authorization(box.token[:-4] + "0000")
            case "other":  # one whose sandbox has a listener of its own
                names["auth"] = authorization(gateway.sandbox(channel={"kind": "namespace"}).token)
            case "ended":
                gateway.admin.end_sandbox(box.id)
            case _:
                raise AssertionError(case.token)
        self._box = box.id
        return box.connect(), names, box.id

    def _close(self, case: Case) -> None:
        if case.token != "ended":
            self._ground.gateway.admin.end_sandbox(self._box)


class Tunnel(Explicit):
    """A host with a tunnel rule: the TLS inside is the origin's own."""

    hosts: ClassVar = {"ok": "raw", "ok.port": "raw.port"}

    def _trusted(self) -> str:
        return super()._trusted() + self._ground.pub.ca_pem


class Help(Explicit):
    """The help host by TLS on its own port; its answers are ours, and nobody is dialled for them."""

    hosts: ClassVar = {"help": "help.tls"}


class Mitm(Explicit):
    """HTTP/2 inside the tunnel, served by the adapter; requests only, in HTTP/2's own form."""

    hosts: ClassVar = {"ok": "h2ok", "ok.port": "h2ok.port", "pub": "h2", "pub.port": "h2.port"}

    def _play(self, case: Case, sock: socket.socket, names: Names) -> Observed:
        if case is CONTROL:
            return super()._play(case, sock, names)
        assert case.request is not None, "HTTP/2 has requests only"
        made = form(case.request, names)
        plan = self._plan(replace(case, alpn=("h2",)), names)
        plan.send = ()
        lines = [line.partition(b":") for line in made.headers]
        hosts = [value.strip() for name, _, value in lines if name.lower() == b"host"]
        fields = [(b":method", made.method), (b":scheme", b"https"), (b":authority", hosts[0]), (b":path", made.path)]
        # RFC 9113 8.2.2, 8.3.1: what an HTTP/1 connection says is not there, and the authority stands for Host.
        own = {b"host", b"connection", b"upgrade", b"proxy-connection", b"transfer-encoding"}
        fields += [(name.lower(), value.strip(b" ")) for name, _, value in lines if name.lower() not in own]
        return judge(play_http2(sock, plan, fields, made.body), case.answers)


class InSandbox(_OnGateway):
    """The listener inside an `exeat run`: the channel identifies, `{auth}` is empty."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._entry = self._enter(ground)
        self._next = 0.0

    def _enter(self, ground: Ground) -> Inside:
        return ground.enter(inside_of(ground.gateway))

    def attempt(self, case: Case) -> Observed:
        # One sandbox for all cases: refusals that come faster than its budget are counted together, not one by one.
        pause = self._next - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        self._next = time.monotonic() + 1 / REFUSALS_PER_SECOND
        return super().attempt(case)

    def _open(self, case: Case) -> tuple[socket.socket, dict[str, bytes], str]:
        names = self._sandbox_names(self._entry.environment["OK_KEY"]) | {"auth": b""}
        match case.token:
            case "own":
                pass
            case "other":
                names["auth"] = authorization(self._second.token)
            case "wrong":
                names["auth"] = authorization("0" * 40)
            case _:
                raise AssertionError(f"token: {case.token} has no meaning where the channel identifies")
        return self._entry.connect(), names, self._entry.id


class Captured(InSandbox):
    """A program in an `exeat run` that knows of no proxy: it looks a name up, connects to what it is told, and speaks.

    There is no CONNECT: `connect`, or the host of the request's URL, is what is looked up. Where that leads nowhere
    the connection ends.
    """

    def _open(self, case: Case) -> tuple[socket.socket, dict[str, bytes], str]:
        names = self._sandbox_names(self._entry.environment["OK_KEY"]) | {"auth": b""}
        if case.request is not None:
            made = form(case.request, names)
            authority = made.connect if made.scheme == "https" else made.authority
        else:
            assert case.connect is not None, "a captured connection goes to a place"
            authority = render(case.connect, names)
        host, colon, port = authority.decode("ascii").rpartition(":")
        if not colon:
            host, port = port, "80"
        return self._entry.reach(host.strip("[]"), int(port)), names, self._entry.id

    def _plan(self, case: Case, names: Names) -> Plan:
        plan = super()._plan(case, names)
        if case is CONTROL:  # the second sandbox's, over the shared listener
            return plan
        if case.request is not None:
            made = form(case.request, names)
            plan.send = (made.raw(made.path),)
        return replace(plan, first=(), tunnel=False)

    def _trusted(self) -> str:
        return super()._trusted() + self._ground.pub.ca_pem  # an uninspected connection shows the origin's own


def authorization(token: str) -> bytes:
    """The header line that clients make from a proxy URL."""
    return b"Proxy-Authorization: Basic " + base64.b64encode(f"session:{token}".encode()) + b"\r\n"
