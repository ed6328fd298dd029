"""The command itself: what it answers before any sub-command."""

from __future__ import annotations

import pytest

from exeat.cli import main
from exeat.version import __version__


def test_the_version_is_also_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`exeat --version` says what `exeat version` says."""
    for words in (["--version"], ["version"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"exeat {__version__}\n"
