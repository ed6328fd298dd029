"""Cohere's inference, version 2 of its API (chat, embed, rerank): text and inline data only (RULINGS 7.6).

Refused by not being named: connectors and web search of version 1, URLs of pictures, datasets, jobs.
Source: https://docs.cohere.com/reference/chat
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations import closed as c
from rules.operations.llm import judge, model_name

_IMAGE = c.data_url("image/png", "image/jpeg", "image/gif", "image/webp")
_TEXT = c.record({"type": c.one_of("text"), "text": c.text})
_PARTS = c.tagged(
    "type",
    {
        "text": c.record({"type": c.text, "text": c.text}),
        "image_url": c.record(
            {"type": c.text, "image_url": c.record({"url": _IMAGE}, {"detail": c.one_of("auto", "low", "high")})}
        ),
        "thinking": c.record({"type": c.text, "thinking": c.text}),
        "document": c.record(
            {"type": c.text, "document": c.record({"data": c.plain}, {"id": c.label})},
        ),
    },
)
_CONTENT = c.either(c.text, c.array(_PARTS))
_CALL = c.record(
    {"id": c.label, "type": c.one_of("function"), "function": c.record({"name": c.label, "arguments": c.text})}
)
_MESSAGE = c.tagged(
    "role",
    {
        "system": c.record({"role": c.text, "content": c.either(c.text, c.array(_TEXT))}),
        "user": c.record({"role": c.text, "content": _CONTENT}),
        "assistant": c.record(
            {"role": c.text},
            {
                "content": c.optional(_CONTENT),
                "tool_plan": c.optional(c.text),
                "tool_calls": c.optional(c.array(_CALL, most=512)),
                "citations": c.array(c.plain, most=10_000),
            },
        ),
        "tool": c.record({"role": c.text, "content": _CONTENT, "tool_call_id": c.label}),
    },
)
_TOOL = c.record(
    {
        "type": c.one_of("function"),
        "function": c.record({"name": c.label}, {"description": c.text, "parameters": c.json_schema}),
    }
)
_CHAT = c.record(
    {"model": model_name, "messages": c.array(_MESSAGE)},
    {
        "stream": c.boolean,
        "tools": c.array(_TOOL, most=256),
        "tool_choice": c.one_of("REQUIRED", "NONE"),
        "strict_tools": c.boolean,
        "documents": c.array(c.either(c.text, c.record({"data": c.plain}, {"id": c.label})), most=10_000),
        "citation_options": c.record({"mode": c.label}),
        "response_format": c.record(
            {"type": c.one_of("text", "json_object")}, {"json_schema": c.json_schema, "schema": c.json_schema}
        ),
        "safety_mode": c.one_of("CONTEXTUAL", "STRICT", "OFF", "NONE"),
        "max_tokens": c.integer,
        "stop_sequences": c.array(c.text, most=16),
        "temperature": c.number,
        "seed": c.integer,
        "frequency_penalty": c.number,
        "presence_penalty": c.number,
        "k": c.number,
        "p": c.number,
        "logprobs": c.boolean,
        "thinking": c.record({"type": c.one_of("enabled", "disabled")}, {"token_budget": c.integer}),
        "priority": c.integer,
    },
)
_EMBED = c.record(
    {"model": model_name, "input_type": c.label},
    {
        "texts": c.array(c.text, most=1024),
        "images": c.array(_IMAGE, most=16),
        "inputs": c.array(c.record({"content": c.array(_PARTS, most=64)}), most=1024),
        "embedding_types": c.array(c.label, most=8),
        "output_dimension": c.integer,
        "max_tokens": c.integer,
        "truncate": c.one_of("NONE", "START", "END"),
        "priority": c.integer,
    },
)
_RERANK = c.record(
    {"model": model_name, "query": c.text, "documents": c.array(c.text, most=10_000)},
    {"top_n": c.integer, "max_tokens_per_doc": c.integer, "priority": c.integer},
)


def evaluate_chat(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} for a chat of the closed schema, or None."""
    return judge(_CHAT, body, facts)


def evaluate_embed(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} for an embedding of the closed schema, or None."""
    return judge(_EMBED, body, facts)


def evaluate_rerank(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} for a ranking of the closed schema, or None."""
    return judge(_RERANK, body, facts)
