"""Nothing is ever taken from the folder that a command is started in, unless its path was typed (RULINGS 1.4, I24).

Every sub-command runs in a folder full of traps: modules with our rooms' and libraries' names, settings, policies,
.env, .netrc, configuration of other tools. A module tells on itself by writing a marker when it is imported; for
everything else the kernel tells (inotify) when a file of the folder is opened.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from exeat.cli import app
from tests.support.gateway import EXEAT, PATH, TestGateway

pytestmark = [pytest.mark.xdist_group("traps"), pytest.mark.slow]

PACKAGES = ("audit", "rules", "wire", "net", "state", "broker", "proxy", "exeat", "rich", "typer", "cryptography")
MODULES = ("sitecustomize", "usercustomize", "yaml", "orjson", "json", "ssl", "socket", "uvloop", "secrets", "logging")
DATA = {
    "exeat.yaml": "version: 1\nlisten: 127.0.0.1:1\nstate: /tmp/trapped\npolicy: policy.yaml\n",
    "policy.yaml": "version: 1\nroles:\n  trapped:\n    allow: [{host: trapped.test, tunnel: true, reason: trap}]\n",
    "credentials.yaml": "version: 1\ncredentials: {}\n",
    ".env": "EXEAT_CONFIG=trap\nPATH=/trap\n",
    ".netrc": "default login trap password trap\n",
    "_netrc": "default login trap password trap\n",
    "pip.conf": "[global]\nindex-url = http://trapped.test/\n",
    ".pip/pip.conf": "[global]\nindex-url = http://trapped.test/\n",
    ".gitconfig": "[http]\nproxy = http://trapped.test\n",
    ".git/config": "[core]\nsshCommand = trap\n",
    "gitconfig": "[http]\nproxy = http://trapped.test\n",
    ".curlrc": "proxy = http://trapped.test\n",
    ".npmrc": "registry=http://trapped.test/\n",
    "pyproject.toml": "[tool.exeat]\nconfig = 'trap'\n",
    "pyvenv.cfg": "home = /trap\n",
    "setup.cfg": "[exeat]\n",
    "services/trapped.yaml": "name: trapped\n",
    "keys/store.key": "00" * 32 + "\n",
    ".config/exeat/exeat.yaml": "version: 1\nstate: /tmp/trapped\n",
    "__main__.py": "raise SystemExit('trapped')\n",
    "lib.pth": "import trapped\n",
    "openssl.cnf": "trap = trap\n",
    "resolv.conf": "nameserver 192.0.2.1\n",
}

# Each command as a user types it; {config}, {dir}, {log} are the paths that he does type.
COMMANDS: dict[str, tuple[str, ...]] = {
    "init": ("--dir", "{dir}"),
    "serve": ("auditor", "--config", "{config}", "--digest-key", "{dir}/none"),
    "run": ("--config", "{config}", "--", "/bin/true"),
    "demo": (),
    "env": ("--config", "{config}"),
    "status": ("--config", "{config}"),
    "why": ("no-rule", "--config", "{config}"),
    "version": (),
    "sandbox create": ("--config", "{config}"),
    "sandbox list": ("--config", "{config}"),
    "sandbox show": ("sb_none", "--config", "{config}"),
    "sandbox end": ("sb_none", "--config", "{config}"),
    "sandbox thaw": ("sb_none", "--config", "{config}"),
    "sandbox prove": ("sb_none", "--capture", "exqtrap", "--netns", "{dir}/none", "--config", "{config}"),
    "doctor": ("--outside", "--config", "{config}"),
    "secret add": ("trap-test", "--config", "{config}"),
    "secret rotate": ("trap-test", "--config", "{config}"),
    "secret check": ("--config", "{config}"),
    "secret sync": ("--config", "{config}"),
    "store rotate-key": ("--config", "{config}"),
    "store wrap-key": ("--from", "{dir}/none", "--config", "{config}"),
    "backup": ("{dir}.backup", "--config", "{config}"),
    "restore": ("{dir}/none", "--config", "{config}"),
    "scan": ("{config}", "--config", "{config}"),
    "secret list": ("--config", "{config}"),
    "secret remove": ("trap-test", "--config", "{config}"),
    "policy check": ("--config", "{config}"),
    "policy test": ("--config", "{config}"),
    "policy explain": ("GET", "https://x.test/", "--config", "{config}"),
    "policy schema": (),
    "policy import": ("openapi", "{dir}/none.json", "--name", "trap-test"),
    "policy show": ("--config", "{config}"),
    "policy reload": ("--config", "{config}"),
    "audit tail": ("--once", "--config", "{config}"),
    "audit search": ("--config", "{config}"),
    "audit show": ("req_none", "--config", "{config}"),
    "audit verify": ("--config", "{config}"),
    "ca show": ("--config", "{config}"),
    "clock reset": ("--config", "{config}", "--why", "a test"),
    "capture print": ("--interface", "exqtrap=198.19.0.1/30"),
    "capture apply": ("--forget", "exqtrap"),
    "capture check": (),
    "capture tap": ("exqtrap",),
    "capture docker": ("-",),
}
TYPED_ELSEWHERE = {"up"}
"""It runs for the whole module, started in the trap folder."""


class Traps:
    """The folder, and what was touched of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = folder.parent / "imported"
        tell = f"open({str(self.marker)!r}, 'a').write(__name__ + '\\n')\n"
        for name in PACKAGES:
            (folder / name).mkdir(parents=True)
            (folder / name / "__init__.py").write_text(tell)
            (folder / name / "__main__.py").write_text(tell)
        for name in MODULES:
            (folder / f"{name}.py").write_text(tell)
        for name, text in DATA.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._inotify = _Inotify()
        for directory in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            self._inotify.watch(directory)

    def touched(self) -> list[str]:
        """Files of the folder that were opened since the last call, and modules that were imported."""
        imported = self.marker.read_text().split() if self.marker.exists() else []
        self.marker.unlink(missing_ok=True)
        return sorted(set(self._inotify.opened())) + imported

    def close(self) -> None:
        self._inotify.close()


class _Inotify:
    """The kernel's word on what was opened (inotify(7))."""

    IN_OPEN = 0x20
    IN_ISDIR = 0x40000000

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0
        self._watched: dict[int, Path] = {}

    def watch(self, folder: Path) -> None:
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), self.IN_OPEN)
        assert number >= 0, folder
        self._watched[number] = folder

    def opened(self) -> Iterator[str]:
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _cookie, length = struct.unpack_from("iIII", data, at)
                name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                at += 16 + length
                if name and not mask & self.IN_ISDIR:
                    yield str(self._watched[number] / name)

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traps]:
    made = Traps(tmp_path_factory.mktemp("outer") / "traps")
    yield made
    made.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, traps: Traps) -> Iterator[TestGateway]:
    """`exeat up`, itself started in the trap folder."""
    policy = 'roles:\n  agent:\n    allow:\n      - {name: x, host: x.test, methods: [GET], paths: ["/**"]}\n'
    folder = tmp_path_factory.mktemp("gateway")
    made = TestGateway(folder, policy=policy)
    made.home.rmdir()
    made.home.symlink_to(traps.folder)  # TestGateway starts everything in its home
    with made:
        yield made


def environment(home: Path) -> dict[str, str]:
    return {"PATH": PATH, "HOME": str(home), "LANG": "C.UTF-8"}


def test_the_traps_work(traps: Traps) -> None:
    """The control: a program that does take from its folder is told on, by marker and by kernel."""
    traps.touched()
    command = [sys.executable, "-c", "import audit; open('.env').read()"]
    subprocess.run(command, cwd=traps.folder, env=environment(traps.folder), check=True, timeout=60)
    touched = traps.touched()
    assert "audit" in touched
    assert str(traps.folder / ".env") in touched


def test_every_command_is_in_the_table() -> None:
    """A new sub-command is tried too."""
    root = typer.main.get_command(app)
    names: set[str] = set()
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        names |= {f"{name} {one}" for one in inner} if inner else {name}
    assert names == set(COMMANDS) | TYPED_ELSEWHERE


def test_the_gateway_takes_nothing_from_the_folder_it_is_started_in(traps: Traps, gateway: TestGateway) -> None:
    """`exeat up` and all its processes, through stop, start, a sandbox and a reload: no trap is touched."""
    traps.touched()
    gateway.stop()
    gateway.start()
    gateway.sandbox()
    gateway.reload()
    assert traps.touched() == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_nothing_from_the_folder_it_is_started_in(
    traps: Traps, gateway: TestGateway, tmp_path: Path, name: str
) -> None:
    """With the paths that it needs typed out: no module and no file of the folder is loaded."""
    filled = [
        item.format(config=gateway.settings_file, dir=tmp_path / "new", log=gateway.log) for item in COMMANDS[name]
    ]
    traps.touched()
    done = subprocess.run(
        [EXEAT, *name.split(), *filled],
        cwd=traps.folder,
        env=environment(tmp_path),
        input=b"a-secret-value-0123456789\n",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert traps.touched() == []
    assert b"trapped" not in done.stdout + done.stderr
    assert b"Traceback" not in done.stderr, done.stderr.decode()


@pytest.mark.parametrize(
    "name", ["status", "env", "policy check", "policy explain", "sandbox list", "secret add", "audit verify"]
)
def test_a_command_without_a_path_does_not_look_around(traps: Traps, tmp_path: Path, name: str) -> None:
    """With nothing typed, only the configuration folder counts: what lies here is not found, even as a last resort."""
    bare = [item for item in COMMANDS[name] if "{" not in item and item != "--config"]
    traps.touched()
    done = subprocess.run(
        [EXEAT, *name.split(), *bare],
        cwd=traps.folder,
        env=environment(tmp_path) | {"XDG_CONFIG_HOME": ".config", "XDG_STATE_HOME": "state"},
        input=b"a-secret-value-0123456789\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert traps.touched() == []
    assert b"trapped" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [
        [str(Path(EXEAT).with_name("exeat-verify")), "{log}"],
        [sys.executable, "-I", "-m", "audit", "verify", "{log}"],
        [sys.executable, "-I", "-m", "exeat", "version"],
    ],
    ids=["script", "module", "exeat"],
)
def test_the_documented_verifiers_take_nothing_from_their_folder(
    traps: Traps, gateway: TestGateway, tmp_path: Path, command: list[str]
) -> None:
    """A verifier that loaded a look-alike of itself would say anything."""
    filled = [item.format(log=gateway.log) for item in command]
    traps.touched()
    done = subprocess.run(
        filled, cwd=traps.folder, env=environment(tmp_path), capture_output=True, timeout=60, check=False
    )
    assert traps.touched() == []
    assert done.returncode == 0, done.stderr.decode()
