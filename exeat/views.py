"""What the vault and the auditor see of the file system when root starts them.

Workers and executors see no settings, state or log at all (exeat/supervisor.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from exeat.launch import ViewEntry, interpreter_view, system_view
from exeat.settings import Settings


def wide_view(settings: Settings, kind: Literal["vault", "auditor"]) -> list[ViewEntry]:
    """The system, the interpreter and the settings. Writable are a process's own folder, to the auditor the log, and to
    the vault the folder of its key, which it rotates, where that is not the settings' own."""
    view: list[ViewEntry] = system_view()
    for path in ("/var", "/srv", "/mnt", "/media", "/run"):
        if os.path.isdir(path) and not os.path.islink(path):
            view.append(("ro", path, path))
    folders: list[tuple[Literal["ro", "rw"], Path]] = [("ro", settings.file.parent), ("ro", settings.policy)]
    own = settings.vault_state if kind == "vault" else settings.auditor_state
    folders += [("rw", own), ("rw", settings.log)] if kind == "auditor" else [("rw", own)]
    key = settings.key_file or settings.wrapped_file
    if kind == "vault" and key is not None and key.parent != settings.file.parent:
        folders.append(("rw", key.parent))
    view += [(mode, str(path), str(path)) for mode, path in folders if path.exists()]
    return view + interpreter_view(view)
