"""Sources: a value or a fixed code, read at each use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.sources.base import SourceError
from broker.sources.registry import Sources, expand
from broker.vault.store import SecretStore
from rules.facts import Sandbox

VALUE = b"canary-0123456789"


def sandbox(**attributes: str) -> Sandbox:
    return Sandbox(
        tenant="t", id="sb_a", epoch=1, role="r", owner="alice", agent="", task="", attributes=attributes, expires_at=1
    )


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    home = tmp_path / "state"
    home.mkdir(0o700)
    store = SecretStore(home / "store.json", lambda salt: b"k" * 32, os.urandom)
    store.add("github/alice", VALUE, owner="o", now=1.0)
    store.add("pin", b"pin1", owner="o", now=1.0, scrub=False)
    store.add("exeat/authority", VALUE, owner="exeat", now=1.0)
    return Sources(store=store, environment={"KEY": VALUE.decode(), "SHORT": "pin1"}, version_key=b"v" * 32)


@pytest.mark.parametrize(
    ("sentence", "reference", "code"),
    [
        ("a scheme that is not ours", "vault:a/b", "source-unknown"),
        ("a command", "exec:cat /etc/passwd", "source-unknown"),
        ("no scheme", "shop", "source-unknown"),
        ("a variable that was not passed", "env:HOME", "source-missing"),
        ("a short value that must be scrubbed", "env:SHORT", "source-refused"),
        ("a relative file", "file:secret", "source-refused"),
        ("a file that is not there", "file:/nonexistent/secret", "source-missing"),
        ("a device", "file:/dev/zero", "source-refused"),
        ("a name that is not stored", "store:none", "source-missing"),
        ("a stored value without scrubbing", "store:pin", "source-refused"),
        ("our own key", "store:exeat/authority", "source-refused"),
        ("an attribute that the sandbox lacks", "store:github/${sandbox.repository}", "source-refused"),
    ],
)
def test_what_gives_no_value(sources: Sources, sentence: str, reference: str, code: str) -> None:
    """By code, never a value."""
    with pytest.raises(SourceError) as caught:
        sources.fetch(reference, sandbox(), scrub=True)
    assert caught.value.code == code, sentence


@pytest.mark.parametrize("value", ["a/b", "../x", "a.b", "*", "", "a b", "x" * 200])
def test_an_attribute_is_one_plain_segment_in_a_reference(value: str) -> None:
    """Nothing of a sandbox can lead out of the place that the operator's reference names."""
    with pytest.raises(SourceError):
        expand("store:github/${sandbox.who}", sandbox(who=value))


@pytest.mark.parametrize("mode", [0o666, 0o622, 0o602])
def test_a_file_that_others_may_write_gives_no_value(sources: Sources, tmp_path: Path, mode: int) -> None:
    """Who can write the file would choose the secret."""
    path = tmp_path / "secret"
    path.write_bytes(VALUE)
    path.chmod(mode)
    with pytest.raises(SourceError, match="source-refused"):
        sources.fetch(f"file:{path}", sandbox(), scrub=True)


def test_a_file_is_read_at_each_use(sources: Sources, tmp_path: Path) -> None:
    """Removed and put back, it is missing and there again (T17); its version tells the change."""
    path = tmp_path / "secret"
    path.write_bytes(VALUE + b"\n")
    path.chmod(0o600)
    first = sources.fetch(f"file:{path}", sandbox(), scrub=True)
    assert first.reveal() == VALUE
    path.unlink()
    with pytest.raises(SourceError, match="source-missing"):
        sources.fetch(f"file:{path}", sandbox(), scrub=True)
    path.write_bytes(b"another-value-0123")
    path.chmod(0o600)
    again = sources.fetch(f"file:{path}", sandbox(), scrub=True)
    assert again.reveal() == b"another-value-0123"
    assert again.version != first.version


def test_values_come_with_their_version(sources: Sources) -> None:
    """env and store give the value; a reference may name the sandbox's owner."""
    assert sources.fetch("env:KEY", sandbox(), scrub=True).reveal() == VALUE
    found = sources.fetch("store:github/${sandbox.owner}", sandbox(), scrub=True)
    assert (found.reveal(), found.version) == (VALUE, "1")
    assert sources.fetch("store:pin", sandbox(), scrub=False).reveal() == b"pin1"


def test_what_reads_files_never_runs_on_the_loop(sources: Sources) -> None:
    """Only sources that are memory alone say that they need no thread; an unknown one is refused before it matters."""
    assert sources.blocks("file:/run/secrets/x")
    assert not sources.blocks("env:KEY")
    assert not sources.blocks("store:github/${sandbox.owner}")
