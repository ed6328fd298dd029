"""Redirects of downloads, end to end (decision 14): one address is opened for one sandbox, and nothing beside it.

One origin is every host, at port 443 because a grant is for nothing else. `files.test` redirects where its query says;
its service declares cdn.test below /bucket/ with a signature, and from there second.test below /after/.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, quote

import pytest

from exeat.boundary import find_capture_tools
from tests.support.gateway import Box, Completed, TestGateway
from tests.support.operationlanes import why_not_here
from tests.support.origins import Exchange, Origin

pytestmark = [
    pytest.mark.xdist_group("redirect-grants"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "-"),
]

ADDRESS = f"127.32.{os.getpid() >> 8 & 255}.{os.getpid() & 255 | 1}"
HOSTS = ("files.test", "cdn.test", "second.test", "evil.test")
SECRET = "canary-redirects-9f8e7d6c5b4a392817"
CONTENT = bytes(range(256)) * 40
SERVICE = """
version: 1
service: files
title: Files of these tests
hosts:
  api: {host: files.test}
operations:
  file.read:
    effect: read
    why: A file, which lies elsewhere.
    download: true
    redirects:
      to: [cdn.test]
      path: /bucket/**
      query_keys: [X-Amz-Date, X-Amz-Signature, response-content-disposition]
      then: {to: [second.test], path: /after/**}
    requests:
      - {at: api, methods: [GET], paths: ["/file/{name}"], query: {to: any}}
  list.read:
    effect: read
    why: Which files there are. Leads nowhere.
    requests:
      - {at: api, methods: [GET], paths: ["/list"], query: {to: any}}
tests:
  - {allow: "GET https://files.test/file/a", operation: file.read, why: a file}
  - {deny: "POST https://files.test/file/a", why: a write}
"""
POLICY = """
roles:
  agent:
    allow:
      - {service: files, operations: [read], credential: files}
  other:
    allow:
      - {service: files, operations: [read], credential: files}
  open:
    allow:
      - {name: files, service: files, operations: [read], limits: {response: 64KiB}}
      - {name: bucket, host: cdn.test, methods: [GET], paths: ["/bucket/ruled"], query: any, credential: files}
  denied:
    allow:
      - {service: files, operations: [read], credential: files}
    deny:
      - {name: never, host: cdn.test, paths: ["/bucket/secret/**"]}
  h2:
    allow:
      - {service: files, operations: [read], credential: files, protocol: h2}
"""
CREDENTIALS = """
version: 1
credentials:
  files:
    {kind: bearer, secret: "store:files", hosts: [files.test, cdn.test], owner: tests,
     placeholder: {env: FILES_KEY, shape: "fk_{32}"}}
"""
SIGNED = "X-Amz-Date=20261201T000000Z&X-Amz-Signature=00ff"


def target(name: str, query: str = SIGNED) -> str:
    return f"https://cdn.test/bucket/{name}?{query}"


async def answer(exchange: Exchange) -> None:
    await exchange.read_body()
    request = exchange.request
    to = parse_qs(request.target.partition("?")[2]).get("to")
    if request.header("host") == "files.test" and to:
        await exchange.answer(302, b"", (("Location", to[0]),))
    elif request.header("host") == "cdn.test" and request.path.startswith("/bucket/on"):
        await exchange.answer(
            302, b"", (("Location", f"https://second.test{request.path.removeprefix('/bucket/on')}"),)
        )
    elif request.header("host") == "second.test" and request.path.startswith("/after/again"):
        await exchange.answer(302, b"", (("Location", "https://second.test/after/third"),))
    else:
        part = request.header("range")
        first, _, last = (part or "bytes=0-").removeprefix("bytes=").partition("-")
        sent = CONTENT[int(first) : int(last) + 1 if last else None]
        await exchange.answer(206 if part else 200, sent)


@dataclass
class Scene:
    gateway: TestGateway
    origin: Origin

    def box(self, role: str = "agent") -> Box:
        return self.gateway.sandbox(role)

    def opened(self, box: Box, location: str, *more: str) -> Completed:
        """The first request, which leads to `location`."""
        return fetch(box, f"https://files.test/file/a?to={quote(location, safe='')}", *authority(box), *more)

    def at(self, host: str) -> list[str]:
        """Targets that `host` was asked for."""
        return [one.target for one in self.origin.received if one.header("host") == host]


def authority(box: Box) -> tuple[str, ...]:
    key = box.placeholders.get("FILES_KEY")
    return ("-H", f"Authorization: Bearer {key}") if key else ()


def fetch(box: Box, url: str, *more: str) -> Completed:
    return box.curl("-i", "--path-as-is", *more, url)


def status(done: Completed) -> int:
    """Of the last answer; 0 where there was none."""
    found = [line for line in done.out.splitlines() if line.startswith("HTTP/")]
    return int(found[-1].split()[1]) if found else 0


def location(done: Completed) -> str | None:
    lines = [line for line in done.out.splitlines() if line.lower().startswith("location:")]
    return lines[0].partition(":")[2].strip() if lines else None


def reason(done: Completed) -> str:
    start = done.out.find("{")
    return str(json.loads(done.out[start:])["reason"]) if start >= 0 else ""


def refused(done: Completed) -> str:
    """The reason that the client was told, in the body or in the answer to its CONNECT."""
    told = reason(done)
    if told:
        return told
    phrases = [line for line in (done.out + done.err).splitlines() if "Refused by Exeat policy: " in line]
    return phrases[-1].partition("Refused by Exeat policy: ")[2].partition(",")[0] if phrases else ""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("redirects")
    with Origin(*HOSTS, address=ADDRESS, port=443, handler=answer).run_in_thread() as origin:
        gateway = TestGateway(
            folder, policy=POLICY, credentials=CREDENTIALS, secrets={"files": SECRET}, origins=[origin]
        )
        (gateway.config / "services").mkdir()
        (gateway.config / "services/files.yaml").write_text(SERVICE)
        with gateway:
            yield Scene(gateway, origin)


@pytest.fixture
def scene(running: Scene) -> Scene:
    running.origin.received.clear()
    return running


# --- what opens nothing ---------------------------------------------------------------------------------------------

UNDECLARED = [
    ("another host", "https://evil.test/bucket/a?" + SIGNED),
    ("another path of the declared host", f"https://cdn.test/other/a?{SIGNED}"),
    ("no signature", "https://cdn.test/bucket/a"),
    ("a query key that is not declared", target("a", SIGNED + "&token=x")),
    ("clear text", "http://cdn.test/bucket/a?" + SIGNED),
    ("another port", f"https://cdn.test:8443/bucket/a?{SIGNED}"),
    ("an address", f"https://192.0.2.7/bucket/a?{SIGNED}"),
    ("a user in it", f"https://cdn.test@evil.test/bucket/a?{SIGNED}"),
    ("dot segments", f"https://cdn.test/bucket/../x?{SIGNED}"),
    ("our own name", f"https://exeat.internal/bucket/a?{SIGNED}"),
    ("over 4 KiB", target("a", SIGNED + "&response-content-disposition=" + "x" * 4096)),
    ("our own secret", target("a", f"X-Amz-Signature={SECRET}")),
    ("where only a second hop may go", "https://second.test/after/a"),
]


@pytest.mark.parametrize(("case", "place"), UNDECLARED, ids=[row[0] for row in UNDECLARED])
def test_what_is_not_declared_is_opened_for_nobody(scene: Scene, case: str, place: str) -> None:
    """An open redirect at the first host, in every form: the answer comes back, the next hop is refused."""
    box = scene.box()
    first = scene.opened(box, place)
    assert status(first) == 302, first
    assert SECRET not in first.out
    assert SIGNED not in (location(first) or "")  # without a grant no signed address is shown behind a credential
    second = fetch(box, place, "--max-time", "10")
    assert status(second) != 200
    assert [one for one in scene.origin.received if one.header("host") != "files.test"] == []
    assert "redirect.granted" not in {record["event"] for record in scene.gateway.settled(sandbox=box.id)}


def test_an_operation_without_a_declaration_leads_nowhere(scene: Scene) -> None:
    """The same host and the same place, by another operation of the same service; the records say where it led."""
    box = scene.box()
    place = target("a")
    first = fetch(box, f"https://files.test/list?to={quote(place, safe='')}", *authority(box))
    assert status(first) == 302
    assert refused(fetch(box, place)) == "no-rule"
    assert scene.at("cdn.test") == []
    [outcome] = scene.gateway.awaited(event="broker.outcome", sandbox=box.id)
    assert (outcome["redirect"], outcome["redirect_host"]) == ("undeclared", "cdn.test")
    [refusal] = scene.gateway.awaited(event="request.refused", sandbox=box.id)
    told = scene.gateway.exeat("why", refusal["request_id"]).out
    assert f"The answer to {outcome['request_id']} (files/list.read, files.test) led there." in told


MISUSES = [
    ("POST", ("-X", "POST"), "redirect-misused"),
    ("a body", ("-X", "GET", "-d", "x=1"), "redirect-misused"),
    ("a key of its own", ("-H", "Authorization: Bearer ghp_mine"), "client-authority"),
    ("a cookie", ("-H", "Cookie: a=b"), "client-authority"),
    ("another's placeholder", ("-H", "Authorization: Bearer OTHER"), "placeholder-misuse"),
    ("a method override", ("-H", "X-HTTP-Method-Override: DELETE"), "method-refused"),
]


@pytest.mark.parametrize(("case", "more", "why"), MISUSES, ids=[row[0] for row in MISUSES])
def test_a_grant_is_for_a_plain_fetch(scene: Scene, case: str, more: tuple[str, ...], why: str) -> None:
    """What is granted is one read without any authority; the storage host hears of nothing else."""
    box = scene.box()
    other = scene.box().placeholders["FILES_KEY"]
    place = target("misused")
    assert location(scene.opened(box, place)) == place
    done = fetch(box, place, *(word.replace("OTHER", other) for word in more))
    assert refused(done) == why, done
    assert scene.at("cdn.test") == []


SPELLINGS = [
    target("A"),
    target("a", SIGNED + "&x=1"),
    target("a", "X-Amz-Signature=00ff&X-Amz-Date=20261201T000000Z"),
    target("a", SIGNED.replace("Z&", "%5A&")),
    target("a", SIGNED + "&"),
    "https://cdn.test/bucket/a",
    f"https://cdn.test/bucket/%61?{SIGNED}",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_only_that_very_address_is_open(scene: Scene, spelling: str) -> None:
    """The same host, another address: refused, nothing of it leaves."""
    box = scene.box()
    place = target("a")
    assert location(scene.opened(box, place)) == place
    assert status(fetch(box, spelling)) != 200
    assert scene.at("cdn.test") == []


def test_a_grant_is_of_one_sandbox(scene: Scene) -> None:
    """Another sandbox, of another role and of the same one, is refused what the first was given."""
    mine = scene.box()
    place = target("mine")
    assert location(scene.opened(mine, place)) == place
    for other in (scene.box(), scene.box("other")):
        assert refused(fetch(other, place)) == "no-rule"
    assert scene.at("cdn.test") == []
    assert status(fetch(mine, place)) == 200


def test_a_deny_rule_wins_over_a_grant(scene: Scene) -> None:
    """The redirect is declared and answered, and what a rule denies is denied."""
    box = scene.box("denied")
    place = target("secret/a")
    assert location(scene.opened(box, place)) == place
    assert refused(fetch(box, place)) == "denied-by-rule"
    assert scene.at("cdn.test") == []
    assert status(fetch(box, place.replace("secret", "public"))) != 200


def test_the_ninth_use_is_refused_and_a_new_answer_opens_it_anew(scene: Scene) -> None:
    """Eight fetches, counted by the vault; a ninth says what helps."""
    box = scene.box()
    place = target("eight")
    assert location(scene.opened(box, place)) == place
    assert [status(fetch(box, place, "-r", "0-9")) for _ in range(8)] == [206] * 8
    assert refused(fetch(box, place)) == "redirect-ended"
    assert len(scene.at("cdn.test")) == 8
    assert location(scene.opened(box, place)) == place
    assert status(fetch(box, place)) == 200


def test_a_second_hop_is_open_where_it_is_declared_and_a_third_nowhere(scene: Scene) -> None:
    """`then:` names where the first target may lead; what it says nothing of, and the hop after it, are refused."""
    box = scene.box()
    beside = target("on/elsewhere")
    assert location(scene.opened(box, beside)) == beside
    assert location(fetch(box, beside)) == "https://second.test/elsewhere"
    assert refused(fetch(box, "https://second.test/elsewhere")) == "no-rule"
    place = target("on/after/again")
    assert location(scene.opened(box, place)) == place
    second = location(fetch(box, place))
    assert second == "https://second.test/after/again"
    third = location(fetch(box, second))
    assert third == "https://second.test/after/third"
    assert refused(fetch(box, third)) in ("no-rule", "redirect-ended")
    assert "/after/third" not in scene.at("second.test")


def test_what_ends_the_credential_ends_its_grants(scene: Scene) -> None:
    """The secret is rotated: the address that was given for the old one is closed."""
    box = scene.box()
    place = target("rotated")
    assert location(scene.opened(box, place)) == place
    scene.gateway.admin.rotate_secret("files", SECRET.encode())
    assert refused(fetch(box, place)) == "redirect-ended"
    assert scene.at("cdn.test") == []


def test_an_ended_sandbox_has_no_grants(scene: Scene) -> None:
    """Its token opens nothing any more, and whoever comes after starts with nothing."""
    box = scene.box()
    place = target("ended")
    assert location(scene.opened(box, place)) == place
    scene.gateway.admin.end_sandbox(box.id)
    assert refused(fetch(box, place)) == "sandbox-ended"
    assert refused(fetch(scene.box(), place)) == "no-rule"
    assert scene.at("cdn.test") == []


def test_a_signed_address_gets_no_credential_where_a_rule_has_one(scene: Scene) -> None:
    """C105: a rule with a credential matches the very same address; the grant comes first and carries none."""
    box = scene.box("open")
    place = target("ruled")
    first = fetch(box, f"https://files.test/file/a?to={quote(place, safe='')}")
    assert location(first) == place
    assert status(fetch(box, place)) == 200
    [received] = [one for one in scene.origin.received if one.header("host") == "cdn.test"]
    assert received.values("authorization") == []


# --- what is open ---------------------------------------------------------------------------------------------------


def test_a_download_follows_its_redirect_with_an_unmodified_client(scene: Scene) -> None:
    """T22, C105: curl -L gets the file; the storage sees the signed address byte for byte, and no authority."""
    box = scene.box()
    place = target(
        "real", "response-content-disposition=attachment%3B%20filename%3D%22a%2fb%22&X-Amz-Signature=a%2bB%3D"
    )
    done = box.curl("-L", *authority(box), f"https://files.test/file/a?to={quote(place, safe='')}")
    assert done.raw == CONTENT
    [first] = [one for one in scene.origin.received if one.header("host") == "files.test"]
    assert first.values("authorization") == [f"Bearer {SECRET}"]
    [fetched] = [one for one in scene.origin.received if one.header("host") == "cdn.test"]
    assert f"https://cdn.test{fetched.target}" == place
    assert fetched.values("authorization") == []
    assert SECRET not in fetched.raw_head.decode()
    [granted] = scene.gateway.awaited(event="redirect.granted", sandbox=box.id)
    assert (granted["redirect_host"], granted["operation"]) == ("cdn.test", "files/file.read")
    [handed] = scene.gateway.awaited(event="request.handoff", sandbox=box.id, host="cdn.test")
    [intent] = scene.gateway.awaited(event="broker.intent", sandbox=box.id, host="cdn.test")
    assert handed["grant"] == intent["grant"] == granted["grant"]
    assert "credential" not in intent
    told = scene.gateway.exeat("why", handed["request_id"])
    assert granted["grant"] in told.out
    assert "00ff" not in json.dumps(scene.gateway.settled(sandbox=box.id))


def test_the_placeholder_that_a_client_keeps_goes_no_further(scene: Scene) -> None:
    """Go and others keep Authorization below the first host: our placeholder is dropped and counted, not sent."""
    box = scene.box()
    place = target("kept")
    assert location(scene.opened(box, place)) == place
    assert status(fetch(box, place, *authority(box))) == 200
    [fetched] = [one for one in scene.origin.received if one.header("host") == "cdn.test"]
    assert fetched.values("authorization") == []
    [handed] = scene.gateway.awaited(event="request.handoff", sandbox=box.id, host="cdn.test")
    assert "authorization" in handed["dropped_headers"]


def test_ranges_and_head_are_fine_and_unknown_headers_stay_behind(scene: Scene) -> None:
    """A resumed download: HEAD, a range, conditions; nothing else of the client's headers goes on."""
    box = scene.box("open")
    place = target("ranges")
    fetch(box, f"https://files.test/file/a?to={quote(place, safe='')}")
    assert status(fetch(box, place, "-I")) == 200
    part = box.curl("-r", "256-511", "-H", "X-Data: smuggled", place)
    assert part.raw == CONTENT[256:512]
    last = scene.origin.received[-1]
    assert last.values("x-data") == []
    assert last.values("range") == ["bytes=256-511"]


def test_the_rules_byte_bound_holds_for_what_it_leads_to(scene: Scene) -> None:
    """`limits: {response}` of the rule cuts the file that the redirect led to."""
    box = scene.box("open")

    async def large(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer(200, b"x" * (128 << 10))

    scene.origin.on("/bucket/large", large)
    place = target("large")
    fetch(box, f"https://files.test/file/a?to={quote(place, safe='')}")
    done = box.curl(place)
    assert len(done.raw) < 128 << 10
    assert "x" * 65537 not in done.out


def test_a_policy_that_changes_elsewhere_ends_nothing_and_one_that_takes_the_rule_ends_it(scene: Scene) -> None:
    """A grant lives as long as the rule that it was made by."""
    box = scene.box()
    place = target("reloaded")
    assert location(scene.opened(box, place)) == place
    try:
        scene.gateway.write_policy(POLICY.replace("  denied:\n", "  more:\n    allow: []\n  denied:\n"))
        scene.gateway.reload()
        assert status(fetch(box, place)) == 200
        scene.gateway.write_policy(
            POLICY.replace("operations: [read], credential: files}", "operations: [list.read], credential: files}", 1)
        )
        scene.gateway.reload()
        assert refused(fetch(box, place)) == "redirect-ended"
    finally:
        scene.gateway.write_policy(POLICY)
        scene.gateway.reload()
    assert refused(fetch(box, place)) == "redirect-ended"
    assert len(scene.at("cdn.test")) == 1


def test_over_http2_the_same(scene: Scene) -> None:
    """A rule with `protocol: h2`: the client is served over HTTP/2 at both hosts."""
    box = scene.box("h2")
    place = target("two")
    done = box.curl(
        "--http2",
        "-L",
        "-w",
        "%{http_version}",
        *authority(box),
        f"https://files.test/file/a?to={quote(place, safe='')}",
    )
    assert done.raw == CONTENT + b"2", done.raw[-200:]
    [fetched] = [one for one in scene.origin.received if one.header("host") == "cdn.test"]
    assert fetched.values("authorization") == []


@pytest.mark.skipif(find_capture_tools() is None, reason="iproute2 and nftables are not installed")
def test_captured_the_same(scene: Scene) -> None:
    """A client that knows of no proxy: the granted host resolves, and the address is fetched."""
    place = target("captured")
    script = (
        'key=$FILES_KEY; exec env -i PATH=/usr/bin:/bin curl -sS -L --cacert /run/exeat/bundle.pem -H "Authorization: '
        f'Bearer $key" "https://files.test/file/a?to={quote(place, safe="")}"'
    )
    done = scene.gateway.run("sh", "-c", script, options=["--role", "agent"])
    assert done.raw == CONTENT, done
    [fetched] = [one for one in scene.origin.received if one.header("host") == "cdn.test"]
    assert f"https://cdn.test{fetched.target}" == place
