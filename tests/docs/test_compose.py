"""compose.yaml says what the architecture promises; checked as a compose tool reads it, and against the image."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.vault.policies import load_policy
from exeat.places import Places
from exeat.principals import CONTAINER_UIDS
from exeat.settings import load_settings

ROOT = Path(__file__).parents[2]
PROCESSES = ("auditor", "vault", "executor", "worker")


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file as podman-compose resolves it (extensions merged, variables filled in)."""
    folder = tmp_path_factory.mktemp("compose")
    shutil.copy(ROOT / "compose.yaml", folder)
    tool = Path(sys.executable).parent / "podman-compose"
    # The tool asks for an engine's version even to read a file; no engine is needed for that.
    engine = folder / "podman"
    engine.write_text("#!/bin/sh\necho 5.0.0\n")
    engine.chmod(0o755)
    result = subprocess.run(
        [str(tool), "--podman-path", str(engine), "-f", str(folder / "compose.yaml"), "--profile", "tools", "config"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    value = yaml.safe_load(result.stdout)
    assert isinstance(value, dict)
    return value


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Inside path -> source of every volume."""
    found = {}
    for volume in service.get("volumes", []):
        if isinstance(volume, str):
            source, inside, *_ = volume.split(":")
        else:
            source, inside = volume.get("source", ""), volume["target"]
        found[inside] = source
    return found


def test_every_process_is_a_principal_of_its_own(compose: dict[str, Any]) -> None:
    """Own uid, no root, no capabilities, read-only root, no new privileges, a health check."""
    users = set()
    for kind in PROCESSES:
        service = compose["services"][kind]
        assert service["user"] == f"{CONTAINER_UIDS[kind]}:10000"  # type: ignore[index]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["healthcheck"]["test"][-1] == "--check"
        users.add(service["user"])
    assert len(users) == 4


def test_the_sandbox_has_only_the_internal_network(compose: dict[str, Any]) -> None:
    """Nothing but the worker is on it, it leads nowhere, and no two sandboxes share one."""
    internal = [name for name, network in compose["networks"].items() if (network or {}).get("internal")]
    assert internal
    for network in internal:
        on_it = [name for name, service in compose["services"].items() if network in (service.get("networks") or [])]
        assert sorted(on_it) == ["sandbox", "worker"], network
    assert list(compose["services"]["sandbox"]["networks"]) == internal
    assert compose["services"]["sandbox"]["cap_drop"] == ["ALL"]


def test_only_the_vault_and_the_operator_have_the_admin_socket(compose: dict[str, Any]) -> None:
    """A worker or executor that is broken finds no control surface and no state."""
    for name, service in compose["services"].items():
        inside = mounts(service)
        assert ("/run/exeat/admin" in inside) == (name in ("vault", "admin")), name
        assert ("/var/lib/exeat/vault" in inside) == (name == "vault"), name
        assert ("/var/log/exeat" in inside) == (name == "auditor"), name
    holders = {name for name, service in compose["services"].items() if "store_key" in str(service.get("secrets"))}
    assert holders == {"vault"}


def test_vault_and_auditor_have_no_network(compose: dict[str, Any]) -> None:
    """What holds everything worth stealing cannot send it."""
    for kind in ("vault", "auditor"):
        assert compose["services"][kind]["network_mode"] == "none"


def test_the_settings_and_policy_of_the_containers_load() -> None:
    """deploy/compose/ is accepted as it stands, and the paths in it are those that compose.yaml mounts."""
    folder = ROOT / "deploy/compose"
    settings = load_settings(folder / "exeat.yaml", Places(config=folder, state=Path("/x"), run=Path("/y")))
    assert settings.vault_state == Path("/var/lib/exeat/vault")
    assert settings.log == Path("/var/log/exeat")
    assert settings.admin_socket == Path("/run/exeat/admin/admin.sock")
    active = load_policy(settings.policy, settings.credentials, time.time())
    assert set(active.policy.roles) == {"coding-agent"}


def test_the_image_is_built_from_the_lock_and_runs_as_nobody_known() -> None:
    """Hashes are required, every room is copied, the last USER is not root."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    assert "--require-hashes -r requirements.lock" in text
    rooms = re.findall(r"packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text("utf-8"))[0]
    for room in re.findall(r'"(\w+)"', rooms):
        assert f"COPY {room} {room}" in text
    assert re.findall(r"^USER (\S+)", text, re.M)[-1] == "10004:10000"
    for kind, uid in CONTAINER_UIDS.items():
        assert f"{kind}:{uid}" in text
