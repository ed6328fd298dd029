"""Names and addresses as clients meet them: DNS and IPv6 in sandboxes, `dns: strict`, literals and local addresses.

One gateway. Its sandboxes: one on the shared listener with a token, and two of `exeat run`, the second with a role of
`dns: strict`.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from exeat.boundary import find_capture_tools
from tests.support.entries import PYTHON, Inside, inside_of
from tests.support.gateway import Box, TestGateway
from tests.support.origins import Origin

pytestmark = pytest.mark.xdist_group("names")
captured = pytest.mark.skipif(find_capture_tools() is None, reason="iproute2 and nftables are not installed")

SECRET = "canary-names-5f1e0d9c8b7a6f5e4d3c"
POLICY = """
  127.0.0.73: {addresses: [127.0.0.73/32], scheme: http, port: %(literal)d}
  127.0.0.71: {addresses: [127.0.0.71/32], port: %(api)d, ca: file:api.test.pem}
roles:
  agent:
    boundary: {external: tests, reason: the tests confine nothing}
    allow:
      - {name: api, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}
      - {name: reg, host: "*.reg.test", port: %(reg)d, methods: [GET], paths: ["/v1/**"]}
      - {name: local, host: 127.0.0.73, scheme: http, port: %(literal)d, methods: [GET], paths: ["/v1/**"]}
      - {name: number, host: 127.0.0.71, port: %(api)d, methods: [GET], paths: ["/v1/**"]}
    deny:
      - {name: never, host: evil.test}
  strict:
    include: [agent]
    dns: strict
    boundary: {external: tests, reason: the tests confine nothing}
    allow: []
"""
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests,
        placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
LOOK_UP = """
import json, socket, struct, sys

def query(name, kind):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return b"\\x0a\\x0b\\x01\\x00\\x00\\x01" + bytes(6) + labels + b"\\x00" + struct.pack("!HH", kind, 1)

def ask(kind, server, name, question):
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, kind) as s:
        s.settimeout(30)
        if kind == socket.SOCK_DGRAM:
            s.sendto(query(name, question), (server, 53))
            raw = s.recv(2048)
        else:
            s.connect((server, 53))
            s.sendall(struct.pack("!H", len(query(name, question))) + query(name, question))
            length = struct.unpack("!H", s.recv(2, socket.MSG_WAITALL))[0]
            raw = s.recv(length, socket.MSG_WAITALL)
    return raw[3] & 15, struct.unpack("!H", raw[6:8])[0]

print(json.dumps([ask(kind, server, name, question) for name in sys.argv[1:] for question in (1, 28)
                  for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM) for server in ("192.0.2.53", "2001:db8::53")]))
"""
"""(response code, answers) of A and AAAA over UDP and TCP at an IPv4 and an IPv6 server, for each name."""


@dataclass
class Scene:
    gateway: TestGateway
    api: Origin
    reg: Origin
    literal: Origin
    box: Box
    open: Inside
    strict: Inside

    def seen(self) -> list[int]:
        return [len(origin.connections) for origin in (self.api, self.reg, self.literal)]

    def refusal(self, box: Box, *arguments: str) -> dict[str, Any]:
        """The problem document that curl got."""
        done = box.curl("--proxy", box.proxy_url, "--noproxy", "", *arguments)
        return dict(json.loads(done.out))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    api = Origin("api.test", address="127.0.0.71")
    reg = Origin("a.reg.test", "notreg.test", "evil.test", address="127.0.0.72", authority=api.authority)
    literal = Origin("literal.test", address="127.0.0.73", tls=False)
    with contextlib.ExitStack() as stack:
        for origin in (api, reg, literal):
            stack.enter_context(origin.run_in_thread())
        ports = {"api": api.port, "reg": reg.port, "literal": literal.port}
        gateway = stack.enter_context(
            TestGateway(
                tmp_path_factory.mktemp("names"),
                policy=POLICY % ports,
                credentials=CREDENTIALS,
                secrets={"api": SECRET},
                origins=(api, reg, literal),
            )
        )
        inside = [stack.enter_context(inside_of(gateway, role)) for role in ("agent", "strict")]
        yield Scene(gateway, api, reg, literal, gateway.sandbox(), *inside)


def looked_up(box: Inside, *names: str) -> list[list[int]]:
    done = box.command("env", "-i", PYTHON, "-I", "-c", LOOK_UP, *names)
    assert done.code == 0, done
    return [list(pair) for pair in json.loads(done.out)]


# --- what must not be ---------------------------------------------------------------------------------------------


@captured
def test_a_strict_role_does_not_have_names_that_no_rule_could_permit(scene: Scene) -> None:
    """NXDOMAIN over UDP and TCP, by IPv4 and IPv6, for A and AAAA (field case C045)."""
    names = ("secret-data.evil.test", "evil.test", "reg.test", "a.b.reg.test", "literal.test", "localhost")
    assert looked_up(scene.strict, *names) == [[3, 0]] * 8 * len(names)
    done = scene.strict.command("getent", "hosts", "secret-data.evil.test")
    assert (done.code, done.out) == (2, "")


@captured
def test_an_address_that_a_strict_role_was_not_given_leads_nowhere(scene: Scene) -> None:
    """Guessing what the stub would have said of a name that does not exist is a bare address."""
    before = scene.seen()
    done = scene.strict.command(
        "env",
        "-i",
        "/usr/bin/curl",
        "-sS",
        "--max-time",
        "30",
        "--resolve",
        "evil.test:443:198.18.7.7",
        "https://evil.test/",
    )
    assert done.code != 0
    (record,) = scene.gateway.awaited(sandbox=scene.strict.id, connect_host="198.18.7.7:443")
    assert record["reason"] == "address-literal-refused"
    assert scene.seen() == before


@captured
def test_without_strict_a_denied_name_exists_so_that_its_refusal_can_be_read(scene: Scene) -> None:
    """The default: an address for A, no data for AAAA, and the reason in words on the connection."""
    found = looked_up(scene.open, "evil.test")
    assert found == [[0, 1]] * 4 + [[0, 0]] * 4
    done = scene.open.command("env", "-i", "/usr/bin/curl", "-sS", "--max-time", "60", "http://evil.test/")
    assert json.loads(done.out)["reason"] == "denied-by-rule", done


def test_loopback_of_both_families_is_the_sandboxs_own(scene: Scene) -> None:
    """TCP and UDP to [::1] and 127.0.0.1 never reach what listens there on the host (field case C043)."""
    with contextlib.ExitStack() as stack:
        services: list[socket.socket] = []
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                service = stack.enter_context(socket.socket(family, kind))
                service.bind((address, 0))
                if kind == socket.SOCK_STREAM:
                    service.listen()
                service.setblocking(False)
                services.append(service)
        tcp4, udp4, tcp6, udp6 = (service.getsockname()[1] for service in services)
        for option, host, port in (("-4", "127.0.0.1", tcp4), ("-6", "[::1]", tcp6)):
            done = scene.open.command("curl", option, "-sS", "--noproxy", "*", f"http://{host}:{port}/")
            assert done.code == 7, done
        text = f"""
import socket
for family, address, port in ((socket.AF_INET, "127.0.0.1", {udp4}), (socket.AF_INET6, "::1", {udp6})):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", (address, port))
"""
        assert scene.open.command(PYTHON, "-I", "-c", text).code == 0
        for service in services:
            with pytest.raises(BlockingIOError):
                service.accept() if service.type == socket.SOCK_STREAM else service.recv(1)


def test_the_doctor_speaks_of_both_families(scene: Scene) -> None:
    """Direct connections and lookups by IPv4 and by IPv6 are tried, and all of them hold (field case C043)."""
    done = scene.open.command("sh", "-c", "curl -sS http://exeat.internal/doctor.sh | sh 2>&1 || true")
    lines = [line for line in done.out.splitlines() if "2001:db8::" in line or "192.0.2." in line]
    assert any("2001:db8::1" in line for line in lines), done
    assert any("192.0.2.1" in line for line in lines), done
    assert not [line for line in lines if "FAIL" in line.upper()], lines


def test_a_local_address_is_refused_with_what_to_set(scene: Scene) -> None:
    """By name and by number, http and CONNECT: 403, a remedy, and the gateway's own loopback hears nothing (C047)."""
    with contextlib.ExitStack() as stack:
        services = [stack.enter_context(socket.create_server((address, 0), family=family))
                    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))]  # fmt: skip
        for service in services:
            service.setblocking(False)
        port4, port6 = (service.getsockname()[1] for service in services)
        for url, reason in (
            (f"http://localhost:{port4}/", "local-address"),
            (f"http://127.0.0.1:{port4}/", "address-literal-refused"),
            (f"http://[::1]:{port6}/", "address-literal-refused"),
        ):
            said = scene.refusal(scene.box, url)
            assert (said["status"], said["reason"]) == (403, reason), said
            page = scene.box.curl("--proxy", scene.box.proxy_url, "--noproxy", "", said["type"])
            assert "NO_PROXY" in page.out, page
            (record,) = scene.gateway.awaited(request_id=said["request_id"])
            assert (record["sandbox"], record["reason"]) == (scene.box.id, reason)
        for service in services:
            with pytest.raises(BlockingIOError):
                service.accept()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("127.0.0.71:443", "no-rule"),  # a rule permits this address, on another port
        ("127.0.0.72:%(reg)d", "address-literal-refused"),
        ("[::1]:443", "address-literal-refused"),
        ("[2001:db8::7]:443", "address-literal-refused"),
    ],
)
def test_a_literal_goes_round_no_name_rule(scene: Scene, target: str, reason: str) -> None:
    """CONNECT to an address with the server name of a permitted host: 403 and nothing dialled (field case C053)."""
    before = scene.seen()
    authority = target % {"reg": scene.reg.port}
    done = scene.box.curl("-k", "--connect-to", f"api.test:443:{authority}", "https://api.test/v1/x")
    assert "403" in done.err or f'"{reason}"' in done.out, done
    (record,) = scene.gateway.awaited(sandbox=scene.box.id, connect_host=authority)
    assert (record["event"], record["reason"]) == ("request.refused", reason)
    assert scene.seen() == before


def test_a_permitted_literal_is_not_raised_to_a_names_rule(scene: Scene) -> None:
    """On the address that a rule permits, the server name and Host of a credentialed host get nothing (C053)."""
    authority = f"127.0.0.71:{scene.api.port}"
    before = len(scene.api.received)
    key = ("-H", f"Authorization: Bearer {scene.box.placeholders['API_KEY']}")
    done = scene.box.curl("-k", *key, "--connect-to", f"api.test:443:{authority}", "https://api.test/v1/x")
    assert done.code != 0, done
    assert scene.gateway.awaited(sandbox=scene.box.id, reason="sni-mismatch", connect_host=authority)
    done = scene.box.curl("-k", "-H", "Host: api.test", f"https://{authority}/v1/x")
    assert json.loads(done.out)["reason"] == "authority-mismatch", done
    assert len(scene.api.received) == before


@pytest.mark.parametrize(
    ("host", "reason"),
    [("xapi.test", "no-rule"), ("notreg.test", "no-rule"), ("api.test.evil.test", "no-rule"), ("reg.test", "no-rule"),
     ("a.b.reg.test", "no-rule"), ("evil.test.", "denied-by-rule"), ("api.test..", "bad-target")],
)  # fmt: skip
def test_a_name_matches_whole_labels_and_one_dot_at_its_end(scene: Scene, host: str, reason: str) -> None:
    """Suffixes, prefixes, apex, depth, dots (field cases C033, C035, C037): told by `explain` as by the proxy."""
    before = scene.seen()
    said = scene.refusal(scene.box, f"http://{host}/v1/x")
    assert said["reason"] == reason, said
    assert scene.seen() == before
    if reason != "bad-target":
        explained = scene.gateway.exeat("policy", "explain", "GET", f"https://{host}/v1/x", "--role", "agent")
        assert reason in explained.out + explained.err, explained


# --- what must work -----------------------------------------------------------------------------------------------


def test_a_canonical_name_is_used_everywhere(scene: Scene) -> None:
    """Case and one trailing dot change neither rule, dial, SNI nor record (field case C033)."""
    done = scene.box.curl("-k", f"https://API.Test.:{scene.api.port}/v1/dot")
    assert done.code == 0, done
    received = scene.api.received[-1]
    assert (received.target, received.values("host")) == ("/v1/dot", [f"api.test:{scene.api.port}"])
    assert scene.api.connections[-1].sni == "api.test"
    (record,) = scene.gateway.awaited(sandbox=scene.box.id, event="broker.intent", path="/v1/dot")
    assert record["host"] == "api.test"


def test_a_declared_address_opens_exactly_itself(scene: Scene) -> None:
    """127.0.0.73 and its port are reached; another port is not, and no NO_PROXY names it (field case C027)."""
    url = f"http://127.0.0.73:{scene.literal.port}/v1/x"
    assert scene.box.curl("-f", url).code == 0
    said = scene.refusal(scene.box, f"http://127.0.0.73:{scene.literal.port + 1}/v1/x")
    assert said["status"] == 403, said
    assert "127.0.0.73" not in scene.box.environment["NO_PROXY"]


def test_a_client_that_uses_the_proxy_needs_no_resolver(scene: Scene) -> None:
    """In a strict role: an unreachable resolver is nothing to a client with the proxy variables (field case C045)."""
    assert scene.strict.command("curl", "-sS", "-f", f"https://api.test:{scene.api.port}/v1/x").code == 0


@captured
def test_a_strict_role_has_its_own_names(scene: Scene) -> None:
    """Permitted names and the help host have an address, and a captured client gets through by it."""
    found = looked_up(scene.strict, "api.test", "a.reg.test", "exeat.internal")
    assert found == ([[0, 1]] * 4 + [[0, 0]] * 4) * 3
    url = f"https://a.reg.test:{scene.reg.port}/v1/x"
    argv = ["env", "-i", "/usr/bin/curl", "-sS", "-f", "--max-time", "60", "--cacert", "/run/exeat/bundle.pem", url]
    done = scene.strict.command(*argv)
    assert done.code == 0, done
