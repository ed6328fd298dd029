"""What would be decided about a request that nobody sent: for `exeat why URL`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from broker.errors import BrokerError
from rules.decide import decide_request
from rules.explaining import canonical, misses, verdict
from rules.facts import FactsRefused, RequestFacts, Sandbox
from rules.names import Scheme
from rules.narrowing import narrowed
from rules.policy import Policy
from rules.reasons import reason


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
    """The decision as JSON. One of `sandbox` and `role` is needed. Raises BrokerError for an unusable question.

    No body is taken: the vault reads none (RULINGS 1.1).
    """
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
        remedy = reason(error.reason).remedy
        return {"decision": "deny", "reason": error.reason, "detail": error.detail, "remedy": remedy, "rule": None}
    except ValueError:
        raise BrokerError("bad-field", "url is not an absolute URL") from None
    facts = narrowed(policy, sandbox, facts, now)
    shown = {**verdict(decide_request(policy, sandbox, facts, now)), "canonical": canonical(facts)}
    if shown["decision"] != "permit":
        shown["misses"] = misses(policy, sandbox, facts)
    return shown
