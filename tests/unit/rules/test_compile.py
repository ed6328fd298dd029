"""Documents: what the parser writes, the compiler reads, and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules.compile import DocumentFault, compile_host, compile_policy
from rules.document import encode_credential, encode_destination, encode_operation, encode_rule
from rules.names import Host
from rules.parse import Sources, parse_sources
from rules.yaml12 import load
from tests.support.properties import tried

SHOP = Path(__file__).parents[2] / "cases" / "policy" / "shop.yaml"
PEM = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"


def shop() -> dict[str, Any]:
    value, _ = load(SHOP.read_text(encoding="utf-8"), "shop.yaml")
    sources = Sources(
        policy={"policy.yaml": value["policy"]},
        credentials=("credentials.yaml", value["credentials"]),
        ca_files=lambda path: PEM,
    )
    return parse_sources(sources).document


DOCUMENT = shop()


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(path for key, item in items for path in paths(item, (*prefix, key)))]


def replaced(path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    document = copy.deepcopy(DOCUMENT)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = new
    return document


# What is free by design: names, texts, lists of values that rules choose.
OPEN = {"params", "message", "basis", "owner", "tunnel_reason", "boundary", "ca_pem"}


@tried(400)
@given(
    path=st.sampled_from([path for path in paths(DOCUMENT) if not OPEN & set(path)]),
    new=st.sampled_from([None, "", "x y", -1, 1.5, True, [], {}, [None], {"x": 1}, ["**"], float("nan")]),
)
def test_a_damaged_document_is_refused_or_still_means_less_than_everything(path: tuple[Any, ...], new: Any) -> None:
    """Replacing any part gives a DocumentFault or a policy in which every operation still has host, method and path."""
    try:
        policy = compile_policy(replaced(path, new))
    except DocumentFault:
        return
    for role in policy.roles.values():
        for rule in role.rules:
            assert rule.operations or rule.hosts
            for op in rule.operations:
                assert op.hosts
                assert op.methods
                assert op.paths


@pytest.mark.parametrize("key", ["roles", "operations", "credentials", "destinations", "version", "basis"])
def test_a_missing_or_unknown_part_is_refused(key: str) -> None:
    """Every field is there and no other."""
    with pytest.raises(DocumentFault):
        compile_policy({name: value for name, value in DOCUMENT.items() if name != key})
    with pytest.raises(DocumentFault):
        compile_policy({**DOCUMENT, "more": 1})
    with pytest.raises(DocumentFault):
        compile_policy({**DOCUMENT, "version": 2})


def test_a_rule_cannot_name_what_is_not_there() -> None:
    """Operations and credentials are resolved when the document is compiled."""
    for field, value in (("credential", "gone"), ("operations", ["gone"])):
        document = copy.deepcopy(DOCUMENT)
        document["roles"]["coding-agent"]["rules"][0][field] = value
        with pytest.raises(DocumentFault):
            compile_policy(document)


def test_a_fault_repeats_no_value() -> None:
    """The sentence names the field; a damaged document may hold anything."""
    document = copy.deepcopy(DOCUMENT)
    document["credentials"]["deployer"]["kind"] = "canary-value"
    with pytest.raises(DocumentFault) as caught:
        compile_policy(document)
    assert "canary" not in str(caught.value)


def test_encoding_and_compiling_are_inverse() -> None:
    """Encoding the compiled policy gives the document again, after a trip through JSON."""
    policy = compile_policy(json.loads(json.dumps(DOCUMENT)))
    operations = {op.id: op for role in policy.roles.values() for rule in role.rules for op in rule.operations}
    assert {name: encode_operation(op) for name, op in operations.items()} == DOCUMENT["operations"]
    assert {str(name): encode_credential(item) for name, item in policy.credentials.items()} == DOCUMENT["credentials"]
    assert {name: encode_destination(item) for name, item in policy.destinations.items()} == DOCUMENT["destinations"]
    for name, role in policy.roles.items():
        assert [encode_rule(rule) for rule in role.rules] == DOCUMENT["roles"][name]["rules"]
    assert policy.digest == compile_policy(DOCUMENT).digest


def test_the_host_index_finds_every_rule_that_can_match() -> None:
    """Through the index or through all rules: the same rules match a host."""
    role = compile_policy(DOCUMENT).roles["coding-agent"]
    hosts = ["github.com", "orders.shop.example", "a.internal.example", "x.pastebin.example", "nowhere.test"]
    for text in hosts:
        host = Host.parse(text)
        by_index = {rule.id for rule in role.rules_for(host)}
        for rule in role.rules:
            patterns = [*rule.hosts, *(pattern for op in rule.operations for pattern in op.hosts)]
            if any(pattern.matches(host) for pattern in patterns):
                assert rule.id in by_index


@pytest.mark.parametrize("text", ["*.x.test", "**.x.test", "x.test", "10.0.0.1", "::1"])
def test_host_patterns(text: str) -> None:
    """A wildcard never matches its apex or an address; an exact pattern matches itself alone."""
    pattern = compile_host(text)
    apex = Host.parse("x.test")
    assert pattern.matches(apex) == (text == "x.test")
    assert pattern.matches(Host.parse("a.x.test")) == text.startswith("*")
    assert pattern.matches(Host.parse("a.b.x.test")) == text.startswith("**")
    assert pattern.matches(Host.parse("10.0.0.1")) == (text == "10.0.0.1")
