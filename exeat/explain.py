"""A would-be request against a policy, offline: what `exeat policy explain` prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

from rules import arguments
from rules.decide import decide_request
from rules.decision import Denied, Held, NeedsBody, Permit
from rules.facts import FactsRefused, RequestFacts, Sandbox
from rules.names import InvalidName, parse_authority
from rules.policy import Policy
from rules.reasons import reason


class NotExplained(ValueError):
    """The question cannot be put. str() says what is wrong with it."""


def explain_request(policy: Policy, role: str, method: str, url: str, body: str | None, now: float) -> dict[str, Any]:
    """Return the decision for `method` `url` by a fresh sandbox of `role`, as plain values for printing.

    Raises NotExplained for a URL that is not http(s) or a role that the policy does not have.
    """
    if role not in policy.roles:
        raise NotExplained(f"the policy has no role {role!r}; known: {', '.join(sorted(policy.roles))}")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise NotExplained(f"{url!r} is not an http or https URL")
    authority = rest.partition("/")[0].partition("?")[0]
    target = rest[len(authority) :] or "/"
    headers = [("host", authority)]
    if body is not None:
        headers.append(("content-type", "application/json"))
    try:
        host, port = parse_authority(authority, 443 if scheme.lower() == "https" else 80)
        facts = RequestFacts.build(
            method=method,
            scheme="https" if scheme.lower() == "https" else "http",
            tunnel=None,
            target=f"{scheme.lower()}://{authority}{target}",
            headers=tuple(headers),
            has_body=body is not None,
        )
    except InvalidName as error:
        raise NotExplained(f"{authority!r}: {error}") from None
    except FactsRefused as error:
        return {"decision": "deny", "reason": error.reason, "remedy": reason(error.reason).remedy}
    sandbox = Sandbox(
        tenant="default", id="sb_explained", epoch=0, role=role, owner="", agent="", task="", expires_at=now + 3600
    )
    decision = decide_request(policy, sandbox, facts, now)
    if isinstance(decision, NeedsBody) and body is not None:
        decision = decide_request(policy, sandbox, replace(facts, body=body.encode()), now)
    shown: dict[str, Any] = {"host": host.text, "port": port}
    match decision:
        case Denied():
            return shown | {
                "decision": "deny",
                "reason": decision.reason,
                "rule": decision.rule,
                "remedy": decision.remedy or reason(decision.reason).remedy,
            }
        case Held():
            return shown | {
                "decision": "hold",
                "rule": decision.rule,
                "operation": decision.operation,
                "approval": decision.approval,
            }
        case NeedsBody():
            return shown | {
                "decision": "needs-body",
                "remedy": f"the operation is in the body: give one with --body (at most {decision.bound} bytes)",
            }
        case Permit():
            return shown | {
                "decision": "permit",
                "rule": decision.rule,
                "operation": decision.operation,
                "effect": decision.effect,
                "credential": decision.credential,
                "arguments": arguments.shown(decision.arguments),
            }
        case _:
            assert_never(decision)
