"""Body evaluators: one text, one meaning; what a schema does not name is not there."""

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.facts import RequestFacts
from rules.operations import EVALUATORS, check_params
from rules.operations.closed import data_url, json_schema
from rules.operations.strict_json import InvalidJson, load
from tests.support.properties import tried
from tests.support.rows import every_row

EXAMPLES = tried()

scalars = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.text(max_size=12)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=5),
    max_leaves=30,
)


def facts(*headers: tuple[str, str]) -> RequestFacts:
    return RequestFacts.build(
        method="POST",
        scheme="https",
        tunnel=None,
        target="https://a.example/x",
        headers=(("host", "a.example"), *(headers or (("content-type", "application/json"),))),
        has_body=True,
    )


@every_row(
    ("body", "why"),
    [
        (b"", "nothing"),
        (b" ", "only space"),
        (b"{", "cut short"),
        (b"{}{}", "two values"),
        (b"{} x", "a tail"),
        (b'{"a":1,"a":2}', "a duplicate key"),
        (b'{"a":1,"\\u0061":2}', "a duplicate key behind an escape"),
        (b'{"x":{"a":1,"a":1}}', "a duplicate key further down"),
        (b'[{"a":1,"a":1}]', "a duplicate key in a list"),
        (b"NaN", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[-Infinity]", "minus Infinity"),
        (b"1e999", "a number that overflows"),
        (b"-1e999", "a number that overflows downwards"),
        (b"1" * 41, "a number with too many digits"),
        (b"0." + b"1" * 41, "a fraction with too many digits"),
        (b"01", "a leading zero"),
        (b"+1", "a plus sign"),
        (b"{'a':1}", "single quotes"),
        (b'{"a":1,}', "a comma too many"),
        (b"// x\n{}", "a comment"),
        (b'"\x00"', "a control character in a string"),
        (b"\xef\xbb\xbf{}", "a byte order mark"),
        ('{"a":1}'.encode("utf-16"), "UTF-16 with a mark"),
        ('{"a":1}'.encode("utf-16-le"), "UTF-16"),
        ('{"a":1}'.encode("utf-32-be"), "UTF-32"),
        (b'"\xff"', "not UTF-8"),
        (b'"\xc0\xaf"', "an overlong form"),
        (b'"\xed\xa0\x80"', "a surrogate in UTF-8"),
        (b'"\\ud800"', "a lone surrogate"),
        (b'{"\\udc00x":1}', "a lone surrogate in a key"),
        (b"[" * 65 + b"]" * 65, "nested too deeply"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "objects nested too deeply"),
        (b"[" * 5_000_000, "only opening brackets"),
        (b"[" + b"1," * 200_001 + b"1]", "too many values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_two_parsers_read_differently_is_refused(body: bytes, why: str) -> None:
    """Expect InvalidJson with a fixed sentence, never another exception."""
    with pytest.raises(InvalidJson):
        load(body)


@every_row(
    "pattern",
    [
        b"}",
        b"]",
        b'""',
        b'"a" ',
        b'\\"\\\\"',
        b'"\\""',
        b'{"a":1}}',
        b"[]",
        b"[],",
        b'{"":',
        b":",
        b"1,",
        b"\\",
        b" ",
        b"\xc3",
    ],
)
def test_a_body_that_is_costly_to_measure_is_refused_before_it_costs(pattern: bytes) -> None:
    """Expect 8 MiB of anything to be refused within a fraction of a second: other sandboxes wait meanwhile (B179)."""
    body = pattern * ((8 << 20) // len(pattern))
    before = time.thread_time()
    with pytest.raises(InvalidJson):
        load(body)
    assert time.thread_time() - before < 1.0


@EXAMPLES
@given(values)
def test_strict_json_reads_what_json_writes(value: Any) -> None:
    """Expect every value of plain JSON to come back, whatever its spelling."""
    assert load(json.dumps(value).encode()) == value
    assert load(json.dumps(value, ensure_ascii=False, indent=1).encode()) == value


@EXAMPLES
@given(values, st.text(max_size=6), values, values)
def test_a_duplicate_key_is_refused_wherever_it_stands(around: Any, key: str, first: Any, second: Any) -> None:
    """Expect refusal at any depth, also where both values are equal."""
    name = json.dumps(key)
    twice = f"{{{name}:{json.dumps(first)},{name}:{json.dumps(second)}}}"
    for text in (twice, f"[{json.dumps(around)},{twice}]", f'{{"x":{{"y":{twice}}}}}'):
        with pytest.raises(InvalidJson):
            load(text.encode())


@EXAMPLES
@given(st.integers(1, 200), st.sampled_from(["[", '{"a":']))
def test_depth_is_counted_exactly(depth: int, opening: str) -> None:
    """Expect up to 64 levels to pass and one more to be refused."""
    text = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
    if depth <= 64:
        load(text.encode())
    else:
        with pytest.raises(InvalidJson):
            load(text.encode())


@EXAMPLES
@given(st.text(max_size=60))
def test_brackets_inside_strings_do_not_count(text: str) -> None:
    """Expect a string of any characters to be one value, whatever brackets and escapes it holds."""
    content = "[" * 100 + text + '\\"{' * 50
    assert load(json.dumps([content]).encode()) == [content]


@EXAMPLES
@given(st.integers(1, 80), st.booleans())
def test_digits_are_bounded(count: int, negative: bool) -> None:
    """Expect numbers of up to 40 characters and no longer ones."""
    text = ("-" if negative else "") + "9" * count
    if len(text) <= 40:
        assert load(text.encode()) == int(text)
    else:
        with pytest.raises(InvalidJson):
            load(text.encode())


@EXAMPLES
@given(st.binary(max_size=80))
def test_any_bytes_give_a_value_or_invalid_json(body: bytes) -> None:
    """Expect no other exception for any input."""
    with contextlib.suppress(InvalidJson):
        load(body)


@pytest.mark.parametrize(
    "body", [b'"' + b'\\"' * 500_000, b'"\\' * 500_000, b'""' * 500_000], ids=["open", "odd", "many"]
)
def test_hostile_strings_cost_linear_time(body: bytes) -> None:
    """Expect a megabyte of quotes and escapes to be measured at once; quadratic work would take minutes."""
    started = time.process_time()
    with pytest.raises(InvalidJson):
        load(body)
    assert time.process_time() - started < 5


# --- hand-written JSON bodies ----------------------------------------------------------------------------------------

RELEASE = {
    "service": ["shop", "till"],
    "version": "string",
    "dry?": "boolean",
    "to": {"ring?": [1, 2], "kind": "canary"},
}


def fields(body: Any, *headers: tuple[str, str], params: Any = None) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return EVALUATORS["json_fields"](params or RELEASE, raw, facts(*headers))


@every_row(
    ("body", "why"),
    [
        ({"service": "shop", "to": {"kind": "canary"}}, "a field is missing"),
        ({"service": "other", "version": "1", "to": {"kind": "canary"}}, "a value that is not listed"),
        ({"service": "shop", "version": 1, "to": {"kind": "canary"}}, "the wrong type"),
        ({"service": "shop", "version": "1", "to": {"kind": "canary"}, "x": 1}, "an unknown field"),
        ({"service": "shop", "version": "1", "to": {"kind": "canary", "x": 1}}, "an unknown field inside"),
        ({"service": "shop", "version": "1", "to": "canary"}, "text for an object"),
        ({"service": "shop", "version": "1", "to": {"kind": "canary", "ring": True}}, "true is not 1"),
        ({"service": "shop", "version": "1", "to": {"kind": "canary", "ring": 1.0}}, "1.0 is not 1"),
        ({"service": "shop", "version": "1", "to": {"kind": "canary"}, "dry": 1}, "1 is not true"),
        ({"service": "shop", "version": None, "to": {"kind": "canary"}}, "null is no text"),
        ({"service": ["shop"], "version": "1", "to": {"kind": "canary"}}, "a list for a value"),
        ({"service": "shop", "version": "x" * 9000, "to": {"kind": "canary"}}, "too long to be shown"),
        ([{"service": "shop", "version": "1", "to": {"kind": "canary"}}], "a batch"),
        (b'{"service":"till","service":"shop","version":"1","to":{"kind":"canary"}}', "a duplicate key"),
        (b"null", "no object"),
    ],
)
def test_a_json_body_beside_its_fields_is_not_the_operation(body: Any, why: str) -> None:
    """Expect None for everything that is not exactly the named fields."""
    assert fields(body) is None


GOOD = {"service": "shop", "version": "1.4", "to": {"kind": "canary"}}


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ((("accept", "*/*"),), "no media type"),
        ((("content-type", "text/json"),), "another media type"),
        ((("content-type", "application/json, application/json"),), "a list"),
        ((("content-type", "application/json"), ("content-type", "application/json")), "the header twice"),
        ((("content-type", "application/json; charset=utf-16"),), "another charset"),
        ((("content-type", "application/json; profile=x"),), "an unknown parameter"),
        ((("content-type", "application/json"), ("content-encoding", "gzip")), "coded bytes are not what was judged"),
    ],
)
def test_a_body_is_json_only_where_the_head_says_exactly_so(headers: tuple[tuple[str, str], ...], why: str) -> None:
    """Expect None where origin and judge could read other bytes."""
    assert fields(GOOD, *headers) is None


def test_the_scalars_of_a_json_body_become_arguments() -> None:
    """Expect every field by name, nested ones with a dot, so that an approval can show them."""
    body = {**GOOD, "dry": True, "to": {"kind": "canary", "ring": 2}}
    assert fields(body, ("content-type", "Application/JSON; charset=UTF-8")) == {
        "service": "shop",
        "version": "1.4",
        "dry": "true",
        "to.kind": "canary",
        "to.ring": "2",
    }


@pytest.mark.parametrize(
    ("matcher", "params"),
    [
        ("nothing", {}),
        ("later", {"x": 1}),
        ("llm_openai_chat", {"count": True}),
        ("json_fields", {}),
        ("json_fields", {"a": []}),
        ("json_fields", {"a": None}),
        ("json_fields", {"a": {}}),
        ("json_fields", {"a": [["x"]]}),
        ("json_fields", {"a": "string", "a?": "string"}),
        ("json_fields", {"?": "string"}),
    ],
)
def test_parameters_that_mean_nothing_are_refused_at_load(matcher: str, params: Any) -> None:
    """Expect ValueError before any request is judged."""
    with pytest.raises(ValueError):
        check_params(matcher, params)


def test_parameters_of_every_matcher_are_checked_and_later_never_matches() -> None:
    """Expect good parameters to pass, and the matcher that is not built to recognise nothing."""
    check_params("json_fields", RELEASE)
    check_params("llm_anthropic", {"betas": ["x"], "count": True})
    for matcher in EVALUATORS:
        if matcher == "later" or matcher.startswith("llm_"):
            check_params(matcher, {})
        with contextlib.nullcontext() if matcher == "json_fields" else pytest.raises(ValueError):
            check_params(matcher, {"no such parameter": 1})
    assert EVALUATORS["later"]({}, b"{}", facts()) is None


# --- inference -------------------------------------------------------------------------------------------------------

CHAT = {"model": "gpt-5", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = {"model": "gpt-5", "input": "Hi", "store": False}
MESSAGE = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
EMBEDDING = {"model": "e", "input": ["a"]}


def llm(matcher: str, body: Any, *headers: tuple[str, str], **params: Any) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return EVALUATORS[matcher](params, raw, facts(*headers))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@every_row(
    ("matcher", "base", "change", "why"),
    [
        ("llm_anthropic", MESSAGE, {"mcp_servers": []}, "MCP servers, even none"),
        ("llm_anthropic", MESSAGE, {"container": None}, "a container"),
        ("llm_anthropic", MESSAGE, {"context_management": {}}, "context management"),
        ("llm_anthropic", MESSAGE, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "server search"),
        (
            "llm_anthropic",
            MESSAGE,
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "a tool type not read about",
        ),
        ("llm_anthropic", MESSAGE, {"tools": [{"type": "code_execution_20250825", "name": "c"}]}, "server code"),
        (
            "llm_anthropic",
            MESSAGE,
            {"tools": [{"name": "t", "input_schema": {"$ref": "https://attacker.example/s"}}]},
            "a schema that lies elsewhere",
        ),
        (
            "llm_anthropic",
            MESSAGE,
            {"messages": [user({"type": "image", "source": {"type": "url", "url": "https://attacker.example"}})]},
            "a picture by URL",
        ),
        (
            "llm_anthropic",
            MESSAGE,
            {"messages": [user({"type": "document", "source": {"type": "url", "url": "https://attacker.example"}})]},
            "a document by URL",
        ),
        (
            "llm_anthropic",
            MESSAGE,
            {
                "messages": [
                    user(
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}],
                        }
                    )
                ]
            },
            "a file id inside a tool result",
        ),
        ("llm_anthropic", MESSAGE, {"messages": [user({"type": "container_upload", "file_id": "f"})]}, "an upload"),
        (
            "llm_anthropic",
            MESSAGE,
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "x"}]}]},
            "a server tool's call",
        ),
        ("llm_anthropic", MESSAGE, {"messages": [{"role": "system", "content": "x"}]}, "a role of another version"),
        ("llm_anthropic", MESSAGE, {"model": "../x y"}, "no model name"),
        ("llm_anthropic", MESSAGE, {"model": ["a"]}, "a list of models"),
        ("llm_anthropic", MESSAGE, {"max_tokens": True}, "true is no number"),
        ("llm_openai_chat", CHAT, {"store": True}, "stored mode"),
        ("llm_openai_chat", CHAT, {"store": 0}, "0 is not false"),
        ("llm_openai_chat", CHAT, {"metadata": {"a": "b"}}, "metadata is for stored answers"),
        ("llm_openai_chat", CHAT, {"web_search_options": {}}, "a hosted search"),
        ("llm_openai_chat", CHAT, {"modalities": ["text", "audio"]}, "audio answers"),
        (
            "llm_openai_chat",
            CHAT,
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "a tool type not read about",
        ),
        (
            "llm_openai_chat",
            CHAT,
            {"messages": [user({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}})]},
            "a picture by URL",
        ),
        (
            "llm_openai_chat",
            CHAT,
            {
                "messages": [
                    user({"type": "file", "file": {"file_id": "f", "file_data": "data:text/plain;base64,eA=="}})
                ]
            },
            "a file id beside inline data",
        ),
        ("llm_openai_chat", CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "a legacy role"),
        (
            "llm_openai_chat",
            CHAT,
            {"messages": [{"role": "assistant", "audio": {"id": "a"}}]},
            "a handle to earlier audio",
        ),
        ("llm_openai_responses", RESPONSE, {"store": True}, "stored mode"),
        ("llm_openai_responses", RESPONSE, {"store": None}, "the default is to store"),
        ("llm_openai_responses", RESPONSE, {"background": True}, "background mode"),
        ("llm_openai_responses", RESPONSE, {"previous_response_id": "r"}, "another's answer"),
        ("llm_openai_responses", RESPONSE, {"conversation": "c"}, "another's conversation"),
        ("llm_openai_responses", RESPONSE, {"prompt": {"id": "p"}}, "a stored prompt"),
        ("llm_openai_responses", RESPONSE, {"include": ["file_search_call.results"]}, "results of a hosted tool"),
        ("llm_openai_responses", RESPONSE, {"tools": [{"type": "code_interpreter", "container": {}}]}, "hosted code"),
        (
            "llm_openai_responses",
            RESPONSE,
            {"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]},
            "others' files",
        ),
        ("llm_openai_responses", RESPONSE, {"tools": [{"type": "mcp", "connector_id": "c"}]}, "a connector"),
        ("llm_openai_responses", RESPONSE, {"input": [user({"type": "input_file", "file_id": "f"})]}, "a file id"),
        (
            "llm_openai_responses",
            RESPONSE,
            {"input": [user({"type": "input_file", "file_url": "https://attacker.example"})]},
            "a file by URL",
        ),
        ("llm_openai_responses", RESPONSE, {"input": [{"type": "item_reference", "id": "i"}]}, "a reference"),
        ("llm_openai_responses", RESPONSE, {"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "a handle"),
        ("llm_openai_embeddings", EMBEDDING, {"input": [["a"]]}, "lists of lists of text"),
        ("llm_openai_embeddings", EMBEDDING, {"file": "x"}, "an unknown key"),
    ],
)
def test_what_the_vendor_would_do_on_its_own_account_is_refused(
    matcher: str, base: dict[str, Any], change: dict[str, Any], why: str
) -> None:
    """Expect None: text and inline data only, nothing fetched, run, kept or looked up (RULINGS 7.6)."""
    assert llm(matcher, base) is not None
    assert llm(matcher, {**base, **change}) is None


@EXAMPLES
@given(
    st.sampled_from([("llm_anthropic", MESSAGE), ("llm_openai_chat", CHAT)]), st.text(min_size=1, max_size=12), values
)
def test_an_unknown_key_is_refused_at_the_top_and_in_a_message(
    case: tuple[str, dict[str, Any]], key: str, value: Any
) -> None:
    """Expect closed objects: a key that vendors add tomorrow is denied today."""
    matcher, base = case
    assert llm(matcher, {**base, "x" + key: value}) is None
    message = {**base["messages"][0], "x" + key: value}
    assert llm(matcher, {**base, "messages": [message]}) is None


@pytest.mark.parametrize("base", [MESSAGE, CHAT])
def test_spellings_that_other_parsers_fold_are_unknown_keys(base: dict[str, Any]) -> None:
    """Expect `Model` beside `model` to be refused, because some servers read keys without case."""
    matcher = "llm_anthropic" if "max_tokens" in base else "llm_openai_chat"
    assert llm(matcher, {**base, "Model": "other"}) is None


def test_only_listed_betas_pass() -> None:
    """Expect one unlisted value to refuse the call, in one header or in two."""
    json_type = ("content-type", "application/json")
    assert llm("llm_anthropic", MESSAGE, json_type, ("anthropic-beta", "a"), betas=["a"]) == {"model": MESSAGE["model"]}
    assert llm("llm_anthropic", MESSAGE, json_type, ("anthropic-beta", "a, b"), betas=["a"]) is None
    assert (
        llm("llm_anthropic", MESSAGE, json_type, ("anthropic-beta", "a"), ("anthropic-beta", "b"), betas=["a"]) is None
    )
    assert llm("llm_openai_chat", CHAT, json_type, ("openai-beta", "assistants=v2")) is None


def test_counting_tokens_has_its_own_schema() -> None:
    """Expect count mode to take a prompt without max_tokens, and nothing of generation."""
    counted = {key: value for key, value in MESSAGE.items() if key != "max_tokens"}
    assert llm("llm_anthropic", counted, count=True) == {"model": MESSAGE["model"]}
    assert llm("llm_anthropic", MESSAGE, count=True) is None
    assert llm("llm_anthropic", counted) is None


@pytest.mark.parametrize(
    ("url", "fits"),
    [
        ("https://attacker.example/x.png", False),
        ("data:image/svg+xml;base64,eA==", False),
        ("data:image/png,raw", False),
        ("DATA:image/png;base64,eA==", False),
        ("data:text/html;base64,eA==", False),
        ("data:image/png;base64,eA==", True),
    ],
)
def test_inline_data_is_told_from_addresses(url: str, fits: bool) -> None:
    """Expect only base64 data URLs of listed media types."""
    assert data_url("image/png")(url) is fits


def test_schemas_of_tools_keep_their_references_inside() -> None:
    """Expect `#/...` to pass and any other `$ref` to be refused, however deep."""
    assert json_schema({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}})
    assert not json_schema({"anyOf": [{"items": {"$ref": "file:///etc/passwd"}}]})
    assert not json_schema([])
