"""Every kind of credential end to end: real clients with placeholders, and an origin that witnesses what came."""

from __future__ import annotations

import hashlib
import hmac
import json
import ssl
import sys
import textwrap
from collections.abc import Iterator
from datetime import datetime

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from broker.credentials.totp import totp
from tests.support.authority import Authority
from tests.support.gateway import Completed, TestGateway
from tests.support.origins import Origin, Received
from tests.support.scripts import READ, script, text

pytestmark = pytest.mark.xdist_group("credential-kinds")

KEY_ID = "AKIAEXAMPLEOFOURS123"
SECRETS = {
    "dd-api": "kq9-Api-Real-0d7f1c52aa93",
    "dd-app": "kq9-App-Real-5b1e77c20f4d",
    "cookie": "kq9-Cookie-Real-93ac00d1e6b8",
    "bot": "110201543:kq9/Path?Real&6611aa04cd95",
    "json": 'kq9-"Json"-Real-6611aa04cd95',
    "hmac": "kq9-Hmac-Real-77c20f4d93ac",
    "seed": "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ",
    "aws-id": KEY_ID,
    "aws-secret": "kq9/Aws+Real/0d7f1c52aa93ac00d1e6b8661100",
    "lab": "glpat-kq9-Lab-Real-0d7f1c52",
}

CREDENTIALS = """
version: 1
credentials:
  dd:
    kind: headers
    headers: {DD-API-KEY: "{api_key}", DD-APPLICATION-KEY: "{app_key}"}
    secret: {api_key: "store:dd-api", app_key: "store:dd-app"}
    hosts: [dd.test]
    owner: tests
    placeholder: {api_key: {env: DD_API_KEY, shape: "{32}"}, app_key: {env: DD_APP_KEY, shape: "{40}"}}
  cookie: {kind: cookie, cookie: sid, secret: "store:cookie", hosts: [cookie.test], owner: tests,
           placeholder: {env: SID, shape: "sid_{24}"}}
  bot: {kind: path, path: ["/bot{value}/**", "/file/bot{value}/**"], secret: "store:bot", hosts: [bot.test],
        owner: tests, placeholder: {env: BOT_TOKEN, shape: "110201543:{35}"}}
  json: {kind: body, field: "json:auth.token", secret: "store:json", hosts: [json.test], owner: tests,
         placeholder: {env: JSON_TOKEN, shape: jwt}}
  hmac: {kind: hmac, header: X-Signature, sign: '{timestamp}\\n{method}\\n{target}', timestamp_header: X-Timestamp,
         secret: "store:hmac", hosts: [hmac.test], owner: tests}
  otp: {kind: totp, header: X-OTP, secret: "store:seed", hosts: [otp.test], owner: tests}
  aws:
    kind: sigv4
    regions: [eu-central-1]
    aws_services: [s3]
    secret: {access_key_id: "store:aws-id", secret_access_key: "store:aws-secret"}
    hosts: [s3.test]
    owner: tests
    placeholder:
      access_key_id: {env: AWS_ACCESS_KEY_ID, shape: "AKIA{16:caps}"}
      secret_access_key: {env: AWS_SECRET_ACCESS_KEY, shape: "{40}"}
  lab: {kind: header, header: PRIVATE-TOKEN, also: [bearer, basic], secret: "store:lab", hosts: [lab.test],
        owner: tests, placeholder: {env: GITLAB_TOKEN, shape: "glpat-{24}"}}
  tls: {kind: mtls, secret: {certificate: "file:PEMS/client.pem", key: "file:PEMS/client.key"}, hosts: [tls.test],
        owner: tests}
"""

POLICY = """
roles:
  agent:
    allow:
      - {name: dd, host: dd.test, methods: [GET], paths: ["/**"], credential: dd}
      - {name: cookie, host: cookie.test, methods: [GET], paths: ["/**"], credential: cookie}
      - {name: bot, host: bot.test, methods: [GET], paths: ["/{bot}/{method}"], query: any, credential: bot}
      - name: json
        host: json.test
        methods: [POST]
        paths: ["/**"]
        body: {json: {auth: {token: string}, count: number}}
        credential: json
      - {name: hmac, host: hmac.test, methods: [GET], paths: ["/**"], query: any, credential: hmac}
      - {name: otp, host: otp.test, methods: [GET], paths: ["/**"], credential: otp}
      - {name: aws, host: s3.test, methods: [GET, PUT], paths: ["/**"], query: any, credential: aws}
      - {name: lab, host: lab.test, methods: [GET], paths: ["/**"], credential: lab}
      - {name: tls, host: tls.test, methods: [GET], paths: ["/**"], credential: tls}
"""
NAMES = ("dd.test", "cookie.test", "bot.test", "json.test", "hmac.test", "otp.test", "s3.test", "lab.test")


class Scene:
    """One gateway, one origin under all names but one that asks for a certificate, one sandbox."""

    def __init__(self, gateway: TestGateway, origin: Origin, secure: Origin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.secure = secure
        self.box = gateway.sandbox()

    def get(self, host: str, rest: str, *arguments: str) -> Completed:
        origin = self.secure if host == "tls.test" else self.origin
        return self.box.curl("-i", "--globoff", *arguments, f"https://{host}:{origin.port}{rest}")

    def one(self) -> Received:
        """The only request that came."""
        [received] = self.origin.received
        return received


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("kinds")
    clients = Authority()
    secure = Origin("tls.test", address="127.0.0.33", handler=script(READ, text("proven")))
    assert secure._context is not None
    secure._context.verify_mode = ssl.CERT_REQUIRED
    secure._context.load_verify_locations(cadata=clients.pem)
    pems = folder / "config" / "pems"
    credentials = CREDENTIALS.replace("PEMS", str(pems))
    with (
        Origin(*NAMES, address="127.0.0.32", handler=script(READ, text("done"))).run_in_thread() as origin,
        secure.run_in_thread(),
        TestGateway(
            folder, policy=POLICY, credentials=credentials, secrets=SECRETS, origins=[origin, secure]
        ) as gateway,
    ):
        origin.on("/box/*", script(READ, text("")))
        pems.mkdir()
        key, begin, chain = clients.issue(("agent.test",), usage="client").partition(b"-----BEGIN CERTIFICATE-----")
        for name, pem in (("client.pem", begin + chain), ("client.key", key)):
            (pems / name).write_bytes(pem)
            (pems / name).chmod(0o444)
        yield Scene(gateway, origin, secure)
        assert not origin.faults


@pytest.fixture(autouse=True)
def _from_here(scene: Scene) -> None:
    scene.origin.received.clear()
    scene.secure.received.clear()


def status(answer: Completed) -> int:
    lines = [line for line in answer.out.splitlines() if line.startswith("HTTP/1.1 ")]
    return int(lines[-1].split()[1]) if lines else 0


def reason(answer: Completed) -> str:
    return str(json.loads(answer.out.rpartition("\r\n\r\n")[2])["reason"])


# --- what is refused: nothing reaches the origin ---


def test_a_placeholder_in_another_parts_slot_is_misuse(scene: Scene) -> None:
    """Each part has its own place, although both are this sandbox's and this credential's."""
    held = scene.box.placeholders
    answer = scene.get("dd.test", "/v1", "-H", f"DD-API-KEY: {held['DD_APP_KEY']}")
    assert (status(answer), scene.origin.received) == (403, [])
    assert reason(answer) in ("placeholder-misuse", "client-authority")


@pytest.mark.parametrize("rest", ["/bot{}/getMe?x={}", "/x{}/getMe", "/bot{}/{}"])
def test_a_placeholder_elsewhere_in_the_path_or_query_is_misuse(scene: Scene, rest: str) -> None:
    """Only the declared segment: not beside it, not twice, not in the query."""
    answer = scene.get("bot.test", rest.replace("{}", scene.box.placeholders["BOT_TOKEN"]))
    assert (status(answer), reason(answer), scene.origin.received) == (403, "placeholder-misuse", [])


def test_a_foreign_placeholder_is_misuse_in_every_new_slot(scene: Scene) -> None:
    """T19, T21: another sandbox's stand-in in the right place of path, cookie, body and signature."""
    other = scene.gateway.sandbox().placeholders
    body = json.dumps({"auth": {"token": other["JSON_TOKEN"]}, "count": 1})
    scope = f"{other['AWS_ACCESS_KEY_ID']}/20261201/eu-central-1/s3/aws4_request"
    signature = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature={'0' * 64}"
    for answer in (
        scene.get("bot.test", f"/bot{other['BOT_TOKEN']}/getMe"),
        scene.get("cookie.test", "/x", "-b", f"sid={other['SID']}"),
        scene.get("json.test", "/x", "--json", body),
        scene.get("s3.test", "/b/k", "-H", f"Authorization: {signature}", "-H", "X-Amz-Date: 20261201T000000Z"),
    ):
        assert status(answer) == 403
        assert reason(answer) in ("placeholder-misuse", "request-not-signable")
    assert scene.origin.received == []


def test_cookies_of_the_client_are_refused(scene: Scene) -> None:
    """RULINGS 4.2: another cookie beside the slot's is the client's own authority."""
    answer = scene.get("cookie.test", "/x", "-b", f"sid={scene.box.placeholders['SID']}; session=mine")
    assert (status(answer), reason(answer), scene.origin.received) == (403, "client-authority", [])


def test_a_placeholder_in_another_field_of_a_body_is_misuse(scene: Scene) -> None:
    """The declared field alone."""
    token = scene.box.placeholders["JSON_TOKEN"]
    answer = scene.get("json.test", "/x", "--json", json.dumps({"auth": {"token": "x"}, "count": 1, "y": token}))
    assert (status(answer), scene.origin.received) == (403, [])


def test_a_body_signed_chunk_by_chunk_is_refused_with_what_to_do(scene: Scene) -> None:
    """C113, T23: a clear 4xx with a hint, and nothing with a broken signature goes out."""
    claim = "X-Amz-Content-Sha256: STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    answer = scene.get("s3.test", "/b/k", "-X", "PUT", "--data-binary", "x", "-H", claim)
    assert (status(answer), reason(answer), scene.origin.received) == (403, "request-not-signable", [])
    assert "UNSIGNED-PAYLOAD" in answer.out


# --- what goes out ---


def test_two_keys_go_in_two_headers(scene: Scene) -> None:
    """Datadog's: each from its own part, whatever the client had of them."""
    held = scene.box.placeholders
    answer = scene.get("dd.test", "/v1", "-H", f"DD-API-KEY: {held['DD_API_KEY']}")
    assert status(answer) == 200
    received = scene.one()
    assert received.values("dd-api-key") == [SECRETS["dd-api"]]
    assert received.values("dd-application-key") == [SECRETS["dd-app"]]


def test_a_cookie_is_ours_alone(scene: Scene) -> None:
    """A cookie jar with the placeholder in it."""
    assert status(scene.get("cookie.test", "/x", "-b", f"sid={scene.box.placeholders['SID']}")) == 200
    assert scene.one().values("cookie") == [f"sid={SECRETS['cookie']}"]


def test_a_secret_in_the_path_reaches_the_origin_and_no_record(scene: Scene) -> None:
    """C103, T21: the origin decodes the real token; records show the slot, neither the token nor the placeholder."""
    token = scene.box.placeholders["BOT_TOKEN"]
    assert status(scene.get("bot.test", f"/bot{token}/getMe?chat_id=1")) == 200
    assert scene.one().target == "/bot110201543:kq9%2FPath%3FReal%266611aa04cd95/getMe?chat_id=1"
    record = scene.gateway.awaited(event="broker.outcome", credential="bot", status=200)[-1]
    assert record["path"] == "/bot{credential:bot}/getMe"
    assert record["arguments"] == ["bot=bot{credential:bot}", "method=getMe"]
    log = "".join(path.read_text("utf-8", "replace") for path in sorted(scene.gateway.log.rglob("*.jsonl")))
    assert "/bot{credential:bot}/getMe" in log
    assert "Path" not in log
    assert token not in log
    assert token[10:] not in log


def test_a_field_of_a_json_body_is_replaced(scene: Scene) -> None:
    """A JWT-shaped placeholder in, the real token out; the body's length is right and the rest untouched."""
    token = scene.box.placeholders["JSON_TOKEN"]
    assert token.count(".") == 2
    body = json.dumps({"count": 1, "auth": {"token": token}})
    assert status(scene.get("json.test", "/x", "--json", body)) == 200
    assert json.loads(bytes(scene.one().body)) == {"count": 1, "auth": {"token": SECRETS["json"]}}


def test_a_request_is_signed_with_a_key_that_the_client_never_had(scene: Scene) -> None:
    """HMAC: the origin verifies; what the client wrote into the signature's header is gone."""
    assert status(scene.get("hmac.test", "/a?b=c", "-H", "X-Signature: mine", "-H", "X-Timestamp: 1")) == 200
    received = scene.one()
    [moment] = received.values("x-timestamp")
    wanted = hmac.new(SECRETS["hmac"].encode(), f"{moment}\nGET\n/a?b=c".encode(), hashlib.sha256).hexdigest()
    assert received.values("x-signature") == [wanted]
    assert moment != "1"


def test_a_one_time_code_is_made_for_each_call(scene: Scene) -> None:
    """The seed stays; the code is one of around now."""
    assert status(scene.get("otp.test", "/x")) == 200
    [code] = scene.one().values("x-otp")
    record = scene.gateway.awaited(event="broker.outcome", credential="otp", status=200)[-1]
    now = datetime.fromisoformat(record["at"]).timestamp()
    near = {
        totp(b"12345678901234567890", now + shift, digits=6, period=30, algorithm="sha1") for shift in (-60, -30, 0, 30)
    }
    assert code in near


def test_one_secret_goes_where_the_client_put_its_placeholder(scene: Scene) -> None:
    """GitLab's three ways, as curl writes them."""
    token = scene.box.placeholders["GITLAB_TOKEN"]
    for arguments in (
        ("-H", f"PRIVATE-TOKEN: {token}"),
        ("-H", f"Authorization: Bearer {token}"),
        ("-u", f"o:{token}"),
    ):
        assert status(scene.get("lab.test", "/x", *arguments)) == 200
    ways = [(item.values("private-token"), item.values("authorization")) for item in scene.origin.received]
    assert ways == [
        ([SECRETS["lab"]], []),
        ([], [f"Bearer {SECRETS['lab']}"]),
        ([], ["Basic bzpnbHBhdC1rcTktTGFiLVJlYWwtMGQ3ZjFjNTI="]),
    ]


def test_a_connection_proves_itself_with_a_certificate(scene: Scene) -> None:
    """The origin asks for one and gets ours; the sandbox has none. Each call has a connection of its own."""
    for _ in range(2):
        answer = scene.get("tls.test", "/x")
        assert (status(answer), answer.out[-6:]) == (200, "proven")
    assert scene.secure.handshakes == 2
    assert not scene.secure.handshake_failures


BOTO = """
import boto3, sys, io
from botocore.config import Config
made = boto3.client("s3", endpoint_url=sys.argv[1], region_name="eu-central-1",
                    config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}))
made.put_object(Bucket="box", Key="a b/(1)+ü.txt", Body=b"hello " * 1000, ContentType="text/plain")
made.get_object(Bucket="box", Key="a b/(1)+ü.txt")
print(made.generate_presigned_url("get_object", Params={"Bucket": "box", "Key": "k"}, ExpiresIn=600))
"""


def test_boto3_unmodified_holds_placeholders_and_the_origin_verifies_with_the_real_key(scene: Scene) -> None:
    """T23: botocore's own signer, given the real key, makes the very signature that arrived."""
    endpoint = f"https://s3.test:{scene.origin.port}"
    done = scene.box.command(
        sys.executable, "-c", textwrap.dedent(BOTO), endpoint, env={"AWS_EC2_METADATA_DISABLED": "true"}
    )
    assert done.code == 0, done.err
    put, get = scene.origin.received
    assert bytes(put.body).count(b"hello ") == 1000
    for received in (put, get):
        _verify(received, endpoint)
    url = done.out.strip()
    assert scene.box.placeholders["AWS_ACCESS_KEY_ID"] in url
    scene.origin.received.clear()
    assert status(scene.box.curl("-i", "--globoff", url)) == 200
    presigned = scene.one()
    assert KEY_ID in presigned.target
    assert scene.box.placeholders["AWS_ACCESS_KEY_ID"] not in presigned.target
    _verify_presigned(presigned, endpoint)


def _verify(received: Received, endpoint: str) -> None:
    """What botocore signs of the same request with the real key, at the same time, is what arrived."""
    [authorization] = received.values("authorization")
    assert f"Credential={KEY_ID}/" in authorization
    [stamp], [payload] = received.values("x-amz-date"), received.values("x-amz-content-sha256")
    signed = authorization.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    request = AWSRequest(method=received.method, url=endpoint + received.target)
    for name in signed:
        if name != "host":
            request.headers[name] = ",".join(received.values(name))
    request.context["timestamp"] = stamp
    signer = botocore.auth.S3SigV4Auth(Credentials(KEY_ID, SECRETS["aws-secret"]), "s3", "eu-central-1")
    signer.payload = lambda _: payload
    text_to_sign = signer.string_to_sign(request, signer.canonical_request(request))
    assert authorization.endswith(f"Signature={signer.signature(text_to_sign, request)}")


def _verify_presigned(received: Received, endpoint: str) -> None:
    target, _, signature = received.target.partition("&X-Amz-Signature=")
    request = AWSRequest(method="GET", url=endpoint + target)
    request.context["timestamp"] = target.partition("X-Amz-Date=")[2].partition("&")[0]
    signer = botocore.auth.S3SigV4QueryAuth(Credentials(KEY_ID, SECRETS["aws-secret"]), "s3", "eu-central-1")
    assert signature == signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)


def test_no_secret_of_a_kind_is_in_any_record(scene: Scene) -> None:
    """T21, I22: after all of the above, and whatever the kinds made of them."""
    log = "".join(path.read_text("utf-8", "replace") for path in sorted(scene.gateway.log.rglob("*.jsonl")))
    for name, value in SECRETS.items():
        if name != "aws-id":
            assert value not in log, name
