"""The whole path once: a real client, the real processes, an origin that witnesses."""

from pathlib import Path

from tests.support.gateway import TestGateway
from tests.support.origins import Origin

POLICY = """
roles:
  agent:
    allow:
      - name: read
        host: api.test
        methods: [GET]
        paths: ["/v1/**"]
        credential: api
"""
CREDENTIALS = """
version: 1
credentials:
  api:
    {kind: bearer, secret: "store:api", hosts: [api.test], owner: tests, placeholder: {env: API_KEY, shape: "sk_{32}"}}
"""
SECRET = "canary-7f3a9b21c4d5e6f7-canary"


def test_a_credentialed_read_reaches_the_origin_with_the_secret(tmp_path: Path) -> None:
    """curl sends the placeholder; the origin sees the secret once; the answer does not show it."""
    with (
        Origin("api.test", address="127.0.0.11").run_in_thread() as origin,
        TestGateway(
            tmp_path, policy=POLICY, credentials=CREDENTIALS, secrets={"api": SECRET}, origins=[origin]
        ) as gateway,
    ):
        box = gateway.sandbox()
        url = f"https://api.test:{origin.port}/v1/x"
        answer = box.curl("-i", "-H", f"Authorization: Bearer {box.placeholders['API_KEY']}", url)
        assert "200" in answer.out.splitlines()[2], (answer, gateway.errors(), gateway.records())
        assert origin.received[0].values("authorization") == [f"Bearer {SECRET}"]
        assert SECRET not in answer.out
        denied = box.curl("-i", "-X", "POST", url)
        assert "no-rule" in denied.out
        assert len(origin.received) == 1
