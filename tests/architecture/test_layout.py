"""What the layout promises beyond import contracts: whose rooms these are, how they begin, who reaches the network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.rows import every_row
from tests.support.sourcecode import ROOMS, ROOT, modules, short, source

OURS = modules()
NETWORK = frozenset(
    "getaddrinfo gethostbyname create_connection open_connection ClientSession TCPConnector SSLContext "
    "create_default_context urlopen create_datagram_endpoint".split()
)
NETWORK_EXCEPTIONS = {
    "exeat/demo/shop.py": {"SSLContext"},
    "exeat/demo/index.py": {"getaddrinfo", "urlopen"},
    "exeat/containers.py": {"create_connection"},
    "exeat/doctor.py": {"urlopen"},
}
"""The demo's own shop and its look for the real index; the health probe of a worker in a container; the doctor, which
runs inside a sandbox and asks the help host as any client there would."""


distributions = cache(importlib.metadata.packages_distributions)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_ours_and_nobody_elses(room: str) -> None:
    """Other distributions import as `proxy` and `rules` too: the one found is ours, and no other is installed."""
    spec = importlib.util.find_spec(room)
    assert spec is not None
    assert spec.origin == str(ROOT / room / "__init__.py")
    owners = set(distributions().get(room, []))
    assert owners <= {"exeat"}
    others = [entry for entry in map(Path, sys.path) if entry != ROOT and (entry / room / "__init__.py").exists()]
    assert not others


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is(room: str) -> None:
    """The docstring of each room has the same four lines, so that a reader knows where he is and where to begin."""
    said = source(ROOT / room / "__init__.py").docstring
    starts = [line.partition(":")[0] for line in said.splitlines() if line and not line.startswith(" ")]
    assert starts == ["Purpose", "May enter", "Imports", "Start reading"]
    assert all(line.partition(":")[2].strip() for line in said.splitlines() if line)
    named = [word.strip(",;()") for word in said.rpartition("Start reading:")[2].split() if ".py" in word]
    assert named, "no file is named to begin with"
    assert not [file for file in (name.strip("().,;") for name in named) if not (ROOT / room / file).exists()]


@every_row("path", OURS, ids=short)
def test_every_module_begins_with_a_sentence(path: Path) -> None:
    """A reader may stop early: each module says first what it is."""
    assert source(path).docstring, "no docstring"


def test_no_module_is_named_for_nothing() -> None:
    """A module is named for what it holds; these names hold whatever nobody wanted to place."""
    empty = {"utils", "util", "common", "core", "helpers", "misc", "lib", "shared"}
    found = [short(path) for path in OURS if empty & {*path.relative_to(ROOT).parts[:-1], path.stem}]
    assert not found


@every_row("path", modules(*(room for room in ROOMS if room != "net")), ids=short)
def test_only_net_resolves_dials_and_makes_tls_contexts(path: Path) -> None:
    """One room reaches the network, so one room keeps the address table and the trust."""
    assert source(path).calls & NETWORK == NETWORK_EXCEPTIONS.get(short(path), set())


def test_the_exceptions_still_exist() -> None:
    """An exception for a file that is gone, or no longer needs it, is taken off the list."""
    for name, calls in NETWORK_EXCEPTIONS.items():
        assert source(ROOT / name).calls & NETWORK == calls


# What a process has loaded once its main module is imported; anything else would be code beside hostile bytes or
# beside secrets that has no business there.
LOADED = {
    "proxy.worker": {"audit", "net", "proxy", "rules", "wire"},
    "broker.executor_process": {"audit", "broker", "net", "rules", "wire"},
    "broker.vault.__main__": {"audit", "broker", "net", "rules", "state", "wire"},
    "audit.auditor": {"audit"},
    "audit.verify": {"audit"},
    "exeat.confine": {"exeat"},
}
FOREIGN = {
    "proxy.worker": {"mitmproxy", "aiohttp", "sqlalchemy", "cryptography.fernet", "net.client"},
    "broker.executor_process": {
        "mitmproxy",
        "aiohttp",
        "sqlalchemy",
        "broker.vault.store",
        "broker.vault.keys",
        "net.client",
    },
    "broker.vault.__main__": {"mitmproxy", "httptools", "zstandard", "net.http1", "broker.codings"},
    "audit.auditor": {"mitmproxy", "aiohttp", "sqlalchemy", "yaml", "httptools"},
    "audit.verify": {"mitmproxy", "aiohttp", "sqlalchemy", "yaml", "httptools"},
    "exeat.confine": {"mitmproxy", "aiohttp", "sqlalchemy", "yaml", "httptools", "orjson", "exeat.settings"},
}


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(LOADED))
def test_a_process_loads_only_what_it_needs(module: str) -> None:
    """An ordinary worker knows no mitmproxy, the executor no store, the vault no HTTP parser and no decompressor."""
    script = f"import importlib, sys; importlib.import_module({module!r}); print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, cwd="/")
    loaded = set(result.stdout.split())
    assert {name for name in loaded if name in ROOMS} == LOADED[module]
    assert not loaded & FOREIGN[module]
