"""Identity by the channel: token on the shared listener, bound address, own port, own socket (RULINGS 2.5, 2.6)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import TestGateway, free_port
from tests.support.origins import Origin

pytestmark = pytest.mark.xdist_group("identity")

POLICY = """
roles:
  agent:
    allow:
      - {name: read, host: pub.test, methods: [GET], paths: ["/v1/**"]}
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestGateway, Origin]]:
    folder = tmp_path_factory.mktemp("identity")
    with (
        Origin("pub.test", address="127.0.0.41").run_in_thread() as origin,
        TestGateway(folder, policy=POLICY, origins=[origin]) as gateway,
    ):
        yield gateway, origin


def url(origin: Origin) -> str:
    return f"https://pub.test:{origin.port}/v1/x"


def connect_status(gateway: TestGateway, *headers: str) -> tuple[int, str]:
    """Status and head of a CONNECT on the shared listener."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as raw:
        lines = ["CONNECT pub.test:22 HTTP/1.1", "Host: pub.test:22", *headers, "", ""]
        raw.sendall("\r\n".join(lines).encode())
        head = b""
        while b"\r\n\r\n" not in head and (piece := raw.recv(65536)):
            head += piece
    text = head.decode("latin-1")
    return int(text.split()[1]), text


def test_no_token_is_407_and_a_wrong_one_is_403(scene: tuple[TestGateway, Origin]) -> None:
    """407 with a Basic challenge only where none came; a wrong one is bad-token, and no prompt."""
    gateway, origin = scene
    before = len(origin.connections)
    status, head = connect_status(gateway)
    assert status == 407
    assert "proxy-authenticate: basic" in head.lower()
    status, head = connect_status(gateway, "Proxy-Authorization: Bearer not-a-token")
    assert (status, "bad-token" in head) == (403, True)
    assert len(origin.connections) == before


def test_an_ended_sandbox_is_told_so(scene: tuple[TestGateway, Origin]) -> None:
    """403 sandbox-ended, so that an agent knows to ask for a new one."""
    gateway, _ = scene
    box = gateway.sandbox()
    gateway.admin.end_sandbox(box.id)
    status, head = connect_status(gateway, f"Proxy-Authorization: Bearer {box.token}")
    assert (status, "sandbox-ended" in head) == (403, True)


def test_a_token_bound_to_another_address_does_not_count(scene: tuple[TestGateway, Origin]) -> None:
    """The address narrows: the right token from the wrong place is bad-token."""
    gateway, origin = scene
    box = gateway.sandbox(channel={"kind": "address", "address": "127.0.0.99"})
    status, head = connect_status(gateway, f"Proxy-Authorization: Bearer {box.token}")
    assert (status, "bad-token" in head) == (403, True)
    near = gateway.sandbox(channel={"kind": "address", "address": "127.0.0.1"})
    assert near.curl("-f", url(origin)).code == 0


def test_an_own_port_identifies_without_a_token(scene: tuple[TestGateway, Origin]) -> None:
    """`sandbox create --port`: the listener is the identity; its token is refused on the shared listener."""
    gateway, origin = scene
    port = free_port()
    made = gateway.exeat("sandbox", "create", "--port", f"127.0.0.1:{port}", "--output", "json")
    assert made.code == 0, made
    answer = json.loads(made.out)
    assert "channel_key" not in answer
    box = gateway.sandbox()
    result = box.curl("-f", "-x", f"http://127.0.0.1:{port}", url(origin))
    assert result.code == 0, (result, gateway.errors())
    assert len(gateway.awaited(event="request.intent", sandbox=answer["id"])) == 1
    status, head = connect_status(gateway, f"Proxy-Authorization: Bearer {answer['token']}")
    assert (status, "bad-token" in head) == (403, True)


def test_an_own_unix_socket_identifies_without_a_token(scene: tuple[TestGateway, Origin], tmp_path: Path) -> None:
    """`sandbox create --unix`: a socket that only one sandbox is given."""
    gateway, _ = scene
    path = tmp_path / "proxy.sock"
    made = gateway.exeat("sandbox", "create", "--unix", str(path), "--output", "json")
    assert made.code == 0, made
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(60)
        raw.connect(str(path))
        raw.sendall(b"GET http://exeat.internal/allowed HTTP/1.1\r\nHost: exeat.internal\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    assert b"pub.test" in answer


def test_two_ways_at_once_and_nonsense_are_usage_errors(scene: tuple[TestGateway, Origin]) -> None:
    """Exit code 2 and a sentence that says what is wanted."""
    gateway, _ = scene
    both = gateway.exeat("sandbox", "create", "--port", "127.0.0.1:1", "--address", "10.0.0.1")
    assert (both.code, "choose one" in both.err) == (2, True)
    bad = gateway.exeat("sandbox", "create", "--port", "localhost")
    assert (bad.code, "ADDRESS:PORT" in bad.err) == (2, True)
