"""The demo's upstream: a small HTTPS shop on loopback that wants a key, and remembers what it was asked."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from dataclasses import dataclass, field

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from exeat.demo.index import LOCAL_HOST, LOCAL_PACKAGE, local_page, local_wheel

NAMES = ("orders.shop.example", "deploy.shop.example", LOCAL_HOST)


@dataclass(slots=True)
class Shop:
    """`async with Shop(key) as shop`: serves NAMES on 127.0.0.1:`port` with a certificate from `ca_pem`."""

    key: str = field(repr=False)
    port: int = 0
    ca_pem: str = ""
    seen: list[str] = field(default_factory=list)
    """Method and path of every request that arrived."""
    key_seen: int = 0
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Shop:
        application = web.Application()
        application.router.add_get("/v1/orders/{id}", self._order)
        application.router.add_get(f"/simple/{LOCAL_PACKAGE}/", self._index)
        application.router.add_get("/packages/demo/1.0/{file}", self._wheel)
        application.router.add_route("*", "/{anything:.*}", self._anything)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        self.ca_pem, context = _certificates()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _order(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.path}")
        if request.headers.get("X-Api-Key") != self.key:
            return web.json_response({"error": "a key is required"}, status=401)
        self.key_seen += 1
        number = request.match_info["id"]
        return web.json_response(
            {
                "id": number,
                "status": "shipped",
                "items": [{"sku": "tea-250g", "price": 790}, {"sku": "cup-blue", "price": 1250}],
                "customer": {"name": "Ada Example", "email": "ada@shop.example"},
                "debug": {"called_with": self.key},
            }
        )

    async def _index(self, _request: web.Request) -> web.Response:
        return web.Response(body=local_page(), content_type="text/html")

    async def _wheel(self, _request: web.Request) -> web.Response:
        return web.Response(body=local_wheel()[1], content_type="application/octet-stream")

    async def _anything(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.path}")
        return web.json_response({"done": True})


def _certificates() -> tuple[str, ssl.SSLContext]:
    """An authority and a leaf for NAMES that a strict verifier accepts; the leaf's files live for this call only."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Exeat demo shop authority")])
    ca_ski = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = (
        builder(ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(ca_ski, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    leaf = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAMES[0])]), leaf_key)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_ski), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(leaf_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(
            leaf_key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        file.write(leaf.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return ca.public_bytes(serialization.Encoding.PEM).decode(), context
