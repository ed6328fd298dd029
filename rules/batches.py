"""Requests that hold other requests. None is judged in parts: a refused one is told to come singly.

Sources: OData 4.01 part 1 section 11.7 (`$batch`), Google's batch guides (`/batch/...`, multipart/mixed), Azure Storage
Blob Batch (`comp=batch`), JSON-RPC 2.0 section 6 and GraphQL servers (an array of requests).
"""

from __future__ import annotations

from typing import Final

from rules.facts import RequestFacts
from rules.operations.media import media_type

ALONE: Final = "This request holds several; send each of them alone."


def is_batch(facts: RequestFacts) -> bool:
    """Return whether the request looks like a batch of one of these kinds. Only for what a refusal says."""
    if facts.method != "POST":
        return False
    kinds = [media_type(value) for value in facts.header("content-type")]
    segments = facts.path.segments
    if segments[-1] == "$batch" or ("comp", "batch") in facts.query.pairs:
        return True
    if segments[0] == "batch" and "multipart/mixed" in kinds:
        return True
    array = isinstance(facts.body, bytes) and facts.body[:1024].lstrip()[:1] == b"["
    return array and any(kind == "application/json" or kind.endswith("+json") for kind in kinds)
