"""A scan sees a secret however it is written, cut and packed, tells where, and never what."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import tarfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from exeat.scan import walk as walks
from exeat.scan.search import Finding, Search
from exeat.scan.shapes import SHAPES
from exeat.scan.walk import Walk
from rules.placeholders import make
from wire.marks import SHOWN, marks

KEY = b"k" * 32
SECRET = b"kq8-Scan\\Real/1d7a+93c0?4be2=aa"


def search(*values: bytes, looks: bool = False) -> Search:
    found = [mark for number, value in enumerate(values) for mark in marks(f"secret-{number}", value, KEY)]
    return Search(KEY, found, looks=looks)


def scanned(data: bytes, *values: bytes, looks: bool = False) -> tuple[list[Finding], list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    walk = Walk(search(*(values or (SECRET,)), looks=looks), lambda place, why: told.append((place, why)))
    return list(walk.stream("it", io.BytesIO(data))), told


def tarred(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner.txt", content)
    return buffer.getvalue()


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "raw": lambda value: value,
    "base64": base64.b64encode,
    "base64url": base64.urlsafe_b64encode,
    "hex": lambda value: value.hex().encode(),
    "HEX": lambda value: value.hex().upper().encode(),
    "percent": lambda value: "".join(f"%{byte:02X}" for byte in value).encode(),
    "percent where needed": lambda value: urllib.parse.quote_from_bytes(value, safe="").encode(),
    "json where needed": lambda value: json.dumps(value.decode())[1:-1].encode(),
    "json with slashes": lambda value: json.dumps(value.decode())[1:-1].replace("/", "\\/").encode(),
    "json": lambda value: "".join(f"\\u{byte:04x}" for byte in value).encode(),
    "utf-16-le": lambda value: value.decode().encode("utf-16-le"),
    "utf-16-be": lambda value: value.decode().encode("utf-16-be"),
}
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "zlib": zlib.compress,
    "zip": zipped,
    "tar": lambda content: tarred(inner=content),
    "a layer of an image": lambda content: gzip.compress(tarred(**{"layer.tar": tarred(etc=content)})),
}


def test_other_secrets_and_placeholders_are_not_found() -> None:
    """Nothing is found in what holds neither a secret of ours nor a token: no alarm without a cause."""
    placeholder = make("sk_live_{99}", b"r" * 32).encode()
    text = b"AKIA is a prefix, sk_live_ too, ghp_short; " + SECRET[:-1] + b" " + placeholder + bytes(range(256))
    assert scanned(text, looks=True) == ([], [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_every_form_is_found_at_every_alignment(form: str, before: int) -> None:
    """The secret written in each promised way, behind other bytes of the same writing, is found with its place."""
    data = b"\n" * 700 + FORMS[form](b"u:"[:before] + SECRET) + b"\n"
    (finding,), told = scanned(data)
    assert (finding.kind, finding.name, finding.count, told) == ("secret", "secret-0", 1, [])
    assert 700 <= finding.offset <= 700 + 6 * before + 4


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing_is_opened(packing: str) -> None:
    """What lies packed is found where it lies unpacked, and the place names the way there."""
    found, told = scanned(PACKINGS[packing](b"x" * 3000 + SECRET + os.urandom(3000)))
    assert found
    assert told == []
    assert all(finding.name == "secret-0" for finding in found)


def test_the_question_holds_no_secret() -> None:
    """What a scan is given shows two bytes of each secret, and prints none of it."""
    found = list(marks("name", SECRET, KEY))
    shown = repr(found)
    for start in range(len(SECRET) - SHOWN):
        assert repr(SECRET[start : start + SHOWN + 1])[2:-1] not in shown
    assert max(len(mark.lead) for mark in found if mark.form in ("raw", "base64", "base64url")) == SHOWN


@given(data=st.binary(max_size=3000), where=st.integers(0, 3000), cuts=st.lists(st.integers(1, 900), max_size=12))
def test_cuts_hide_nothing(data: bytes, where: int, cuts: list[int]) -> None:
    """However a stream is cut, what is found and where does not change."""
    whole = data[:where] + SECRET + data[where:]
    one, many = search(SECRET).stream("it"), search(SECRET).stream("it")
    one.feed(whole)
    start = 0
    for cut in cuts:
        many.feed(whole[start : start + cut])
        start += cut
    many.feed(whole[start:])
    found = one.end()
    assert found == many.end()
    assert any(finding.form == "raw" for finding in found)


def test_tokens_are_known_by_their_look() -> None:
    """A token of somebody else's is told by kind and place."""
    token = b"ghp_" + b"aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bD0fG3hJ6"
    (finding,), _ = scanned(b"TOKEN=" + token + b"\n-----BEGIN nothing", looks=True)
    assert (finding.kind, finding.name, finding.offset) == ("token", "GitHub token", 6)
    assert token.decode() not in repr(finding)
    (key,), _ = scanned(b"-----BEGIN EC PRIVATE KEY-----\nMH", looks=True)
    assert key.name == "private key"


def test_looks_cover_the_catalogue() -> None:
    """Every vendor whose placeholders have a prefix of their own is looked for."""
    services = Path(__file__).parents[4] / "rules" / "services"
    known = [prefix.decode() for _, prefix, _ in SHAPES]
    shapes = [
        part.partition('"')[0] for path in services.glob("*.yaml") for part in path.read_text().split('shape: "')[1:]
    ]
    assert len(shapes) > 30
    own = {shape.partition("{")[0] for shape in shapes}
    unknown = {prefix for prefix in own if len(prefix) >= 4 and not any(prefix.startswith(one) for one in known)}
    # Of our own making, or (Telegram) each bot's own number: these have no vendor's prefix.
    assert unknown == {"git_", "k8s-", "mcp_", "reg_", "110201543:"}


@pytest.mark.parametrize("packing", PACKINGS)
def test_damage_is_told_and_the_rest_is_searched(packing: str) -> None:
    """Half of a packed file, with a secret behind it in clear: told as not searched, and found."""
    whole = PACKINGS[packing](os.urandom(40_000))
    found, told = scanned(whole[: len(whole) // 2] + SECRET)
    assert [finding.name for finding in found if finding.place == "it"] == ["secret-0"]
    assert told


def test_a_bomb_ends_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What unpacks to more than the bound is not unpacked further, and that is told."""
    monkeypatch.setattr(walks, "MAX_OUTPUT", 1 << 20)
    _, told = scanned(gzip.compress(bytes(8 << 20)))
    assert told
    deep = b"x"
    for _ in range(walks.DEPTH + 1):
        deep = gzip.compress(deep)
    monkeypatch.undo()
    assert [why for _, why in scanned(deep)[1]] == ["packed too deep"]


def test_folders_names_and_links(tmp_path: Path) -> None:
    """Names and targets of links are searched; links are not followed, devices and pipes not opened."""
    outside = tmp_path / "outside"
    outside.write_bytes(SECRET)
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    plain = b"kq8ScanReal1d7a93c04be2"
    (inside / "deep" / plain.decode()).write_text("x")
    (inside / "link").symlink_to(f"/nowhere/{plain.decode()}")
    (inside / "loop").symlink_to(inside)
    (inside / "followed").symlink_to(outside)
    os.mkfifo(inside / "pipe")
    told: list[tuple[str, str]] = []
    found = list(Walk(search(SECRET, plain), lambda *why: told.append(why)).path(inside))
    assert told == []
    assert sorted(finding.place.rpartition("/")[2] for finding in found) == [plain.decode(), "link (target of a link)"]


@pytest.mark.slow
def test_what_git_keeps_is_found(tmp_path: Path) -> None:
    """A secret that was committed and deleted again lies in an object, loose or packed."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for number, content in enumerate((b"a" * 5000, b"a" * 5000 + SECRET, b"gone")):
        (tmp_path / "file").write_bytes(content)
        git("add", "file")
        git("commit", "-q", "-m", f"c{number}")
    loose = list(Walk(search(SECRET), lambda *why: None).path(tmp_path))
    assert [finding.name for finding in loose] == ["secret-0"]
    git("gc", "-q", "--prune=now")
    packed = list(Walk(search(SECRET), lambda *why: None).path(tmp_path))
    assert [finding.name for finding in packed] == ["secret-0"]
    assert "object" in packed[0].place
