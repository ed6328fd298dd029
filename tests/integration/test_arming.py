"""What arms a credential: the boundary that `exeat run` builds, or the role's word; a token alone does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.gateway import TestGateway
from tests.support.origins import Origin

pytestmark = pytest.mark.xdist_group("arming")

POLICY = """
roles:
  agent:
    allow:
      - {name: keyed, host: keyed.test, methods: [GET], paths: ["/v1/**"], credential: keyed}
      - {name: plain, host: plain.test, methods: [GET], paths: ["/v1/**"]}
  boxed:
    boundary: {external: a jail of our own, reason: the tests play one}
    allow:
      - {name: keyed, host: keyed.test, methods: [GET], paths: ["/v1/**"], credential: keyed}
"""
CREDENTIALS = """
version: 1
credentials:
  keyed: {kind: bearer, secret: "store:keyed", hosts: [keyed.test], owner: tests,
          placeholder: {env: KEYED, shape: "sk_{32}"}}
"""
SECRET = "canary-arming-5c0e7d1a9b3f4826"


@dataclass
class Scene:
    gateway: TestGateway
    origin: Origin

    def url(self, host: str = "keyed.test") -> str:
        return f"https://{host}:{self.origin.port}/v1/x"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Origin("keyed.test", "plain.test", address="127.0.0.56").run_in_thread() as origin:
        gateway = TestGateway(
            tmp_path_factory.mktemp("arming"),
            policy=POLICY,
            credentials=CREDENTIALS,
            secrets={"keyed": SECRET},
            origins=[origin],
            confined=True,
        )
        with gateway:
            yield Scene(gateway, origin)


def test_a_token_on_the_shared_listener_arms_nothing(scene: Scene) -> None:
    """The request is refused by name, the origin sees nothing, and the remedy says both ways."""
    box = scene.gateway.sandbox("agent")
    before = len(scene.origin.connections)
    done = box.curl("-i", "-H", f"Authorization: Bearer {box.placeholders['KEYED']}", scene.url())
    assert "403" in done.out
    assert "boundary-unproven" in done.out
    assert "boundary: external" in done.out
    assert len(scene.origin.connections) == before
    (record,) = scene.gateway.awaited(event="broker.refused", sandbox=box.id)
    assert record["reason"] == "boundary-unproven"
    assert record["rule"] == "agent/keyed"


def test_a_sandbox_cannot_arm_itself_or_another(scene: Scene) -> None:
    """From inside a sandbox there is no admin API to say anything to: no name of ours leads to it."""
    box = scene.gateway.sandbox("agent")
    for url in ("http://exeat.internal", "http://localhost", "http://exeat"):
        said, json = '{"proven": "namespaces"}', "Content-Type: application/json"
        done = box.curl("-i", "-H", json, "-d", said, f"{url}/v1/sandboxes/{box.id}/boundary")
        assert " 200 " not in done.out, done.out
    assert scene.gateway.admin.sandbox(box.id)["boundary"] is None
    assert "boundary.proven" not in {record["event"] for record in scene.gateway.settled(2, sandbox=box.id)}


def test_the_command_says_that_nothing_is_armed(scene: Scene) -> None:
    """`exeat sandbox create` gives placeholders and says at once that they are worth nothing."""
    done = scene.gateway.exeat("sandbox", "create", "--role", "agent")
    assert done.code == 0
    assert "no credential is used" in done.err
    assert "boundary" in done.err
    assert "no credential" not in scene.gateway.exeat("sandbox", "create", "--role", "boxed").err


def test_what_needs_no_credential_passes_without_a_boundary(scene: Scene) -> None:
    """Arming concerns credentials alone."""
    box = scene.gateway.sandbox("agent")
    done = box.curl("-i", scene.url("plain.test"))
    assert " 200 " in done.out, done.out


def test_a_stated_boundary_arms_and_is_on_record(scene: Scene) -> None:
    """The role names what confines its sandboxes; each creation says so in the log."""
    box = scene.gateway.sandbox("boxed")
    done = box.curl("-i", "-H", f"Authorization: Bearer {box.placeholders['KEYED']}", scene.url())
    assert " 200 " in done.out, done.out
    assert scene.origin.received[-1].values("authorization") == [f"Bearer {SECRET}"]
    (record,) = scene.gateway.awaited(event="sandbox.created", sandbox=box.id)
    assert record["boundary"] == "external: a jail of our own"


def test_the_launchers_own_boundary_arms(scene: Scene) -> None:
    """Under `exeat run` the same role uses its credential; boundary.proven stands in the log before the request."""
    command = f'echo "$EXEAT_SANDBOX"; curl -sS -i -H "Authorization: Bearer $KEYED" {scene.url()}'
    done = scene.gateway.run("sh", "-c", command, options=["--role", "agent"])
    assert " 200 " in done.out, (done, scene.gateway.errors())
    assert SECRET not in done.out
    box = done.out.splitlines()[0]
    proven = scene.gateway.awaited(event="boundary.proven", sandbox=box)[0]
    (intent,) = scene.gateway.awaited(event="broker.intent", sandbox=box)
    assert proven["boundary"] == "namespaces"
    assert proven["seq"] < intent["seq"]
