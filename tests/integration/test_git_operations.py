"""git as agents use it: fetches of every kind, and pushes to the branches that a rule names and to no other.

`plain.test` takes everybody; `keyed.test` takes the key that the broker has. Both are `git http-backend`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.gateway import Box, Completed, TestGateway
from tests.support.githttp import git_backend, make_repository
from tests.support.lfs import LfsServer
from tests.support.origins import Exchange, Handler, Origin

pytestmark = pytest.mark.xdist_group("git-operations")

KEY = "kq8-Forge-Real-0d7f1c52aa93"
CREDENTIALS = """
version: 1
credentials:
  forge: {kind: basic, username: agent, secret: "store:forge", hosts: [keyed.test], owner: tests,
          placeholder: {env: FORGE_KEY, shape: "git_{36}"}}
"""
PUSH = 'ref: ["refs/heads/agent/*", "refs/tags/v*"], change: [create, update]'
IDENTITY = ("-c", "user.name=Agent", "-c", "user.email=agent@example.test")


def policy(plain: Origin, keyed: Origin, two: Origin) -> str:
    return f"""
    services:
      plain: {{like: git, base: "{plain.base}"}}
      two: {{like: git, base: "{two.base}"}}
      keyed: {{like: git, base: "{keyed.base}"}}
    roles:
      agent:
        allow:
          - {{service: plain, operations: [read]}}
          - {{name: push, service: plain, operations: [git.push], with: {{repository: "o/*", {PUSH}}}}}
          - {{name: lfs, service: plain, operations: [lfs.upload], with: {{repository: "o/*"}}}}
          - name: keyed
            service: keyed
            operations: [git.fetch, lfs.download, lfs.upload, lfs.locks.read]
            with: {{repository: "o/*"}}
            credential: forge
          - name: keyed-push
            service: keyed
            operations: [git.push]
            with: {{repository: "o/*", {PUSH}}}
            credential: forge
          - {{name: two, service: two, operations: [git.fetch], protocol: h2}}
          - name: two-push
            service: two
            operations: [git.push]
            with: {{repository: "o/*", {PUSH}}}
            protocol: h2
      reader:
        allow:
          - {{name: fetch, service: plain, operations: [git.fetch], with: {{repository: o/r}}}}
    """


@dataclass
class Place:
    """The two forges, their repositories and the gateway of this module."""

    origins: dict[str, Origin]
    folders: dict[str, Path]
    lfs: dict[str, LfsServer]
    box: Box
    reader: Box
    gateway: TestGateway

    def origin(self, which: str) -> Origin:
        return self.origins[which]

    def refs(self, which: str, repository: str = "o/r.git") -> dict[str, str]:
        """ref -> id, as the forge has them."""
        folder = self.folders[which] / repository
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(folder), "for-each-ref", "--format=%(refname) %(objectname)"],
            capture_output=True,
            check=True,
            text=True,
        )
        return dict(line.split(" ") for line in done.stdout.splitlines())

    def clone(self, which: str, folder: Path, *options: str) -> Completed:
        return self.box.command("git", "clone", "-q", *options, self.origin(which).url("/o/r.git"), str(folder))

    def git(self, folder: Path, *words: str) -> Completed:
        return self.box.command("git", *IDENTITY, "-C", str(folder), *words)


def locked(inner: Handler) -> Handler:
    """`inner` for whoever has the key, 401 for everybody else."""
    expected = "Basic " + base64.b64encode(f"agent:{KEY}".encode()).decode()

    async def run(exchange: Exchange) -> None:
        if exchange.request.header("authorization") != expected:
            await exchange.read_body()
            await exchange.answer(401, b"", (("WWW-Authenticate", 'Basic realm="forge"'),))
            return
        await inner(exchange)

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folders = {which: tmp_path_factory.mktemp(which) for which in ("plain", "keyed", "two")}
    for folder in folders.values():
        for name in ("o/r.git", "other/r.git"):
            make_repository(folder / name, {"README.md": "hello\n", "big.txt": "x" * 5000})
    with (
        Origin("plain.test", address="127.0.0.91", keep=64 << 20).run_in_thread() as plain,
        Origin("keyed.test", address="127.0.0.92", keep=64 << 20).run_in_thread() as keyed,
        Origin("two.test", address="127.0.0.93", keep=64 << 20).run_in_thread() as two,
    ):
        two.on("/*", git_backend(folders["two"], push=True))
        lfs = LfsServer(plain.base, git_backend(folders["plain"], push=True))
        plain.on("/*", lfs)
        keyed_lfs = LfsServer(keyed.base, git_backend(folders["keyed"], push=True), token="minted-by-the-forge-31aa")
        keyed.on("/*", locked(keyed_lfs))
        with TestGateway(
            tmp_path_factory.mktemp("git"),
            policy=policy(plain, keyed, two),
            credentials=CREDENTIALS,
            secrets={"forge": KEY},
            origins=[plain, keyed, two],
        ) as gateway:
            yield Place(
                {"plain": plain, "keyed": keyed, "two": two},
                folders,
                {"plain": lfs, "keyed": keyed_lfs},
                gateway.sandbox(),
                gateway.sandbox("reader"),
                gateway,
            )


@pytest.fixture(params=["plain", "keyed"])
def which(request: pytest.FixtureRequest) -> str:
    """Through the worker alone, or through the broker with a key."""
    return str(request.param)


@pytest.fixture
def work(place: Place, which: str, tmp_path: Path) -> Path:
    """A clone with one commit of its own."""
    folder = tmp_path / "work"
    assert place.clone(which, folder).code == 0
    (folder / "new.txt").write_text("new\n")
    assert place.git(folder, "add", ".").code == 0
    assert place.git(folder, "commit", "-q", "-m", "mine").code == 0
    return folder


# --- pushes that are refused: nothing changes, and the client says why ---

REFUSED = {
    "another branch": ("HEAD:refs/heads/main",),
    "a good branch and a bad one": ("HEAD:refs/heads/agent/good", "HEAD:refs/heads/main"),
    "the bad one last, atomically": ("--atomic", "HEAD:refs/heads/agent/good", "HEAD:refs/heads/main"),
    "another tag": ("HEAD:refs/tags/latest",),
    "a deeper branch than the pattern": ("HEAD:refs/heads/agent/a/b",),
    "a deletion": (":refs/heads/main",),
    "a deletion beside a good one": ("HEAD:refs/heads/agent/good", ":refs/heads/main"),
    "everything": ("--mirror",),
    "push options": ("-o", "ci.skip", "HEAD:refs/heads/agent/good"),
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_push_of_more_than_the_rule_names_changes_nothing(
    place: Place, which: str, work: Path, words: tuple[str, ...]
) -> None:
    """Expect every command of a push to be permitted or none to be carried out, and git to say who refused."""
    if "-o" in words:
        config = place.folders[which] / "o/r.git/config"
        subprocess.run(["git", "config", "-f", str(config), "receive.advertisePushOptions", "true"], check=True)
    before = place.refs(which)
    pushed = place.git(work, "push", "origin", *words)
    assert pushed.code != 0, pushed
    assert place.refs(which) == before
    assert "Exeat" in pushed.err, pushed
    assert "must be" in pushed.err or "-o" in words or "--mirror" in words, pushed
    posts = [one for one in place.origin(which).received if one.method == "POST" and "receive-pack" in one.path]
    assert not any(b"refs/heads/main" in one.body or b"latest" in one.body for one in posts)


def test_another_repository_is_refused_at_discovery(place: Place, which: str, work: Path) -> None:
    """Expect git to be told before it sends anything."""
    before = len(place.origin(which).received)
    pushed = place.git(work, "push", place.origin(which).url("/other/r.git"), "HEAD:refs/heads/agent/x")
    assert pushed.code != 0
    assert "Exeat" in pushed.err, pushed
    assert len(place.origin(which).received) == before


def test_a_clone_of_another_repository_is_refused_at_discovery(place: Place, tmp_path: Path) -> None:
    """Expect a rule that binds the repository to hold for fetches too, and git to show our words (T26)."""
    before = len(place.origin("keyed").received)
    cloned = place.box.command("git", "clone", "-q", place.origin("keyed").url("/other/r.git"), str(tmp_path / "x"))
    assert cloned.code != 0
    assert "Exeat" in cloned.err, cloned
    assert len(place.origin("keyed").received) == before


READS = {
    "ls-remote": ("ls-remote", "{url}"),
    "clone": ("clone", "-q", "{url}", "{folder}/clone"),
    "fetch": ("-C", "{folder}/clone", "fetch", "-q", "origin"),
    "shallow": ("clone", "-q", "--depth", "1", "{url}", "{folder}/shallow"),
    "partial": ("clone", "-q", "--filter=blob:none", "{url}", "{folder}/partial"),
}
BEYOND = {
    "a push": ("-C", "{folder}/clone", "push", "{url}", "HEAD:refs/heads/x"),
    "another repository": ("clone", "-q", "{other}", "{folder}/other"),
    "a list of another's refs": ("ls-remote", "{other}"),
}


@pytest.mark.parametrize("version", ["0", "2"])
def test_who_may_fetch_one_repository_does_only_that(place: Place, tmp_path: Path, version: str) -> None:
    """T26, C115: both requests of a fetch pass in either protocol; a push and another repository are 403 at the first
    request, where nothing has reached the forge, and git's message names the proxy."""
    origin = place.origin("plain")
    names = {"url": origin.url("/o/r.git"), "other": origin.url("/other/r.git"), "folder": str(tmp_path)}

    def git(words: tuple[str, ...]) -> Completed:
        filled = [word.format(**names) for word in words]
        return place.reader.command("git", "-c", f"protocol.version={version}", *IDENTITY, *filled)

    for name, words in READS.items():
        done = git(words)
        assert done.code == 0, (name, done)
    for folder in ("clone", "shallow", "partial"):
        assert (tmp_path / folder / "README.md").read_text() == "hello\n"
    for name, words in BEYOND.items():
        before, seen = len(origin.received), len(place.gateway.settled(sandbox=place.reader.id))
        done = git(words)
        assert done.code != 0, (name, done)
        assert "Exeat" in done.err, (name, done)
        assert len(origin.received) == before, name
        since = place.gateway.settled(seen + 1, sandbox=place.reader.id)[seen:]
        assert [one["event"] for one in since] == ["request.refused"], name


# --- pushes that are permitted ---


def test_a_push_to_the_agents_branch(place: Place, which: str, work: Path, tmp_path: Path) -> None:
    """Expect a branch to be made and moved and a tag to be set, and the records to say which."""
    branch = f"refs/heads/agent/{which}"
    assert place.git(work, "push", "origin", f"HEAD:{branch}").code == 0
    (work / "new.txt").write_text("newer\n")
    assert place.git(work, "commit", "-q", "-a", "-m", "again").code == 0
    done = place.git(work, "push", "--atomic", "origin", f"HEAD:{branch}", f"HEAD:refs/tags/v-{which}")
    assert done.code == 0, done
    head = place.git(work, "rev-parse", "HEAD").out.strip()
    refs = place.refs(which)
    assert refs[branch] == refs[f"refs/tags/v-{which}"] == head
    name = "broker.outcome" if which == "keyed" else "request.outcome"
    stated = {"repository=o/r", f"ref={branch}", f"ref=refs/tags/v-{which}", "change=create", "change=update"}
    place.gateway.awaited(where=lambda one: set(one["arguments"]) == stated, event=name, operation=f"{which}/git.push")


def test_a_large_push_streams(place: Place, which: str, work: Path, tmp_path: Path) -> None:
    """C082: a pack of 20 MB, which git sends in chunks, arrives whole behind the judged commands, and comes back."""
    (work / "noise.bin").write_bytes(os.urandom(20_000_000))
    assert place.git(work, "add", ".").code == 0
    assert place.git(work, "commit", "-q", "-m", "noise").code == 0
    done = place.git(work, "push", "origin", f"HEAD:refs/heads/agent/large-{which}")
    assert done.code == 0, done
    assert place.refs(which)[f"refs/heads/agent/large-{which}"] == place.git(work, "rev-parse", "HEAD").out.strip()
    sent = max((one for one in place.origin(which).received if one.method == "POST"), key=lambda one: one.body_bytes)
    assert sent.body_bytes > 19_000_000
    assert sent.header("transfer-encoding") == "chunked"
    back = place.clone(which, tmp_path / "back", "--progress", "--branch", f"agent/large-{which}")
    assert back.code == 0, back
    assert "remote: Counting objects" in back.err
    assert (tmp_path / "back/noise.bin").read_bytes() == (work / "noise.bin").read_bytes()


def test_a_large_push_to_another_branch_is_refused(place: Place, which: str, work: Path) -> None:
    """Expect the commands to decide also where the pack could not be held."""
    (work / "noise.bin").write_bytes(os.urandom(3_000_000))
    assert place.git(work, "add", ".").code == 0
    assert place.git(work, "commit", "-q", "-m", "noise").code == 0
    before = place.refs(which)
    assert place.git(work, "push", "origin", "HEAD:refs/heads/main").code != 0
    assert place.refs(which) == before


def test_a_push_with_the_placeholder_as_password(place: Place, tmp_path: Path) -> None:
    """C093: Basic with the placeholder reaches the forge with the key, and a key of the client is refused."""
    folder = tmp_path / "work"
    assert place.clone("keyed", folder).code == 0
    assert place.git(folder, "commit", "-q", "--allow-empty", "-m", "mine").code == 0
    before = place.refs("keyed")
    for password, works in (("sandbox-brought-this", False), (place.box.placeholders["FORGE_KEY"], True)):
        basic = base64.b64encode(f"agent:{password}".encode()).decode()
        header = f"http.extraHeader=Authorization: Basic {basic}"
        pushed = place.git(folder, "-c", header, "push", "origin", "HEAD:refs/heads/agent/basic")
        assert (pushed.code == 0) is works, pushed
        assert ("refs/heads/agent/basic" in place.refs("keyed")) is works
    assert before.items() <= place.refs("keyed").items()


def test_the_same_over_http_2(place: Place, tmp_path: Path) -> None:
    """Expect git over HTTP/2 to clone, to be refused a branch, and to push a pack that streams."""
    folder = tmp_path / "work"
    assert place.clone("two", folder, "-c", "http.version=HTTP/2").code == 0
    (folder / "noise.bin").write_bytes(os.urandom(5_000_000))
    assert place.git(folder, "add", ".").code == 0
    assert place.git(folder, "commit", "-q", "-m", "noise").code == 0
    before = place.refs("two")
    assert place.git(folder, "push", "origin", "HEAD:refs/heads/main").code != 0
    assert place.refs("two") == before
    pushed = place.git(folder, "push", "origin", "HEAD:refs/heads/agent/two")
    assert pushed.code == 0, pushed
    assert place.refs("two")["refs/heads/agent/two"] == place.git(folder, "rev-parse", "HEAD").out.strip()
    records = place.gateway.awaited(event="request.outcome", operation="two/git.push")
    assert {one["lane"] for one in records} == {"mitm"}


# --- fetches ---


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-c", "protocol.version=0"),
        ("-c", "protocol.version=1"),
        ("--depth", "1"),
        ("--filter=blob:none",),
        ("--depth", "1", "-c", "protocol.version=0"),
        ("--single-branch", "--branch", "main"),
    ],
    ids=["v2", "v0", "v1", "shallow", "partial", "shallow-v0", "one-branch"],
)
def test_clone_and_fetch(place: Place, which: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Expect clones of every kind, and a fetch afterwards, in each version of the protocol."""
    folder = tmp_path / "clone"
    cloned = place.clone(which, folder, *options)
    assert cloned.code == 0, cloned
    assert (folder / "README.md").read_text() == "hello\n"
    fetched = place.git(folder, "fetch", "-q", "origin")
    assert fetched.code == 0, fetched


def test_a_long_compressed_question_arrives_as_git_made_it(place: Place, which: str, tmp_path: Path) -> None:
    """C058: over a kilobyte of wants git compresses its body; also where a key is put in, the forge can read it."""
    bare = place.folders[which] / "o" / "many.git"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(bare)], check=True)
    people = "committer Test <test@example.test> 1700000000 +0000\n"
    branches = "".join(f"commit refs/heads/b{n}\n{people}data 2\n{n:02}\n" for n in range(60))
    stream = f"{branches}reset refs/heads/main\nfrom refs/heads/b0\n"
    config = ["-c", "safe.directory=*", "-C", str(bare)]
    subprocess.run(["git", *config, "fast-import", "--quiet"], input=stream.encode(), check=True)
    before = len(place.origin(which).received)
    url = place.origin(which).url("/o/many.git")
    done = place.box.command("git", "clone", "-q", "--bare", url, str(tmp_path / "many.git"))
    assert done.code == 0, done
    asked = [one for one in place.origin(which).received[before:] if one.header("content-encoding") == "gzip"]
    assert asked
    assert sum(len(one.body) for one in asked) > 1000
    listed = place.box.command("git", "-C", str(tmp_path / "many.git"), "branch", "--list", "b*")
    assert len(listed.out.split()) == 60


def test_git_needs_the_proxys_url_and_no_setting_of_its_own(place: Place) -> None:
    """C011: git asks without a token first; the 407 offers Basic, and git asks again with what the URL holds."""
    bundle = str(place.gateway.client_files / "bundle.pem")
    words = ["git", "ls-remote", place.origin("plain").url("/o/r.git")]
    environment = {
        "https_proxy": place.reader.proxy_url,
        "GIT_SSL_CAINFO": bundle,
        "PATH": os.environ["PATH"],
        "HOME": str(place.gateway.home),
    }
    done = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done
    assert b"refs/heads/main" in done.stdout


@pytest.mark.skipif(shutil.which("git-lfs") is None, reason="git-lfs is not installed")
def test_lfs_up_and_down(place: Place, which: str, tmp_path: Path) -> None:
    """Expect git-lfs to store what a push refers to and to get it back; a repository of no rule is refused."""
    folder = tmp_path / "lfs"
    assert place.clone(which, folder).code == 0
    assert place.git(folder, "lfs", "install", "--local").code == 0
    assert place.git(folder, "lfs", "track", "*.bin").code == 0
    content = os.urandom(50_000)
    (folder / "a.bin").write_bytes(content)
    assert place.git(folder, "add", ".").code == 0
    assert place.git(folder, "commit", "-q", "-m", "large").code == 0
    refused = place.git(folder, "lfs", "push", place.origin(which).url("/other/r.git"), "main")
    assert refused.code != 0
    assert "Exeat" in refused.out + refused.err, refused
    assert not place.lfs[which].objects
    pushed = place.git(folder, "push", "origin", "HEAD:refs/heads/agent/lfs")
    assert pushed.code == 0, pushed
    assert list(place.lfs[which].objects.values()) == [content]
    again = tmp_path / "again"
    assert place.clone(which, again, "--branch", "agent/lfs").code == 0
    assert place.git(again, "lfs", "install", "--local").code == 0
    pulled = place.git(again, "lfs", "pull")
    assert pulled.code == 0, pulled
    assert (again / "a.bin").read_bytes() == content


def test_a_forges_own_tokens_stay_with_the_broker(place: Place, tmp_path: Path) -> None:
    """Expect the batch answer of a credentialed call without the header that the forge made for the object."""
    body = {"operation": "upload", "objects": [{"oid": "c" * 64, "size": 7}], "transfers": ["basic"]}
    asked = place.box.curl(
        *("-H", "Content-Type: application/vnd.git-lfs+json", "-H", "Accept: application/vnd.git-lfs+json"),
        *("-d", json.dumps(body), place.origin("keyed").url("/o/r.git/info/lfs/objects/batch")),
    )
    (one,) = asked.json()["objects"]
    href = place.origin("keyed").url(f"/o/r.git/info/lfs/objects/{'c' * 64}")
    assert one == {"oid": "c" * 64, "size": 7, "actions": {"upload": {"href": href}}}
    assert "minted" not in asked.out
