"""The certificate authority: what it refuses to load or sign, then what its certificates are."""

from __future__ import annotations

import datetime
import ipaddress
import pickle
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from broker.vault.ca import AuthorityError, CertificateAuthority, leaf_public_key
from net.contexts import load_chain
from rules.names import Host

NOW = datetime.datetime.now(datetime.UTC).timestamp()
DAY = 86400.0
AUTHORITY = CertificateAuthority.create(now=NOW, installation="test-1", node="node-1")
API = Host.parse("api.test")


def leaf_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def spki(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("part", ["root_cert", "node_cert", "node_key"])
def test_an_incomplete_authority_is_not_loaded(part: str) -> None:
    """Each part but the root key must be there."""
    parts = AUTHORITY.unsafe_export()
    del parts[part]
    with pytest.raises(AuthorityError):
        CertificateAuthority.load(parts)


@pytest.mark.parametrize("part", ["root_cert", "root_key", "node_cert", "node_key"])
def test_a_part_of_another_authority_is_not_loaded(part: str) -> None:
    """Mixed parts are refused, with nothing of them in the message."""
    other = CertificateAuthority.create(now=NOW, installation="test-1", node="node-1").unsafe_export()
    with pytest.raises(AuthorityError) as raised:
        CertificateAuthority.load({**AUTHORITY.unsafe_export(), part: other[part]})
    assert "BEGIN" not in str(raised.value)


@pytest.mark.parametrize("part", ["root_cert", "root_key", "node_cert", "node_key"])
def test_an_unreadable_part_is_not_loaded(part: str) -> None:
    """Damaged PEM is an AuthorityError without the parser's text."""
    with pytest.raises(AuthorityError):
        CertificateAuthority.load({**AUTHORITY.unsafe_export(), part: "canary"})


def test_a_leaf_cannot_take_the_place_of_the_intermediate() -> None:
    """A certificate that may not sign is refused as node certificate even with its key."""
    key = leaf_key()
    chain = AUTHORITY.mint(API, key.public_key(), NOW)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    parts = AUTHORITY.unsafe_export()
    leaf = x509.load_pem_x509_certificates(chain.encode())[0].public_bytes(Encoding.PEM).decode()
    with pytest.raises(AuthorityError):
        CertificateAuthority.load({"root_cert": parts["node_cert"], "node_cert": leaf, "node_key": pem})


@pytest.mark.parametrize(
    "der",
    [
        b"",
        b"canary",
        spki(rsa.generate_private_key(65537, 2048)),
        spki(ed25519.Ed25519PrivateKey.generate()),
        spki(ec.generate_private_key(ec.SECP384R1())),
        spki(leaf_key()) + b"\0",
        b"\x30" * 300,
    ],
    ids=["empty", "not DER", "RSA", "Ed25519", "P-384", "trailing byte", "too long"],
)
def test_a_leaf_key_other_than_p256_is_refused(der: bytes) -> None:
    """A worker's key must be one EC P-256 key, nothing else."""
    with pytest.raises(AuthorityError):
        AUTHORITY.mint(API, der, NOW)


def test_the_authoritys_own_keys_are_never_a_leafs() -> None:
    """A worker that sends the intermediate's or root's public key gets no certificate for it."""
    for certificate in (AUTHORITY.node, AUTHORITY.root):
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        with pytest.raises(AuthorityError):
            AUTHORITY.mint(API, key, NOW)


@pytest.mark.parametrize("days", [-2, 731, 4000])
def test_nothing_is_signed_outside_the_intermediates_life(days: float) -> None:
    """A clock far off signs nothing."""
    with pytest.raises(AuthorityError):
        AUTHORITY.mint(API, leaf_key().public_key(), NOW + days * DAY)


def test_an_offline_root_mints_but_does_not_renew() -> None:
    """Without the root key leaves are still made; a new intermediate is not."""
    offline = CertificateAuthority.load(AUTHORITY.without_root_key().unsafe_export())
    assert "root_key" not in offline.unsafe_export()
    offline.mint(API, leaf_key().public_key(), NOW)
    with pytest.raises(AuthorityError):
        offline.renew_node(now=NOW, node="node-2")


def test_keys_do_not_show() -> None:
    """repr holds no key, and the authority is not pickled."""
    assert "PrivateKey" not in repr(AUTHORITY)
    with pytest.raises(TypeError):
        pickle.dumps(AUTHORITY)


@pytest.mark.parametrize("label", ["", "a" * 49, "ä", "a b", "a/b", "a\n"])
def test_labels_are_plain(label: str) -> None:
    """What stands in a certificate's name is short and plain."""
    with pytest.raises(AuthorityError):
        CertificateAuthority.create(now=NOW, installation=label, node="n")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("api.test", x509.DNSName("api.test")),
        ("under_score.api.test", x509.DNSName("under_score.api.test")),
        ("bücher.test", x509.DNSName("xn--bcher-kva.test")),
        (".".join(["a" * 60] * 4), x509.DNSName(".".join(["a" * 60] * 4))),
        ("127.0.0.2", x509.IPAddress(ipaddress.ip_address("127.0.0.2"))),
        ("[::1]", x509.IPAddress(ipaddress.ip_address("::1"))),
    ],
)
def test_a_leaf_is_for_one_name_and_follows_the_profile(raw: str, expected: x509.GeneralName) -> None:
    """T05: one alternative name, server auth, key identifiers (the authority's equal to the issuer's), short life."""
    key = leaf_key()
    leaf, node = x509.load_pem_x509_certificates(AUTHORITY.mint(Host.parse(raw), spki(key), NOW).encode())
    get = leaf.extensions.get_extension_for_class
    names = get(x509.SubjectAlternativeName)
    assert list(names.value) == [expected]
    assert names.critical == (not leaf.subject.rdns)
    assert list(get(x509.ExtendedKeyUsage).value) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert get(x509.KeyUsage).value.digital_signature
    assert not get(x509.KeyUsage).value.key_cert_sign
    assert not get(x509.BasicConstraints).value.ca
    issuer_id = node.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    assert get(x509.AuthorityKeyIdentifier).value.key_identifier == issuer_id
    assert get(x509.SubjectKeyIdentifier).value == x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    life = leaf.not_valid_after_utc - leaf.not_valid_before_utc
    assert life < datetime.timedelta(days=200)
    assert NOW - leaf.not_valid_before_utc.timestamp() >= DAY
    assert node.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert leaf.public_key() == key.public_key()


def test_a_leaf_never_outlives_its_intermediate() -> None:
    """Near the end of the intermediate the leaf ends with it."""
    leaf, node = x509.load_pem_x509_certificates(AUTHORITY.mint(API, leaf_key().public_key(), NOW + 700 * DAY).encode())
    assert leaf.not_valid_after_utc == node.not_valid_after_utc


def test_renewal_keeps_the_root_and_replaces_the_intermediates_key() -> None:
    """Clients that trust the root accept leaves of the renewed node too."""
    renewed = AUTHORITY.renew_node(now=NOW, node="node-2")
    assert renewed.root_pem == AUTHORITY.root_pem
    assert renewed.fingerprint == AUTHORITY.fingerprint
    assert renewed.node.public_key() != AUTHORITY.node.public_key()
    handshake(renewed, "api.test", trusting=AUTHORITY.root_pem)


@pytest.mark.parametrize("name", ["api.test", ".".join(["a" * 60] * 4), "127.0.0.2"])
def test_a_strict_client_that_trusts_the_root_alone_accepts_the_chain(name: str) -> None:
    """OpenSSL's strict X.509 checks pass with only our root in the store, also after a round trip through PEM."""
    handshake(CertificateAuthority.load(AUTHORITY.unsafe_export()), name, trusting=AUTHORITY.root_pem)


def test_a_strict_client_refuses_the_chain_for_another_name() -> None:
    """The leaf is good for its one host and no other."""
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(AUTHORITY, "api.test", trusting=AUTHORITY.root_pem, asking="other.test")


def handshake(authority: CertificateAuthority, name: str, *, trusting: str, asking: str | None = None) -> None:
    """A TLS handshake in memory between a strict client and a server with a freshly minted chain."""
    key = leaf_key()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_chain(server, pem + authority.mint(Host.parse(name), key.public_key(), NOW).encode())
    client = ssl.create_default_context(cadata=trusting)
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    client.verify_flags &= ~ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(a, b, server_hostname=asking or name), server.wrap_bio(b, a, server_side=True)]
    done: set[int] = set()
    for _ in range(10):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                pass
    assert done == {0, 1}


def test_a_workers_key_is_read_from_its_der() -> None:
    """What a worker sends in HELLO is its key."""
    key = leaf_key()
    assert leaf_public_key(spki(key)) == key.public_key()
