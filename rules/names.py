"""Small types for the names that cross room borders, so that two strings are never swapped.

`Host.parse` is the only normaliser of host names and addresses in the project (RULINGS: case and one
trailing dot are normalised, everything else that is not already canonical is refused, never repaired).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NewType

import idna

TenantId = NewType("TenantId", str)
SandboxId = NewType("SandboxId", str)
"""`sb_` and 16 characters of [a-z2-7]. Opaque; never reused."""
RuleId = NewType("RuleId", str)
"""`role/name`; `everyone/name` for rules that bind every role."""
CredentialRef = NewType("CredentialRef", str)
"""The name of a credential in credentials.yaml."""
RequestId = NewType("RequestId", str)
"""`req_` and 20 characters of [a-z2-7]; one per judged request, shared by all its records."""
type Owner = tuple[str, str]
"""(tenant, sandbox): whose share, budget or record something is."""

Scheme = Literal["http", "https"]
DEFAULT_PORTS: Mapping[str, int] = {"http": 80, "https": 443}
"""Scheme -> the port that an authority leaves out."""

OWN_NAME = "exeat.internal"
"""The help host. Decided before policy; never resolved, never dialled."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)\Z")
_NUMERIC_LAST = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]+)\Z")


class InvalidName(ValueError):
    """A host, port or authority that is not canonical enough to be judged. str() is a fixed sentence."""


class LocalName(InvalidName):
    """The client's own machine by name; nothing of ours goes there."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host name in A-label form, lower case, without trailing dot; or an IP literal in its one spelling.

    `text` is what is compared, logged and dialled. `is_literal` marks addresses (IPv6 without brackets).
    """

    text: str
    is_literal: bool = False

    @classmethod
    def parse(cls, raw: str) -> Host:
        """Return the canonical host for `raw` (no port; IPv6 literals in brackets).

        Raises InvalidName for anything that is not one DNS name or one address in canonical spelling:
        empty or over 253 characters, single labels, NUL, percent, spaces, userinfo, legacy IPv4 spellings
        (decimal, octal, hex, short), bracket misuse, zone ids, U-labels that IDNA 2008 refuses.
        """
        if not raw or len(raw) > 300:
            raise InvalidName("host name is empty or too long")
        if raw.startswith("["):
            if not raw.endswith("]") or "%" in raw:
                raise InvalidName("brackets are for one IPv6 address")
            try:
                return cls(str(ipaddress.IPv6Address(raw[1:-1])), True)
            except ValueError:
                raise InvalidName("brackets are for one IPv6 address") from None
        name = raw[:-1] if raw.endswith(".") else raw
        if not name.isascii():
            try:
                # IDNA 2008 without UTS 46 mappings: full-width letters, ideographic dots and the Kelvin sign are
                # refused, not repaired. Case is the one thing that is normalised.
                if any(not char.isascii() and char.lower().isascii() for char in name):
                    raise InvalidName("not a valid international domain name")
                name = idna.encode(name.lower(), strict=True).decode("ascii")
            except (idna.IDNAError, UnicodeError):
                raise InvalidName("not a valid international domain name") from None
        name = name.lower()
        if len(name) > 253:
            raise InvalidName("host name is empty or too long")
        labels = name.split(".")
        if _NUMERIC_LAST.match(labels[-1]):
            try:
                address = ipaddress.IPv4Address(name)
            except ValueError:
                raise InvalidName("numeric host that is not a canonical IPv4 address") from None
            return cls(str(address), True)
        if labels[-1] == "localhost":
            raise LocalName("localhost is the client's own machine")  # RFC 6761 section 6.3
        if len(labels) < 2:
            raise InvalidName("single-label names are not looked up")
        if not all(_LABEL.match(label) for label in labels):
            raise InvalidName("not a host name")
        for label in labels:
            if label.startswith("xn--"):
                try:
                    canonical = idna.encode(idna.decode(label)).decode("ascii")
                except (idna.IDNAError, UnicodeError):
                    canonical = ""
                if canonical != label:
                    raise InvalidName("not a valid international domain name")
        return cls(name)

    @classmethod
    def of(cls, text: str) -> Host:
        """The host with this `text`, IPv6 without brackets, as values of ours hold it. Raises InvalidName."""
        return cls.parse(f"[{text}]" if ":" in text else text)

    @property
    def authority(self) -> str:
        """The form used in a Host header: IPv6 in brackets."""
        return f"[{self.text}]" if ":" in self.text else self.text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes: scheme, host and port. Equal destinations are the same place."""

    scheme: Scheme
    host: Host
    port: int

    @property
    def authority(self) -> str:
        """`host` or `host:port` as a Host header spells it for this scheme."""
        return self.host.authority if self.port == DEFAULT_PORTS[self.scheme] else f"{self.host.authority}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def parse_port(raw: str) -> int:
    """Return the TCP port in `raw` (1-65535, no sign, no leading zero). Raises InvalidName."""
    if not raw.isascii() or not raw.isdigit() or len(raw) > 5 or raw.startswith("0") or int(raw) > 65535:
        raise InvalidName("not a port")
    return int(raw)


def parse_authority(raw: str, default_port: int | None) -> tuple[Host, int]:
    """Split `host[:port]` and return (Host, port); `default_port` None makes the port mandatory.

    Raises InvalidName; userinfo (`@`) is refused here because it is not a host character.
    """
    if raw.startswith("["):
        end = raw.find("]")
        host, rest = raw[: end + 1], raw[end + 1 :]
        if end < 0 or (rest and not rest.startswith(":")):
            raise InvalidName("brackets are for one IPv6 address")
        port_text = rest[1:] if rest else None
    else:
        host, colon, after = raw.partition(":")
        port_text = after if colon else None
    if port_text is None:
        if default_port is None:
            raise InvalidName("a port is required")
        return Host.parse(host), default_port
    return Host.parse(host), parse_port(port_text)
