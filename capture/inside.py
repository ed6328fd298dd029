"""Transparent capture inside a sandbox's own network namespace (RULINGS 11.9): nothing leads out, all leads to us.

A veth pair with both ends inside gives the default routes something to point at. The output hook redirects every TCP
connection to the capturing listener and every DNS query to the stub; what remains is dropped and counted. No
interface has another end outside, so the rules can fail and still nothing leaves.
"""

from __future__ import annotations

TABLE = "exeat"
CLASSES = ("quic", "datagrams", "pings", "other")
"""Counters of what was dropped, by kind; `refused` counts them all."""
_KERNELS_OWN = "nd-router-solicit, nd-neighbor-solicit, nd-neighbor-advert, mld-listener-report, mld2-listener-report"
CAPTURE_PORT = 3129
DNS_PORT = 53
INTERFACE, OTHER_END = "gate0", "gate1"
ADDRESS, ADDRESS6 = "198.19.255.254", "fd65:7865:6174::1"
"""Of RFC 2544's and of a unique local range; they only have to be somebody's source address."""


def commands(ip: str) -> list[list[str]]:
    """The `ip` commands that make the pair and the routes, in order. `ip` is the absolute path of iproute2's tool."""
    return [
        [ip, "link", "add", INTERFACE, "type", "veth", "peer", "name", OTHER_END],
        [ip, "addr", "add", f"{ADDRESS}/32", "dev", INTERFACE],
        [ip, "-6", "addr", "add", f"{ADDRESS6}/128", "dev", INTERFACE, "nodad"],
        [ip, "link", "set", INTERFACE, "up"],
        [ip, "link", "set", OTHER_END, "up"],
        [ip, "route", "add", "default", "dev", INTERFACE],
        [ip, "-6", "route", "add", "default", "dev", INTERFACE],
    ]


def ruleset(probe_mark: int) -> str:
    """The `nft -f` text. DNS first, because a resolver address may be loopback; then everything that would leave.

    What is marked `probe_mark` is a probe's of ours (no sandbox can mark), and what the kernel itself says to
    neighbours and routers is nobody's try: both are dropped without being counted.
    """
    counters = "\n".join(f"    counter {name} {{ }}" for name in ("refused", *CLASSES))
    return f"""table inet {TABLE} {{
{counters}
    chain to_gateway {{
        type nat hook output priority -100; policy accept;
        udp dport {DNS_PORT} redirect to :{DNS_PORT}
        tcp dport {DNS_PORT} redirect to :{DNS_PORT}
        oifname "lo" return
        meta l4proto tcp redirect to :{CAPTURE_PORT}
    }}
    chain leaving {{
        type filter hook output priority 0; policy drop;
        oifname "lo" accept
        ct status dnat accept
        meta mark {probe_mark:#010x} drop
        icmpv6 type {{ {_KERNELS_OWN} }} drop
        udp dport 443 counter name quic
        udp dport != 443 counter name datagrams
        meta l4proto {{ icmp, ipv6-icmp }} counter name pings
        meta l4proto != {{ udp, icmp, ipv6-icmp }} counter name other
        counter name refused
    }}
}}
"""
