"""The rules inside a sandbox's namespace, as text that a person can review and that nft accepts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from capture.inside import CAPTURE_PORT, CLASSES, commands, ruleset
from wire.probe import MARK

NFT = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")


def test_what_is_not_redirected_is_dropped_and_counted() -> None:
    """The output filter's policy is drop, with a counter behind what it lets pass."""
    text = ruleset(MARK)
    leaving = text[text.index("chain leaving") :]
    assert "policy drop" in leaving
    assert re.findall(r"accept|counter name refused", leaving) == ["accept", "accept", "counter name refused"]
    assert 'oifname "lo" accept' in leaving
    assert "ct status dnat accept" in leaving


def test_what_is_dropped_is_counted_by_kind_but_for_our_own_probe_and_the_kernels_own() -> None:
    """Every class has a rule; only what is marked, and neighbour discovery, is dropped before the counters."""
    text = ruleset(MARK)
    leaving = text[text.index("chain leaving") :].splitlines()
    uncounted = [line.split() for line in leaving if line.endswith(" drop")]
    assert uncounted[0] == ["meta", "mark", f"{MARK:#x}", "drop"]
    assert [words[:2] for words in uncounted[1:]] == [["icmpv6", "type"]]
    assert re.findall(r"counter name (\w+)", "\n".join(leaving)) == [*CLASSES, "refused"]


def test_name_lookups_are_redirected_before_loopback_is_left_alone() -> None:
    """A resolver at a loopback address must not be a way past the stub."""
    text = ruleset(MARK)
    assert text.index("udp dport 53") < text.index('oifname "lo" return') < text.index("meta l4proto tcp redirect")
    assert f"redirect to :{CAPTURE_PORT}" in text


def test_both_ends_of_the_pair_stay_inside() -> None:
    """No command moves an interface anywhere or adds an address that anybody else has."""
    words = [word for argv in commands("/sbin/ip") for word in argv]
    assert "netns" not in words
    assert all(argv[0] == "/sbin/ip" for argv in commands("/sbin/ip"))


@pytest.mark.skipif(NFT is None or os.geteuid() != 0, reason="nft checks a ruleset only for root")
def test_nft_accepts_the_rules() -> None:
    """`nft --check`: nothing is loaded."""
    done = subprocess.run(
        [str(NFT), "--check", "-f", "-"], input=ruleset(MARK), text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
