"""GraphQL: the document decides, aliases and fragments hide nothing, and a bound repository is the only one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import RequestFacts
from rules.operations import graphql
from rules.operations.graphql import check, evaluate
from tests.support.judged import judged
from tests.support.properties import tried
from tests.support.rows import every_row

EXAMPLES = tried()

QUERY: dict[str, Any] = {
    "type": "query",
    "introspection": True,
    "fields": {
        "repository": {"with": {"repository": "{owner}/{name}"}, "selects": "Repository"},
        "rateLimit": {"selects": "RateLimit"},
    },
    "types": {
        "Repository": "id name owner:Actor issues:[Issue] issue:Issue ref:Ref",
        "Issue": "id title author:Actor",
        "Actor": "id login",
        "Ref": "name",
        "RateLimit": "remaining",
    },
}
MUTATION: dict[str, Any] = {
    "type": "mutation",
    "fields": {
        "createCommitOnBranch": {
            "with": {
                "repository": "{input.branch.repositoryNameWithOwner}",
                "branch": "{input.branch.branchName}",
            },
            "without": ["input.branch.id"],
            "selects": "Commit",
        }
    },
    "types": {"Commit": "clientMutationId"},
}
JSON = judged(content_type="application/json")


def ask(document: Any, params: dict[str, Any] = QUERY, facts: RequestFacts = JSON, **more: Any) -> Any:
    return evaluate(params, json.dumps({"query": document, **more}).encode(), facts)


@every_row(
    ("body", "why"),
    [
        (b"", "nothing"),
        (b'[{"query":"{viewer{login}}"},{"query":"mutation{deleteRef(input:{}){clientMutationId}}"}]', "a batch"),
        (b'[{"query":"{viewer{login}}"}]', "a batch of one"),
        (b'{"query":"{viewer{login}}","query":"mutation{x}"}', "a duplicate key"),
        (b'{"query":"{viewer{login}}","qu\\u0065ry":"mutation{x}"}', "a duplicate key behind an escape"),
        (b'{"extensions":{"persistedQuery":{"version":1,"sha256Hash":"aa"}}}', "a hash and no document"),
        (b'{"query":"","extensions":{"persistedQuery":{"version":1,"sha256Hash":"aa"}}}', "a hash, an empty document"),
        (b'{"query":null,"id":"aa"}', "a stored document"),
        (b'{"query":"{viewer{login}}","extensions":{"persistedQuery":{"version":1,"sha256Hash":"aa"}}}', "both"),
        (b'{"query":"{viewer{login}}","documentId":"aa"}', "a document and the name of another"),
        (b'{"query":"{viewer{login}}","doc_id":"1"}', "an unknown key"),
        (b'{"query":["{viewer{login}}"]}', "a list of documents"),
        (b'{"query":"{viewer{login}}","variables":"{}"}', "variables as text"),
        (b'{"query":"{viewer{login}}","variables":[]}', "variables as a list"),
        (b'{"query":"{viewer{login}}","operationName":""}', "an empty operation name"),
        (b'{"query":"{viewer{login}}","operationName":1}', "a number as operation name"),
        (b"query=%7Bviewer%7Blogin%7D%7D", "a form"),
        (b"{viewer{login}}", "a bare document"),
        ('{"query":"{viewer{login}}"}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"query":"{viewer{login}}"}', "a byte order mark"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_envelope_of_another_form_is_no_query(body: bytes, why: str) -> None:
    """Expect None for batches, stored documents, duplicate or unknown keys and every other encoding."""
    assert evaluate(QUERY, body, JSON) is None


@pytest.mark.parametrize(
    "facts",
    [
        judged(content_type="application/graphql"),
        judged(content_type="multipart/form-data; boundary=x"),
        judged(content_type="text/plain"),
        judged(content_type="application/json; charset=utf-16"),
        judged(),
        judged("POST", "/", ("content-type", "text/plain"), content_type="application/json"),
        judged("POST", "/", ("content-encoding", "gzip"), content_type="application/json"),
        judged("POST", "/", ("content-encoding", "zstd"), content_type="application/json"),
    ],
    ids=lambda facts: ",".join(value for name, value in facts.headers if name.startswith("content")),
)
def test_a_body_that_the_head_calls_something_else_is_not_read(facts: RequestFacts) -> None:
    """Expect None unless the head says JSON, once, and no content coding."""
    assert ask("{viewer{login}}", facts=facts) is None


@every_row(
    ("document", "more", "why"),
    [
        ("query a{viewer{login}} query b{viewer{id}}", {}, "two operations and no name"),
        ("query a{viewer{login}} query b{viewer{id}}", {"operationName": None}, "a null name"),
        ("query a{viewer{login}} query b{viewer{id}}", {"operationName": "c"}, "a name that is not there"),
        ("query a{viewer{login}} query a{viewer{id}}", {"operationName": "a"}, "two of one name"),
        ("{viewer{login}} query a{viewer{id}}", {"operationName": "a"}, "an anonymous one among others"),
        ("query a{viewer{login}} mutation b{x}", {"operationName": "a"}, "a mutation that could be chosen"),
        ("query a{viewer{login}} subscription b{x}", {"operationName": "a"}, "a subscription that could be chosen"),
        ("mutation{viewer:deleteRef(input:{refId:1}){clientMutationId}}", {}, "a mutation behind an alias"),
        ("subscription{x}", {}, "a subscription"),
        ("fragment f on Query{viewer{login}}", {}, "no operation"),
        ("{...f} fragment f on Query{a} fragment f on Query{b}", {}, "two fragments of one name"),
        ("{...g}", {}, "a fragment that is not there"),
        ("type A{b:C}", {}, "a schema"),
        ("{viewer{login}} extend type A{b:C}", {}, "a schema beside a query"),
        ("{viewer{login}", {}, "cut short"),
        ("{viewer{login}}}", {}, "a bracket too many"),
        ("", {}, "nothing"),
        ("{viewer{login}} # x\r{b}", {}, "a carriage return alone, which ends a comment for some"),
        ("{viewer{login}} # x\u2028{b}", {}, "a line separator, which ends a comment for some"),
        ("{viewer\x00{login}}", {}, "a zero byte"),
        ("\ufeff{viewer{login}}", {}, "a byte order mark in the document"),
        ("{repository(owner:$o,name:$n){id}}", {}, "variables that nobody defines"),
        ('{repository(owner:"a",owner:"b",name:"c"){id}}', {}, "an argument twice"),
        ("query($o:String,$o:String){repository(owner:$o,name:$o){id}}", {}, "a variable twice"),
        ("{a" + "{a" * 40 + "}" * 40 + "}", {}, "nested too deeply"),
        ("{a(b:" + "[" * 5000 + "]" * 5000 + ")}", {}, "lists nested without end"),
        ("{" + "a " * 4000 + "}", {}, "too many tokens"),
        ("{" + " ".join(f"f{n}" for n in range(65)) + "}", {}, "too many top-level fields"),
        ("{a}" + " " * graphql.MAX_QUERY, {}, "too long"),
        ("{a}" + "#\n" * 4001, {}, "too many comments"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)
def test_a_document_that_is_not_one_query_is_refused(document: str, more: dict[str, Any], why: str) -> None:
    """Expect None: ambiguous, of another type, or over a cap."""
    assert ask(document, **more) is None


@every_row(
    ("document", "why"),
    [
        ('{node(id:"R_1"){id}}', "an id names any repository"),
        ('{repository(owner:"acme",name:"shop"){id} node(id:"R_1"){id}}', "an id beside it"),
        ('{repository(owner:"acme",name:"shop"){id} nodes(ids:["R_1"]){id}}', "ids beside it"),
        ('{repository(owner:"acme",name:"shop"){id} resource(url:"https://x"){url}}', "a URL beside it"),
        ('{repository(owner:"acme",name:"shop"){id} search(query:"x",type:ISSUE){issueCount}}', "a search beside it"),
        ('{repository(owner:"acme",name:"shop"){id} repository:node(id:"R_1"){id}}', "an alias that looks like it"),
        ('{repository(owner:"acme",name:"shop"){id} node(id:"R_1") @include(if:false){id}}', "hidden by a directive"),
        ('{repository(owner:"acme",name:"shop"){id} ...f} fragment f on Query{node(id:"R"){id}}', "in a fragment"),
        ('{repository(owner:"acme",name:"shop"){id} ...{node(id:"R"){id}}}', "in an inline fragment"),
        ('{repository(owner:"acme",name:"shop"){owner{repositories{nodes{name}}}}}', "through its owner"),
        ('{repository(owner:"acme",name:"shop"){owner{...on User{repositories{nodes{name}}}}}}', "and a condition"),
        ('{repository(owner:"acme",name:"shop"){...f}} fragment f on Repository{parent{name}}', "through a fragment"),
        ('{repository(owner:"acme",name:"shop"){id:parent{name}}}', "under an alias"),
        ('{repository(owner:"acme",name:"shop"){issues{nodes{author{login} repository{parent{id}}}}}}', "further down"),
        ('{repository(owner:"acme",name:"shop"){name{x}}}', "a selection where a leaf was declared"),
        ('{repository(owner:"acme"){id}}', "half of the name"),
        ("{repository{id}}", "no name"),
        ('{repository(owner:"",name:"shop"){id}}', "an empty owner"),
        ('{repository(owner:"acme/shop",name:"x"){id}}', "two segments in one value"),
        ('{repository(owner:"acme",name:["shop"]){id}}', "a list"),
        ('{repository(owner:"acme",name:{a:"shop"}){id}}', "an object"),
        ('{repository(owner:"acme",name:null){id}}', "null"),
        ('{repository(owner:"acme",name:true){id}}', "a boolean"),
        ('{repository(owner:"acme",name:1.5){id}}', "a fraction"),
        ('{repository(owner:"acme",name:"""shop"""){id}}', "a block string"),
        ('{repository(owner:"acme",name:"\\u0073hop"){id}}', "an escape"),
        ("query($n:String){repository(owner:" + '"acme"' + ",name:$n){id}}", "a variable without a value"),
        ("query($n:String=null){repository(owner:" + '"acme"' + ",name:$n){id}}", "a default of null"),
        ("{__typename}", "nothing but a type name"),
        ("{rateLimit{remaining}}", "what concerns no repository"),
    ],
    ids=lambda value: value if isinstance(value, str) and not value.startswith("{") else "",
)
def test_a_way_around_the_bound_repository_leaves_it_unstated(document: str, why: str) -> None:
    """Expect a query without `repository`, which no rule that binds it can permit."""
    found = ask(document)
    assert found is not None
    assert set(found) == {"field"}


@pytest.mark.parametrize("value", [None, ["shop"], {"a": "shop"}, True, 1.5, "", "shop/x", "sh\nop", "x" * 513])
def test_a_variable_that_is_no_plain_name_binds_nothing(value: Any) -> None:
    """Expect `repository` to stay unstated when the variable holds anything but a short plain text."""
    document = "query($n:String!){repository(owner:" + '"acme"' + ",name:$n){id}}"
    assert ask(document, variables={"n": value}) == {"field": ("repository",)}


def test_a_null_variable_is_not_its_default() -> None:
    """A null that is written wins over the default (specification 6.1.2): nothing is bound."""
    document = 'query($n:String="shop"){repository(owner:"acme",name:$n){id}}'
    assert ask(document, variables={"n": None}) == {"field": ("repository",)}
    assert ask(document) == {"field": ("repository",), "repository": ("acme/shop",)}


def test_introspection_needs_the_parameter() -> None:
    """`__schema` and `__type` are refused unless the service says that its schema may be read."""
    closed = {**QUERY, "introspection": False}
    for document in ("{__schema{types{name}}}", '{a:__type(name:"X"){name}}', "{x __schema{types{name}}}"):
        assert ask(document, closed) is None
        assert ask(document) is not None
    assert ask("{__typename viewer{login}}", closed) == {"field": ("__typename", "viewer")}


@pytest.mark.parametrize(
    "selected",
    [
        "{commentEdge{node{author{login}}}}",
        "{...F}",
        "{... on X{repository{id}}}",
        "{commentEdge{node{id repository{id}}}}",
        "{clientMutationId{x}}",
        "{a:repository{id}}",
    ],
)
def test_what_a_mutation_answers_with_is_held_to_its_payload(selected: str) -> None:
    """A rule that names a write grants no read of everything that its answer leads to, whatever stands around it."""
    payload = {
        **MUTATION,
        "payload": "Payload",
        "types": {
            **MUTATION["types"],
            "Payload": "clientMutationId commentEdge:Edge",
            "Edge": "node:Node",
            "Node": "id",
        },
    }
    fragment = " fragment F on X{repository{id}}"
    assert ask(f"mutation{{addComment(input:{{}}){selected}}}{fragment}", payload) is None
    commit = 'createCommitOnBranch(input:{branch:{repositoryNameWithOwner:"a/b",branchName:"c"}})'
    assert ask(f"mutation{{{commit}{selected}}}{fragment}", payload) is None
    assert ask("mutation{addComment(input:{}){commentEdge{node{id}}}}", payload) == {"field": ("addComment",)}
    assert ask(f"mutation{{{commit}{{clientMutationId}}}}", payload) is not None


def test_a_mutation_is_not_introspection() -> None:
    """`__schema` does not stand at the top of a mutation."""
    assert ask("mutation{__schema{types{name}}}", {"type": "mutation", "introspection": True}) is None


@pytest.mark.parametrize(
    "branch",
    [
        '{id:"REF_1"}',
        '{id:"REF_1",repositoryNameWithOwner:"acme/shop",branchName:"main"}',
        '{repositoryNameWithOwner:"acme/shop",repositoryNameWithOwner:"b/c",branchName:"main"}',
        "$unknown",
        "1",
    ],
)
def test_a_branch_that_is_named_in_two_ways_binds_nothing(branch: str) -> None:
    """An id, or an id beside the name, leaves the repository unstated or the document refused."""
    document = f"mutation{{createCommitOnBranch(input:{{branch:{branch}}}){{clientMutationId}}}}"
    found = ask(document, MUTATION)
    assert found is None or "repository" not in found


def test_neutral_fields_alone_are_another_way_of_stating_it() -> None:
    """With `neutral: only` nothing but declared fields that bind nothing; with `never` everything else."""
    only, never = {**QUERY, "neutral": "only"}, {**QUERY, "neutral": "never"}
    for document in (
        "{viewer{login}}",
        "{rateLimit{remaining cost}}",
        "{rateLimit{remaining} viewer{login}}",
        '{repository(owner:"a",name:"b"){id}}',
        '{rateLimit{remaining} repository(owner:"a",name:"b"){id}}',
    ):
        assert ask(document, only) is None
        assert ask(document, never) is not None
    for document in ("{rateLimit{remaining}}", "{__typename}", '{__type(name:"Issue"){name}}'):
        assert ask(document, only) is not None
        assert ask(document, never) is None


def test_an_excepted_field_never_matches() -> None:
    """Behind an alias, in a fragment, and beside others."""
    closed = {**QUERY, "except": ["token"]}
    for document in ("{a:token}", "{viewer{login} ...f} fragment f on Query{token}", "{...{token @skip(if:true)}}"):
        assert ask(document, closed) is None
    assert ask("{viewer{token}}", closed) == {"field": ("viewer",)}


def test_fragments_that_double_each_other_cost_nothing() -> None:
    """A chain of fragments, each spread twice and under every type, ends at once."""
    chain = " ".join(f"fragment f{n} on Repository{{...f{n + 1} ...f{n + 1}}}" for n in range(200))
    document = f'{{repository(owner:"a",name:"b"){{...f0}}}} {chain} fragment f200 on Repository{{id}}'
    assert ask(document) == {"field": ("repository",), "repository": ("a/b",)}
    circle = '{repository(owner:"a",name:"b"){...f}} fragment f on R{...g issue(number:1){...f}} fragment g on R{...f}'
    assert ask(circle) == {"field": ("repository",)}


def test_a_query_states_its_fields_behind_aliases_fragments_and_directives() -> None:
    """Expect the real names of all top-level fields of the chosen operation, sorted."""
    document = """
        query a { one: viewer { login } ...f @skip(if: true) ... on Query @include(if: false) { b } }
        query b { other }
        fragment f on Query { two: c ...g }
        fragment g on Query { d }
    """
    assert ask(document, operationName="a") == {"field": ("b", "c", "d", "viewer")}
    assert ask(document, operationName="b") == {"field": ("other",)}
    assert ask("{viewer{login}}", extensions={"clientLibrary": {"name": "x"}}) == {"field": ("viewer",)}
    assert ask("query x{viewer{login}}", operationName=None, variables=None) == {"field": ("viewer",)}


def test_a_repository_is_bound_by_literals_variables_and_defaults() -> None:
    """Expect `owner/name` however it is written, and several where several are asked for."""
    document = """
        query q($owner: String!, $name: String = "shop") {
          repository(owner: $owner, name: $name) { ...f }
          other: repository(owner: "acme", name: "docs") {
            issues(first: 5) { totalCount nodes { title author { __typename login } } edges { cursor node { id } } }
          }
          rateLimit { remaining }
          __typename
        }
        fragment f on Repository { ref(qualifiedName: "x") { name } owner { ... on User { id } } }
    """
    found = ask(document, variables={"owner": "acme"})
    assert found == {
        "field": ("__typename", "rateLimit", "repository"),
        "repository": ("acme/docs", "acme/shop"),
    }


def test_a_mutation_is_bound_through_its_input_object() -> None:
    """Expect arguments from a path into the input, as literal or variable."""
    inline = (
        'mutation{createCommitOnBranch(input:{message:$m,branch:{repositoryNameWithOwner:"acme/shop",'
        'branchName:"agent/x"}}){clientMutationId}}'
    )
    wanted = {"field": ("createCommitOnBranch",), "repository": ("acme/shop",), "branch": ("agent/x",)}
    assert ask(inline, MUTATION) == wanted
    value = {"branch": {"repositoryNameWithOwner": "acme/shop", "branchName": "agent/x"}}
    document = "mutation($i:X!){createCommitOnBranch(input:$i){clientMutationId}}"
    assert ask(document, MUTATION, variables={"i": value}) == wanted
    value["branch"]["id"] = "REF_1"
    assert ask(document, MUTATION, variables={"i": value}) == {"field": ("createCommitOnBranch",)}
    assert ask(document, QUERY, variables={"i": value}) is None


@every_row(
    "params",
    [
        {},
        {"type": "read"},
        {"type": "query", "x": 1},
        {"type": "query", "introspection": 1},
        {"type": "query", "neutral": True},
        {"type": "query", "except": "x"},
        {"type": "query", "types": {"A": "b:C"}},
        {"type": "query", "types": {"A": "b b"}},
        {"type": "query", "types": {"A": "b:"}},
        {"type": "query", "types": {"A": ["b"]}},
        {"type": "query", "fields": {"a": {"selects": "X"}}},
        {"type": "query", "fields": {"a": {"with": {"field": "{x}"}}}},
        {"type": "query", "fields": {"a": {"with": {"x": "text"}}}},
        {"type": "query", "fields": {"a": {"with": {"x": "{a..b}"}}}},
        {"type": "query", "fields": {"a": {"without": ["a."]}}},
        {"type": "query", "fields": {"a": {"maybe": 1}}},
        {"type": "mutation", "payload": "X"},
    ],
    ids=str,
)
def test_parameters_that_say_nothing_clear_are_refused_at_load(params: dict[str, Any]) -> None:
    """Expect ValueError when the policy is loaded, not silence when a request comes."""
    with pytest.raises(ValueError):
        check(params)


def test_the_parameters_of_these_tests_are_well_formed() -> None:
    """What the tests judge by passes the check of the loader."""
    check(QUERY)
    check(MUTATION)


names = st.sampled_from(["viewer", "repository", "node", "search", "rateLimit", "x"])


@st.composite
def selections(draw: st.DrawFn, depth: int = 0) -> tuple[str, set[str]]:
    """A top-level selection set as text, and the fields in it."""
    parts: list[str] = []
    fields: set[str] = set()
    for _ in range(draw(st.integers(1, 3))):
        if depth < 3 and draw(st.booleans()):
            text, inner = draw(selections(depth=depth + 1))
            parts.append(draw(st.sampled_from(["...", "...on Query", "...@include(if:false)"])) + "{" + text + "}")
            fields |= inner
        else:
            name = draw(names)
            alias = draw(st.sampled_from(["", "a:", "viewer:", "repository:"]))
            parts.append(f"{alias}{name}{draw(st.sampled_from(['', ' @skip(if:true)', '{id}', '(x:1)']))}")
            fields.add(name)
    return draw(st.sampled_from([" ", ",", "\n", "#c\n"])).join(parts), fields


@EXAMPLES
@given(selections())
def test_every_top_level_field_is_stated(drawn: tuple[str, set[str]]) -> None:
    """Whatever nesting, alias and directive a field stands behind, `field` holds its name and nothing more."""
    text, fields = drawn
    assert ask("{" + text + "\n}")["field"] == tuple(sorted(fields))


@EXAMPLES
@given(selections())
def test_a_mutation_never_passes_as_a_query(drawn: tuple[str, set[str]]) -> None:
    """No spelling of a mutation, alone or beside a query, is one."""
    text, _ = drawn
    assert ask(f"mutation m{{{text}\n}}") is None
    assert ask(f"query q{{a}} mutation m{{{text}\n}}", operationName="q") is None


@EXAMPLES
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: json.dumps({"query": text}).encode()))
def test_no_body_makes_it_raise(body: bytes) -> None:
    """Whatever comes, the answer is None or arguments."""
    found = evaluate(QUERY, body, JSON)
    assert found is None or "field" in found
