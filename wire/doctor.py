"""What a sandbox may claim of itself: the doctor's result, as codes of ours and nothing else (RULINGS 6.2, 8.2).

Whoever controls a sandbox controls what comes in here. So the words are fixed: a check or a variable that is not in
these tables refuses the whole claim, and no text of the sandbox goes any further. A claim arms nothing.

    POST http://exeat.internal/doctor   application/json, at most MAX_CLAIM_BYTES
    {"version": 1, "findings": [{"check": "direct", "state": "holds"},
                                {"check": "client-git", "state": "fails", "lacks": ["GIT_SSL_CAINFO"]}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

CLAIM_SECONDS: Final = 10.0
"""Between two claims of one sandbox."""
MAX_CLAIM_BYTES: Final = 16 * 1024
MAX_FINDINGS: Final = 64
MAX_CODES: Final = 128
"""Codes of one state."""

STATES: Final = ("holds", "fails", "unknown")
CHECKS: Final = frozenset(
    "interfaces direct bare-address other-port dot direct-ipv6 dns-udp quic dns-udp-ipv6 gateway".split()
)
CLIENTS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        name: frozenset(variables.split())
        for name, variables in {
            "curl": "CURL_CA_BUNDLE https_proxy http_proxy",
            "wget": "SSL_CERT_FILE https_proxy http_proxy",
            "git": "GIT_SSL_CAINFO https_proxy",
            "gh": "SSL_CERT_FILE https_proxy",
            "pip": "PIP_CERT https_proxy",
            "uv": "SSL_CERT_FILE https_proxy",
            "python3": "SSL_CERT_FILE REQUESTS_CA_BUNDLE https_proxy",
            "aws": "AWS_CA_BUNDLE https_proxy",
            "node": "NODE_EXTRA_CA_CERTS NODE_USE_ENV_PROXY https_proxy",
            "npm": "npm_config_cafile npm_config_https_proxy",
            "pnpm": "npm_config_cafile npm_config_https_proxy",
            "yarn": "YARN_HTTPS_CA_FILE_PATH YARN_HTTPS_PROXY",
            "go": "SSL_CERT_FILE https_proxy",
            "cargo": "CARGO_HTTP_CAINFO CARGO_HTTP_PROXY",
            "docker": "SSL_CERT_FILE https_proxy",
            "java": "JAVA_TOOL_OPTIONS",
            "mvn": "JAVA_TOOL_OPTIONS",
        }.items()
    }
)
"""Client -> the variables that it can be said to lack: the first of each group of exeat/doctor.py."""


class ClaimInvalid(ValueError):
    """The bytes are no claim. str() is a fixed sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What a sandbox says. Codes: a check, `client-NAME`, or `client-NAME:VARIABLE` for one that it lacks."""

    holds: tuple[str, ...]
    fails: tuple[str, ...]
    unknown: tuple[str, ...]


def known(code: str) -> bool:
    """Whether `code` is one of ours."""
    client, _, variable = code.removeprefix("client-").partition(":")
    if code.startswith("client-"):
        return client in CLIENTS and (not variable or variable in CLIENTS[client]) and not code.endswith(":")
    return code in CHECKS


def parse_claim(raw: bytes) -> Claimed:
    """The claim in `raw`. Raises ClaimInvalid for anything else, and for a check that is named twice."""
    if len(raw) > MAX_CLAIM_BYTES:
        raise ClaimInvalid("too long")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise ClaimInvalid("not JSON") from None
    if not isinstance(document, dict) or set(document) != {"version", "findings"} or document["version"] != 1:
        raise ClaimInvalid("not {version: 1, findings: [...]}")
    findings = document["findings"]
    if not isinstance(findings, list) or not 0 < len(findings) <= MAX_FINDINGS:
        raise ClaimInvalid("no list of findings, or too many")
    found: dict[str, list[str]] = {state: [] for state in STATES}
    seen: set[str] = set()
    for finding in findings:
        state, codes = _finding(finding)
        if codes[0] in seen:
            raise ClaimInvalid("a check is named twice")
        seen.add(codes[0])
        found[state] += codes
    return Claimed(holds=tuple(found["holds"]), fails=tuple(found["fails"]), unknown=tuple(found["unknown"]))


def _finding(value: Any) -> tuple[str, list[str]]:
    if not isinstance(value, dict) or not {"check", "state"} <= set(value) <= {"check", "state", "lacks"}:
        raise ClaimInvalid("a finding is {check, state, lacks?}")
    check, state, lacks = value["check"], value["state"], value.get("lacks", [])
    if not isinstance(check, str) or ":" in check or not known(check) or state not in STATES:
        raise ClaimInvalid("an unknown check or state")
    if not isinstance(lacks, list) or len(lacks) > 4 or (lacks and state != "fails"):
        raise ClaimInvalid("what is lacking is no list, or belongs to no failure")
    codes = [check, *(f"{check}:{name}" for name in lacks if isinstance(name, str))]
    if len(codes) != len(lacks) + 1 or len(set(codes)) != len(codes) or not all(map(known, codes)):
        raise ClaimInvalid("an unknown variable")
    return str(state), codes
