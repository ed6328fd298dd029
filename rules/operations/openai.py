"""OpenAI-style inference (chat completions, responses, embeddings): text and inline data only (RULINGS 7.6).

Refused by not being named: hosted tools (web search, file search, code interpreter, computer use, MCP,
connectors), URL and file-id sources, background and stored mode, prompt templates, conversations and every
other handle to state that lies under the shared account. `store` must be false where its default is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rules.facts import RequestFacts
from rules.operations import closed as c
from rules.operations.llm import betas_listed, judge, model_name

_IMAGE = c.data_url("image/png", "image/jpeg", "image/gif", "image/webp")
_FILE = c.data_url("application/pdf", "text/")
_DETAIL = c.one_of("auto", "low", "high")
_EFFORT = c.optional(c.one_of("none", "minimal", "low", "medium", "high", "xhigh"))
_VERBOSITY = c.optional(c.one_of("low", "medium", "high"))
_TIER = c.optional(c.one_of("auto", "default", "flex", "priority"))
_STREAM_OPTIONS = c.optional(c.record({}, {"include_usage": c.boolean, "include_obfuscation": c.boolean}))
_NEVER_STORED = c.either(c.null, c.exactly(False))
_CACHE_KEYS = {
    "user": c.label,
    "safety_identifier": c.optional(c.label),
    "prompt_cache_key": c.optional(c.label),
    "service_tier": _TIER,
    "stream_options": _STREAM_OPTIONS,
}
_SCHEMA_FORMAT = {
    "name": c.label,
    "schema": c.json_schema,
}
_SCHEMA_OTHER = {"description": c.text, "strict": c.optional(c.boolean)}

# --- chat completions ------------------------------------------------------------------------------------------------

_TEXT_PART = c.record({"type": c.text, "text": c.text})
_CHAT_PARTS = {
    "text": _TEXT_PART,
    "image_url": c.record({"type": c.text, "image_url": c.record({"url": _IMAGE}, {"detail": _DETAIL})}),
    "input_audio": c.record(
        {"type": c.text, "input_audio": c.record({"data": c.text, "format": c.one_of("wav", "mp3")})}
    ),
    "file": c.record({"type": c.text, "file": c.record({"file_data": _FILE}, {"filename": c.label})}),
}
_PLAIN_TEXT = c.either(c.text, c.array(c.tagged("type", {"text": _TEXT_PART})))
_TOOL_CALL = c.record(
    {
        "id": c.label,
        "type": c.one_of("function"),
        "function": c.record({"name": c.label, "arguments": c.text}),
    },
    {"index": c.integer},
)
_CHAT_MESSAGE = c.tagged(
    "role",
    {
        "system": c.record({"role": c.text, "content": _PLAIN_TEXT}, {"name": c.label}),
        "developer": c.record({"role": c.text, "content": _PLAIN_TEXT}, {"name": c.label}),
        "user": c.record(
            {"role": c.text, "content": c.either(c.text, c.array(c.tagged("type", _CHAT_PARTS)))}, {"name": c.label}
        ),
        "assistant": c.record(
            {"role": c.text},
            {
                "content": c.optional(
                    c.either(
                        c.text,
                        c.array(
                            c.tagged(
                                "type",
                                {"text": _TEXT_PART, "refusal": c.record({"type": c.text, "refusal": c.text})},
                            )
                        ),
                    )
                ),
                "name": c.label,
                "refusal": c.optional(c.text),
                "tool_calls": c.optional(c.array(_TOOL_CALL, most=512)),
                # Clients send back what they got: these two come as null or empty, and only so.
                "audio": c.null,
                "function_call": c.null,
                "annotations": c.array(c.null, most=0),
            },
        ),
        "tool": c.record({"role": c.text, "content": _PLAIN_TEXT, "tool_call_id": c.label}),
    },
)
_FUNCTION = c.record(
    {"name": c.label},
    {"description": c.text, "parameters": c.json_schema, "strict": c.optional(c.boolean)},
)
_CHAT_REQUIRED: Mapping[str, c.Check] = {"model": model_name, "messages": c.array(_CHAT_MESSAGE)}
_CHAT_OTHER: Mapping[str, c.Check] = {
    **_CACHE_KEYS,
    "stream": c.optional(c.boolean),
    "store": _NEVER_STORED,
    "temperature": c.optional(c.number),
    "top_p": c.optional(c.number),
    "n": c.optional(c.integer),
    "max_tokens": c.optional(c.integer),
    "max_completion_tokens": c.optional(c.integer),
    "stop": c.optional(c.either(c.text, c.array(c.text, most=16))),
    "presence_penalty": c.optional(c.number),
    "frequency_penalty": c.optional(c.number),
    "logit_bias": c.optional(c.mapping(c.number, most=1024)),
    "logprobs": c.optional(c.boolean),
    "top_logprobs": c.optional(c.integer),
    "seed": c.optional(c.integer),
    "tools": c.array(c.record({"type": c.one_of("function"), "function": _FUNCTION}), most=256),
    "tool_choice": c.either(
        c.one_of("none", "auto", "required"),
        c.record({"type": c.one_of("function"), "function": c.record({"name": c.label})}),
    ),
    "parallel_tool_calls": c.boolean,
    "response_format": c.tagged(
        "type",
        {
            "text": c.record({"type": c.text}),
            "json_object": c.record({"type": c.text}),
            "json_schema": c.record({"type": c.text, "json_schema": c.record(_SCHEMA_FORMAT, _SCHEMA_OTHER)}),
        },
    ),
    "reasoning_effort": _EFFORT,
    "verbosity": _VERBOSITY,
    "modalities": c.optional(c.array(c.one_of("text"), most=1)),
}

# --- responses -------------------------------------------------------------------------------------------------------

_STATUS = c.optional(c.one_of("in_progress", "completed", "incomplete"))
_ITEM_ID = c.optional(c.label)
_INPUT_PARTS = {
    "input_text": _TEXT_PART,
    "input_image": c.record({"type": c.text, "image_url": _IMAGE}, {"detail": _DETAIL, "file_id": c.null}),
    "input_file": c.record({"type": c.text, "file_data": _FILE}, {"filename": c.label, "file_id": c.null}),
}
_OUTPUT_PARTS = {
    "output_text": c.record(
        {"type": c.text, "text": c.text},
        {"annotations": c.array(c.null, most=0), "logprobs": c.optional(c.array(c.null, most=0))},
    ),
    "refusal": c.record({"type": c.text, "refusal": c.text}),
}
_ITEM_MESSAGE = c.record(
    {
        "role": c.one_of("user", "assistant", "system", "developer"),
        "content": c.either(c.text, c.array(c.tagged("type", {**_INPUT_PARTS, **_OUTPUT_PARTS}))),
    },
    {"type": c.one_of("message"), "id": _ITEM_ID, "status": _STATUS},
)
_CALL_OUTPUT = c.either(c.text, c.array(c.tagged("type", _INPUT_PARTS)))
_ITEMS = c.tagged(
    "type",
    {
        "message": _ITEM_MESSAGE,
        "function_call": c.record(
            {"type": c.text, "call_id": c.label, "name": c.label, "arguments": c.text},
            {"id": _ITEM_ID, "status": _STATUS},
        ),
        "function_call_output": c.record(
            {"type": c.text, "call_id": c.label, "output": _CALL_OUTPUT}, {"id": _ITEM_ID, "status": _STATUS}
        ),
        "custom_tool_call": c.record(
            {"type": c.text, "call_id": c.label, "name": c.label, "input": c.text},
            {"id": _ITEM_ID, "status": _STATUS},
        ),
        "custom_tool_call_output": c.record(
            {"type": c.text, "call_id": c.label, "output": _CALL_OUTPUT}, {"id": _ITEM_ID}
        ),
        # Without its encrypted content a reasoning item is a handle into stored state.
        "reasoning": c.record(
            {
                "type": c.text,
                "encrypted_content": c.text,
                "summary": c.array(c.record({"type": c.one_of("summary_text"), "text": c.text})),
            },
            {
                "id": _ITEM_ID,
                "status": _STATUS,
                "content": c.optional(c.array(c.record({"type": c.one_of("reasoning_text"), "text": c.text}))),
            },
        ),
    },
)
_RESPONSES_TOOL = c.tagged(
    "type",
    {
        "function": c.record(
            {"type": c.text, "name": c.label},
            {"description": c.text, "parameters": c.optional(c.json_schema), "strict": c.optional(c.boolean)},
        ),
        "custom": c.record(
            {"type": c.text, "name": c.label},
            {
                "description": c.text,
                "format": c.tagged(
                    "type",
                    {
                        "text": c.record({"type": c.text}),
                        "grammar": c.record(
                            {"type": c.text, "syntax": c.one_of("lark", "regex"), "definition": c.text}
                        ),
                    },
                ),
            },
        ),
    },
)
_RESPONSES_REQUIRED: Mapping[str, c.Check] = {
    "model": model_name,
    "input": c.either(c.text, c.array(c.either(_ITEMS, _ITEM_MESSAGE))),
    "store": c.exactly(False),
}
_RESPONSES_OTHER: Mapping[str, c.Check] = {
    **_CACHE_KEYS,
    "instructions": c.optional(c.text),
    "stream": c.optional(c.boolean),
    "temperature": c.optional(c.number),
    "top_p": c.optional(c.number),
    "max_output_tokens": c.optional(c.integer),
    "top_logprobs": c.optional(c.integer),
    "tools": c.array(_RESPONSES_TOOL, most=256),
    "tool_choice": c.either(
        c.one_of("none", "auto", "required"),
        c.record({"type": c.one_of("function", "custom"), "name": c.label}),
    ),
    "parallel_tool_calls": c.optional(c.boolean),
    "reasoning": c.optional(
        c.record({}, {"effort": _EFFORT, "summary": c.optional(c.one_of("auto", "concise", "detailed"))})
    ),
    "text": c.record(
        {},
        {
            "verbosity": _VERBOSITY,
            "format": c.tagged(
                "type",
                {
                    "text": c.record({"type": c.text}),
                    "json_object": c.record({"type": c.text}),
                    "json_schema": c.record({"type": c.text, **_SCHEMA_FORMAT}, _SCHEMA_OTHER),
                },
            ),
        },
    ),
    "truncation": c.optional(c.one_of("auto", "disabled")),
    "include": c.optional(c.array(c.one_of("reasoning.encrypted_content", "message.output_text.logprobs"), most=8)),
    # Said by clients as "not used"; anything but null or false is a handle or a stored mode.
    "background": _NEVER_STORED,
    "previous_response_id": c.null,
    "conversation": c.null,
    "prompt": c.null,
}

# --- embeddings ------------------------------------------------------------------------------------------------------

_EMBEDDINGS_REQUIRED: Mapping[str, c.Check] = {
    "model": model_name,
    "input": c.either(c.text, c.array(c.text, most=2048), c.array(c.integer), c.array(c.array(c.integer), most=2048)),
}
_EMBEDDINGS_OTHER: Mapping[str, c.Check] = {
    "encoding_format": c.one_of("float", "base64"),
    "dimensions": c.integer,
    "user": c.label,
}


def evaluate_chat(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} for a chat completion of the closed schema, or None."""
    return _judged(_CHAT_REQUIRED, _CHAT_OTHER, params, body, facts)


def evaluate_responses(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} for a response of the closed schema, or None."""
    return _judged(_RESPONSES_REQUIRED, _RESPONSES_OTHER, params, body, facts)


def evaluate_embeddings(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} for an embedding of the closed schema, or None."""
    return _judged(_EMBEDDINGS_REQUIRED, _EMBEDDINGS_OTHER, params, body, facts)


def arguments(params: Mapping[str, Any]) -> frozenset[str]:
    """The arguments that a body under these `params` states."""
    return frozenset() if params.get("deployment") else frozenset({"model"})


def check(params: Mapping[str, Any]) -> None:
    """Raise ValueError with a fixed sentence unless `params` are well formed. Called when a catalogue is loaded."""
    if not params.keys() <= PARAMS:
        raise ValueError("unknown parameter of a matcher")
    other = params.get("other", {})
    if not isinstance(other, Mapping) or not all(kind in TYPES for kind in other.values()):
        raise ValueError("other names fields and their types")
    for name in ("betas", "refuse"):
        values = params.get(name, ())
        if not isinstance(values, list | tuple) or not all(isinstance(value, str) and value for value in values):
            raise ValueError("betas and refuse are lists of words")
    if not isinstance(params.get("deployment", False), bool):
        raise ValueError("deployment is true or false")


PARAMS = frozenset({"betas", "other", "refuse", "deployment"})
TYPES: Mapping[str, c.Check] = {
    "boolean": c.optional(c.boolean),
    "integer": c.optional(c.integer),
    "number": c.optional(c.number),
    "label": c.optional(c.label),
    "labels": c.optional(c.array(c.label, most=64)),
    "reasoning": c.optional(
        c.record({}, {"effort": _EFFORT, "max_tokens": c.integer, "exclude": c.boolean, "enabled": c.boolean})
    ),
    "thinking": c.optional(c.record({"type": c.one_of("enabled", "disabled")}, {"budget_tokens": c.integer})),
    "usage": c.optional(c.record({"include": c.boolean})),
}
"""What a field of `other` may be."""


def _judged(
    required: Mapping[str, c.Check],
    other: Mapping[str, c.Check],
    params: Mapping[str, Any],
    body: bytes,
    facts: RequestFacts,
) -> Mapping[str, str] | None:
    if not betas_listed(facts, "openai-beta", params.get("betas", ())):
        return None
    needed, further = dict(required), {**other, **{name: TYPES[kind] for name, kind in params.get("other", {}).items()}}
    if params.get("deployment"):
        further["model"] = needed.pop("model")
        return None if judge(c.record(needed, further), body, facts) is None else {}
    judged = judge(c.record(needed, further), body, facts)
    if judged is None or any(fnmatchcase(judged["model"].lower(), wrong) for wrong in params.get("refuse", ())):
        return None
    return judged
