"""The entry point `decide`: rules alone, no socket anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from proxy.front import connect_facts
from rules.decide import decide_request, decide_tunnel
from rules.decision import Decision, Denied, Held, NeedsBody, TunnelDecision
from rules.facts import FactsRefused, RequestFacts, TunnelFacts
from rules.narrowing import narrowed
from rules.placeholders import make
from tests.support.attackdata import Case, render
from tests.support.attempts import (
    CONTROL,
    Observed,
    form,
    host_names,
    refused,
    secret_names,
)
from tests.support.fakes import (
    sandbox,
)
from tests.support.ground import SHAPE, Ground
from wire.heads import NO_BODY, HeadRefused, parse_request_head, request_framing, requested_upgrade


class Decide:
    """rules alone."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._box = sandbox("sb_decide", role="agent")
        self._names = host_names(ground) | {"auth": b""}
        self._names |= secret_names("ph", make(SHAPE, bytes(64)).encode())
        self._names |= secret_names("ph.other", make(SHAPE, bytes(range(64))).encode())

    def attempt(self, case: Case) -> Observed:
        try:
            return self._attempt(case)
        except (FactsRefused, HeadRefused) as error:
            return refused(error.reason)

    def control(self) -> None:
        assert self._attempt(CONTROL).verdict == "allowed"

    def _attempt(self, case: Case) -> Observed:
        names = self._names
        if case.request is not None:
            made = form(case.request, names)
            connect = made.connect if made.scheme == "https" else None
            target = made.path if made.scheme == "https" else b"http://" + made.authority + made.path
            raw = made.raw(target)
        else:
            connect = None if case.connect is None else render(case.connect, names)
            raw = b"".join(render(piece, names) for piece in case.send)
        tunnel = None
        if connect is not None:
            tunnel = TunnelFacts.build(connect.decode("latin-1"))
            denied = self._verdict(decide_tunnel(self._ground.policy, self._box, tunnel, 0.0))
            if denied is not None or not raw:
                return denied or Observed(verdict="allowed")
        top, end, body = raw.partition(b"\r\n\r\n")
        parsed = parse_request_head(top + end)
        if parsed.method == "CONNECT" and tunnel is None:
            facts = connect_facts(parsed)
            return self._verdict(decide_tunnel(self._ground.policy, self._box, facts, 0.0)) or Observed(
                verdict="allowed"
            )
        request = RequestFacts.build(
            method=parsed.method,
            scheme="http" if tunnel is None or not case.tls else "https",
            tunnel=tunnel,
            target=parsed.target,
            headers=parsed.lower,
            has_body=request_framing(parsed) != NO_BODY,
            upgrade=requested_upgrade(parsed),
        )
        return self._verdict(judged(self._ground, self._box, request, body)[0]) or Observed(verdict="allowed")

    def _verdict(self, decision: Decision | TunnelDecision) -> Observed | None:
        match decision:
            case Denied():
                return refused(decision.reason)
            case Held():
                return refused("approval-required")
            case NeedsBody():
                return refused("body-not-judged")
            case _:
                return None


def judged(ground: Ground, box: Any, facts: RequestFacts, body: bytes) -> tuple[Decision, bool]:
    """The verdict, and whether the body had to be seen for it."""
    facts = narrowed(ground.policy, box, facts, 0.0)
    decision = decide_request(ground.policy, box, facts, 0.0)
    if not isinstance(decision, NeedsBody):
        return decision, False
    if len(body) > decision.bound:
        return decision, True
    return decide_request(ground.policy, box, replace(facts, body=body), 0.0), True
