"""Credentials end to end: real clients, real processes, and an origin that witnesses what it was sent."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.gateway import Box, Completed, TestGateway
from tests.support.origins import Exchange, Origin, echo
from tests.support.scripts import READ, script, text

pytestmark = pytest.mark.xdist_group("credentials")

HEADER_SECRET = "kq8-Header-Real-0d7f1c52aa93"
BASIC_SECRET = "kq8-Basic-Real-5b1e77c20f4d"
BEARER_SECRET = "kq8-Bearer-Real-93ac00d1e6b8"
QUERY_SECRET = "k/q:8?Query&Real%41+77c20f=x"
FILE_SECRET = "kq8-File-Real-6611aa04cd95"
SECRETS = {"header": HEADER_SECRET, "basic": BASIC_SECRET, "bearer": BEARER_SECRET, "query": QUERY_SECRET}

SHAPES = {
    "HEADER_KEY": "sk_live_{24}",
    "BASIC_KEY": "ghp_{36}",
    "BEARER_KEY": "sk-ant-api03-{93}AA",
    "QUERY_KEY": "{32}",
}

CREDENTIALS = """
version: 1
credentials:
  header: {{kind: header, header: X-Api-Key, secret: "store:header", hosts: [header.test], owner: tests,
            placeholder: {{env: HEADER_KEY, shape: "sk_live_{{24}}"}}}}
  basic: {{kind: basic, secret: "store:basic", hosts: [basic.test], owner: tests,
           placeholder: {{env: BASIC_KEY, shape: "ghp_{{36}}"}}}}
  bearer: {{kind: bearer, secret: "store:bearer", hosts: [reg.test], owner: tests,
            placeholder: {{env: BEARER_KEY, shape: "sk-ant-api03-{{93}}AA"}}}}
  query: {{kind: query, query: key, secret: "store:query", hosts: [query.test], owner: tests,
           placeholder: {{env: QUERY_KEY, shape: "{{32}}"}}}}
  file: {{kind: header, header: X-Api-Key, secret: "file:{mounted}", hosts: [file.test], owner: tests,
          placeholder: {{env: FILE_KEY, shape: "fk_{{24}}"}}}}
"""

POLICY = """
roles:
  agent:
    allow:
      - {name: header, host: header.test, methods: [GET], paths: ["/**"], query: any, credential: header}
      - {name: basic, host: basic.test, methods: [GET], paths: ["/**"], credential: basic}
      - {name: registry, host: reg.test, methods: [GET], paths: ["/**"], credential: bearer}
      - name: query
        host: query.test
        methods: [GET]
        paths: ["/send"]
        query: {key: any, x: ["1"]}
        credential: query
      - {name: file, host: file.test, methods: [GET], paths: ["/**"], credential: file}
      - {name: cdn, host: cdn.test, methods: [GET], paths: ["/blob"], query: any}
      - {name: carrier, host: carrier.test, methods: [GET], paths: ["/**"], query: any, client_auth: pass}
"""

NAMES = ("header.test", "basic.test", "reg.test", "query.test", "file.test", "cdn.test", "carrier.test")


class Scene:
    """One gateway, one origin under all names, one sandbox."""

    def __init__(self, gateway: TestGateway, origin: Origin, mounted: Path) -> None:
        self.gateway = gateway
        self.origin = origin
        self.mounted = mounted
        self.box = gateway.sandbox()

    def url(self, host: str, rest: str = "/") -> str:
        return f"https://{host}:{self.origin.port}{rest}"

    def get(self, host: str, rest: str = "/x", *arguments: str, box: Box | None = None) -> Completed:
        return (box or self.box).curl("-i", "--globoff", "--path-as-is", *arguments, self.url(host, rest))

    def sent(self, host: str) -> list[object]:
        """What the origin saw for `host`, by Host header."""
        return [item for item in self.origin.received if item.header("host") == f"{host}:{self.origin.port}"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("credentials")
    mounted = folder / "config" / "api-key"  # where the vault can see it, as an orchestrator would mount it
    with (
        # Not an echo: three echoed secrets would disarm a credential (RULINGS 7.1).
        Origin(*NAMES, address="127.0.0.31", handler=script(READ, text("done"))).run_in_thread() as origin,
        TestGateway(
            folder, policy=POLICY, credentials=CREDENTIALS.format(mounted=mounted), secrets=SECRETS, origins=[origin]
        ) as gateway,
    ):
        mounted.write_text(FILE_SECRET + "\n")
        mounted.chmod(0o444)
        yield Scene(gateway, origin, mounted)
        assert not origin.faults


@pytest.fixture(autouse=True)
def _from_here(scene: Scene) -> None:
    """Each test looks at its own requests only."""
    scene.origin.received.clear()


def status(answer: Completed) -> int:
    """The status that curl -i shows for the request itself, after the one of CONNECT."""
    lines = [line for line in answer.out.splitlines() if line.startswith("HTTP/1.1 ")]
    return int(lines[-1].split()[1]) if lines else 0


def reason(answer: Completed) -> str:
    """The reason code of a refusal's problem document."""
    return str(json.loads(answer.out.rpartition("\r\n\r\n")[2] or answer.out.rpartition("\n\n")[2])["reason"])


# --- T17: the secret is not there -------------------------------------------------------------------------------


def test_a_secret_that_is_gone_refuses_and_its_return_needs_no_restart(scene: Scene) -> None:
    """T17: with its mounted file removed the call is refused, recorded and not sent; put back, the next one works."""
    aside = scene.mounted.with_suffix(".aside")
    placeholder = scene.box.placeholders["FILE_KEY"]
    shutil.move(scene.mounted, aside)
    try:
        answer = scene.get("file.test", "/gone", "-H", f"X-Api-Key: {placeholder}")
        assert status(answer) == 503
        assert reason(answer) == "credential-unavailable"
        assert scene.origin.received == []
    finally:
        shutil.move(aside, scene.mounted)
    [record] = scene.gateway.awaited(reason="credential-unavailable", event="broker.refused", host="file.test")
    assert (record["credential"], record["error"], record["host"]) == ("file", "source-missing", "file.test")
    again = scene.get("file.test", "/back", "-H", f"X-Api-Key: {placeholder}")
    assert status(again) == 200
    assert [item.values("x-api-key") for item in scene.origin.received] == [[FILE_SECRET]]


def test_a_secret_removed_from_the_store_refuses_until_it_is_added_again(scene: Scene) -> None:
    """T17 with the embedded store: remove closes the credential at once, add opens it, no process restarts."""
    assert status(scene.get("header.test", "/a")) == 200
    before = scene.gateway.admin.status()
    scene.gateway.admin.remove_secret("header")
    try:
        answer = scene.get("header.test", "/b")
        assert (status(answer), reason(answer)) == (503, "credential-unavailable")
    finally:
        scene.gateway.admin.add_secret("header", HEADER_SECRET.encode(), owner="tests")
    assert status(scene.get("header.test", "/c")) == 200
    assert [item.path for item in scene.origin.received] == ["/a", "/c"]
    assert scene.gateway.admin.status().get("started_at") == before.get("started_at")


# --- T18: the client's own authority ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rest", "why"),
    [
        (("-H", "Authorization: Bearer clients-own-token"), "/x", "its own Authorization is another account's way out"),
        (("-H", "X-Api-Key: clients-own-key"), "/x", "its own key in the declared slot is not the placeholder"),
        (("-H", "Cookie: session=clients-own"), "/x", "its own cookie is authority"),
        ((), "/x?api_key=clients-own", "its own query key is authority"),
        (("-u", "me:clients-own"), "/x", "userinfo becomes Basic authority"),
    ],
    ids=["authorization", "slot", "cookie", "query", "userinfo"],
)
@pytest.mark.parametrize("host", ["header.test", "cdn.test"], ids=["credentialed", "plain"])
def test_the_clients_own_authority_is_refused(
    scene: Scene, host: str, arguments: tuple[str, ...], rest: str, why: str
) -> None:
    """T18: each carrier of the client's own authority is refused alone, with a credential on the rule or without."""
    path = rest if host == "header.test" else rest.replace("/x", "/blob", 1)
    answer = scene.get(host, path, *arguments)
    assert (status(answer), reason(answer)) == (403, "client-authority"), why
    assert scene.origin.received == []


def test_the_origin_sees_the_real_key_once_and_none_of_the_clients_values(scene: Scene) -> None:
    """T18: with the placeholder in the slot, or with nothing at all, X-Api-Key arrives once and is the real one."""
    placeholder = scene.box.placeholders["HEADER_KEY"]
    assert status(scene.get("header.test", "/with", "-H", f"X-Api-Key: {placeholder}")) == 200
    assert status(scene.get("header.test", "/without")) == 200
    for received in scene.origin.received:
        assert received.values("x-api-key") == [HEADER_SECRET]
        assert (
            received.values("authorization")
            == received.values("cookie")
            == received.values("proxy-authorization")
            == []
        )
        assert placeholder.encode() not in received.raw_head
        assert scene.box.token.encode() not in received.raw_head


def test_two_values_for_one_slot_are_refused(scene: Scene) -> None:
    """T18: the placeholder beside the client's own key in the same header is not a choice for the origin to make."""
    placeholder = scene.box.placeholders["HEADER_KEY"]
    answer = scene.get("header.test", "/x", "-H", f"X-Api-Key: {placeholder}", "-H", "X-Api-Key: clients-own")
    assert status(answer) == 403
    assert scene.origin.received == []


def test_a_rule_that_passes_client_authority_passes_it_untouched(scene: Scene) -> None:
    """T18: `client_auth: pass` lets the client's carriers through, byte for byte, and adds nothing of ours."""
    arguments = ("-H", "Authorization: Bearer clients-own", "-H", "Cookie: a=b")
    assert status(scene.get("carrier.test", "/x?api_key=own", *arguments)) == 200
    [received] = scene.origin.received
    assert received.values("authorization") == ["Bearer clients-own"]
    assert received.values("cookie") == ["a=b"]
    assert received.target == "/x?api_key=own"
    assert received.values("x-api-key") == []


# --- T19: Basic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["u", "", "x-access-token"], ids=["short", "empty", "git"])
def test_a_placeholder_as_basic_password_keeps_the_user_part(scene: Scene, user: str) -> None:
    """T19: the origin decodes the same user name and the real password; the other headers are as the client sent."""
    answer = scene.get(
        "basic.test", "/p", "-u", f"{user}:{scene.box.placeholders['BASIC_KEY']}", "-A", "tests/1 (a; b)"
    )
    assert status(answer) == 200
    [received] = scene.origin.received
    [value] = received.values("authorization")
    assert base64.b64decode(value.removeprefix("Basic ")) == f"{user}:{BASIC_SECRET}".encode()
    assert received.values("user-agent") == ["tests/1 (a; b)"]
    assert received.target == "/p"


def test_a_placeholder_as_basic_user_is_replaced_there(scene: Scene) -> None:
    """T19, C093: some providers take the key as the user with an empty password; the password stays empty."""
    answer = scene.get("basic.test", "/p", "-u", f"{scene.box.placeholders['BASIC_KEY']}:")
    assert status(answer) == 200
    [value] = scene.origin.received[0].values("authorization")
    assert base64.b64decode(value.removeprefix("Basic ")) == f"{BASIC_SECRET}:".encode()


def test_basic_with_the_clients_own_password_is_refused(scene: Scene) -> None:
    """T19: what is not the placeholder in a Basic pair is the client's own authority, beside a placeholder too."""
    own = scene.get("basic.test", "/p", "-u", "u:clients-own")
    assert (status(own), reason(own)) == (403, "client-authority")
    both = scene.get("basic.test", "/p", "-u", f"{scene.box.placeholders['BASIC_KEY']}:clients-own")
    assert status(both) in (200, 403)
    for received in scene.origin.received:
        assert b"clients-own" not in base64.b64decode(received.values("authorization")[0].removeprefix("Basic "))


# --- T20: placeholders ------------------------------------------------------------------------------------------


def test_placeholders_have_their_shape_and_differ_between_sandboxes(scene: Scene) -> None:
    """T20: four shapes of prefix, length and alphabet are met; no two sandboxes share a placeholder."""
    other = scene.gateway.sandbox()
    for variable, shape in SHAPES.items():
        prefix, _, rest = shape.partition("{")
        count, _, suffix = rest.partition("}")
        for box in (scene.box, other):
            value = box.placeholders[variable]
            assert value.startswith(prefix), variable
            assert value.endswith(suffix), variable
            middle = value[len(prefix) : len(value) - len(suffix)]
            assert len(middle) == int(count), variable
            assert middle.isascii(), variable
            assert middle.isalnum(), variable
        assert scene.box.placeholders[variable] != other.placeholders[variable]


@pytest.mark.parametrize("case", ["foreign", "ended", "unknown"])
def test_another_sandboxs_placeholder_is_refused(scene: Scene, case: str) -> None:
    """T20: a foreign, an ended and an invented placeholder are refused alike, and the origin sees nothing."""
    owner = scene.gateway.sandbox()
    value = owner.placeholders["HEADER_KEY"]
    if case == "ended":
        scene.gateway.admin.end_sandbox(owner.id)
    if case == "unknown":
        head = "Xeat" + "q" * 16
        letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
        number = int.from_bytes(hashlib.sha256(head.encode()).digest())
        tail = ""
        for _ in range(4):
            number, digit = divmod(number, 62)
            tail += letters[digit]
        value = f"sk_live_{head}{tail}"
    answer = scene.get("header.test", "/x", "-H", f"X-Api-Key: {value}")
    assert status(answer) == 403
    assert reason(answer) in ("placeholder-misuse", "client-authority")
    assert value not in answer.out
    assert scene.origin.received == []


@pytest.mark.parametrize(
    ("arguments", "rest"),
    [
        (("-H", "X-Other: {ph}"), "/x"),
        (("-H", "Authorization: Bearer {ph}"), "/x"),
        ((), "/{ph}/x"),
        ((), "/x?q={ph}"),
        (("-A", "agent {ph}"), "/x"),
    ],
    ids=["other-header", "other-slot", "path", "query", "user-agent"],
)
def test_a_placeholder_outside_its_slot_is_refused_and_raises_an_alarm(
    scene: Scene, arguments: tuple[str, ...], rest: str
) -> None:
    """T20: anywhere but in the declared slot a placeholder stops the request; the log says misuse, not the value."""
    placeholder = scene.box.placeholders["HEADER_KEY"]
    filled = [item.format(ph=placeholder) for item in arguments]
    answer = scene.get("header.test", rest.format(ph=placeholder), *filled)
    assert (status(answer), reason(answer)) == (403, "placeholder-misuse")
    assert scene.origin.received == []
    assert placeholder not in json.dumps(scene.gateway.settled(sandbox=scene.box.id, reason="placeholder-misuse"))
    assert placeholder not in json.dumps(scene.gateway.records(sandbox=scene.box.id))


# --- T21: the query slot ----------------------------------------------------------------------------------------


def test_a_secret_in_the_query_is_encoded_and_the_rest_stays(scene: Scene) -> None:
    """T21, C103: a secret full of separators arrives as one parameter that decodes to it; x=1 stays; no log has it."""
    scene.origin.on("/send", echo)
    placeholder = scene.box.placeholders["QUERY_KEY"]
    answer = scene.get("query.test", f"/send?key={placeholder}&x=1")
    assert status(answer) == 200
    [received] = scene.origin.received
    pairs = [part.partition("=")[::2] for part in received.target.partition("?")[2].split("&")]
    assert sorted(name for name, _ in pairs) == ["key", "x"]
    assert dict(pairs)["x"] == "1"
    assert dict(pairs)["key"] == quote(QUERY_SECRET, safe="")
    # The origin echoes its target; what comes back is masked in both spellings.
    assert QUERY_SECRET not in answer.out
    assert quote(QUERY_SECRET, safe="") not in answer.out
    [outcome] = scene.gateway.awaited(event="broker.outcome", host="query.test")
    assert outcome["query_keys"] == ["key", "x"]
    logged = json.dumps(scene.gateway.records())
    assert QUERY_SECRET not in logged
    assert quote(QUERY_SECRET, safe="") not in logged
    assert placeholder not in logged


def test_a_refusal_on_a_query_slot_shows_neither_placeholder_nor_secret(scene: Scene) -> None:
    """T21, C103: the error page of a denied path on the same host holds no secret, and the log neither value."""
    placeholder = scene.box.placeholders["QUERY_KEY"]
    answer = scene.get("query.test", f"/elsewhere?key={placeholder}&x=1")
    assert status(answer) == 403
    assert quote(QUERY_SECRET, safe="") not in answer.out
    assert QUERY_SECRET not in answer.out
    assert scene.origin.received == []
    assert placeholder not in json.dumps(scene.gateway.records())


# --- T22: a redirect to signed storage ----------------------------------------------------------------------------


async def _redirect(exchange: Exchange) -> None:
    await exchange.read_body()
    location = f"https://cdn.test:{exchange.origin.port}/blob?X-Amz-Signature=abc"
    await exchange.send(text("", 307, ("Location", location)))


def test_a_redirect_is_not_followed_and_its_target_gets_no_authority(scene: Scene) -> None:
    """T22 as far as there are no grants: the 307 reaches the client and the proxy asks nobody.

    A signed URL is somebody's authority: without a grant it is neither shown nor taken.
    """
    scene.origin.on("/v2/blob", _redirect)
    placeholder = scene.box.placeholders["BEARER_KEY"]
    first = scene.get("reg.test", "/v2/blob", "-H", f"Authorization: Bearer {placeholder}")
    assert status(first) == 307
    # What can carry a token is not shown: the signed query stays here until a grant covers it.
    assert "X-Amz-Signature" not in first.out
    [received] = scene.origin.received
    assert received.values("authorization") == [f"Bearer {BEARER_SECRET}"]
    second = scene.get("cdn.test", "/blob?X-Amz-Signature=abc")
    assert (status(second), reason(second)) == (403, "client-authority")
    assert scene.sent("cdn.test") == []
    assert BEARER_SECRET not in first.out + second.out


def test_a_plain_request_to_the_redirects_host_carries_no_authority(scene: Scene) -> None:
    """T22, C105: the redirect's host is reached by a rule of its own, its query byte for byte, no header of ours."""
    answer = scene.get("cdn.test", "/blob?part=1&x=%2F%7e")
    assert status(answer) == 200
    [received] = scene.origin.received
    assert received.target == "/blob?part=1&x=%2F%7e"
    assert received.values("authorization") == received.values("x-api-key") == []
