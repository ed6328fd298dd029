"""Service files: the base itself as a path, what is done to an answer, and which of its headers come back."""

from __future__ import annotations

import pytest

from rules.catalogue import CatalogueError, parse_service, resolve_service
from rules.decide import decide_request
from rules.decision import Permit
from rules.facts import Sandbox
from rules.names import RuleId
from rules.policy import Operation, Policy, Role, Rule
from tests.support.judged import judged

FILE = """\
version: 1
service: small
hosts:
  api: {host: api.example, mirror: ""}
operations:
  list.read:
    effect: read
    why: A list.
    ANSWER
    requests:
      - {at: api, methods: [GET], paths: [""]}
tests:
  - {allow: "GET https://api.example/", operation: list.read, why: the list}
  - {deny: "GET https://api.example/x", why: another path}
"""
BOX = Sandbox(
    tenant="t", id="s", epoch=1, role="dev", owner="o", agent="a", task="k", expires_at=10.0
)  # fmt: skip


def operation(answer: str, base: str = "https://api.example/rpc") -> Operation:
    small = parse_service(FILE.replace("ANSWER", answer), "small.yaml")
    return resolve_service({"small": small}, "mine", "small", base).operations[0]


def permit(op: Operation, path: str) -> object:
    rule = Rule(id=RuleId("dev/mine"), action="allow", operations=(op,))
    policy = Policy(
        digest="", document={}, roles={"dev": Role(name="dev", rules=(rule,))}, destinations={}, credentials={}
    )
    return decide_request(policy, BOX, judged("GET", path), 1.0)


@pytest.mark.parametrize(
    "answer", ["answer: everything", "answer: [mcp_tools]", "answer_headers: x", "answers: mcp_tools"]
)
def test_an_unknown_way_to_treat_an_answer_is_a_problem(answer: str) -> None:
    """Expect the file to be refused, with the line."""
    with pytest.raises(CatalogueError) as caught:
        operation(answer)
    assert ":9:" in str(caught.value)


def test_the_base_itself_is_a_path_and_nothing_else_is() -> None:
    """`""` is the base without a slash behind it, and `/` where the service has its own host."""
    op = operation("download: false")
    assert isinstance(permit(op, "/rpc"), Permit)
    for path in ("/rpc/", "/rpc/x", "/", "/rpcs"):
        assert not isinstance(permit(op, path), Permit)
    assert isinstance(permit(operation("download: false", "https://api.example"), "/"), Permit)


def test_an_answer_that_is_cut_goes_through_the_broker() -> None:
    """Such a permit needs the broker although nothing is counted, and grants no tool where no rule calls one."""
    found = permit(operation("answer: mcp_tools"), "/rpc")
    assert isinstance(found, Permit)
    assert found.needs_state
    assert found.restrictions.answer is not None
    assert found.restrictions.answer.patterns == ()
    plain = permit(operation("download: false"), "/rpc")
    assert isinstance(plain, Permit)
    assert not plain.needs_state
    assert plain.restrictions.answer is None


def test_named_headers_of_an_answer_are_in_the_permit() -> None:
    """In lower case, and none where the file names none."""
    found = permit(operation("answer_headers: [MCP-Session-Id]"), "/rpc")
    assert isinstance(found, Permit)
    assert found.restrictions.response_headers == {"mcp-session-id"}
