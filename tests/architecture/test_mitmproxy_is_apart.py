"""mitmproxy lives in one process of its own: ordinary workers never load it, and only the adapter names it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTER = {"proxy/mitm_adapter.py", "proxy/mitm_selftest.py"}


@pytest.mark.parametrize(
    "module", ["proxy.worker", "broker.executor_process", "broker.vault.__main__", "audit.auditor", "exeat.cli"]
)
def test_no_other_process_loads_mitmproxy(module: str) -> None:
    """RULINGS 11.6: what it brings (and its holes) stays out of every process but the adapter's."""
    code = f"import sys, {module}; sys.exit(any(name.split('.')[0] == 'mitmproxy' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=30)
    assert done.returncode == 0


def test_only_the_adapter_names_mitmproxy() -> None:
    """One seam: a new version is a change of these files."""
    named = set()
    for room in ("rules", "wire", "net", "audit", "state", "broker", "proxy", "capture", "exeat"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names.append(node.module)
                if any(name.partition(".")[0] == "mitmproxy" for name in names):
                    named.add(str(path.relative_to(ROOT)))
    assert named == ADAPTER


def test_the_adapter_is_written_for_the_version_that_is_required() -> None:
    """The pin of the project and the one that the adapter checks at its start are the same."""
    from proxy.mitm_adapter import PINNED

    assert f'"mitmproxy=={PINNED}"' in (ROOT / "pyproject.toml").read_text()
