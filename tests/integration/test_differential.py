"""Differential: what the gateway lets through is cut alike by every origin, and is what its log says it permitted.

Each request of tests/cases/smuggling.yaml is sent raw to the running gateway, in clear and inside TLS, on the plain and
the credentialed lane, in front of nginx, Node and a Node that forgives. All is played first, then every log is read: an
origin that saw another count or another target than the log permits would show in its own words. The answers of that
file come from a raw origin: a client never gets two for one request, and no later request gets a stranger's.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rules.yaml12 import load
from tests.support import servers
from tests.support.gateway import Box, TestGateway
from tests.support.origins import Exchange, Origin
from tests.support.servers import Server
from tests.support.signals import Gate

pytestmark = [
    pytest.mark.xdist_group("differential"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(servers.missing()), reason=f"not installed: {servers.missing()}"),
]

FILE = Path(__file__).parents[1] / "cases" / "smuggling.yaml"
TABLE: dict[str, Any] = load(FILE.read_text("utf-8"), FILE.name)[0]
REQUESTS: dict[str, dict[str, Any]] = {row["id"]: row for row in TABLE["requests"]}
ANSWERS: dict[str, dict[str, Any]] = {row["id"]: row for row in TABLE["answers"]}
WAYS = ("proxy", "clear", "tls", "key")
"""Absolute form to the proxy; inside CONNECT in clear; inside TLS; inside TLS with a credential."""
SECRET = "canary-51c0ffee7a2c9e4b1d8f-canary"
CREDENTIALS = """
version: 1
credentials:
  keyed:
    {kind: header, header: X-Api-Key, secret: "store:keyed",
     hosts: [nginx-key.test, node-key.test, lenient-key.test, raw-key.test], owner: tests,
     placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
STOLEN = re.compile(r"stolen|other\.test|admin")


def policy() -> str:
    rows = []
    for name in ("nginx", "node", "lenient"):
        rows.append(f"{{name: {name}.clear, host: {name}.test, scheme: http, methods: [GET, POST], paths: ['/c/**']}}")
        rows.append(f"{{name: {name}.tls, host: {name}-tls.test, methods: [GET, POST], paths: ['/c/**']}}")
        rows.append(
            f"{{name: {name}.key, host: {name}-key.test, methods: [GET, POST], paths: ['/c/**'], credential: keyed}}"
        )
    rows.append("{name: raw, host: raw-tls.test, methods: [GET], paths: ['/**']}")
    rows.append("{name: raw.key, host: raw-key.test, methods: [GET], paths: ['/**'], credential: keyed}")
    return "roles:\n  agent:\n    allow:\n" + "".join(f"      - {row}\n" for row in rows)


@dataclass
class Played:
    """What one payload led to at one origin by one way in."""

    answers: list[Answer]
    """Final answers that the client got, in order."""
    arrived: list[str] = field(default_factory=list)
    """`METHOD /suffix` at the origin, in order."""
    permitted: list[str] = field(default_factory=list)
    """The same of the gateway's intents."""


@dataclass(frozen=True)
class Answer:
    """`reason` and `request` are those of a refusal, else empty."""

    status: int
    reason: str = ""
    request: str = ""


@dataclass
class Place:
    gateway: TestGateway
    raw: Origin
    played: dict[tuple[str, str, str], Played]
    """(payload, way, origin)."""
    strange: dict[str, list[str]]
    """Lines of each origin's log that belong to no payload."""
    told: dict[str, list[str]]
    """Request -> the reasons of its refusals and the errors of its outcomes in the log."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("differential")
    with contextlib.ExitStack() as stack:
        origins = [
            stack.enter_context(servers.nginx(folder / "nginx")),
            stack.enter_context(servers.node(folder / "node")),
            stack.enter_context(servers.node(folder / "lenient", lenient=True)),
        ]
        raw = stack.enter_context(
            Origin("raw-tls.test", "raw-key.test", address="127.0.0.68", handler=own_target).run_in_thread()
        )
        listeners: list[Any] = [listener for one in origins for listener in (one.clear, one.tls)]
        gateway = stack.enter_context(
            TestGateway(
                folder / "gateway",
                policy=policy(),
                credentials=CREDENTIALS,
                secrets={"keyed": SECRET},
                origins=[*listeners, raw],
            )
        )
        played: dict[tuple[str, str, str], Played] = {}
        for case in REQUESTS.values():
            box = gateway.sandbox()
            for way in case.get("ways", WAYS):
                for server in origins:
                    if server.name == "lenient" and way in ("proxy", "clear"):
                        continue  # what differs between the ways differs in front of two origins
                    played[case["id"], way, server.name] = Played(play(box, case, way, server))
        for server in origins:
            server.stop()
        strange = {server.name: arrivals(server, played) for server in origins}
        yield Place(gateway, raw, played, strange, permits(gateway, played))


# --- one payload ---


def filled(case: dict[str, Any], way: str, host: str, box: Box) -> bytes:
    """The payload's bytes. Its targets begin with /c/PAYLOAD-WAY, by which the logs tell them apart."""
    mark = f"/c/{case['id']}-{way}"
    who = {"proxy": shown(box), "key": f"X-Api-Key: {box.placeholders['API_KEY']}\r\n"}.get(way, "")
    names = {
        "{end}": "GET {u}/end HTTP/1.1\r\n{h}Connection: close\r\n\r\n",
        "{long}": "a" * 70_000,
        "{many}": "".join(f"X-{number}: y\r\n" for number in range(120)),
        "{u}": f"http://{host}{mark}" if way == "proxy" else mark,
        "{h}": f"Host: {host}\r\n{who}",
        "{who}": who,
        "{host}": host,
        "{scheme}": "http" if way in ("proxy", "clear") else "https",
    }
    text: str = case["send"]
    for name, value in names.items():
        text = text.replace(name, value)
    return text.encode("latin-1")


def play(box: Box, case: dict[str, Any], way: str, server: Server) -> list[Answer]:
    """Send it; all final answers until the gateway closes."""
    host = server.clear.host if way in ("proxy", "clear") else f"{server.tls.names[way == 'key']}:{server.tls.port}"
    with opened(box, way, host) as connection:
        with contextlib.suppress(OSError):  # a refusal may close before all was sent
            connection.sendall(filled(case, way, host, box))
        if case.get("cut"):
            return []
        reader = Reader(connection)
        answers: list[Answer] = []
        with contextlib.suppress(ConnectionError):
            while (head := reader.head()) is not None:
                body = reader.body(head, silent=case["send"].startswith("HEAD") and not answers)
                if (status := int(head[9:12])) >= 200:
                    answers.append(answer_of(status, head, body))
        return answers


def answer_of(status: int, head: bytes, body: bytes) -> Answer:
    """What the client can tell of it."""
    if b"proxy-status: exeat" not in head.lower():
        return Answer(status)
    told = json.loads(body)
    return Answer(status, told["reason"], told["request_id"])


class Reader:
    """Cuts answers out of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""

    def head(self) -> bytes | None:
        """The next head, or None where the connection ends before one begins. Raises ConnectionError inside it."""
        if not self._data and not self._more():
            return None
        return self._until(b"\r\n\r\n")

    def body(self, head: bytes, *, silent: bool = False) -> bytes:
        """The body that `head` announces: by length or in chunks. `silent`: it answers a HEAD."""
        lower = head.lower()
        if silent or int(head[9:12]) < 200:
            return b""
        if b"transfer-encoding: chunked" in lower:
            body = b""
            while size := int(self._until(b"\r\n"), 16):
                body += self._exactly(size + 2)[:-2]
            while self._until(b"\r\n") != b"\r\n":
                pass
            return body
        found = re.search(rb"content-length: (\d+)", lower)
        return self._exactly(int(found[1])) if found else b""

    @property
    def rest(self) -> bytes:
        """What came beyond what was read."""
        return self._data

    def _more(self) -> bool:
        piece = self._connection.recv(65_536)
        self._data += piece
        return bool(piece)

    def _exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            if not self._more():
                raise ConnectionError("cut")
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            if not self._more():
                raise ConnectionError("cut")
        return self._exactly(self._data.index(mark) + len(mark))


def shown(box: Box) -> str:
    """The line by which a client says whose it is."""
    return f"Proxy-Authorization: Basic {b64encode(f'session:{box.token}'.encode()).decode()}\r\n"


@contextlib.contextmanager
def opened(box: Box, way: str, host: str) -> Iterator[socket.socket]:
    """A connection of the sandbox on which requests to `host` can be written."""
    with box.connect() as plain:
        if way == "proxy":
            yield plain
            return
        plain.sendall(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{shown(box)}\r\n".encode())
        head = Reader(plain).head()
        assert head is not None
        assert head.startswith(b"HTTP/1.1 200 "), head
        if way == "clear":
            yield plain
            return
        context = ssl.create_default_context(cafile=str(box.gateway.client_files / "ca.pem"))
        with context.wrap_socket(plain, server_hostname=host.partition(":")[0]) as inside:
            yield inside


# --- the logs ---

MARKED = re.compile(r"/c/(.+)-([a-z]+)(/[^/]*)")


def arrivals(server: Server, played: dict[tuple[str, str, str], Played]) -> list[str]:
    """Sort the origin's log by payload; the lines that belong to none, or that tell of what no payload may lead to."""
    strange = []
    for line in server.asked():
        whole = not line.startswith("! ")
        method, _, path = line.removeprefix("! 400 ").removeprefix("! 499 ").partition(" ")
        found = MARKED.fullmatch(path)
        one = played.get((found[1], found[2], server.name)) if found else None
        case = REQUESTS[found[1]] if found and one is not None else {}
        if found and one is not None and (whole or "begun" in case or case.get("cut")):
            one.arrived.append(f"{method} {found[3]}")
        else:
            strange.append(line)
    return strange


def permits(gateway: TestGateway, played: dict[tuple[str, str, str], Played]) -> dict[str, list[str]]:
    """Sort the gateway's intents by payload; what its log says of refused and failed requests, by request."""
    told: dict[str, list[str]] = {}
    for record in gateway.settled(0):
        event, said = record["event"], record.get("reason") or record.get("error")
        found = MARKED.fullmatch(record.get("path", ""))
        if event in ("request.intent", "broker.intent") and found:
            one = played[found[1], found[2], re.split(r"[-.]", record["host"])[0]]
            one.permitted.append(f"{record['method']} {found[3]}")
        elif event in ("request.refused", "connection.refused", "request.outcome", "broker.outcome") and said:
            told.setdefault(record.get("request_id", ""), []).append(said)
    return told


def wanted(case: dict[str, Any]) -> list[str]:
    """What must arrive."""
    ends = "{end}" in case["send"] and (not case.get("reason") or case.get("closes") is False)
    return [*case.get("expect", ()), *(["GET /end"] if ends else [])]


# --- requests ----------------------------------------------------------------------------------------------------


def test_the_table_has_refusals_and_passages() -> None:
    """Both kinds are there in number, each payload once, and every row says what to expect."""
    assert len(REQUESTS) == len(TABLE["requests"]) >= 100
    assert sum("reason" in case for case in REQUESTS.values()) >= 60
    assert sum("reason" not in case for case in REQUESTS.values()) >= 20
    assert all("reason" in case or "expect" in case for case in REQUESTS.values())


@pytest.mark.parametrize("payload", REQUESTS)
def test_every_origin_sees_the_requests_that_the_log_permits(place: Place, payload: str) -> None:
    """Equal counts and targets at all origins by every way in, equal to the gateway's intents and to the table."""
    case = REQUESTS[payload]
    plays = {key[1:]: one for key, one in place.played.items() if key[0] == payload}
    assert len(plays) >= 2 * len(case.get("ways", WAYS))
    for (way, name), one in plays.items():
        where = f"{case['sentence']}: {way}, {name}: {one}"
        assert not any(STOLEN.search(line) for line in one.arrived), where
        if case.get("cut"):
            assert set(one.arrived) <= set(one.permitted) <= {"POST /1"}, where
            continue
        if "begun" in case:
            assert one.permitted == [case["begun"]], where
            assert one.arrived in ([], one.permitted), where
            assert [answer.reason for answer in one.answers] == [case["reason"]], where
            # The broker knows only that the worker took the rest of the request back.
            assert set(place.told[one.answers[0].request]) & {case["reason"], "client-gone"}, where
        else:
            assert one.arrived == wanted(case), where
            assert one.permitted == one.arrived, where
            refusals = [case["reason"]] if "reason" in case else []
            assert sorted(answer.reason for answer in one.answers) == sorted([""] * len(one.arrived) + refusals), where
            assert all(answer.status == 200 for answer in one.answers if not answer.reason), where
            assert all(answer.reason in place.told[answer.request] for answer in one.answers if answer.reason), where


def test_no_origin_saw_anything_else(place: Place) -> None:
    """No request that belongs to no payload, and none that an origin could not parse."""
    assert place.strange == {name: [] for name in place.strange}


# --- answers -----------------------------------------------------------------------------------------------------


def written(text: str) -> tuple[bytes, bytes]:
    """(what the origin sends at once, what it sends once the client has its answer)."""
    hint = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    first, _, later = text.replace("{interims}", hint * 200).partition("{again}")
    return first.encode("latin-1"), later.encode("latin-1")


@pytest.fixture(scope="module", params=["tls", "key"])
def visitor(request: pytest.FixtureRequest, place: Place) -> tuple[str, Box, str]:
    """(way in, sandbox, authority) towards the raw origin."""
    name = place.raw.names[request.param == "key"]
    return request.param, place.gateway.sandbox(), f"{name}:{place.raw.port}"


@pytest.mark.parametrize("payload", ANSWERS)
def test_an_answer_is_one_answer_or_none(place: Place, visitor: tuple[str, Box, str], payload: str) -> None:
    """A client gets one answer to one request, and what an origin says beyond it reaches no later request."""
    way, box, host = visitor
    case = ANSWERS[payload]
    first, later = written(case["send"])
    delivered, said = Gate(), threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(first)
        exchange.request.complete = exchange.keep_alive = True  # the origin goes on reading, whatever it has sent
        if later:
            await delivered.passage()
            with contextlib.suppress(OSError):
                await exchange.send(later)
            said.set()

    place.raw.on(f"/bad/{payload}-{way}", script)
    with opened(box, way, host) as connection:
        answer, body = asked(connection, box, way, host, f"/bad/{payload}-{way}")
        match case["client"]:
            case "whole":
                assert (answer.status, body) == (200, b"ab")
            case "refused":
                assert (answer.status, answer.reason) == (502, "upstream-protocol")
            case other:
                assert other == "refused-or-cut"
                assert answer.reason == "upstream-protocol" or answer.status == CUT
        if later:
            delivered.open()
            assert said.wait(60), "the origin could not say the rest"
        assert clean(connection, box, way, host, payload) in (200, CUT)
    with opened(box, way, host) as connection:
        assert clean(connection, box, way, host, payload) == 200


CUT = 0
"""Answer.status where the answer did not come whole."""


def asked(connection: socket.socket, box: Box, way: str, host: str, path: str) -> tuple[Answer, bytes]:
    """Send one request and read its final answer."""
    key = f"X-Api-Key: {box.placeholders['API_KEY']}\r\n" if way == "key" else ""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{key}\r\n".encode())
    reader = Reader(connection)
    try:
        while (head := reader.head()) is not None and head.startswith(b"HTTP/1.1 1"):
            pass
        if head is None:
            return Answer(CUT), b""
        body = reader.body(head)
    except ConnectionError:
        return Answer(CUT), b""
    assert not reader.rest, "bytes beyond the one answer"
    return answer_of(int(head[9:12]), head, body), body


def clean(connection: socket.socket, box: Box, way: str, host: str, payload: str) -> int:
    """The status of a later request's answer, which is its own; CUT where the connection was closed before."""
    try:
        answer, body = asked(connection, box, way, host, f"/clean/{payload}-{way}")
    except OSError:
        return CUT
    assert answer.status != 200 or body == f"/clean/{payload}-{way}".encode()
    return answer.status


async def own_target(exchange: Exchange) -> None:
    """Answers with the target. It echoes no header: three echoed secrets in an hour disarm a credential."""
    await exchange.answer(200, exchange.request.target.encode(), (("Content-Type", "text/plain"),))
