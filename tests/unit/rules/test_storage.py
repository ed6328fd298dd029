"""Storage hosts that belong to everybody: a policy says whose place it means, or does not load."""

from __future__ import annotations

import pytest

from rules.parse import PolicyError, Sources, parse_sources

RULE = "version: 1\nroles:\n  dev:\n    allow:\n      - {{name: x, {rule}}}\n"

OPEN = [
    "host: storage.googleapis.com, methods: [GET], paths: ['/**']",
    "host: storage.googleapis.com, methods: [GET], paths: ['/{bucket}/**']",
    "host: s3.amazonaws.com, methods: [GET], paths: ['/ours/a', '/{any}/b']",
    "host: s3.eu-central-1.amazonaws.com, methods: [GET], paths: ['/**']",
    "host: s3.dualstack.us-east-1.amazonaws.com, methods: [PUT], paths: ['/{bucket}/{key}']",
    "host: fra1.digitaloceanspaces.com, methods: [GET], paths: ['/**']",
    "host: f003.backblazeb2.com, methods: [GET], paths: ['/**']",
    "host: '**.googleapis.com', methods: [GET], paths: ['/a/**']",
    "host: '*.digitaloceanspaces.com', methods: [GET], paths: ['/a/**']",
    "host: storage.googleapis.com, port: 443, tunnel: true, reason: none",
]
TOLD = [
    "host: storage.googleapis.com, methods: [GET], paths: ['/ours/**']",
    "host: ours.s3.amazonaws.com, methods: [GET], paths: ['/**']",
    "host: ours.blob.core.windows.net, methods: [GET], paths: ['/**']",
    "host: orders.shop.example, methods: [GET], paths: ['/**']",
    "host: '**.shop.example', methods: [GET], paths: ['/**']",
    "service: gcs, operations: [read], with: {bucket: ours}",
    "service: s3, operations: [object.read], with: {bucket: ours}",
]


def load(rule: str) -> None:
    parse_sources(Sources(policy={"policy.yaml": RULE.format(rule=rule)}))


@pytest.mark.parametrize("rule", OPEN)
def test_a_place_of_everybodys_is_not_permitted(rule: str) -> None:
    """Expect a load error at the rule that says what to do instead."""
    with pytest.raises(PolicyError) as caught:
        load(rule)
    assert "policy.yaml:5:9: dev/x: at " in str(caught.value) or "public suffix" in str(caught.value)


@pytest.mark.parametrize("rule", TOLD)
def test_a_place_that_is_told_is_permitted(rule: str) -> None:
    """Expect a bucket by host or path, a service that binds it, and every host that is nobody else's, to load."""
    load(rule)
