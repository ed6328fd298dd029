"""A decision in words: the canonical request, what it is recognised as, and why what nearly permits it does not.

For `exeat policy explain`, `exeat why` and the admin API: operators ask, so names of the request may be shown, unlike
in a refusal (I29). Nothing here decides: the same functions as in rules/decide.py are asked, one operation at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, assert_never

from rules import arguments
from rules.decision import Decision, Denied, Held, NeedsBody, Permit
from rules.facts import RequestFacts, Sandbox
from rules.matching import NEARNESS, Matched, NoMatch, WantsBody, header_fits, match_operation, misfit
from rules.narrowing import scopes
from rules.policy import Operation, Policy, Rule
from rules.reasons import reason

MISSES: Final = 5
"""Near misses that are told, nearest first."""


def verdict(decision: Decision) -> dict[str, Any]:
    """The decision as plain values."""
    match decision:
        case Denied():
            return {
                "decision": "deny",
                "reason": decision.reason,
                "rule": decision.rule,
                "message": decision.message,
                "remedy": decision.remedy or reason(decision.reason).remedy,
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
        case _:
            assert_never(decision)


def canonical(facts: RequestFacts) -> dict[str, Any]:
    """The request as it is judged. Of a query only the names, and what was left out; of a body only its size."""
    body = {"body_bytes": len(facts.body)} if isinstance(facts.body, bytes) else {}
    smaller = {} if facts.asked is None else {"asked": scopes(facts.asked), "granted": scopes(facts.query)}
    return {
        "method": facts.method,
        "scheme": facts.destination.scheme,
        "host": facts.destination.host.text,
        "port": facts.destination.port,
        "path": facts.path.raw,
        "query": [name for name, _ in facts.query.pairs],
        **body,
        **{name: list(values) for name, values in smaller.items()},
    }


def recognised(operations: Iterable[Operation], facts: RequestFacts) -> list[dict[str, Any]]:
    """Which of `operations` the request states, whoever permits them: operation, effect, arguments."""
    found: dict[str, dict[str, Any]] = {}
    for operation in operations:
        match match_operation(operation, facts):
            case Matched(arguments=stated):
                flat = arguments.pairs(stated)
                found[operation.name] = {
                    "operation": operation.name,
                    "effect": operation.effect,
                    "arguments": arguments.shown(flat),
                    **declared(operation),
                }
            case WantsBody():
                found.setdefault(
                    operation.name,
                    {"operation": operation.name, "effect": operation.effect, "if": "the body states it"},
                )
            case NoMatch():
                pass
    return [found[name] for name in sorted(found)]


def declared(operation: Operation) -> dict[str, Any]:
    """What a reviewer has to know besides: `redirects` (where its answer may lead), `shared_state` (RULINGS 7.6)."""
    said: dict[str, Any] = {}
    if operation.redirects:
        said["redirects"] = [spec.text for spec in operation.redirects]
    if operation.shared_state is not None:
        said["shared_state"] = list(operation.shared_state)
    return said


def misses(policy: Policy, sandbox: Sandbox, facts: RequestFacts) -> list[dict[str, str]]:
    """The operations of the role's allow rules that come nearest to the request, and what about it differs."""
    role = policy.roles.get(sandbox.role)
    if role is None:
        return []
    if facts.body is None and not facts.has_body:
        facts = replace(facts, body=b"")
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for rule in role.rules_for(facts.destination.host):
        if rule.action != "allow" or rule.tunnel:
            continue
        for operation in rule.operations:
            miss = _miss(rule, operation, sandbox, facts)
            if miss is None:
                continue
            key = (str(rule.id), operation.name)
            if key not in found or miss[0] > found[key][0]:
                found[key] = miss
    near = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return [{"rule": rule, "operation": name, "because": why} for (rule, name), (_, why) in near[:MISSES]]


# --- why an operation is not the one -------------------------------------------------------------------------------


def _miss(rule: Rule, operation: Operation, sandbox: Sandbox, facts: RequestFacts) -> tuple[int, str] | None:
    """(how near, why not); None where it fits, or where the host is another."""
    match match_operation(operation, facts):
        case Matched(arguments=stated):
            wrong = misfit(rule, sandbox, stated, unbound=operation.unbound)
            if wrong is None:
                return None
            given = stated.get(wrong)
            is_ = "is not stated" if given is None else f"is {', '.join(arguments.values_of(given))}"
            wanted = " or ".join(rule.bind[wrong])
            apart = operation.shared_state is not None and wrong in operation.shared_state
            why = ", apart from what others left under the same account" if apart else ""
            return NEARNESS.index("argument"), f"{wrong} {is_}; the rule binds it to {wanted}{why}"
        case WantsBody():
            return NEARNESS.index("body"), "the body decides; give it with --body"
        case NoMatch(near="host"):
            return None
        case NoMatch(near=near):
            return NEARNESS.index(near), _because(near, operation, facts)


def _because(near: str, operation: Operation, facts: RequestFacts) -> str:
    match near:
        case "port":
            return f"the port is {facts.destination.port}, not {operation.port}"
        case "scheme":
            return f"the scheme is {facts.destination.scheme}, not {operation.scheme}"
        case "path":
            shown = [pattern.template for pattern in operation.paths]
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            return f"the path fits none of {', '.join(shown[:3])}{more}"
        case "method":
            return f"the method is {facts.method}, not {' or '.join(operation.methods)}"
        case "query":
            return _query(operation, facts)
        case "header":
            return _header(operation, facts)
        case "body":
            if operation.body is None:
                return f"a {facts.method} with a body is no read"
            kind = ", ".join(facts.header("content-type")) or "without a type"
            return f"the body ({kind}) is not what {operation.body.matcher} recognises as this operation"
        case "later":
            return "it is known, but not judged yet"
        case _:
            matcher = operation.head.matcher if operation.head is not None else ""
            return f"{matcher} recognises another operation" if matcher else f"the {near} differs"


def _query(operation: Operation, facts: RequestFacts) -> str:
    names = [name for name, _ in facts.query.pairs]
    missing = [name for name in operation.query_required if name not in names]
    if missing:
        return f"the query lacks {', '.join(missing)}"
    twice = sorted(facts.query.duplicates())
    if twice:
        return f"the query holds {', '.join(twice)} more than once"
    allowed = operation.query or {}
    other = [name for name in names if name not in allowed]
    if other:
        return f"the query may not hold {', '.join(other)}; it may hold {', '.join(sorted(allowed)) or 'nothing'}"
    wrong = [name for name, value in facts.query.pairs if (values := allowed[name]) is not None and value not in values]
    return "; ".join(f"{name} in the query must be {' or '.join(allowed[name] or ())}" for name in wrong)


def _header(operation: Operation, facts: RequestFacts) -> str:
    said: list[str] = []
    for name, values in operation.request_headers.items():
        shown = " or ".join(value or "absent" for value in values)
        given = facts.header(name)
        if len(given) > 1:
            said.append(f"{name} comes more than once")
        elif not given and "" not in values:
            said.append(f"{name} is absent and must be {shown}")
        elif given and not header_fits(name, given[0], values):
            said.append(f"{name} is {given[0]} and must be {shown}")
    return "; ".join(said) or "a header differs"
