"""SDKs that log in: they are given placeholders by us, and the real endpoint never hears of them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import Box, Completed, TestGateway
from tests.support.origins import Origin
from tests.support.scripts import READ, script, text
from tests.support.tokenservers import GoogleServer, OAuthServer, StsServer, account_file, rsa_key

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stub-endpoints")]

KEY = rsa_key()
CLIENT_SECRET = "canary-crm-client-secret-51c0a9"
AWS_SECRET = "canary-aws-secret-key-0123456789abcdefghij"

CREDENTIALS = """
version: 1
destinations:
  token.test: {{addresses: [127.0.0.42/32], resolve: [127.0.0.42], port: {port}, ca: "file:token.pem"}}
credentials:
  crm:
    kind: oauth2
    token_url: "https://token.test:{port}/oauth/token"
    grant: client_credentials
    secret: {{client_id: "env:CRM_ID", client_secret: "store:crm/secret"}}
    stub: [oauth2-token]
    hosts: [crm.test]
    owner: tests
    placeholder: {{env: CRM_TOKEN, shape: "{{32}}"}}
  bucket:
    kind: google
    token_url: "https://token.test:{port}/token"
    scopes: ["https://scope.test/read"]
    secret: "store:gcp/key"
    stub: [google-token, gce-metadata]
    hosts: [storage.test]
    owner: tests
    placeholder: {{env: GCS_TOKEN, shape: "ya29.{{40}}"}}
  compute:
    kind: google
    token_url: "https://token.test:{port}/token"
    scopes: ["https://scope.test/read"]
    secret: "store:gcp/key"
    stub: [gce-metadata]
    hosts: [storage.test]
    owner: tests
    placeholder: {{env: GCS_TOKEN, shape: "ya29.{{40}}"}}
  role:
    kind: aws-sts
    sts_url: "https://token.test:{port}/"
    role_arn: "arn:aws:iam::123456789012:role/agents"
    regions: [eu-central-1]
    aws_services: [s3]
    secret: {{access_key_id: "env:AKID", secret_access_key: "store:aws/key"}}
    stub: [ec2-metadata]
    hosts: [s3.test]
    owner: tests
    placeholder: {{env: EXAMPLE_KEY_ID, shape: "AKIA{{24}}"}}
  task:
    kind: aws-sts
    sts_url: "https://token.test:{port}/"
    role_arn: "arn:aws:iam::123456789012:role/tasks"
    regions: [eu-central-1]
    aws_services: [s3]
    secret: {{access_key_id: "env:AKID", secret_access_key: "store:aws/key"}}
    stub: [ecs-metadata]
    hosts: [s3.test]
    owner: tests
    placeholder: {{env: EXAMPLE_KEY_ID, shape: "AKIA{{24}}"}}
"""

POLICY = """
roles:
  agent:
    allow:
      - {name: crm, host: crm.test, methods: [GET], paths: ["/**"], credential: crm}
      - {name: storage, host: storage.test, methods: [GET], paths: ["/**"], credential: bucket}
      - {name: s3, host: s3.test, methods: [GET], paths: ["/**"], query: any, credential: role}
  tasks:
    allow:
      - {name: s3, host: s3.test, methods: [GET], paths: ["/**"], query: any, credential: task}
  compute:
    dns: strict
    allow:
      - {name: storage, host: storage.test, methods: [GET], paths: ["/**"], credential: compute}
  other:
    allow:
      - {name: crm, host: crm.test, methods: [GET], paths: ["/public"]}
"""


class Scene:
    def __init__(self, gateway: TestGateway, api: Origin, token: Origin) -> None:
        self.gateway, self.api, self.token = gateway, api, token
        self.oauth = OAuthServer(token, clients={"crm-client": CLIENT_SECRET})
        self.google = GoogleServer(token, KEY)
        self.sts = StsServer(token, {"AKIAEXAMPLE000000000": AWS_SECRET})

    def python(self, box: Box, code: str, *arguments: str) -> Completed:
        """A client's script in the sandbox's environment."""
        return box.command(sys.executable, "-I", "-c", code, *arguments)

    def stubbed(self, box: Box) -> list[str]:
        """Which stub endpoints the log says answered."""
        return [record["action"] for record in self.gateway.records(event="stub.answered", sandbox=box.id)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("stubs")
    with (
        Origin(
            "crm.test", "storage.test", "s3.test", address="127.0.0.41", handler=script(READ, text("done"))
        ).run_in_thread() as api,
        Origin("token.test", address="127.0.0.42").run_in_thread() as token,
    ):
        gateway = TestGateway(
            folder / "gateway",
            policy=POLICY,
            credentials=CREDENTIALS.format(port=token.port),
            secrets={"crm/secret": CLIENT_SECRET, "gcp/key": account_file(KEY), "aws/key": AWS_SECRET},
            origins=[api],
            environment={"CRM_ID": "crm-client", "AKID": "AKIAEXAMPLE000000000"},
        )
        (gateway.config / "token.pem").write_text(token.ca_pem)
        with gateway:
            yield Scene(gateway, api, token)
            assert not api.faults


METADATA = (
    "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
    "http://169.254.170.2/exeat/task",
    "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token",
)


def test_a_role_without_the_credential_has_no_stub(scene: Scene) -> None:
    """It is refused like everything that no rule allows; nothing was dialled."""
    box = scene.gateway.sandbox("other")
    before = len(scene.token.connections)
    answer = box.curl("-i", "-d", "grant_type=client_credentials", scene.oauth.url)
    assert "access_token" not in answer.out
    for url in METADATA:
        refused = box.curl("-i", "-H", "Metadata-Flavor: Google", url)
        assert refused.out.startswith("HTTP/1.1 403"), refused.out
        assert "Xeat" not in refused.out
    assert scene.stubbed(box) == []
    assert len(scene.token.connections) == before


def test_nobody_is_answered_without_an_identity(scene: Scene) -> None:
    """No token, or another's word: 407 and 403 as everywhere, and nothing of a stub."""
    box = scene.gateway.sandbox()
    plain = f"http://127.0.0.1:{scene.gateway.port}"
    wrong = f"http://session:xt_{'A' * 43}@127.0.0.1:{scene.gateway.port}"
    for proxy, status in ((plain, "407"), (wrong, "403")):
        for url in METADATA:
            answer = box.curl("-i", "--proxy", proxy, "-H", "Metadata-Flavor: Google", url)
            assert status in answer.out.splitlines()[0]
            assert "AKIA" not in answer.out + answer.err
            assert "ya29" not in answer.out + answer.err


def test_beside_the_stub_its_host_is_no_destination(scene: Scene) -> None:
    """Other paths there are judged as everywhere, and no rule allows them: the real endpoint hears nothing."""
    box = scene.gateway.sandbox()
    before = len(scene.token.connections)
    for path in ("/", "/oauth/token/", "/oauth/token?x=1/../y", "/oauth%2ftoken", "/userinfo"):
        answer = box.curl("-i", "--path-as-is", scene.token.url(path))
        assert "access_token" not in answer.out, path
    refused = box.curl("-i", scene.oauth.url)
    assert "405" in refused.out
    assert "access_token" not in refused.out
    assert len(scene.token.connections) == before


def test_a_token_request_has_a_bound(scene: Scene, tmp_path: Path) -> None:
    """What is presented is read and dropped, and not without end."""
    box = scene.gateway.sandbox()
    large = tmp_path / "form"
    large.write_bytes(b"a=" + b"x" * (1 << 20))
    answer = box.curl("-i", "--data-binary", f"@{large}", scene.oauth.url)
    assert "access_token" not in answer.out
    assert "body-too-large" in answer.out
    chunked = box.curl("-i", "-H", "Transfer-Encoding: chunked", "--data-binary", f"@{large}", scene.oauth.url)
    assert "access_token" not in chunked.out


def test_a_placeholder_of_a_stub_is_only_its_sandboxes(scene: Scene) -> None:
    """Two sandboxes are given different ones, and one's is misuse in the other."""
    one, two = scene.gateway.sandbox(), scene.gateway.sandbox()
    given = [json.loads(box.curl("-d", "", scene.oauth.url).out)["access_token"] for box in (one, two)]
    assert given == [one.placeholders["CRM_TOKEN"], two.placeholders["CRM_TOKEN"]]
    assert given[0] != given[1]
    answer = one.curl("-i", "-H", f"Authorization: Bearer {given[1]}", f"https://crm.test:{scene.api.port}/x")
    assert "placeholder-misuse" in answer.out


OAUTHLIB = """
import sys
from oauthlib.oauth2 import BackendApplicationClient
from requests_oauthlib import OAuth2Session
client = BackendApplicationClient(client_id="anything")
session = OAuth2Session(client=client)
session.fetch_token(token_url=sys.argv[1], client_id="anything", client_secret="whatever")
print(session.get(sys.argv[2]).text)
"""

AUTHLIB = """
import sys
from authlib.integrations.requests_client import OAuth2Session
session = OAuth2Session("anything", "whatever", token_endpoint=sys.argv[1], grant_type="client_credentials")
session.fetch_token()
print(session.get(sys.argv[2]).text)
"""


@pytest.mark.parametrize("code", [OAUTHLIB, AUTHLIB], ids=["requests-oauthlib", "authlib"])
def test_an_oauth_client_logs_in_with_nothing_and_works(scene: Scene, code: str) -> None:
    """The client asks the token URL that it would ask anyway; the API sees the token that the vault obtained."""
    box = scene.gateway.sandbox()
    done = scene.python(box, code, scene.oauth.url, f"https://crm.test:{scene.api.port}/x")
    assert done.out == "done\n", done.err
    assert scene.stubbed(box) == ["oauth2-token"]
    assert scene.api.received[-1].header("authorization") == f"Bearer {scene.oauth.given[-1]}"
    assert all(form.get("client_id") != "anything" for form in scene.oauth.forms)


GOOGLE = """
import sys
from google.oauth2 import service_account
from google.auth.transport.requests import AuthorizedSession
made = service_account.Credentials.from_service_account_file(sys.argv[1], scopes=["https://scope.test/read"])
print(AuthorizedSession(made).get(sys.argv[2]).text)
"""

COMPUTE = """
import sys
from google.auth import compute_engine
from google.auth.transport.requests import AuthorizedSession
print(AuthorizedSession(compute_engine.Credentials()).get(sys.argv[1]).text)
"""


def test_google_auth_with_a_throw_away_key_file(scene: Scene, tmp_path: Path) -> None:
    """It signs with a key that nobody knows, at a token_uri that is answered by us."""
    box = scene.gateway.sandbox()
    file = tmp_path / "account.json"
    file.write_text(account_file(rsa_key(), "robot@exeat.invalid", token_uri=scene.token.url("/token")))
    done = scene.python(box, GOOGLE, str(file), f"https://storage.test:{scene.api.port}/b/o")
    assert done.out == "done\n", done.err
    assert scene.stubbed(box) == ["google-token"]
    assert (scene.api.received[-1].header("authorization") or "").removeprefix("Bearer ") in scene.google.given


def test_google_auth_on_what_looks_like_a_compute_engine(scene: Scene) -> None:
    """The metadata server's token is the placeholder."""
    box = scene.gateway.sandbox()
    done = scene.python(box, COMPUTE, f"https://storage.test:{scene.api.port}/b/o")
    assert done.out == "done\n", done.err
    assert set(scene.stubbed(box)) == {"gce-metadata"}
    assert (scene.api.received[-1].header("authorization") or "").removeprefix("Bearer ") in scene.google.given
    without = box.curl("-i", METADATA[2])
    assert without.out.startswith("HTTP/1.1 403")
    assert "ya29" not in without.out


BOTO = """
import sys
import boto3
from botocore.config import Config
session = boto3.session.Session()
found = session.get_credentials()
assert found.method == "iam-role", found.method
style = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1})
client = session.client("s3", region_name="eu-central-1", endpoint_url=sys.argv[1], config=style)
print(client.get_object(Bucket="bucket", Key="key")["Body"].read().decode())
"""


def test_boto3_on_what_looks_like_an_ec2_instance(scene: Scene) -> None:
    """Its keys are placeholders from IMDSv2; the origin sees the session that the vault assumed."""
    box = scene.gateway.sandbox()
    done = scene.python(box, BOTO, f"https://s3.test:{scene.api.port}")
    assert done.out == "done\n", done.err
    assert set(scene.stubbed(box)) == {"ec2-metadata"}
    key_id = scene.sts.given[-1]
    assert f"Credential={key_id}/" in (scene.api.received[-1].header("authorization") or "")
    without = box.curl("-i", METADATA[0])
    assert without.out.startswith("HTTP/1.1 401"), "IMDSv1 is not served"


def test_the_keys_of_a_container_name_their_credential(scene: Scene) -> None:
    """At 169.254.170.2, under the relative URI that the environment has."""
    box = scene.gateway.sandbox("tasks")
    path = box.placeholders["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"]
    given = json.loads(box.curl(f"http://169.254.170.2{path}").out)
    assert given["AccessKeyId"] == box.placeholders["EXAMPLE_KEY_ID"]
    assert box.curl("-i", "http://169.254.170.2/exeat/role").out.startswith("HTTP/1.1 404")
    assert scene.stubbed(box) == ["ecs-metadata", "ecs-metadata"]


def run(scene: Scene, role: str, code: str, *arguments: str) -> Completed:
    """A client's script under `exeat run`."""
    options = ("--role", role, "--ro", str(Path(sys.prefix)), "--ro", sys.base_prefix)
    return scene.gateway.run(sys.executable, "-c", code, *arguments, options=options)


def test_exeat_run_brings_the_key_file_that_google_auth_wants(scene: Scene) -> None:
    """GOOGLE_APPLICATION_CREDENTIALS names a throw-away key; application default credentials work with it."""
    code = """
import sys
import google.auth
from google.auth.transport.requests import AuthorizedSession
made, project = google.auth.default(scopes=["https://scope.test/read"])
print(type(made).__module__, AuthorizedSession(made).get(sys.argv[1]).text)
"""
    done = run(scene, "agent", code, f"https://storage.test:{scene.api.port}/b/o")
    assert done.out == "google.oauth2.service_account done\n", done.err


def test_google_auth_finds_its_metadata_server_where_connections_are_captured(scene: Scene) -> None:
    """It looks for one at 169.254.169.254 past any proxy variable, and asks it by name afterwards."""
    if shutil.which("nft") is None or shutil.which("ip") is None:
        pytest.skip("needs nftables and iproute2")
    code = """
import sys
import google.auth
from google.auth.transport.requests import AuthorizedSession
made, project = google.auth.default()
print(type(made).__module__, AuthorizedSession(made).get(sys.argv[1]).text)
"""
    done = run(scene, "compute", code, f"https://storage.test:{scene.api.port}/b/o")
    assert done.out == "google.auth.compute_engine.credentials done\n", done.err


def test_containers_of_aws_find_their_keys_where_connections_are_captured(scene: Scene) -> None:
    """AWS's clients ask 169.254.170.2 past any proxy variable: the capture leads there, to us and nowhere else."""
    if shutil.which("nft") is None or shutil.which("ip") is None:
        pytest.skip("needs nftables and iproute2")
    code = BOTO.replace('"iam-role"', '"container-role"')
    done = run(scene, "tasks", code, f"https://s3.test:{scene.api.port}")
    assert done.out == "done\n", done.err


def test_the_log_holds_no_placeholder_and_says_that_nothing_left(scene: Scene) -> None:
    """A stub's answer is one record of its own, with the credential's name."""
    box = scene.gateway.sandbox()
    box.curl("-d", "client_secret=canary-typed-by-hand-0001", scene.oauth.url)
    (record,) = scene.gateway.awaited(event="stub.answered", sandbox=box.id)
    assert (record["credential"], record["host"], record["status"]) == ("crm", "token.test", 200)
    log = b"".join(path.read_bytes() for path in scene.gateway.log.rglob("*") if path.is_file())
    assert b"canary" not in log
    assert not [value for name, value in box.placeholders.items() if "Xeat" in value and value.encode() in log]
