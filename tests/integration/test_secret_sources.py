"""Secrets from elsewhere, end to end: a helper program, systemd, the commands that ask them, what is on record."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.gateway import EXEAT, PATH, Completed, TestGateway, completed
from tests.support.origins import Origin
from tests.support.scripts import READ, script, text

pytestmark = pytest.mark.xdist_group("secret-sources")

FIRST = "kq8-Helper-First-0d7f1c52aa93"
SECOND = "kq8-Helper-Second-5b1e77c20f4d"
PASSED = "kq8-Systemd-Real-93ac00d1e6b8"
CREDENTIALS = """
version: 1
sources:
  helper: {{kind: exec, program: {program}, arguments: [get, "{{name}}"], environment: [SESSION], ttl: 1h,
            failure_ttl: 1s}}
credentials:
  helped: {{kind: header, header: X-Api-Key, secret: {{from: helper, name: team/key}}, hosts: [helped.test],
            owner: tests, placeholder: {{env: HELPED_KEY, shape: "hk_{{24}}"}}}}
  passed: {{kind: header, header: X-Api-Key, secret: "systemd:shop-key", hosts: [passed.test], owner: tests,
            placeholder: {{env: PASSED_KEY, shape: "pk_{{24}}"}}}}
  owners: {{kind: header, header: X-Api-Key, secret: "store:owners/${{sandbox.owner}}", hosts: [owners.test],
            owner: tests, placeholder: {{env: OWNERS_KEY, shape: "ok_{{24}}"}}}}
"""
POLICY = """
roles:
  agent:
    allow:
      - {name: helped, host: helped.test, methods: [GET], paths: ["/**"], credential: helped}
      - {name: passed, host: passed.test, methods: [GET], paths: ["/**"], credential: passed}
      - {name: owners, host: owners.test, methods: [GET], paths: ["/**"], credential: owners}
"""
HELPER = """#!/bin/sh
cat "{value}" || exit 7
cd "{notes}" || exit 9
grep -E '^(NoNewPrivs|Uid):' /proc/self/status > status
/usr/bin/env > variables
echo "$@" > arguments
"""


class Scene:
    """One gateway whose helper reads a file that we write, and leaves its notes where the vault may write."""

    def __init__(self, gateway: TestGateway, origin: Origin) -> None:
        self.gateway, self.origin = gateway, origin
        self.notes = gateway.state / "vault"
        self.box = gateway.sandbox(owner="ada")

    def holds(self, value: str | None) -> None:
        """What the helper gives from now on; None: nothing, it fails."""
        path = self.gateway.config / "value"
        if value is None:
            path.unlink(missing_ok=True)
        else:
            fresh = self.gateway.config / "fresh"
            fresh.write_text(value + "\n")
            fresh.chmod(0o644)
            fresh.replace(path)

    def get(self, host: str, rest: str) -> int:
        answer = self.box.curl("-o", "/dev/null", "-w", "%{http_code}", f"https://{host}:{self.origin.port}{rest}")
        return int(answer.out)

    def exeat(self, *words: str) -> Completed:
        environment = {"PATH": PATH, "HOME": str(self.gateway.home), "LANG": "C.UTF-8"}
        argv = [EXEAT, *words, "--config", str(self.gateway.settings_file)]
        return completed(subprocess.run(argv, env=environment, capture_output=True, timeout=60, check=False))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("sources")
    folder.chmod(0o755)
    work, passed = folder / "config", folder / "passed"
    passed.mkdir(0o700)
    (passed / "shop-key").write_text(PASSED + "\n")
    with Origin(
        "helped.test", "passed.test", "owners.test", address="127.0.0.37", handler=script(READ, text("done"))
    ).run_in_thread() as origin:
        gateway = TestGateway(
            folder,
            policy=POLICY,
            credentials=CREDENTIALS.format(program=work / "helper"),
            origins=[origin],
            environment={"SESSION": "s-1", "UNNAMED": "u-1", "CREDENTIALS_DIRECTORY": str(passed)},
        )
        (work / "helper").write_text(HELPER.format(value=work / "value", notes=gateway.state / "vault"))
        (work / "helper").chmod(0o755)
        with gateway:
            yield Scene(gateway, origin)
        assert not origin.faults


def test_a_helper_that_fails_refuses_and_recovers_without_a_restart(scene: Scene) -> None:
    """T17: nothing goes upstream while it gives nothing; check says why and exits with 1; then it serves again."""
    scene.holds(None)
    scene.gateway.admin.sync_credentials("helped")
    scene.origin.received.clear()
    assert scene.get("helped.test", "/gone") == 503
    assert scene.origin.received == []
    said = scene.exeat("secret", "check", "helped")
    assert said.code == 1
    assert "source-refused" in said.out
    assert "ended with 7" in said.err
    assert "run it by hand as the gateway's user" in said.err
    [record] = scene.gateway.awaited(reason="credential-unavailable", event="broker.refused", host="helped.test")
    assert record["error"] == "source-refused"
    scene.holds(FIRST)
    assert scene.exeat("secret", "sync", "helped").code == 0
    assert scene.get("helped.test", "/back") == 200
    assert [item.values("x-api-key") for item in scene.origin.received] == [[FIRST]]


def test_a_helper_runs_with_no_more_than_it_was_given(scene: Scene) -> None:
    """No new privileges, the named variable alone, the reference as its argument, and the vault's user."""
    scene.holds(FIRST)
    assert scene.exeat("secret", "check", "helped").code == 0
    assert (scene.notes / "arguments").read_text() == "get team/key\n"
    status = dict(line.split(":\t", 1) for line in (scene.notes / "status").read_text().splitlines())
    assert status["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        assert status["Uid"].split()[0] != "0"
    names = {line.partition("=")[0] for line in (scene.notes / "variables").read_text().splitlines()}
    assert "SESSION" in names
    assert names <= {"SESSION", "PWD", "OLDPWD", "SHLVL", "_"}


def test_check_shows_what_is_there_and_never_a_value(scene: Scene) -> None:
    """A row for each reference: version, fingerprint and age; what needs a sandbox says so."""
    scene.holds(FIRST)
    assert scene.exeat("secret", "sync").code == 0
    said = scene.exeat("secret", "check", "--output", "json")
    assert said.code == 0
    rows = {row["credential"]: row for row in said.json()}
    assert rows["owners"]["needs_sandbox"]
    assert rows["helped"]["source"] == "helper"
    assert rows["helped"]["age"] is not None
    assert rows["passed"]["age"] is None
    assert len(rows["helped"]["fingerprint"]) == 8
    missing = scene.exeat("secret", "check", "owners", "--sandbox", scene.box.id)
    assert missing.code == 1
    assert "exeat secret add owners/ada" in missing.err
    scene.gateway.admin.add_secret("owners/ada", SECOND.encode(), owner="tests")
    assert scene.exeat("secret", "check", "owners", "--sandbox", scene.box.id).code == 0
    assert scene.exeat("secret", "check", "nobody").code == 1
    for value in (FIRST, SECOND, PASSED):
        assert value not in said.out + said.err + missing.out + missing.err


def test_sync_takes_up_a_new_value_before_its_time(scene: Scene) -> None:
    """Until then the copy serves; both are told apart in the log by version and fingerprint, without a value."""
    scene.holds(FIRST)
    scene.exeat("secret", "sync", "helped")
    scene.origin.received.clear()
    assert scene.get("helped.test", "/1") == 200
    scene.holds(SECOND)
    assert scene.get("helped.test", "/2") == 200
    synced = scene.exeat("secret", "sync", "helped", "--output", "json").json()
    assert scene.get("helped.test", "/3") == 200
    assert [item.values("x-api-key") for item in scene.origin.received] == [[FIRST], [FIRST], [SECOND]]
    intents = scene.gateway.awaited(event="broker.intent", host="helped.test", path="/3")
    assert intents[0]["fingerprint"] == synced[0]["fingerprint"]
    assert scene.gateway.awaited(event="secret.fetched", fingerprint=synced[0]["fingerprint"])
    assert scene.gateway.awaited(event="admin.action", action="secret.synced")
    written = json.dumps(scene.gateway.records())
    for value in (FIRST, SECOND, PASSED):
        assert value not in written


def test_what_systemd_passed_is_used(scene: Scene) -> None:
    """The folder is read by whoever was started; the vault has its value, and sandboxes have a placeholder."""
    scene.origin.received.clear()
    assert scene.get("passed.test", "/x") == 200
    assert [item.values("x-api-key") for item in scene.origin.received] == [[PASSED]]
