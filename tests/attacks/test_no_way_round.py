"""A sandbox of `exeat run` tries every way but ours (B034, B082, B084, B195), and attacks capture and stub themselves.

What left would be seen: two origins and, on the host's own addresses, listeners that must stay untouched. Programs run
inside with no variable of ours, as hostile code would.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from capture.inside import CAPTURE_PORT
from exeat.boundary import find_capture_tools
from tests.support.entries import PYTHON, Inside, inside_of
from tests.support.gateway import TestGateway
from tests.support.hello import client_hello, records
from tests.support.leaks import command_line, descendants
from tests.support.origins import Origin
from tests.support.waiting import until

pytestmark = [
    pytest.mark.xdist_group("no_way_round"),
    pytest.mark.skipif(find_capture_tools() is None, reason="iproute2 and nftables are not installed"),
]

POLICY = """
roles:
  agent:
    boundary: {external: tests, reason: the tests confine nothing}
    allow:
      - {name: read, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}
      - {name: open, host: pub.test, methods: [GET], paths: ["/v1/**"]}
      - {name: two, host: two.test, methods: [GET], paths: ["/v1/**"], protocol: h2}
      - {name: raw, host: raw.test, port: %d, tunnel: true, reason: a client that pins its certificate}
"""
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests,
        placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
OK = "HTTP/1.1 200"
SECRET = "canary-round-7f6e5d4c3b2a190817"
BARE = ("env", "-i", "PATH=/usr/bin:/bin:/usr/sbin:/sbin")
SEND = "GET /v1/x HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"

ASK = """
import json, os, socket, ssl, struct, sys, time

def query(name, kind=1):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return b"\\x07\\x07\\x01\\x00\\x00\\x01" + bytes(6) + labels + b"\\x00" + struct.pack("!HH", kind, 1)

def lookup(name, server="192.0.2.53", kind=1, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(5)
        for again in (True,) * 5 + (False,):  # as every resolver does: a datagram may be lost
            s.sendto(query(name, kind), (server, 53))
            try:
                raw = s.recv(2048)
                break
            except TimeoutError:
                if not again:
                    raise
    count = struct.unpack("!H", raw[6:8])[0]
    return socket.inet_ntoa(raw[-4:]) if count else None

def get(address, port, name, host=None):
    # (what came, or the error's name) of one TLS request to that address under that name
    context = ssl.create_default_context(cafile="/run/exeat/bundle.pem")
    context.check_hostname = False
    try:
        with socket.create_connection((address, port), timeout=60) as s:
            with context.wrap_socket(s, server_hostname=name) as t:
                t.sendall((SEND.format(host or f"{name}:{port}")).encode())
                data = b""
                while piece := t.recv(65536):
                    data += piece
                return data.split(b"\\r\\n")[0].decode("latin-1")
    except OSError as error:
        return type(error).__name__

def say(**what):
    print(json.dumps(what), flush=True)
"""


@dataclass
class Scene:
    gateway: TestGateway
    api: Origin
    pub: Origin
    one: Inside
    two: Inside

    def ask(self, box: Inside, text: str) -> Any:
        """What the program says as JSON; it runs inside `box` with no variable of ours."""
        program = ASK.replace("import json,", f"SEND = {SEND!r}\nimport json,", 1) + text
        done = box.command(*BARE, PYTHON, "-I", "-c", program)
        assert done.code == 0, done
        return json.loads(done.out)

    def works(self, box: Inside) -> bool:
        """The control: lookup, connection, TLS and answer, as any program has them."""
        text = f"say(got=get(lookup('pub.test'), {self.pub.port}, 'pub.test'))"
        return str(self.ask(box, text)["got"]).startswith(OK)

    def seen(self) -> list[tuple[int, int]]:
        return [(len(origin.connections), origin.bytes_in) for origin in (self.api, self.pub)]

    def workers(self) -> list[int]:
        assert self.gateway.process is not None
        return [pid for pid in descendants(self.gateway.process.pid) if b"-m proxy.worker " in command_line(pid)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    api = Origin("api.test", address="127.0.0.61")
    pub = Origin("pub.test", "raw.test", "two.test", address="127.0.0.62", authority=api.authority)
    with contextlib.ExitStack() as stack:
        for origin in (api, pub):
            stack.enter_context(origin.run_in_thread())
        gateway = TestGateway(
            tmp_path_factory.mktemp("round"),
            policy=POLICY % pub.port,
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=(api, pub),
        )
        stack.enter_context(gateway)
        one, two = stack.enter_context(inside_of(gateway)), stack.enter_context(inside_of(gateway))
        yield Scene(gateway, api, pub, one, two)


@pytest.fixture(autouse=True)
def control(scene: Scene) -> Iterator[None]:
    """After each attack a second sandbox is served: a boundary that denies everything would pass all of them."""
    yield
    assert scene.works(scene.two)


# --- other ways than ours (B082, B084) ---------------------------------------------------------------------------


class Witness:
    """TCP and UDP listeners on every address of the host, on one port."""

    def __init__(self) -> None:
        self.tcp = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self.udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.udp.bind(("::", self.port))
        for sock in (self.tcp, self.udp):
            sock.setblocking(False)

    def untouched(self) -> bool:
        for look in (self.tcp.accept, lambda: self.udp.recv(64)):
            with contextlib.suppress(BlockingIOError):
                look()
                return False
        return True

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


@pytest.fixture
def witness() -> Iterator[Witness]:
    found = Witness()
    yield found
    found.close()


def host_addresses() -> list[str]:
    """Numeric addresses of this machine that are not loopback."""
    found = set()
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((outside, 9))
            found.add(str(probe.getsockname()[0]))
    return sorted(found)


def refused_count(box: Inside) -> int | None:
    """What the rules inside `box` dropped, read from the host; None where only root could."""
    tools = find_capture_tools()
    nsenter = shutil.which("nsenter")
    if os.geteuid() != 0 or nsenter is None or tools is None:
        return None
    marker = str(box.shared).encode()
    for entry in os.listdir("/proc"):
        if not (entry.isdigit() and b"inside.py" in command_line(int(entry)) and marker in command_line(int(entry))):
            continue
        # Only the workload itself is in the namespace; `exeat run` and its helpers have the same words.
        done = subprocess.run(
            [nsenter, "-t", entry, "-n", tools.nft, "-j", "list", "counter", "inet", "exeat", "refused"],
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            return int(json.loads(done.stdout)["nftables"][-1]["counter"]["packets"])
    raise AssertionError("the sandbox has no counter")


def test_datagrams_quic_and_ping_end_inside(scene: Scene, witness: Witness) -> None:
    """B082: no datagram, no QUIC, no raw packet reaches anybody; what the rules dropped was counted."""
    before, counted = scene.seen(), refused_count(scene.one)
    targets = ["192.0.2.7", "127.0.0.62", "2001:db8::7", "::1", "198.18.0.1", "255.255.255.255", *host_addresses()]
    text = f"""
answered, raw = [], []
initial = b"\\xc3\\x00\\x00\\x00\\x01\\x08" + bytes(1200)
for server in {targets}:
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    for port in (443, {scene.pub.port}, {witness.port}, 123, 853):
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.settimeout(0.05)
            try:
                s.sendto(initial, (server, port)); s.recv(64); answered.append((server, port))
            except OSError:
                pass
for family, protocol in ((socket.AF_INET, 1), (socket.AF_INET6, 58), (socket.AF_INET, 255), (socket.AF_PACKET, 768)):
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as s:
                s.settimeout(0.2)
                there = "192.0.2.7" if family == socket.AF_INET else "2001:db8::7"
                s.sendto(b"\\x08\\x00\\xf7\\xff" + bytes(60), (there, 0))
                s.recv(64); raw.append((family, kind))
        except (OSError, TypeError):
            pass
say(answered=answered, raw=raw)
"""
    assert scene.ask(scene.one, text) == {"answered": [], "raw": []}
    assert witness.untouched()
    assert scene.seen() == before
    if counted is not None:
        after = refused_count(scene.one)
        assert after is not None
        assert after > counted


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_client_that_ignores_the_proxy_reaches_nobody(scene: Scene, witness: Witness) -> None:
    """B084: without proxy, with an address of its own choice, over IPv6: a failure, and no origin was touched."""
    before = scene.seen()
    place = f"api.test:{scene.api.port}"
    addresses = [*host_addresses(), "127.0.0.1", "192.0.2.1", "2001:db8::1", "::1"]
    bare = [f"[{address}]" if ":" in address else address for address in addresses]
    attempts = [
        ["--noproxy", "*", f"https://127.0.0.61:{scene.api.port}/v1/x"],
        ["--noproxy", "*", "--resolve", f"{place}:127.0.0.61", f"https://{place}/v1/x"],
        ["--noproxy", "*", "--resolve", f"{place}:192.0.2.1", f"https://{place}/v1/x"],
        ["--noproxy", "*", "--connect-to", f"{place}:192.0.2.1:443", f"https://{place}/v1/x"],
        ["--noproxy", "*", "-6", f"https://{place}/v1/x"],
        *(["--noproxy", "*", f"http://{address}:{witness.port}/"] for address in bare),
    ]
    for attempt in attempts:
        done = scene.one.command("curl", "-sk", "--max-time", "5", *attempt)
        assert done.code != 0, (attempt, done)
    assert witness.untouched()
    assert scene.seen() == before


# --- the stub and its addresses ----------------------------------------------------------------------------------


def test_an_address_means_nothing_in_another_sandbox(scene: Scene) -> None:
    """What the stub gave to one sandbox is a bare address in the next, even for a name permitted in both."""
    before = scene.seen()
    address = scene.ask(scene.one, "say(address=lookup('api.test'))")["address"]
    assert address.startswith("198.18.")
    text = f"say(got=get({address!r}, {scene.api.port}, 'api.test'), own=lookup('api.test'))"
    said = scene.ask(scene.two, text)
    assert not said["got"].startswith("HTTP/"), said
    assert said["own"] != address
    assert scene.seen() == before


def test_a_mapped_address_is_the_address(scene: Scene) -> None:
    """Runtimes that open IPv6 sockets only reach the synthetic address in its mapped form; the name is the same."""
    text = f"say(got=get('::ffff:' + lookup('pub.test'), {scene.pub.port}, 'pub.test'))"
    assert scene.ask(scene.one, text)["got"].startswith(OK)


def test_there_is_no_ipv6_address_and_any_server_is_the_stub(scene: Scene) -> None:
    """AAAA, HTTPS and TXT have no data, so no ECH key and no second way; IPv6 servers are answered by us too."""
    text = """
say(kinds=[lookup('api.test', kind=kind) for kind in (28, 65, 64, 16, 255)],
    six=lookup('api.test', '2001:db8::53', family=socket.AF_INET6))
"""
    said = scene.ask(scene.one, text)
    assert said["kinds"] == [None] * 5
    assert said["six"].startswith("198.18.")


def test_oversized_and_broken_queries_get_silence_and_the_next_is_answered(scene: Scene) -> None:
    """Over UDP and TCP: no answer longer than its question asks for, no crash, no lasting effect."""
    text = """
big = query("api.test") + bytes(4000)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(0.5)
    for data in (big, b"", b"\\x00", bytes(12), bytes(60000)):
        s.sendto(data, ("192.0.2.53", 53))
    try:
        answers = [len(s.recv(2048)) for _ in range(5)]
    except TimeoutError:
        answers = "silence"
tcp = []
largest, large = struct.pack("!H", 65535) + bytes(65535), struct.pack("!H", 4000) + big[:4000]
for data in (largest, large, b"\\x00", b"GET / HTTP/1.1\\r\\n\\r\\n"):
    with socket.create_connection(("192.0.2.53", 53), timeout=3) as s:
        try:
            s.sendall(data); s.shutdown(socket.SHUT_WR)
            tcp.append(s.recv(64).hex())
        except OSError as error:
            tcp.append("")
say(answers=answers, tcp=tcp, next=lookup("api.test"))
"""
    said = scene.ask(scene.one, text)
    assert said["answers"] == "silence" or max(said["answers"]) <= 12, said
    assert set(said["tcp"]) == {""}
    assert said["next"].startswith("198.18.")


def test_a_flood_of_lookups_and_of_idle_connections_stays_its_own(scene: Scene) -> None:
    """Hundreds of TCP connections to the stub hold a bounded number of descriptors; a neighbour is served meanwhile."""
    (worker,) = scene.workers()
    opened = len(os.listdir(f"/proc/{worker}/fd"))
    text = f"""
held = []
for _ in range(300):
    s = socket.socket(); s.settimeout(3)
    try:
        s.connect(("192.0.2.53", 53)); s.sendall(b"\\x00"); held.append(s)
    except OSError:
        s.close()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setblocking(False)
    end = time.monotonic() + 2
    sent = 0
    while time.monotonic() < end:
        try:
            s.sendto(query(f"n{{sent}}.evil.test"), ("192.0.2.53", 53)); sent += 1
        except BlockingIOError:
            time.sleep(0.001)
open("{scene.one.shared}/flooded", "w").close()
while not os.path.exists("{scene.one.shared}/enough"):
    time.sleep(0.05)
say(sent=sent)
"""
    program = ASK.replace("import json,", f"SEND = {SEND!r}\nimport json,", 1) + text
    (scene.one.shared / "flood.py").write_text(program)
    started = ["sh", "-c", f"{PYTHON} -I {scene.one.shared}/flood.py >{scene.one.shared}/said 2>&1 &"]
    assert scene.one.command(*BARE, *started).code == 0
    try:
        until(lambda: (scene.one.shared / "flooded").exists())
        assert len(os.listdir(f"/proc/{worker}/fd")) <= opened + 40
        assert scene.works(scene.two)
    finally:
        (scene.one.shared / "enough").touch()
    until(lambda: "sent" in (scene.one.shared / "said").read_text())
    until(lambda: _served(scene, scene.one))


def test_the_capturing_listener_itself_is_no_way_in(scene: Scene) -> None:
    """A connection made to it directly was not redirected from anywhere: cut, and on record; so are its neighbours."""
    before = scene.seen()
    cut = len(scene.gateway.records(event="connection.refused", reason="address-literal-refused"))
    text = f"""
got = []
ours = [(address, {CAPTURE_PORT}) for address in ("127.0.0.1", "::1", "198.18.9.9")]
for place in (*ours, ("192.0.2.1", 3128)):
    try:
        with socket.create_connection(place, timeout=5) as s:
            s.sendall(b"GET http://pub.test/v1/x HTTP/1.1\\r\\nHost: pub.test\\r\\n\\r\\n")
            got.append(s.recv(64).decode())
    except OSError:  # a reset may come as early as the connection
        got.append("")
say(got=got)
"""
    assert scene.ask(scene.one, text)["got"] == [""] * 4
    assert scene.seen() == before
    found = scene.gateway.awaited(cut + 4, event="connection.refused", reason="address-literal-refused")
    assert len(found) == cut + 4


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_streams_of_a_captured_http2_connection_are_judged_one_by_one(scene: Scene) -> None:
    """B041 without CONNECT: the looked-up name passes by HTTP/2, another authority on the same connection gets 421."""
    url = f"https://two.test:{scene.pub.port}/v1/x"
    ask = [*BARE, "curl", "-sS", "--http2", "--cacert", "/run/exeat/bundle.pem", "-w", "%{http_version} %{http_code}"]
    told = scene.one.command(*ask, "-o", "/dev/null", url)
    if "2 200" not in told.out and "1.1 200" in told.out:
        pytest.skip("this curl speaks no HTTP/2")
    assert told.out == "2 200", told
    before = scene.seen()
    for authority in (f"api.test:{scene.api.port}", "two.test", f"pub.test:{scene.pub.port}"):
        told = scene.one.command(*ask, "-o", "/dev/null", "-H", f"Host: {authority}", url)
        assert told.out == "2 421", told
    assert scene.seen() == before


# --- server names ------------------------------------------------------------------------------------------------


def encrypted_hello(name: str) -> bytes:
    """A hello with an encrypted_client_hello extension (0xfe0d) beside the outer name."""
    made = client_hello(name)
    at = 4 + 2 + 32 + 1
    at += 2 + int.from_bytes(made[at : at + 2])
    at += 1 + made[at]
    inner = b"\x00\x00\x01\x00\x01\x07\x00\x20" + bytes(32) + b"\x00\x40" + bytes(64)
    extensions = made[at + 2 :] + b"\xfe\x0d" + len(inner).to_bytes(2) + inner
    body = made[4:at] + len(extensions).to_bytes(2) + extensions
    return records(b"\x01" + len(body).to_bytes(3) + body)


@pytest.mark.parametrize(
    ("host", "outer", "kind", "sentence"),
    [
        ("pub.test", "pub.test", 22, "an inspected lane judges the outer name and ignores the rest"),
        ("pub.test", "api.test", 21, "an outer name of another host ends it"),
        ("raw.test", "raw.test", 21, "in a tunnel nothing that can be checked would be true"),
    ],
)
def test_a_hidden_server_name_opens_nothing(scene: Scene, host: str, outer: str, kind: int, sentence: str) -> None:
    """An encrypted ClientHello in a captured connection; `kind` is the TLS record that comes back: 21 is an alert."""
    before = scene.seen()
    known = len(scene.gateway.records(event="connection.refused", reason="sni-mismatch", sandbox=scene.one.id))
    with scene.one.reach(host, scene.pub.port) as connection:
        connection.sendall(encrypted_hello(outer))
        first = connection.recv(1)
    assert first == bytes([kind]), sentence
    assert scene.seen() == before
    if kind == 21:
        scene.gateway.awaited(known + 1, event="connection.refused", reason="sni-mismatch", sandbox=scene.one.id)


# --- the worker dies and comes back (B195) -----------------------------------------------------------------------


def test_a_kept_address_reaches_no_other_name_after_a_restart_and_a_new_lookup_recovers(scene: Scene) -> None:
    """The stub's table died with its worker: an old address is nobody's until its own name is looked up again."""
    kept = scene.ask(scene.one, "say(address=lookup('api.test'))")["address"]
    reached = len(scene.api.connections), len(scene.pub.connections)
    (worker,) = scene.workers()
    program = f"""
from_then, stop = [], time.monotonic() + 40
say(started=True)
while time.monotonic() < stop and not os.path.exists("{scene.one.shared}/over"):
    from_then.append(get({kept!r}, {scene.api.port}, 'pub.test'))
    time.sleep(0.02)
say(got=sorted(set(from_then)))
"""
    text = ASK.replace("import json,", f"SEND = {SEND!r}\nimport json,", 1) + program
    (scene.one.shared / "loop.py").write_text(text)
    started = f"{PYTHON} -I {scene.one.shared}/loop.py >{scene.one.shared}/loop 2>&1 &"
    assert scene.one.command(*BARE, "sh", "-c", started).code == 0
    until(lambda: "started" in (scene.one.shared / "loop").read_text())
    os.kill(worker, signal.SIGKILL)
    until(lambda: bool(scene.workers()) and scene.workers() != [worker])
    until(lambda: _served(scene, scene.one))
    text = f"""
others = [lookup(f"n{{number}}.test") for number in range(64)]
old = get({kept!r}, {scene.api.port}, 'api.test')
say(others=others, old=old, new=lookup('api.test'), got=get(lookup('api.test'), {scene.api.port}, 'api.test'))
"""
    said = scene.ask(scene.one, text)
    (scene.one.shared / "over").touch()
    until(lambda: "got" in (scene.one.shared / "loop").read_text())
    looped = json.loads((scene.one.shared / "loop").read_text().splitlines()[-1])["got"]
    assert kept not in said["others"]
    assert not said["old"].startswith("HTTP/"), "nobody looked it up since the restart"
    assert said["new"] == kept
    assert said["got"].startswith(OK)
    assert not any(line.startswith("HTTP/") for line in looped), looped
    assert len(scene.api.connections) <= reached[0] + 1, "the recovered request, and nothing before it"


def _served(scene: Scene, box: Inside) -> bool:
    with contextlib.suppress(AssertionError):
        return scene.works(box)
    return False
