"""What holds in the sandbox that this runs in, seen from inside: `exeat doctor`, or this file alone with any Python.

Three parts: ways round the gateway (each must lead nowhere), the way through it, and per installed client the variables
that it needs. Every address is one of documentation (RFC 5737, RFC 3849) and every name ends in .invalid (RFC 6761): a
packet that does get out harms nobody. What cannot be shown does not count as held: an address that never answers looks
the same behind a firewall as on the open network.

The result is a claim, also where it is handed to the gateway (`post`), which keeps it for people to see. Whoever
controls a sandbox controls what is said in it, so nothing is armed by it (RULINGS 6.2).
Standard library only, and nothing of ours is imported; the words are those of wire/doctor.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

HELP = "http://exeat.internal"
SECONDS = 3.0
HOLDS, FAILS, UNKNOWN = "holds", "fails", "unknown"

STREAMS = (
    ("direct", "a direct connection", "192.0.2.1", 443),
    ("bare-address", "a bare address in clear text", "198.51.100.1", 80),
    ("other-port", "another port (ssh)", "203.0.113.1", 22),
    ("dot", "DNS over TLS", "192.0.2.53", 853),
    ("direct-ipv6", "a direct connection by IPv6", "2001:db8::1", 443),
)
DATAGRAMS = (
    ("dns-udp", "a DNS server of its own", "192.0.2.53", 53),
    ("quic", "QUIC", "192.0.2.1", 443),
    ("dns-udp-ipv6", "DNS by IPv6", "2001:db8::53", 53),
)
NO_WAY = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EPERM, errno.EACCES, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
)
"""Errors of our own kernel: nothing left."""

CLIENTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "curl": (("CURL_CA_BUNDLE", "SSL_CERT_FILE"), ("https_proxy",), ("http_proxy",)),
    "wget": (("SSL_CERT_FILE",), ("https_proxy",), ("http_proxy",)),
    "git": (("GIT_SSL_CAINFO",), ("https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")),
    "gh": (("SSL_CERT_FILE",), ("https_proxy", "HTTPS_PROXY")),
    "pip": (("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), ("https_proxy", "HTTPS_PROXY", "PIP_PROXY")),
    "uv": (("SSL_CERT_FILE",), ("https_proxy", "HTTPS_PROXY", "ALL_PROXY")),
    "python3": (("SSL_CERT_FILE",), ("REQUESTS_CA_BUNDLE",), ("https_proxy", "HTTPS_PROXY")),
    "aws": (("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"), ("https_proxy", "HTTPS_PROXY")),
    "node": (("NODE_EXTRA_CA_CERTS",), ("NODE_USE_ENV_PROXY", "NODE_OPTIONS"), ("https_proxy", "HTTPS_PROXY")),
    "npm": (("npm_config_cafile", "NODE_EXTRA_CA_CERTS"), ("npm_config_https_proxy", "https_proxy", "HTTPS_PROXY")),
    "pnpm": (("npm_config_cafile", "NODE_EXTRA_CA_CERTS"), ("npm_config_https_proxy", "https_proxy", "HTTPS_PROXY")),
    "yarn": (("YARN_HTTPS_CA_FILE_PATH", "NODE_EXTRA_CA_CERTS"), ("YARN_HTTPS_PROXY", "https_proxy", "HTTPS_PROXY")),
    "go": (("SSL_CERT_FILE",), ("https_proxy", "HTTPS_PROXY")),
    "cargo": (("CARGO_HTTP_CAINFO", "SSL_CERT_FILE"), ("CARGO_HTTP_PROXY", "https_proxy", "HTTPS_PROXY")),
    "docker": (("SSL_CERT_FILE",), ("https_proxy", "HTTPS_PROXY")),
    "java": (("JAVA_TOOL_OPTIONS",),),
    "mvn": (("JAVA_TOOL_OPTIONS",),),
}
"""Of each group one variable must be set; files must hold the gateway's CA (docs/clients.md). `python3` stands for
requests as well. Java reads neither proxy nor CA variables: its options must name a trust store."""
_FILES = re.compile(r"CERT|CA_|CAINFO|cafile")


PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
"""Without any of them, a gateway that is reached captures what goes out."""


class Finding(NamedTuple):
    """One line of the result."""

    what: str
    state: str
    """holds, fails or unknown."""
    why: str
    check: str = ""
    """The word for it in a claim."""
    lacks: tuple[str, ...] = ()
    """Variables that are missing or wrong."""


def examine() -> Iterator[Finding]:
    """Everything, one after the other; takes half a minute where nothing answers."""
    yield interfaces()
    for check, what, address, port in STREAMS:
        yield Finding(f"{what} ({_place(address, port)})", *stream(address, port), check)
    for check, what, address, port in DATAGRAMS:
        yield Finding(f"{what} ({_place(address, port)})", *datagram(address, port), check)
    ca, through = help_host()
    yield through
    yield from clients(os.environ, ca, captured=bool(ca) and not any(map(os.environ.get, PROXIES)))


def interfaces() -> Finding:
    """Whether there is anything but loopback and what `exeat run` makes."""
    others = sorted(name for _, name in socket.if_nameindex() if name not in ("lo", "gate0", "gate1"))
    if others:
        why = f"{', '.join(others)}: something outside must confine it"
        return Finding("network interfaces", UNKNOWN, why, "interfaces")
    return Finding("network interfaces", HOLDS, "none leads out", "interfaces")


def stream(address: str, port: int) -> tuple[str, str]:
    """Connect past every proxy. A documentation address serves nobody, so who accepts is near, and must say no."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        probe.settimeout(SECONDS)
        try:
            probe.connect((address, port))
            probe.sendall(b"GET / HTTP/1.1\r\nHost: doctor.invalid\r\nConnection: close\r\n\r\n")
            answer = probe.recv(4096)
        except socket.timeout:  # noqa: UP041 - its own class before Python 3.10
            return UNKNOWN, "no answer: dropped on the way, or lost outside; from here both look the same"
        except OSError as error:
            if error.errno in NO_WAY:
                return HOLDS, f"no way out ({errno.errorcode[error.errno]})"
            return HOLDS, "refused near by"
    if not answer or b" 4" in answer.split(b"\r\n", 1)[0]:
        return HOLDS, "caught near by and refused"
    return FAILS, "somebody answered"


def datagram(address: str, port: int) -> tuple[str, str]:
    """Send one lookup of a name that cannot exist. An answer comes from near: nobody is at that address."""
    query = struct.pack("!HHHHHH", 0xE8EA, 0x0100, 1, 0, 0, 0) + b"\x06doctor\x07invalid\x00" + struct.pack("!HH", 1, 1)
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.settimeout(SECONDS)
        try:
            probe.connect((address, port))
            probe.send(query)
            probe.recv(4096)
        except socket.timeout:  # noqa: UP041 - its own class before Python 3.10
            return UNKNOWN, "it was sent, and nothing came back: dropped on the way, or lost outside"
        except OSError as error:
            return HOLDS, f"no way out ({errno.errorcode.get(error.errno or 0, 'refused')})"
    return HOLDS, "answered near by: lookups are caught"


def help_host(fetch: Callable[[str], bytes] | None = None) -> tuple[str, Finding]:
    """(the gateway's CA, empty where it cannot be had; whether the way through the gateway works)."""
    what = f"the gateway ({HELP}/)"
    try:
        ca = (fetch or _fetch)(f"{HELP}/ca.pem").decode("ascii", "replace")
    except urllib.error.HTTPError as error:
        why = f"it answers {error.code}: is the proxy URL this sandbox's own?"
        return "", Finding(what, FAILS, why, "gateway")
    except (OSError, ValueError) as error:
        why = f"not reached ({type(error).__name__}): http_proxy is missing or wrong"
        return "", Finding(what, FAILS, why, "gateway")
    if "BEGIN CERTIFICATE" not in ca:
        return "", Finding(what, FAILS, "somebody else answers under this name", "gateway")
    return ca, Finding(what, HOLDS, "reached", "gateway")


def clients(
    environment: Mapping[str, str],
    ca: str,
    which: Callable[[str], str | None] = shutil.which,
    captured: bool = False,
) -> Iterator[Finding]:
    """For each installed client whether it has what it reads; `ca` empty: files are only looked for.

    `captured`: connections reach the gateway by themselves, so that no client needs a proxy variable.
    """
    for name, groups in CLIENTS.items():
        if which(name) is None:
            continue
        needed = [group for group in groups if not captured or "proxy" not in group[0].lower()]
        wrong = {group[0]: problem for group in needed if (problem := _problem(group, environment, ca))}
        why = "; ".join(wrong.values()) or "its variables are set"
        yield Finding(f"client {name}", FAILS if wrong else HOLDS, why, f"client-{name}", tuple(wrong))


def _problem(group: tuple[str, ...], environment: Mapping[str, str], ca: str) -> str:
    name = next((name for name in group if environment.get(name)), None)
    if name is None:
        return f"{group[0]} is missing"
    if not _FILES.search(name):
        return ""
    try:
        with open(environment[name], encoding="ascii", errors="replace") as file:
            held = file.read()
    except OSError as error:
        return f"{name} names a file that cannot be read ({error.strerror})"
    lines = set(held.split())
    if ca and not set(ca.split()) <= lines:
        return f"{name} names a file without the gateway's CA"
    return ""


def claim(found: Iterable[Finding]) -> bytes:
    """What `post` sends: checks, states and names of variables, all of them words of ours."""
    findings = [
        {"check": one.check, "state": one.state, **({"lacks": list(one.lacks)} if one.lacks else {})} for one in found
    ]
    return json.dumps({"version": 1, "findings": findings}).encode()


def post(found: Iterable[Finding]) -> bool:
    """Hand the result to the gateway; whether it took it. Nothing depends on it."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{HELP}/doctor", claim(found), headers, method="POST")  # noqa: S310 - a constant
    try:
        with contextlib.closing(urllib.request.urlopen(request, timeout=10)) as answer:  # noqa: S310 - the same
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def _fetch(url: str) -> bytes:
    with contextlib.closing(urllib.request.urlopen(url, timeout=10)) as answer:  # noqa: S310 - a constant http URL
        return bytes(answer.read(1 << 20))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def main() -> int:
    """For this file alone: one line a finding; exits 1 unless everything holds."""
    found = []
    for finding in examine():
        print(f"{finding.state:8} {finding.what}: {finding.why}", flush=True)  # noqa: T201 - the result itself
        found.append(finding)
    print(CLAIM + (KEPT if post(found) else ""))  # noqa: T201 - the result itself
    return 0 if all(finding.state == HOLDS for finding in found) else 1


CLAIM = "claimed  this is what the sandbox says of itself; it arms no credential"
KEPT = "; the gateway has taken note of it"

if __name__ == "__main__":
    raise SystemExit(main())
