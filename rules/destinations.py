"""`destinations:`: what belongs to a host and not to a rule (RULINGS 3.7).

    destinations:
      orders.shop.example: {addresses: [10.20.0.0/16], ca: "file:corp-root.pem", port: 8443, scheme: https,
                            resolve: [10.20.0.7], sni: optional}

`addresses` is the only exception to the address table; `resolve` replaces DNS and must lie within it. `sni: optional`
lets clients in that name no server in their TLS handshake: the tunnel, or the looked-up name, then stands alone.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import cast, get_args

from rules.names import OWN_NAME, Host, InvalidName, Scheme
from rules.policy import DestinationDef, Sni
from rules.reader import Node, shown

CaFiles = Callable[[str], str]
"""Reads the PEM text of a `ca: file:` path; raises OSError or ValueError."""

_PEM = "-----BEGIN CERTIFICATE-----"
MAX_PEM = 256 << 10


def read_destinations(node: Node, ca_files: CaFiles | None) -> dict[str, DestinationDef]:
    """Return the entries by host text. Problems are noted."""
    found: dict[str, DestinationDef] = {}
    for text, entry in node.entries():
        with node.problems.collecting():
            host = _host(text, entry)
            if host.text in found:
                entry.fail(f"{host.text} stands here twice", on_key=True)
            found[host.text] = _destination(host, entry, ca_files)
    return found


def _host(text: str, node: Node) -> Host:
    try:
        host = Host.parse(text)
    except InvalidName as error:
        node.fail(f"{shown(text)}: {error}; a destination is one exact host", on_key=True)
    if host.text == OWN_NAME or host.text.endswith("." + OWN_NAME):
        node.fail(f"{OWN_NAME} is decided before policy", on_key=True)
    return host


def _destination(host: Host, node: Node, ca_files: CaFiles | None) -> DestinationDef:
    fields = node.fields("", "addresses resolve ca port scheme sni")
    if not fields:
        node.fail("the entry says nothing; leave it out")
    addresses = _addresses(fields["addresses"]) if "addresses" in fields else ()
    static = _static(fields["resolve"], addresses) if "resolve" in fields else ()
    scheme = cast("Scheme", fields["scheme"].word(("https", "http")) if "scheme" in fields else "https")
    if scheme == "http" and "ca" in fields:
        fields["ca"].fail("a CA means nothing with scheme: http", on_key=True)
    if "sni" in fields and (scheme == "http" or host.is_literal):
        why = "with scheme: http" if scheme == "http" else "for an address: its clients have no server name to send"
        fields["sni"].fail(f"sni means nothing {why}", on_key=True)
    return DestinationDef(
        host=host,
        port=fields["port"].natural(1, 65535) if "port" in fields else None,
        scheme=scheme,
        addresses=addresses,
        static=static,
        ca_pem=_ca(fields["ca"], ca_files) if "ca" in fields else None,
        sni=cast("Sni", fields["sni"].word(get_args(Sni))) if "sni" in fields else "required",
    )


def _addresses(node: Node) -> tuple[IPv4Network | IPv6Network, ...]:
    found: list[IPv4Network | IPv6Network] = []
    for item in node.items(empty="an empty list of addresses allows none; leave it out"):
        try:
            network = ip_network(item.text(), strict=True)
        except ValueError:
            item.fail("expected a network such as 10.20.0.0/16 or an address such as 10.20.0.7, host bits zero")
        if network.prefixlen == 0:
            item.fail("every address would be allowed; name the networks")
        found.append(network)
    return tuple(found)


def _static(node: Node, addresses: tuple[IPv4Network | IPv6Network, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for item in node.items(empty="an empty list resolves to nothing; leave it out"):
        try:
            address = ip_address(item.text())
        except ValueError:
            item.fail("expected an IP address")
        if not any(address in network for network in addresses):
            item.fail(f"{address} does not lie in addresses: of this destination")
        found.append(str(address))
    return tuple(found)


def _ca(node: Node, ca_files: CaFiles | None) -> str:
    if not isinstance(node.value, str) or not node.value.startswith("file:"):
        node.fail("expected file: and the path of a PEM file")
    path = node.text().removeprefix("file:")
    if ca_files is None:
        node.fail("no file can be read here")
    try:
        pem = ca_files(path)
    except (OSError, ValueError):
        node.fail(f"{shown(path)} cannot be read")
    if _PEM not in pem or "PRIVATE KEY" in pem or len(pem) > MAX_PEM:
        node.fail(f"{shown(path)} does not hold PEM certificates alone")
    return pem
