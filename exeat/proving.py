"""Whether a sandbox's network namespace has a way out past us, found out by trying (I28, RULINGS 6.2).

`prove` starts exeat/probe.py in the namespace and judges what became of each try. Its rules:

    captured       a connection ends at our worker, which proves that it holds the sandbox's channel key; a lookup is
                   answered from the stub's range; every other datagram and ping is turned down by our own kernel
    not captured   everything is turned down by our own kernel: there is nothing but loopback
    on an interface that the host captures (docs/capture.md): a connection ends at us; a lookup is answered from the
                   stub's range; whatever else was sent, nobody answers it: the caller has compared the host's rules;
                   a second interface that is up is not tried, and nothing is proven
    always         the namespace is not this one; it holds the interfaces and rules that we made, and no others; nothing
                   listens for us there: listeners of this machine's loopback and a socket with an abstract name, open
                   while the probe runs, hear nothing

What passed is a way out. What stayed without a sign proves nothing: a busy machine is no hole, and no proof either.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Final

from capture import inside
from exeat import probe
from exeat.boundary import CaptureTools
from exeat.launch import ListenerKind, boot_document
from exeat.principals import PROBE_UID
from net.interfaces import local_addresses
from net.stream import NetError
from wire.dns import answer
from wire.probe import MARK, NONCE_BYTES, PROOF_BYTES, proof

PROBE_SECONDS: Final = 8.0
"""For all tries together; they run at once."""
PROCESS_SECONDS: Final = 30.0
HOST_ADDRESSES: Final = 8
"""Addresses of this machine that are tried."""
_STUB: Final = IPv4Network("198.18.0.0/15")
_PAIR: Final = {(inside.INTERFACE, inside.OTHER_END, ""), (inside.OTHER_END, inside.INTERFACE, "")}

WAYS: Final = (
    "namespace interfaces rules direct direct-ipv6 bare-address other-port dot dns-tcp metadata neighbour dns-udp "
    "dns-udp-ipv6 quic quic-ipv6 icmp icmp-ipv6 host-address host-loopback host-loopback-ipv6 host-socket"
).split()
"""Every way that is tried, by the names that records and messages use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespaces:
    """What the probe enters: descriptors, and how what is inside was made."""

    net: int
    user: int
    tools: CaptureTools | None
    """Of the capture in it; None where it holds loopback alone."""
    channel_key: bytes
    hosted: bool = False
    """Something else made it, and this machine captures the interface that leads to it."""
    answering: bool = True
    """Whether a captured connection can be answered with the proof now. If not, none is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a probe found. Proven where neither holds anything. Names are those of WAYS."""

    passed: tuple[str, ...]
    """Ways out."""
    unclear: tuple[str, ...]
    """Ways of which nothing was seen; `probe` where the probe itself gave no result."""

    @property
    def proven(self) -> bool:
        """Every way was tried, and none leads out."""
        return not self.passed and not self.unclear


def prove(namespaces: Namespaces, *, seconds: float = PROBE_SECONDS) -> Proof:
    """Try every way out of `namespaces`. Blocks for up to PROCESS_SECONDS; never raises for what the probe does."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    with _Canaries() as canaries:
        try:
            found = _run(_plan(namespaces, canaries, nonce, seconds), namespaces)
        except (OSError, NetError, ValueError, subprocess.SubprocessError):
            return Proof(passed=tuple(canaries.heard(nonce)), unclear=("probe",))
        return judge(found, namespaces, nonce, list(canaries.heard(nonce)))


def _run(plan: Mapping[str, Any], namespaces: Namespaces) -> Mapping[str, Any]:
    document = boot_document(plan)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-m", "exeat.probe", str(document)],
            pass_fds=(document, *(fd for fd in (namespaces.net, namespaces.user) if fd >= 0)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            timeout=PROCESS_SECONDS,
            check=True,
            start_new_session=True,
        )
    finally:
        os.close(document)
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def judge(found: Mapping[str, Any], namespaces: Namespaces, nonce: bytes, heard: list[str]) -> Proof:
    """What the result `found` of exeat/probe.py means; `heard` names the canaries that were reached."""
    host = os.stat("/proc/thread-self/ns/net")
    captured = namespaces.tools is not None or namespaces.hosted
    interfaces = {tuple(entry) for entry in found["interfaces"] if entry[0] != "lo"}
    passed = [*heard]
    if found["namespace"] == [host.st_dev, host.st_ino]:
        passed.append("namespace")
    if not namespaces.hosted and interfaces != (_PAIR if captured else set()):
        passed.append("interfaces")
    if found["rules"] is not True:
        passed.append("rules")
    unclear: list[str] = []
    if namespaces.hosted and len(found["up"]) > 1:
        unclear.append("interfaces")  # what lies behind another one is in no route that is tried
    tries: Mapping[str, tuple[str, str]] = found["tries"]
    for name in sorted(_wanted(namespaces.answering) - tries.keys()):
        unclear.append(name)
    for name, (outcome, seen) in tries.items():
        way = "host-address" if name.startswith("host-address-") else name
        answered, ours = bytes.fromhex(seen), proof(namespaces.channel_key, nonce)
        state = (
            _hosted(way, outcome, answered, ours)
            if namespaces.hosted
            else _state(way, outcome, answered, captured, ours)
        )
        if state == "passed":
            passed.append(way)
        elif state == "unclear":
            unclear.append(way)
    return Proof(passed=tuple(dict.fromkeys(passed)), unclear=tuple(dict.fromkeys(unclear)))


def _wanted(streams: bool) -> set[str]:
    tried = (*(probe.STREAMS if streams else ()), *probe.DATAGRAMS, *probe.PINGS)
    return {name for name, *_ in tried} | {"host-socket"}


def _state(way: str, outcome: str, seen: bytes, captured: bool, wanted: bytes) -> str:
    if outcome == probe.REFUSED:
        return "held"
    if way.startswith(("host-loopback", "host-socket")):
        return "held"  # who answers on loopback is inside, unless a canary heard it
    if not captured:
        return "passed"
    if way.startswith(("quic", "icmp")):
        return "passed"
    if way.startswith("dns-udp"):
        return "unclear" if not seen else "held" if _from_the_stub(seen) else "passed"
    if compare_digest(seen[:PROOF_BYTES], wanted):
        return "held"
    return "passed" if seen else "unclear"


def _hosted(way: str, outcome: str, seen: bytes, wanted: bytes) -> str:
    """Behind an interface of the host: what leaves the namespace is the host's to drop, and its rules are compared."""
    if outcome == probe.REFUSED or way.startswith(("host-loopback", "host-socket")):
        return "held"
    if way.startswith("dns-udp"):
        return "unclear" if not seen else "held" if _from_the_stub(seen) else "passed"
    if way in ("quic", "quic-ipv6"):
        return "passed" if seen else "held"
    if way in ("icmp", "icmp-ipv6"):
        return "held"  # a raw socket hears every ping in its namespace, its own kernel's as well: nothing to read there
    if compare_digest(seen[:PROOF_BYTES], wanted):
        return "held"
    # Nobody took it: dropped or reset on the way, as the rules say for what is not redirected.
    return "passed" if seen or outcome == probe.CONNECTED else "unclear" if way == "direct" else "held"


def _from_the_stub(answer: bytes) -> bool:
    """Whether the last four bytes are an address that only our stub resolver gives (proxy/stubdns.py)."""
    return len(answer) >= 16 and IPv4Address(answer[-4:]) in _STUB


def _plan(namespaces: Namespaces, canaries: _Canaries, nonce: bytes, seconds: float) -> dict[str, Any]:
    root = os.geteuid() == 0
    tools = namespaces.tools
    return {
        "net": namespaces.net,
        "user": -1 if root else namespaces.user,
        "uid": PROBE_UID if root else -1,
        "tools": None if tools is None else {"ip": tools.ip, "nft": tools.nft},
        "ruleset": inside.ruleset(MARK),
        "mark": MARK,
        "nonce": nonce.hex(),
        "hosts": [[address, 22] for address in _own_addresses()],
        "streams": namespaces.answering,
        "canaries": canaries.places,
        "abstract": canaries.abstract,
        "seconds": seconds,
    }


def _own_addresses() -> list[str]:
    """Addresses of this machine by which others reach it; what is local to a link needs a zone, and has none here."""
    found = []
    for address in sorted(local_addresses(), key=str):
        if not address.is_loopback and not address.is_link_local:
            found.append(str(address))
    return found[:HOST_ADDRESSES]


@contextlib.contextmanager
def answering(listeners: Sequence[tuple[ListenerKind, socket.socket]], channel_key: bytes) -> Iterator[None]:
    """Play the worker on the sockets of a captured interface while they are still ours: the proof, and the stub."""
    ended = threading.Event()
    with selectors.DefaultSelector() as selector:
        for use, listener in listeners:
            if use != "proxy":
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ, use)
        thread = threading.Thread(target=_answer, args=(selector, ended, channel_key), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _answer(selector: selectors.BaseSelector, ended: threading.Event, channel_key: bytes) -> None:
    while not ended.is_set():
        for key, _ in selector.select(0.1):
            listener = key.fileobj
            assert isinstance(listener, socket.socket)
            with contextlib.suppress(OSError, ValueError):
                if key.data == "dns-udp":
                    query, peer = listener.recvfrom(512)
                    if said := answer(query, lambda _: str(_STUB[1])):
                        listener.sendto(said, peer)
                    continue
                stream, _ = listener.accept()
                with stream:
                    stream.settimeout(1.0)
                    stream.sendall(proof(channel_key, stream.recv(NONCE_BYTES, socket.MSG_WAITALL)))


class _Canaries:
    """Listeners in this network namespace that nobody in another one can reach. A context manager."""

    def __init__(self) -> None:
        self._open: list[tuple[str, socket.socket]] = []
        self.places: list[list[Any]] = []
        """[name, address, port] for the probe."""
        self.abstract = f"exeat-canary-{secrets.token_hex(16)}"

    def __enter__(self) -> _Canaries:
        for name, address in (("host-loopback", "127.0.0.1"), ("host-loopback-ipv6", "::1")):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):  # no IPv6 here
                listener = self._add(name, socket.socket(family), (address, 0))
                self.places.append([name, address, int(listener.getsockname()[1])])
        self._add("host-socket", socket.socket(socket.AF_UNIX), "\0" + self.abstract)
        return self

    def _add(self, name: str, listener: socket.socket, address: Any) -> socket.socket:
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        listener.listen(16)
        listener.setblocking(False)
        self._open.append((name, listener))
        return listener

    def __exit__(self, *raised: object) -> None:
        for _, listener in self._open:
            listener.close()

    def heard(self, nonce: bytes) -> Iterator[str]:
        """Names of those that the probe with this nonce reached."""
        for name, listener in self._open:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.settimeout(1.0)
                        if compare_digest(peer.recv(NONCE_BYTES), nonce):
                            yield name
                            break
