"""Anthropic Messages API: inference with text and inline data only (RULINGS 7.6).

Versions 2023-06-01 and 2026-10-21; the later one takes less of the same (sampling parameters, documents of an
assistant) and nothing new by itself: https://platform.claude.com/docs/en/api/versioning

Refused by not being named: server tools, MCP servers, containers, URL and file-id sources, context management
and beta headers that the catalogue does not list. Everything the vendor would do on its own account is out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rules.facts import RequestFacts
from rules.operations import closed as c
from rules.operations.llm import betas_listed, judge, model_name

_CACHE = c.optional(c.record({"type": c.one_of("ephemeral")}, {"ttl": c.one_of("5m", "1h")}))
_CITATIONS = c.optional(c.record({"enabled": c.boolean}))

_TEXT = c.record({"type": c.text, "text": c.text}, {"cache_control": _CACHE, "citations": c.null})
_IMAGE = c.record(
    {
        "type": c.text,
        "source": c.record(
            {
                "type": c.one_of("base64"),
                "media_type": c.one_of("image/jpeg", "image/png", "image/gif", "image/webp"),
                "data": c.text,
            }
        ),
    },
    {"cache_control": _CACHE},
)
_DOCUMENT = c.record(
    {
        "type": c.text,
        "source": c.tagged(
            "type",
            {
                "base64": c.record({"type": c.text, "media_type": c.one_of("application/pdf"), "data": c.text}),
                "text": c.record({"type": c.text, "media_type": c.one_of("text/plain"), "data": c.text}),
            },
        ),
    },
    {"cache_control": _CACHE, "title": c.optional(c.text), "context": c.optional(c.text), "citations": _CITATIONS},
)
_SHOWN = {"text": _TEXT, "image": _IMAGE, "document": _DOCUMENT}
_TOOL_USE = c.record(
    {"type": c.text, "id": c.label, "name": c.label, "input": c.plain},
    {"cache_control": _CACHE},
)
_TOOL_RESULT = c.record(
    {"type": c.text, "tool_use_id": c.label},
    {
        "content": c.either(c.text, c.array(c.tagged("type", _SHOWN))),
        "is_error": c.boolean,
        "cache_control": _CACHE,
    },
)
_USER = c.either(c.text, c.array(c.tagged("type", {**_SHOWN, "tool_result": _TOOL_RESULT})))
_ASSISTANT = c.either(
    c.text,
    c.array(
        c.tagged(
            "type",
            {
                "text": _TEXT,
                "tool_use": _TOOL_USE,
                "thinking": c.record({"type": c.text, "thinking": c.text, "signature": c.text}),
                "redacted_thinking": c.record({"type": c.text, "data": c.text}),
            },
        )
    ),
)
_MESSAGE = c.tagged(
    "role",
    {
        "user": c.record({"role": c.text, "content": _USER}),
        "assistant": c.record({"role": c.text, "content": _ASSISTANT}),
    },
)
_TOOL = c.record(
    {"name": c.label, "input_schema": c.json_schema},
    {"type": c.optional(c.one_of("custom")), "description": c.text, "cache_control": _CACHE, "strict": c.boolean},
)
_TOOL_CHOICE = c.record(
    {"type": c.one_of("auto", "any", "tool", "none")}, {"name": c.label, "disable_parallel_tool_use": c.boolean}
)
_THINKING = c.record(
    {"type": c.one_of("enabled", "disabled", "adaptive")},
    {"budget_tokens": c.integer, "display": c.one_of("summarized", "omitted")},
)
_OUTPUT = c.record(
    {},
    {
        "effort": c.one_of("low", "medium", "high", "xhigh", "max"),
        "format": c.record({"type": c.one_of("json_schema"), "schema": c.json_schema}),
    },
)
_COUNTED = {
    "system": c.either(c.text, c.array(_TEXT)),
    "tools": c.array(_TOOL, most=256),
    "tool_choice": _TOOL_CHOICE,
    "thinking": _THINKING,
    "output_config": _OUTPUT,
    "cache_control": _CACHE,
}
_MESSAGES = c.record(
    {"model": model_name, "messages": c.array(_MESSAGE), "max_tokens": c.integer},
    {
        **_COUNTED,
        "stream": c.boolean,
        "temperature": c.number,
        "top_p": c.number,
        "top_k": c.integer,
        "stop_sequences": c.array(c.text, most=64),
        "metadata": c.record({}, {"user_id": c.optional(c.label)}),
        "service_tier": c.one_of("auto", "standard_only"),
    },
)
_COUNT = c.record({"model": model_name, "messages": c.array(_MESSAGE)}, _COUNTED)


def evaluate(params: Mapping[str, Any], body: bytes, facts: RequestFacts) -> Mapping[str, str] | None:
    """Return {"model": ...} for a body of the closed schema, or None.

    `params`: `count` true judges /v1/messages/count_tokens instead; `betas` lists the `anthropic-beta` values
    that change nothing about what the vendor reaches out to.
    """
    if not betas_listed(facts, "anthropic-beta", params.get("betas", ())):
        return None
    return judge(_COUNT if params.get("count") is True else _MESSAGES, body, facts)
