"""Exchanges: stored parts into short-lived ones, by a token endpoint. One file each; EXCHANGES is the registry.

They run in the vault, because what they send is what must not leave it. The executor gets what they obtained and
nothing of what it was obtained with. Start reading: base.py (the contract), then oauth2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from broker.exchanges.aws_sts import AwsSts
from broker.exchanges.azure import Azure
from broker.exchanges.base import Exchange, ExchangeError, Obtained, Plan
from broker.exchanges.github_app import GitHubApp
from broker.exchanges.google import Google
from broker.exchanges.oauth2 import OAuth2

EXCHANGES: Final[Mapping[str, Exchange]] = {
    "oauth2": OAuth2(),
    "github-app": GitHubApp(),
    "google": Google(),
    "azure": Azure(),
    "aws-sts": AwsSts(),
}
"""A new exchange is one file, one line here, and a row with `obtained` in rules/credential_kinds.py."""

__all__ = ["EXCHANGES", "Exchange", "ExchangeError", "Obtained", "Plan"]
