"""`github-app`: an installation token of a GitHub App, narrowed to repositories and permissions.

    kind: github-app
    secret: {private_key: "file:/run/secrets/app.pem"}
    app_id: "123456"                       # or the app's client id
    installation_id: "7890"
    repositories: ["${sandbox.repository}"]    # names without their owner, at most 500
    permissions: {contents: read, pull_requests: write}

The app signs a JWT with its key (RS256, ten minutes at most) and asks for a token of one installation; the token lives
an hour. What it may touch stands in the request, so GitHub itself keeps a sandbox to its own repositories, whatever
policy says. Equal narrowings share one token. Source: docs.github.com, "Generating an installation access token for a
GitHub App" and "Create an installation access token for an app".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime

from broker.exchanges.base import (
    AskEndpoint,
    ExchangeError,
    Obtained,
    Plan,
    Wish,
    bounded_life,
    endpoint,
    expand_all,
    read_json,
    text_of,
    token_of,
)
from broker.exchanges.signing import load_key, sign
from broker.vault.secret import Secret
from rules.credential_kinds import VALUE
from rules.facts import Sandbox
from rules.policy import CredentialDef

API = "https://api.github.com"
VERSION = "2022-11-28"
JWT_SECONDS = 9 * 60
"""GitHub refuses a life over ten minutes; `iat` lies a minute back, for clocks that differ."""

_REPOSITORY = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


class GitHubApp:
    """See the module."""

    def plan(self, definition: CredentialDef, sandbox: Sandbox) -> Plan:
        params = definition.params
        destination, base = endpoint(params.get("api_url", API))
        asks: dict[str, object] = {"app_id": params["app_id"]}
        if "repositories" in params:
            names = expand_all(params["repositories"], sandbox)
            if not names or any(not _REPOSITORY.match(name) or name in (".", "..") for name in names):
                raise ExchangeError("exchange-material", "the sandbox names no repository")
            asks["repositories"] = tuple(sorted(set(names)))
        if "permissions" in params:
            asks["permissions"] = dict(sorted(params["permissions"].items()))
        target = f"{base.rstrip('/')}/app/installations/{params['installation_id']}/access_tokens"
        return Plan(destination=destination, target=target, asks=asks)

    async def obtain(self, plan: Plan, parts: Mapping[str, Secret], ask: AskEndpoint, now: float) -> Obtained:
        key = load_key(text_of(parts, "private_key"))
        claims = {"iss": plan.asks["app_id"], "iat": int(now) - 60, "exp": int(now) + JWT_SECONDS}
        wanted = {name: plan.asks[name] for name in ("repositories", "permissions") if name in plan.asks}
        headers = (
            ("Accept", "application/vnd.github+json"),
            ("Content-Type", "application/json"),
            ("X-GitHub-Api-Version", VERSION),
            ("Authorization", f"Bearer {sign(key, claims)}"),
        )
        body = json.dumps(wanted, separators=(",", ":")).encode()
        answer = read_json(await ask(plan, Wish(headers=headers, body=body)), accepted=201)
        _check_granted(plan, answer)
        return Obtained(parts={VALUE: token_of(answer, "token")}, lasts=_life(answer.get("expires_at"), now))


def _check_granted(plan: Plan, answer: Mapping[str, object]) -> None:
    """The token must not reach further than what was asked for: a server that ignores the narrowing gives too much."""
    wanted = plan.asks.get("permissions")
    given = answer.get("permissions")
    levels = {"read": 1, "write": 2, "admin": 3}
    if wanted is not None and (
        not isinstance(given, dict)
        or any(
            name != "metadata" and levels.get(str(level), 4) > levels.get(str(wanted.get(name)), 0)
            for name, level in given.items()
        )
    ):
        raise ExchangeError("exchange-answer", "the token would permit more than was asked for")
    if "repositories" in plan.asks and answer.get("repository_selection") != "selected":
        raise ExchangeError("exchange-answer", "the token would reach every repository of the installation")


def _life(text: object, now: float) -> float:
    try:
        ends = datetime.fromisoformat(text) if isinstance(text, str) and len(text) <= 40 else None
    except ValueError:
        ends = None
    if ends is None or ends.tzinfo is None:
        raise ExchangeError("exchange-answer", "the token endpoint gave no token: expires_at is not a time")
    return bounded_life(ends.timestamp() - now)
