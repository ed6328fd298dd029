"""Transparent capture under `exeat run`: no variable set, and still one way out; every other way leads nowhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from exeat.boundary import find_capture_tools
from tests.support.gateway import Completed, TestGateway
from tests.support.origins import Origin

pytestmark = [
    pytest.mark.xdist_group("capture"),
    pytest.mark.skipif(find_capture_tools() is None, reason="iproute2 and nftables are not installed"),
]

POLICY = """
roles:
  agent:
    allow:
      - {name: read, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}
      - {name: plain, host: plain.test, scheme: http, methods: [GET], paths: ["/x"]}
"""
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: ["HOST"], owner: tests, placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
SECRET = "canary-capture-1b2c3d4e5f60718293"
BARE = ["env", "-i", "PATH=/usr/bin:/bin:/usr/sbin"]
CURL = [*BARE, "curl", "-sS", "--max-time", "60", "--cacert", "/run/exeat/bundle.pem"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestGateway, Origin, Origin]]:
    folder = tmp_path_factory.mktemp("capture")
    with (
        Origin("api.test", address="127.0.0.51").run_in_thread() as api,
        Origin("plain.test", address="127.0.0.52", tls=False).run_in_thread() as plain,
    ):
        policy = POLICY.replace("host: plain.test,", f"host: plain.test, port: {plain.port},")
        places = (
            f"  plain.test: {{addresses: [127.0.0.52/32], resolve: [127.0.0.52], scheme: http, port: {plain.port}}}\n"
        )
        gateway = TestGateway(
            folder,
            policy=places + policy,
            credentials=CREDENTIALS.replace("HOST", "api.test"),
            secrets={"api": SECRET},
            origins=[api],
            confined=True,
        )
        with gateway:
            yield gateway, api, plain


def refused(done: Completed) -> dict[str, object]:
    value = json.loads(done.out)
    assert isinstance(value, dict)
    return value


def test_a_bare_address_leads_nowhere_on_both_protocols(scene: tuple[TestGateway, Origin, Origin]) -> None:
    """No looked-up name, no connection: recorded, and the client sees a reset."""
    gateway, api, _ = scene
    before = len(api.connections)
    for address in ("http://192.0.2.1/", "http://[2001:db8::1]/", f"https://127.0.0.51:{api.port}/v1/x"):
        done = gateway.run(*CURL, "-k", address)
        assert done.code in (7, 35, 56), (address, done)
    assert len(api.connections) == before
    gateway.awaited(2, event="connection.refused", reason="address-literal-refused")


def test_a_denied_name_is_told_why_without_any_variable(scene: tuple[TestGateway, Origin, Origin]) -> None:
    """Clear text and TLS alike: the refusal reaches the agent in words, and nobody was asked for the name."""
    gateway, _, _ = scene
    for url in ("http://evil.test/", "https://evil.test/"):
        done = gateway.run(*CURL, url)
        assert refused(done)["reason"] == "no-rule", (url, done)


def test_an_allowed_call_gets_the_credential_without_any_variable(scene: tuple[TestGateway, Origin, Origin]) -> None:
    """The placeholder goes in, the secret goes up, and the proxy variables were not there."""
    gateway, api, _ = scene
    url = f"https://api.test:{api.port}/v1/x"
    script = f'key=$API_KEY; exec {" ".join(CURL)} -f -H "Authorization: Bearer $key" {url}'
    done = gateway.run("sh", "-c", script)
    assert done.code == 0, (done, gateway.errors())
    assert api.received[-1].values("authorization") == [f"Bearer {SECRET}"]
    assert SECRET not in done.out


def test_clear_text_is_judged_by_the_looked_up_name(scene: tuple[TestGateway, Origin, Origin]) -> None:
    """A Host header for another name than the one that was looked up is refused; the right one passes."""
    gateway, _, plain = scene
    url = f"http://plain.test:{plain.port}/x"
    assert gateway.run(*CURL, "-f", url).code == 0
    before = len(plain.received)
    done = gateway.run(*CURL, "-H", "Host: api.test", url)
    assert refused(done)["reason"] == "authority-mismatch"
    assert len(plain.received) == before


def test_a_wrong_server_name_in_a_captured_connection_is_refused(scene: tuple[TestGateway, Origin, Origin]) -> None:
    """SNI of an allowed host on the address of another name, and no SNI at all: alert, record, nothing dialled."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    gateway, api, _ = scene
    before = len(api.connections)
    for host, option in (("other.test", "-servername api.test"), ("api.test", "-noservername")):
        line = f"openssl s_client -connect {host}:{api.port} {option} </dev/null"
        done = gateway.run(*BARE, "sh", "-c", line)
        assert done.code != 0, done
    assert len(api.connections) == before


def test_names_never_leave_and_other_protocols_end_inside(scene: tuple[TestGateway, Origin, Origin]) -> None:
    """A lookup at any server is answered by the stub; other datagrams find nobody."""
    gateway, _, _ = scene
    program = """
import socket, struct
q = b"\\x12\\x34\\x01\\x00\\x00\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x03api\\x04test\\x00\\x00\\x01\\x00\\x01"
for server in ("127.0.0.53", "192.0.2.53", "198.51.100.53"):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(30)
    s.sendto(q, (server, 53)); print(server, s.recvfrom(512)[0][-4:-2].hex())
for family, server in ((socket.AF_INET, "192.0.2.7"), (socket.AF_INET6, "2001:db8::7")):
    for port in (443, 853, 4433):
        s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(0.3)
        try:
            s.sendto(b"x" * 64, (server, port)); s.recvfrom(64); print("ANSWERED", server, port)
        except OSError:
            pass
"""
    done = gateway.run(*BARE, "python3", "-c", program)
    assert done.out.split() == ["127.0.0.53", "c612", "192.0.2.53", "c612", "198.51.100.53", "c612"], done


def test_the_help_host_answers_without_any_variable(scene: tuple[TestGateway, Origin, Origin]) -> None:
    """http and https, by name alone."""
    gateway, _, _ = scene
    for url in ("http://exeat.internal/allowed", "https://exeat.internal/allowed"):
        done = gateway.run(*CURL, "-f", url)
        assert "api.test" in done.out, done
