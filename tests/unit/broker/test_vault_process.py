"""The vault as a process of its own, beside a real auditor: start, refusal, signals, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from broker.admin.client import AdminClient
from tests.support.auditors import DIGEST_KEY, RunningAuditor
from tests.support.vaults import CREDENTIALS, POLICY, SECRET

pytestmark = pytest.mark.slow  # starts real processes: part of make test


class RunningVault:
    """`python -I -m broker.vault FD` in an empty environment; reads its report pipe."""

    def __init__(self, directory: Path, auditor: socket.socket, **changes: object) -> None:
        read, write = os.pipe()
        report, report_write = os.pipe()
        document = {
            "state_dir": str(directory / "state"),
            "policy_path": str(directory / "policy.yaml"),
            "credentials_path": str(directory / "credentials.yaml"),
            "key_file": str(directory / "key"),
            "auditor_fd": auditor.fileno(),
            "digest_key": DIGEST_KEY.hex(),
            "admin_path": str(directory / "admin.sock"),
            "report_fd": report_write,
            **changes,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-m", "broker.vault", str(read)],
            pass_fds=(read, report_write, auditor.fileno()),
            cwd="/",
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.close(read)
        os.close(report_write)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps(document).encode())
        self._report = os.fdopen(report, "rb")

    def report(self) -> dict[str, object]:
        """The next line of the report pipe."""
        return json.loads(self._report.readline() or b"{}")

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, bytes]:
        """Send a signal and wait."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, bytes]:
        """Wait for the end; returns exit code and everything written."""
        out, err = self.process.communicate(timeout=30)
        self._report.close()
        return self.process.returncode, out + err


@pytest.fixture
def home(tmp_path) -> Path:
    """The operator's files, and an empty state folder."""
    made = tmp_path / "home"
    made.mkdir(0o700)
    for name, text in (("policy.yaml", POLICY), ("credentials.yaml", CREDENTIALS), ("key", "11" * 32)):
        (made / name).write_text(text)
        (made / name).chmod(0o600)
    (made / "state").mkdir(0o700)
    return made


@pytest.fixture
async def auditor(tmp_path):
    log = tmp_path / "log"
    log.mkdir(0o700)
    async with RunningAuditor(log, channels=(("vault", "vault"),)) as running:
        yield running


@pytest.mark.parametrize(
    ("sentence", "prepare", "code"),
    [
        ("no policy", lambda d: (d / "policy.yaml").unlink(), "policy-missing"),
        ("an empty policy", lambda d: (d / "policy.yaml").write_text(""), "policy-empty"),
        ("a policy with an error", lambda d: (d / "policy.yaml").write_text("version: 2\n"), "policy-invalid"),
        ("a loose key", lambda d: (d / "key").chmod(0o644), "key-modes"),
        ("no key", lambda d: (d / "key").unlink(), "key-missing"),
        ("a loose folder", lambda d: (d / "state").chmod(0o755), "dir-modes"),
    ],
)
async def test_a_start_that_cannot_be_refuses(home, auditor, sentence, prepare, code) -> None:
    """Exit code 2, reason and cause on the report pipe, whose reader shows them; no traceback and no admin socket."""
    prepare(home)
    vault = RunningVault(home, auditor.sockets[0])
    report = vault.report()
    assert report["error"] == code, sentence
    assert report["detail"]
    assert report["remedy"]
    status, shown = vault.wait()
    assert status == 2
    assert shown == b""
    assert not (home / "admin.sock").exists()


async def test_a_boot_document_with_an_unknown_field_refuses(home, auditor) -> None:
    """One line, exit code 2."""
    vault = RunningVault(home, auditor.sockets[0], debug=True)
    status, shown = vault.wait()
    assert status == 2
    assert b"unknown field" in shown


async def test_a_vault_without_an_auditor_refuses(home) -> None:
    """Nobody at the log channel: no start."""
    ours, theirs = socket.socketpair()
    ours.close()
    vault = RunningVault(home, theirs)
    theirs.close()
    assert vault.report()["error"] == "audit-unavailable"
    assert vault.wait()[0] == 2


async def test_a_vault_lives_records_and_ends(home, auditor) -> None:
    """Ready, serves, is not dumpable, drains at SIGTERM with exit code 0; the canary is nowhere but in its memory."""
    vault = RunningVault(home, auditor.sockets[0])
    assert vault.report() == {"ready": True}
    client = AdminClient(home / "admin.sock", timeout=60)
    client.add_secret("shop/orders", SECRET, owner="team-orders")
    made = client.create_sandbox("agent", owner="o")
    assert client.status()["sandboxes"] == 1
    pid = vault.process.pid
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            Path(f"/proc/{pid}/environ").read_bytes()
    else:
        assert Path(f"/proc/{pid}/environ").stat().st_uid == 0
        assert SECRET not in Path(f"/proc/{pid}/environ").read_bytes()
        assert SECRET not in Path(f"/proc/{pid}/cmdline").read_bytes()
    client.end_sandbox(made["id"])
    status, shown = vault.stop()
    assert (status, shown) == (0, b"")
    names = [record["event"] for record in auditor.records()]
    for name in ("process.started", "policy.loaded", "secret.added", "sandbox.created", "sandbox.ended"):
        assert name in names
    assert names[-1] == "process.stopped"
    for path in home.parent.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for value in (SECRET, made["token"].encode(), *map(str.encode, made["env"].values())):
                assert value not in content, path


async def test_a_killed_vault_comes_back_whole(home, auditor) -> None:
    """SIGKILL right after a create: the next start knows the sandbox and the secret."""
    vault = RunningVault(home, auditor.sockets[0])
    assert vault.report() == {"ready": True}
    client = AdminClient(home / "admin.sock", timeout=60)
    client.add_secret("shop/orders", SECRET, owner="team-orders")
    made = client.create_sandbox("agent", owner="o")
    vault.stop(signal.SIGKILL)
    again = RunningVault(home, auditor.sockets[0])
    assert again.report() == {"ready": True}
    assert client.sandbox(made["id"])["state"] == "live"
    assert [item["name"] for item in client.secrets()] == ["shop/orders"]
    assert again.stop()[0] == 0


async def test_the_supervisor_hears_when_a_rule_needs_http2(home, auditor) -> None:
    """A policy with `protocol: h2` asks for the adapter: at start before `ready`, and at the reload that brings it."""
    with_h2 = (
        "version: 1\nroles: {agent: {allow: [{host: h2.test, methods: [GET], paths: [/], protocol: h2, name: x}]}}\n"
    )
    vault = RunningVault(home, auditor.sockets[0])
    assert vault.report() == {"ready": True}
    (home / "policy.yaml").write_text(with_h2)
    (home / "credentials.yaml").write_text("version: 1\ncredentials: {}\n")
    AdminClient(home / "admin.sock", timeout=60).reload_policy()
    assert vault.report() == {"adapter": True}
    assert vault.stop()[0] == 0
    again = RunningVault(home, auditor.sockets[0])
    assert [again.report(), again.report()] == [{"adapter": True}, {"ready": True}]
    assert again.stop()[0] == 0
