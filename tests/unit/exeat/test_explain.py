"""`exeat policy explain`: the same verdict as a real request gets, put into words, with nothing sent."""

from __future__ import annotations

import pytest

from exeat.explain import NotExplained, explain_request
from rules.compile import compile_policy
from rules.parse import Sources, parse_sources
from rules.policy import Policy
from rules.reasons import REASONS

POLICY = """
version: 1
roles:
  agent:
    allow:
      - {name: read, host: api.example.com, methods: [GET], paths: ["/v1/items/{id}"], credential: api}
      - {name: write, host: api.example.com, methods: [POST], paths: [/v1/ask], body: {json: {op: [read]}}}
      - {name: release, host: api.example.com, methods: [POST], paths: [/release], approval: {from: managers}}
    deny:
      - {name: never, host: "**.internal.example.com", message: "ask the platform team"}
"""
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.example.com], owner: o, placeholder: {env: K, shape: "sk_{32}"}}
"""


@pytest.fixture(scope="module")
def policy() -> Policy:
    sources = Sources(
        policy={"policy.yaml": POLICY}, credentials=("credentials.yaml", CREDENTIALS), services={}, ca_files=None
    )
    return compile_policy(parse_sources(sources).document)


def ask(policy: Policy, method: str, url: str, body: str | None = None) -> dict[str, object]:
    return explain_request(policy, "agent", method, url, body.encode() if body else None, 1_700_000_000.0)


@pytest.mark.parametrize(
    ("method", "url", "reason", "sentence"),
    [
        ("GET", "https://other.example.com/", "no-rule", "no rule names the host"),
        ("POST", "https://api.example.com/v1/items/7", "no-rule", "no rule allows the method"),
        ("GET", "https://a.internal.example.com/", "denied-by-rule", "a deny rule matches"),
        ("GET", "http://api.example.com/v1/items/7", "clear-text-refused", "clear text is not https"),
        ("TRACE", "https://api.example.com/v1/items/7", "method-refused", "TRACE is never forwarded"),
        ("GET", "https://exeat.internal/", "own-name-refused", "our own name is not for policy"),
        ("GET", "https://api.example.com/v1/../x", "bad-path", "a path that is not canonical is refused"),
    ],
)
def test_denials_say_reason_and_remedy(policy: Policy, method: str, url: str, reason: str, sentence: str) -> None:
    """The reason code is the one that the sandbox would get, and something follows that helps."""
    answer = ask(policy, method, url)
    assert (answer["decision"], answer["reason"]) == ("deny", reason), sentence
    assert reason in REASONS
    assert answer["remedy"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("api.example.com/x", "not an http or https URL"),
        ("ftp://api.example.com/", "not an http or https URL"),
        ("https://", "''"),
        ("https://a b/", "'a b'"),
        ("https://api.example.com:99999/", "99999"),
    ],
)
def test_a_question_that_cannot_be_put_is_refused(policy: Policy, url: str, said: str) -> None:
    """Something that is no URL is no request either."""
    with pytest.raises(NotExplained, match=said):
        ask(policy, "GET", url)


def test_an_unknown_role_names_those_that_exist(policy: Policy) -> None:
    """A misspelt role is not a sandbox without rights."""
    with pytest.raises(NotExplained, match="known: agent"):
        explain_request(policy, "agnet", "GET", "https://api.example.com/", None, 0.0)


def test_a_held_request_says_so(policy: Policy) -> None:
    """An operation with approval is held, with its rule."""
    answer = ask(policy, "POST", "https://api.example.com/release")
    assert (answer["decision"], answer["rule"]) == ("hold", "agent/release")


def test_a_judged_body_is_asked_for_and_then_judged(policy: Policy) -> None:
    """Without a body the remedy names --body; with one the verdict is about it."""
    url = "https://api.example.com/v1/ask"
    assert "--body" in str(ask(policy, "POST", url)["remedy"]) or ask(policy, "POST", url)["decision"] == "deny"
    assert ask(policy, "POST", url, '{"op": "write"}')["decision"] == "deny"
    assert ask(policy, "POST", url, '{"op": "read"}')["decision"] == "permit"


def test_a_permit_names_rule_credential_and_arguments(policy: Policy) -> None:
    """What would be used is said: rule, effect, credential, captured arguments; the credential only by name."""
    answer = ask(policy, "GET", "https://API.example.com/v1/items/7")
    assert answer["decision"] == "permit"
    assert answer["rule"] == "agent/read"
    assert answer["credential"] == "api"
    assert answer["effect"] == "read"
    assert answer["arguments"] == {"id": "7"}
    assert (answer["host"], answer["port"]) == ("api.example.com", 443)
