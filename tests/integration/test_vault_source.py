"""Secrets of a Vault server (its documented protocol, on loopback) end to end: replaced keys, leases, an outage."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.gateway import EXEAT, PATH, Box, TestGateway
from tests.support.origins import Exchange, Origin
from tests.support.secretservers import HOST, VaultServer
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("vault-source")

FIRST, SECOND = "kq8-Vault-First-0d7f1c52aa93", "kq8-Vault-Second-5b1e77c20f4d"
SECRET_ID = "kq8-Vault-SecretId-93ac00d1e6b8"
CREDENTIALS = """
version: 1
credentials:
  stored: {{kind: header, header: X-Api-Key, secret: "corp:kv/shop#token", hosts: [stored.test], owner: tests,
            placeholder: {{env: STORED_KEY, shape: "st_{{24}}"}}}}
  leased: {{kind: basic, username: reporting, secret: "made:db/creds/ro#password", hosts: [leased.test],
            owner: tests, placeholder: {{env: LEASED_KEY, shape: "{{32}}"}}}}
sources:
  corp: {{kind: vault, address: "https://{host}", ttl: 1h, failure_ttl: 1s,
          auth: {{approle: {{role_id: "env:VAULT_ROLE", secret_id: "store:vault/secret-id"}}}}}}
  made: {{kind: vault-dynamic, address: "https://{host}", failure_ttl: 1s,
          auth: {{approle: {{role_id: "env:VAULT_ROLE", secret_id: "store:vault/secret-id"}}}}}}
destinations:
  {host}: {{addresses: ["127.0.0.38/32"], resolve: ["127.0.0.38"], port: {port}, ca: "file:vault.pem"}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: stored, host: stored.test, methods: [GET], paths: ["/**"], credential: stored}
      - {name: post, host: stored.test, methods: [POST], paths: ["/**"], credential: stored}
      - {name: leased, host: leased.test, methods: [GET], paths: ["/**"], credential: leased}
"""


class Scene:
    """A gateway, a Vault server, and an upstream that takes one key at a time."""

    def __init__(self, gateway: TestGateway, upstream: Origin, vault: VaultServer) -> None:
        self.gateway, self.upstream, self.vault = gateway, upstream, vault
        self.box = gateway.sandbox()
        self.takes = FIRST

    async def api(self, exchange: Exchange) -> None:
        await exchange.read_body()
        given = exchange.request.header("x-api-key")
        await exchange.answer(200 if given in (None, self.takes) else 401, b"done")

    def get(self, rest: str, *more: str, host: str = "stored.test", box: Box | None = None) -> int:
        url = f"https://{host}:{self.upstream.port}{rest}"
        return int((box or self.box).curl("-o", "/dev/null", "-w", "%{http_code}", *more, url).out)

    def keys(self, path: str) -> list[str | None]:
        """What the upstream was given for `path`, in order."""
        return [item.header("x-api-key") for item in self.upstream.received if item.path == path]

    def check(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [EXEAT, "secret", "check", *words, "--config", str(self.gateway.settings_file)]
        environment = {"PATH": PATH, "HOME": str(self.gateway.home), "LANG": "C.UTF-8"}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("vault")
    with (
        Origin(HOST, address="127.0.0.38").run_in_thread() as place,
        Origin("stored.test", "leased.test", address="127.0.0.39").run_in_thread() as upstream,
    ):
        vault = VaultServer(place, role=("role-1", SECRET_ID))
        vault.put("shop", token=FIRST)
        vault.put("ro", any="x")
        gateway = TestGateway(
            folder,
            policy=POLICY,
            credentials=CREDENTIALS.format(host=HOST, port=place.port),
            secrets={"vault/secret-id": SECRET_ID},
            origins=[upstream],
            environment={"VAULT_ROLE": "role-1"},
        )
        (gateway.config / "vault.pem").write_text(place.ca_pem)
        with gateway:
            made = Scene(gateway, upstream, vault)
            upstream.on("/*", made.api)
            yield made
        assert not place.faults
        assert not upstream.faults
        # Stopping gave everything back: no lease and no login of ours lives on.
        assert vault.leases == {}
        assert [who for who in vault.tokens.values() if who == "login"] == []


def test_a_server_that_is_gone_refuses_and_comes_back(scene: Scene) -> None:
    """T17: nothing goes upstream while Vault faults, and it serves again without a restart; check names both."""
    scene.gateway.admin.sync_credentials("stored")
    scene.vault.how = "fault"
    try:
        scene.gateway.admin.sync_credentials("stored")
        count = len(scene.upstream.received)
        assert scene.get("/gone") == 503
        assert len(scene.upstream.received) == count
        said = scene.check("stored")
        assert said.returncode == 1
        assert "source-unreachable" in said.stdout
        assert "corp:kv/shop" in said.stderr
    finally:
        scene.vault.how = ""
    until(lambda: scene.get("/back") == 200)
    assert scene.check("stored").returncode == 0
    assert scene.gateway.awaited(event="secret.unavailable", credential="stored")


def test_a_key_that_was_replaced_is_taken_up_by_the_read_that_it_fails(scene: Scene) -> None:
    """The 401 of a copy that is old enough is not the client's: one GET, two attempts, each with intent and outcome.

    A write is sent once, and its 401 is the answer.
    """
    scene.gateway.admin.sync_credentials("stored")
    assert scene.get("/before") == 200
    scene.vault.put("shop", token=SECOND)
    scene.takes = SECOND
    try:
        assert scene.get("/write", "-X", "POST") == 401
        until(lambda: scene.get("/read") == 200)
        assert scene.keys("/read")[-2:] == [FIRST, SECOND]
        assert scene.keys("/write") == [FIRST]
        intents = scene.gateway.awaited(event="broker.intent", path="/read", attempt=2)
        request = intents[0]["request_id"]
        outcomes = until(
            lambda: len(found := scene.gateway.records(event="broker.outcome", request_id=request)) == 2 and found
        )
        assert isinstance(outcomes, list)
        assert [record["attempt"] for record in outcomes] == [1, 2]
        assert outcomes[0]["error"] == "credential-refused"
        assert outcomes[0]["credential_version"] != outcomes[1]["credential_version"]
    finally:
        scene.vault.put("shop", token=FIRST)
        scene.takes = FIRST
        scene.gateway.admin.sync_credentials("stored")


def test_a_lease_is_one_sandboxs_and_ends_with_it(scene: Scene) -> None:
    """Two sandboxes use two passwords that Vault made for them; ending one revokes its own, on record."""
    one, two = scene.gateway.sandbox(), scene.gateway.sandbox()
    assert scene.get("/l1", host="leased.test", box=one) == 200
    assert scene.get("/l1", host="leased.test", box=one) == 200
    first = set(scene.vault.leases)
    assert len(first) == 1
    assert scene.get("/l2", host="leased.test", box=two) == 200
    sent = {item.header("authorization") for item in scene.upstream.received if item.path in ("/l1", "/l2")}
    assert len(sent) == 2
    scene.gateway.admin.end_sandbox(one.id)
    until(lambda: not first & set(scene.vault.leases))
    assert len(scene.vault.leases) == 1
    said = scene.gateway.awaited(event="lease.returned", sandbox=one.id)
    assert said[0]["outcome"] == "done"
    scene.gateway.admin.end_sandbox(two.id)
    until(lambda: scene.vault.leases == {})


def test_no_value_is_on_record(scene: Scene) -> None:
    """Keys, passwords that were made, tokens and what the source was opened with: nowhere in log or database."""
    assert scene.get("/x") == 200
    written = json.dumps(scene.gateway.records()).encode()
    for path in (scene.gateway.state / "vault").rglob("*"):
        if path.is_file():
            written += path.read_bytes()
    for value in (FIRST, SECOND, SECRET_ID, "made-password", "login-1-canary"):
        assert value.encode() not in written
