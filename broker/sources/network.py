"""How a source reaches its server: net/client.py, the operator's `destinations:`, and what each status means.

A status that says "not now" (too many requests, a fault of the server's own, a standby that points elsewhere) is
transient: a copy may serve where `stale:` permits it. Every other no is an answer: the copy that we have ends with it.
Bodies of refusals are read by closed lists of words alone; their text is never repeated.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from broker.sources.base import SourceError, json_object, unreachable
from net.client import Answer, Endpoint, NoAnswer, Question
from net.trust import SYSTEM_TRUST, TrustKey
from rules.names import Destination
from rules.policy import DestinationDef
from rules.secret_sources import Address

Ask = Callable[[Question], Awaitable[Answer | NoAnswer]]
"""net.client.HttpClient.ask."""
Places = Mapping[str, DestinationDef | None]
"""Host -> the operator's entry under `destinations:`, for the hosts of one source."""

TRANSIENT_STATUS = frozenset({408, 425, 429})
_SILENT = frozenset({"name-unresolved", "unreachable", "timed-out", "proxy-refused"})
_DESTINATIONS = "see destinations: in credentials.yaml"


class Network:
    """The network of one source."""

    def __init__(self, ask: Ask, places: Places) -> None:
        self._ask = ask
        self._places = places

    def endpoint(self, destination: Destination) -> Endpoint:
        """`destination` with what the operator says of its host."""
        place = self._places.get(destination.host.text)
        if place is None:
            return Endpoint(destination=destination)
        trust = SYSTEM_TRUST if place.ca_pem is None else TrustKey(ca_pem=place.ca_pem)
        return Endpoint(destination=destination, addresses=place.addresses, static=place.static, trust=trust)

    async def call(
        self,
        address: Address,
        method: Literal["GET", "POST", "PUT"],
        target: str,
        what: str,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        body: bytes = b"",
    ) -> Answer:
        """One question; `target` follows the address's base. Raises SourceError naming `what` where none answers."""
        question = Question(
            endpoint=self.endpoint(address.destination),
            method=method,
            target=address.base + target,
            headers=headers,
            body=body,
        )
        answer = await self._ask(question)
        match answer:
            case Answer():
                return answer
            case NoAnswer(code=code, detail=detail):
                said = f"{what}: {address.destination}: {code}: {detail}"
                if code in _SILENT:
                    raise unreachable(said, "see that it runs and can be reached")
                raise SourceError("source-refused", said, _DESTINATIONS)


def json_body(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def object_of(answer: Answer, what: str) -> dict[str, Any]:
    """The JSON object of an answer that says yes. Raises SourceError for anything else."""
    found = json_object(answer.body)
    if found is None:
        raise SourceError("source-unreadable", f"{what}: the answer is no JSON object", "see that address: is its API")
    return found


def check_status(answer: Answer, what: str, *, refused: str, missing: str) -> None:
    """Raise SourceError unless the status is 2xx. `refused` and `missing` are the remedies."""
    status = answer.status
    if 200 <= status < 300:
        return
    said = f"{what}: answered {status}"
    if status == 404:
        raise SourceError("source-missing", said, missing)
    if 300 <= status < 400:
        raise unreachable(f"{said}, elsewhere", "name the server that answers itself, not one that points to it")
    if status in TRANSIENT_STATUS or status >= 500 or status in (472, 473):
        raise unreachable(said, "see the server's own state")
    raise SourceError("source-refused", said, refused)
