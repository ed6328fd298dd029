"""`exeat env` for a shell also takes away what would undo the rest."""

from __future__ import annotations

import subprocess

from exeat.environment import FORMATS, REMOVED_VARIABLES, removals


def test_a_shell_forgets_what_points_elsewhere() -> None:
    """SSL_CERT_DIR and its like are gone after the text was read, whether they were set or not."""
    environment = dict.fromkeys(REMOVED_VARIABLES[:3], "/elsewhere") | {"PATH": "/usr/bin:/bin", "KEPT": "1"}
    script = removals("sh") + "exec env"
    shown = subprocess.run(["/bin/sh", "-ec", script], env=environment, capture_output=True, check=True)
    names = {line.partition("=")[0] for line in shown.stdout.decode().splitlines()}
    assert "KEPT" in names
    assert not names & set(REMOVED_VARIABLES)


def test_files_of_values_cannot_take_anything_away() -> None:
    """Formats that are only values say nothing of it: a container has no variables of its caller."""
    assert {format_ for format_ in FORMATS if removals(format_)} == {"sh", "fish"}
