"""The operator's own proxy between this gateway and the world: who goes through it, and how it is asked (RULINGS 5.4).

Rules:

- Where it is set, every destination goes through it by name, except the hosts that the operator listed. There is no
  other way to fall back to: a proxy that refuses, is silent or is down is a refusal.
- Its resolver is out of our sight, so addresses there cannot be vetted, and every record says `delegated`. What must
  not be reached is therefore refused by name: address literals and names that are special or internal by custom. A
  destination that the policy ties to addresses is refused as well, because nobody would keep to them.
- What it answers is hostile input: one bounded head, and only `200` opens the tunnel. No body of it is read, none of
  its text is kept; a byte after its head, before anybody spoke inside, ends the connection.
- Its password goes into the CONNECT head and nowhere else.

Proxy variables of the environment are not read here or anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from net.stream import ByteStream, NetError
from rules.names import Destination, Host
from wire.heads import HeadRefused, parse_response_head

DELEGATED = "delegated"
"""The address of everything that went, or would have gone, through the proxy (audit: `address`)."""

MAX_PROXY_HEAD = 16 * 1024
MAX_PROXY_HEADERS = 64

SPECIAL_USE = frozenset(
    # Special-use names (RFC 6761 and its registry, RFC 6762, 7686, 8375, 9476; `internal`: ICANN, 2024).
    {"localhost", "local", "internal", "arpa", "test", "example", "invalid", "onion", "alt"}
    # What is used inside networks by custom (RFC 6762, appendix G) and inside clusters.
    | {"localdomain", "intranet", "private", "corp", "home", "lan", "cluster", "svc"}
)
"""Last labels that a foreign resolver must not be asked for on a sandbox's behalf: they name places inside."""


class ProxyRefused(NetError):
    """The proxy did not open a tunnel. str() is a sentence of ours for the operator; it holds none of the proxy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamProxy:
    """One forward proxy. Part of the boot documents of those processes that dial."""

    host: str
    """A name or a numeric address (IPv6 without brackets)."""
    port: int
    authorization: bytes = field(default=b"", repr=False)
    """The value of Proxy-Authorization; empty: it asks for none."""
    ca_pem: str | None = field(default=None, repr=False)
    """Believed for every destination reached through it, beside what is believed anyway: it may inspect TLS."""
    direct: tuple[str, ...] = ()
    """Hosts dialled without it: `name`, `*.name` (everything below) or an address, canonical."""

    @property
    def name(self) -> str:
        """`host:port`, for pool keys and messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def place(self) -> Host:
        """Raises InvalidName for what settings would not have taken."""
        return Host.of(self.host)

    def carries(self, host: Host) -> bool:
        """Whether `host` is reached through the proxy."""
        if host.text in self.direct:
            return False
        return host.is_literal or not any(
            entry.startswith("*.") and host.text.endswith(entry[1:]) for entry in self.direct
        )


def why_not_by_name(host: Host) -> str | None:
    """A sentence where `host` must not be named to a foreign resolver, else None."""
    if host.is_literal:
        return "an address cannot be vetted behind the upstream proxy"
    labels = host.text.split(".")
    if len(labels) < 2 or labels[-1] in SPECIAL_USE:
        return "a special-use name is not asked of the upstream proxy"
    return None


async def ask_for_tunnel(stream: ByteStream, destination: Destination, authorization: bytes) -> None:
    """CONNECT to `destination` by name; returns when `stream` leads there. Raises ProxyRefused, StreamBroken.

    The caller bounds the time, and aborts the stream after any error.
    """
    authority = f"{destination.host.authority}:{destination.port}".encode("ascii")
    head = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n" % (authority, authority)
    if authorization:
        head += b"Proxy-Authorization: %b\r\n" % authorization
    stream.write(head + b"\r\n")
    await stream.drain()
    status = await _read_answer(stream)
    if status == 407:
        what = "does not accept upstream.credential" if authorization else "asks for a credential"
        raise ProxyRefused(f"the upstream proxy {what} (407)")
    if status != 200:
        raise ProxyRefused(f"the upstream proxy answered {status}")


async def _read_answer(stream: ByteStream) -> int:
    """The status of the one head that the proxy sends. Raises ProxyRefused, StreamBroken."""
    got = bytearray()
    while (end := got.find(b"\r\n\r\n")) < 0:
        if len(got) >= MAX_PROXY_HEAD:
            raise ProxyRefused("the upstream proxy's answer is too long")
        piece = await stream.receive(MAX_PROXY_HEAD - len(got))
        if not piece:
            raise ProxyRefused("the upstream proxy closed the connection without an answer")
        got += piece
    try:
        status = parse_response_head(bytes(got[: end + 4]), max_headers=MAX_PROXY_HEADERS).status
    except HeadRefused:
        raise ProxyRefused("the upstream proxy's answer is not an HTTP head") from None
    if status == 200 and len(got) > end + 4:
        raise ProxyRefused("the upstream proxy sent bytes after its answer")
    return status
