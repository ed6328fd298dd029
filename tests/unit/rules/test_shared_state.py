"""Shared state: what others left under a credential's account is told apart by a binding, or said to be shared."""

from __future__ import annotations

import copy
import textwrap
from dataclasses import replace

import pytest

from rules.compile import DocumentFault, compile_policy
from rules.decide import decide_request
from rules.decision import Decision, Denied, Permit
from rules.explaining import misses, recognised
from rules.facts import RequestFacts, Sandbox
from rules.parse import Parsed, PolicyError, Sources, parse_sources
from rules.service_file import CatalogueError, parse_service

CREDENTIALS = """\
version: 1
credentials:
  warehouse: {service: bigquery, secret: "store:google/bigquery", owner: data}
  snow: {service: snowflake, secret: "store:snow", owner: data, hosts: [acme.snowflakecomputing.com]}
"""
SERVICE = """\
version: 1
service: jobs
hosts:
  api: {host: api.jobs.example}
credential: {kind: bearer, at: [api], placeholder: {env: JOBS_TOKEN, shape: "jobs_{32}"}}
operations:
  job.read:
    effect: read
    why: A job.
    arguments: {job: "{job}"}
    shared_state: [job]
    requests:
      - {at: api, methods: [GET], paths: ["/jobs/{job}"]}
  job.list:
    effect: read
    why: All jobs.
    shared_state: []
    requests:
      - {at: api, methods: [GET], paths: ["/jobs"]}
tests:
  - {allow: "GET https://api.jobs.example/jobs/1", operation: job.read, why: one}
  - {deny: "POST https://api.jobs.example/jobs", why: a write}
"""
JOBS = "version: 1\ncredentials:\n  jobs: {service: jobs, secret: 'store:jobs', owner: data}\n"


def parse(rules: str, credentials: str = CREDENTIALS, services: str = "") -> Parsed:
    """A policy whose role `dev` allows `rules`; line 5 is their first line, column 9 where an item's value begins."""
    text = "version: 1\nroles:\n  dev:\n    allow:\n" + textwrap.indent(textwrap.dedent(rules), "      ") + "\n"
    files = {"services/jobs.yaml": services} if services else {}
    return parse_sources(
        Sources(policy={"policy.yaml": text}, credentials=("credentials.yaml", credentials), services=files)
    )


def problems(rules: str, credentials: str = CREDENTIALS, services: str = "") -> str:
    with pytest.raises(PolicyError) as caught:
        parse(rules, credentials, services)
    return str(caught.value)


def get(url: str) -> RequestFacts:
    host = url.split("/")[2]
    facts = RequestFacts.build(method="GET", scheme="https", tunnel=None, target=url, headers=(("host", host),))
    return replace(facts, body=b"")


SANDBOX = Sandbox(
    tenant="t", id="s1", epoch=1, role="dev", owner="o", agent="a", task="k", attributes={"run": "run7"}, expires_at=9e9
)
RESULT = "https://bigquery.googleapis.com/bigquery/v2/projects/acme/queries/"


def decided(parsed: Parsed, url: str) -> Decision:
    return decide_request(compile_policy(parsed.document), SANDBOX, get(url), now=0.0)


@pytest.mark.parametrize(
    ("rules", "place", "sentence"),
    [
        (
            "- {service: bigquery, operations: [query.result], credential: warehouse}",
            "5:41",
            "with: must bind job, or say shared: true",
        ),
        (
            "- {service: bigquery, operations: [execute], credential: warehouse, with: {project: acme}}",
            "5:81",
            "with: must bind job, or say shared: true",
        ),
        (
            '- {service: bigquery, operations: [query.result], credential: warehouse, with: {job: "*"}}',
            "5:86",
            "a pattern for job needs more than *, or say shared: true",
        ),
        (
            '- {service: bigquery, operations: [query.result], credential: warehouse, with: {job: ["a*", "*"]}}',
            "5:86",
            "a pattern for job needs more than *, or say shared: true",
        ),
        (
            "- {service: bigquery, operations: [query.result], credential: warehouse, shared: false}",
            "5:41",
            "with: must bind job, or say shared: true",
        ),
        (
            "- {service: bigquery, operations: [query.run], credential: warehouse, shared: false}",
            "5:85",
            "shared: true, or leave it out",
        ),
        (
            "- {service: snowflake, operations: [statement.cancel], credential: snow, with: {account: acme}}",
            "5:86",
            "with: must bind handle, or say shared: true",
        ),
        (
            "- {name: r, host: h.test, methods: [GET], paths: [/a], shared: true}",
            "5:62",
            "unknown key 'shared'",
        ),
    ],
)
def test_what_others_left_is_not_reached_by_accident(rules: str, place: str, sentence: str) -> None:
    """RULINGS 7.6: expect an error at the place, which names both ways out."""
    found = problems(rules)
    assert any(line.startswith(f"policy.yaml:{place}:") and sentence in line for line in found.splitlines()), found


def test_what_nothing_tells_apart_has_to_be_said() -> None:
    """Expect that no binding helps where the operation states nothing that tells sandboxes apart."""
    rule = "- {service: jobs, operations: [read], credential: jobs, with: {job: mine}}"
    assert "jobs/job.list reaches what other sandboxes left" in problems(rule, JOBS, SERVICE)
    assert "say shared: true, or leave it out" in problems(rule, JOBS, SERVICE)


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("- {service: bigquery, operations: [query.result], credential: warehouse, shared: true}", "said"),
        (
            '- {service: bigquery, operations: [query.result], credential: warehouse, with: {job: "${sandbox.run}-*"}}',
            "bound",
        ),
        ("- {service: bigquery, operations: [query.run, dataset.read], credential: warehouse}", "nothing shared"),
        ("- {service: bigquery, operations: [query.result]}", "no credential, so no account of ours"),
    ],
)
def test_a_rule_that_says_so_loads(rules: str, why: str) -> None:
    """Expect a policy without warnings about it."""
    assert not [warning for warning in parse(rules).warnings if "shared" in str(warning)], why


def test_a_needless_shared_is_warned_of() -> None:
    """Expect a warning where the word says nothing: no operation of the rule is marked, or no credential is used."""
    for rule in (
        "- {service: bigquery, operations: [query.run], credential: warehouse, shared: true}",
        "- {service: bigquery, operations: [query.result], shared: true}",
    ):
        assert "says nothing here" in str(parse(rule).warnings)


def test_a_bound_result_is_the_sandboxes_own() -> None:
    """Expect another's result, and the list of all, to be denied; one's own is permitted."""
    parsed = parse(
        '- {service: bigquery, operations: [query.result], credential: warehouse, with: {job: "${sandbox.run}-*"}}'
    )
    assert isinstance(decided(parsed, RESULT + "run8-1"), Denied)
    assert isinstance(decided(parsed, RESULT.replace("queries/", "jobs")), Denied)
    assert isinstance(decided(parsed, RESULT + "run7-1"), Permit)


def test_a_document_cannot_leave_it_out() -> None:
    """Expect the compiler to refuse a document whose rule neither binds nor says so."""
    document = parse("- {service: bigquery, operations: [query.result], credential: warehouse, shared: true}").document
    compile_policy(document)
    damaged = copy.deepcopy(dict(document))
    damaged["roles"]["dev"]["rules"][0]["shared"] = False
    with pytest.raises(DocumentFault, match="tells sandboxes apart"):
        compile_policy(damaged)


def test_an_explanation_says_what_is_shared() -> None:
    """Expect the recognised operation to name what tells sandboxes apart, and a near miss to say why it is bound."""
    parsed = parse(
        '- {service: bigquery, operations: [query.result], credential: warehouse, with: {job: "${sandbox.run}-*"}}'
    )
    policy = compile_policy(parsed.document)
    operations = [op for rule in policy.roles["dev"].rules for op in rule.operations]
    assert recognised(operations, get(RESULT + "run8-1"))[0]["shared_state"] == ["job"]
    (miss,) = misses(policy, SANDBOX, get(RESULT + "run8-1"))
    assert miss["because"].endswith("apart from what others left under the same account")


@pytest.mark.parametrize(
    ("old", "new", "place", "sentence"),
    [
        ("shared_state: [job]", "shared_state: true", "11:19", "a list of the arguments"),
        ("shared_state: [job]", "shared_state: [owner]", "11:19", "stated by no request"),
        (
            '- {at: api, methods: [GET], paths: ["/jobs/{job}"]}',
            '- {at: api, methods: [GET], paths: ["/jobs/{job}"]}\n'
            '      - {at: api, methods: [GET], paths: ["/jobs/new"], arguments: {}, unbound: [job]}',
            "14:81",
            "cannot be left open",
        ),
    ],
)
def test_a_mark_with_a_mistake_is_refused_where_it_stands(old: str, new: str, place: str, sentence: str) -> None:
    """Expect file:line:column for a mark that tells nothing apart."""
    assert old in SERVICE
    with pytest.raises(CatalogueError) as caught:
        parse_service(SERVICE.replace(old, new, 1), "jobs.yaml")
    found = str(caught.value)
    assert any(line.startswith(f"jobs.yaml:{place}:") and sentence in line for line in found.splitlines()), found
