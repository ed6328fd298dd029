"""Which tools of a list a sandbox may see: those that some allow rule of its role could grant, and no other."""

from __future__ import annotations

from rules.answers import answer_spec, granted
from rules.catalogue import builtin_services, resolve_service
from rules.decision import AnswerSpec
from rules.facts import Sandbox
from rules.names import RuleId
from rules.policy import Operation, Rule
from tests.support.judged import judged

SERVICES = builtin_services()
TRACKER = resolve_service(SERVICES, "tracker", "mcp", "https://api.example/mcp")
OTHER = resolve_service(SERVICES, "other", "mcp", "https://api.example/other")
BOX = Sandbox(tenant="t", id="s", epoch=1, role="dev", owner="o", agent="a", task="k", attributes={"team": "get_x"})
LIST = judged("POST", "/mcp", content_type="application/json")


def rule(name: str, operations: tuple[Operation, ...], **bind: tuple[str, ...]) -> Rule:
    return Rule(id=RuleId(f"dev/{name}"), action="allow", operations=operations, bind=bind)


def spec(*rules: Rule) -> AnswerSpec | None:
    return answer_spec(TRACKER.select("tools.list"), rules, LIST)


def test_without_a_rule_for_calls_no_tool_is_shown() -> None:
    """Listing alone, another server's calls, and another operation's binding grant nothing."""
    for rules in (
        (rule("list", TRACKER.select("tools.list")),),
        (rule("other", OTHER.select("tools.call")),),
        (rule("session", TRACKER.select("read"), tool=("get_*",)),),
    ):
        found = spec(*rules)
        assert found is not None
        assert found.patterns == ()
        assert not granted(found, "get_issue", BOX)


def test_what_has_no_list_is_not_cut() -> None:
    """An operation that says nothing about its answer passes as it is."""
    assert answer_spec(TRACKER.select("tools.call"), (rule("a", TRACKER.select("tools.call")),), LIST) is None


def test_the_patterns_of_all_rules_count_and_a_rule_without_them_grants_every_tool() -> None:
    """What one of several rules grants is shown."""
    calls = TRACKER.select("tools.call")
    found = spec(rule("a", calls, tool=("get_*",)), rule("b", calls, tool=("${sandbox.team}", "x_${sandbox.team}")))
    assert found is not None
    names = ["get_issue", "get_", "x_get_x", "x_get_y", "GET_ISSUE", "a/get_issue", "drop"]
    assert [name for name in names if granted(found, name, BOX)] == ["get_issue", "get_", "x_get_x"]
    everything = spec(rule("a", calls, tool=("get_*",)), rule("b", calls))
    assert everything is not None
    assert everything.patterns is None
    assert granted(everything, "drop", BOX)


def test_a_stream_that_is_opened_by_get_is_cut_by_the_rules_for_calls() -> None:
    """The place counts, not the method of the request whose answer it is."""
    found = answer_spec(
        TRACKER.select("session.stream")[:1],
        (rule("a", TRACKER.select("tools.call"), tool=("get_issue",)),),
        judged("GET", "/mcp", ("accept", "text/event-stream")),
    )
    assert found is not None
    assert found.patterns == ("get_issue",)
