"""T05 to T08: certificates towards clients are strict, hellos of any shape are read, bad upstream ones are refused.

One gateway with an intercepted host, a tunnelled host whose root only a public store could know, and four origins
that are wrong in one way each. Every case goes through both ways in.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.support.authority import Authority, Certificate
from tests.support.entries import (
    ENTRIES,
    PYTHON,
    Entry,
    connect_through,
    entry_of,
    read_answer,
    read_to_end,
    tls_through,
)
from tests.support.gateway import Completed, TestGateway
from tests.support.githttp import git_backend, make_repository
from tests.support.hello import client_hello, names_of, records, served_certificate
from tests.support.origins import Origin

pytestmark = pytest.mark.xdist_group("tls")

SHIM = Path(__file__).parents[2] / "exeat" / "node_proxy.cjs"
SECRET = "canary-5e8b1c7d2a9f4036-canary"
BAD: tuple[Certificate, ...] = ("wrong-name", "expired", "self-signed", "not-yet-valid")
CREDENTIALS = """
version: 1
credentials:
  api:
    {kind: bearer, secret: "store:api", owner: tests, placeholder: {env: API_KEY, shape: "sk_{32}"},
     hosts: [api.test, wrong-name.api.test, expired.api.test, self-signed.api.test, not-yet-valid.api.test]}
"""


def policy(tunnel_port: int) -> str:
    bad = "\n".join(
        f"          - {{name: {kind}, host: {kind}.api.test, methods: [GET], paths: [/keyed], credential: api}}\n"
        f"          - {{name: {kind}.plain, host: {kind}.api.test, methods: [GET], paths: [/plain]}}"
        for kind in BAD
    )
    return f"""
    roles:
      agent:
        allow:
          - name: read
            host: api.test
            methods: [GET]
            paths: ["/**"]
            credential: api
          - name: git
            host: git.test
            methods: [GET, POST]
            paths: ["/o/**"]
            query: {{service: [git-upload-pack]}}
          - name: plain
            host: git.test
            methods: [GET]
            paths: ["/plain"]
          - name: public
            host: public.test
            port: {tunnel_port}
            tunnel: true
            reason: its certificate comes from a public root
{bad}
    """


@dataclass
class Place:
    """The origins and the gateway of this module."""

    api: Origin
    git: Origin
    public: Origin
    bad: dict[Certificate, Origin]
    gateway: TestGateway


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tls")
    repositories = tmp_path_factory.mktemp("repositories")
    make_repository(repositories / "o" / "r.git", {"README.md": "hello\n"})
    public_root = Authority("Test public root")
    with (
        Origin("api.test", address="127.0.0.41").run_in_thread() as api,
        Origin("git.test", address="127.0.0.42").run_in_thread() as git,
        Origin("public.test", address="127.0.0.43", authority=public_root).run_in_thread() as public,
        Origin("wrong-name.api.test", address="127.0.0.44", certificate="wrong-name").run_in_thread() as wrong,
        Origin("expired.api.test", address="127.0.0.45", certificate="expired").run_in_thread() as expired,
        Origin("self-signed.api.test", address="127.0.0.46", certificate="self-signed").run_in_thread() as selfsigned,
        Origin("not-yet-valid.api.test", address="127.0.0.47", certificate="not-yet-valid").run_in_thread() as early,
    ):
        for origin in (git, public):
            origin.on("/o/*", git_backend(repositories))
        bad = dict(zip(BAD, (wrong, expired, selfsigned, early), strict=True))
        with TestGateway(
            folder,
            policy=policy(public.port),
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=[api, git, public, *bad.values()],
        ) as gateway:
            # What `exeat up` writes where the system's store has this root; no test changes the machine's store.
            bundle = gateway.client_files / "bundle.pem"
            bundle.write_text(bundle.read_text() + public_root.pem)
            yield Place(api, git, public, bad, gateway)


@pytest.fixture(scope="module", params=ENTRIES)
def entry(request: pytest.FixtureRequest, place: Place) -> Iterator[Entry]:
    with entry_of(request.param, place.gateway) as found:
        yield found


# --- T05 ---------------------------------------------------------------------------------------------------------


def test_a_strict_client_accepts_the_certificate(place: Place, entry: Entry) -> None:
    """T05: Python with VERIFY_X509_STRICT and the product's bundle alone; the leaf has all that strictness wants."""
    with tls_through(entry, f"api.test:{place.api.port}") as connection:
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    leaf = x509.load_der_x509_certificate(der)
    assert names_of(leaf) == ["api.test"]
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert leaf.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days < 200


def test_openssl_accepts_the_chain_and_each_link_names_its_issuer(place: Place, entry: Entry) -> None:
    """T05 by `openssl s_client -x509_strict`: authority key identifiers equal the issuers' subject key identifiers."""
    proxy = re.fullmatch(r"http://(?:session:([^@]+)@)?([^@]+)", entry.environment["HTTPS_PROXY"])
    assert proxy is not None
    account = ["-proxy_user", "session", "-proxy_pass", f"pass:{proxy[1]}"] if proxy[1] else []
    shown = entry.command(
        *("openssl", "s_client", "-proxy", proxy[2], *account, "-connect", f"api.test:{place.api.port}"),
        *("-servername", "api.test", "-x509_strict", "-verify_return_error", "-verify_hostname", "api.test"),
        *("-CAfile", entry.environment["SSL_CERT_FILE"], "-no-CApath", "-showcerts"),
    )
    assert shown.code == 0, shown
    assert "Verification: OK" in shown.out
    chain = x509.load_pem_x509_certificates(shown.out.encode())
    root = x509.load_pem_x509_certificate((place.gateway.client_files / "ca.pem").read_bytes())
    for certificate, issuer in zip(chain, [*chain[1:], root], strict=True):
        authority = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        assert authority.key_identifier == identifier.digest


# --- T06 ---------------------------------------------------------------------------------------------------------


def _whole(connection: socket.socket, message: bytes) -> None:
    connection.sendall(records(message))


def _one_byte_per_write(connection: socket.socket, message: bytes) -> None:
    for byte in records(message):
        connection.sendall(bytes((byte,)))


def _three_records(connection: socket.socket, message: bytes) -> None:
    connection.sendall(records(message, 3))


@pytest.mark.parametrize("send", [_whole, _one_byte_per_write, _three_records])
def test_a_server_name_far_back_in_the_hello_is_found(
    place: Place, entry: Entry, send: Callable[[socket.socket, bytes], None]
) -> None:
    """T06: the name begins after byte 1300; sent whole, byte by byte, in three records: it names the certificate."""
    message = client_hello("api.test", padding=1400)
    assert message.index(b"api.test") > 1300
    connection = connect_through(entry, f"api.test:{place.api.port}")
    send(connection, message)
    assert names_of(served_certificate(connection)) == ["api.test"]
    connection.close()


def test_a_hello_passes_a_tunnel_unchanged(place: Place, entry: Entry) -> None:
    """T06 in the tunnel lane: its name is found as far back, and the origin itself answers it."""
    connection = connect_through(entry, f"public.test:{place.public.port}")
    _three_records(connection, client_hello("public.test", padding=1400))
    served = served_certificate(connection)
    connection.close()
    assert "public.test" in names_of(served)
    assert "Test public root" in served.issuer.rfc4514_string()


def test_a_tunnel_to_another_server_name_is_refused(place: Place, entry: Entry) -> None:
    """T06 in the tunnel lane: a hello that names another host than the CONNECT reaches no origin."""
    before = place.public.bytes_in
    connection = connect_through(entry, f"public.test:{place.public.port}")
    connection.sendall(records(client_hello("api.test", padding=1400)))
    assert b"api.test" not in read_to_end(connection)
    connection.close()
    assert place.public.bytes_in == before


def test_a_hello_over_its_bound_is_refused_and_recorded(place: Place, entry: Entry) -> None:
    """T06: 64 KiB of ClientHello are nobody's handshake: closed without a certificate, one record."""
    connection = connect_through(entry, f"api.test:{place.api.port}")
    with contextlib.suppress(OSError):  # closed before it was all sent
        connection.sendall(records(client_hello("api.test", padding=65_000)))
    assert b"api.test" not in read_to_end(connection)
    connection.close()
    (record,) = place.gateway.awaited(sandbox=entry.id, reason="bad-protocol", detail="the ClientHello is too large")
    assert record["connect_host"] == f"api.test:{place.api.port}"


# --- T07 ---------------------------------------------------------------------------------------------------------

REQUESTS = "import requests, sys; print(requests.get(sys.argv[1]).status_code)"
URLLIB = "import urllib.request, sys; print(urllib.request.urlopen(sys.argv[1]).status)"
NODE = "fetch(process.argv[1]).then((r) => console.log(r.status))"


def _curl(entry: Entry, base: str) -> Completed:
    return entry.command("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", base + "/plain")


def _git(entry: Entry, base: str) -> Completed:
    listed = entry.command("git", "ls-remote", base + "/o/r.git", "refs/heads/main")
    return Completed(code=listed.code, out="200" if "refs/heads/main" in listed.out else listed.out, err=listed.err)


def _requests(entry: Entry, base: str) -> Completed:
    return entry.command(PYTHON, "-I", "-c", REQUESTS, base + "/plain")


def _ssl(entry: Entry, base: str) -> Completed:
    return entry.command(PYTHON, "-c", URLLIB, base + "/plain")


def _node(entry: Entry, base: str) -> Completed:
    # Outside a boundary Node reads proxy variables from 22.21 on; before, what `exeat run` preloads is needed there.
    # --use-openssl-ca makes the root in the bundle stand for one that Node has built in.
    preload = "" if "NODE_OPTIONS" in entry.environment else f"--require={SHIM}"
    options = f"{entry.environment.get('NODE_OPTIONS', preload)} --use-openssl-ca"
    return entry.command("node", "-e", NODE, base + "/plain", env={"NODE_OPTIONS": options})


@pytest.mark.parametrize("host", ["intercepted", "tunnelled"])
@pytest.mark.parametrize("client", [_curl, _git, _requests, _ssl, _node])
def test_one_bundle_serves_all_tools(
    place: Place, entry: Entry, client: Callable[[Entry, str], Completed], host: str
) -> None:
    """T07: five clients reach an intercepted and a tunnelled host with the environment alone, verified each time."""
    origin = place.git if host == "intercepted" else place.public
    before = len(origin.received)
    done = client(entry, origin.base)
    assert done.code == 0, done
    assert done.out.strip() == "200"
    assert len(origin.received) > before


def test_a_tunnel_is_recorded_as_uninspected(place: Place, entry: Entry) -> None:
    """T07: the tunnelled host's records say so, with the bytes that went through."""
    before = place.gateway.settled(0, sandbox=entry.id, host="public.test")
    assert _curl(entry, place.public.base).out == "200"
    found = place.gateway.awaited(len(before) + 2, sandbox=entry.id, host="public.test")[len(before) :]
    assert [record["event"] for record in found] == ["tunnel.intent", "tunnel.outcome"]
    assert {record["uninspected"] for record in found} == {True}
    assert int(found[-1]["bytes_down"]) > 0


# --- T08 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["keyed", "plain"])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_upstream_certificate_is_refused(place: Place, entry: Entry, kind: Certificate, lane: str) -> None:
    """T08: wrong in one way, dialled by executor and worker: 502 that says `upstream certificate`, nothing sent."""
    origin = place.bad[kind]
    key = ["-H", f"Authorization: Bearer {entry.environment['API_KEY']}"] if lane == "keyed" else []
    answer = entry.command("curl", "-sS", "-w", "\n%{http_code}", *key, origin.url(f"/{lane}"))
    assert answer.out.endswith("\n502"), answer
    assert "upstream certificate" in answer.out.lower()
    assert not origin.received
    assert SECRET.encode() not in b"".join(bytes(connection.raw) for connection in origin.connections)


def test_a_good_upstream_certificate_is_believed(place: Place, entry: Entry) -> None:
    """T08 from the other side: the same rule with a good certificate reaches the origin with the secret."""
    header = f"Authorization: Bearer {entry.environment['API_KEY']}"
    with tls_through(entry, f"api.test:{place.api.port}") as connection:
        connection.sendall(f"GET /x HTTP/1.1\r\nHost: api.test:{place.api.port}\r\n{header}\r\n\r\n".encode())
        head, _ = read_answer(connection)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert place.api.received[-1].values("authorization") == [f"Bearer {SECRET}"]
