"""Forms, actions and methods by name: every field once, no one's authority, and exact names only."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import RequestFacts
from rules.operations import aws, forms, method_name
from rules.operations.forms import InvalidForm, parse
from tests.support.judged import judged
from tests.support.properties import tried
from tests.support.rows import every_row

EXAMPLES = tried()
FORM = judged(content_type="application/x-www-form-urlencoded; charset=UTF-8")
JSON = judged(content_type="application/json; charset=utf-8")


@every_row(
    ("body", "why"),
    [
        (b"a=1&a=2", "a field twice"),
        (b"a=1&%61=2", "a field twice, once encoded"),
        (b"a=1&a[0]=2", "a field and its first element"),
        (b"a[b]=1&a=2", "an element and its field"),
        (b"a[b]=1&a[b]=2", "an element twice"),
        (b"a=1;b=2", "a semicolon, which parts fields for some"),
        (b"a", "no value"),
        (b"a=1&", "an empty field"),
        (b"&a=1", "an empty field first"),
        (b"=1", "no name"),
        (b"a=%4", "half a sequence"),
        (b"a=%zz", "a broken sequence"),
        (b"a=%", "a lone percent"),
        (b"a=%ff", "not UTF-8"),
        (b"a%00=1", "a zero byte in a name"),
        (b"a b=1", "a space in a name"),
        (b"a+b=1", "a plus in a name"),
        (b"a[=1", "an open bracket"),
        (b"a]b=1", "a stray bracket"),
        (b"a[b]c=1", "text behind a bracket"),
        ("é=1".encode(), "a name that is not ASCII"),
        (b"x" * 201 + b"=1", "a long name"),
        (b"&".join(b"f%d=1" % n for n in range(1001)), "too many fields"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_form_that_two_servers_read_differently_is_refused(body: bytes, why: str) -> None:
    """Expect InvalidForm with a fixed sentence."""
    with pytest.raises(InvalidForm):
        parse(body)


@pytest.mark.parametrize(
    "facts",
    [
        judged(),
        judged(content_type="multipart/form-data; boundary=x"),
        judged(content_type="text/plain"),
        judged(content_type="application/x-www-form-urlencoded; charset=utf-16"),
        judged("POST", "/", ("content-encoding", "gzip"), content_type="application/x-www-form-urlencoded"),
        judged("POST", "/", ("content-type", "text/plain"), content_type="application/x-www-form-urlencoded"),
    ],
    ids=lambda facts: ",".join(value for name, value in facts.headers if name.startswith("content")),
)
def test_a_body_that_the_head_calls_something_else_is_no_form(facts: RequestFacts) -> None:
    """Expect None unless the head says form, once, and no coding."""
    assert forms.evaluate({}, b"a=1", facts) is None


@pytest.mark.parametrize(
    "body", [b"token=x", b"TOKEN=x", b"client_secret=x", b"client-secret=x", b"api_key=x", b"key[a]=x", b"%74oken=x"]
)
def test_a_field_of_authority_is_refused(body: bytes) -> None:
    """A key of the client's own in the body is refused as in the head."""
    assert forms.evaluate({}, b"amount=1&" + body, FORM) is None
    assert method_name.evaluate({}, body, FORM) is None


def test_a_field_outside_the_list_is_another_operation() -> None:
    """With `fields` nothing else may stand there; `required` must."""
    params = {"fields": ["amount", "metadata"], "required": ["amount"], "arguments": {"amount": "amount"}}
    forms.check(params)
    assert forms.evaluate(params, b"amount=1&transfer_data[destination]=x", FORM) is None
    assert forms.evaluate(params, b"metadata[a]=1", FORM) is None
    assert forms.evaluate(params, b"amount=", FORM) is None
    assert forms.evaluate(params, b"amount=a%0Ab", FORM) is None
    assert forms.evaluate(params, b"amount=5+0&metadata[a]=1&metadata[b]=2", FORM) == {"amount": "5 0"}
    assert forms.evaluate({}, b"expand[]=a&expand[]=b", FORM) == {}
    assert forms.evaluate({}, b"", FORM) == {}


@pytest.mark.parametrize(
    "params",
    [{"x": 1}, {"arguments": ["a"]}, {"arguments": {"a": "b c"}}, {"required": "a"}, {"fields": [1]}],
    ids=str,
)
def test_parameters_of_a_form_are_checked(params: dict[str, Any]) -> None:
    """Expect ValueError when the policy is loaded."""
    with pytest.raises(ValueError):
        forms.check(params)


names = st.text("abc", min_size=1, max_size=3)


@EXAMPLES
@given(st.dictionaries(names, st.text(max_size=8), max_size=6))
def test_a_form_is_read_as_it_was_written(fields: dict[str, str]) -> None:
    """Whatever the values, encoding and parsing give the same fields."""
    from urllib.parse import urlencode

    assert parse(urlencode(fields).encode()) == fields


@EXAMPLES
@given(st.binary(max_size=80))
def test_no_body_makes_them_raise(body: bytes) -> None:
    """Whatever comes, the answer is None or arguments."""
    for found in (
        forms.evaluate({}, body, FORM),
        method_name.evaluate({}, body, FORM),
        method_name.evaluate({}, body, JSON),
        aws.evaluate(STS, body, FORM),
    ):
        assert found is None or isinstance(found, dict)


# --- AWS -------------------------------------------------------------------------------------------------------------

STS: dict[str, Any] = {
    "actions": ["GetCallerIdentity"],
    "version": ["2011-06-15"],
    "arguments": {"role": "RoleArn"},
    "stated_by": {"role": ["GetCallerIdentity"]},
}
TABLE: dict[str, Any] = {
    "actions": ["GetItem", "Query", "BatchGetItem"],
    "target": ["DynamoDB_20120810"],
    "arguments": {"table": "TableName"},
    "stated_by": {"table": ["GetItem", "Query"]},
    "instead": {"table": ["TableArn"]},
}


def target(name: str, *more: tuple[str, str], content_type: str = "application/x-amz-json-1.0") -> RequestFacts:
    return judged("POST", "/", ("x-amz-target", name), *more, content_type=content_type)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"Action=AssumeRole&Version=2011-06-15", "another action"),
        (b"Action=getcalleridentity&Version=2011-06-15", "another case"),
        (b"Action=GetCallerIdentity", "no version"),
        (b"Action=GetCallerIdentity&Version=2010-05-08", "another service's version"),
        (b"Action=GetCallerIdentity&Action=AssumeRole&Version=2011-06-15", "two actions"),
        (b"Action=GetCallerIdentity&action=AssumeRole&Version=2011-06-15", "a second action in another case"),
        (b"Action=GetCallerIdentity&Version=2011-06-15&X-Amz-Signature=x", "a signature"),
        (b"Action=GetCallerIdentity&Version=2011-06-15&AWSAccessKeyId=x", "a key"),
        (b"Version=2011-06-15", "no action"),
        (b"", "nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_query_action_is_exact_and_one(body: bytes, why: str) -> None:
    """Expect None for every action but the listed one, in its own version, once."""
    assert aws.evaluate(STS, body, FORM) is None


@every_row(
    ("facts", "body"),
    [
        (target("DynamoDB_20120810.DeleteItem"), b"{}"),
        (target("DynamoDB_20120810.getitem"), b"{}"),
        (target("Other.GetItem"), b"{}"),
        (target("GetItem"), b"{}"),
        (target("DynamoDB_20120810.GetItem", ("x-amz-target", "DynamoDB_20120810.DeleteItem")), b"{}"),
        (target("DynamoDB_20120810.GetItem", content_type="application/json"), b"{}"),
        (target("DynamoDB_20120810.GetItem", content_type="application/x-www-form-urlencoded"), b"Action=DeleteItem"),
        (target("DynamoDB_20120810.GetItem", ("content-encoding", "gzip")), b"{}"),
        (target("DynamoDB_20120810.GetItem"), b'{"Action":"DeleteItem"}'),
        (target("DynamoDB_20120810.GetItem"), b'{"TableName":"a","TableName":"b"}'),
        (target("DynamoDB_20120810.GetItem"), b"[]"),
        (target("DynamoDB_20120810.GetItem"), b""),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else str(value.header("x-amz-target")),
)
def test_a_json_action_is_exact_and_one(facts: RequestFacts, body: bytes) -> None:
    """Expect None for other targets, two of them, other types, and a body that names another action."""
    assert aws.evaluate(TABLE, body, facts) is None


def test_an_action_in_two_places_is_refused() -> None:
    """The query of the URL beside a form or beside a target is refused, whatever it says."""
    body = b"Action=GetCallerIdentity&Version=2011-06-15"
    form = "application/x-www-form-urlencoded"
    assert aws.evaluate(STS, body, judged("POST", "/?Action=AssumeRole", content_type=form)) is None
    assert aws.evaluate(STS, body, judged("POST", "/?Action=GetCallerIdentity", content_type=form)) is None
    facts = judged("POST", "/?Action=x", ("x-amz-target", "DynamoDB_20120810.GetItem"), content_type=form)
    assert aws.evaluate(TABLE, b"{}", facts) is None
    both = {**STS, "target": ["AWSSecurityTokenServiceV20110615"]}
    facts = judged("POST", "/", ("x-amz-target", "AWSSecurityTokenServiceV20110615.AssumeRole"), content_type=form)
    assert aws.evaluate(both, body, facts) is None


def test_an_action_by_get_is_the_same_action() -> None:
    """The query of a GET is judged as the form of a POST is, and a body beside it refused."""
    good = "/?Action=GetCallerIdentity&Version=2011-06-15"
    assert aws.evaluate(STS, b"", judged("GET", good)) == {"action": "GetCallerIdentity"}
    assert aws.evaluate(STS, b"x", judged("GET", good)) is None
    assert aws.evaluate(STS, b"", judged("GET", good + "&Action=AssumeRole")) is None
    assert aws.evaluate(STS, b"", judged("GET", good + "&X-Amz-Signature=a")) is None


def test_an_action_states_its_name_and_what_is_bound() -> None:
    """`action`, and arguments from form or JSON."""
    body = b"Action=GetCallerIdentity&Version=2011-06-15&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fr"
    assert aws.evaluate(STS, body, FORM) == {"action": "GetCallerIdentity", "role": "arn:aws:iam::1:role/r"}
    found = aws.evaluate(TABLE, b'{"TableName":"orders","Key":{"id":{"S":"1"}}}', target("DynamoDB_20120810.Query"))
    assert found == {"action": "Query", "table": "orders"}
    assert aws.evaluate(TABLE, b'{"TableName":["orders"]}', target("DynamoDB_20120810.Query")) == {"action": "Query"}
    aws.check(STS)
    aws.check(TABLE)
    assert aws.arguments(TABLE) == {"action", "table"}


def test_a_field_that_an_action_does_not_read_states_nothing() -> None:
    """Services ignore unknown fields: one beside what a batch names, or beside another name, would be for show."""
    batch = b'{"TableName":"mine","RequestItems":{"theirs":{}}}'
    assert aws.evaluate(TABLE, batch, target("DynamoDB_20120810.BatchGetItem")) == {"action": "BatchGetItem"}
    both = b'{"TableName":"mine","tablearn":"theirs"}'
    assert aws.evaluate(TABLE, both, target("DynamoDB_20120810.GetItem")) == {"action": "GetItem"}


@every_row(
    "params",
    [
        {},
        {"actions": ["GetItem"]},
        {"actions": [], "version": ["2011-06-15"]},
        {"actions": ["Get*"], "version": ["2011-06-15"]},
        {"actions": ["GetItem"], "version": ["x"]},
        {"actions": ["GetItem"], "target": ["a b"]},
        {"actions": ["GetItem"], "target": ["A"], "x": 1},
        {"actions": ["GetItem"], "target": ["A"], "arguments": {"action": "x"}, "stated_by": {"action": ["GetItem"]}},
        {"actions": ["GetItem"], "target": ["A"], "arguments": {"table": "x"}},
        {"actions": ["GetItem"], "target": ["A"], "arguments": {"table": "x"}, "stated_by": {"table": ["Query"]}},
        {"actions": ["GetItem"], "target": ["A"], "arguments": {"table": "x"}, "stated_by": {"table": []}},
        {"actions": ["GetItem"], "target": ["A"], "instead": {"table": ["y"]}},
    ],
    ids=str,
)
def test_parameters_of_an_action_are_checked(params: dict[str, Any]) -> None:
    """Expect ValueError when the policy is loaded: no prefixes, no protocol unnamed."""
    with pytest.raises(ValueError):
        aws.check(params)


# --- methods by name -------------------------------------------------------------------------------------------------

READS: dict[str, Any] = {"under": "/api", "methods": ["conversations.list", "users.info"]}
POST: dict[str, Any] = {"arguments": {"channel": "channel"}, "refuse": ["channels"]}


@pytest.mark.parametrize(
    "path",
    ["/api/chat.postMessage", "/api/Conversations.list", "/api/conversations.list/", "/api/x/conversations.list",
     "/conversations.list", "/api2/conversations.list", "/api", "/api/", "/api/conversations.list%2F", "/"],
)  # fmt: skip
def test_a_method_that_is_not_listed_is_another_operation(path: str) -> None:
    """Expect None for every other name, case and place, by GET as by POST."""
    for verb in ("GET", "POST"):
        assert method_name.match(READS, judged(verb, path)) is None
        assert method_name.match(READS, judged(verb, "/api/users.info")) == {"method": "users.info"}


@every_row(
    ("facts", "body"),
    [
        (judged("GET", "/api/x?channel=a&channel=b"), b""),
        (judged("GET", "/api/x?channel=a&Channel=b"), b""),
        (judged("GET", "/api/x?channel=a&token=t"), b""),
        (judged("GET", "/api/x?channel=a&access.token=t"), b""),
        (judged("GET", "/api/x?channel=a&+channel=b"), b""),
        (judged("GET", "/api/x?channel=a&channel%00=b"), b""),
        (judged("GET", "/api/x?channel=a&channel%5B%5D=b"), b""),
        (judged("GET", "/api/x?channel=a&user.id=b&user_id=c"), b""),
        (judged("GET", "/api/x?channel=a&Channels=b"), b""),
        (judged("POST", "/api/x?channel%5B0%5D=a", content_type="application/x-www-form-urlencoded"), b"channel=b"),
        (judged("GET", "/api/x?channel="), b""),
        (judged("GET", "/api/x?channel=a", body=True), b"channel=b"),
        (judged("POST", "/api/x?channel=a", content_type="application/x-www-form-urlencoded"), b"channel=b"),
        (judged("POST", "/api/x?channel=a", content_type="application/json"), b'{"channel":"b"}'),
        (judged("POST", "/api/x", content_type="application/json"), b'{"channel":"a","CHANNEL":"b"}'),
        (judged("POST", "/api/x", content_type="application/json"), b'{"channel":["a"]}'),
        (judged("POST", "/api/x", content_type="application/json"), b'{"channel":"a","token":"t"}'),
        (judged("POST", "/api/x", content_type="application/json"), b'["channel"]'),
        (judged("POST", "/api/x", content_type="multipart/form-data; boundary=x"), b"--x--"),
        (judged("POST", "/api/x"), b"channel=a"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else value.target,
)
def test_a_call_whose_arguments_are_unsure_is_refused(facts: RequestFacts, body: bytes) -> None:
    """An argument twice, in two places, with authority beside it, or in a body of another type: None."""
    assert method_name.evaluate(POST, body, facts) is None


@pytest.mark.parametrize(
    ("facts", "body"),
    [
        (judged("GET", "/api/x?channel=C1&text=hi"), b""),
        (judged("POST", "/api/x?channel=C1&text=hi"), b""),
        (judged("POST", "/api/x", content_type="application/x-www-form-urlencoded"), b"channel=C1&text=hi"),
        (judged("POST", "/api/x?text=hi", content_type="application/x-www-form-urlencoded"), b"channel=C1"),
        (
            judged("POST", "/api/x", content_type="application/json"),
            json.dumps({"channel": "C1", "blocks": []}).encode(),
        ),
    ],
    ids=["query", "query-post", "form", "both", "json"],
)
def test_a_call_states_its_channel_wherever_it_stands(facts: RequestFacts, body: bytes) -> None:
    """Query, form and JSON give the same argument."""
    assert method_name.evaluate(POST, body, facts) == {"channel": "C1"}


@pytest.mark.parametrize(
    "params",
    [{}, {"methods": []}, {"methods": ["a*"]}, {"methods": ["a"], "under": "/a/"}, {"methods": ["a"], "x": 1}],
    ids=str,
)
def test_parameters_of_a_method_name_are_checked(params: dict[str, Any]) -> None:
    """Expect ValueError when the policy is loaded."""
    with pytest.raises(ValueError):
        method_name.check(params)


def test_parameters_of_a_call_are_checked() -> None:
    """Expect ValueError for unknown keys, and for an argument that the head states already."""
    method_name.check_call(POST)
    method_name.check(READS)
    for params in ({"x": 1}, {"arguments": {"method": "x"}}, {"required": ["a"]}):
        with pytest.raises(ValueError):
            method_name.check_call(params)
