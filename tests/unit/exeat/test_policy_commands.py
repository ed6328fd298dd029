"""`exeat policy` for scripts: problems are JSON too where JSON was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exeat.cli import main


def test_problems_are_json_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`policy check --output json` prints one document with every problem, and exits 1."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nroles:\n  agent:\n    alow: []\n")
    with pytest.raises(SystemExit) as ended:
        main(["policy", "check", "--file", str(policy), "--output", "json"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert any(line.startswith("policy.yaml:4:5: ") for line in json.loads(shown.out)["problems"])
    assert shown.err == ""
