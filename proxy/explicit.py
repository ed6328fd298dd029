"""Explicit operations at the help host, for agents that do not want to speak a service's API.

    GET  /operations          what this sandbox may do, each with the JSON Schema of its input
    GET  /operations/<name>   one of them
    POST /operations/<name>   an input, which becomes an ordinary request of the sandbox; the answer is that request's

Nothing is permitted here: the request that an input states goes through the gate like any other (lane `explicit` in
the log), with the same rules, budgets, hand-off and records.
"""

from __future__ import annotations

from typing import Any

from proxy.ports import Snapshot
from rules.explicit import Offer, Stated, offers
from rules.facts import RequestFacts, Sandbox, TunnelFacts
from rules.names import OWN_NAME
from wire.heads import RequestHead


def listing(sandbox: Sandbox, snapshot: Snapshot) -> dict[str, Any]:
    """Everything that is offered to `sandbox`, as a JSON value."""
    return {
        "policy": snapshot.policy.digest,
        "operations": [shown(offer) for offer in offers(snapshot.policy, sandbox)],
    }


def one(sandbox: Sandbox, snapshot: Snapshot, name: str) -> dict[str, Any] | None:
    """The offer called `name`, or None where there is none."""
    return next((shown(offer) for offer in offers(snapshot.policy, sandbox) if offer.name == name), None)


def shown(offer: Offer) -> dict[str, Any]:
    """An offer as a JSON value."""
    value: dict[str, Any] = {
        "name": offer.name,
        "effect": offer.effect,
        "call": f"POST http://{OWN_NAME}/operations/{offer.name}",
        "requests": list(dict.fromkeys(way.text for way in offer.ways)),
        "input": offer.schema(),
        "rules": list(offer.rules),
    }
    if offer.bound:
        value["with"] = {name: list(values) for name, values in offer.bound.items()}
    if offer.approval:
        value["approval"] = offer.approval
    return value


def as_request(made: Stated) -> tuple[RequestHead, RequestFacts]:
    """What a lane needs of it: a head as if it had been received, and its facts.

    Raises FactsRefused, which is a fault: a stated request is canonical.
    """
    headers = made.headers
    if made.body is not None:
        headers = (*headers, ("content-length", str(len(made.body))))
    facts = RequestFacts.build(
        method=made.method,
        scheme=made.scheme,
        tunnel=TunnelFacts(host=made.host, port=made.port),
        target=made.target,
        headers=headers,
        has_body=made.body is not None,
    )
    raw = tuple((name.encode("ascii"), value.encode("latin-1")) for name, value in headers)
    return RequestHead(made.method, made.target, "1.1", raw), facts
