"""HTTP/2 clients: the rule picks the lane, and each stream is judged, credentialed and recorded by itself (T11).

One gateway; one HTTP/1.1 origin as a witness under three names. `h2.test` has rules with `protocol: h2`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.mitm_process import LOWER
from tests.support.gateway import Box, TestGateway
from tests.support.http2 import H2Client, node, refused_handshake
from tests.support.origins import Exchange, Origin, echo
from tests.support.scripts import READ, chunked, early, head, script, text
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("http2")

SECRET = "kq8-Http2-Real-0d7f1c52aa93be"
MIB = 1 << 20
WINDOW = 65_535
"""What a client takes of one stream without acknowledging (RFC 9113 6.9.2)."""
BIG = 50 * MIB

CREDENTIALS = """
version: 1
credentials:
  h2key: {kind: bearer, secret: "store:api", hosts: [h2.test], owner: tests,
          placeholder: {env: H2_KEY, shape: "sk_{32}"}}
  h1key: {kind: bearer, secret: "store:api", hosts: [h1.test], owner: tests,
          placeholder: {env: H1_KEY, shape: "sk_{32}"}}
"""
ORDINARY = """
roles:
  agent:
    allow:
      - {name: ordinary, host: h1.test, methods: [GET], paths: ["/**"], credential: h1key}
"""
POLICY = (
    ORDINARY
    + """
      - {name: plain, host: h2.test, methods: [GET], paths: ["/plain/**"], protocol: h2}
      - {name: upload, host: h2.test, methods: [POST], paths: ["/upload/**"], protocol: h2, limits: {upload: 64MiB}}
      - {name: secret, host: h2.test, methods: [GET], paths: ["/secret/**"], protocol: h2, credential: h2key}
      - {name: other, host: pub.test, methods: [GET], paths: ["/**"]}
"""
)
NAMES = ("h2.test", "h1.test", "pub.test")


class Scene:
    """The gateway, its origin, one sandbox."""

    def __init__(self, gateway: TestGateway, origin: Origin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.box: Box = gateway.sandbox()

    def at(self, host: str) -> str:
        return f"{host}:{self.origin.port}"

    def client(self, host: str = "h2.test", *, alpn: Iterable[str] = ("h2",), strict: bool = True) -> H2Client:
        return H2Client(self.box, self.at(host), alpn=alpn, strict=strict)

    def bearer(self, variable: str) -> str:
        return f"Bearer {self.box.placeholders[variable]}"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with (
        Origin(*NAMES, address="127.0.0.43", handler=script(READ, text("done"))).run_in_thread() as origin,
        TestGateway(
            tmp_path_factory.mktemp("http2"),
            policy=POLICY,
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=[origin],
            settings="workers: 1\n",
        ) as gateway,
    ):
        yield Scene(gateway, origin)
        assert not origin.faults


def processes(gateway: TestGateway, module: str) -> list[int]:
    """The pids of this gateway's processes that run `module`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if module.encode() in words and gateway.process is not None and _below(entry, gateway.process.pid):
                    found.append(int(entry.name))
    return sorted(found)


def _below(entry: Path, ancestor: int) -> bool:
    pid = int(entry.name)
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def still(value: Callable[[], int], seconds: float = 1.0) -> None:
    """Wait until `value()` stays the same for so long."""
    seen, since = value(), time.monotonic()

    def unchanged() -> bool:
        nonlocal seen, since
        if (now := value()) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since >= seconds

    until(unchanged, what="a standstill")


@pytest.fixture(autouse=True)
def _from_here(scene: Scene) -> None:
    """Each test has a sandbox of its own, so that its records are told from those of others."""
    scene.origin.received.clear()
    scene.box = scene.gateway.sandbox()


# --- the lane is the rule's choice --------------------------------------------------------------------------------


def test_an_h2_only_client_at_an_ordinary_rule_gets_no_application_protocol(scene: Scene) -> None:
    """T11, C070, RULINGS 4.5: the alert says so, the reason is on record, the origin saw nothing."""
    assert "no application protocol" in refused_handshake(scene.box, scene.at("h1.test"), ["h2"])
    assert scene.origin.received == []
    (record,) = scene.gateway.awaited(event="connection.refused", sandbox=scene.box.id, host="h1.test")
    assert record["reason"] == "no-application-protocol"


def test_a_client_that_offers_both_at_an_ordinary_rule_is_served_over_http1_with_the_secret(scene: Scene) -> None:
    """T11: curl offers h2 and http/1.1, gets http/1.1, and the origin sees the secret in its slot."""
    authorization = f"Authorization: {scene.bearer('H1_KEY')}"
    answer = scene.box.curl(
        "--http2", "-w", "%{http_version}", "-H", authorization, f"https://{scene.at('h1.test')}/first"
    )
    assert answer.out == "done1.1"
    assert scene.origin.received[0].values("authorization") == [f"Bearer {SECRET}"]


def test_curl_speaks_http2_where_the_rule_says_so(scene: Scene) -> None:
    """C070: the same unmodified client is served over HTTP/2, with the secret, for a rule with `protocol: h2`."""
    authorization = f"Authorization: {scene.bearer('H2_KEY')}"
    answer = scene.box.curl(
        "--http2", "-w", "%{http_version}", "-H", authorization, f"https://{scene.at('h2.test')}/secret/c"
    )
    assert answer.out == "done2", answer
    assert scene.origin.received[0].values("authorization") == [f"Bearer {SECRET}"]


def test_a_client_without_h2_is_served_by_the_main_lane_at_an_h2_rule(scene: Scene) -> None:
    """The rule opens HTTP/2; it does not close HTTP/1.1, where the adapter's requests end up as well."""
    answer = scene.box.curl("--http1.1", "-w", "%{http_version}", f"https://{scene.at('h2.test')}/plain/c")
    assert answer.out == "done1.1"


@pytest.mark.parametrize("host", ["h1.test", "h2.test"])
def test_http2_without_having_agreed_on_it_is_closed_and_recorded(scene: Scene, host: str) -> None:
    """C072: the preface in TLS without ALPN is no request, also where a rule says h2; none named PRI is on record."""
    with scene.client(host, alpn=[]) as client:
        assert client.alpn is None
        client.ask("GET", "/plain/x")
        client.until_closed()
    assert scene.origin.received == []
    record = until(lambda: of(scene, host, "bad-head"), what="the record")[-1]
    assert (record["decision"], record["detail"]) == ("deny", "not an HTTP method")
    nothing_named_pri(scene)


def test_http2_in_clear_inside_a_tunnel_is_closed_and_recorded(scene: Scene) -> None:
    """C072: prior knowledge after CONNECT; neither lane reads it, and nothing reaches the origin."""
    for host in ("h1.test", "h2.test"):
        with scene.box.connect() as raw:
            asked = f"CONNECT {scene.at(host)} HTTP/1.1\r\nHost: {scene.at(host)}\r\n"
            raw.sendall(f"{asked}Proxy-Authorization: Bearer {scene.box.token}\r\n\r\n".encode())
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")
            raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            with contextlib.suppress(ConnectionError):
                assert b" 200 " not in raw.recv(4096)
        assert until(lambda host=host: of(scene, host, "tls-required", "bad-protocol"), what="the record")
    assert scene.origin.received == []
    nothing_named_pri(scene)


def of(scene: Scene, host: str, *reasons: str) -> list[dict[str, Any]]:
    """This sandbox's refusals in tunnels to `host` for one of `reasons`."""
    found = scene.gateway.records(sandbox=scene.box.id)
    return [r for r in found if r.get("reason") in reasons and str(r.get("connect_host", "")).startswith(host)]


def nothing_named_pri(scene: Scene) -> None:
    """The preface was never taken for a request."""
    named = [r for r in scene.gateway.records(sandbox=scene.box.id) if r.get("method") == "PRI"]
    assert named == []


# --- T11: concurrent streams --------------------------------------------------------------------------------------


def test_twenty_concurrent_streams_each_get_the_secret_at_an_http1_origin(scene: Scene) -> None:
    """T11: node offers h2 alone; each of its streams is one judged, credentialed, recorded request."""
    done = node(scene.box, scene.at("h2.test"), 20, "/secret/n", {"authorization": scene.bearer("H2_KEY")})
    assert done.get("alpn") == "h2", done
    assert [answer["status"] for answer in done["answers"]] == [200] * 20
    assert SECRET not in json.dumps(done)
    assert sorted(one.target for one in scene.origin.received) == sorted(f"/secret/n{number}" for number in range(20))
    for request in scene.origin.received:
        assert request.values("authorization") == [f"Bearer {SECRET}"]
        assert request.version == "HTTP/1.1"
        assert request.values("host") == [scene.at("h2.test")]
    handoffs = scene.gateway.awaited(20, event="request.handoff", sandbox=scene.box.id)
    assert len(handoffs) == 20
    assert {(one["lane"], one["rule"]) for one in handoffs} == {("mitm", "agent/secret")}


def test_the_placeholder_of_another_rule_is_refused_on_its_stream_alone(scene: Scene) -> None:
    """A stream that carries a placeholder outside its slot is refused; its neighbour is served."""
    with scene.client() as client:
        wrong = client.ask("GET", "/plain/a", [("x-leak", scene.box.placeholders["H2_KEY"])])
        right = client.ask("GET", "/plain/b")
        client.settle()
        assert client.streams[wrong].status == 403
        assert client.streams[wrong].reason == "placeholder-misuse"
        assert client.streams[right].status == 200
    assert [one.target for one in scene.origin.received] == ["/plain/b"]


# --- each stream is judged ----------------------------------------------------------------------------------------


def test_another_authority_on_a_stream_is_421_and_its_neighbours_go_on(scene: Scene) -> None:
    """B041: one connection for h2.test; a stream with another `:authority`, allowed elsewhere, gets 421."""
    with scene.client() as client:
        before = client.ask("GET", "/plain/before")
        coalesced = client.ask("GET", "/x", authority=scene.at("pub.test"))
        after = client.ask("GET", "/plain/after")
        client.settle()
        assert [client.streams[number].status for number in (before, coalesced, after)] == [200, 421, 200]
        assert client.streams[coalesced].reason == "authority-mismatch"
    assert sorted(one.target for one in scene.origin.received) == ["/plain/after", "/plain/before"]


@pytest.mark.parametrize(("host", "authority"), [("pub.test", "h2.test"), ("h2.test", "pub.test")])
def test_a_host_header_beside_another_authority_is_refused(scene: Scene, host: str, authority: str) -> None:
    """Two names in one request: neither is chosen."""
    with scene.client(strict=False) as client:
        number = client.ask("GET", "/plain/x", [("host", scene.at(host))], authority=scene.at(authority))
        client.settle()
        assert client.closed or client.streams[number].reset is not None
    assert scene.origin.received == []


def test_what_no_rule_allows_is_refused_so_that_an_agent_can_read_why(scene: Scene) -> None:
    """The refusal is the main lane's own answer, also for an upload that is not over yet."""
    with scene.client() as client:
        number = client.ask("GET", "/nothing")
        upload = client.ask("POST", "/nothing", body=bytes(1000), end=False)
        client.settle()
        for one in (number, upload):
            stream = client.streams[one]
            assert (stream.status, stream.reason) == (403, "no-rule")
            assert stream.headers["content-type"] == "application/problem+json"
            assert "mitmproxy" not in str(stream.headers)
        assert client.streams[upload].reset in (None, 0)  # NO_ERROR: the rest of the body is not wanted
    assert scene.origin.received == []


@pytest.mark.parametrize(
    ("path", "headers", "sentence"),
    [
        ("/plain/x", [("x-a", "b\r\nSmuggled: 1")], "a header value with a line end"),
        ("/plain/x HTTP/1.1\r\nSmuggled: 1\r\nX: y", [], "a path with a whole head in it"),
        ("/plain/x y", [], "a path with a space"),
        ("/plain/x", [("x-a\r\nsmuggled", "1")], "a header name with a line end"),
        ("/plain/x", [("x-a", "b\x00c")], "a NUL in a header value"),
        ("/plain/x", [("transfer-encoding", "chunked")], "framing of another protocol"),
        ("/plain/x", [("connection", "upgrade"), ("upgrade", "websocket")], "an upgrade"),
        ("/plain/x", [("content-length", "7")], "a length without a body"),
    ],
)
def test_a_head_that_http1_cannot_say_is_not_forwarded(
    scene: Scene, path: str, headers: list[tuple[str, str]], sentence: str
) -> None:
    """B064: the stream is reset or the connection ended; no byte of it reached the origin; it is on record."""
    with scene.client(strict=False) as client:
        number = client.ask("GET", path, headers)
        client.settle()
        stream = client.streams[number]
        assert stream.status in (0, 400), sentence
        assert client.closed or stream.reset is not None or stream.status == 400, sentence
    assert scene.origin.received == [], sentence
    scene.gateway.awaited(event="request.refused", sandbox=scene.box.id)


def test_a_scheme_other_than_https_is_refused(scene: Scene) -> None:
    """The inside of TLS is https, whatever the stream says."""
    with scene.client(strict=False) as client:
        number = client.ask("GET", "/plain/x", scheme="http")
        client.settle()
        assert client.streams[number].reset is not None
    assert scene.origin.received == []


def test_connect_inside_http2_is_refused(scene: Scene) -> None:
    """No tunnel in a tunnel."""
    with scene.client(strict=False) as client:
        number = client.ask("CONNECT", "/", authority="127.0.0.1:22")
        client.settle()
        assert client.closed or client.streams[number].reset is not None
    assert scene.origin.received == []


def test_what_is_not_http2_ends_the_connection(scene: Scene) -> None:
    """After `h2` was agreed, other bytes are no way to raw TCP or another protocol."""
    with scene.client() as client:
        client.raw(b"SSH-2.0-x\r\n" * 20)
        client.until_closed()
    assert scene.origin.received == []


# --- bodies -------------------------------------------------------------------------------------------------------


def test_an_upload_without_a_length_arrives_byte_for_byte(scene: Scene) -> None:
    """HTTP/2 needs no Content-Length; at the origin the body is framed as chunks, and nothing follows it."""
    body = hashlib.sha512(b"upload").digest() * 40_000  # 2.5 MB: many windows
    with scene.client() as client:
        number = client.ask("POST", "/upload/x", body=body)
        client.settle()
        assert client.streams[number].status == 200
    (request,) = scene.origin.received
    assert request.header("transfer-encoding") == "chunked"
    assert request.body_sha256 == hashlib.sha256(body).hexdigest()


def test_an_upload_with_a_length_has_exactly_one_at_the_origin(scene: Scene) -> None:
    """C054: curl sends `content-length` over HTTP/2; the origin's head has that one length and no chunks."""
    data = hashlib.sha512(b"length").digest() * 4096
    file = scene.gateway.home / "length.bin"
    file.write_bytes(data)
    answer = scene.box.curl(
        *("--http2", "-w", "%{http_version}", "--data-binary", f"@{file}"), f"https://{scene.at('h2.test')}/upload/l"
    )
    assert answer.out == "done2", answer
    (request,) = scene.origin.received
    assert request.values("content-length") == [str(len(data))]
    assert request.values("transfer-encoding") == []
    assert request.body_sha256 == hashlib.sha256(data).hexdigest()


def test_hundreds_of_streams_at_once_over_three_connections_complete(scene: Scene) -> None:
    """C092: what a package manager asks for in one go, within a sandbox's 256 at a time: all answered, none reset."""
    with scene.client() as one, scene.client() as two, scene.client() as three:
        clients = (one, two, three)
        for number, client in enumerate(clients):
            for stream in range(80):
                client.ask("GET", f"/plain/many-{number}-{stream}")
        for client in clients:
            client.settle()
            assert [bytes(stream.body) for stream in client.streams.values()] == [b"done"] * 80
    assert len({request.path for request in scene.origin.received}) == 240


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_three_hundred_tunnels_of_one_tool_complete(scene: Scene) -> None:
    """C092: a CONNECT and a handshake for each of 300 requests, 50 at a time, as package managers limit themselves."""
    options = ["-sS", "--fail", "--http1.1", "--parallel", "--parallel-max", "50", "-H", "Connection: close"]
    urls = f"https://{scene.at('h2.test')}/plain/tunnel-[1-300]"
    done = subprocess.run(
        ["curl", *options, "-w", "%{http_code}\\n", "-o", "/dev/null", urls],
        env=scene.box.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == ["200"] * 300
    assert len({request.path for request in scene.origin.received}) == 300


def test_an_upload_that_the_client_cuts_is_no_whole_one_at_the_origin(scene: Scene) -> None:
    """A reset stream is a cut message on the other side, never a well-formed short one."""
    with scene.client() as client:
        number = client.ask("POST", "/upload/cut", body=bytes(1000), end=False)
        scene.origin.wait_until(lambda: any(one.body_bytes == 1000 for one in scene.origin.received))
        client.reset(number)
        scene.origin.wait_until(lambda: scene.origin.received[0].connection.closed)
    assert not scene.origin.received[0].complete


def test_an_early_answer_ends_an_upload(scene: Scene) -> None:
    """The origin answers at the head: the client reads the answer although its body is not over."""
    scene.origin.on("/upload/early", early(403, "no thanks"))
    with scene.client() as client:
        number = client.ask("POST", "/upload/early", body=bytes(30_000), end=False)
        client.settle()
        assert (client.streams[number].status, bytes(client.streams[number].body)) == (403, b"no thanks")


def test_an_answer_that_the_origin_cuts_is_a_reset_stream(scene: Scene) -> None:
    """Half an answer never looks like a whole one, and other streams go on."""

    async def cut(exchange: Exchange) -> None:
        await exchange.send(head(200, (("Content-Length", "100"),)) + b"half")
        exchange.abort()

    scene.origin.on("/plain/cut", cut)
    with scene.client() as client:
        number = client.ask("GET", "/plain/cut")
        client.settle()
        assert client.streams[number].reset is not None
        assert not client.streams[number].ended
        again = client.ask("GET", "/plain/again")
        client.settle(again)
        assert client.streams[again].status == 200


def test_interim_answers_and_trailers_do_not_disturb_the_answer(scene: Scene) -> None:
    """C068: 103 and trailers stay in the lane: the adapter cannot carry them, and the answer is whole without."""
    interim = head(103, (("Link", "</x>; rel=preload"),), "Early Hints")
    answer = chunked([b"one", b"two"], trailers=(("Grpc-Status", "0"),), headers=(("Trailer", "Grpc-Status"),))
    scene.origin.on("/plain/hints", script(READ, interim, answer))
    with scene.client() as client:
        number = client.ask("GET", "/plain/hints")
        client.settle()
        stream = client.streams[number]
        assert (stream.status, bytes(stream.body), stream.ended) == (200, b"onetwo", True)


def test_a_large_echo_streams_both_ways_at_once(scene: Scene) -> None:
    """An origin that answers while it reads, a client that reads while it sends: neither waits for the other."""

    async def mirror(exchange: Exchange) -> None:
        await exchange.begin(200)
        while piece := await exchange.read_piece():
            await exchange.chunk(piece)
        await exchange.end()

    scene.origin.on("/upload/mirror", mirror)
    with scene.client() as client:
        number = client.ask("POST", "/upload/mirror", body=bytes(8 * MIB))
        client.settle()
        assert client.streams[number].size == 8 * MIB


# --- bounds -------------------------------------------------------------------------------------------------------


def test_ten_stalled_downloads_take_only_a_bounded_amount_from_the_origin(scene: Scene) -> None:
    """Ten 50 MB answers to a client that does not read: what the origin could send stays small, and a stream
    that is read meanwhile is served."""
    sent: dict[str, int] = {}

    async def big(exchange: Exchange) -> None:
        name = exchange.request.target
        await exchange.send(head(200, (("Content-Length", str(BIG)),)))
        while sent.setdefault(name, 0) < BIG:
            await exchange.send(bytes(64 * 1024))
            sent[name] += 64 * 1024
            exchange.origin.notice.tell()

    scene.origin.on("/plain/big/*", big)
    with scene.client() as client:
        client.widen(16 * MIB)  # so that only the streams' own windows close
        stalled = [client.ask("GET", f"/plain/big/{number}", stall=True) for number in range(10)]
        client.settle(until=lambda: all(client.streams[one].size == WINDOW for one in stalled))
        free = client.ask("GET", "/plain/free")
        client.settle(free)
        assert client.streams[free].status == 200
        still(lambda: sum(sent.values()))
        # Kernel buffers of three hops, the pool's, the adapter's; without bounds it would be 500 MB.
        assert sum(sent.values()) < 100 * MIB
    assert len(sent) == 10


def test_a_client_learns_how_many_streams_it_may_open(scene: Scene) -> None:
    """A hundred at once, told in SETTINGS."""
    with scene.client() as client:
        client.ask("GET", "/plain/x")
        client.settle()
        assert client.settings() == 100


def test_ending_the_sandbox_ends_its_http2_connection(scene: Scene) -> None:
    """Revocation reaches the streams in progress: cut, not finished."""
    box = scene.gateway.sandbox()

    async def endless(exchange: Exchange) -> None:
        await exchange.begin(200)
        while True:
            await exchange.chunk(b"x")
            await asyncio.sleep(0.01)

    scene.origin.on("/plain/endless", endless)
    with H2Client(box, scene.at("h2.test")) as client:
        number = client.ask("GET", "/plain/endless")
        client.settle(until=lambda: client.streams[number].size > 0)
        scene.gateway.admin.end_sandbox(box.id)
        client.settle()
        assert client.closed or client.streams[number].reset is not None
        assert not client.streams[number].ended


# --- the process --------------------------------------------------------------------------------------------------


def test_the_adapter_gives_way_to_our_other_processes(scene: Scene) -> None:
    """Where processors are short it comes last: by its nice value, and by its session's where the kernel has those."""
    (adapter,) = processes(scene.gateway, "proxy.mitm_process")
    (worker,) = processes(scene.gateway, "proxy.worker")
    assert os.getpriority(os.PRIO_PROCESS, adapter) == os.getpriority(os.PRIO_PROCESS, worker) + LOWER
    if Path("/proc/self/autogroup").exists():
        nice = [int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1]) for pid in (adapter, worker)]
        assert nice == [LOWER, 0]


def test_an_adapter_that_dies_is_started_again_alone(scene: Scene) -> None:
    """Killed in mid-connection: that connection ends, everything else goes on, and HTTP/2 comes back by itself."""
    (adapter,) = processes(scene.gateway, "proxy.mitm_process")
    workers = processes(scene.gateway, "proxy.worker")
    with scene.client() as client:
        client.ask("GET", "/plain/x")
        client.settle()
        os.kill(adapter, signal.SIGKILL)
        client.until_closed()
    both = scene.box.curl("--http2", f"https://{scene.at('h2.test')}/plain/meanwhile")
    assert both.out == "done"
    until(lambda: refused_handshake(scene.box, scene.at("h2.test"), ["h2"]) == "", what="HTTP/2")
    assert processes(scene.gateway, "proxy.worker") == workers


def test_without_a_rule_for_it_no_adapter_runs_and_a_reload_starts_it(tmp_path: Path) -> None:
    """RULINGS 4.5: the process exists only while a rule needs it; a reload that brings such a rule brings it."""
    with (
        Origin(*NAMES, address="127.0.0.44", handler=echo).run_in_thread() as origin,
        TestGateway(
            tmp_path / "gateway",
            policy=ORDINARY,
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=[origin],
            settings="workers: 1\n",
        ) as gateway,
    ):
        assert processes(gateway, "proxy.mitm_process") == []
        box = gateway.sandbox()
        gateway.write_policy(POLICY)
        gateway.reload()
        target = f"h2.test:{origin.port}"
        until(lambda: refused_handshake(box, target, ["h2"]) == "", what="HTTP/2 after the reload")
        with H2Client(box, target) as client:
            number = client.ask("GET", "/plain/x")
            client.settle()
            assert client.streams[number].status == 200
        assert gateway.stop() == 0
