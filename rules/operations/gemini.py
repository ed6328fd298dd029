"""Gemini inference (generateContent, countTokens, embedContent): text and inline data only (RULINGS 7.6).

Refused by not being named: files by URI, cached content, search, URL context, code execution, maps and every other
tool that Google runs. Only the spelling that the API documents counts: its JSON reader also takes snake case, and a
body that says one thing twice in two spellings would have two meanings.

The path names the model, so nothing here is an argument but what a batch of embeddings repeats, and that must be the
same. Source: https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations import closed as c
from rules.operations.llm import judge

_INLINE = c.record({"mimeType": c.label, "data": c.text}, {"displayName": c.label})
_CALL = c.record({"name": c.label}, {"id": c.label, "args": c.optional(c.plain)})
_ANSWER = c.record({"name": c.label, "response": c.plain}, {"id": c.label})
_PART = c.record(
    {},
    {
        "text": c.text,
        "inlineData": _INLINE,
        "functionCall": _CALL,
        "functionResponse": _ANSWER,
        "thought": c.boolean,
        "thoughtSignature": c.text,
    },
)
_CONTENT = c.record({"parts": c.array(_PART)}, {"role": c.one_of("user", "model", "function", "system")})
_FUNCTION = c.record(
    {"name": c.label},
    {
        "description": c.text,
        "parameters": c.json_schema,
        "parametersJsonSchema": c.json_schema,
        "response": c.json_schema,
        "responseJsonSchema": c.json_schema,
    },
)
_GENERATION = c.record(
    {},
    {
        "stopSequences": c.array(c.text, most=16),
        "responseMimeType": c.label,
        "responseSchema": c.json_schema,
        "responseJsonSchema": c.json_schema,
        "responseModalities": c.array(c.one_of("TEXT"), most=1),
        "candidateCount": c.integer,
        "maxOutputTokens": c.integer,
        "temperature": c.number,
        "topP": c.number,
        "topK": c.number,
        "seed": c.integer,
        "presencePenalty": c.number,
        "frequencyPenalty": c.number,
        "responseLogprobs": c.boolean,
        "logprobs": c.integer,
        "mediaResolution": c.label,
        "thinkingConfig": c.record(
            {}, {"includeThoughts": c.boolean, "thinkingBudget": c.integer, "thinkingLevel": c.label}
        ),
    },
)
_GENERATE: Mapping[str, c.Check] = {
    "systemInstruction": c.record({"parts": c.array(_PART)}, {"role": c.label}),
    "tools": c.array(c.record({"functionDeclarations": c.array(_FUNCTION, most=512)}), most=64),
    "toolConfig": c.record(
        {"functionCallingConfig": c.record({}, {"mode": c.label, "allowedFunctionNames": c.array(c.label, most=512)})}
    ),
    "safetySettings": c.array(c.record({"category": c.label, "threshold": c.label}), most=32),
    "generationConfig": _GENERATION,
}
_CONTENTS: Mapping[str, c.Check] = {"contents": c.array(_CONTENT)}
_EMBED: Mapping[str, c.Check] = {
    "taskType": c.label,
    "title": c.text,
    "outputDimensionality": c.integer,
}


def evaluate_generate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {} for a request to generate content of the closed schema, or None."""
    return judge(c.record(_CONTENTS, _GENERATE), body, facts)


def evaluate_count(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {} for a request to count the tokens of contents, or of a whole request for the path's model, or None."""
    whole = c.record({**_CONTENTS, "model": _this_model(facts)}, _GENERATE)
    return judge(c.either(c.record(_CONTENTS), c.record({"generateContentRequest": whole})), body, facts)


def evaluate_embed(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {} for an embedding, or a batch of them, all by the model that the path names; else None."""
    this = _this_model(facts)
    single = c.record({"content": _CONTENT}, {**_EMBED, "model": this})
    batch = c.record({"requests": c.array(c.record({"content": _CONTENT, "model": this}, _EMBED), most=1000)})
    judged = judge(c.either(single, batch), body, facts)
    return None if judged is None else {}


def _this_model(facts: RequestFacts) -> c.Check:
    """The model of the path (`.../models/{model}:{verb}`), as a body repeats it."""
    return c.one_of(f"models/{facts.path.segments[-1].partition(':')[0]}")
