"""The operator's doctor: each thing that keeps a gateway from working is named with what to do about it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from broker.vault.ca import CertificateAuthority
from exeat import hostcheck
from exeat.doctor import FAILS, HOLDS, UNKNOWN

WELL: dict[str, Any] = {
    "processes": [{"name": "worker-0", "self_check": {"passed": True, "at": time.time()}}],
    "sandboxes": 0,
    "policy": {"digest": "d" * 64, "rejected": None},
    "clock_behind": False,
    "shared_uid": False,
    "memory_locked": False,
}


@pytest.mark.parametrize(
    ("sentence", "changed", "what", "state"),
    [
        (
            "a self-check that failed",
            {"processes": [{"self_check": {"passed": False, "at": 1.0}}]},
            "self-check",
            FAILS,
        ),
        ("no self-check yet", {"processes": [{"name": "worker-0"}]}, "self-check", UNKNOWN),
        ("files that do not load", {"policy": {"digest": "", "rejected": {"detail": "x"}}}, "policy in force", FAILS),
        ("a clock behind the log", {"clock_behind": True}, "clock", FAILS),
        ("one user for all processes", {"shared_uid": True}, "separation", FAILS),
        ("all is well", {}, "self-check", HOLDS),
    ],
)
def test_what_a_gateway_says_of_itself(sentence: str, changed: dict[str, Any], what: str, state: str) -> None:
    """Each thing that is wrong in its status is one finding."""
    found = {finding.what: finding for finding in hostcheck.gateway(WELL | changed)}
    assert found[what].state == state, sentence
    assert [name for name, finding in found.items() if finding.state == FAILS] == ([what] if state == FAILS else [])


@pytest.mark.parametrize(
    ("release", "state"), [("5.4.0-generic", FAILS), ("strange", UNKNOWN), ("5.12.1", HOLDS), ("6.18.44-fc", HOLDS)]
)
def test_a_kernel_that_is_too_old_is_named(release: str, state: str) -> None:
    """The boundary's read-only views need Linux 5.12."""
    assert hostcheck.kernel(release).state == state


def test_a_missing_program_says_what_is_off_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """nft and ip are packages to install, and something does not work until then."""
    monkeypatch.setattr(hostcheck.shutil, "which", lambda name, path: None)
    found = hostcheck.tool("nft", "nftables")
    assert found.state == FAILS
    assert "install the package nftables" in found.why
    assert "exeat run" in found.why


def test_a_certificate_that_ends_soon_or_is_not_valid_yet_is_named(tmp_path: Path) -> None:
    """Clients would refuse it; one that is not there yet is written at the first start."""
    file = tmp_path / "ca.pem"
    now = time.time()
    assert hostcheck.certificate(file, now).state == UNKNOWN
    file.write_text("no certificate")
    assert hostcheck.certificate(file, now).state == FAILS
    file.write_text(CertificateAuthority.create(now=now, installation="test", node="node").root_pem)
    assert hostcheck.certificate(file, now).state == HOLDS
    assert "set the clock" in hostcheck.certificate(file, now - 10 * 365 * 86_400).why
    assert hostcheck.certificate(file, now + 100 * 365 * 86_400).state == FAILS


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for records everything is refused; the folder need not exist yet."""
    (found,) = hostcheck.disk(tmp_path / "state" / "log")
    assert found.state in (HOLDS, FAILS)
    monkeypatch.setattr(hostcheck, "LOW_BYTES", 1 << 62)
    (found,) = hostcheck.disk(tmp_path / "log")
    assert found.state == FAILS
    assert "everything is refused" in found.why
    monkeypatch.setattr(hostcheck, "RESERVE_BYTES", 1 << 62)
    (found,) = hostcheck.disk(tmp_path / "log")
    assert "everything is refused until" in found.why


@pytest.mark.parametrize(
    ("areas", "locked", "state"),
    [("/dev/sda2 partition 1 0 -2\n", False, FAILS), ("/dev/sda2 partition 1 0 -2\n", True, HOLDS), ("", False, HOLDS)],
)
def test_swap_is_named_where_secrets_may_reach_it(tmp_path: Path, areas: str, locked: bool, state: str) -> None:
    """A swap area is a finding unless what holds secrets is kept out of it."""
    table = tmp_path / "swaps"
    table.write_text("Filename Type Size Used Priority\n" + areas)
    assert hostcheck.swap(memory_locked=locked, table=table).state == state
