"""Policies that contradict themselves do not load, and paths mean to us what they mean to the origin."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from broker.admin.client import AdminError
from tests.support.gateway import Box, Completed, TestGateway
from tests.support.origins import Exchange, Origin

pytestmark = pytest.mark.xdist_group("policy_paths")

SECRET = "pp1-Real-8c0f2277ab10d9"
CREDENTIALS = """
version: 1
credentials:
  api: {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests,
        placeholder: {env: API_KEY, shape: "sk_{24}"}}
"""
GOOD = """
roles:
  agent:
    allow:
      - {name: api, host: api.test, methods: [GET], paths: ["/v1/**"], credential: api}
      - {name: public, host: paths.test, methods: [GET], paths: ["/public/**"]}
      - {name: clear, host: clear.test, scheme: http, methods: [GET], paths: ["/public/**"]}
      - {name: plain, host: plain.test, methods: [GET], paths: ["/**"], query: any}
"""


async def _normalising(exchange: Exchange) -> None:
    """An origin that decodes and then resolves a path, as many do, and guards nothing itself."""
    await exchange.read_body()
    path = unquote(exchange.request.path).split("\x00")[0]
    clean = posixpath.normpath(path).replace("//", "/")
    body = b"THE-SECRET-PAGE" if clean.startswith("/secret") else clean.encode()
    await exchange.answer(200, body)


class Scene:
    def __init__(self, gateway: TestGateway, secure: Origin, clear: Origin) -> None:
        self.gateway = gateway
        self.secure = secure
        self.clear = clear
        self.box: Box = gateway.sandbox()

    def url(self, entry: str, path: str) -> str:
        if entry == "connect":
            return f"https://paths.test:{self.secure.port}{path}"
        return f"http://clear.test:{self.clear.port}{path}"

    def get(self, url: str, *arguments: str) -> Completed:
        return self.box.curl("--path-as-is", "--globoff", "-w", "\n%{http_code}", *arguments, url)

    @property
    def requests(self) -> list[str]:
        return [item.target for origin in (self.secure, self.clear) for item in origin.received]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    names = ("api.test", "paths.test", "plain.test")
    with (
        Origin(*names, address="127.0.0.32", handler=_normalising).run_in_thread() as secure,
        Origin("clear.test", address="127.0.0.33", tls=False, handler=_normalising).run_in_thread() as clear,
        TestGateway(
            tmp_path_factory.mktemp("paths"),
            policy=GOOD,
            credentials=CREDENTIALS,
            secrets={"api": SECRET},
            origins=[secure, clear],
        ) as gateway,
    ):
        yield Scene(gateway, secure, clear)


@pytest.fixture(autouse=True)
def _fresh(scene: Scene) -> None:
    scene.secure.received.clear()
    scene.clear.received.clear()


def status(answer: Completed) -> int:
    return int(answer.out.rpartition("\n")[2] or 0)


# --- T24: contradictions -----------------------------------------------------------------------------------------

UNLISTED = """
roles:
  agent:
    allow:
      - {name: public, host: paths.test, methods: [GET], paths: ["/public/**"]}
      - {name: api, host: plain.test, methods: [GET], paths: ["/v1/**"], credential: api}
"""
TUNNELLED = """
roles:
  agent:
    allow:
      - {name: api, host: api.test, tunnel: true, reason: "a test", credential: api}
"""
CLEAR = """
roles:
  agent:
    allow:
      - {name: api, host: clear.test, scheme: http, methods: [GET], paths: ["/v1/**"], credential: api}
"""


@pytest.mark.parametrize(
    ("policy", "named", "sentence"),
    [
        (UNLISTED, ("agent/api", "plain.test"), "the host that the secret is bound to is not the rule's"),
        (TUNNELLED, ("credential", "tunnel"), "nothing can be put into a tunnel"),
        (CLEAR, ("agent/api", "clear.test", "plain HTTP"), "a secret never travels in clear"),
    ],
    ids=["unlisted", "tunnel", "http"],
)
def test_a_policy_that_injects_where_it_cannot_is_refused_and_the_last_one_stays(
    scene: Scene, policy: str, named: tuple[str, ...], sentence: str
) -> None:
    """T24: each contradiction is a load error with file, line, rule and host; the policy in force is the one before."""
    before = scene.gateway.admin.policy()["digest"]
    scene.gateway.write_policy(policy)
    try:
        with pytest.raises(AdminError) as refused:
            scene.gateway.reload()
    finally:
        scene.gateway.write_policy(GOOD)
    problems = "\n".join(str(line) for line in refused.value.body["problems"])
    assert "policy.yaml" in problems or "credentials.yaml" in problems, sentence
    for word in named:
        assert word in problems, (sentence, problems)
    assert scene.gateway.admin.policy()["digest"] == before
    assert status(scene.get(f"https://api.test:{scene.secure.port}/v1/x")) == 200
    assert scene.secure.received[0].values("authorization") == [f"Bearer {SECRET}"]


@pytest.mark.parametrize(
    "header",
    ["Authorization: Bearer {ph}", "X-Api-Key: {ph}", "X-Anything: {ph}", "User-Agent: {ph}", "Referer: /{ph}"],
)
def test_a_stray_placeholder_is_stopped_on_a_plain_rule(scene: Scene, header: str) -> None:
    """T24: a placeholder in any header to an allowed host without a credential is a 403 and never leaves."""
    placeholder = scene.box.placeholders["API_KEY"]
    answer = scene.get(f"https://plain.test:{scene.secure.port}/x", "-H", header.format(ph=placeholder))
    assert status(answer) == 403
    assert "placeholder-misuse" in answer.out
    assert scene.requests == []


# --- T25: paths --------------------------------------------------------------------------------------------------

ENTRIES = ("connect", "absolute")
OTHER_PATHS = ("/publicx/a", "/public", "/PUBLIC/a", "/secret", "/secret/public/a")
"""Well written, and not what is permitted."""


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "path",
    [
        "/public/../secret",
        "/public/%2e%2e/secret",
        "/public/%2E%2e/secret",
        "/public/.%2e/secret",
        "/public//../secret",
        "/public/..%00/secret",
        "/public/..%2fsecret",
        "/public/%2e%2e%2fsecret",
        "/public/..%5csecret",
        "/public/..\\secret",
        "/public/..;/secret",
        "/public/%252e%252e/secret",
        "/public/a/../../secret",
        "//secret",
        "/publicx/a",
        "/public",
        "/PUBLIC/a",
        "/secret",
        "/secret/public/a",
        "/%2fpublic/a",
    ],
)
def test_no_spelling_leads_out_of_the_permitted_path(scene: Scene, entry: str, path: str) -> None:
    """T25, C131: only `GET /public/**` is permitted; no spelling of a way out shows the secret page of a lax origin."""
    answer = scene.get(scene.url(entry, path))
    assert "THE-SECRET-PAGE" not in answer.out
    assert status(answer) in ((403,) if path in OTHER_PATHS else (400, 403)), path
    assert scene.requests == []


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("path", ["/%70ublic/a", "/public/./a", "/public/%61"])
def test_another_spelling_of_a_permitted_path_is_that_path_or_no_request(scene: Scene, entry: str, path: str) -> None:
    """T25: an unusual spelling of /public/a is served as /public/a, or refused as a bad path; nothing else."""
    answer = scene.get(scene.url(entry, path))
    assert status(answer) in (200, 400)
    if status(answer) == 200:
        assert answer.out.startswith("/public/a\n")
    else:
        assert scene.requests == []
        assert json.loads(answer.out.rpartition("\n")[0])["reason"] == "bad-path"


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("path", ["/public/a", "/public/a/b.txt", "/public/a%20b", "/public/a..b", "/public/~x"])
def test_permitted_paths_reach_the_origin_as_they_were_sent(scene: Scene, entry: str, path: str) -> None:
    """T25: what is permitted arrives byte for byte."""
    assert status(scene.get(scene.url(entry, path))) == 200
    assert scene.requests == [path]
