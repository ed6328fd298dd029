"""The installation's certificate authority: one root, one intermediate per node, leaves for workers (RULINGS 5.5).

Rules:

- All keys are EC P-256; every certificate passes OpenSSL's strict X.509 checks (RFC 5280: critical basic constraints
  and key usage, subject and authority key identifiers, names only in the subject alternative name).
- The root may be kept offline: `load` works without its key, and minting needs only the node's.
- A leaf is for one host and for a key that a worker made itself; the vault never holds a leaf's private key.
- Leaves are backdated by 24 h (sandboxes whose clock is behind) and live under 200 days, never past their issuer.
- The node intermediate has path length 0, so that it cannot make another authority.

Rate limiting and recording of minted leaves belong to the vault's service; time is passed in.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rules.names import Host

ROOT_DAYS = 3650
NODE_DAYS = 730
LEAF_DAYS = 90
BACKDATE = datetime.timedelta(hours=24)
_MAX_COMMON_NAME = 64  # X.520 ub-common-name

PEM_PARTS = ("root_cert", "root_key", "node_cert", "node_key")
"""Names of the parts in `load` and `unsafe_export`. `root_key` may be missing."""


class AuthorityError(Exception):
    """The authority cannot be loaded, or cannot sign this. str() is a fixed sentence without key material."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateAuthority:
    """Root certificate and this node's intermediate with its key. Made by `create`, `load` or `renew_node`."""

    root: x509.Certificate
    node: x509.Certificate
    _node_key: ec.EllipticCurvePrivateKey = field(repr=False)
    _root_key: ec.EllipticCurvePrivateKey | None = field(repr=False, default=None)

    @classmethod
    def create(cls, *, now: float, installation: str, node: str) -> CertificateAuthority:
        """Make a new root and node intermediate. `now` is Unix time.

        `installation` and `node` are short public labels (letters, digits, `-`, `.`) shown in certificate viewers;
        two installations should differ in them, so that a person can tell their roots apart.
        """
        root_key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"Exeat root {_label(installation)}")
        start = _time(now) - BACKDATE
        root = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(root_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + datetime.timedelta(days=ROOT_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(root_key.public_key()), critical=False)
            .sign(root_key, hashes.SHA256())
        )
        node_key = ec.generate_private_key(ec.SECP256R1())
        return cls(
            root=root, node=_sign_node(root, root_key, node_key, now, node), _node_key=node_key, _root_key=root_key
        )

    @classmethod
    def load(cls, pem: Mapping[str, str | bytes]) -> CertificateAuthority:
        """From PEM texts named as in PEM_PARTS (keys unencrypted: the store encrypts them). Raises AuthorityError.

        Checks that keys belong to certificates, that the root signed the node, and that both may sign.
        """
        unknown = set(pem) - set(PEM_PARTS)
        if unknown or not {"root_cert", "node_cert", "node_key"} <= set(pem):
            raise AuthorityError("the authority's parts are not complete")
        try:
            root = x509.load_pem_x509_certificate(_bytes(pem["root_cert"]))
            node = x509.load_pem_x509_certificate(_bytes(pem["node_cert"]))
            node_key = _private_key(_bytes(pem["node_key"]))
            root_key = _private_key(_bytes(pem["root_key"])) if "root_key" in pem else None
            node.verify_directly_issued_by(root)
            root.verify_directly_issued_by(root)
            limits = [cert.extensions.get_extension_for_class(x509.BasicConstraints).value for cert in (root, node)]
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            raise AuthorityError("the authority's parts are not readable or do not belong together") from None
        pairs = [(node, node_key)] if root_key is None else [(node, node_key), (root, root_key)]
        if any(cert.public_key() != key.public_key() for cert, key in pairs):
            raise AuthorityError("a key does not belong to its certificate")
        if not all(limit.ca for limit in limits) or limits[1].path_length != 0:
            raise AuthorityError("a certificate of the authority may not sign")
        return cls(root=root, node=node, _node_key=node_key, _root_key=root_key)

    def unsafe_export(self) -> dict[str, str]:
        """All parts as PEM, private keys in clear: for the encrypted store only, never for a log, file or answer."""
        parts = {
            "root_cert": self.root_pem,
            "node_cert": _pem(self.node),
            "node_key": _key_pem(self._node_key),
        }
        if self._root_key is not None:
            parts["root_key"] = _key_pem(self._root_key)
        return parts

    def without_root_key(self) -> CertificateAuthority:
        """The same authority for a node whose root key is kept offline."""
        return CertificateAuthority(root=self.root, node=self.node, _node_key=self._node_key)

    def renew_node(self, *, now: float, node: str) -> CertificateAuthority:
        """A new intermediate with a new key under the same root. Raises AuthorityError without a root key."""
        if self._root_key is None:
            raise AuthorityError("the root key is not here; renew where it is kept")
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _sign_node(self.root, self._root_key, key, now, node)
        return CertificateAuthority(root=self.root, node=signed, _node_key=key, _root_key=self._root_key)

    @property
    def root_pem(self) -> str:
        """The root certificate: what sandboxes trust. Public."""
        return _pem(self.root)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the root certificate, lower-case hex: what `exeat ca show` prints and people compare."""
        return self.root.fingerprint(hashes.SHA256()).hex()

    def mint(self, host: Host, public_key: ec.EllipticCurvePublicKey | bytes, now: float) -> str:
        """Return the chain for `host` as PEM text: the leaf, then the node intermediate.

        `public_key` is the worker's leaf key (object or SubjectPublicKeyInfo DER). Raises AuthorityError for a key
        that is not P-256 and for an authority that is not valid at `now` (Unix time).
        """
        key = leaf_public_key(public_key) if isinstance(public_key, bytes) else public_key
        if not isinstance(key.curve, ec.SECP256R1):
            raise AuthorityError("a leaf key must be EC P-256")
        if key.public_numbers() in (self._node_key.public_key().public_numbers(), self._root_numbers()):
            raise AuthorityError("an authority's key cannot be a leaf's")
        moment = _time(now)
        if (
            not self.node.not_valid_before_utc
            <= moment
            < min(self.node.not_valid_after_utc, self.root.not_valid_after_utc)
        ):
            raise AuthorityError("the node's intermediate is not valid now; renew it")
        until = min(
            moment + datetime.timedelta(days=LEAF_DAYS), self.node.not_valid_after_utc, self.root.not_valid_after_utc
        )
        name: x509.GeneralName = (
            x509.IPAddress(ipaddress.ip_address(host.text)) if host.is_literal else x509.DNSName(host.text)
        )
        # Names that do not fit a common name get an empty subject; the alternative name is then critical (RFC 5280
        # 4.2.1.6).
        subject = _name(host.text) if len(host.text) <= _MAX_COMMON_NAME else x509.Name([])
        issuer_id = self.node.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        leaf = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.node.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(moment - BACKDATE)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([name]), critical=len(subject.rdns) == 0)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
            .sign(self._node_key, hashes.SHA256())
        )
        return _pem(leaf) + _pem(self.node)

    def _root_numbers(self) -> ec.EllipticCurvePublicNumbers | None:
        key = self.root.public_key()
        return key.public_numbers() if isinstance(key, ec.EllipticCurvePublicKey) else None

    def __reduce__(self) -> str:
        raise TypeError("an authority is not serialised")


def leaf_public_key(spki: bytes) -> ec.EllipticCurvePublicKey:
    """Parse a worker's SubjectPublicKeyInfo (DER, at most 256 bytes). Raises AuthorityError unless EC P-256."""
    try:
        key = serialization.load_der_public_key(spki) if len(spki) <= 256 else None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AuthorityError("a leaf key must be EC P-256")
    return key


def _sign_node(
    root: x509.Certificate,
    root_key: ec.EllipticCurvePrivateKey,
    node_key: ec.EllipticCurvePrivateKey,
    now: float,
    node: str,
) -> x509.Certificate:
    start = max(_time(now) - BACKDATE, root.not_valid_before_utc)
    until = min(start + datetime.timedelta(days=NODE_DAYS), root.not_valid_after_utc)
    if until <= start:
        raise AuthorityError("the root is not valid now")
    root_id = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        x509.CertificateBuilder()
        .subject_name(_name(f"Exeat node {_label(node)}"))
        .issuer_name(root.subject)
        .public_key(node_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(node_key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(root_id), critical=False)
        .sign(root_key, hashes.SHA256())
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _label(text: str) -> str:
    if not 0 < len(text) <= 48 or not text.isascii() or not text.replace("-", "").replace(".", "").isalnum():
        raise AuthorityError("a label has up to 48 letters, digits, dots and dashes")
    return text


def _time(now: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(now), datetime.UTC)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("not an EC P-256 key")
    return key


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode("ascii")
