"""Unmodified clients, with what `exeat run` and `exeat env` give them and nothing else.

The package index, the registry and the git forge are origins here, described to the gateway as a user would describe
mirrors of his own: `services: {local-index: {like: pypi, base: ...}}`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.entries import PYTHON, Entry, entry_of, python_script
from tests.support.gateway import EXEAT, PATH, TestGateway, completed
from tests.support.githttp import git_backend, make_repository
from tests.support.origins import Origin
from tests.support.registries import serve_index, serve_registry

pytestmark = pytest.mark.xdist_group("real-clients")

CA_VARIABLES = (
    "SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE PIP_CERT NODE_EXTRA_CA_CERTS GIT_SSL_CAINFO AWS_CA_BUNDLE "
    "npm_config_cafile"
).split()
ELSEWHERE = dict.fromkeys(CA_VARIABLES, "/nonexistent/elsewhere.pem") | {
    "SSL_CERT_DIR": "/nonexistent/elsewhere",
    "HTTP_PROXY": "http://192.0.2.1:1",
    "HTTPS_PROXY": "http://192.0.2.1:1",
    "https_proxy": "http://192.0.2.1:1",
    "http_proxy": "http://192.0.2.1:1",
    "ALL_PROXY": "http://192.0.2.1:1",
    "NO_PROXY": "*",
    "no_proxy": "*",
    "PIP_PROXY": "http://192.0.2.1:1",
    "PIP_INDEX_URL": "https://192.0.2.1/simple",
    "npm_config_https_proxy": "http://192.0.2.1:1",
    "NODE_OPTIONS": "--require=/nonexistent/elsewhere.cjs",
    "GIT_SSH_COMMAND": "false",
}
"""A caller whose variables all point elsewhere (documentation addresses, files that are not there)."""

PLAIN = {"PIP_CONFIG_FILE": "/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Keeps this machine's own pip configuration out; a sandbox elsewhere has none."""


def policy(index: Origin, registry: Origin, forge: Origin) -> str:
    return f"""
    services:
      local-index: {{like: pypi, base: "{index.base}"}}
      local-registry: {{like: npm, base: "{registry.base}"}}
      local-forge: {{like: github, base: "{forge.base}"}}
    roles:
      agent:
        allow:
          - {{service: [local-index, local-registry], operations: [read]}}
          - {{service: local-forge, operations: [git.fetch]}}
          - {{name: api, host: api.test, methods: [GET], paths: [/hello]}}
    """


@dataclass
class Place:
    """The origins and the gateway of this module."""

    api: Origin
    index: Origin
    registry: Origin
    forge: Origin
    commit: str
    gateway: TestGateway


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    repositories = tmp_path_factory.mktemp("repositories")
    commit = make_repository(repositories / "o" / "r.git", {"README.md": "hello from git\n"})
    with (
        Origin("api.test", address="127.0.0.71").run_in_thread() as api,
        Origin("index.test", address="127.0.0.72").run_in_thread() as index,
        Origin("registry.test", address="127.0.0.73").run_in_thread() as registry,
        Origin("forge.test", address="127.0.0.74", handler=git_backend(repositories)).run_in_thread() as forge,
    ):
        serve_index(index)
        serve_registry(registry)
        with TestGateway(
            tmp_path_factory.mktemp("clients"),
            policy=policy(index, registry, forge),
            origins=[api, index, registry, forge],
        ) as gateway:
            yield Place(api, index, registry, forge, commit, gateway)


@pytest.fixture(scope="module", params=["clean", "elsewhere"])
def entry(request: pytest.FixtureRequest, place: Place) -> Iterator[Entry]:
    """Inside an `exeat run` whose caller had a clean environment, or one that points elsewhere."""
    caller = ELSEWHERE if request.param == "elsewhere" else {}
    with entry_of("run", place.gateway, caller=caller) as found:
        yield found


# --- programs ----------------------------------------------------------------------------------------------------


def test_a_push_is_refused_and_git_says_by_whom(place: Place, entry: Entry) -> None:
    """T26: push is refused at its first request, nothing reaches the forge, and git's message names the proxy."""
    before = len(place.forge.received)
    clone = entry.shared / "to-push"
    assert entry.command("git", "clone", "-q", place.forge.url("/o/r.git"), str(clone)).code == 0
    during = len(place.forge.received)
    assert during > before
    pushed = entry.command("git", "-C", str(clone), "push", "origin", "HEAD:refs/heads/other")
    assert pushed.code != 0
    assert "Exeat" in pushed.err, pushed
    assert len(place.forge.received) == during


def test_curl(place: Place, entry: Entry) -> None:
    """curl reads an allowed path; a path beside it is refused with text for whoever reads it."""
    assert entry.command("curl", "-sS", "--fail", place.api.url("/hello")).json()["target"] == "/hello"
    assert "no-rule" in entry.command("curl", "-sS", place.api.url("/other")).out


def test_pip(place: Place, entry: Entry) -> None:
    """pip installs from the index that it is told of; the package then runs."""
    target = entry.shared / "python"
    done = entry.command(
        *(PYTHON, "-m", "pip", "install", "--no-cache-dir", "--index-url", place.index.url("/simple/")),
        *("--target", str(target), "exeat-hello"),
        env=PLAIN,
    )
    assert done.code == 0, done
    shown = entry.command(
        PYTHON, "-c", "import exeat_hello; print(exeat_hello.GREETING)", env={"PYTHONPATH": str(target)}
    )
    assert shown.out == "hello from pip\n"


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm(place: Place, entry: Entry) -> None:
    """npm installs from the registry that it is told of; Node loads the package."""
    folder = entry.shared / "node"
    done = entry.command(
        *("npm", "install", "--prefix", str(folder), "--registry", place.registry.url("/"), "exeat-hello"),
        env={"npm_config_fetch_retries": "0", "npm_config_audit": "false", "npm_config_update_notifier": "false"},
    )
    assert done.code == 0, done
    shown = entry.command("node", "-p", f"require({str(folder / 'node_modules' / 'exeat-hello')!r})")
    assert shown.out == "hello from npm\n"


def test_git_clone(place: Place, entry: Entry) -> None:
    """T26: git clones over smart HTTP, in the present protocol version and in the first."""
    for version in ("2", "0"):
        clone = entry.shared / f"clone-{version}"
        done = entry.command(
            "git", "-c", f"protocol.version={version}", "clone", "-q", place.forge.url("/o/r.git"), str(clone)
        )
        assert done.code == 0, done
        assert (clone / "README.md").read_text() == "hello from git\n"
        head = entry.command("git", "-C", str(clone), "rev-parse", "HEAD")
        assert head.out.strip() == place.commit


# --- libraries ---------------------------------------------------------------------------------------------------

PYTHON_CLIENTS = {
    "requests": "import requests, sys; r = requests.get(sys.argv[1]); print(r.status_code)",
    "httpx": "import httpx, sys; print(httpx.get(sys.argv[1]).status_code)",
    "urllib": "import urllib.request, sys; print(urllib.request.urlopen(sys.argv[1]).status)",
    # aiohttp reads proxy variables only where the program asks for it.
    "aiohttp": """
import asyncio, aiohttp, sys
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(sys.argv[1]) as answer:
        print(answer.status)
asyncio.run(main())
""",
}


@pytest.mark.parametrize("library", PYTHON_CLIENTS)
def test_python_libraries(place: Place, entry: Entry, library: str) -> None:
    """Each finds proxy and CA in its variables."""
    before = len(place.api.received)
    done = python_script(entry, PYTHON_CLIENTS[library], place.api.url("/hello"))
    assert done.out == "200\n", done
    assert len(place.api.received) == before + 1


NODE_CLIENTS = {
    "fetch": "fetch(process.argv[1]).then((r) => console.log(r.status))",
    "https": "require('node:https').get(process.argv[1], (r) => { console.log(r.statusCode); r.resume(); })",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("library", NODE_CLIENTS)
def test_node_libraries(place: Place, entry: Entry, library: str) -> None:
    """Node reaches the origin by fetch and by https, in versions that read proxy variables and in those that do not."""
    before = len(place.api.received)
    done = entry.command("node", "-e", NODE_CLIENTS[library], place.api.url("/hello"))
    assert done.out == "200\n", done
    assert len(place.api.received) == before + 1


# --- outside a boundary: `exeat env` -----------------------------------------------------------------------------


def test_variables_of_exeat_env_win_over_those_that_were_set(place: Place, tmp_path: Path) -> None:
    """A shell whose variables point elsewhere reads `exeat env`: curl, git, requests and urllib all work after it."""
    script = f"""
    eval "$({EXEAT} env --config {place.gateway.settings_file})"
    curl -sS -o /dev/null -w '%{{http_code}}\\n' {place.api.url("/hello")}
    git ls-remote {place.forge.url("/o/r.git")} refs/heads/main
    {PYTHON} -I -c '{PYTHON_CLIENTS["requests"]}' {place.api.url("/hello")}
    {PYTHON} -c '{PYTHON_CLIENTS["urllib"]}' {place.api.url("/hello")}
    """
    done = completed(
        subprocess.run(
            ["/bin/sh", "-ec", script],
            env=ELSEWHERE | {"PATH": PATH, "HOME": str(place.gateway.home)},
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
            check=False,
        )
    )
    assert done.code == 0, done
    assert done.out.split() == ["200", place.commit, "refs/heads/main", "200", "200"]
