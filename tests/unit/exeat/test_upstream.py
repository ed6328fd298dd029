"""The files of `upstream:`: what cannot be used is refused before a start; what can reaches the boot document."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from broker.executor_process import Boot as ExecutorBoot
from exeat.containers import Containers, ServeRefused, _executor, _worker
from exeat.places import Places
from exeat.settings import parse_settings
from exeat.upstream import Upstream, UpstreamRefused, boot_of
from net.process import read_boot
from net.upstream import UpstreamProxy
from proxy.worker import Boot as WorkerBoot
from tests.support.authority import Authority

SETTING = Upstream(host="proxy.corp.example", port=3128)
PASSWORD = "canary-2f6d90aa-password"


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


WRONG_SECRETS = [
    (b"", 0o600, "one line", "empty"),
    (b"\n", 0o600, "one line", "an empty line"),
    (b"a\nb\n", 0o600, "one line", "two lines: which one?"),
    (b"a\x00b", 0o600, "one line", "a control character would end up in a head"),
    (b"a\r\nX: y", 0o600, "one line", "so would a line end"),
    (b"\xff\xfe", 0o600, "one line", "not UTF-8"),
    (b"x" * 1025, 0o600, "too large", "no password is that long"),
    (b"secret", 0o644, "mode 0600", "others could read it"),
    (b"secret", 0o660, "mode 0600", "others could change it"),
]


@pytest.mark.parametrize(("content", "mode", "said", "why"), WRONG_SECRETS)
def test_a_password_file_that_cannot_be_used_is_refused(
    tmp_path: Path, content: bytes, mode: int, said: str, why: str
) -> None:
    """The sentence names the file and holds nothing of it."""
    path = write(tmp_path / "proxy", content, mode)
    with pytest.raises(UpstreamRefused) as caught:
        boot_of(replace(SETTING, username="exeat", credential_file=path))
    assert said in str(caught.value), why
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value) + caught.value.remedy


@pytest.mark.parametrize("pair", [b"no colon", b":password", b"user:", b":"])
def test_a_file_for_both_without_both_is_refused(tmp_path: Path, pair: bytes) -> None:
    """A name without a password, or the other way round, is an accident."""
    with pytest.raises(UpstreamRefused, match="username:password"):
        boot_of(replace(SETTING, credential_file=write(tmp_path / "pair", pair)))


def test_missing_files_and_links_are_refused(tmp_path: Path) -> None:
    """No file, a folder, or a link whose target somebody else chooses."""
    real = write(tmp_path / "real", PASSWORD.encode())
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "folder").mkdir()
    for name in ("none", "link", "folder"):
        with pytest.raises(UpstreamRefused):
            boot_of(replace(SETTING, username="u", credential_file=tmp_path / name))
    for name in ("none", "folder"):
        with pytest.raises(UpstreamRefused):
            boot_of(replace(SETTING, ca_file=tmp_path / name))


@pytest.mark.parametrize("content", [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n", b"\xff"])
def test_an_authority_that_is_none_is_refused_before_anything_starts(tmp_path: Path, content: bytes) -> None:
    """Otherwise every dial would fail later."""
    with pytest.raises(UpstreamRefused, match="no certificate"):
        boot_of(replace(SETTING, ca_file=write(tmp_path / "ca.pem", content)))


def test_a_private_key_does_not_travel_as_an_authority(tmp_path: Path) -> None:
    """The proxy's own key in the CA's file is a mistake that should be seen."""
    text = Authority().pem + "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
    with pytest.raises(UpstreamRefused, match="private key"):
        boot_of(replace(SETTING, ca_file=write(tmp_path / "ca.pem", text.encode())))


def test_without_the_setting_there_is_none() -> None:
    """No proxy is made up, from the environment or elsewhere."""
    assert boot_of(None) is None


@pytest.mark.parametrize("kind", [ExecutorBoot, WorkerBoot])
def test_what_is_read_arrives_in_the_boot_of_those_that_dial(tmp_path: Path, kind: type) -> None:
    """Through the real boot reader; the representation of the boot shows no secret."""
    authority = Authority()
    said = boot_of(
        replace(
            SETTING,
            username="exeat",
            credential_file=write(tmp_path / "proxy", PASSWORD.encode() + b"\n"),
            ca_file=write(tmp_path / "ca.pem", authority.pem.encode(), 0o644),
            direct=("git.corp.example",),
        )
    )
    boot = read_boot(pipe({"name": "x", "ca_pem": "", "digest_key": "00", "upstream": said}, kind), kind)
    assert boot.upstream == UpstreamProxy(
        host="proxy.corp.example",
        port=3128,
        authorization=b"Basic " + base64.b64encode(f"exeat:{PASSWORD}".encode()),
        ca_pem=authority.pem,
        direct=("git.corp.example",),
    )
    assert PASSWORD not in repr(boot)
    assert base64.b64encode(f"exeat:{PASSWORD}".encode()).decode() not in repr(boot)


def test_one_file_may_hold_both(tmp_path: Path) -> None:
    """`username:password`; a colon in the password is part of it."""
    said = boot_of(replace(SETTING, credential_file=write(tmp_path / "pair", b"exeat:a:b\n")))
    assert said is not None
    assert bytes.fromhex(said["authorization"]) == b"Basic " + base64.b64encode(b"exeat:a:b")


def test_containers_read_a_mount_that_several_users_share(tmp_path: Path) -> None:
    """There the mount is the boundary: its mode may be wider, and what is wrong is refused as at every start."""
    secret = write(tmp_path / "proxy", PASSWORD.encode(), 0o644)
    (tmp_path / "client").mkdir()
    write(tmp_path / "client" / "ca.pem", b"root")
    layout = Containers(
        sockets=tmp_path,
        digest_key=tmp_path / "key",
        uids={"auditor": 1, "vault": 2, "executor": 3, "worker": 4},
        listen="0.0.0.0:3128",
    )
    text = "version: 1\nupstream: {proxy: 'http://proxy.corp.example:3128', credential: {username: u, "
    text += "password_file: %s}}\n"
    places = Places(config=tmp_path, state=tmp_path, run=tmp_path)
    settings = parse_settings(text % secret, tmp_path / "exeat.yaml", places)
    for make in (_executor, _worker):
        assert make(settings, layout, "00")["upstream"]["host"] == "proxy.corp.example"
        with pytest.raises(ServeRefused, match="none"):
            make(parse_settings(text % (tmp_path / "none"), tmp_path / "exeat.yaml", places), layout, "00")


def pipe(document: dict[str, object], kind: type) -> int:
    """A descriptor that `document` is read from, without the fields that `kind` does not have."""
    known = {name: value for name, value in document.items() if name in kind.__dataclass_fields__}
    read, written = os.pipe()
    with os.fdopen(written, "wb") as stream:
        stream.write(json.dumps(known).encode())
    return read
