"""Gemini, Cohere, and what sets vendors apart that speak OpenAI's API: closed schemas, models, deployments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rules.facts import RequestFacts
from rules.operations import EVALUATORS, arguments_of, check_params
from tests.support.rows import every_row

TEXT = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def judged(matcher: str, value: Any, params: dict[str, Any] | None = None, path: str = "/v1beta/models/m:x") -> object:
    facts = RequestFacts.build(
        method="POST",
        scheme="https",
        tunnel=None,
        target=f"https://a.example{path}",
        headers=(("host", "a.example"), ("content-type", "application/json")),
        has_body=True,
    )
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return EVALUATORS[matcher](params or {}, body, facts)


@every_row(
    ("change", "why"),
    [
        ({"tools": [{"googleSearch": {}}]}, "a hosted search"),
        ({"tools": [{"urlContext": {}}]}, "a hosted fetch"),
        ({"tools": [{"codeExecution": {}}]}, "a hosted interpreter"),
        ({"tools": [{"functionDeclarations": [], "googleSearch": {}}]}, "a hosted tool beside one's own"),
        ({"cachedContent": "cachedContents/1"}, "a handle to state"),
        ({"system_instruction": {"parts": [{"text": "x"}]}}, "the second spelling"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "gs://b/o"}}]}]}, "a file by URI"),
        ({"contents": [{"parts": [{"executableCode": {"code": "x"}}]}]}, "code"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "audio"),
        ({"generationConfig": {"speechConfig": {}}}, "speech"),
        ({"generationConfig": {"responseSchema": {"$ref": "https://attacker.example/x"}}}, "a schema from elsewhere"),
        ({"labels": {}}, "an unknown key"),
        ({"contents": "Hi"}, "not a list"),
    ],
)
def test_gemini_takes_text_and_inline_data_only(change: dict[str, Any], why: str) -> None:
    """Expect everything that Google would fetch, run or keep to be refused."""
    assert judged("llm_gemini_generate", {**TEXT, **change}) is None, why


def test_gemini_takes_a_turn_with_its_own_tools() -> None:
    """Expect a whole turn to fit; the path names the model, so that the body states no argument."""
    turn = {
        "contents": [
            {"role": "user", "parts": [{"text": "Look"}, {"inlineData": {"mimeType": "image/png", "data": "aa"}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "ls", "args": {}}, "thoughtSignature": "c2ln"}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "ls", "response": {"a": 1}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "ls", "parameters": {"type": "OBJECT"}}]}],
    }
    assert judged("llm_gemini_generate", turn) == {}


def test_gemini_embeds_and_counts_by_the_model_of_the_path() -> None:
    """Expect a body that repeats another model to be refused: the rule bound the one in the path."""
    path = "/v1beta/models/embed-1:batchEmbedContents"
    for model, wanted in (("models/embed-2", None), ("embed-1", None), ("models/embed-1", {})):
        batch = {"requests": [{"model": model, "content": {"parts": [{"text": "a"}]}}]}
        assert judged("llm_gemini_embed", batch, path=path) == wanted
        whole = {"generateContentRequest": {"model": model, **TEXT}}
        assert judged("llm_gemini_count", whole, path=path) == wanted
    assert judged("llm_gemini_embed", {"content": {"parts": [{"text": "a"}]}}, path=path) == {}
    assert judged("llm_gemini_count", TEXT, path=path) == {}


@pytest.mark.parametrize(
    ("matcher", "value", "why"),
    [
        ("llm_cohere_chat", {**CHAT, "connectors": [{"id": "web-search"}]}, "a search"),
        ("llm_cohere_chat", {**CHAT, "tools": [{"type": "web"}]}, "a hosted tool"),
        ("llm_cohere_chat", {**CHAT, "conversation_id": "c"}, "state"),
        (
            "llm_cohere_chat",
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a"}}]}]},
            "a picture by URL",
        ),
        ("llm_cohere_chat", {"messages": CHAT["messages"]}, "no model"),
        ("llm_cohere_embed", {"model": "m", "input_type": "x", "images": ["https://a.example/x.png"]}, "by URL"),
        ("llm_cohere_rerank", {"model": "m", "query": "q", "documents": [{"url": "https://a"}]}, "a document by URL"),
        ("llm_cohere_rerank", b'{"model":"a","model":"b","query":"q","documents":[]}', "a duplicate key"),
    ],
)  # fmt: skip
def test_cohere_takes_text_and_inline_data_only(matcher: str, value: Any, why: str) -> None:
    """Expect everything that the vendor would fetch, run or keep to be refused."""
    assert judged(matcher, value) is None, why


def test_cohere_states_the_model() -> None:
    """Expect the model as the argument of each call."""
    assert judged("llm_cohere_chat", CHAT) == {"model": "m"}
    assert judged("llm_cohere_embed", {"model": "e", "input_type": "x", "texts": ["a"]}) == {"model": "e"}
    assert judged("llm_cohere_rerank", {"model": "r", "query": "q", "documents": ["a"]}) == {"model": "r"}


@pytest.mark.parametrize("model", ["x:online", "X:ONLINE", "groq/compound", "groq/compound-mini", "Compound-Beta"])
def test_models_with_tools_of_their_own_are_refused_by_name(model: str) -> None:
    """Expect the listed patterns to hold whatever the case: such a model reaches out by itself."""
    params = {"refuse": ["*:online", "compound*", "groq/compound*"]}
    assert judged("llm_openai_chat", {**CHAT, "model": model}, params) is None
    assert judged("llm_openai_chat", {**CHAT, "model": "plain"}, params) == {"model": "plain"}


def test_a_vendors_own_fields_are_taken_only_where_they_are_listed() -> None:
    """Expect a field of `other` with its type, and nowhere else."""
    params = {"other": {"safe_prompt": "boolean", "top_k": "number", "reasoning": "reasoning"}}
    assert judged("llm_openai_chat", {**CHAT, "safe_prompt": True}) is None
    assert judged("llm_openai_chat", {**CHAT, "safe_prompt": "yes"}, params) is None
    assert judged("llm_openai_chat", {**CHAT, "reasoning": {"tools": []}}, params) is None
    wanted = {**CHAT, "safe_prompt": True, "top_k": 1, "reasoning": {"effort": "low"}}
    assert judged("llm_openai_chat", wanted, params) == {"model": "m"}


def test_a_deployment_names_the_model() -> None:
    """Expect a body without a model where the path says it, no argument from the body, and no wrong type."""
    params = {"deployment": True}
    assert judged("llm_openai_chat", {"messages": CHAT["messages"]}) is None
    assert judged("llm_openai_chat", {"messages": CHAT["messages"]}, params) == {}
    assert judged("llm_openai_chat", CHAT, params) == {}
    assert judged("llm_openai_chat", {**CHAT, "model": 1}, params) is None
    assert arguments_of("llm_openai_chat", params) == frozenset()
    assert arguments_of("llm_openai_chat", {}) == {"model"}


@pytest.mark.parametrize(
    "params",
    [{"other": {"x": "anything"}}, {"other": ["x"]}, {"refuse": "x"}, {"betas": [1]}, {"deployment": 1}, {"more": 1}],
)
def test_parameters_of_a_vendor_that_mean_nothing_are_refused(params: dict[str, Any]) -> None:
    """Expect a mistake in a service file to be told when it is loaded."""
    with pytest.raises(ValueError, match=r"."):
        check_params("llm_openai_chat", params)
