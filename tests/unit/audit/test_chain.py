"""Linking, timestamps and the tree."""

from __future__ import annotations

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from audit.chain import GENESIS, Head, Tree, line_hash, link, timestamp
from tests.support.properties import tried


def reference_root(leaves: list[bytes]) -> bytes:
    """RFC 6962 §2.1, written as the text says it."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return hashlib.sha256(b"\x01" + reference_root(leaves[:half]) + reference_root(leaves[half:])).digest()


@given(st.lists(st.binary(max_size=8), max_size=70))
@tried()
def test_the_tree_has_the_root_of_rfc_6962(leaves: list[bytes]) -> None:
    """The incremental tree and the recursive definition agree at every size."""
    tree = Tree()
    for leaf in leaves:
        tree.add(leaf)
    assert tree.root() == reference_root(leaves)
    assert len(tree.roots) == tree.size.bit_count()


def test_each_line_names_the_hash_of_the_line_before() -> None:
    """The first names GENESIS; sequence numbers have no gap."""
    first, head = link(Head(), node="n", process="p", name="log.opened", fields={}, now_ns=5)
    second, after = link(head, node="n", process="p", name="log.sealed", fields={"records": 1}, now_ns=6)
    assert json.loads(first)["prev"] == GENESIS
    assert json.loads(second)["prev"] == line_hash(first) == head.hash
    assert (head.sequence, after.sequence) == (1, 2)


def test_timestamps_have_one_width() -> None:
    """RFC 3339 in UTC with nine digits, so that text order is time order."""
    assert timestamp(0) == "1970-01-01T00:00:00.000000000Z"
    assert timestamp(1_767_225_600_000_000_001) == "2026-01-01T00:00:00.000000001Z"
