"""Token calls that ask for more than is granted (decision 13): what leaves of them, and what is refused as it came."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rules.compile import compile_policy
from rules.decide import decide_request
from rules.decision import Denied, Held, Permit
from rules.denials import deny_matches
from rules.facts import RequestFacts
from rules.narrowing import narrowed, scopes
from rules.operations.oci import ACTIONS, narrow, parts
from rules.paths import Query
from rules.policy import Policy
from tests.support.operationcases import policy_of
from tests.support.policies import NOW, PLACEHOLDER, request, sandbox
from tests.support.properties import tried

TOKEN = "GET https://auth.docker.io/token?service=registry.docker.io"
PULL = {"service": "dockerhub", "operations": ["image.pull", "token.pull"], "with": {"repository": "acme/*"}}
PUSH = {"service": "dockerhub", "operations": ["token.pull", "token.push"], "with": {"repository": "acme/shop"}}


@cache
def made(text: str) -> Policy:
    return policy_of(text)


def policy(*allow: dict[str, Any], deny: tuple[dict[str, Any], ...] = ()) -> Policy:
    def named(rules: tuple[dict[str, Any], ...], word: str) -> list[dict[str, Any]]:
        return [{"name": f"{word}-{number}", **rule} for number, rule in enumerate(rules)]

    role = {"allow": named(allow, "allow"), **({"deny": named(deny, "deny")} if deny else {})}
    return made(json.dumps({"version": 1, "roles": {"dev": role}}))


def asked(*texts: str, rest: str = "") -> RequestFacts:
    return request(TOKEN + "".join(f"&scope={text}" for text in texts) + rest)


def left(found: RequestFacts) -> list[str]:
    return list(scopes(found.query))


READS = policy(PULL)

REFUSED = {
    "nothing of it is granted": asked("repository:acme/a:push"),
    "nothing is granted of another image": asked("repository:evil/a:pull,push"),
    "the catalogue": asked("registry:catalog:*"),
    "a plug-in of that name": asked("repository(plugin):acme/a:pull"),
    "a class of another name": asked("repositories:acme/a:pull"),
    "an action that nobody knows": asked("repository:acme/a:admin"),
    "an action in capitals": asked("repository:acme/a:PULL"),
    "a name in capitals": asked("repository:acme/A:pull,push"),
    "a name with dots": asked("repository:acme/../evil/a:pull,push"),
    "a name of a registry": asked("repository:host:5000/acme/a:pull,push"),
    "a part that is empty": asked("repository:acme/a:pull,push", ""),
    "two spaces": asked("repository:acme/a:pull,push%20%20repository:acme/b:pull"),
    "a tab": asked("repository:acme/a:pull,push%09repository:acme/b:pull"),
    "a part that is no scope": asked("repository:acme/a:pull,push", "acme"),
    "an empty action": asked("repository:acme/a:pull,,push"),
    "nine actions": asked("repository:acme/a:" + ",".join(["pull"] * 8 + ["push"])),
    "seventeen scopes": asked(*["repository:acme/a:pull"] * 16, "repository:acme/b:push"),
    "another service": replace(asked(), query=Query.parse("service=other.test&scope=repository:acme/a:pull,push")),
    "a key without an end": asked("repository:acme/a:pull,push", rest="&offline_token=true"),
    "an unknown parameter": asked("repository:acme/a:pull,push", rest="&grant=all"),
    "a parameter twice": asked("repository:acme/a:pull,push", rest="&account=a&account=b"),
    "a placeholder in what would be left out": asked("repository:acme/a:pull", f"repository:{PLACEHOLDER}:pull"),
    "the parameter in capitals": replace(
        asked(), query=Query.parse("service=registry.docker.io&Scope=repository:a:pull,push")
    ),
    "a body": replace(asked("repository:acme/a:pull,push"), has_body=True),
    "another method": replace(asked("repository:acme/a:pull,push"), method="POST"),
    "another path": request(
        "GET https://auth.docker.io/v2/token?service=registry.docker.io&scope=repository:acme/a:pull,push"
    ),
    "another host": request("GET https://auth.test/token?service=registry.docker.io&scope=repository:acme/a:pull,push"),
}


@pytest.mark.parametrize("facts", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_narrowed_is_refused_as_it_came(facts: RequestFacts) -> None:
    """Expect the very facts back, and a denial of them."""
    assert narrowed(READS, sandbox(), facts, NOW) is facts
    assert isinstance(decide_request(READS, sandbox(), facts, NOW), Denied)


def test_a_decision_narrows_nothing_by_itself() -> None:
    """Expect executor and vault, which only decide, to refuse what a worker should have narrowed."""
    facts = asked("repository:acme/a:pull,push")
    assert isinstance(decide_request(READS, sandbox(), facts, NOW), Denied)
    assert isinstance(decide_request(READS, sandbox(), narrowed(READS, sandbox(), facts, NOW), NOW), Permit)


def test_a_service_that_does_not_say_so_is_not_narrowed() -> None:
    """Expect the whole call to be refused where the operation is not declared."""
    document = json.loads(json.dumps(READS.document))
    for operation in document["operations"].values():
        if operation["head"]:
            operation["head"]["params"].pop("narrow", None)
    facts = asked("repository:acme/a:pull,push")
    assert narrowed(compile_policy(document), sandbox(), facts, NOW) is facts


def test_an_ended_sandbox_and_an_unknown_role_get_nothing_smaller() -> None:
    """Expect other refusals than that of a rule to stand."""
    facts = asked("repository:acme/a:pull,push")
    assert narrowed(READS, sandbox(expires_at=NOW), facts, NOW) is facts
    assert narrowed(READS, sandbox("other"), facts, NOW) is facts


def test_what_is_permitted_or_held_as_it_came_stays() -> None:
    """Expect nothing to be taken from a call that a rule permits, or that waits for a person."""
    facts = asked("repository:acme/a:pull", "repository:acme/b:pull,pull")
    assert narrowed(READS, sandbox(), facts, NOW) is facts
    held = policy(PULL, {"service": "dockerhub", "operations": ["token.push"], "approval": {"from": "release"}})
    facts = asked("repository:acme/a:pull,push")
    assert isinstance(decide_request(held, sandbox(), facts, NOW), Held)
    assert narrowed(held, sandbox(), facts, NOW) is facts


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["repository:acme/a:pull,push"], ["repository:acme/a:pull"]),
        (["repository:acme/a:push,pull,delete"], ["repository:acme/a:pull"]),
        (["repository:acme/a:*"], ["repository:acme/a:pull"]),
        (["repository:acme/a:pull,*"], ["repository:acme/a:pull"]),
        (["repository:acme/a:pull,admin"], ["repository:acme/a:pull"]),
        (["repository:acme/a:pull", "repository:evil/b:pull"], ["repository:acme/a:pull"]),
        (["repository:evil/b:pull,push%20repository:acme/a:pull,push"], ["repository:acme/a:pull"]),
        (["registry:catalog:*", "repository:acme/a:pull"], ["repository:acme/a:pull"]),
        (
            ["repository:acme/a:pull,push", "repository:acme/b:pull"],
            ["repository:acme/a:pull", "repository:acme/b:pull"],
        ),
        (
            ["repository:acme/a:pull%20repository:acme/b:push,pull"],
            ["repository:acme/a:pull", "repository:acme/b:pull"],
        ),
    ],
)
def test_what_one_rule_grants_is_left(texts: list[str], expected: list[str]) -> None:
    """Expect the granted part alone, and the query as it came beside it."""
    facts = asked(*texts)
    found = narrowed(READS, sandbox(), facts, NOW)
    assert left(found) == expected
    assert found.asked == facts.query
    assert isinstance(decide_request(READS, sandbox(), found, NOW), Permit)


def test_everything_that_is_not_left_out_stays_as_it_was_written() -> None:
    """Expect order, spelling and coding of all else, also of a scope that is granted whole."""
    before = "account=a%2Bb&sc%6Fpe=repository%3Aacme%2Fa%3apull&service=registry.docker.io"
    query = f"{before}&scope=repository:acme/b:pull%2cpush&client_id="
    facts = replace(asked(), query=Query.parse(query))
    expected = f"{before}&scope=repository:acme/b:pull&client_id="
    assert narrowed(READS, sandbox(), facts, NOW).query.raw == expected


def test_of_several_rules_the_one_that_leaves_most_counts() -> None:
    """Expect no token that two rules grant only together."""
    both = policy(PULL, PUSH)
    assert left(
        narrowed(both, sandbox(), asked("repository:acme/shop:pull,push", "repository:acme/base:pull"), NOW)
    ) in (
        ["repository:acme/shop:pull,push"],
        ["repository:acme/shop:pull", "repository:acme/base:pull"],
    )
    facts = asked("repository:acme/shop:pull,push", "repository:evil/base:pull")
    assert left(narrowed(both, sandbox(), facts, NOW)) == ["repository:acme/shop:pull,push"]


def test_which_rule_counts_does_not_depend_on_their_order() -> None:
    """Expect the same remainder however the rules are written."""
    facts = asked("repository:acme/shop:pull,push", "repository:acme/base:pull")
    one = {**PULL, "name": "one"}, {**PUSH, "name": "two"}
    assert narrowed(policy(*one), sandbox(), facts, NOW) == narrowed(policy(*reversed(one)), sandbox(), facts, NOW)


# --- deny rules ---

WRITES = {"service": "dockerhub", "operations": ["token.pull", "token.push", "token.delete"]}
NO_PUSH = {"service": "dockerhub", "operations": ["token.push"]}
NO_SECRET = {"service": "dockerhub", "operations": ["token.pull", "token.push"], "with": {"repository": "secret/*"}}


def test_a_deny_rule_reads_every_part_of_a_token() -> None:
    """Expect a token that pushes to be denied by that rule, whatever else it is good for."""
    (rule,) = (rule for rule in policy(WRITES, deny=(NO_PUSH,)).roles["dev"].rules if rule.action == "deny")
    for text in ("repository:a:push", "repository:a:pull,push", "repository:a:pull,push,delete", "repository:a:*"):
        assert deny_matches(rule, asked(text), sandbox()), text
    assert deny_matches(rule, asked("repository:a:delete", "repository:b:push"), sandbox())
    for text in ("repository:a:pull", "repository:a:pull,delete", "repository:a:delete"):
        assert not deny_matches(rule, asked(text), sandbox()), text


def test_what_a_deny_rule_denies_is_not_left() -> None:
    """Expect the rest where there is one, else the denial of that rule."""
    barred = policy(WRITES, deny=(NO_PUSH, NO_SECRET))
    assert left(narrowed(barred, sandbox(), asked("repository:a:*"), NOW)) == ["repository:a:pull,delete"]
    facts = asked("repository:secret/a:pull", "repository:b:pull,push")
    assert left(narrowed(barred, sandbox(), facts, NOW)) == ["repository:b:pull"]
    facts = asked("repository:secret/a:pull,push")
    assert narrowed(barred, sandbox(), facts, NOW) is facts
    assert isinstance(denied := decide_request(barred, sandbox(), facts, NOW), Denied)
    assert denied.reason == "denied-by-rule"


# --- properties ---

NAMES = ("a", "acme/a", "acme/shop", "secret/a", "evil/x", "A")
SAID = ("pull", "push", "delete", "*", "admin")
KINDS = ("repository", "registry", "repository(plugin)")
scope = st.builds(
    lambda kind, name, said: f"{kind}:{name}:{','.join(said)}",
    st.sampled_from(KINDS[:1] * 4 + KINDS),
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(SAID), min_size=1, max_size=4),
)
values = st.lists(st.lists(scope, min_size=1, max_size=3).map("%20".join), min_size=1, max_size=4)
ROLES = (
    policy(PULL),
    policy(PUSH),
    policy(PULL, PUSH),
    policy(WRITES, deny=(NO_PUSH,)),
    policy(WRITES, deny=(NO_SECRET,)),
    policy(WRITES, deny=({**NO_PUSH, "with": {"repository": "secret/*"}},)),
    policy(WRITES, PULL, deny=(NO_PUSH, NO_SECRET)),
)


def power(query: Query) -> set[tuple[str, str]]:
    """(name, action) of everything that a token for `query` is good for."""
    found: set[tuple[str, str]] = set()
    for text in scopes(query):
        kind, _, rest = text.partition(":")
        name, _, said = rest.rpartition(":")
        wanted = set(said.split(","))
        if kind == "repository":
            found |= {(name, action) for action in (set(ACTIONS) | wanted if "*" in wanted else wanted)}
    return found


@tried(300)
@given(texts=values, which=st.sampled_from(ROLES), account=st.booleans())
@example(texts=["repository:a:*"], which=ROLES[3], account=True)
def test_what_leaves_is_asked_for_and_granted(texts: list[str], which: Policy, account: bool) -> None:
    """Expect a part of what was asked, permitted as it stands, no part of it denied, and the same when repeated."""
    facts = asked(*texts, rest="&account=me" if account else "")
    found = narrowed(which, sandbox(), facts, NOW)
    decision = decide_request(which, sandbox(), found, NOW)
    if found is facts:
        # Nothing smaller: then either it is permitted, or no single part of it is.
        if isinstance(decision, Denied):
            for _, alone in parts(facts.query):
                assert isinstance(decide_request(which, sandbox(), replace(facts, query=alone), NOW), Denied)
        return
    assert isinstance(decision, Permit)
    assert power(found.query) <= power(facts.query)
    assert {action for _, action in power(found.query)} <= set(ACTIONS)
    assert [pair for pair in found.query.pairs if pair[0] != "scope"] == [
        pair for pair in facts.query.pairs if pair[0] != "scope"
    ]
    assert Query.parse(found.query.raw) == found.query
    assert narrowed(which, sandbox(), found, NOW) is found
    for rule in which.roles["dev"].rules:
        if rule.action == "deny":
            for _, alone in parts(found.query):
                assert not deny_matches(rule, replace(found, query=alone), sandbox())


@tried(300)
@given(texts=values, kept=st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(ACTIONS))))
def test_the_rewriting_keeps_exactly_what_it_is_told_to(texts: list[str], kept: set[tuple[str, str]]) -> None:
    """Expect the granted pairs that were asked for, once more the same, and None where there are none."""
    query = asked(*texts).query
    wanted = {pair for pair in power(query) & kept if pair[0] != "A"}
    found = narrow({"actions": ACTIONS}, query, lambda name, action: (name, action) in kept)
    if found is None:
        assert not wanted
        return
    assert power(found[0]) == wanted
    again = narrow({"actions": ACTIONS}, found[0], lambda name, action: (name, action) in kept)
    assert again == found


@tried(200)
@given(st.text(alphabet="repository:acme/a,pull*push%20&=scope()~+;", max_size=80))
def test_whatever_is_asked_nothing_is_raised(text: str) -> None:
    """Expect facts for every query that can be stated."""
    try:
        query = Query.parse(f"service=registry.docker.io&scope={text}")
    except ValueError:
        return
    facts = replace(asked(), query=query)
    found = narrowed(READS, sandbox(), facts, NOW)
    assert found is facts or isinstance(decide_request(READS, sandbox(), found, NOW), Permit)
