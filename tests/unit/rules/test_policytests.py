"""`tests:` of a policy fail when the policy does not do what its author expects."""

from __future__ import annotations

import pytest

from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from rules.policytests import TestResult, run_tests
from tests.support.rows import every_row

POLICY = """\
version: 1
roles:
  dev:
    allow:
      - {name: read, host: ok.test, methods: [GET], paths: [/a]}
      - {name: order, host: ok.test, methods: [POST], paths: [/o], body: {json: {count: integer}, max: 64B}}
      - {name: held, host: ok.test, methods: [PUT], paths: [/h], approval: {from: ops}}
      - {host: raw.test, tunnel: true, reason: pinned}
    deny:
      - {host: evil.test}
tests:
"""


def run(test: str) -> TestResult:
    parsed = parse_sources(Sources(policy={"policy.yaml": POLICY + "  - {role: dev, " + test + "}\n"}))
    (result,) = run_tests(compile_policy(parsed.document), parsed.tests)
    return result


FAILING = [
    ("allow: 'GET https://ok.test/b'", "denied: no-rule (Nearest is dev/held: PUT /h; the path differs)"),
    (
        "allow: 'GET https://ok.test:8443/a'",
        "denied: no-rule (Nearest is dev/held: https on port 443; the port differs)",
    ),
    ("deny: 'GET https://ok.test/a'", "allowed as dev/read by dev/read"),
    (
        "deny: 'GET https://ok.test/b', reason: denied-by-rule",
        "denied: no-rule (Nearest is dev/held: PUT /h; the path differs)",
    ),
    ("allow: 'GET https://ok.test/a', rule: order", "allowed as dev/read by dev/read"),
    ("hold: 'GET https://ok.test/a'", "allowed as dev/read by dev/read"),
    ("allow: 'PUT https://ok.test/h'", "held for ops by dev/held"),
    (
        "allow: 'POST https://ok.test/o', body: {count: x}",
        "denied: body-not-judged (Nearest is dev/order: POST /o; the body differs)",
    ),
    (
        "allow: 'POST https://ok.test/o', body: {count: 1, more: 1}",
        "denied: body-not-judged (Nearest is dev/order: POST /o; the body differs)",
    ),
    ("allow: 'POST https://ok.test/o'", "denied: body-not-judged (Nearest is dev/order: POST /o; the body differs)"),
    ("allow: 'CONNECT nowhere.test:443'", "denied: no-rule"),
    ("allow: 'GET https://ok.test/../a'", "denied: bad-path"),
    ("allow: 'GET ftp://ok.test/a'", "denied: bad-target"),
    ("allow: 'GET https://evil.test/'", "denied: denied-by-rule by dev/evil.test"),
]


@every_row(("test", "got"), FAILING)
def test_a_wrong_expectation_fails_and_says_what_came(test: str, got: str) -> None:
    """The result names the verdict, so that the author sees the difference."""
    result = run(test)
    assert not result.passed
    assert result.got == got


PASSING = [
    "deny: 'GET https://ok.test/b', reason: no-rule, why: only a is listed",
    "deny: 'GET https://evil.test/', reason: denied-by-rule, rule: evil.test",
    "deny: 'POST https://ok.test/o', body: 'n=1', headers: {Content-Type: text/plain}",
    "hold: 'PUT https://ok.test/h', rule: dev/held",
    "allow: 'GET https://ok.test/a', rule: read",
    "allow: 'POST https://ok.test/o', body: {count: 1}",
    "allow: 'CONNECT raw.test:443', rule: raw.test",
    "allow: 'CONNECT ok.test:443'",
]


@pytest.mark.parametrize("test", PASSING)
def test_a_right_expectation_passes(test: str) -> None:
    """Denied, held and allowed alike, for requests and tunnels."""
    result = run(test)
    assert result.passed, result.got


def test_a_body_over_the_bound_is_denied() -> None:
    """The test runner reads no more than the lanes do."""
    result = run("deny: 'POST https://ok.test/o', body: '" + " " * 80 + '{"count":1}' + "'")
    assert result.passed, result.got
