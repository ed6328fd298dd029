"""tests/cases/policy/*.yaml through the pure decision. The same rows are meant for every other entry point.

A file holds `policy`, optionally `credentials`, and `rows`: {id, request, expect, reason | rule, sentence} and, where
they differ from the request: headers, basic, body, sandbox, connect, sni, hosts, target.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from rules.compile import compile_policy
from rules.decide import decide_request, decide_tunnel
from rules.decision import Decision, Denied, Held, NeedsBody, Permit, TunnelDecision, TunnelPermit
from rules.facts import FactsRefused, RequestFacts, TunnelFacts
from rules.parse import Parsed, Sources, parse_sources
from rules.placeholders import make
from rules.policy import Policy
from rules.policytests import run_tests
from rules.yaml12 import load
from tests.support.policies import NOW, sandbox
from tests.support.rows import every

CASES = Path(__file__).parents[2] / "cases" / "policy"
FILES = sorted(path.name for path in CASES.glob("*.yaml"))
PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"


@cache
def case(name: str) -> tuple[dict[str, Any], Parsed, Policy]:
    value, _ = load((CASES / name).read_text(encoding="utf-8"), name)
    operator = ("credentials.yaml", value["credentials"]) if "credentials" in value else None
    sources = Sources(policy={"policy.yaml": value["policy"]}, credentials=operator, ca_files=lambda path: PEM)
    parsed = parse_sources(sources)
    return value, parsed, compile_policy(parsed.document)


@pytest.mark.parametrize("name", FILES)
def test_a_case_file_says_what_it_shows(name: str) -> None:
    """Every row has an id of its own, a sentence and an expectation; the policy's own tests pass."""
    value, parsed, policy = case(name)
    assert value["sentence"]
    ids = [row["id"] for row in value["rows"]]
    assert len(set(ids)) == len(ids)
    for row in value["rows"]:
        assert row["sentence"]
        assert ("reason" in row) == (row["expect"] == "deny")
    assert all(result.passed for result in run_tests(policy, parsed.tests))


@pytest.mark.parametrize("name", FILES)
def test_the_verdicts_are_the_expected_ones(name: str) -> None:
    """Each row gives exactly the verdict, reason, rule and credential that it states."""
    value, _, policy = case(name)
    every((row["id"], partial(expected, policy, value.get("role", "dev"), row)) for row in value["rows"])


def expected(policy: Policy, role: str, row: dict[str, Any]) -> None:
    """Check a row."""
    decision = attempt(policy, role, row)
    match row["expect"]:
        case "deny":
            assert isinstance(decision, Denied), (row["sentence"], decision)
            assert decision.reason == row["reason"], row["sentence"]
        case "hold":
            assert isinstance(decision, Held), (row["sentence"], decision)
        case _:
            assert isinstance(decision, Permit | TunnelPermit), (row["sentence"], decision)
            found = decision.rules if isinstance(decision, Permit) else (decision.rule,)
            if "rule" in row:
                assert any(rule is not None and rule.partition("/")[2] == row["rule"] for rule in found), found
            if "credential" in row:
                assert isinstance(decision, Permit)
                assert decision.credential == row["credential"]


def attempt(policy: Policy, role: str, row: dict[str, Any]) -> Decision | TunnelDecision:
    """Return the verdict on a row."""

    def filled(text: str) -> str:
        for name, credential in policy.credentials.items():
            text = text.replace("${placeholder." + name + "}", make(credential.placeholder.shape, bytes(32)))
        return text

    box = sandbox(role, **row.get("sandbox", {}))
    method, _, url = filled(row["request"]).partition(" ")
    try:
        if method == "CONNECT":
            return decide_tunnel(policy, box, TunnelFacts.build(url), NOW)
        scheme, _, rest = url.partition("://")
        authority, slash, path = rest.partition("/")
        headers = [("host", host) for host in row.get("hosts", [authority])]
        headers += [(name.lower(), filled(text)) for name, text in row.get("headers", {}).items()]
        if "basic" in row:
            pair = ":".join(filled(text) for text in row["basic"])
            headers.append(("authorization", "Basic " + base64.b64encode(pair.encode()).decode()))
        body = row.get("body")
        if isinstance(body, dict):
            headers.append(("content-type", "application/json"))
            body = json.dumps(body)
        connect = row.get("connect")
        if connect is None and scheme == "https":
            connect = authority if ":" in authority.rpartition("]")[2] else f"{authority}:443"
        facts = RequestFacts.build(
            method=method,
            scheme="https" if scheme == "https" else "http",
            tunnel=None if connect is None else TunnelFacts.build(connect),
            sni=row.get("sni"),
            target=row.get("target", slash + path if scheme == "https" else url),
            headers=tuple(headers),
            has_body=body is not None,
            upgrade=row.get("headers", {}).get("Upgrade"),
        )
    except FactsRefused as refused:
        return Denied(reason=refused.reason)
    decision = decide_request(policy, box, facts, NOW)
    if isinstance(decision, NeedsBody):
        decision = decide_request(policy, box, replace(facts, body=filled(body or "").encode()), NOW)
    return decision
