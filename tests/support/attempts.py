"""What all entry points share: what came of an attempt, names and forms of a request, what a client can tell."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rules.reasons import reason as reason_row
from tests.support.attackdata import Case, Request, render
from tests.support.attacker import Answer, Seen
from tests.support.ground import Ground

REFUSALS = frozenset({"request.refused", "connection.refused", "broker.refused", "approval.requested"})
ALARMS = frozenset({"placeholder.misused"})
INTENTS = frozenset({"request.intent", "tunnel.intent", "broker.intent"})
OUTCOMES = frozenset({"request.outcome", "tunnel.outcome", "broker.outcome"})

Names = Mapping[str, bytes]


@dataclass(kw_only=True)
class Observed:
    """What came of one attempt. `verdict` as in attackdata; `reason` from the answer, None where there was none."""

    verdict: str
    reason: str | None = None
    status: int | None = None
    answer: Answer | None = None
    delivered: bytes = b""
    echoed: bytes = b""
    records: list[dict[str, Any]] | None = None
    """The log of the attempt; None at the entry point that has none."""
    handed: int = 0
    """Hand-offs to a broker that is a double."""
    end: str = ""

    def refusals(self) -> list[dict[str, Any]]:
        """One for each refused request: an alarm counts where it is the refusal's only record."""
        refused = self.named(REFUSALS)
        known = {record.get("request_id") for record in refused}
        return refused + [r for r in self.named(ALARMS) if r.get("request_id") not in known]

    def named(self, names: frozenset[str]) -> list[dict[str, Any]]:
        return [record for record in self.records or () if record["event"] in names]


class EntryPoint(Protocol):
    """One way in."""

    def attempt(self, case: Case) -> Observed:
        """Play the case as the first sandbox."""
        ...

    def control(self) -> None:
        """A request of a second sandbox, which must succeed. AssertionError otherwise."""
        ...


CONTROL = Case(
    name="control",
    id="control",
    sentence="a second sandbox is served",
    at=(),
    expect=None,  # type: ignore[arg-type]  # never judged as a case
    request=Request(method="GET", url="https://{ok}/v1/read/control", headers=("Authorization: Bearer {ph}",)),
)


def host_names(ground: Ground) -> dict[str, bytes]:
    """`{ok}` and the like: authorities with the ports that the origins got."""
    names = {"ok": "ok.test", "pub": "pub.test", "npm": "npm.test", "raw": "raw.test", "wild": "a.wild.test"}
    names |= {"h2": "h2.test", "h2ok": "h2ok.test", "old": "old.test"}
    names |= {"books": "xn--bcher-kva.test", "plain": "plain.test", "evil": "evil.test", "denied": "denied.test"}
    found: dict[str, bytes] = {"help": b"http://exeat.internal", "help.tls": b"https://exeat.internal"}
    # Reserved for what is never dialled: there is no origin behind these.
    found |= {"mixed": b"mixed.test:%d" % ground.pub.port, "mixedok": b"mixedok.test"}
    for name, host in names.items():
        port = next(origin.port for origin in ground.origins if host in origin.names)
        found[name] = f"{host}:{port}".encode()
        found[f"{name}.port"] = str(port).encode()
    return found


def secret_names(name: str, value: bytes) -> dict[str, bytes]:
    """`{name}` and its encodings."""
    return {
        name: value,
        f"{name}.b64": base64.b64encode(value),
        f"{name}.basic": base64.b64encode(b"x:" + value),
        f"{name}.hex": value.hex().encode(),
        f"{name}.percent": b"".join(b"%%%02X" % byte for byte in value),
        f"{name}.json": b"".join(b"\\u%04x" % byte for byte in value),
        f"{name}.half": value[: len(value) // 2],
        f"{name}.rest": value[len(value) // 2 :],
    }


@dataclass(kw_only=True)
class Form:
    """One request as bytes and parts."""

    method: bytes
    scheme: str
    authority: bytes
    path: bytes
    headers: list[bytes]
    body: bytes | None
    upgrade: str | None

    @property
    def connect(self) -> bytes:
        """The authority with its port, as a CONNECT needs it."""
        return self.authority if re.search(rb":[0-9]+\Z", self.authority) else self.authority + b":443"

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Headers as received: (name, value), text as heads are decoded."""
        split = (line.decode("latin-1").partition(":") for line in self.headers)
        return tuple((name, value.strip()) for name, _, value in split)

    def raw(self, target: bytes, extra: bytes = b"") -> bytes:
        """The bytes of the request with that target. `extra` are whole header lines."""
        lines = b"".join(line + b"\r\n" for line in self.headers)
        return b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (self.method, target, lines, extra, self.body or b"")


def form(request: Request, names: Names) -> Form:
    """The request with all names put in; Host, Content-Length and what an upgrade needs are added."""
    scheme, _, rest = render(request.url, names).partition(b"://")
    authority, slash, path = rest.partition(b"/")
    headers = [render(line, names) for line in request.headers]
    body = None if request.body is None else render(request.body, names)
    given = {line.partition(b":")[0].lower() for line in headers}
    if b"host" not in given:
        headers.insert(0, b"Host: " + authority)
    if body is not None and not given & {b"content-length", b"transfer-encoding"}:
        headers.append(b"Content-Length: %d" % len(body))
    if request.upgrade is not None:
        headers += [b"Connection: Upgrade", b"Upgrade: " + request.upgrade.encode()]
        headers += [b"Sec-WebSocket-Key: " + base64.b64encode(bytes(16)), b"Sec-WebSocket-Version: 13"]
    return Form(
        method=request.method.encode(),
        scheme=scheme.decode(),
        authority=authority,
        path=slash + path or b"/",
        headers=headers,
        body=body,
        upgrade=request.upgrade,
    )


def judge(seen: Seen, wanted: int) -> Observed:
    """What the client can tell from what it saw."""
    observed = Observed(verdict="closed", delivered=bytes(seen.delivered), echoed=seen.echoed, end=seen.end)
    if not seen.answers:
        return observed
    last = observed.answer = seen.answers[-1]
    code = own_reason(last)
    if code is not None:
        return replace(observed, verdict=verdict_of(last.status), reason=code, status=last.status)
    if len(seen.answers) < wanted:
        return observed
    return replace(observed, verdict="allowed" if last.complete else "cut", status=last.status)


def own_reason(answer: Answer) -> str | None:
    """The reason of a refusal that is ours; None for an upstream's answer."""
    status = answer.headers.get("proxy-status", "")
    return status.partition('details="')[2].rstrip('"') if status.startswith("exeat;") else None


def verdict_of(status: int) -> str:
    """The verdict that a refusal's status stands for."""
    match status:
        case 400 | 421 | 431:
            return "malformed"
        case 502:
            return "bad-upstream"
        case 503:
            return "unavailable"
        case _:
            return "denied"


def refused(code: str) -> Observed:
    row = reason_row(code)
    return Observed(verdict=verdict_of(row.status), reason=code, status=row.status)
