"""Tokens that are known by their look, whoever they belong to: a prefix that nothing else has, and what follows it.

Prefixes are their vendors' documented ones; each that the catalogue's placeholders have is here (a test says so). A
placeholder of ours has the same look and is told apart by its core.
"""

from __future__ import annotations

import re
from typing import Final

_TAIL = rb"[A-Za-z0-9_\-]"

SHAPES: Final[tuple[tuple[str, bytes, re.Pattern[bytes]], ...]] = tuple(
    (name, prefix, re.compile(re.escape(prefix) + tail))
    for name, prefix, tail in (
        ("AWS access key", b"AKIA", rb"[A-Z2-7]{16}(?![A-Za-z0-9])"),
        ("AWS temporary access key", b"ASIA", rb"[A-Z2-7]{16}(?![A-Za-z0-9])"),
        ("Anthropic key", b"sk-ant-", _TAIL + rb"{40,}"),
        ("Atlassian token", b"ATATT3xFfGF0", rb"[A-Za-z0-9_\-=]{60,}"),
        ("CircleCI token", b"CCIPAT_", _TAIL + rb"{30,}"),
        ("Docker Hub token", b"dckr_pat_", _TAIL + rb"{20,}"),
        ("GitHub fine-grained token", b"github_pat_", _TAIL + rb"{50,}"),
        ("GitHub OAuth token", b"gho_", rb"[A-Za-z0-9]{36,}"),
        ("GitHub refresh token", b"ghr_", rb"[A-Za-z0-9]{36,}"),
        ("GitHub server token", b"ghs_", rb"[A-Za-z0-9]{36,}"),
        ("GitHub token", b"ghp_", rb"[A-Za-z0-9]{36,}"),
        ("GitHub user token", b"ghu_", rb"[A-Za-z0-9]{36,}"),
        ("GitLab token", b"glpat-", _TAIL + rb"{20,}"),
        ("Google API key", b"AIza", _TAIL + rb"{35}"),
        ("Google OAuth token", b"ya29.", _TAIL + rb"{40,}"),
        ("Groq key", b"gsk_", rb"[A-Za-z0-9]{40,}"),
        ("Hugging Face token", b"hf_", rb"[A-Za-z0-9]{30,}"),
        ("JSON web token", b"eyJ", _TAIL + rb"{10,}\.eyJ" + _TAIL + rb"{10,}\." + _TAIL + rb"{20,}"),
        ("Linear key", b"lin_api_", rb"[A-Za-z0-9]{30,}"),
        ("Netlify token", b"nfp_", rb"[A-Za-z0-9]{30,}"),
        ("Notion token", b"ntn_", rb"[A-Za-z0-9]{40,}"),
        ("npm token", b"npm_", rb"[A-Za-z0-9]{36,}"),
        ("NuGet key", b"oy2", rb"[a-z0-9]{43}(?![A-Za-z0-9])"),
        ("OpenAI key", b"sk-proj-", _TAIL + rb"{40,}"),
        ("OpenRouter key", b"sk-or-v1-", rb"[A-Za-z0-9]{40,}"),
        ("PyPI token", b"pypi-", _TAIL + rb"{80,}"),
        ("RubyGems key", b"rubygems_", rb"[A-Za-z0-9]{40,}"),
        ("SendGrid key", b"SG.", _TAIL + rb"{16,}\." + _TAIL + rb"{16,}"),
        ("Sentry token", b"sntryu_", rb"[A-Za-z0-9]{40,}"),
        ("Slack token", b"xoxb-", _TAIL + rb"{30,}"),
        ("Slack token", b"xoxp-", _TAIL + rb"{30,}"),
        ("Stripe key", b"sk_live_", rb"[A-Za-z0-9]{20,}"),
        ("Stripe restricted key", b"rk_live_", rb"[A-Za-z0-9]{20,}"),
        ("Vault token", b"hvs.", _TAIL + rb"{24,}"),
        ("crates.io token", b"cio", rb"[A-Za-z0-9]{32}(?![A-Za-z0-9])"),
        ("private key", b"-----BEGIN ", rb"(?:[A-Z0-9]+ )*PRIVATE KEY-----"),
        ("xAI key", b"xai-", rb"[A-Za-z0-9]{60,}"),
    )
)
"""(what a person calls it, its prefix, the whole look)."""

LONGEST: Final = 512
"""Bytes that are looked at from a prefix on."""
