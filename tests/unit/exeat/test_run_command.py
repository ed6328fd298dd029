"""What `exeat run` says beside what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.events import Event
from audit.search import end_of_log
from exeat import session
from exeat.cli import main
from exeat.commands.run import _say_refused, not_writable
from exeat.launch import BoundaryUnavailable
from tests.support.events import WHO, refusal
from tests.support.logs import put, writer


def test_root_hears_which_folders_its_sandbox_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox of root is another user; an ordinary user's is that user."""
    closed, opened = tmp_path / "closed", tmp_path / "opened"
    closed.mkdir(mode=0o755)
    opened.mkdir()
    opened.chmod(0o1777)
    folders = [str(closed), str(opened), str(closed), str(tmp_path / "absent")]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert not_writable(folders) == [str(closed)]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert not_writable(folders) == []


def test_a_boundary_that_cannot_be_built_exits_125(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As documented, so that a script can tell it from the command's own failure."""

    def refuse(*_: object, **__: object) -> object:
        raise BoundaryUnavailable("no namespaces here")

    monkeypatch.setattr(session, "gateway", refuse)
    monkeypatch.setattr("os.getcwd", lambda: str(tmp_path))
    settings = tmp_path / "exeat.yaml"
    settings.write_text("version: 1\nlisten: none\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--config", str(settings), "--", "true"])
    assert ended.value.code == 125
    assert "no namespaces here" in capsys.readouterr().err


def test_refusals_that_were_only_counted_are_told_by_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A summary has no request to ask about, so the reason is what `exeat why` is given."""
    made = writer(tmp_path / "log")
    before = end_of_log(tmp_path / "log")
    put(made, Event("refusals.summarised", {**WHO, "count": 3, "reasons": ["audit-unavailable=2", "no-rule=1"]}))
    _say_refused(tmp_path / "log", before, str(WHO["sandbox"]))
    said = capsys.readouterr().err
    assert "3 refused (audit-unavailable 2, no-rule 1)" in said
    assert "exeat why audit-unavailable" in said
    put(made, refusal(request_id="req_1", decision="deny"))
    made.close()
    _say_refused(tmp_path / "log", before, str(WHO["sandbox"]))
    assert "the last: exeat why req_1" in capsys.readouterr().err
