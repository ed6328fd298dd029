"""The JSON Schemas accept everything that loads, refuse common mistakes, and cover every documented block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rules.parse import Sources, parse_sources
from rules.schema import credentials_schema, json_schema
from rules.yaml12 import load
from tests.support.rows import every_row

ROOT = Path(__file__).parents[3]
CASES = sorted((ROOT / "tests" / "cases" / "policy").glob("*.yaml"))
POLICY = Draft202012Validator(json_schema())
CREDENTIALS = Draft202012Validator(credentials_schema())
PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def documented() -> list[Any]:
    """Every YAML block of the documents that is a policy or a credentials file, and what `exeat init` writes."""
    found: list[Any] = [
        pytest.param(path.read_text(encoding="utf-8"), id=path.name)
        for path in sorted((ROOT / "exeat" / "templates").glob("*.yaml"))
        if path.stem in ("policy", "credentials")
    ]
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        for index, match in enumerate(BLOCK.finditer(path.read_text(encoding="utf-8"))):
            if re.search(r"^(roles|credentials|everyone):", match[1], re.MULTILINE):
                found.append(pytest.param(match[1], id=f"{path.relative_to(ROOT)}-{index}"))
    return found


def errors(validator: Draft202012Validator, text: str) -> list[str]:
    value, _ = load(text, "text")
    return [error.message for error in validator.iter_errors(value)]


def test_the_schemas_are_schemas() -> None:
    """They conform to the dialect that they name."""
    Draft202012Validator.check_schema(json_schema())
    Draft202012Validator.check_schema(credentials_schema())


MISTAKES = [
    "version: 2\nroles: {}",
    "version: 1\nrules: []",
    "version: 1\nroles: {dev: {alow: []}}",
    "version: 1\nroles: {dev: {allow: [], dns: true}}",
    "version: 1\nroles: {dev: {allow: [{host: h.test}]}}",
    "version: 1\nroles: {dev: {allow: [{name: r, host: h.test, methods: [], paths: [/a]}]}}",
    "version: 1\nroles: {dev: {allow: [{name: r, host: h.test, methods: [GET], paths: []}]}}",
    "version: 1\nroles: {dev: {allow: [{service: npm, operations: []}]}}",
    "version: 1\nroles: {dev: {allow: [{service: npm, operations: [read], shared: false}]}}",
    "version: 1\nroles: {dev: {allow: [{host: h.test, tunnel: true}]}}",
    "version: 1\neveryone: {allow: []}",
    "version: 1\ndestinations: {h.test: {}}",
    "version: 1\ndestinations: {h.test: {sni: never}}",
    "version: 1\nservices: {x: {like: nope, base: 'https://h.test'}}",
    "version: 1\ntests: [{role: dev, deny: 'GET https://h.test/', reason: nope}]",
    "version: 1\ntests: [{role: dev}]",
]


@every_row("text", MISTAKES)
def test_an_editor_sees_common_mistakes(text: str) -> None:
    """Unknown keys, empty lists, missing parts and unknown words are marked while typing."""
    assert errors(POLICY, text)


def test_an_editor_sees_a_credential_without_hosts() -> None:
    """A secret without its hosts is marked."""
    assert errors(CREDENTIALS, "version: 1\ncredentials: {k: {kind: bearer, secret: 'env:K', owner: t}}")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_what_loads_is_accepted(path: Path) -> None:
    """The schema never refuses what the parser accepts."""
    value, _ = load(path.read_text(encoding="utf-8"), path.name)
    assert errors(POLICY, value["policy"]) == []
    if "credentials" in value:
        assert errors(CREDENTIALS, value["credentials"]) == []


@every_row("text", documented())
def test_every_documented_block_loads(text: str) -> None:
    """RULINGS 3.7: what the documents show is read by schema and parser alike."""
    value, _ = load(text, "document")
    if "credentials" in value:
        assert errors(CREDENTIALS, text) == []
        policy = "version: 1\nroles: {none: {allow: []}}\n"
        sources = Sources(policy={"policy.yaml": policy}, credentials=("block", text), ca_files=lambda path: PEM)
        parse_sources(sources)
        return
    assert errors(POLICY, text) == []
    names = re.findall(r"credential: ([A-Za-z0-9._-]+)", text)
    if not names:
        parse_sources(Sources(policy={"block": text}, ca_files=lambda path: PEM))


def test_a_shared_account_is_said_on_rules_of_services_alone() -> None:
    """`shared: true` is taken there, and refused on a hand-written rule."""
    rule = {"service": "bigquery", "operations": ["query.result"], "shared": True}
    hand = {"name": "r", "host": "h.test", "methods": ["GET"], "paths": ["/a"], "shared": True}
    assert not POLICY.is_valid({"version": 1, "roles": {"dev": {"allow": [hand]}}})
    assert POLICY.is_valid({"version": 1, "roles": {"dev": {"allow": [rule]}}})
