"""Which certificate authorities an upstream connection believes: the system store, or a destination's own CA.

Rules (RULINGS 5.3): there is no global off switch and no merged store. A destination without `ca:` is verified
against the system roots; a destination with `ca:` against exactly those certificates, so an extra CA can vouch for
no other host and a public CA cannot vouch for an internal one. Only the operator's upstream proxy may add one: it
may inspect TLS, and then signs for every host reached through it (`added_pem`, RULINGS 5.4).
"""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from net.stream import NetError

SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # Alpine, BSD, macOS
)


class TrustUnusable(NetError):
    """No certificate authority can be read from where it was promised. str() is a fixed sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustKey:
    """One trust set. `ca_pem` None is the system store. Equal keys share one TLS context and may share connections."""

    ca_pem: str | None = field(default=None, repr=False)
    added_pem: str | None = field(default=None, repr=False)
    """Believed as well: the upstream proxy's own authority. Set by the dialer for what goes through it, only."""

    @property
    def name(self) -> str:
        """`system`, or the SHA-256 of the PEM text: what records and pool keys show."""
        own = "system" if self.ca_pem is None else hashlib.sha256(self.ca_pem.encode()).hexdigest()
        return own if self.added_pem is None else f"{own}+{hashlib.sha256(self.added_pem.encode()).hexdigest()}"


SYSTEM_TRUST = TrustKey()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProof:
    """A client certificate for the connections of one call. Equal ones may share a connection: the digest decides."""

    digest: str
    """SHA-256 of the PEM, in hex."""
    pem: bytes = field(repr=False, compare=False)
    """The key, unencrypted, and the chain, the leaf first."""

    @classmethod
    def of(cls, key_pem: bytes, chain_pem: bytes) -> ClientProof:
        pem = key_pem.rstrip() + b"\n" + chain_pem
        return cls(digest=hashlib.sha256(pem).hexdigest(), pem=pem)


def system_bundle(candidates: tuple[str, ...] = SYSTEM_BUNDLES) -> Path:
    """Return the file that holds the machine's root certificates. Raises TrustUnusable where there is none.

    Well-known places come before what this interpreter was built with: portable builds carry a path of the machine
    they were built on. Environment variables (SSL_CERT_FILE) are not read: children start with an empty environment,
    and a variable must not widen trust.
    """
    compiled = ssl.get_default_verify_paths().openssl_cafile
    for candidate in (*candidates, compiled):
        path = Path(candidate)
        if path.is_file():
            return path
    raise TrustUnusable("no system certificate bundle was found; install the package ca-certificates")


def system_bundle_pem() -> str:
    """The system roots as PEM text, for the bundle that clients get (system roots and ours)."""
    return system_bundle().read_text(encoding="utf-8", errors="strict")
