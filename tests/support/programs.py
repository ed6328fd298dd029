"""Client programs of the machine: whether one is there and works, so that a test can say why it is skipped."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest


@cache
def lacking(name: str) -> str:
    """Why `name` cannot be used here; empty if it can.

    A name on PATH is not enough: rustup, pyenv and nvm put stand-ins there that want a choice made first.
    """
    path = shutil.which(name)
    if path is None:
        return f"{name} is not installed"
    try:
        question = "version" if name == "go" else "--version"
        done = subprocess.run([path, question], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"{name} does not start"
    return "" if done.returncode == 0 else f"{name} does not start here without a choice of its version"


def program(name: str) -> str:
    """The path of `name`; skips the test where it cannot be used."""
    if why := lacking(name):
        pytest.skip(why)
    return shutil.which(name) or name
