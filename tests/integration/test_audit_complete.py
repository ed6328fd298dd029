"""The log after ten ways to end a request: complete, and clean of everything that was secret (T30)."""

from __future__ import annotations

import json
import secrets as random_secrets
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.entries import (
    ENTRIES,
    Entry,
    connect_through,
    entry_of,
    read_answer,
    read_head,
    read_to_end,
    tls_through,
)
from tests.support.gateway import Completed, TestGateway, free_port
from tests.support.leaks import command_line, descendants, files_below, leaks, process_texts, windows
from tests.support.origins import Exchange, Origin
from tests.support.signals import Gate

pytestmark = pytest.mark.xdist_group("audit_complete")


def unpredictable(prefix: str) -> str:
    return prefix + random_secrets.token_urlsafe(24).replace("-", "A").replace("_", "B")


REAL = unpredictable("sk_live_")
CARRIED = {
    "authorization": unpredictable("ah"),
    "cookie": unpredictable("ck"),
    "query": unpredictable("qq"),
    "userinfo": unpredictable("ui"),
    "location": unpredictable("lo"),
    "user-agent": unpredictable("ua"),
    "own header": unpredictable("oh"),
    "body": unpredictable("bd"),
    "wrong token": unpredictable("xt_"),
}
CREDENTIALS = """
version: 1
credentials:
  api: {{kind: header, header: X-Api-Key, secret: "store:api", hosts: [api.test], owner: tests,
         placeholder: {{env: API_KEY, shape: "sk_live_{{24}}"}}}}
  gone: {{kind: bearer, secret: "store:gone", hosts: [gone.test], owner: tests,
          placeholder: {{env: GONE_KEY, shape: "gk_{{24}}"}}}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {{name: api, host: api.test, methods: [GET], paths: ["/v1/**"], query: any, credential: api}}
      - {{name: gone, host: gone.test, methods: [GET], paths: ["/v1/**"], credential: gone}}
      - {{name: open, host: open.test, methods: [GET, POST], paths: ["/v1/**"], query: any, client_auth: pass}}
      - {{name: down, host: down.test, port: {down}, methods: [GET], paths: ["/v1/**"], query: any, client_auth: pass}}
      - {{name: badcert, host: badcert.test, methods: [GET], paths: ["/v1/**"], query: any, client_auth: pass}}
      - {{name: silent, host: silent.test, port: {silent}, methods: [GET], paths: ["/v1/**"], query: any,
          client_auth: pass}}
      - {{name: opaque, host: opaque.test, port: {opaque}, tunnel: true, reason: "a test"}}
"""
LOOSE = """  down.test: {{addresses: [127.0.0.38/32], resolve: [127.0.0.38], port: {down}}}
  silent.test: {{addresses: [127.0.0.38/32], resolve: [127.0.0.38], port: {silent}}}
"""

CARRIERS = (
    "-H",
    f"Authorization: Bearer {CARRIED['authorization']}",
    "-H",
    f"Cookie: session={CARRIED['cookie']}",
    "-A",
    f"client/{CARRIED['user-agent']}",
    "-H",
    f"X-Own: {CARRIED['own header']}",
)
QUERY = f"?token={CARRIED['query']}&page=1"


@dataclass
class Scene:
    gateway: TestGateway
    origin: Origin
    badcert: Origin
    opaque: Origin
    silent: int
    down: int
    gate: Gate = field(default_factory=Gate)

    def authority(self, host: str) -> str:
        ports = {
            "badcert.test": self.badcert.port,
            "opaque.test": self.opaque.port,
            "silent.test": self.silent,
            "down.test": self.down,
        }
        return f"{host}:{ports.get(host, self.origin.port)}"


async def _redirect(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.answer(302, b"", (("Location", f"https://open.test/next?code={CARRIED['location']}"),))


async def _plain(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.answer(200, b"0123456789")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    origin = Origin("api.test", "gone.test", "open.test", address="127.0.0.36", handler=_plain)
    badcert = Origin("badcert.test", address="127.0.0.37", certificate="expired")
    opaque = Origin("opaque.test", address="127.0.0.39", handler=_plain)
    down = free_port()
    with (
        origin.run_in_thread(),
        badcert.run_in_thread(),
        opaque.run_in_thread(),
        socket.create_server(("127.0.0.38", 0)) as listener,  # connects, and never says a word
    ):
        silent = listener.getsockname()[1]
        gateway = TestGateway(
            tmp_path_factory.mktemp("audit"),
            policy=LOOSE.format(down=down, silent=silent) + POLICY.format(down=down, silent=silent, opaque=opaque.port),
            credentials=CREDENTIALS.format(),
            secrets={"api": REAL},
            origins=[origin, badcert, opaque],
        )
        with gateway:
            found = Scene(gateway, origin, badcert, opaque, silent, down)
            origin.on("/v1/redirect", _redirect)

            async def slow(exchange: Exchange) -> None:
                await exchange.begin()
                await exchange.chunk(b"begun")
                await found.gate.passage()

            origin.on("/v1/slow", slow)
            yield found
            found.gate.open()


@dataclass
class Played:
    """What one sandbox did, and what it was shown."""

    entry: Entry
    pages: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module", params=ENTRIES)
def played(request: pytest.FixtureRequest, scene: Scene) -> Iterator[Played]:
    """Every kind of ending once, one after the other, in a sandbox of its own."""
    with entry_of(request.param, scene.gateway) as entry:
        done = Played(entry)
        for name, (host, rest, arguments) in REQUESTS.items():
            answer = _curl(scene, entry, host, rest, arguments)
            done.pages[name] = answer.out + answer.err
            done.statuses[name] = int(answer.out.rpartition("\n")[2] or 0)
        _abort(scene, entry)
        _tunnel(scene, entry)
        done.pages["bad token"] = _bad_token(scene, entry)
        yield done


REQUESTS = {
    "allowed": ("open.test", f"/v1/allowed{QUERY}", CARRIERS),
    "userinfo": ("open.test", "/v1/userinfo", ("-u", f"me:{CARRIED['userinfo']}", "-d", CARRIED["body"])),
    "redirect": ("open.test", f"/v1/redirect{QUERY}", CARRIERS),
    "credentialed": ("api.test", "/v1/credentialed?page=1", ("-H", "X-Api-Key: {API_KEY}")),
    "client authority": ("api.test", f"/v1/authority{QUERY}", CARRIERS),
    "denied host": ("denied.test", f"/v1/host{QUERY}", CARRIERS),
    "denied path": ("open.test", f"/v2/path{QUERY}", CARRIERS),
    "upstream refused": ("down.test", f"/v1/down{QUERY}", CARRIERS),
    "upstream certificate": ("badcert.test", f"/v1/badcert{QUERY}", CARRIERS),
    "time-out": ("silent.test", f"/v1/silent{QUERY}", CARRIERS),
    "credential failure": ("gone.test", "/v1/gone", ("-H", "Authorization: Bearer {GONE_KEY}")),
}


def _curl(scene: Scene, entry: Entry, host: str, rest: str, arguments: tuple[str, ...]) -> Completed:
    filled = [
        item.replace("{API_KEY}", entry.environment["API_KEY"]).replace("{GONE_KEY}", entry.environment["GONE_KEY"])
        for item in arguments
    ]
    url = f"https://{scene.authority(host)}{rest}"
    return entry.command("curl", "-sS", "-i", "-m", "40", "-w", "\n%{http_code}", *filled, url)


def _abort(scene: Scene, entry: Entry) -> None:
    """The client goes away in the middle of an answer, with a reset."""
    with tls_through(entry, scene.authority("open.test")) as connection:
        head = f"GET /v1/slow{QUERY} HTTP/1.1\r\nHost: {scene.authority('open.test')}\r\n"
        connection.sendall((head + f"Cookie: session={CARRIED['cookie']}\r\n\r\n").encode())
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _tunnel(scene: Scene, entry: Entry) -> None:
    """An uninspected tunnel with a whole exchange inside."""
    context = ssl.create_default_context(cadata=scene.opaque.ca_pem)
    opened = connect_through(entry, scene.authority("opaque.test"))
    with context.wrap_socket(opened, server_hostname="opaque.test") as connection:
        head = f"GET /v1/tunnel{QUERY} HTTP/1.1\r\nHost: {scene.authority('opaque.test')}\r\n"
        connection.sendall((head + f"Cookie: session={CARRIED['cookie']}\r\n\r\n").encode())
        assert read_answer(connection)[0].startswith(b"HTTP/1.1 200")


def _bad_token(scene: Scene, entry: Entry) -> str:
    """A connection with a token that nobody was given."""
    with entry.connect() as connection:
        connection.sendall(
            f"GET http://open.test/v1/token{QUERY} HTTP/1.1\r\nHost: open.test\r\n"
            f"Proxy-Authorization: Bearer {CARRIED['wrong token']}\r\n\r\n".encode()
        )
        return read_to_end(connection).decode()


def of_path(scene: Scene, played: Played, path: str) -> list[dict[str, Any]]:
    """Every record of the requests for `path`, once they are over."""
    return scene.gateway.settled(sandbox=played.entry.id, path=path)


def names(records: list[dict[str, Any]]) -> list[str]:
    return sorted(str(record["event"]) for record in records)


# --- complete -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "path", "status", "reason", "rule"),
    [
        ("denied path", "/v2/path", 403, "no-rule", None),
        ("client authority", "/v1/authority", 403, "client-authority", "agent/api"),
    ],
)
def test_a_refused_request_is_one_record(
    scene: Scene, played: Played, kind: str, path: str, status: int, reason: str, rule: str | None
) -> None:
    """T30: what policy refused is a single record with decision and reason, and no other record has its path."""
    assert played.statuses[kind] == status
    [record] = of_path(scene, played, path)
    assert record["event"] == "request.refused"
    assert (record["decision"], record["reason"]) == ("deny", reason)
    assert record.get("rule") in (rule, None)
    assert record["query_keys"] == ["token", "page"]


def test_a_denied_host_is_one_record(scene: Scene, played: Played) -> None:
    """T30: a host that no rule names is refused once, at CONNECT or inside it, and recorded once."""
    records = scene.gateway.awaited(sandbox=played.entry.id, host="denied.test", reason="no-rule")
    assert names(records) == ["request.refused"]
    assert records[0]["reason"] == "no-rule"


def test_a_bad_token_is_one_line_per_connection(scene: Scene, played: Played) -> None:
    """T30: a connection with a wrong token is one `connection.refused`, with the listener and without the token."""
    assert "403" in played.pages["bad token"].splitlines()[0]
    mine = scene.gateway.awaited(
        where=lambda record: record["channel"] in (played.entry.id, "proxy"),
        event="connection.refused",
        reason="bad-token",
    )
    assert len(mine) == len({record["channel"] for record in mine}) >= 1


@pytest.mark.parametrize(
    ("kind", "path", "status", "error", "answered"),
    [
        ("upstream refused", "/v1/down", 502, "upstream-unreachable", False),
        ("upstream certificate", "/v1/badcert", 502, "upstream-certificate", False),
        ("time-out", "/v1/silent", 502, "upstream-timeout", False),
        ("allowed", "/v1/allowed", 200, "", True),
        ("userinfo", "/v1/userinfo", 200, "", True),
        ("redirect", "/v1/redirect", 302, "", True),
        ("client abort", "/v1/slow", 200, "client-gone", True),
    ],
)
def test_a_permitted_request_is_one_intent_and_one_outcome(
    scene: Scene, played: Played, kind: str, path: str, status: int, error: str, answered: bool
) -> None:
    """T30: whatever became of it: an intent before, an outcome after, same id, with status, bytes, time and error."""
    if kind in played.statuses:
        assert played.statuses[kind] == status
    records = of_path(scene, played, path)
    assert [record["event"] for record in records] == ["request.intent", "request.outcome"]
    intent, outcome = records
    assert intent["request_id"] == outcome["request_id"]
    assert int(intent["seq"]) < int(outcome["seq"])
    for record in records:
        assert record["decision"] == "allow"
        assert str(record["rule"]).startswith("agent/")
    assert (outcome["status"], outcome["error"]) == (status, error)
    assert isinstance(outcome["duration_us"], int)
    assert isinstance(outcome["bytes_up"], int)
    assert outcome["completed"] is (answered and not error)
    if kind == "allowed":
        assert outcome["bytes_down"] >= 10


def test_a_credentialed_request_is_a_handoff_an_intent_and_an_outcome(scene: Scene, played: Played) -> None:
    """T30: the proxy hands off, the broker has intent and outcome; credential id, version and owner are named."""
    assert played.statuses["credentialed"] == 200
    records = of_path(scene, played, "/v1/credentialed")
    assert names(records) == ["broker.intent", "broker.outcome", "request.handoff"]
    assert len({record["request_id"] for record in records}) == 1
    [outcome] = [record for record in records if record["event"] == "broker.outcome"]
    assert (outcome["credential"], outcome["credential_owner"], outcome["rule"]) == ("api", "tests", "agent/api")
    assert outcome["credential_version"]
    assert (outcome["status"], outcome["completed"]) == (200, True)
    assert outcome["bytes_down"] >= 10
    assert isinstance(outcome["duration_us"], int)


def test_a_credential_failure_is_a_handoff_and_one_refusal(scene: Scene, played: Played) -> None:
    """T30: no secret, no call: the broker's one refusal names the credential and what was wrong with its source."""
    assert played.statuses["credential failure"] == 503
    records = of_path(scene, played, "/v1/gone")
    assert names(records) == ["broker.refused", "request.handoff"]
    [refused] = [record for record in records if record["event"] == "broker.refused"]
    assert (refused["reason"], refused["error"]) == ("credential-unavailable", "source-missing")
    assert (refused["credential"], refused["rule"]) == ("gone", "agent/gone")


def test_a_tunnel_is_one_intent_and_one_outcome_that_say_uninspected(scene: Scene, played: Played) -> None:
    """T30: bytes that nobody read are recorded as such, with their counts."""
    records = scene.gateway.settled(sandbox=played.entry.id, host="opaque.test")
    assert [record["event"] for record in records] == ["tunnel.intent", "tunnel.outcome"]
    for record in records:
        assert record["uninspected"] is True
        assert record["rule"] == "agent/opaque"
    assert records[1]["bytes_up"] > 0
    assert records[1]["bytes_down"] > 0
    assert isinstance(records[1]["duration_us"], int)


def test_every_record_of_a_request_says_whose_it_was(scene: Scene, played: Played) -> None:
    """T30: tenant, sandbox, owner, agent, task and role stand on every record; an id belongs to one request."""
    per_id: dict[str, list[str]] = {}
    for record in scene.gateway.settled(sandbox=played.entry.id):
        if str(record["event"]).startswith(("request.", "broker.", "tunnel.")):
            assert {"tenant", "sandbox", "owner", "agent", "task", "role"} <= record.keys(), record
            per_id.setdefault(str(record["request_id"]), []).append(str(record["event"]))
    allowed = {
        ("request.refused",),
        ("request.intent", "request.outcome"),
        ("tunnel.intent", "tunnel.outcome"),
        ("broker.intent", "broker.outcome", "request.handoff"),
        ("broker.refused", "request.handoff"),
    }
    assert {tuple(sorted(events)) for events in per_id.values()} <= allowed


# --- clean --------------------------------------------------------------------------------------------------------


def secrets_of(scene: Scene, played: Played) -> dict[str, frozenset[bytes]]:
    """Everything that must not be seen, by name; the public prefixes of shapes are no part of it (RULINGS 9.1)."""
    environment = played.entry.environment
    found = {name: windows(value) for name, value in CARRIED.items()}
    found |= {"REAL": windows(REAL, public="sk_live_")}
    found |= {"API_KEY": windows(environment["API_KEY"], public="sk_live_")}
    found |= {"GONE_KEY": windows(environment["GONE_KEY"], public="gk_")}
    if played.entry.name == "token":
        found |= {"token": windows(environment["https_proxy"].partition("session:")[2].partition("@")[0], public="xt_")}
    return found


def test_no_window_of_a_secret_is_in_the_log(scene: Scene, played: Played) -> None:
    """T30: no eight characters of a secret, plain or in base64, stand in any file of the log or on standard error."""
    secrets = secrets_of(scene, played)
    seen = dict(files_below(scene.gateway.log)) | {"standard error": scene.gateway.errors().encode()}
    assert seen
    assert {name: found for name, data in seen.items() if (found := leaks(data, secrets))} == {}


def test_no_window_of_a_secret_is_on_an_error_page(scene: Scene, played: Played) -> None:
    """T30: refusals show the client nothing of what it sent, and nothing of ours."""
    secrets = secrets_of(scene, played)
    refused = {name: page for name, page in played.pages.items() if played.statuses.get(name, 403) >= 400}
    assert len(refused) >= 7
    assert {name: found for name, page in refused.items() if (found := leaks(page.encode(), secrets))} == {}
    for name, page in played.pages.items():
        assert not leaks(page.encode(), {"REAL": secrets["REAL"]}), name


def test_no_window_of_a_secret_is_in_the_process_list(scene: Scene, played: Played) -> None:
    """T30: command lines and environments of the gateway's processes hold no secret, and name no key file's content."""
    secrets = secrets_of(scene, played)
    assert scene.gateway.process is not None
    pids = descendants(scene.gateway.process.pid)
    assert sum(b"-m proxy.worker" in command_line(pid) for pid in pids) >= 1
    assert {where: found for where, data in process_texts(pids) if (found := leaks(data, secrets))} == {}


def test_the_log_of_it_all_verifies(scene: Scene, played: Played) -> None:
    """T30: the chain holds over everything above."""
    shown = scene.gateway.exeat("audit", "verify", "--output", "json")
    assert shown.code == 0, shown
    assert json.loads(shown.out)
