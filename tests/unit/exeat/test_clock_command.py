"""`exeat clock reset`: never without a reason, and only where a gateway runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exeat.cli import main
from exeat.commands import clock


class Gateway:
    """An admin client that notes what it is asked."""

    def __init__(self) -> None:
        self.whys: list[str] = []

    def reset_clock(self, why: str) -> dict[str, Any]:
        self.whys.append(why)
        return {"clock": 1.5}


def code_of(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["clock", *words])
    return ended.value.code


def test_a_reset_needs_a_reason_and_a_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --why it is wrong usage; without a running gateway exit 4 with the remedy."""
    assert code_of("reset") == 2
    assert "--why" in capsys.readouterr().err
    settings = tmp_path / "exeat.yaml"
    settings.write_text(f"version: 1\nlisten: none\nrun: {tmp_path / 'run'}\n")
    assert code_of("reset", "--why", "the battery was replaced", "--config", str(settings)) == 4
    assert "exeat up" in capsys.readouterr().err


def test_a_reset_is_asked_of_the_gateway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason goes along, for the record; scripts get the gateway's answer."""
    gateway = Gateway()
    monkeypatch.setattr(clock, "admin", lambda config: gateway)
    assert code_of("reset", "--why", "the battery was replaced") in (None, 0)
    assert "on record" in capsys.readouterr().out
    assert code_of("reset", "--why", "again", "-o", "json") in (None, 0)
    assert json.loads(capsys.readouterr().out) == {"clock": 1.5}
    assert gateway.whys == ["the battery was replaced", "again"]
