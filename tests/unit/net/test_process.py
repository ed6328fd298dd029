"""Children: hardened, booted from one strict document, and silent about values."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from net.process import MAX_BOOT, BootError, complain, read_boot
from tests.support.rows import every_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    fd: int
    kind: Literal["shared", "sandbox"] = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    name: str
    key: bytes
    seconds: float = 1.0
    path: str | None = None
    channels: tuple[Channel, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def boot(document: object) -> Boot:
    """Read `document` as a child would."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream:
        stream.write(document if isinstance(document, bytes) else json.dumps(document).encode())
    return read_boot(reader, Boot)


GOOD = {"name": "worker-1", "key": "00ff"}


@every_row(
    ("document", "named"),
    [
        (b"", "JSON"),
        (b"[]", "type"),
        (b'{"name":"a","name":"b","key":""}', "JSON"),
        ({"name": "a"}, "key"),
        ({**GOOD, "other": 1}, "unknown"),
        ({**GOOD, "name": 1}, "name"),
        ({**GOOD, "name": None}, "name"),
        ({**GOOD, "seconds": True}, "seconds"),
        ({**GOOD, "key": "zz"}, "hexadecimal"),
        ({**GOOD, "channels": {"fd": 3}}, "channels"),
        ({**GOOD, "channels": [{"fd": "3"}]}, "channels[0].fd"),
        ({**GOOD, "channels": [{"fd": True}]}, "channels[0].fd"),
        ({**GOOD, "channels": [{"fd": 3, "kind": "other"}]}, "kind"),
        ({**GOOD, "labels": {"a": 1}}, "labels.a"),
    ],
)
def test_a_boot_document_that_is_not_exact_is_refused(document: object, named: str) -> None:
    """Unknown, missing, repeated and mistyped fields stop the process, and the message names the field only."""
    with pytest.raises(BootError) as caught:
        boot(document)
    assert named in str(caught.value)
    assert "00ff" not in str(caught.value)


def test_a_boot_document_without_end_is_refused() -> None:
    """More than the bound is not read."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            for _ in range(MAX_BOOT // 65536 + 2):
                os.write(writer, b" " * 65536)
        except OSError:
            pass
        os._exit(0)
    os.close(writer)
    with pytest.raises(BootError):
        read_boot(reader, Boot)
    os.waitpid(pid, 0)


def test_a_boot_document_becomes_its_dataclass() -> None:
    """Nested dataclasses, tuples, hexadecimal bytes, integers as seconds."""
    document = {**GOOD, "seconds": 2, "path": "/x", "channels": [{"fd": 3, "kind": "sandbox"}], "labels": {"a": "b"}}
    assert boot(document) == Boot(
        name="worker-1",
        key=b"\x00\xff",
        seconds=2.0,
        path="/x",
        channels=(Channel(fd=3, kind="sandbox"),),
        labels={"a": "b"},
    )


def test_complaints_show_no_text_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Class and place, never message, never a second line."""
    try:
        raise ValueError("canary-value\nsecond")
    except ValueError as error:
        complain("vault", "something\nfailed", error)
    shown = capsys.readouterr().err
    assert "canary-value" not in shown
    assert shown.count("\n") == 1
    assert " error=ValueError where=test_process.py:" in shown
    assert " level=error process=vault event=something\\nfailed " in shown


def test_a_complaint_that_nobody_can_read_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed stderr takes the line away and nothing else."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    complain("vault", "something failed")


HARDENED = """
import ctypes, resource, sys
sys.path.insert(0, sys.argv[1])
from net.process import harden, quiet_hooks
harden()
quiet_hooks("child")
assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0, "dumpable"
assert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1, "new privileges"
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0), "core"
def deep(canary): raise RuntimeError(canary)
deep("canary-" + "value")
"""


def test_a_hardened_child_is_unreadable_and_tells_no_values() -> None:
    """Not dumpable, no new privileges, no core; an unhandled error prints neither its text nor its source."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run(
        [sys.executable, "-I", "-c", HARDENED, root], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "canary-value" not in done.stderr
    assert "deep" not in done.stderr


LOCKED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
limit = int(sys.argv[2])
try:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
except ValueError:
    sys.exit("not permitted")
from net.process import keep_in_memory
kept = keep_in_memory()
locked = [line for line in open("/proc/self/status") if line.startswith("VmLck")][0].split()[1]
print(kept, int(locked) > 0)
"""


@pytest.mark.parametrize(("limit", "said"), [(1 << 20, "False False"), (resource.RLIM_INFINITY, "True True")])
def test_memory_is_locked_only_where_there_is_no_limit(limit: int, said: str) -> None:
    """Under a limit nothing is locked, since a later allocation would fail; without one everything is."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOCKED, root, str(limit)], capture_output=True, text=True, timeout=30, check=False
    )
    if limit == resource.RLIM_INFINITY and done.stderr.strip() == "not permitted":
        pytest.skip("this machine does not let the limit be raised")
    assert done.stdout.strip() == said, done.stderr
