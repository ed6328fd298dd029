"""Short-lived credentials end to end: the vault asks a token endpoint, the executor applies what came, the sandbox
holds a placeholder. Endpoints check signatures; one provider is a real one from PyPI."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oidc_provider_mock
import pytest
import requests
import werkzeug.serving

from tests.support.gateway import Box, Completed, TestGateway
from tests.support.origins import Exchange, Origin
from tests.support.scripts import READ, script, text
from tests.support.tokenservers import (
    GitHubServer,
    GoogleServer,
    OAuthServer,
    StsServer,
    account_file,
    private_pem,
    public_pem,
    rsa_key,
    secret_of,
    signature_of,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("exchanges")]

KEY = rsa_key()
CLIENT_SECRET = "canary-crm-client-secret-51c0a9"
REFRESH = "canary-refresh-token-77aa01c4"
AWS_SECRET = "canary-aws-secret-key-0123456789abcdefghij"

CREDENTIALS = """
version: 1
destinations:
  token.test: {{addresses: [127.0.0.32/32], resolve: [127.0.0.32], port: {token}, ca: "file:token.pem"}}
  oidc.test: {{addresses: [127.0.0.33/32], resolve: [127.0.0.33], port: {oidc}, ca: "file:token.pem"}}
credentials:
  crm:
    kind: oauth2
    token_url: "https://token.test:{token}/oauth/token"
    grant: client_credentials
    secret: {{client_id: "env:CRM_ID", client_secret: "store:crm/secret"}}
    scopes: ["crm:${{sandbox.owner}}"]
    hosts: [crm.test]
    owner: tests
    placeholder: {{env: CRM_TOKEN, shape: "{{32}}"}}
  signed-in:
    kind: oauth2
    token_url: "https://token.test:{token}/oauth/token"
    grant: refresh_token
    secret: {{client_id: "env:CRM_ID", client_secret: "store:crm/secret", refresh_token: "store:crm/refresh"}}
    header: X-Session
    template: "v2 {{value}}"
    hosts: [session.test]
    owner: tests
    placeholder: {{env: SESSION_TOKEN, shape: "{{32}}"}}
  app:
    kind: github-app
    api_url: "https://token.test:{token}"
    app_id: "123456"
    installation_id: "7890"
    repositories: ["${{sandbox.repository}}"]
    permissions: {{contents: read}}
    secret: {{private_key: "store:github/app"}}
    hosts: [github.test]
    owner: tests
    placeholder: {{env: GH_TOKEN, shape: "ghs_{{36}}"}}
  bucket:
    kind: google
    token_url: "https://token.test:{token}/token"
    scopes: ["https://scope.test/read"]
    secret: "store:gcp/key"
    hosts: [storage.test]
    owner: tests
    placeholder: {{env: GCS_TOKEN, shape: "ya29.{{40}}"}}
  role:
    kind: aws-sts
    sts_url: "https://token.test:{token}/"
    role_arn: "arn:aws:iam::123456789012:role/agents"
    regions: [eu-central-1]
    aws_services: [s3]
    secret: {{access_key_id: "env:AKID", secret_access_key: "store:aws/key"}}
    hosts: [s3.test]
    owner: tests
    placeholder: {{env: AWS_ACCESS_KEY_ID, shape: "AKIA{{24}}"}}
  oidc:
    kind: oauth2
    token_url: "https://oidc.test:{oidc}/oauth2/token"
    grant: refresh_token
    secret: {{client_id: "store:oidc/id", client_secret: "store:oidc/secret", refresh_token: "store:oidc/refresh"}}
    hosts: [oidc.test]
    owner: tests
    placeholder: {{env: OIDC_TOKEN, shape: "{{40}}"}}
"""

POLICY = """
roles:
  agent:
    allow:
      - {name: crm, host: crm.test, methods: [GET], paths: ["/**"], credential: crm}
      - {name: session, host: session.test, methods: [GET], paths: ["/**"], credential: signed-in}
      - {name: github, host: github.test, methods: [GET], paths: ["/**"], credential: app}
      - {name: storage, host: storage.test, methods: [GET], paths: ["/**"], credential: bucket}
      - {name: s3, host: s3.test, methods: [GET], paths: ["/**"], query: any, credential: role}
      - {name: userinfo, host: oidc.test, methods: [GET], paths: [/userinfo], credential: oidc}
"""

HOSTS = ("crm.test", "session.test", "github.test", "storage.test", "s3.test")


class Scene:
    """A gateway, the APIs, the token endpoints."""

    def __init__(self, gateway: TestGateway, api: Origin, token: Origin) -> None:
        self.gateway, self.api, self.token = gateway, api, token
        self.oauth = OAuthServer(token, clients={"crm-client": CLIENT_SECRET}, refresh_tokens={REFRESH})
        self.github = GitHubServer(token, "123456", public_pem(KEY))
        self.google = GoogleServer(token, KEY)
        self.sts = StsServer(token, {"AKIAEXAMPLE000000000": AWS_SECRET})
        self.oidc_port = 0

    def sandbox(self, owner: str = "ada", **attributes: str) -> Box:
        return self.gateway.sandbox(owner=owner, attributes={"repository": "shop", **attributes})

    def get(self, box: Box, host: str, variable: str, header: str = "Authorization: Bearer ") -> Completed:
        carrier = f"{header}{box.placeholders[variable]}"
        return box.curl("-i", "-H", carrier, f"https://{host}:{self.api.port}/x")

    def sent(self, host: str, header: str = "authorization") -> list[str]:
        """What the API saw in a header, by host."""
        name = f"{host}:{self.api.port}"
        return [item.header(header) or "" for item in self.api.received if item.header("host") == name]


@contextmanager
def oidc_provider(token: Origin, port: int) -> Iterator[str]:
    """oidc-provider-mock (authlib's server side) over TLS, with one registered client; its base URL."""
    app = oidc_provider_mock.app(require_client_registration=True)
    context = token.authority.server_context(("oidc.test", "127.0.0.33"))
    server = werkzeug.serving.make_server("127.0.0.33", port, app, threaded=True, ssl_context=context)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.33:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def sign_in(base: str, ca: str) -> dict[str, str]:
    """Register a client, sign somebody in as a browser would, and take the refresh token."""
    back = "https://app.test/back"
    client = requests.post(f"{base}/oauth2/clients", json={"redirect_uris": [back]}, verify=ca, timeout=20).json()
    asked = {
        "client_id": client["client_id"],
        "redirect_uri": back,
        "response_type": "code",
        "scope": "openid email offline_access",
        "state": "s",
    }
    consent = requests.post(
        f"{base}/oauth2/authorize",
        params=asked,
        data={"sub": "ada@corp.test"},
        verify=ca,
        timeout=20,
        allow_redirects=False,
    )
    code = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(consent.headers["Location"]).query))["code"]
    tokens = requests.post(
        f"{base}/oauth2/token",
        data={"grant_type": "authorization_code", "code": code, "redirect_uri": back},
        auth=(client["client_id"], client["client_secret"]),
        verify=ca,
        timeout=20,
    ).json()
    return {
        "oidc/id": client["client_id"],
        "oidc/secret": client["client_secret"],
        "oidc/refresh": tokens["refresh_token"],
    }


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("exchanges")
    with (
        Origin(*HOSTS, address="127.0.0.31", handler=script(READ, text("done"))).run_in_thread() as api,
        Origin("token.test", address="127.0.0.32").run_in_thread() as token,
        oidc_provider(token, 0) as base,
    ):
        ca = folder / "ca.pem"
        ca.write_text(token.ca_pem)
        oidc_port = int(base.rpartition(":")[2])
        secrets = {
            "crm/secret": CLIENT_SECRET,
            "crm/refresh": REFRESH,
            "github/app": private_pem(KEY, traditional=True),
            "gcp/key": account_file(KEY),
            "aws/key": AWS_SECRET,
            **sign_in(base, str(ca)),
        }
        gateway = TestGateway(
            folder / "gateway",
            policy=POLICY,
            credentials=CREDENTIALS.format(token=token.port, oidc=oidc_port),
            secrets=secrets,
            origins=[api],
            environment={"CRM_ID": "crm-client", "AKID": "AKIAEXAMPLE000000000"},
        )
        (gateway.config / "token.pem").write_text(token.ca_pem)
        with gateway:
            scene = Scene(gateway, api, token)
            scene.oidc_port = oidc_port
            yield scene
            assert not api.faults
            assert not token.faults


def test_the_token_endpoint_is_not_a_way_for_the_sandbox(scene: Scene) -> None:
    """Nothing allows it, whatever the operator's file says of it: the sandbox cannot ask there itself."""
    box = scene.sandbox()
    before = len(scene.token.connections)
    answer = box.curl("-i", "-d", "grant_type=client_credentials", scene.oauth.url)
    assert "403" in answer.out.splitlines()[0] or "no-rule" in answer.out + answer.err
    assert len(scene.token.connections) == before


def test_a_client_uses_a_placeholder_and_the_api_sees_a_token(scene: Scene) -> None:
    """Client credentials, narrowed by the sandbox's owner; two sandboxes of one owner share a token, others do not."""
    ada, also_ada, grace = scene.sandbox("ada"), scene.sandbox("ada"), scene.sandbox("grace")
    before = len(scene.sent("crm.test"))
    for box in (ada, also_ada, grace):
        assert "done" in scene.get(box, "crm.test", "CRM_TOKEN").out
    tokens = scene.sent("crm.test")[before:]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0].removeprefix("Bearer ") in scene.oauth.given
    asked = [form.get("scope") for form in scene.oauth.forms]
    assert (asked.count("crm:ada"), asked.count("crm:grace")) == (1, 1)


def test_a_refresh_token_is_replaced_in_the_store_and_survives_a_restart(scene: Scene) -> None:
    """One refresh for a crowd; the next token is in the store; a new vault goes on with it."""

    def used() -> list[str]:
        return [form["refresh_token"] for form in scene.oauth.forms if form["grant_type"] == "refresh_token"]

    scene.gateway.stop()  # what an earlier test was given is forgotten
    scene.gateway.start()
    before = len(used())
    box = scene.sandbox()
    url = f"https://session.test:{scene.api.port}/x"
    header = f"X-Session: {box.placeholders['SESSION_TOKEN']}"
    crowd = box.command("sh", "-c", 'for i in 1 2 3 4 5 6; do curl -sS -H "$0" "$1" & done; wait', header, url)
    assert crowd.out == "done" * 6
    assert len(used()) == before + 1
    assert {value.split(" ")[0] for value in scene.sent("session.test", "x-session")} == {"v2"}
    rotated = scene.gateway.awaited(event="secret.rotated", secret_name="crm/refresh")
    assert rotated[0]["actor"] == "exchange:signed-in"
    scene.gateway.stop()
    scene.gateway.start()
    box = scene.sandbox()
    assert "done" in scene.get(box, "session.test", "SESSION_TOKEN", "X-Session: ").out
    assert len(used()) == len(set(used())) == before + 2
    assert "invalid_grant" not in scene.oauth.refused


def test_an_installation_token_reaches_the_sandboxs_repository_alone(scene: Scene) -> None:
    """Narrowed per sandbox; equal narrowings share one token."""
    shop, till = scene.sandbox(repository="shop"), scene.sandbox(repository="till")
    for box in (shop, till, shop):
        assert "done" in scene.get(box, "github.test", "GH_TOKEN").out
    assert [wanted["repositories"] for wanted in scene.github.wanted] == [["shop"], ["till"]]
    assert scene.sent("github.test") == [f"Bearer {scene.github.given[n]}" for n in (0, 1, 0)]
    nobody = scene.gateway.sandbox(owner="ada")
    answer = scene.get(nobody, "github.test", "GH_TOKEN")
    assert "credential-unavailable" in answer.out
    assert len(scene.github.wanted) == 2


def test_a_service_account_gets_a_token_for_its_scopes(scene: Scene) -> None:
    """The key file stays in the vault; its own token_uri is never asked."""
    box = scene.sandbox()
    assert "done" in scene.get(box, "storage.test", "GCS_TOKEN").out
    assert scene.sent("storage.test") == [f"Bearer {scene.google.given[-1]}"]


def test_a_request_is_signed_with_the_keys_of_an_assumed_role(scene: Scene) -> None:
    """Session keys for this sandbox, and a signature that botocore would have made with them."""
    box = scene.sandbox()
    url = f"https://s3.test:{scene.api.port}/bucket/key?list-type=2"
    assert box.curl(url).out == "done"
    request = next(item for item in scene.api.received if item.header("host") == f"s3.test:{scene.api.port}")
    key_id = scene.sts.given[-1]
    assert scene.sts.forms[-1]["RoleSessionName"] == f"exeat-{box.id}"
    assert request.header("x-amz-security-token") == f"session-of-{key_id}"
    value = request.header("authorization") or ""
    names = value.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    wanted = signature_of(
        "GET",
        url,
        {name: request.header(name) or "" for name in names},
        b"",
        (key_id, secret_of(key_id), None),
        ("s3", "eu-central-1"),
        request.header("x-amz-date") or "",
    )
    assert value.partition("Signature=")[2] == wanted.partition("Signature=")[2]
    other = scene.sandbox()
    assert other.curl(url).out == "done"
    assert scene.sts.given[-1] != key_id


def test_a_token_that_its_upstream_refuses_is_replaced_and_the_read_repeated(scene: Scene) -> None:
    """The provider took a token back before its end: once it is some seconds old, a 401 asks for the next one."""
    box = scene.sandbox("ivy")
    assert "done" in scene.get(box, "crm.test", "CRM_TOKEN").out
    dead = scene.sent("crm.test")[-1]

    async def judge(exchange: Exchange) -> None:
        refused = exchange.request.header("authorization") == dead
        await exchange.answer(401 if refused else 200, b"refused" if refused else b"done")

    scene.api.on("/judged", judge)
    url = f"https://crm.test:{scene.api.port}/judged"
    carrier = f"Authorization: Bearer {box.placeholders['CRM_TOKEN']}"
    until(lambda: box.curl("-H", carrier, url).out == "done")
    assert scene.sent("crm.test")[-2:] == [dead, f"Bearer {scene.oauth.given[-1]}"]


def test_a_real_provider_takes_what_we_ask_and_what_we_apply(scene: Scene) -> None:
    """oidc-provider-mock: signed in outside, refreshed by the vault, and its userinfo read with a placeholder."""
    box = scene.gateway.sandbox(owner="ada")
    url = f"https://oidc.test:{scene.oidc_port}/userinfo"
    answer = box.curl("-H", f"Authorization: Bearer {box.placeholders['OIDC_TOKEN']}", url)
    assert json.loads(answer.out)["email"] == "ada@corp.test", answer.out + answer.err


def test_an_endpoint_that_says_no_refuses_with_a_code_and_recovers(scene: Scene) -> None:
    """Its text goes nowhere. Once the right secret is in the store, the next request passes (T17)."""
    box = scene.sandbox("eve")
    scene.gateway.admin.rotate_secret("crm/secret", b"canary-wrong-secret-00000")
    answer = scene.get(box, "crm.test", "CRM_TOKEN")
    assert "credential-unavailable" in answer.out
    refused = scene.gateway.awaited(event="secret.unavailable", credential="crm")
    assert refused[-1]["reason"] == "exchange-refused"
    scene.gateway.admin.rotate_secret("crm/secret", CLIENT_SECRET.encode())
    assert "done" in scene.get(box, "crm.test", "CRM_TOKEN").out


def test_no_stored_secret_and_no_token_was_seen_where_it_must_not(scene: Scene) -> None:
    """Stored parts reached their endpoint alone; the log and the gateway's messages hold neither them nor tokens."""
    api = b"".join(bytes(connection.raw) for connection in scene.api.connections)
    for secret in (CLIENT_SECRET, REFRESH, AWS_SECRET, "PRIVATE KEY"):
        assert secret.encode() not in api
    log = b"".join(path.read_bytes() for path in scene.gateway.log.rglob("*") if path.is_file())
    tokens: list[Any] = [*scene.oauth.given, *scene.github.given, *scene.google.given]
    for secret in (CLIENT_SECRET, REFRESH, AWS_SECRET, *tokens, *scene.oauth.refresh_tokens):
        assert secret.encode() not in log + scene.gateway.errors().encode()
