"""Everything leaves through a corporate proxy: a real Squid that asks for a password and inspects TLS (RULINGS 5.4).

The name that goes through it exists in Squid's resolver alone. Whatever does not go through the Squid as it should is
a refusal; nothing is dialled in another way.
"""

from __future__ import annotations

import base64
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import Box, TestGateway
from tests.support.origins import Origin
from tests.support.squid import Squid, missing
from tests.support.waiting import until

pytestmark = [
    pytest.mark.xdist_group("corporate-proxy"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there"),
]

NAME, DIRECT, ADDRESS = "api.example.com", "git.example.net", "127.0.0.61"
SECRET = "canary-6b0d2e9f71c3a845-canary"
PASSWORD = "canary-51aa7c-of-the-proxy"
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.example.com], owner: tests,
        placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""


def policy(origin: Origin, direct: Origin, clear: Origin) -> str:
    tied = f"addresses: [{ADDRESS}/32], resolve: [{ADDRESS}], port: {origin.port}"
    return f"""
    destinations:
      {NAME}: {{port: {origin.port}}}
      tunnel.example.com: {{port: {origin.port}}}
      clear.example.com: {{port: {clear.port}, scheme: http}}
      metadata.google.internal: {{port: {origin.port}}}
      tied.example.com: {{{tied}}}
      {ADDRESS}: {{addresses: [{ADDRESS}/32], port: {origin.port}}}
      {DIRECT}: {{addresses: [{direct.address}/32], resolve: [{direct.address}], port: {direct.port},
                  ca: file:direct.pem}}
    roles:
      agent:
        allow:
          - {{name: keyed, host: {NAME}, methods: [GET], paths: ["/keyed/**"], credential: api}}
          - {{name: plain, host: {NAME}, methods: [GET], paths: ["/plain/**"]}}
          - {{name: clear, host: clear.example.com, methods: [GET], paths: ["/**"]}}
          - {{name: unseen, host: tunnel.example.com, port: {origin.port}, tunnel: true, reason: a test}}
          - {{name: direct, host: {DIRECT}, methods: [GET], paths: ["/**"]}}
          - {{name: special, host: metadata.google.internal, methods: [GET], paths: ["/**"]}}
          - {{name: tied, host: tied.example.com, methods: [GET], paths: ["/**"]}}
          - {{name: literal, host: {ADDRESS}, methods: [GET], paths: ["/**"]}}
    """


@dataclass
class Office:
    """A gateway behind its Squid, with what listens around them."""

    gateway: TestGateway
    squid: Squid
    origin: Origin
    direct: Origin
    clear: Origin
    trap: socket.socket
    box: Box
    folder: Path

    def url(self, path: str, host: str = NAME) -> str:
        return f"https://{host}:{self.direct.port if host == DIRECT else self.origin.port}{path}"

    def outcome(self, path: str) -> dict[str, Any]:
        """The one outcome record of a request for `path`."""
        (record,) = self.gateway.awaited(where=lambda one: str(one["event"]).endswith(".outcome"), path=path)
        return record

    def intents(self, path: str) -> int:
        return len(self.gateway.awaited(event="request.intent", path=path))


def start(stack: ExitStack, *, right_password: bool) -> Office:
    # Not pytest's folder: Squid, started by root, becomes a user that cannot enter that one.
    folder = Path(tempfile.mkdtemp(prefix="exeat-test-squid-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    names = (NAME, "tunnel.example.com", "metadata.google.internal", "tied.example.com")
    origin = stack.enter_context(Origin(*names, address=ADDRESS).run_in_thread())
    direct = stack.enter_context(Origin(DIRECT, address="127.0.0.62").run_in_thread())
    clear = stack.enter_context(Origin("clear.example.com", address="127.0.0.63", tls=False).run_in_thread())
    hosts = dict.fromkeys(names, ADDRESS) | {"clear.example.com": clear.address}
    squid = Squid(folder / "squid", hosts=hosts, origin_ca=origin.ca_pem, password=PASSWORD)
    stack.enter_context(squid)
    trap = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    trap.setblocking(False)
    ambient = f"http://127.0.0.1:{trap.getsockname()[1]}"
    gateway = TestGateway(
        folder / "gateway",
        policy=policy(origin, direct, clear),
        credentials=CREDENTIALS,
        secrets={"api": SECRET},
        settings=(
            f"upstream:\n  proxy: {squid.url}\n"
            f"  credential: {{username: {squid.user}, password_file: proxy.password}}\n"
            f"  ca: corporate.pem\n  except: [{DIRECT}]\n"
        ),
        environment=dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"), ambient),
    )
    password = gateway.config / "proxy.password"
    password.write_text((PASSWORD if right_password else PASSWORD + "x") + "\n")
    password.chmod(0o600)
    (gateway.config / "corporate.pem").write_text(squid.ca_pem)
    (gateway.config / "direct.pem").write_text(direct.ca_pem)
    stack.enter_context(gateway)
    return Office(
        gateway=gateway,
        squid=squid,
        origin=origin,
        direct=direct,
        clear=clear,
        trap=trap,
        box=gateway.sandbox(),
        folder=folder,
    )


@pytest.fixture(scope="module")
def office() -> Iterator[Office]:
    with ExitStack() as stack:
        yield start(stack, right_password=True)


def test_a_wrong_password_is_a_refusal_and_the_origin_sees_nothing() -> None:
    """407 of the proxy: 502 for the sandbox without a word of why, a clear detail in the log, no other way tried."""
    with ExitStack() as stack:
        office = start(stack, right_password=False)
        keyed = office.box.curl(
            "-i", "-H", f"Authorization: Bearer {office.box.placeholders['API_KEY']}", office.url("/keyed/a")
        )
        plain = office.box.curl("-i", office.url("/plain/a"))
        for answer, path in ((keyed, "/keyed/a"), (plain, "/plain/a")):
            assert "upstream-unreachable" in answer.out, (
                answer,
                office.gateway.errors(),
                office.gateway.records()[-12:],
            )
            assert "407" not in answer.out
            assert "squid" not in answer.out.lower()
            record = office.outcome(path)
            assert (record["error"], record["address"]) == ("upstream-unreachable", "delegated")
            assert record["detail"] == "the upstream proxy does not accept upstream.credential (407)"
        assert office.origin.untouched
        until(lambda: office.squid.log().count(" 407 CONNECT ") >= 2, what="Squid's own record")
        assert office.squid.log().count(" 407 CONNECT ") == 2
        assert said_nowhere(office)


REFUSED = [
    ("metadata.google.internal", "a special-use name that Squid could resolve (T04)"),
    ("tied.example.com", "addresses that nobody would keep to"),
    (ADDRESS, "an address literal"),
]


@pytest.mark.parametrize(("host", "why"), REFUSED)
def test_what_cannot_be_vetted_there_is_refused_before_squid_hears_of_it(office: Office, host: str, why: str) -> None:
    """The rule permits it, the origin listens there and Squid would lead to it; nobody is asked."""
    before = len(office.origin.connections)
    path = f"/refused/{host}"
    answer = office.box.curl("-i", office.url(path, host))
    assert "address-refused" in answer.out, (why, answer)
    record = office.outcome(path)
    assert (record["error"], record["address"]) == ("address-refused", "delegated")
    assert host not in office.squid.log()
    assert len(office.origin.connections) == before


def test_while_squid_is_down_everything_is_refused_and_afterwards_it_works(office: Office) -> None:
    """No fallback: the excepted host is reached, the others are not, by no way."""
    office.squid.stop()
    try:
        before = len(office.origin.connections)
        answer = office.box.curl("-i", office.url("/plain/down"))
        assert "upstream-unreachable" in answer.out, (answer, office.gateway.errors(), office.gateway.records()[-12:])
        assert office.outcome("/plain/down")["detail"].startswith("the upstream proxy: ")
        assert office.outcome("/plain/down")["address"] == "delegated"
        assert len(office.origin.connections) == before
        assert " 200" in office.box.curl("-i", office.url("/while-down", DIRECT)).out
    finally:
        office.squid.start()
    assert office.box.curl("-o", "/dev/null", "-w", "%{http_code}", office.url("/plain/up")).out == "200"


def test_an_excepted_host_is_dialled_directly(office: Office) -> None:
    """Its own address stands in the record and Squid does not know of it."""
    answer = office.box.curl("-o", "/dev/null", "-w", "%{http_code}", office.url("/straight", DIRECT))
    assert answer.out == "200", (answer, office.gateway.errors())
    assert office.outcome("/straight")["address"] == "127.0.0.62"
    assert DIRECT not in office.squid.log()
    assert office.direct.received[-1].values("via") == []


def test_a_plain_request_goes_through_the_inspecting_proxy(office: Office) -> None:
    """By name and with the password; Squid's certificate is believed because of `ca`; one intent, `delegated`."""
    answer = office.box.curl("-o", "/dev/null", "-w", "%{http_code}", office.url("/plain/through"))
    assert answer.out == "200", (answer, office.gateway.errors(), office.squid.log())
    (request,) = [one for one in office.origin.received if one.path == "/plain/through"]
    assert any("squid" in value for value in request.values("via")), "it was really inspected"
    assert request.values("proxy-authorization") == []
    record = office.outcome("/plain/through")
    assert (record["address"], record["completed"], office.intents("/plain/through")) == ("delegated", True, 1)
    wanted = f"CONNECT {NAME}:{office.origin.port} {office.squid.user}"
    until(lambda: wanted in office.squid.log(), what="Squid's own record")


def test_a_credentialed_call_goes_through_it_as_well(office: Office) -> None:
    """The executor dials it: the origin sees the secret, the sandbox does not, the broker's record says delegated."""
    answer = office.box.curl(
        "-i", "-H", f"Authorization: Bearer {office.box.placeholders['API_KEY']}", office.url("/keyed/through")
    )
    assert " 200" in answer.out, (answer, office.gateway.errors(), office.squid.log())
    assert SECRET not in answer.out
    (request,) = [one for one in office.origin.received if one.path == "/keyed/through"]
    assert request.values("authorization") == [f"Bearer {SECRET}"]
    record = office.outcome("/keyed/through")
    assert (record["event"], record["address"], record["completed"]) == ("broker.outcome", "delegated", True)


def test_a_tunnel_goes_through_it_and_its_client_judges_the_certificate(office: Office) -> None:
    """Bytes are relayed unseen, so the proxy's own certificate reaches the client, which must know its CA."""
    url = office.url("/tunnel", "tunnel.example.com")
    corporate = office.folder / "squid" / "ca.pem"
    assert office.box.curl(url).code == 60, "a client without that CA refuses"
    answer = office.box.curl("--cacert", str(corporate), "-o", "/dev/null", "-w", "%{http_code}", url)
    assert answer.out == "200", (answer, office.squid.log())
    assert {record["address"] for record in office.gateway.awaited(2, event="tunnel.outcome")} == {"delegated"}


def test_clear_text_goes_through_it_by_connect(office: Office) -> None:
    """Never as a request to the proxy itself, which could answer in the origin's place."""
    url = f"http://clear.example.com:{office.clear.port}/clear"
    answer = office.box.curl("-o", "/dev/null", "-w", "%{http_code}", url)
    assert answer.out == "200", (answer, office.gateway.errors(), office.squid.log())
    assert [request.target for request in office.clear.received] == ["/clear"]
    assert office.clear.received[0].values("proxy-authorization") == []
    record = office.outcome("/clear")
    assert (record["address"], record.get("tls")) == ("delegated", None)


def test_ambient_proxy_variables_lead_nowhere(office: Office) -> None:
    """The gateway was started with all of them set; nobody ever connected there."""
    with pytest.raises(BlockingIOError):
        office.trap.accept()


def test_the_password_is_in_no_command_line_environment_log_or_state(office: Office) -> None:
    """Looked for as it is, in base64 and in hex, where it could have been left; its own file aside."""
    assert said_nowhere(office)


def said_nowhere(office: Office) -> bool:
    """Whether the proxy's password occurs in none of the gateway's processes' surroundings and files."""
    pair = f"{office.squid.user}:{PASSWORD}".encode()
    forms = [PASSWORD.encode(), base64.b64encode(pair)[:-4], b"Basic " + base64.b64encode(pair)[:24]]
    forms += [form.hex().encode() for form in forms]
    assert office.gateway.process is not None
    places: list[Path] = []
    for pid in family(office.gateway.process.pid):
        places += [Path(f"/proc/{pid}/cmdline"), Path(f"/proc/{pid}/environ")]
    for folder in (office.gateway.state, office.gateway.run_folder, office.gateway.home):
        places += [path for path in folder.rglob("*") if path.is_file()]
    places.append(office.gateway.folder / "up.err")
    looked = 0
    for place in places:
        try:
            content = place.read_bytes()
        except OSError:
            continue
        looked += 1
        assert not any(form in content for form in forms), place
    return looked > 10


def family(pid: int) -> list[int]:
    """`pid` and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found
