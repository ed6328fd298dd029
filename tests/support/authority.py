"""A certificate authority for test origins, written apart from broker/vault/ca.py so that neither hides a fault of the
other. Its good certificates pass strict X.509; its bad ones are wrong in exactly one way.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import tempfile
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Certificate = Literal["good", "wrong-name", "expired", "not-yet-valid", "self-signed", "untrusted"]

_USAGES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
_DAY = datetime.timedelta(days=1)


class Authority:
    """One test root. `pem` is its certificate: what a destination's `ca:` file holds."""

    def __init__(self, name: str = "Test origins") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        usage = _usage(digital_signature=True, key_cert_sign=True, crl_sign=True)
        root = (
            _builder(self._name, self._name, self._key.public_key(), now - _DAY, now + 3650 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = root.public_bytes(Encoding.PEM).decode()

    def issue(self, names: tuple[str, ...], kind: Certificate = "good", usage: str = "server") -> bytes:
        """Private key and certificate for `names` (host names or addresses) as one PEM. `usage`: server or client."""
        if kind == "untrusted":
            return Authority("Unknown origins").issue(names)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        start, end = {
            "expired": (now - 30 * _DAY, now - _DAY),
            "not-yet-valid": (now + _DAY, now + 30 * _DAY),
        }.get(kind, (now - _DAY, now + 30 * _DAY))
        named = ("wrong-name.test",) if kind == "wrong-name" else names
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, named[0])])
        signed_by, issuer = (key, subject) if kind == "self-signed" else (self._key, self._name)
        leaf = (
            _builder(subject, issuer, key.public_key(), start, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([_USAGES[usage]]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in named]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signed_by.public_key()), critical=False)
            .sign(signed_by, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private + leaf.public_bytes(Encoding.PEM)

    def server_context(
        self, names: tuple[str, ...], kind: Certificate = "good", alpn: tuple[str, ...] = ("http/1.1",)
    ) -> ssl.SSLContext:
        """A server's TLS context for `names`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(self.issue(names, kind))
            file.flush()
            context.load_cert_chain(file.name)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    def client_context(self) -> ssl.SSLContext:
        """A strict client context that trusts this authority alone."""
        context = ssl.create_default_context(cadata=self.pem)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        return context


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
