"""mitmproxy lives in one process of its own: ordinary workers never load it, and only the adapter names it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.sourcecode import ROOT, modules, short, source

ADAPTER = {"proxy/mitm_adapter.py", "proxy/mitm_selftest.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["proxy.worker", "broker.executor_process", "broker.vault.__main__", "audit.auditor", "exeat.cli"]
)
def test_no_other_process_loads_mitmproxy(module: str) -> None:
    """What it brings (and its holes) stays out of every process but the adapter's."""
    code = f"import sys, {module}; sys.exit(any(name.split('.')[0] == 'mitmproxy' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=30)
    assert done.returncode == 0


def test_only_the_adapter_names_mitmproxy() -> None:
    """One seam: a new version is a change of these files."""
    named = {
        short(path) for path in modules() if "mitmproxy" in {name.partition(".")[0] for name in source(path).imports}
    }
    assert named == ADAPTER


def test_the_adapter_is_written_for_the_version_that_is_required() -> None:
    """The pin of the project and the one that the adapter checks at its start are the same."""
    from proxy.mitm_adapter import PINNED

    assert f'"mitmproxy=={PINNED}"' in (ROOT / "pyproject.toml").read_text()
