"""Traffic of package clients that proxies are known to spoil: HEAD, ranges, pipelined and cut answers, netrc, files of
another host.

`plain.test` is asked by the worker alone, `keyed.test` by the broker with a key, `clear.test` without TLS as apt does.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway import Box, Completed, TestGateway
from tests.support.origins import Exchange, Origin
from tests.support.registries import answering, make_tarball

pytestmark = pytest.mark.xdist_group("registry-traffic")

KEY = "kq8-Files-Real-0d7f1c52aa93"
CREDENTIALS = """
version: 1
credentials:
  files: {kind: bearer, secret: "store:files", hosts: [keyed.test], owner: tests,
          placeholder: {env: FILES_KEY, shape: "fil_{36}"}}
"""
POLICY = """
services:
  index: {{like: pypi, base: "{plain}/index"}}
  locked: {{like: pypi, base: "{keyed}/index"}}
  registry: {{like: npm, base: "{plain}/npm"}}
roles:
  agent:
    allow:
      - {{service: [index, registry], operations: [read]}}
      - {{name: plain, host: plain.test, methods: [GET], paths: ["/files/**"]}}
      - {{name: keyed, host: keyed.test, methods: [GET], paths: ["/files/**"], credential: files}}
      - {{name: locked, service: locked, operations: [read], credential: files}}
      - {{name: clear, host: clear.test, scheme: http, methods: [GET], paths: ["/**"]}}
"""
CONTENT = b"".join(hashlib.sha256(str(number).encode()).digest() for number in range(3000))
WHEEL = "/packages/hello/1.0/exeat_hello-1.0-py3-none-any.whl"


async def ranged(exchange: Exchange) -> None:
    """A file as a host of artefacts serves it (RFC 9110 section 14): whole, one part, several parts, and 416."""
    await exchange.read_body()
    asked = exchange.request.header("range")
    size = len(CONTENT)
    common = (("Accept-Ranges", "bytes"), ("ETag", '"v1"'), ("Content-Type", "application/octet-stream"))
    if asked is None or exchange.request.header("if-range") not in (None, '"v1"'):
        await answer(exchange, 200, CONTENT, common)
        return
    parts = [part.strip().partition("-") for part in asked.removeprefix("bytes=").split(",")]
    spans = [
        (size - int(end), size - 1) if not first else (int(first), min(int(end or size - 1), size - 1))
        for first, _, end in parts
    ]
    if spans[0][0] >= size:
        await answer(exchange, 416, b"", (("Content-Range", f"bytes */{size}"),))
    elif len(spans) == 1:
        first, last = spans[0]
        await answer(
            exchange, 206, CONTENT[first : last + 1], (*common, ("Content-Range", f"bytes {first}-{last}/{size}"))
        )
    else:
        body = b"".join(
            f"--cut\r\nContent-Range: bytes {first}-{last}/{size}\r\n\r\n".encode()
            + CONTENT[first : last + 1]
            + b"\r\n"
            for first, last in spans
        )
        await answer(exchange, 206, body + b"--cut--\r\n", (("Content-Type", "multipart/byteranges; boundary=cut"),))


async def answer(exchange: Exchange, status: int, body: bytes, headers: tuple[tuple[str, str], ...]) -> None:
    """To HEAD the same head without its body."""
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers), f"Content-Length: {len(body)}"]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    await exchange.send(head if exchange.request.method == "HEAD" else head + body)


async def bodiless(exchange: Exchange) -> None:
    """304 with the length of what it does not send, 204 without one."""
    status = int(exchange.request.path.rpartition("/")[2])
    length = "Content-Length: 12345\r\n" if status == 304 else ""
    await exchange.send(f'HTTP/1.1 {status} X\r\nETag: "v1"\r\n{length}\r\n'.encode())


async def cut(exchange: Exchange) -> None:
    """Announces a thousand bytes and ends after ten."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n0123456789")
    exchange.keep_alive = False


async def cut_chunk(exchange: Exchange) -> None:
    """Ends inside a chunked body."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n")
    exchange.keep_alive = False


async def sized(exchange: Exchange) -> None:
    """As many bytes as the path says, told by their digits."""
    size = int(exchange.request.path.rpartition("/")[2])
    await exchange.answer(200, (str(size).encode() * size)[:size])


@dataclass
class Place:
    origins: dict[str, Origin]
    gateway: TestGateway
    box: Box

    def curl(self, which: str, path: str, *arguments: str) -> Completed:
        return self.box.curl(*arguments, self.origins[which].url(path))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        Origin("plain.test", address="127.0.0.121").run_in_thread() as plain,
        Origin("keyed.test", address="127.0.0.122").run_in_thread() as keyed,
        Origin("clear.test", address="127.0.0.123", tls=False).run_in_thread() as clear,
    ):
        for origin in (plain, keyed, clear):
            origin.on("/files/whole", ranged)
            origin.on(f"/index{WHEEL}", ranged)
            origin.on("/files/304", bodiless)
            origin.on("/files/204", bodiless)
            origin.on("/files/cut", cut)
            origin.on("/files/cut-chunk", cut_chunk)
            origin.on("/files/sized/*", sized)
        for name, base in (("here", plain.base), ("there", "https://files.elsewhere.test")):
            tarball = make_tarball()
            dist = {
                "tarball": f"{base}/npm/exeat-{name}/-/exeat-{name}-1.0.0.tgz",
                "integrity": "sha512-" + b64encode(hashlib.sha512(tarball).digest()).decode(),
            }
            version = {"name": f"exeat-{name}", "version": "1.0.0", "dist": dist}
            packument = {"name": f"exeat-{name}", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
            plain.on(f"/npm/exeat-{name}", answering(json.dumps(packument).encode(), "application/json"))
            plain.on(f"/npm/exeat-{name}/-/exeat-{name}-1.0.0.tgz", answering(tarball, "application/octet-stream"))
        with TestGateway(
            tmp_path_factory.mktemp("traffic"),
            policy=POLICY.format(plain=plain.base, keyed=keyed.base),
            credentials=CREDENTIALS,
            secrets={"files": KEY},
            origins=[plain, keyed, clear],
        ) as gateway:
            yield Place({"plain": plain, "keyed": keyed, "clear": clear}, gateway, gateway.sandbox())


@pytest.fixture(autouse=True)
def _from_here(place: Place) -> None:
    for origin in place.origins.values():
        origin.received.clear()


@pytest.fixture(params=["plain", "keyed", "clear"])
def which(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def heads(done: Completed) -> list[str]:
    """Every answer's head that `curl -i` shows, CONNECT's left out by its option."""
    return [part for part in done.out.replace("\r\n", "\n").split("\n\n") if part.startswith("HTTP/1.1 ")]


# --- C062: answers without a body -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "length"),
    [("HEAD", "/files/whole", len(CONTENT)), ("GET", "/files/304", 12345), ("GET", "/files/204", None)],
    ids=["HEAD", "304", "204"],
)
def test_an_answer_without_a_body_keeps_its_head_and_its_connection(
    place: Place, which: str, method: str, path: str, length: int | None
) -> None:
    """C062: the length is the origin's, no body follows, and the next answer on the connection is whole."""
    each = ("-sS", "--suppress-connect-headers", "-w", "\n\n[%{num_connects}]\n\n")
    origin = place.origins[which]
    first_ask = (*each, "-I" if method == "HEAD" else "-i", origin.url(path))
    done = place.box.curl(*first_ask, "--next", *each, "-i", origin.url("/files/sized/7"))
    assert done.code == 0, done
    first, second = heads(done)
    told = [line for line in first.lower().splitlines() if line.startswith("content-length:")]
    assert told == ([] if length is None else [f"content-length: {length}"])
    assert '"v1"' in first
    assert "[0]" in done.out, "the second went over the connection of the first"
    assert done.out.endswith("7777777\n\n[0]\n\n")
    assert second.startswith("HTTP/1.1 200")
    assert [one.method for one in origin.received] == [method, "GET"]


# --- C121: ranges ------------------------------------------------------------------------------------------------

RANGES = {
    "the beginning": ("-r", "0-9"),
    "the end": ("-r", "-100"),
    "the middle to the end": ("-r", "95000-"),
    "two parts": ("-r", "0-3,100-103"),
    "beyond the end": ("-r", "999999-"),
    "if unchanged": ("-r", "0-9", "-H", 'If-Range: "v1"'),
    "if unchanged, and it changed": ("-r", "0-9", "-H", 'If-Range: "v0"'),
    "whole": (),
    "the head": ("-I",),
}


def shown(done: Completed) -> tuple[str, dict[str, str], bytes]:
    head, _, body = done.raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    names = ("content-range", "content-length", "content-type", "accept-ranges", "etag")
    return lines[0].split()[1], {name: fields[name] for name in names if name in fields}, body


@pytest.mark.parametrize("words", RANGES.values(), ids=RANGES)
def test_parts_of_a_file_are_what_the_origin_makes_of_them(place: Place, which: str, words: tuple[str, ...]) -> None:
    """C121: 206, 416, several parts, If-Range and HEAD, exactly as they come without a gateway."""
    path = "/files/whole" if which == "clear" else f"/index{WHEEL}"
    through = place.curl(which, path, "-i", "--suppress-connect-headers", *words)
    origin = place.origins[which]
    direct = place.box.curl(
        "--noproxy",
        "*",
        "--resolve",
        f"{which}.test:{origin.port}:{origin.address}",
        "-k",
        "-i",
        *words,
        origin.url(path),
    )
    assert shown(through) == shown(direct)
    asked, again = origin.received
    assert asked.method == again.method
    assert asked.header("range") == again.header("range")
    assert asked.header("if-range") == again.header("if-range")


# --- C127: pipelined and cut answers -----------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order_and_whole(place: Place) -> None:
    """C127: ten requests at once, as apt sends them; each answer has the bytes of its own request, in their order."""
    sizes = [1, 70_000, 3, 200_000, 12, 9_999, 0, 65_536, 5, 40_001]
    base = place.origins["clear"].base
    token = b64encode(f"session:{place.box.token}".encode()).decode()
    host = base.removeprefix("http://")
    with place.box.connect() as connection:
        connection.sendall(
            b"".join(
                f"GET {base}/files/sized/{size} HTTP/1.1\r\nHost: {host}\r\n"
                f"Proxy-Authorization: Basic {token}\r\n{'Connection: close' if last else 'X-A: b'}\r\n\r\n".encode()
                for size, last in [(size, number == len(sizes) - 1) for number, size in enumerate(sizes)]
            )
        )
        with connection.makefile("rb") as answers:
            for size in sizes:
                assert answers.readline().startswith(b"HTTP/1.1 200 ")
                fields = {}
                while (line := answers.readline()) != b"\r\n":
                    name, _, value = line.decode().partition(":")
                    fields[name.lower()] = value.strip()
                assert int(fields["content-length"]) == size
                assert answers.read(size) == (str(size).encode() * size)[:size]
            assert answers.read() == b""
    assert [one.path for one in place.origins["clear"].received] == [f"/files/sized/{size}" for size in sizes]


@pytest.mark.parametrize("path", ["/files/cut", "/files/cut-chunk"])
def test_a_cut_answer_never_looks_whole(place: Place, which: str, path: str, tmp_path: Path) -> None:
    """C127: where the origin ends early the client sees a transfer that failed, not a short file."""
    done = place.curl(which, path, "-o", str(tmp_path / "got"), "-w", "%{http_code}")
    if done.code == 0:
        assert done.out == "502"
        assert b"0123" not in (tmp_path / "got").read_bytes()
    else:
        assert done.code in (18, 56), done  # a partial file, or a connection that was reset


# --- C107: netrc -------------------------------------------------------------------------------------------------

ASK = """
import os, requests, sys
headers = {"Authorization": "Bearer " + os.environ["FILES_KEY"]}
answer = requests.get(sys.argv[1], headers=headers, timeout=60)
print(answer.status_code, answer.json()["reason"] if answer.status_code == 403 else "")
"""


def test_what_a_library_takes_from_netrc_is_refused_by_name_and_not_sent(place: Place, tmp_path: Path) -> None:
    """C107: requests puts netrc's Basic in place of the placeholder; the person reads whose authority it was, and
    without that entry the same call goes on with the key. An empty pair is refused like any other."""
    empty = place.curl("keyed", "/files/sized/3", "-H", "Authorization: Basic Og==")
    assert empty.json()["reason"] == "client-authority"
    (tmp_path / ".netrc").write_text("machine keyed.test login me password mine\n")
    (tmp_path / ".netrc").chmod(0o600)
    words = (sys.executable, "-c", ASK, place.origins["keyed"].url("/files/sized/3"))
    done = place.box.command(*words, env={"HOME": str(tmp_path)})
    assert done.out.split() == ["403", "client-authority"], done
    assert place.origins["keyed"].received == []
    assert place.box.command(*words).out.split() == ["200"]
    assert place.origins["keyed"].received[0].header("authorization") == f"Bearer {KEY}"


# --- C119: files of another host ---------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_names_the_other_host_that_a_file_lies_on(place: Place, tmp_path: Path) -> None:
    """C119: the index is permitted, the file's host is not: npm's message and the log name it; where it is permitted
    the archive comes whole."""
    settings = {"npm_config_audit": "false", "npm_config_update_notifier": "false", "npm_config_cache": str(tmp_path)}

    def install(name: str) -> Completed:
        folder = ("--prefix", str(tmp_path / name), "--registry", place.origins["plain"].url("/npm/"))
        return box.command("npm", "install", *folder, name, env=settings)

    box = place.gateway.sandbox()
    done = install("exeat-there")
    assert done.code != 0
    assert "https://files.elsewhere.test/npm/exeat-there/-/exeat-there-1.0.0.tgz" in done.err
    assert "Refused by Exeat policy" in done.err
    refused = [one for one in place.gateway.settled(sandbox=box.id) if one["event"] == "request.refused"]
    assert {one["host"] for one in refused} == {"files.elsewhere.test"}
    assert any(one["request_id"] in done.err for one in refused)
    assert install("exeat-here").code == 0
    assert (tmp_path / "exeat-here/node_modules/exeat-here/index.js").exists()
