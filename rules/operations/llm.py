"""What the inference evaluators share: strict JSON, one closed schema, the model as the argument."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations.closed import Check
from rules.operations.media import json_object

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}\Z")


def model_name(value: Any) -> bool:
    """A model name: short, no spaces, safe to bind and to record."""
    return isinstance(value, str) and _NAME.match(value) is not None


def judge(schema: Check, body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} ({} where the body has none) if `body` is strict JSON that fits `schema`, else None."""
    value = json_object(body, facts)
    if value is None or not schema(value):
        return None
    return {"model": value["model"]} if "model" in value else {}


def betas_listed(facts: RequestFacts, header: str, allowed: Collection[str]) -> bool:
    """True if every comma-separated value of `header` is in `allowed` (absent: True)."""
    values = [part.strip() for line in facts.header(header) for part in line.split(",")]
    return all(value in allowed for value in values)
