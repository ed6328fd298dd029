"""What would be decided about a request that nobody sent: for `exeat why URL` and `policy explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never
from urllib.parse import urlsplit

from broker.errors import BrokerError
from rules import arguments
from rules.decide import decide_request
from rules.decision import Denied, Held, NeedsBody, Permit
from rules.facts import FactsRefused, RequestFacts, Sandbox
from rules.names import Scheme
from rules.policy import Policy


def explain(
    policy: Policy,
    sandbox: Sandbox | None,
    role: str | None,
    *,
    method: str,
    url: str,
    headers: Mapping[str, str],
    now: float,
) -> dict[str, Any]:
    """The decision as JSON. One of `sandbox` and `role` is needed. Raises BrokerError for an unusable question."""
    if (sandbox is None) == (role is None):
        raise BrokerError("missing-field", "give exactly one of sandbox and role")
    if sandbox is None:
        sandbox = Sandbox(tenant="", id="", epoch=0, role=role or "", owner="", agent="", task="", expires_at=now + 1)
    try:
        parts = urlsplit(url)
        scheme: Scheme = "http" if parts.scheme.lower() == "http" else "https"
        pairs = tuple((name.lower(), value) for name, value in headers.items() if name.lower() != "host")
        facts = RequestFacts.build(
            method=method, scheme=scheme, tunnel=None, target=url, headers=(("host", parts.netloc), *pairs)
        )
    except FactsRefused as error:
        return {"decision": "deny", "reason": error.reason, "remedy": error.detail, "rule": None}
    except ValueError:
        raise BrokerError("bad-field", "url is not an absolute URL") from None
    decision = decide_request(policy, sandbox, facts, now)
    match decision:
        case Denied():
            return {
                "decision": "deny",
                "reason": decision.reason,
                "rule": decision.rule,
                "remedy": decision.remedy,
                "message": decision.message,
            }
        case Held():
            return {
                "decision": "hold",
                "reason": "approval-required",
                "rule": decision.rule,
                "operation": decision.operation,
                "approval": decision.approval,
                "arguments": arguments.shown(decision.arguments),
            }
        case NeedsBody():
            return {"decision": "needs-body", "bound": decision.bound}
        case Permit():
            return {
                "decision": "permit",
                "rule": decision.rule,
                "rules": list(decision.rules),
                "operation": decision.operation,
                "effect": decision.effect,
                "credential": decision.credential,
                "arguments": arguments.shown(decision.arguments),
            }
    assert_never(decision)
