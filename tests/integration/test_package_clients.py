"""apt and cargo, unmodified, through the services that describe their archives: what they read passes, the rest not.

The archive and the registry are origins here, described as a user would describe mirrors of his own. apt speaks plain
HTTP and writes some letters of file names in percent form; cargo asks a sparse index and then the registry for files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.entries import Entry, entry_of
from tests.support.gateway import TestGateway
from tests.support.origins import Exchange, Origin
from tests.support.programs import program
from tests.support.registries import answering

pytestmark = pytest.mark.xdist_group("package-clients")

PACKAGE = b"!<arch>\nnot a package, but the very bytes that the index names\n"
POOL = "pool/main/h/hello++/hello++_1.0~beta+1_all.deb"


async def missing(exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.answer(404, b"", ())


def serve_archive(origin: Origin) -> None:
    """A Debian archive of one package, unsigned: users of this test trust it by name."""
    digest = hashlib.sha256(PACKAGE).hexdigest()
    packages = (
        "Package: hello++\nVersion: 1.0~beta+1\nArchitecture: all\nMaintainer: Nobody <nobody@example.test>\n"
        f"Filename: {POOL}\nSize: {len(PACKAGE)}\nSHA256: {digest}\nDescription: says hello\n\n"
    ).encode()
    release = (
        "Suite: stable\nCodename: stable\nComponents: main\nArchitectures: all amd64 arm64\nSHA256:\n"
        f" {hashlib.sha256(packages).hexdigest()} {len(packages)} main/binary-all/Packages\n"
        f" {hashlib.sha256(b'').hexdigest()} 0 main/binary-amd64/Packages\n"
        f" {hashlib.sha256(b'').hexdigest()} 0 main/binary-arm64/Packages\n"
    ).encode()
    origin.on("/debian/dists/*", missing)
    origin.on("/debian/dists/stable/Release", answering(release, "text/plain"))
    origin.on("/debian/dists/stable/main/binary-all/Packages", answering(packages, "text/plain"))
    origin.on("/debian/pool/*", answering(PACKAGE, "application/octet-stream"))


def make_crate() -> bytes:
    """exeat_hello 1.0.0: one function."""
    files = {
        "Cargo.toml": '[package]\nname = "exeat_hello"\nversion = "1.0.0"\nedition = "2021"\n',
        "src/lib.rs": 'pub fn greeting() -> &\'static str { "hello from cargo" }\n',
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"exeat_hello-1.0.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def serve_crates(origin: Origin) -> None:
    """A sparse registry with one crate, which its index keeps under its first letters."""
    crate = make_crate()
    config = {"dl": f"{origin.base}/api/v1/crates", "api": origin.base}
    row = {
        "name": "exeat_hello",
        "vers": "1.0.0",
        "deps": [],
        "cksum": hashlib.sha256(crate).hexdigest(),
        "features": {},
        "yanked": False,
    }
    origin.on("/config.json", answering(json.dumps(config).encode(), "application/json"))
    origin.on("/ex/ea/exeat_hello", answering(json.dumps(row).encode() + b"\n", "text/plain"))
    origin.on("/api/v1/crates/exeat_hello/1.0.0/download", answering(crate, "application/gzip"))
    # Cargo asks the index before a publication, when there must be nothing, and after it until there is something.
    published = json.dumps({**row, "name": "mine", "vers": "0.1.0"}).encode() + b"\n"

    async def mine(exchange: Exchange) -> None:
        done = any(received.method == "PUT" and received.complete for received in origin.received)
        await (answering(published, "text/plain") if done else missing)(exchange)

    origin.on("/mi/ne/mine", mine)
    origin.on("/ot/he/other", missing)
    origin.on("/api/v1/crates/new", answering(b'{"warnings": {}}', "application/json"))


@dataclass
class Place:
    archive: Origin
    crates: Origin
    entry: Entry


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        Origin("archive.test", address="127.0.0.75", tls=False).run_in_thread() as archive,
        Origin("crates.test", address="127.0.0.76").run_in_thread() as crates,
    ):
        serve_archive(archive)
        serve_crates(crates)
        policy = f"""
        services:
          local-archive: {{like: debian, base: "{archive.base}"}}
          local-crates: {{like: crates, base: "{crates.base}"}}
        roles:
          agent:
            allow:
              - {{service: [local-archive, local-crates], operations: [read]}}
              - name: release
                service: local-crates
                operations: [publish]
                with: {{crate: mine}}
                client_auth: pass
        """
        with (
            TestGateway(tmp_path_factory.mktemp("packages"), policy=policy, origins=[archive, crates]) as gateway,
            entry_of("token", gateway) as entry,
        ):
            yield Place(archive, crates, entry)


def apt(place: Place, *arguments: str, name: str) -> tuple[int, str, Path]:
    """Run apt-get in a tree of its own under the sandbox's folder; return its code, what it wrote, and the tree."""
    root = place.entry.shared / name
    for folder in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d", "work"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "status").touch()
    (root / "etc/sources.list").write_text(f"deb [trusted=yes] {place.archive.base}/debian stable main\n")
    options = {
        "Dir": str(root),
        "Dir::Etc": str(root / "etc"),
        "Dir::State": str(root / "state"),
        "Dir::State::status": str(root / "status"),
        "Dir::Cache": str(root / "cache"),
        "APT::Sandbox::User": "",
        "APT::Architecture": "amd64",
        "Acquire::Languages": "none",
        "Acquire::Retries": "0",
    }
    flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    script = 'cd "$0" && exec "$@"'
    done = place.entry.command(
        "/bin/sh",
        "-c",
        script,
        str(root / "work"),
        program("apt-get"),
        *flags,
        *arguments,
        env={"APT_CONFIG": "/dev/null"},
    )
    return done.code, done.out + done.err, root


def test_apt_reads_an_archive_and_its_package(place: Place) -> None:
    """Update and download pass, with a name whose plus signs and tilde apt writes in percent form."""
    code, said, _ = apt(place, "update", name="apt")
    assert code == 0, said
    code, said, root = apt(place, "download", "hello++", name="apt")
    assert code == 0, said
    (found,) = (root / "work").glob("*.deb")
    assert found.read_bytes() == PACKAGE
    asked = [received.target for received in place.archive.received if "/pool/" in received.target]
    assert asked
    assert "%7e" in asked[-1].lower()


def test_apt_is_told_of_a_refusal(place: Place) -> None:
    """What lies beside the archive is refused with the phrase that apt prints, and nothing is asked of the origin."""
    before = len(place.archive.received)
    done = place.entry.command("curl", "-sS", "-i", f"{place.archive.base}/debian/indices/Maintainers")
    assert "Refused by Exeat policy" in done.out
    upload = place.entry.command("curl", "-sS", "-i", "-T", "/dev/null", f"{place.archive.base}/debian/{POOL}")
    assert "Refused by Exeat policy" in upload.out
    assert len(place.archive.received) == before


def cargo(place: Place, *arguments: str, name: str = "user") -> tuple[int, str]:
    """Run cargo in a project called `name`, with a home of its own and the local registry; code and what it wrote."""
    home = place.entry.shared / "cargo-home"
    project = place.entry.shared / name
    (project / "src").mkdir(parents=True, exist_ok=True)
    home.mkdir(exist_ok=True)
    (project / "src/lib.rs").write_text("")
    (project / "Cargo.toml").write_text(
        f'[package]\nname = "{name}"\nversion = "0.1.0"\nedition = "2021"\ndescription = "x"\nlicense = "MIT"\n'
        '[dependencies]\nexeat_hello = { version = "1", registry = "local" }\n'
    )
    (home / "config.toml").write_text(f'[registries.local]\nindex = "sparse+{place.crates.base}/"\n')
    environment = {"CARGO_HOME": str(home), "CARGO_NET_RETRY": "0", "CARGO_HTTP_MULTIPLEXING": "false"}
    for name in ("RUSTUP_HOME", "HOME"):
        if name in os.environ:
            environment[name] = os.environ[name]
    script = 'cd "$0" && exec "$@"'
    done = place.entry.command("/bin/sh", "-c", script, str(project), program("cargo"), *arguments, env=environment)
    return done.code, done.out + done.err


def test_cargo_fetches_a_crate(place: Place) -> None:
    """The index entry and the archive pass; cargo checks the one against the other."""
    code, said = cargo(place, "fetch")
    assert code == 0, said
    asked = [received.target for received in place.crates.received]
    assert asked[-2:] == ["/ex/ea/exeat_hello", "/api/v1/crates/exeat_hello/1.0.0/download"]


def test_cargo_shows_why_publishing_is_refused(place: Place) -> None:
    """An upload and a look-up of another crate stay here, and cargo prints the text of the refusal."""
    before = len(place.crates.received)
    code, said = cargo(place, "yank", "--registry", "local", "--token", "cio0000", "--version", "1.0.0", "exeat_hello")
    assert code != 0
    assert "Exeat" in said, said
    assert all(received.method == "GET" for received in place.crates.received[before:])


def test_cargo_publishes_the_crate_that_a_rule_binds_and_no_other(place: Place) -> None:
    """The body's beginning says which crate: the one reaches the registry whole, the other not with one byte."""
    publish = ("publish", "--registry", "local", "--no-verify", "--allow-dirty", "--token", "cio0000")
    before = len(place.crates.received)
    code, said = cargo(place, *publish, name="other")
    assert code != 0
    assert "Exeat" in said, said
    assert all(received.method == "GET" for received in place.crates.received[before:])
    before = len(place.crates.received)
    code, said = cargo(place, *publish, name="mine")
    sent = [received for received in place.crates.received[before:] if received.method == "PUT"]
    assert [received.target for received in sent] == ["/api/v1/crates/new"], said
    assert sent[0].complete
    assert b'"name":"mine"' in bytes(sent[0].raw_body)
    assert code == 0, said
