"""Sample events for tests."""

from __future__ import annotations

from typing import Any

from audit.events import Event

WHO: dict[str, Any] = {
    "tenant": "main",
    "sandbox": "sb_aaaaaaaaaaaaaaaa",
    "owner": "team-a",
    "agent": "coder",
    "task": "t-1",
    "role": "coding-agent",
}


def intent(request_id: str = "req_1", **more: Any) -> Event:
    """A plain request about to leave."""
    fields = {
        **WHO,
        "request_id": request_id,
        "policy": "sha256:00",
        "decision": "allow",
        "rule": "coding-agent/npm",
        "operation": "read",
        "method": "GET",
        "scheme": "https",
        "host": "registry.example",
        "port": 443,
        "path": "/left-pad",
        "query_keys": ["write"],
    }
    return Event("request.intent", {**fields, **more})


def outcome(request_id: str = "req_1", **more: Any) -> Event:
    """What came of it."""
    fields = {**WHO, "request_id": request_id, "policy": "sha256:00", "status": 200, "bytes_up": 1, "bytes_down": 2}
    return Event("request.outcome", {**fields, **more})


def refusal(reason: str = "no-rule", **more: Any) -> Event:
    """A refused request."""
    fields = {**WHO, "reason": reason, "host": "evil.example", "port": 443}
    return Event("request.refused", {**fields, **more})
