"""The rules of captured interfaces on a host: as text, and as nft and the kernel read it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.gateway import COUNTERS, DROPS, TABLE, read_counters, read_drops, read_plan, ruleset
from capture.plan import Interface, Plan, PlanError, parse_interface
from tests.support.properties import tried

NFT = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")
BOTH = parse_interface("tap-a=198.19.0.1/30,fd65::1/126")
FOUR = parse_interface("veth.b=198.19.0.5/30")
SIX = parse_interface("c=fd66::1/64")
BRIDGE = parse_interface("br-d=10.9.0.1/24", "bridge")


def chain(text: str, name: str) -> list[str]:
    """The lines of one chain after its hook."""
    body = text[text.index(f"\tchain {name} {{") :]
    return [line.strip() for line in body[: body.index("\n\t}")].splitlines()[1:]]


def test_every_chain_ends_with_a_counted_drop_for_listed_interfaces_alone() -> None:
    """Other traffic of the host is not judged; a listed interface's never falls through."""
    text = ruleset(Plan.of([BOTH, FOUR]))
    for name, counter in (("source", "spoofed"), ("refuse", "other"), ("host", "host")):
        lines = chain(text, name)
        assert lines[1] == "iifname != @sandboxes accept"
        assert lines[-1] == f"counter name {counter} drop"
    assert chain(text, "passing")[2::2] == [
        "iifname @sandboxes counter name forwarded drop",
        "oifname @sandboxes counter name inward drop",
    ]


def test_a_source_is_accepted_only_on_its_own_interface_and_reverse_path() -> None:
    """Every accepting line of the source chain names the interface, its subnet, not our end, and asks the routes."""
    lines = chain(ruleset(Plan.of([BOTH, FOUR, SIX])), "source")[3:-2]
    assert len(lines) == 4
    for line in lines:
        assert re.fullmatch(r'iifname "\S+" ip6? saddr \S+ ip6? saddr != \S+ fib saddr \. iif oif exists accept', line)
    assert 'iifname "c" ip6 saddr fd66::/64 ip6 saddr != fd66::1 fib saddr . iif oif exists accept' in lines


def test_redirects_come_before_those_of_other_programs_and_lookups_before_everything() -> None:
    """The first nat chain that decides wins; Docker's is at dstnat."""
    lines = chain(ruleset(Plan.of([BOTH])), "capture")
    assert "priority dstnat - 10" in lines[0]
    assert "th dport 53 counter name lookups redirect to :3153" in lines[2]
    assert lines[-1] == "meta l4proto tcp counter name captured redirect to :3129"


def test_only_our_ports_are_reachable_on_the_host() -> None:
    """What was redirected, the proxy's port on the interface's own address, and neighbour discovery; nothing more."""
    assert chain(ruleset(Plan.of([FOUR])), "ours") == [
        "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } ip6 hoplimit 255 accept",
        "ct status dnat meta l4proto { tcp, udp } th dport 3153 accept",
        "ct status dnat tcp dport 3129 accept",
        'iifname "veth.b" ip daddr 198.19.0.5 tcp dport 3128 accept',
    ]


def test_every_counter_is_used_and_explained() -> None:
    """A counter that no rule names would always say zero."""
    text = ruleset(Plan.of([BOTH]))
    assert set(re.findall(r"counter name (\w+)", text)) == set(COUNTERS)


def test_every_drop_is_counted_for_its_interface_first() -> None:
    """Before each counted drop stands the same condition with that counter's set, which holds every interface."""
    text = ruleset(Plan.of([BOTH, FOUR]))
    lines = [line.strip() for line in text.splitlines()]
    for name in DROPS:
        assert f'set {name}_by {{ type ifname; counter; elements = {{ "tap-a", "veth.b" }}; }}' in lines
        (at,) = [number for number, line in enumerate(lines) if line.endswith(f"@{name}_by")]
        condition, drop = lines[at].split(), lines[at + 1].split()
        counted = drop.index("counter")
        assert drop[counted : counted + 3] == ["counter", "name", name]
        assert condition[:-2] == [word for word in drop[:counted] if word not in ("iifname", "oifname", "@sandboxes")]
    assert set(DROPS) <= set(COUNTERS)


def test_drops_are_told_by_interface_and_kind() -> None:
    """Sets of other tables, and those that count nothing, do not matter."""

    def counting(name: str, table: str, **packets: int) -> dict[str, object]:
        elem = [{"elem": {"val": key, "counter": {"packets": count, "bytes": 1}}} for key, count in packets.items()]
        return {"set": {"family": "inet", "name": name, "table": table, "elem": elem}}

    document = {
        "nftables": [
            {"set": {"family": "inet", "name": "sandboxes", "table": TABLE, "elem": ["a"]}},
            counting("quic_by", TABLE, a=2, b=0),
            counting("other_by", TABLE, a=1),
            counting("quic_by", "other", a=9),
        ]
    }
    assert read_drops(document) == {"a": {"quic": 2, "other": 1}, "b": {"quic": 0}}


def test_ports_of_a_bridge_never_reach_each_other() -> None:
    """A table of the bridge family, only where a bridge is in the plan or was in the last one."""
    text = ruleset(Plan.of([BRIDGE, FOUR]))
    assert 'meta ibrname { "br-d" } counter name between drop' in text
    assert "bridge" not in ruleset(Plan.of([FOUR]))
    assert f"delete table bridge {TABLE}" in ruleset(Plan.of([FOUR]), had_bridges=True)


def test_a_plan_without_interfaces_removes_the_table() -> None:
    """And makes nothing."""
    assert ruleset(Plan()) == f"table inet {TABLE}\ndelete table inet {TABLE}\n"


def test_a_set_that_says_no_addresses_is_not_a_plan() -> None:
    """Somebody else's change is not guessed at; a machine without the table has no plan."""
    table = {"table": {"family": "inet", "name": TABLE}}
    names = {"set": {"family": "inet", "name": "sandboxes", "table": TABLE, "elem": ["tap0"]}}
    wrong = {"elem": {"val": "tap0", "comment": "link 0.0.0.0/0"}}
    for document in (
        [table],
        [table, names],
        [table, {"set": {**names["set"], "elem": [wrong]}}],
        [table, {"set": {**names["set"], "elem": [{"elem": {"val": "a", "comment": "x 10.0.0.1/30"}}]}}],
    ):
        with pytest.raises(PlanError):
            read_plan({"nftables": document})
    assert read_plan({"nftables": [{"table": {"family": "ip", "name": "nat"}}]}) is None


def test_counters_are_told_in_the_order_of_the_rules() -> None:
    """Those of other tables do not count."""
    document = {
        "nftables": [
            {"counter": {"table": TABLE, "name": "host", "packets": 2}},
            {"counter": {"table": TABLE, "name": "captured", "packets": 3}},
            {"counter": {"table": "other", "name": "quic", "packets": 9}},
        ]
    }
    assert list(read_counters(document).items()) == [("captured", 3), ("host", 2)]


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", fullmatch=True).filter(lambda name: name != "lo")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    found: list[Interface] = []
    for number, name in enumerate(names):
        four = f"198.19.{number}.1/{draw(st.integers(24, 30))}"
        six = f"fd65:{number:x}::1/{draw(st.integers(64, 126))}"
        shape = draw(st.sampled_from([four, six, f"{four},{six}"]))
        found.append(parse_interface(f"{name}={shape}", draw(st.sampled_from(["link", "bridge"]))))
    return Plan.of(found)


@given(plan=plans())
@tried(60)
def test_the_set_in_the_rules_says_the_whole_plan(plan: Plan) -> None:
    """Names, kinds and addresses come back from what the kernel is given as they went in."""
    elements = re.findall(r'^\t\t\t"(\S+)" comment "(.*)"', ruleset(plan), re.MULTILINE)
    elem = [{"elem": {"val": name, "comment": comment}} for name, comment in elements]
    said = {"set": {"family": "inet", "name": "sandboxes", "table": TABLE, "elem": elem}}
    assert read_plan(json.loads(json.dumps({"nftables": [said]}))) == plan
    assert all(len(comment) <= 128 for _, comment in elements)


@pytest.mark.skipif(NFT is None or os.geteuid() != 0, reason="nft checks a ruleset only for root")
@pytest.mark.parametrize("interfaces", [(BOTH,), (BOTH, FOUR, SIX), (BRIDGE, BOTH), ()])
def test_nft_accepts_the_rules(interfaces: tuple[Interface, ...]) -> None:
    """`nft --check`: nothing is loaded."""
    text = ruleset(Plan.of(interfaces))
    done = subprocess.run([str(NFT), "--check", "-f", "-"], input=text, text=True, capture_output=True, check=False)
    if BRIDGE in interfaces and "ibrname" in done.stderr and "not supported" in done.stderr:
        pytest.skip("this kernel has no nft_meta_bridge")
    assert done.returncode == 0, done.stderr
