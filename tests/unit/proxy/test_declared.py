"""What a sandbox is told of its rules: where answers may lead, and that an account's state is shared."""

from __future__ import annotations

import pytest

from exeat.commands.asking import print_decision
from exeat.explain import explain_request
from proxy.help import allowed
from rules.compile import compile_policy
from rules.decide import decide_request
from rules.decision import Permit
from rules.facts import RequestFacts
from rules.parse import Sources, parse_sources
from tests.support import fakes
from tests.support.policies import NOW, sandbox

POLICY = compile_policy(
    parse_sources(
        Sources(
            policy={
                "policy.yaml": """
version: 1
roles:
  dev:
    allow:
      - {service: go, operations: [module.read, sums.read]}
      - {name: results, service: bigquery, operations: [query.result], credential: warehouse, shared: true}
      - {name: run, service: bigquery, operations: [query.run], credential: warehouse}
"""
            },
            credentials=(
                "credentials.yaml",
                "version: 1\ncredentials:\n  warehouse: {service: bigquery, secret: 'store:google', owner: data}\n",
            ),
        )
    ).document
)
BUCKET = "https://storage.googleapis.com/proxy-golang-org-prod/**"
MODULE = "https://proxy.golang.org/github.com/gorilla/mux/@v/v1.8.1.zip"
SUM = "https://sum.golang.org/lookup/github.com/gorilla/mux@v1.8.1"
RESULT = "https://bigquery.googleapis.com/bigquery/v2/projects/acme/queries/job_1"


def restrictions(url: str) -> bool:
    """Whether a permit for `url` says that its operation may redirect."""
    host = url.split("/")[2]
    facts = RequestFacts.build(method="GET", scheme="https", tunnel=None, target=url, headers=(("host", host),))
    permit = decide_request(POLICY, sandbox(), facts, NOW)
    assert isinstance(permit, Permit), permit
    return permit.restrictions.redirects_declared


def test_allowed_says_where_answers_lead_and_what_is_shared_and_of_others_nothing() -> None:
    """Expect both only where they were declared or said."""
    listed = allowed(fakes.sandbox(), fakes.snapshot(POLICY, ()))
    rules = {rule["rule"]: rule for rule in listed["allow"]}
    assert "shared" not in rules["dev/run"]
    assert rules["dev/results"]["shared"] is True
    declared = {operation["operation"]: operation.get("redirects") for operation in rules["dev/go"]["operations"]}
    assert declared["go/sums.read"] is None
    assert declared["go/module.read"] == [BUCKET]


def test_a_permit_says_whether_its_operation_may_redirect() -> None:
    """Expect no where nothing is declared and yes where something is, for whatever carries a redirect out."""
    assert not restrictions(SUM)
    assert restrictions(MODULE)


@pytest.mark.parametrize(
    ("url", "said", "unsaid"),
    [
        (SUM, "recognised", "may lead to"),
        (MODULE, f"its answer may lead to {BUCKET}", "left under the account"),
        (RESULT, "reaches what others left under the account; told apart by job", "may lead to"),
    ],
)
def test_an_explanation_shows_what_was_declared(
    url: str, said: str, unsaid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expect `exeat policy explain` to print it under the operation that is recognised, and nothing for others."""
    print_decision(explain_request(POLICY, "dev", "GET", url, None, NOW))
    printed = " ".join(capsys.readouterr().out.split())
    assert unsaid not in printed
    assert said in printed
