"""Transparent capture on a host, for containers and microVMs: the rules of the interfaces that lead to sandboxes.

    prerouting  source    from its own interface and subnet, or dropped           (strict reverse path, no spoofing)
                capture   every TCP connection -> the capturing port, every name lookup -> the stub resolver
                refuse    all that is not on its way to those: counted by kind, dropped
    input       host      the same once more: the host's own addresses and ports are no exception
    forward     passing   nothing from a sandbox goes through this machine, and nothing goes to one

They concern the listed interfaces alone and live in the kernel: while none of our processes runs, nobody accepts, and
still nothing passes. A redirect keeps the address that was dialled, which the worker reads from the accepted socket
(net/capture.py) and accepts only where the stub gave it out. Forwarded datagrams never reach the input hook, and
without IP forwarding not even the forward hook; so they are counted in prerouting.

Each interface is in the set with its addresses as a comment, so that the kernel itself can say what plan is in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from capture.plan import CAPTURED_PORT, DNS_PORT, PROXY_PORT, Interface, Plan, PlanError, parse_interface

TABLE: Final = "exeat_capture"

COUNTERS: Final[Mapping[str, str]] = {
    "captured": "connections brought to the gateway",
    "lookups": "name lookups brought to the stub resolver",
    "spoofed": "packets from an address that is not the interface's own",
    "dot": "DNS over TLS, refused with a reset",
    "quic": "packets to UDP port 443, dropped",
    "datagrams": "other datagrams, dropped",
    "pings": "ICMP and ICMPv6, dropped",
    "other": "anything else, dropped",
    "host": "packets that reached the input hook and were not ours, dropped",
    "forwarded": "packets from a sandbox that reached the forward hook, dropped",
    "inward": "packets from elsewhere to a sandbox, dropped",
}
"""Name and meaning of every counter of the table, in the order of the rules."""


DROPS: Final = ("spoofed", "dot", "quic", "datagrams", "pings", "other", "host", "forwarded", "inward")
"""Counters of what was dropped or refused. For each there is a set that counts the same by interface."""


def ruleset(plan: Plan, *, had_bridges: bool = False) -> str:
    """The `nft -f` text that puts `plan` in force in place of an earlier one, in one transaction.

    `had_bridges`: that one has a bridge table. A plan without interfaces removes the tables.
    """
    bridges = [one.name for one in plan.interfaces if one.kind == "bridge"]
    families = ["inet"]
    if bridges or had_bridges:
        families.append("bridge")  # not every kernel has it, and only bridges need it
    # Declared first, so that a table can be deleted whether it was there or not.
    text = "".join(f"table {family} {TABLE}\ndelete table {family} {TABLE}\n" for family in families)
    if plan.interfaces:
        text += _layer3(plan.interfaces)
    return text + _layer2(bridges) if bridges else text


def _layer3(interfaces: Sequence[Interface]) -> str:
    elements = ",\n".join(f'\t\t\t"{one.name}" comment "{one.kind} {one.addresses}"' for one in interfaces)
    counters = "\n".join(f"\tcounter {name} {{ }}" for name in COUNTERS)
    names = ", ".join(f'"{one.name}"' for one in interfaces)
    counters += "".join(f"\n\tset {name}_by {{ type ifname; counter; elements = {{ {names} }}; }}" for name in DROPS)
    return f"""table inet {TABLE} {{
{counters}

	set sandboxes {{
		type ifname
		elements = {{
{elements}
		}}
	}}

	chain source {{
		type filter hook prerouting priority raw; policy accept;
		iifname != @sandboxes accept
		icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} ip6 hoplimit 255 accept
{_lines(_source(one) for one in interfaces)}
		iifname @spoofed_by
		counter name spoofed drop
	}}

	chain capture {{
		type nat hook prerouting priority dstnat - 10; policy accept;
		iifname != @sandboxes accept
		meta l4proto {{ tcp, udp }} th dport 53 counter name lookups redirect to :{DNS_PORT}
		tcp dport 853 accept
{_lines(_proxy(one) for one in interfaces)}
		meta l4proto tcp counter name captured redirect to :{CAPTURED_PORT}
	}}

	chain ours {{
		icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} ip6 hoplimit 255 accept
		ct status dnat meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept
		ct status dnat tcp dport {CAPTURED_PORT} accept
{_lines(_proxy(one) for one in interfaces)}
	}}

	chain refuse {{
		type filter hook prerouting priority dstnat + 10; policy accept;
		iifname != @sandboxes accept
		jump ours
		tcp dport 853 iifname @dot_by
		tcp dport 853 counter name dot reject with tcp reset
		udp dport 443 iifname @quic_by
		udp dport 443 counter name quic drop
		meta l4proto udp iifname @datagrams_by
		meta l4proto udp counter name datagrams drop
		meta l4proto {{ icmp, ipv6-icmp }} iifname @pings_by
		meta l4proto {{ icmp, ipv6-icmp }} counter name pings drop
		iifname @other_by
		counter name other drop
	}}

	chain host {{
		type filter hook input priority filter - 10; policy accept;
		iifname != @sandboxes accept
		jump ours
		iifname @host_by
		counter name host drop
	}}

	chain passing {{
		type filter hook forward priority filter - 10; policy accept;
		iifname @forwarded_by
		iifname @sandboxes counter name forwarded drop
		oifname @inward_by
		oifname @sandboxes counter name inward drop
	}}
}}
"""


def _source(one: Interface) -> list[str]:
    """A packet's source lies in the interface's subnet, is not our own end of it, and is routed back the same way."""
    return [
        f'iifname "{one.name}" {family} saddr {gateway.network} {family} saddr != {gateway.ip} '
        "fib saddr . iif oif exists accept"
        for gateway in one.gateways
        for family in (_FAMILY[gateway.version],)
    ]


def _proxy(one: Interface) -> list[str]:
    return [
        f'iifname "{one.name}" {_FAMILY[gateway.version]} daddr {gateway.ip} tcp dport {PROXY_PORT} accept'
        for gateway in one.gateways
    ]


def _layer2(bridges: Sequence[str]) -> str:
    """Nothing goes from one port of a sandbox's bridge to another."""
    names = ", ".join(f'"{name}"' for name in bridges)
    return f"""table bridge {TABLE} {{
	counter between {{ }}

	chain ports {{
		type filter hook forward priority filter; policy accept;
		meta ibrname {{ {names} }} counter name between drop
	}}
}}
"""


_FAMILY: Final = {4: "ip", 6: "ip6"}


def _lines(groups: Iterable[list[str]]) -> str:
    return "\n".join(f"\t\t{line}" for group in groups for line in group)


# --- what the kernel says (`nft -j list ruleset` and the like) ---


def read_plan(document: Any) -> Plan | None:
    """The plan that the kernel's set holds; None where there is no such table. Raises PlanError: not of our making."""
    for entry in _entries(document, "set"):
        if entry.get("name") == "sandboxes" and entry.get("table") == TABLE and entry.get("family") == "inet":
            return Plan.of(_element(one) for one in entry.get("elem", []))
    if any(one.get("name") == TABLE and one.get("family") == "inet" for one in _entries(document, "table")):
        raise PlanError(f"the table {TABLE} has no set of sandboxes", "somebody else changed it; apply the plan anew")
    return None


def _element(said: Any) -> Interface:
    try:
        kind, _, addresses = said["elem"]["comment"].partition(" ")
        if kind not in ("link", "bridge"):
            raise KeyError
        return parse_interface(f"{said['elem']['val']}={addresses}", kind)
    except (KeyError, TypeError, AttributeError):
        raise PlanError("an interface in the kernel's set has no addresses", "apply the whole plan anew") from None


def read_counters(document: Any) -> dict[str, int]:
    """Packets by counter, in the order of COUNTERS, those of the bridge table last."""
    found = {
        str(one["name"]): int(one["packets"]) for one in _entries(document, "counter") if one.get("table") == TABLE
    }
    return {name: found[name] for name in (*COUNTERS, "between") if name in found}


def read_drops(document: Any) -> dict[str, dict[str, int]]:
    """Packets by interface and kind, as the sets of the table count them."""
    found: dict[str, dict[str, int]] = {}
    for one in _entries(document, "set"):
        kind = str(one.get("name")).removesuffix("_by")
        if one.get("table") != TABLE or one.get("family") != "inet" or kind not in DROPS:
            continue
        for element in one.get("elem", []):
            said = element["elem"]
            found.setdefault(str(said["val"]), {})[kind] = int(said["counter"]["packets"])
    return found


def _entries(document: Any, kind: str) -> list[dict[str, Any]]:
    return [entry[kind] for entry in document["nftables"] if kind in entry]
